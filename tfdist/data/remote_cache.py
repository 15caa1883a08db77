"""Local cache of remote data files: checksummed, bounded, shared by a host's processes.

A file is fetched whole, into a temporary name, and renamed once it is complete. Its SHA-256 is kept
beside it; a file that was damaged since is fetched again. If the cache is full, the files whose
last use is longest ago are removed. A process holds a shared lock on the files that it is about to
open: such files stay, unless their last use is `UNUSED_S` ago. So a process that does nothing does
not keep others waiting.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from tfdist.data import files_io
from tfdist.runtime import file_cache
from tfdist.runtime.formatting import format_bytes
from tfdist.storage import files
from tfdist.storage.object_store import Stat

# Files that a process has opened last, and holds. A reader opens a file right after `path`: it
# suffices that fewer than these are requested at the same time.
PINS = 64
FETCH_S = 1800.0  # seconds to wait for another process that fetches a file
FULL_S = 90.0  # seconds to wait for other processes that use all files of a full cache
UNUSED_S = 20.0  # time after which a file that a process has asked for has surely been opened
_REFRESH_S = 5.0  # time after which the use of a file is recorded again
_ROOM = 0.9  # part of the bound to which files are removed, so that this happens rarely
_YOUNG_S = 60.0  # age at which a part that nobody holds was left behind by a process that died
_STRIPES = 64  # files that may be fetched at the same time
_DATA = ".data"
_SUM = ".sha256"
_PART = ".part"


def is_cached(path: str) -> bool:
    """Return whether data files at a path are read through the cache: those of object stores."""
    return files.is_object_store(path)


@functools.cache
def _cache(directory: str, max_bytes: int) -> RemoteCache:
    return RemoteCache(directory, max_bytes)


def of_environment() -> RemoteCache:
    """Return this process's cache, with the directory and bound that the environment sets."""
    return _cache(file_cache.directory(), file_cache.max_bytes())


def local(path: tf.Tensor) -> tf.Tensor:
    """Return the local path of a file in an object store, in a graph; it is fetched if needed.

    Args:
        path: URL of the file, string scalar.
    """
    cache = of_environment()

    def fetch(url: bytes) -> bytes:
        return cache.path(url.decode()).encode()

    return tf.ensure_shape(tf.numpy_function(fetch, [path], tf.string), [])


def content(path: tf.Tensor) -> tf.Tensor:
    """Return the content of a file in an object store, in a graph; it is fetched if needed.

    Args:
        path: URL of the file, string scalar.
    """
    cache = of_environment()
    read = tf.numpy_function(lambda url: cache.read(url.decode()), [path], tf.string)
    return tf.ensure_shape(read, [])


class RemoteCache:
    """Cache of remote files in a local directory.

    Args:
        directory: Directory of the cache. Processes of one host may share it.
        max_bytes: Largest size of all files in it together.
    """

    def __init__(self, directory: str, max_bytes: int):
        self.directory = directory
        self.max_bytes = max_bytes
        self._stats: dict[str, Stat] = {}
        # Descriptor of each file that is held, and the time when its use was recorded.
        self._pins: collections.OrderedDict[str, tuple[int, float]] = collections.OrderedDict()
        self._verified: dict[str, tuple[int, int, int]] = {}
        self._mutex = threading.Lock()

    def check_fits(self, urls: list[str]) -> None:
        """Raise ValueError unless files fit into the cache together.

        Args:
            urls: URLs of the files.
        """
        total = sum(self._stat(url).size for url in urls)
        if total > self.max_bytes:
            raise ValueError(
                f'access="random": the files hold {format_bytes(total)}, and the local cache '
                f"{self.directory} may hold {format_bytes(self.max_bytes)}: each step would fetch "
                f'files again. Set {file_cache.BYTES} to more, or pass access="stream".'
            )

    def path(self, url: str) -> str:
        """Return the local path of a file, which is fetched if it is not in the cache.

        The file stays until this process has requested `PINS` others.

        Args:
            url: URL of the file.

        Raises:
            OSError: If the file cannot be fetched.
            ValueError: If the file is larger than the cache, or the store cannot be used.
        """
        stat = self._stat(url)
        path = self._path(url, stat)
        if self._pin(path):
            return path
        os.makedirs(os.path.dirname(path), exist_ok=True)
        stripe = int(os.path.basename(path)[:8], 16) % _STRIPES
        lock = os.path.join(self.directory, f"fetch-{stripe}.lock")
        while True:
            with files_io.locked(lock, FETCH_S, f"fetching {url}"):
                if self._pin(path):  # another process or thread has fetched it
                    return path
                self._fetch(url, stat, path)
                if self._pin(path):
                    return path

    def read(self, url: str) -> bytes:
        """Return the content of a file, which is fetched if it is not in the cache.

        Args:
            url: URL of the file.
        """
        with open(self.path(url), "rb") as file:
            return file.read()

    def _stat(self, url: str) -> Stat:
        """Return size and version of a file when this process first asked for it."""
        if url not in self._stats:
            self._stats[url] = files.stat(url)
        return self._stats[url]

    def _path(self, url: str, stat: Stat) -> str:
        key = hashlib.sha256(f"{url}\n{stat.size}\n{stat.version}".encode()).hexdigest()[:40]
        return os.path.join(self.directory, key[:2], key + _DATA)

    # --- Use --------------------------------------------------------------------------------------
    def _pin(self, path: str) -> bool:
        """Hold a file so that no process removes it; return False if it is missing or damaged."""
        with self._mutex:
            held = self._pins.get(path)
            if (
                held is not None
                and time.monotonic() - held[1] < _REFRESH_S
                and _is_at(held[0], path)
            ):
                self._pins.move_to_end(path)
                return True
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not self._is_whole(descriptor, path) or not self._record_use(descriptor, path):
            os.close(descriptor)
            return False
        with self._mutex:
            dropped = [self._pins.pop(path)] if path in self._pins else []
            self._pins[path] = descriptor, time.monotonic()
            while len(self._pins) > PINS:
                dropped.append(self._pins.popitem(last=False)[1])
        for each, _ in dropped:
            os.close(each)
        return True

    def _record_use(self, descriptor: int, path: str) -> bool:
        """Record that a file is used now; return False if it is no longer there.

        No process removes files meanwhile.
        """
        with self._use(fcntl.LOCK_SH):
            if not _is_at(descriptor, path):
                return False
            found = os.fstat(descriptor)
            with contextlib.suppress(OSError):
                os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))
        return True

    @contextlib.contextmanager
    def _use(self, kind: int) -> Iterator[None]:
        """Hold the lock that separates removals, exclusive, from uses, shared."""
        with open(os.path.join(self.directory, "use.lock"), "a+b") as file:
            fcntl.flock(file, kind)
            yield

    def close(self) -> None:
        """Hold no files any more."""
        self._unpin(all_=True)

    def _is_whole(self, descriptor: int, path: str) -> bool:
        """Return whether a file has its checksum; remove it if not. It is read once a process."""
        found = os.fstat(descriptor)
        version = found.st_ino, found.st_size, found.st_mtime_ns
        if self._verified.get(path) == version:
            return True
        try:
            with open(path.removesuffix(_DATA) + _SUM, encoding="ascii") as file:
                expected = file.read()
        except OSError:
            expected = ""
        if _sha256(path) != expected:
            logging.warning("%s: damaged; the file is fetched again.", path)
            self._discard(path)
            return False
        self._verified[path] = version
        return True

    def _discard(self, path: str) -> None:
        for name in (path, path.removesuffix(_DATA) + _SUM):
            with contextlib.suppress(FileNotFoundError):
                os.remove(name)

    # --- Fetching ---------------------------------------------------------------------------------
    def _fetch(self, url: str, stat: Stat, path: str) -> None:
        part = f"{path.removesuffix(_DATA)}.{stat.size}.{uuid.uuid4().hex[:8]}{_PART}"
        try:
            with open(part, "wb") as holder:
                fcntl.flock(holder, fcntl.LOCK_EX)  # a part without this lock was left behind
                self._reserve(url, stat.size)
                files.download(url, part, stat)
                files_io.write_whole(path.removesuffix(_DATA) + _SUM, _sha256(part).encode())
                os.replace(part, path)
        except OSError as error:
            if error.errno is None:  # of the store, and says so
                raise
            raise OSError(
                f"{url}: cannot be kept in the local cache {self.directory}: {error.strerror}. "
                f"Free disk space, or set {file_cache.DIRECTORY} to another directory."
            ) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)

    def _reserve(self, url: str, size: int) -> None:
        """Wait until there is room for a file, and count it."""
        remedy = f"Set {file_cache.BYTES} to more than {format_bytes(self.max_bytes)}."
        if size > self.max_bytes:
            raise ValueError(
                f"{url}: {format_bytes(size)} do not fit into the local cache {self.directory}. "
                f"{remedy}"
            )
        deadline = time.monotonic() + FULL_S
        while True:
            with files_io.locked(
                os.path.join(self.directory, "size.lock"), FETCH_S, "making room in the cache"
            ):
                used = self._counted()
                if used is None or used + size > self.max_bytes:
                    used = self._make_room(size)
                if used + size <= self.max_bytes:
                    self._count(used + size)
                    return
                self._count(used)
            self._unpin()
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{url}: the local cache {self.directory} is full of files that are in use. "
                    f"{remedy}"
                )
            time.sleep(0.1)

    def _counted(self) -> int | None:
        """Return the size of all files as it was counted last; None if it is unknown."""
        try:
            with open(os.path.join(self.directory, "size"), encoding="ascii") as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    def _count(self, used: int) -> None:
        files_io.write_whole(os.path.join(self.directory, "size"), str(used).encode())

    def _make_room(self, size: int) -> int:
        """Remove files that nobody holds, oldest use first; return the size of those that stay.

        Files are removed until `size` fits with some room to spare.
        """
        used = -size  # the file to fetch is already here, as a part
        entries = []
        for directory, _, names in os.walk(self.directory):
            for name in names:
                path = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    if name.endswith(_DATA):
                        found = os.stat(path)
                        entries.append((found.st_atime_ns, found.st_size, path))
                        used += found.st_size
                    elif name.endswith(_PART):
                        if _is_held(path) or time.time() - os.stat(path).st_mtime < _YOUNG_S:
                            used += int(name.split(".")[-3])
                        else:
                            os.remove(path)
        for _, bytes_, path in sorted(entries):
            if used + size <= _ROOM * self.max_bytes:
                break
            if self._remove_unless_used(path):
                used -= bytes_
        return used

    def _remove_unless_used(self, path: str) -> bool:
        with self._use(fcntl.LOCK_EX), contextlib.suppress(FileNotFoundError):
            if _is_held(path, fcntl.LOCK_EX) and time.time() - os.stat(path).st_atime < UNUSED_S:
                return False
            self._discard(path)
        return True

    def _unpin(self, all_: bool = False) -> None:
        """Let other processes remove the older half of the files that this one holds, or all."""
        with self._mutex:
            count = len(self._pins) if all_ else (len(self._pins) + 1) // 2
            dropped = [self._pins.popitem(last=False)[1] for _ in range(count)]
        for descriptor, _ in dropped:
            os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)


def _is_held(path: str, kind: int = fcntl.LOCK_SH) -> bool:
    """Return whether a process holds a lock of a file that excludes one of this kind."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
