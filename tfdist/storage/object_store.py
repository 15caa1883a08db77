"""Object stores through fsspec: S3, Google Cloud Storage, Azure and Hugging Face.

An upload is complete or does not exist, so nothing is renamed. Requests that fail are sent again
within a bound. Errors name the URL and the remedy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from tfdist.storage import retries
from tfdist.storage.store_errors import (
    SCHEMES,
    StoreFailed,
    bucket_of,
    is_transient,
    scheme_of,
    translated,
)

Result = TypeVar("Result")
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60  # seconds without a byte, after which a request is sent again
READ_BYTES = 1 << 23  # bytes of one request
_known_buckets: set[tuple[str, str]] = set()


class Stat(NamedTuple):
    """Size and version of a file.

    Attributes:
        size: Number of bytes.
        version: Text that changes when the content does: a tag of the store, or a time.
    """

    size: int
    version: str


def is_installed(scheme: str) -> bool:
    """Return whether the package for a scheme of `SCHEMES` is installed."""
    return importlib.util.find_spec(SCHEMES[scheme].package) is not None


class ObjectStore:
    """Files in an object store, by URL.

    Args:
        scheme: One of `SCHEMES`.
    """

    def __init__(self, scheme: str):
        self._scheme = scheme

    def stat(self, url: str) -> Stat:
        """Return size and version of a file.

        Raises:
            FileNotFoundError: If there is no such file.
            IsADirectoryError: If files exist below the URL, but none at it.
        """
        info = self._info(url)
        if info["type"] == "directory":
            raise IsADirectoryError(f"{url}: expected a file, received a directory.")
        keys = ("ETag", "etag", "generation", "blob_id", "LastModified", "last_modified", "mtime")
        version = next((str(info[key]) for key in keys if info.get(key)), "")
        return Stat(int(info["size"]), version)

    def exists(self, url: str) -> bool:
        """Return whether there is a file, or a directory with files."""
        try:
            self._info(url)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, url: str) -> bool:
        """Return whether there are files below a URL."""
        try:
            return self._info(url)["type"] == "directory"
        except FileNotFoundError:
            return False

    def list_dir(self, url: str) -> list[str]:
        """Return the names of files and directories in a directory, sorted.

        Raises:
            FileNotFoundError: If nothing exists there.
        """
        base = url.rstrip("/")
        paths = self._call(base, lambda fs: self._fresh(fs).ls(base, detail=False))
        own = base.partition("://")[2]
        names = {path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != own}
        return sorted(name for name in names if name)

    def glob(self, pattern: str) -> list[str]:
        """Return the URLs that match a pattern, sorted."""
        found = self._call(pattern, lambda fs: self._fresh(fs).glob(pattern))
        if not found:
            self.check_bucket(pattern)
        return sorted(f"{self._scheme}://{path.lstrip('/')}" for path in found)

    def read_range(self, url: str, begin: int, end: int) -> bytes:
        """Return the bytes of a file from `begin` up to `end`, all of which must exist."""

        def request(fs: Any) -> bytes:
            content = fs.cat_file(url, start=begin, end=end)
            if len(content) != end - begin:
                raise ConnectionError(f"expected {end - begin} bytes, received {len(content)}")
            return content

        return self._call(url, request) if begin < end else b""

    def read(self, url: str) -> bytes:
        """Return the whole content of a file."""
        return b"".join(self._parts(url, self.stat(url).size))

    def download(self, url: str, path: str, expected: Stat | None = None) -> Stat:
        """Copy a file to a local path, in parts.

        Args:
            url: URL of the file.
            path: Local path, which is overwritten.
            expected: Size and version that the file must have; default: those it has now.

        Returns:
            Size and version of the file.

        Raises:
            StoreFailed: If the file changed during the copy, or is not the expected one.
        """
        before = self.stat(url)
        with open(path, "wb") as file:
            for part in self._parts(url, before.size):
                file.write(part)
        if self.stat(url) != before or expected not in (None, before):
            raise StoreFailed(
                f"{url}: changed while it was read. Wait until it is written, then start again."
            )
        return before

    def open_read(self, url: str) -> io.BufferedReader:
        """Open a file for reading, at any position."""
        return io.BufferedReader(_Reader(self, url), READ_BYTES)

    def write(self, url: str, content: bytes) -> None:
        """Write a file; an existing one is replaced. Others see the whole file or none."""
        self._call(url, lambda fs: fs.pipe_file(url, content), writes=True)

    def upload(self, path: str, url: str) -> None:
        """Copy a local file to a URL; an existing one is replaced."""
        self._call(url, lambda fs: fs.put_file(path, url), writes=True)

    def create(self, url: str, content: bytes) -> None:
        """Write a file that must not exist: of several processes, exactly one succeeds.

        Raises:
            FileExistsError: If the file exists. A retry of a request whose answer was lost finds
                its own content, which is no error.
        """
        try:
            self._call(url, lambda fs: fs.pipe_file(url, content, mode="create"), writes=True)
        except FileExistsError:
            if self.read(url) != content:
                raise

    def create_from(self, path: str, url: str) -> None:
        """Copy a local file to a URL that must not exist.

        Raises:
            FileExistsError: If the file exists, maybe because the answer to an upload was lost.
        """
        self._call(url, lambda fs: fs.put_file(path, url, mode="create"), writes=True)

    def move(self, old: str, new: str) -> None:
        """Copy a file within the store, and remove the old one. It can be repeated."""
        if not self.exists(old) and self.exists(new):
            return
        self._call(new, lambda fs: fs.copy(old, new), writes=True)
        self.remove(old)

    def remove(self, url: str) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        self._call(url, lambda fs: fs.rm_file(url))

    def remove_tree(self, url: str) -> None:
        """Remove all files below a URL, if there are any."""
        with contextlib.suppress(FileNotFoundError):
            self._call(url, lambda fs: self._fresh(fs).rm(url, recursive=True))

    def check_bucket(self, url: str) -> None:
        """Raise UnusableStore if the bucket of a URL does not exist.

        Raises:
            UnusableStore: If there is no such bucket, no package, or no credentials.
        """
        bucket = bucket_of(url)
        if (self._scheme, bucket) in _known_buckets:
            return
        place = f"{self._scheme}://{bucket}"
        try:
            self._request(lambda fs: None if self._scheme == "hf" else fs.info(place))
        except PermissionError:
            pass  # some credentials may use files of a bucket, but not look at it
        except Exception as error:
            raise translated(error, url, writes=isinstance(error, FileNotFoundError)) from error
        _known_buckets.add((self._scheme, bucket))

    # --- Requests ---------------------------------------------------------------------------------
    def _info(self, url: str) -> dict[str, Any]:
        return self._call(url.rstrip("/"), lambda fs: self._fresh(fs).info(url.rstrip("/")))

    def _parts(self, url: str, size: int) -> Iterator[bytes]:
        for begin in range(0, size, READ_BYTES):
            yield self.read_range(url, begin, min(begin + READ_BYTES, size))

    def _call(self, url: str, request: Callable[[Any], Result], *, writes: bool = False) -> Result:
        try:
            return self._request(request)
        except FileNotFoundError as error:
            if not writes:
                self.check_bucket(url)
            raise translated(error, url, writes) from error
        except Exception as error:
            raise translated(error, url, writes) from error

    def _request(self, request: Callable[[Any], Result]) -> Result:
        def once() -> Result:
            try:
                return request(self._file_system())
            except OSError as error:
                if _is_taken(error):
                    raise FileExistsError(str(error)) from error
                raise

        return retries.call(once, is_transient)

    def _file_system(self) -> Any:
        """Return fsspec's file system, which is the same one until the process forks."""
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False}
        if self._scheme == "s3":
            # Only `retries` sends requests again: with three layers, the bound would be their
            # product.
            options["config_kwargs"] = {
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": READ_TIMEOUT_S,
                "retries": {"total_max_attempts": 1},
            }
        elif self._scheme == "hf":
            options = {}
        file_system = fsspec.filesystem(self._scheme, **options)
        if self._scheme == "s3":
            file_system.retries = 1
        return file_system

    @staticmethod
    def _fresh(file_system: Any) -> Any:
        """Return a file system that has forgotten what it listed."""
        file_system.invalidate_cache()
        return file_system


class _Reader(io.RawIOBase):
    """Unbuffered reader of a file in a store."""

    def __init__(self, store: ObjectStore, url: str):
        super().__init__()
        self._store = store
        self._url = url
        self._size = store.stat(url).size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + min(len(buffer), READ_BYTES), self._size)
        content = self._store.read_range(self._url, self._position, max(end, self._position))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _is_taken(error: OSError) -> bool:
    """Return whether a conditional upload found that the file exists."""
    text = str(error).lower()
    return isinstance(error, FileExistsError) or any(
        word in text for word in ("preconditionfailed", "pre-conditions", "condition not met")
    )


def store_of(url: str) -> ObjectStore:
    """Return the store of a URL whose scheme is in `SCHEMES`."""
    return ObjectStore(scheme_of(url))
