"""An object store in memory that stands for S3 in unit tests, which need no other package."""

import contextlib

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from tfdist.storage import object_store


class MemoryS3(MemoryFileSystem):
    """Files by `s3://bucket/name`, with a bucket that exists and a conditional upload."""

    protocol = "s3"
    store = {}
    pseudo_dirs = [""]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("s3://", "memory://", 1))

    def info(self, path, **kwargs):
        if self._strip_protocol(path) == "/bucket":
            return {"name": "/bucket", "size": 0, "type": "directory"}
        return super().info(path, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if mode == "create" and self._strip_protocol(path) in self.store:
            raise FileExistsError(path)
        super().pipe_file(path, value, **kwargs)

    def put_file(self, lpath, rpath, mode="overwrite", **kwargs):
        with open(lpath, "rb") as file:
            self.pipe_file(rpath, file.read(), mode)


@contextlib.contextmanager
def memory_s3():
    """Let `s3://` URLs name files in memory, within the context."""
    registry = fsspec.registry
    before = dict(registry)
    fsspec.register_implementation("s3", MemoryS3, clobber=True)
    object_store._known_buckets.clear()
    MemoryS3.store.clear()
    try:
        yield
    finally:
        object_store._known_buckets.clear()
        if "s3" in before:
            fsspec.register_implementation("s3", before["s3"], clobber=True)
        else:
            fsspec.register_implementation("s3", "s3fs.S3FileSystem", clobber=True)
            from fsspec.registry import _registry

            _registry.pop("s3", None)
