"""Local mirror of an object store's directory, for programs that write only local files."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading

from tfdist.storage import files


class Mirror:
    """Local directory whose files are uploaded to a URL.

    Args:
        url: URL of the directory.

    Attributes:
        url: URL of the directory.
        local: Path of the local directory, which is removed when the process ends.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.local = tempfile.mkdtemp(prefix="tfdist-mirror-")
        atexit.register(shutil.rmtree, self.local, ignore_errors=True)
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def pull(self, *directories: str) -> None:
        """Download the files of some directories that the mirror lacks.

        Args:
            *directories: Paths below the URL.
        """
        for directory in directories:
            url = f"{self.url}/{directory}"
            if not files.is_dir(url):
                continue
            os.makedirs(os.path.join(self.local, directory), exist_ok=True)
            for name in files.list_dir(url):
                path = os.path.join(self.local, directory, name)
                if not os.path.exists(path) and not files.is_dir(f"{url}/{name}"):
                    files.download(f"{url}/{name}", path)
                    self._uploaded[os.path.join(directory, name)] = _version(path)

    def push(self) -> None:
        """Upload the files that have changed since the last call, and remove those that are gone.

        Only files that this mirror has uploaded or downloaded are removed.
        """
        with self._lock:
            present = set()
            for root, _, names in os.walk(self.local):
                for name in names:
                    path = os.path.join(root, name)
                    relative = os.path.relpath(path, self.local)
                    present.add(relative)
                    version = _version(path)
                    if self._uploaded.get(relative) != version:
                        files.upload(path, f"{self.url}/{relative}")
                        self._uploaded[relative] = version
            for relative in self._uploaded.keys() - present:
                files.remove(f"{self.url}/{relative}")
                del self._uploaded[relative]


def upload_tree(local: str, url: str) -> None:
    """Upload all files of a local directory.

    Args:
        local: Path of the directory.
        url: URL of the directory that the files are written to.
    """
    for root, _, names in os.walk(local):
        for name in names:
            path = os.path.join(root, name)
            files.upload(path, f"{url.rstrip('/')}/{os.path.relpath(path, local)}")


def _version(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
