"""Start object stores for tests: moto's S3 server and a GCS server, both on loopback only.

A server can be asked to fail: to answer 503, late, or to cut connections.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import datetime
import hashlib
import http.client
import http.server
import json
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

START_S = 120  # seconds for the start of a server on a busy machine


class Faults:
    """Faults of the next requests.

    Attributes:
        kind: "" for none; "503", "slow", "cut" (the connection ends within the answer or the
            upload), or "lost" (the request is served, and its answer is lost).
        left: Number of requests that will fail.
        match: Methods that fail, such as "PUT".
        delay: Seconds that "slow" answers wait.
        count: Number of requests by method.
        failed: Number of requests that have failed.
    """

    def __init__(self) -> None:
        self.count: collections.Counter = collections.Counter()
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.plan("", 0)
        self.failed = 0
        self.count.clear()

    def plan(self, kind: str, left: int, match: str = "GET PUT POST HEAD", delay: float = 1.0):
        self.kind, self.left, self.match, self.delay = kind, left, match.split(), delay

    def next(self, method: str) -> str:
        """Count a request, and return the fault that it has."""
        with self._lock:
            self.count[method] += 1
            if not self.left or method not in self.match:
                return ""
            self.left -= 1
            self.failed += 1
            return self.kind


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handler that applies faults; subclasses define `serve(body) -> (status, headers, body)`."""

    protocol_version = "HTTP/1.1"
    faults: Faults

    def log_message(self, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            body = b""
            while size := int(self.rfile.readline().split(b";")[0].strip() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _do(self) -> None:
        fault = self.faults.next(self.command)
        if fault == "cut" and self.command in ("PUT", "POST"):
            self.rfile.read(min(1000, int(self.headers.get("Content-Length") or 0)))
            self.close_connection = True
            self.connection.close()
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self._body()
        if fault == "503":
            self._answer(503, {}, b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>")
            return
        if fault == "slow":
            time.sleep(self.faults.delay)
        status, headers, content = self.serve(body)
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
            return
        self._answer(status, headers, content, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False):
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in (
                    "content-length",
                    "transfer-encoding",
                    "connection",
                    "date",
                ):
                    self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True
                self.connection.close()

    def serve(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        raise NotImplementedError


class Server:
    """HTTP server in threads of this process.

    Attributes:
        url: URL of the server.
        faults: Faults of its next requests.
    """

    def __init__(
        self, handler: type[_Handler], port: int = 0, context: ssl.SSLContext | None = None
    ):
        self.faults = Faults()
        kind = type("Handler", (handler,), {"faults": self.faults})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), kind)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# --- S3 ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """Run moto's S3 server in a process, behind a server that adds faults."""
    code = (
        "import sys, threading\n"
        "from moto.server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)\n"
        "server.start()\n"
        "print(server.get_host_and_port()[1], flush=True)\n"
        "sys.stdin.read()\n"  # until the test's process ends
        "server.stop()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())

        class Handler(_Handler):
            def serve(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in ("content-length", "expect", "transfer-encoding")
                }
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                return answer.status, dict(answer.getheaders()), content

        server = Server(Handler)
        try:
            yield server
        finally:
            server.close()
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


# --- Google Cloud Storage -------------------------------------------------------------------------
class Gcs:
    """Google Cloud Storage in memory, behind one or two servers.

    It has the part of the JSON and XML interfaces that TensorFlow and gcsfs use.

    Attributes:
        buckets: Names of the buckets.
        objects: Content, generation and time of each object, by bucket and name.
    """

    def __init__(self, buckets: tuple[str, ...] = ("bucket",)):
        self.buckets = set(buckets)
        self.objects: dict[tuple[str, str], tuple[bytes, int, str]] = {}
        self._uploads: dict[str, list] = {}
        self._generation = 0
        self._lock = threading.Lock()

    def put(self, key: tuple[str, str], content: bytes, create: bool = False) -> bool:
        """Write an object; return False if it is to be created and exists."""
        with self._lock:
            if create and key in self.objects:
                return False
            self._generation += 1
            now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            self.objects[key] = (content, self._generation, now)
            return True

    def handler(self) -> type[_Handler]:
        """Return the handler of a server's requests."""
        gcs = self

        class Handler(_Handler):
            def serve(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
                status, headers, answer = gcs.answer(self.command, self.path, self.headers, body)
                if not isinstance(answer, bytes):
                    headers = {"Content-Type": "application/json", **headers}
                    answer = json.dumps(answer).encode()
                if self.command == "HEAD":
                    headers = {**headers, "Content-Length": str(len(answer))}
                return status, headers, answer

        return Handler

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, dict, Any]:
        url = urllib.parse.urlparse(target)
        query = {
            key: values[0]
            for key, values in urllib.parse.parse_qs(url.query, keep_blank_values=True).items()
        }
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        create = query.get("ifGenerationMatch") == "0"
        if parts[0] == "upload":
            return self._upload(method, parts, query, headers, body, create)
        if parts[:1] == ["storage"]:
            return self._json(method, parts[3:], query, body)
        if parts[:2] == ["download", "storage"]:
            return self._media((parts[4], "/".join(parts[6:])), headers)
        return self._media((parts[0], "/".join(parts[1:])), headers)

    def _upload(self, method, parts, query, headers, body, create) -> tuple[int, dict, Any]:
        if method == "POST" and "upload_id" not in query:
            bucket = parts[4]
            if bucket not in self.buckets:
                return 404, {}, {"error": {"code": 404, "message": "no such bucket"}}
            if query.get("uploadType") == "multipart":
                metadata, _, rest = body.partition(b"\n\n")[2].partition(b"\n--==0==")
                content = rest.partition(b"\n\n")[2].removesuffix(b"\n--==0==--")
                return self._stored((bucket, json.loads(metadata)["name"]), content, create)
            name = query.get("name") or json.loads(body)["name"]
            with self._lock:
                number = str(len(self._uploads) + 1)
                self._uploads[number] = [(bucket, name), b"", create]
            host = headers.get("Host", "")
            scheme = "http" if ":" in host else "https"
            location = f"{scheme}://{host}/upload/storage/v1/b/{bucket}/o?uploadType=resumable"
            return 200, {"Location": f"{location}&upload_id={number}"}, b""
        if method == "DELETE":
            self._uploads.pop(query["upload_id"], None)
            return 204, {}, b""
        upload = self._uploads[query["upload_id"]]
        place = headers.get("Content-Range", "")
        upload[1] += body
        total = place.rpartition("/")[2]
        if total == "*" or (total.isdigit() and len(upload[1]) < int(total)):
            return 308, {"Range": f"bytes=0-{len(upload[1]) - 1}"}, b""
        return self._stored(*upload)

    def _stored(self, key: tuple[str, str], content: bytes, create: bool) -> tuple[int, dict, Any]:
        if not self.put(key, content, create):
            return 412, {}, {"error": {"code": 412, "message": "exists"}}
        return 200, {}, self._metadata(key)

    def _metadata(self, key: tuple[str, str]) -> dict[str, Any]:
        content, generation, updated = self.objects[key]
        return {
            "kind": "storage#object",
            "bucket": key[0],
            "name": key[1],
            "size": str(len(content)),
            "generation": str(generation),
            "updated": updated,
            "timeCreated": updated,
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "etag": f"e{generation}",
        }

    def _json(self, method, parts, query, body) -> tuple[int, dict, Any]:
        missing = 404, {}, {"error": {"code": 404, "message": "not found"}}
        bucket, rest = parts[0], parts[2:]
        if bucket not in self.buckets:
            return missing
        if len(parts) == 1:
            return 200, {}, {"kind": "storage#bucket", "name": bucket, "location": "LOCAL"}
        if not rest or rest == [""]:
            return 200, {}, self._list(bucket, query)
        for verb in ("rewriteTo", "copyTo"):
            if method == "POST" and verb in rest:
                at = rest.index(verb)
                source = bucket, "/".join(rest[:at])
                if source not in self.objects:
                    return missing
                target = rest[at + 2], "/".join(rest[at + 4 :])
                self.put(target, self.objects[source][0])
                return 200, {}, {"done": True, "resource": self._metadata(target)}
        if method == "POST" and rest[-1] == "compose":
            key = bucket, "/".join(rest[:-1])
            sources = json.loads(body)["sourceObjects"]
            self.put(key, b"".join(self.objects[bucket, x["name"]][0] for x in sources))
            return 200, {}, self._metadata(key)
        key = bucket, "/".join(rest)
        if key not in self.objects:
            return missing
        if method == "DELETE":
            del self.objects[key]
            return 204, {}, b""
        if query.get("alt") == "media":
            return 200, {}, self.objects[key][0]
        return 200, {}, self._metadata(key)

    def _list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        items = []
        prefixes = set()
        for owner, name in sorted(self.objects):
            if owner == bucket and name.startswith(prefix):
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    items.append(self._metadata((bucket, name)))
        limit = int(query.get("maxResults", 1000))
        found: dict[str, Any] = {"kind": "storage#objects"}
        if items:
            found["items"] = items[:limit]
        if prefixes:
            found["prefixes"] = sorted(prefixes)
        return found

    def _media(self, key: tuple[str, str], headers: Any) -> tuple[int, dict, Any]:
        if key not in self.objects:
            return 404, {}, b""
        content = self.objects[key][0]
        wanted = headers.get("Range")
        if not wanted:
            return 200, {}, content
        first, last = wanted.split("=")[1].split("-")
        begin = int(first)
        end = min(int(last) if last else len(content) - 1, len(content) - 1)
        if begin >= len(content):
            return 416, {}, b""
        place = f"bytes {begin}-{end}/{len(content)}"
        return 206, {"Content-Range": place}, content[begin : end + 1]


@contextlib.contextmanager
def gcs() -> Iterator[tuple[Gcs, Server]]:
    """Run a GCS server on loopback, for gcsfs."""
    store = Gcs()
    server = Server(store.handler())
    try:
        yield store, server
    finally:
        server.close()


def s3_environment(server: Server) -> dict[str, str]:
    """Return environment variables with which S3 clients use a server."""
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def gcs_environment(server: Server) -> dict[str, str]:
    """Return environment variables with which gcsfs uses a server."""
    return {
        "STORAGE_EMULATOR_HOST": server.url,
        "GOOGLE_CLOUD_PROJECT": "test",
        "NO_GCE_CHECK": "true",
        # gcsfs would ask Google's server which kind of bucket it is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
