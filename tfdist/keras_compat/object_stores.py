"""Keras' file functions in object stores: models are saved to and loaded from `s3://`."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from keras.src.utils import file_utils

from tfdist.storage import files
from tfdist.storage.mirror import upload_tree


def hook_files() -> None:
    """Let Keras' functions for files use object stores that TensorFlow cannot use.

    `Model.save`, `load_model`, `ModelCheckpoint` and `CSVLogger` call these functions.
    """
    replacements: dict[str, Callable] = {
        "exists": files.exists,
        "isdir": files.is_dir,
        "listdir": files.list_dir,
        "makedirs": files.make_dirs,
        "remove": files.remove,
        "rmtree": files.remove_tree,
        "join": os.path.join,
        "File": _open,
        "copy": _copy,
    }
    for name, function in replacements.items():
        setattr(file_utils, name, _routed(getattr(file_utils, name), function))


def _routed(original: Callable, function: Callable) -> Callable:
    @functools.wraps(original)
    def routed(path: Any, *args: Any, **kwargs: Any) -> Any:
        paths = [os.fspath(x) for x in (path, *args) if isinstance(x, str | os.PathLike)]
        if any(map(files.through_fsspec, paths)):
            return function(os.fspath(path), *args, **kwargs)
        return original(path, *args, **kwargs)

    return routed


def _open(path: str, mode: str = "r") -> Any:
    """Open a file in an object store; it is uploaded when it is flushed or closed."""
    if "r" in mode:
        content: Any = io.BytesIO(files.read(path))
    else:
        content = io.BufferedWriter(files.UploadingFile(path, append="a" in mode))
    return content if "b" in mode else io.TextIOWrapper(content, encoding="utf-8", newline="")


def _copy(source: str, target: str) -> None:
    """Copy a file of which at least one place is in an object store."""
    if files.through_fsspec(source):
        with contextlib.ExitStack() as stack:
            local = target
            if files.is_remote(target):
                directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-"))
                local = os.path.join(directory, "file")
            files.download(source, local)
            if local != target:
                files.upload(local, target)
    else:
        files.upload(source, target)


def exporting(keras_export: Callable) -> Callable:
    """Wrap `Model.export`, so that it exports to a local directory and uploads that.

    Args:
        keras_export: Keras' method, called with (model, filepath, ...).
    """

    @functools.wraps(keras_export)
    def export(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        url = os.fspath(filepath)
        if not files.through_fsspec(url):
            return keras_export(model, filepath, *args, **kwargs)
        directory = tempfile.mkdtemp(prefix="tfdist-export-")
        try:
            local = os.path.join(directory, os.path.basename(url.rstrip("/")) or "model")
            result = keras_export(model, local, *args, **kwargs)
            if os.path.isdir(local):
                upload_tree(local, url)
            else:
                files.upload(local, url)
            return result
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    return export
