"""File operations on a path or URL, whichever file system it names.

Local paths are used directly; `s3://`, `az://`, `hf://` and, if gcsfs is installed, `gs://` through
fsspec; any other URL through TensorFlow. Errors are Python's: `FileNotFoundError`, `OSError`; and
`UnusableStore` for a place that cannot work as it is configured.
"""

from __future__ import annotations

import contextlib
import errno
import glob as local_glob
import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from tfdist.storage.object_store import Stat, is_installed, store_of
from tfdist.storage.store_errors import SCHEMES, UnusableStore, scheme_of

# An upload to these is complete or does not exist, also through TensorFlow.
_WHOLE_UPLOADS = {*SCHEMES, "gs"}


def is_remote(path: str) -> bool:
    """Return whether a path is a URL: "gs://bucket/file"."""
    return "://" in path


def is_object_store(path: str) -> bool:
    """Return whether a path is in an object store: "s3://bucket/file"."""
    return scheme_of(path) in _WHOLE_UPLOADS


def through_fsspec(path: str) -> bool:
    """Return whether a path is read and written through fsspec, and not by TensorFlow.

    Example:
        >>> through_fsspec("s3://bucket/file"), through_fsspec("/data/file")
        (True, False)
    """
    scheme = scheme_of(path)
    return scheme in SCHEMES and (scheme != "gs" or is_installed("gs"))


def tensorflow_writes(path: str) -> bool:
    """Return whether TensorFlow's own writers, such as of event files, can write to a path.

    Example:
        >>> tensorflow_writes("gs://bucket/logs"), tensorflow_writes("s3://bucket/logs")
        (True, False)
    """
    return scheme_of(path) == "gs" or not through_fsspec(path)


def can_create(path: str) -> bool:
    """Return whether `create` is supported: of several processes, exactly one creates a file."""
    return through_fsspec(path) and scheme_of(path) != "hf"


def exists(path: str) -> bool:
    """Return whether a file or directory exists."""
    if through_fsspec(path):
        return store_of(path).exists(path)
    if not is_remote(path):
        return os.path.exists(path)
    with _as_python(path) as files:
        return files.exists(path)


def is_dir(path: str) -> bool:
    """Return whether a directory exists; in an object store, whether files are below it."""
    if through_fsspec(path):
        return store_of(path).is_dir(path)
    if not is_remote(path):
        return os.path.isdir(path)
    with _as_python(path) as files:
        return files.isdir(path)


def stat(path: str) -> Stat:
    """Return size and version of a file.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a directory.
    """
    if through_fsspec(path):
        return store_of(path).stat(path)
    if not is_remote(path):
        status = os.stat(path)
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path}: expected a file, received a directory.")
        return Stat(status.st_size, str(status.st_mtime_ns))
    with _as_python(path) as files:
        file_statistics = files.stat(path)
    if file_statistics.is_directory:
        raise IsADirectoryError(f"{path}: expected a file, received a directory.")
    return Stat(file_statistics.length, str(file_statistics.mtime_nsec))


def list_dir(path: str) -> list[str]:
    """Return the names in a directory, sorted; names of directories may end with a slash.

    Raises:
        FileNotFoundError: If there is no such directory.
        NotADirectoryError: If it is a file.
    """
    if through_fsspec(path):
        return store_of(path).list_dir(path)
    if not is_remote(path):
        return sorted(os.listdir(path))
    with _as_python(path) as files:
        return sorted(files.listdir(path))


def glob(pattern: str) -> list[str]:
    """Return the paths that match a pattern, sorted."""
    if through_fsspec(pattern):
        return store_of(pattern).glob(pattern)
    if not is_remote(pattern):
        return sorted(local_glob.glob(pattern))
    with _as_python(pattern) as files:
        return sorted(files.glob(pattern))


def read(path: str) -> bytes:
    """Return the content of a file.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    if through_fsspec(path):
        return store_of(path).read(path)
    with open_read(path) as file:
        return file.read()


@contextlib.contextmanager
def open_read(path: str) -> Iterator[Any]:
    """Open a file for reading bytes, at any position, within the context."""
    if through_fsspec(path):
        with store_of(path).open_read(path) as file:
            yield file
    elif not is_remote(path):
        with open(path, "rb") as file:
            yield file
    else:
        with _as_python(path) as files, files.GFile(path, "rb") as file:
            yield file


def write_whole(path: str, content: bytes) -> None:
    """Write a file: other processes see the whole file or none. An existing file is replaced."""
    write_pieces(path, [content])


def write_pieces(path: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file of several pieces, as `write_whole` does."""
    if through_fsspec(path):
        with _spooled(pieces) as part:
            store_of(path).upload(part, path)
        return
    part = path if is_object_store(path) else f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        if not is_remote(path):
            with open(part, "wb") as file:
                file.writelines(pieces)
            os.replace(part, path)
        else:
            with _as_python(path) as files:
                with files.GFile(part, "wb") as file:
                    for piece in pieces:
                        file.write(bytes(piece))
                if part != path:
                    files.rename(part, path, overwrite=True)
    except BaseException:
        if part != path:
            remove(part)
        raise


def create(path: str, content: bytes) -> None:
    """Write a file that must not exist: of several processes, exactly one succeeds.

    Args:
        path: Path for which `can_create` is true.
        content: Content of the file, which must differ between processes.

    Raises:
        FileExistsError: If the file exists.
    """
    store_of(path).create(path, content)


def create_pieces(path: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file of several pieces that must not exist, where `can_create` is true.

    Raises:
        FileExistsError: If the file exists; it may be this one, whose upload lost its answer.
    """
    with _spooled(pieces) as part:
        store_of(path).create_from(part, path)


def make_dirs(path: str) -> None:
    """Make a directory and those above it. In an object store, check that the bucket exists.

    Raises:
        UnusableStore: If there is no such bucket, no package, or no credentials.
    """
    if through_fsspec(path):
        store_of(path).check_bucket(path)
    elif not is_remote(path):
        try:
            os.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            in_the_way = path
            while in_the_way and not os.path.lexists(in_the_way):
                in_the_way = os.path.dirname(in_the_way)
            reason = f"{in_the_way} is not a directory"
            raise NotADirectoryError(errno.ENOTDIR, reason) from error
    else:
        with _as_python(path) as files:
            files.makedirs(path)


def make_writable(path: str, name: str) -> None:
    """Make a local directory, and check that files can be made in it; ignore a URL.

    Args:
        path: Path of the directory.
        name: Argument or key that names it, for the message.

    Raises:
        UnusableStore: If it cannot be written.
    """
    if is_remote(path):
        return
    try:
        make_dirs(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UnusableStore(
            f"{name}: expected a directory that can be written, received {path}: "
            f"{error.strerror or error}. Correct that, or name another directory."
        ) from error


def remove(path: str) -> None:
    """Remove a file if it exists and can be removed."""
    with contextlib.suppress(OSError, UnusableStore):
        if through_fsspec(path):
            store_of(path).remove(path)
        elif not is_remote(path):
            os.remove(path)
        else:
            with _as_python(path) as files:
                files.remove(path)


def remove_tree(path: str) -> None:
    """Remove a directory with everything in it, if it exists."""
    if through_fsspec(path):
        store_of(path).remove_tree(path)
    elif not is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError), _as_python(path) as files:
            files.rmtree(path)


def rename(old: str, new: str) -> None:
    """Rename a file over an existing one; in an object store, copy it and remove the old."""
    if through_fsspec(old):
        store_of(old).move(old, new)
    elif not is_remote(old):
        os.replace(old, new)
    else:
        with _as_python(new) as files:
            files.rename(old, new, overwrite=True)


def upload(path: str, url: str) -> None:
    """Copy a local file to a path or URL, whole or not at all."""
    if through_fsspec(url):
        store_of(url).upload(path, url)
        return
    with open(path, "rb") as file:
        write_pieces(url, iter(lambda: file.read(1 << 20), b""))


def download(url: str, path: str, expected: Stat | None = None) -> Stat:
    """Copy a file to a local path.

    Args:
        url: Path or URL of the file.
        path: Local path, which is overwritten; a partial file may stay after an error.
        expected: Size and version that the file must have; default: those it has now.

    Returns:
        Size and version of the file.

    Raises:
        OSError: If the file cannot be read, changed during the copy, or is not the expected one.
    """
    if through_fsspec(url):
        return store_of(url).download(url, path, expected)
    before = stat(url)
    with open_read(url) as source, open(path, "wb") as file:
        while piece := source.read(1 << 20):
            file.write(piece)
    if os.path.getsize(path) != before.size or expected not in (None, before):
        raise OSError(
            f"{url}: changed while it was read. Wait until it is written, then start again."
        )
    return before


@contextlib.contextmanager
def _spooled(pieces: Iterable[bytes | memoryview]) -> Iterator[str]:
    """Write pieces to a temporary local file, from which an upload can begin again."""
    with tempfile.NamedTemporaryFile(prefix="tfdist-upload-") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        yield file.name


@contextlib.contextmanager
def _as_python(path: str) -> Iterator[Any]:
    """Provide TensorFlow's file functions, and raise its errors as Python's."""
    import tensorflow as tf

    scheme = scheme_of(path)
    if scheme not in tf.io.gfile.get_registered_schemes():
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise UnusableStore(
            f"{path}: no file system for {scheme}://. Use a local path, or one of {known}."
        )
    try:
        yield tf.io.gfile
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(f"{path}: {error.message}") from error
    except tf.errors.PermissionDeniedError as error:
        raise PermissionError(f"{path}: {error.message}") from error
    except tf.errors.FailedPreconditionError as error:
        raise NotADirectoryError(f"{path}: {error.message}") from error
    except tf.errors.OpError as error:
        raise OSError(f"{path}: {error.message}") from error


class UploadingFile(io.RawIOBase):
    """File object that writes to a local file and uploads it at `flush` and `close`.

    Args:
        url: URL of the file.
        append: Whether to keep what the file holds already.
    """

    def __init__(self, url: str, append: bool = False):
        super().__init__()
        self._url = url
        self._file = tempfile.NamedTemporaryFile(prefix="tfdist-upload-")  # noqa: SIM115
        self._dirty = True
        if append and exists(url):
            self._file.write(read(url))
            self._dirty = False

    def writable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._file.tell()

    def write(self, content: Any) -> int:
        """See `io.RawIOBase`."""
        self._dirty = True
        return self._file.write(content)

    def flush(self) -> None:
        """Upload the file if it has changed."""
        super().flush()
        if self._dirty:
            self._file.flush()
            store_of(self._url).upload(self._file.name, self._url)
            self._dirty = False

    def close(self) -> None:
        """Upload the file if it has changed, and remove the local copy."""
        if not self.closed:
            try:
                super().close()  # it calls flush
            finally:
                self._file.close()
