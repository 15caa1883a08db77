"""Run a real TensorBoard server on a directory of logs, until the end of a block.

Tests ask it over HTTP and look at it with a browser.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.processes import PYTHON, group

TIMEOUT_S = 90  # for the server to start, or one answer; two to ten on an idle machine
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@dataclasses.dataclass(frozen=True)
class Server:
    """Query a TensorBoard at `url`, which has no final slash."""

    url: str

    def get(self, path: str, **query: str) -> bytes:
        """Return the answer to `/data/PATH?QUERY`."""
        words = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{self.url}/data/{path}?{words}", timeout=TIMEOUT_S) as answer:
            return answer.read()

    def json(self, path: str, **query: str) -> Any:
        """Return the answer to `/data/PATH?QUERY`, read as JSON."""
        return json.loads(self.get(path, **query))

    def post(self, path: str, value: Any) -> Any:
        """Post a JSON object, and return the answer, read as JSON."""
        request = urllib.request.Request(
            f"{self.url}/data/{path}",
            json.dumps(value).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())

    def picture(self, tab: str, path: pathlib.Path, size: str = "1400,900") -> bytes:
        """Return a PNG of a tab, such as "timeseries"."""
        assert BROWSER is not None
        profile = path.with_suffix(".profile")
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            f"--window-size={size}",
        ]
        flags += ["--virtual-time-budget=20000", f"--screenshot={path}"]
        try:
            subprocess.run(
                [BROWSER, *flags, f"{self.url}/#{tab}"],
                check=True,
                timeout=TIMEOUT_S,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            shutil.rmtree(profile, ignore_errors=True)
        return path.read_bytes()


@contextlib.contextmanager
def serving(logdir: pathlib.Path, scratch: pathlib.Path, runs: int = 1) -> Iterator[Server]:
    """Yield a server that has read at least so many runs; its log is in `scratch`."""
    with group(scratch) as members:
        words = [
            "--logdir",
            str(logdir),
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--reload_interval",
            "1",
        ]
        members.start("tensorboard", [PYTHON, "-m", "tensorboard.main", *words])
        members.says("tensorboard", r"at http://127\.0\.0\.1:\d+/", TIMEOUT_S)
        match = re.search(r"at (http://127\.0\.0\.1:\d+)/", members.log("tensorboard"))
        assert match
        server = Server(match[1])
        end = time.monotonic() + TIMEOUT_S
        while len(server.json("runs")) < runs:
            assert time.monotonic() < end, f"{server.json('runs')}\n{members.logs()}"
            time.sleep(0.2)
        yield server
