"""Subprocess that imports TensorFlow and Keras and reports what it finds.

The module `frameworks` starts it and reads its answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from typing import Any

from tfdist.runtime import subprocesses
from tfdist.storage import files as storage
from tfdist.storage.store_errors import UnusableStore
from tfdist.tools.doctor import trial
from tfdist.tools.doctor.file_systems import WriteTest, is_remote, missing, token_name

LOCAL = "file://"


def main(argv: list[str]) -> None:
    """Report facts about TensorFlow, and test directories and a config.

    Args:
        argv: One JSON text: "directories" to test through TensorFlow's file systems, "words" of a
            config, and "workers" that train it.
    """
    question = json.loads(argv[0])
    started = time.perf_counter()
    import keras
    import tensorflow as tf

    seconds = time.perf_counter() - started
    build = tf.sysconfig.get_build_info()
    facts: dict[str, Any] = {
        "frameworks": {
            "seconds": seconds,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "cuda": bool(build.get("is_cuda_build")),
            "cuda_version": str(build.get("cuda_version", "")),
            "cudnn_version": str(build.get("cudnn_version", "")),
            "gpus": [device.name for device in tf.config.list_physical_devices("GPU")],
        }
    }
    subprocesses.answer(facts)
    facts["directories"] = [
        dataclasses.asdict(try_directory(path)) for path in question["directories"]
    ]
    subprocesses.answer(facts)
    if question["words"]:
        for progress in trial.steps(question["words"], question["workers"]):
            if is_remote(progress.directory) and progress.directory not in [
                result["path"] for result in facts["directories"]
            ]:
                facts["directories"].append(dataclasses.asdict(try_directory(progress.directory)))
            subprocesses.answer({**facts, "trial": dataclasses.asdict(progress)})


def try_directory(path: str) -> WriteTest:
    """Test that a file in a directory can be written, renamed, read and removed.

    In an object store that tfdist writes through fsspec, nothing is renamed: files are whole there.
    The others are tried through TensorFlow. A directory that was created for the test stays, unless
    it is local. TensorFlow can remove directories only with everything in them.

    Args:
        path: Directory, such as "gs://bucket/runs"; it need not exist.
    """
    if storage.through_fsspec(path):
        return _try_store(path)
    import tensorflow as tf

    files = tf.io.gfile
    made = missing(path.removeprefix(LOCAL)) if path.startswith(LOCAL) else []
    target = f"{path.rstrip('/')}/{token_name()}"
    part = f"{target}.part"
    step = "making the directory"
    try:
        files.makedirs(path)
        for name, text in ((target, "old"), (part, "new")):
            step = "writing a file"
            with files.GFile(name, "w") as file:
                file.write(text)
        step = "renaming a file over another one"
        files.rename(part, target, overwrite=True)
        step = "reading it back"
        with files.GFile(target) as file:
            if (text := file.read()) != "new":
                return WriteTest(
                    path,
                    error=f"reading back: expected what was renamed there, received {text[:20]!r}",
                )
        return WriteTest(path)
    except (tf.errors.OpError, OSError, ValueError) as error:
        return WriteTest(path, error=f"{step}: {getattr(error, 'message', str(error))[:200]}")
    finally:
        for name in (target, part):
            with contextlib.suppress(tf.errors.OpError, OSError):  # it is not there
                files.remove(name)
        for directory in made:
            with contextlib.suppress(OSError):  # somebody else writes there already
                os.rmdir(directory)


def _try_store(path: str) -> WriteTest:
    target = f"{path.rstrip('/')}/{token_name()}"
    step = "looking for the bucket"
    try:
        storage.make_dirs(path)
        step = "writing a file"
        if storage.can_create(path):
            storage.create(target, b"old")
        step = "replacing a file"
        storage.write_whole(target, b"new")
        step = "reading it back"
        if (content := storage.read(target)) != b"new":
            return WriteTest(path, error=f"{step}: expected what was written, got {content[:20]!r}")
        return WriteTest(path)
    except (OSError, UnusableStore) as error:
        return WriteTest(path, error=f"{step}: {str(error)[:300]}")
    finally:
        storage.remove(target)


if __name__ == "__main__":
    main(sys.argv[1:])
