"""A stand-in for the kubelets of some nodes, which runs each pod as processes of this machine.

It registers the nodes, renews their leases, runs the pods that the scheduler has bound to them, and
serves their logs. A pod has its own network address, process ids, /etc/hosts, /dev/shm and
termination log. Names in /etc/hosts come from EndpointSlices, as those of a cluster's DNS do.

An image is a directory of this machine, of which each pod gets a copy as its working directory.
Only hostPath volumes behind a PersistentVolumeClaim are mounted. CPU, memory and GPUs are counted
by the scheduler, and not enforced.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import http.server
import json
import os
import pathlib
import queue
import shutil
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from tests.networks import Network
from tfdist.runtime.guardian import Guardian

POLL_S = 0.2
HEARTBEAT_S = 1.0
CALL_S = 20.0
JOIN_S = 10.0
CAPACITY = {"cpu": "2", "memory": "8Gi", "pods": "20", "ephemeral-storage": "10Gi"}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# The Job controller waits 10 s, 20 s, ... up to ten minutes after the end of a container that has
# failed. Tests do not wait: the stand-in reports that it has ended earlier.
BACKOFF = datetime.timedelta(minutes=10)
# Prepares the namespaces of a pod: its directory, then SIZE of /dev/shm, then pairs SOURCE TARGET
# of its volumes, `--`, and its command.
PREPARE = f"""
home=$1; size=$2; shift 2
mount --bind "$home/hosts" /etc/hosts
for name in {" ".join(DEVICES)}; do mount --bind "/dev/$name" "$home/dev/$name"; done
mount --rbind "$home/dev" /dev
mount -t tmpfs -o "size=$size" tmpfs /dev/shm
while [ "$1" != -- ]; do mkdir -p "$2"; mount --bind "$1" "$2"; shift 2; done
shift
cd "$home/work" && exec "$@"
"""


class Api:
    """A client of the API server.

    Args:
        server: URL of the API server.
        token: Token of an administrator.
        authority: Path of its certificate.
    """

    def __init__(self, server: str, token: str, authority: pathlib.Path):
        self._server = server
        self._token = token
        self._context = ssl.create_default_context(cafile=str(authority))

    def call(self, method: str, path: str, body: object = None, kind: str = "json") -> Any:
        """Return the answer to a request.

        Args:
            method: Method of HTTP.
            path: Path with its query.
            body: Object that is sent as JSON, or None.
            kind: Type of the content, below `application/`, default "json".
        """
        request = urllib.request.Request(
            self._server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Content-Type": f"application/{kind}",
                "Authorization": f"Bearer {self._token}",
            },
        )
        with urllib.request.urlopen(request, context=self._context, timeout=CALL_S) as answer:
            return json.loads(answer.read() or b"{}")

    def patch(self, path: str, body: object) -> None:
        self.call("PATCH", path, body, "strategic-merge-patch+json")


@dataclasses.dataclass
class Pod:
    """A pod that runs, or has run.

    Attributes:
        manifest: The pod, as it was when it began.
        home: Directory of the pod.
        host: Its host in the network.
        process: Process that holds its namespaces, or None before it starts.
        terminated: When it got SIGTERM, or None.
        lost: Whether its node was lost.
    """

    manifest: dict[str, Any]
    home: pathlib.Path
    host: int
    process: subprocess.Popen | None = None
    terminated: float | None = None
    lost: bool = False

    @property
    def path(self) -> str:
        metadata = self.manifest["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    def signal(self, number: int) -> None:
        """Send a signal to the first process of the pod, as kubelets do."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
                for child in pathlib.Path(children).read_text().split():
                    os.kill(int(child), number)

    def output(self) -> str:
        return (self.home / "log").read_text(errors="replace")


class Kubelet:
    """The kubelets of some nodes.

    Args:
        api: Client of the API server.
        home: Directory for the pods.
        network: Network with a host for each pod that runs at a time.
        hosts: Number of its hosts.
        guardian: Guardian that ends the pods if this process dies.
        port: Free port for the logs of the pods.
        certificate: Path of a certificate with its key.
        images: Directory by the name of an image.
        environ: Environment of all images.
    """

    def __init__(
        self,
        api: Api,
        home: pathlib.Path,
        network: Network,
        hosts: int,
        guardian: Guardian,
        port: int,
        certificate: pathlib.Path,
        images: dict[str, pathlib.Path],
        environ: Mapping[str, str],
    ):
        self.pods: dict[str, Pod] = {}  # by uid
        self.images = images
        self._environ = environ
        self._api = api
        self._home = home
        self._network = network
        self._guardian = guardian
        self._port = port
        self._nodes: set[str] = set()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for host in range(1, hosts + 1):
            self._free.put(host)
        self._names = ""  # lines of /etc/hosts
        self._over = threading.Event()
        self._log_server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", port), type("Handler", (_LogHandler,), {"kubelet": self})
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._log_server.socket = context.wrap_socket(
            self._log_server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._threads = [
            threading.Thread(target=self._log_server.serve_forever),
            threading.Thread(target=self._repeat, args=(self._beat, HEARTBEAT_S)),
            threading.Thread(target=self._repeat, args=(self._sync, POLL_S)),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        self._log_server.shutdown()
        self._log_server.server_close()
        for pod in self.pods.values():
            self._kill(pod)
        for thread in self._threads:
            thread.join(JOIN_S)

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def start_node(self, name: str) -> None:
        """Register a node, and keep it ready."""
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        self._api.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        now = _now()
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "conditions": [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}],
        }
        self._api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        self._nodes.add(name)

    def lose_node(self, name: str) -> None:
        """Cut a node off and end its pods, as a loss of power does."""
        self._nodes.discard(name)
        for pod in self.pods.values():
            if pod.manifest["spec"]["nodeName"] == name and not self._is_over(pod):
                pod.lost = True
                self._network.cut(pod.host)
                self._kill(pod)

    def find(self, namespace: str, name: str) -> Pod | None:
        """Return a pod by its name, or None."""
        for pod in list(self.pods.values()):
            metadata = pod.manifest["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                return pod
        return None

    def _is_over(self, pod: Pod) -> bool:
        return pod.process is not None and pod.process.poll() is not None

    def _kill(self, pod: Pod) -> None:
        if pod.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.process.pid, signal.SIGKILL)

    def _repeat(self, function, interval: float) -> None:
        while not self._over.wait(interval):
            with contextlib.suppress(OSError):  # the API server is slow, or the object is gone
                function()

    def _beat(self) -> None:
        for name in list(self._nodes):
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": {"holderIdentity": name, "renewTime": f"{_now()[:-1]}.000000Z"},
            }
            path = f"{LEASES}/{name}?fieldManager=kubelet"
            self._api.call("PATCH", path, lease, "apply-patch+yaml")

    def _sync(self) -> None:
        self._sync_names()
        for manifest in self._api.call("GET", "/api/v1/pods")["items"]:
            if manifest["spec"].get("nodeName") not in self._nodes:
                continue
            uid = manifest["metadata"]["uid"]
            deleted = "deletionTimestamp" in manifest["metadata"]
            pod = self.pods.get(uid)
            if deleted and (pod is None or self._is_over(pod)):
                with contextlib.suppress(urllib.error.HTTPError):
                    self._remove(manifest)
            elif deleted and pod is not None:
                self._terminate(pod, manifest["metadata"]["deletionGracePeriodSeconds"])
            elif pod is None and manifest["status"]["phase"] == "Pending":
                self._begin(manifest)

    def _sync_names(self) -> None:
        """Write the names of services' pods to the pods' /etc/hosts."""
        lines = []
        for piece in self._api.call("GET", "/apis/discovery.k8s.io/v1/endpointslices")["items"]:
            service = piece["metadata"]["labels"].get("kubernetes.io/service-name")
            for endpoint in piece["endpoints"] or ():
                # Endpoints are ready before their containers if the service publishes them then.
                if service and "hostname" in endpoint and endpoint["conditions"].get("ready"):
                    lines.append(f"{endpoint['addresses'][0]} {endpoint['hostname']}.{service}\n")
        names = "".join(lines)
        if names != self._names:
            self._names = names
            for pod in list(self.pods.values()):
                self._write_hosts(pod)

    def _write_hosts(self, pod: Pod) -> None:
        spec = pod.manifest["spec"]
        own = f"{self._network.address(pod.host)} {_host_name(pod.manifest)}"
        own += f" {spec['hostname']}.{spec['subdomain']}" if "subdomain" in spec else ""
        text = f"127.0.0.1 localhost\n{own}\n{self._names}".encode()
        with open(pod.home / "hosts", "ab") as file:
            # In one piece, and never shorter: the file is mounted, and may be read at any time.
            size = max(len(text), file.tell())
        descriptor = os.open(pod.home / "hosts", os.O_WRONLY)
        with contextlib.closing(os.fdopen(descriptor, "wb", buffering=0)) as file:
            file.write(text.ljust(size, b"\n"))

    def _begin(self, manifest: dict[str, Any]) -> None:
        container = manifest["spec"]["containers"][0]
        image = container["image"]
        if image not in self.images:
            waiting = {
                "reason": "ImagePullBackOff",
                "message": f'Back-off pulling image "{image}": ErrImagePull: not found',
            }
            if not manifest["status"].get("containerStatuses"):
                self._report(manifest, "Pending", {"waiting": waiting})
            return
        home = self._home / manifest["metadata"]["uid"]
        shutil.copytree(self.images[image], home / "work")
        (home / "dev" / "shm").mkdir(parents=True)
        for name in (*DEVICES, "termination-log"):
            (home / "dev" / name).touch()
        (home / "log").touch()
        (home / "dev" / "fd").symlink_to("/proc/self/fd")
        pod = Pod(manifest, home, self._free.get(timeout=CALL_S))
        self._write_hosts(pod)
        self.pods[manifest["metadata"]["uid"]] = pod
        self._threads.append(threading.Thread(target=self._run, args=(pod,)))
        self._threads[-1].start()

    def _run(self, pod: Pod) -> None:
        """Run a pod until it ends, and report its states."""
        spec = pod.manifest["spec"]
        command = spec["containers"][0]["command"]
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        size, volumes = self._volumes(pod.manifest)
        with open(pod.home / "log", "wb") as log:
            pod.process = subprocess.Popen(
                [
                    *self._network.prefix(pod.host),
                    *("unshare", *namespaces, "--propagation", "private", "sh", "-ec", PREPARE),
                    *("pod", str(pod.home), size, *volumes, "--", *command),
                ],
                env=self._environ_of(pod),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guardian.add(pod.process.pid)
        started = _now()
        address = self._network.address(pod.host)
        self._report(pod.manifest, "Running", {"running": {"startedAt": started}}, address)
        code = pod.process.wait()
        self._guardian.remove(pod.process.pid)
        if pod.lost:
            self._network.join(pod.host)
        elif not self.over:
            self._report(pod.manifest, *_ending(pod, started, code), address)
        self._free.put(pod.host)

    def _volumes(self, manifest: dict[str, Any]) -> tuple[str, list[str]]:
        """Return the size of /dev/shm, and source and target of each volume."""
        kinds = {volume["name"]: volume for volume in manifest["spec"].get("volumes", ())}
        size = "64M"
        pairs: list[str] = []
        for mount in manifest["spec"]["containers"][0].get("volumeMounts", ()):
            volume = kinds[mount["name"]]
            if mount["mountPath"] == "/dev/shm":
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
            else:
                namespace = manifest["metadata"]["namespace"]
                claim = volume["persistentVolumeClaim"]["claimName"]
                path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}"
                name = self._api.call("GET", path)["spec"]["volumeName"]
                source = self._api.call("GET", f"/api/v1/persistentvolumes/{name}")
                pairs += [source["spec"]["hostPath"]["path"], mount["mountPath"]]
        return size, pairs

    def _environ_of(self, pod: Pod) -> dict[str, str]:
        environ = {
            **self._environ,
            "HOSTNAME": _host_name(pod.manifest),
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        }
        for entry in pod.manifest["spec"]["containers"][0].get("env", ()):
            if "valueFrom" not in entry:
                environ[entry["name"]] = entry.get("value", "")
                continue
            if "secretKeyRef" in entry["valueFrom"]:
                environ |= self._secret_of(entry, pod.manifest["metadata"]["namespace"])
                continue
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]  # metadata.labels['KEY']
            field, _, key = path.removeprefix("metadata.").partition("['")
            environ[entry["name"]] = pod.manifest["metadata"][field].get(key[:-2], "")
        return environ

    def _secret_of(self, entry: dict[str, Any], namespace: str) -> dict[str, str]:
        """Return a variable whose value a Secret has, or nothing if the Secret may be missing."""
        reference = entry["valueFrom"]["secretKeyRef"]
        try:
            path = f"/api/v1/namespaces/{namespace}/secrets/{reference['name']}"
            value = self._api.call("GET", path)["data"][reference["key"]]
        except urllib.error.HTTPError as error:
            if error.code == 404 and reference.get("optional"):
                return {}
            raise
        return {entry["name"]: base64.b64decode(value).decode()}

    def _terminate(self, pod: Pod, grace: float) -> None:
        if pod.terminated is None:
            pod.terminated = time.monotonic()
            pod.signal(signal.SIGTERM)
        elif time.monotonic() - pod.terminated > grace:
            pod.signal(signal.SIGKILL)

    def _remove(self, manifest: dict[str, Any]) -> None:
        """Remove a deleted pod, which has ended or never begun."""
        metadata = manifest["metadata"]
        if metadata["uid"] not in self.pods:
            self._report(manifest, "Failed", {"terminated": {"exitCode": 137, "reason": "Error"}})
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        self._api.call("DELETE", path, options)

    def _report(
        self, manifest: dict[str, Any], phase: str, state: Mapping[str, Any], address: str = ""
    ) -> None:
        """Report the state of a pod's only container."""
        metadata = manifest["metadata"]
        container = manifest["spec"]["containers"][0]
        ready = "True" if phase == "Running" else "False"
        status: dict[str, Any] = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "conditions": [
                {"type": kind, "status": ready, "lastTransitionTime": _now()}
                for kind in ("Ready", "ContainersReady")
            ],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": phase == "Running",
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        if address:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        with contextlib.suppress(urllib.error.HTTPError):  # it was removed meanwhile
            self._api.patch(path, {"metadata": {"uid": metadata["uid"]}, "status": status})


class _LogHandler(http.server.BaseHTTPRequestHandler):
    """Serves `/containerLogs/NAMESPACE/POD/CONTAINER`, of which `kubectl logs` asks."""

    kubelet: Kubelet

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        _, kind, namespace, name, *_ = url.path.split("/")
        pod = self.kubelet.find(namespace, name) if kind == "containerLogs" else None
        if pod is None:
            message = f'container "worker" in pod "{name}" is waiting to start'
            self.send_response(400)
            self.end_headers()
            self.wfile.write(message.encode())
            return
        self.send_response(200)
        self.end_headers()
        follow = urllib.parse.parse_qs(url.query).get("follow") == ["true"]
        with open(pod.home / "log", "rb") as log, contextlib.suppress(OSError):
            while True:
                ended = pod.process is not None and pod.process.poll() is not None
                if text := log.read():
                    self.wfile.write(text)
                elif ended or not follow or self.kubelet.over:
                    return
                else:
                    time.sleep(POLL_S)

    def log_message(self, *_: object) -> None:
        pass


def _ending(pod: Pod, started: str, code: int) -> tuple[str, dict[str, Any]]:
    """Return the phase and the state of a container that has ended."""
    code = code if code >= 0 else 128 - code
    message = (pod.home / "dev" / "termination-log").read_text(errors="replace")
    state = {
        "exitCode": code,
        "reason": "Completed" if code == 0 else "Error",
        "message": message[:4096],
        "startedAt": started,
        "finishedAt": _now(BACKOFF if code else datetime.timedelta()),
    }
    return "Failed" if code else "Succeeded", {"terminated": state}


def _host_name(manifest: dict[str, Any]) -> str:
    return manifest["spec"].get("hostname", manifest["metadata"]["name"])


def _now(ago: datetime.timedelta = datetime.timedelta()) -> str:
    return (datetime.datetime.now(datetime.timezone.utc) - ago).strftime("%Y-%m-%dT%H:%M:%SZ")
