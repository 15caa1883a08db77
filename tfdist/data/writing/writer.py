"""Writer of TFRecord datasets in shards of about equal size, with resumption.

A shard that is complete is never written again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import math
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.data import files_io
from tfdist.data.sources import dataset_file
from tfdist.data.sources.convert import as_source
from tfdist.data.sources.record_index import FRAME, open_indexes
from tfdist.data.sources.source import Source
from tfdist.data.writing.encode import Encoder
from tfdist.data.writing.record_shards import (
    Progress,
    Shards,
    name_unreadable,
    selected_examples,
    sha256,
    writable,
)
from tfdist.storage import files

# Seconds to wait for another process that writes the same dataset and makes no progress.
STALLED_S = 600.0
_SAMPLE = 64  # examples from which the size of a record is estimated
_GROUP_BYTES = 1 << 20  # approximate size of one transfer from TensorFlow to Python
_PLAN = "plan.json"
# Keys of the plan that a call must share with the call that it resumes.
_PLAN_KEYS = ("features", "structure", "compression", "shard_bytes", "sample")


def write(
    source: Any,
    directory: str | os.PathLike,
    *,
    shard_bytes: int = 100_000_000,
    compression: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> dict[str, Any]:
    """Write all examples of a source to TFRecord files, for `tfdist.data.records(directory)`.

    Each example is stored as a `tf.train.Example`. Image files are copied without decoding if the
    source has them; other images, uint8 `[height, width, 1, 3 or 4]`, are stored as PNG files. A
    file `dataset.json`, which is written last, describes the records, and has the size and SHA-256
    of each file. Until then all files are in `.writing`; a second call with the same source and
    arguments keeps the files there that are complete, and writes the others. A source with `walk`
    is written by one thread, which reads again through the examples that are already written. If
    several processes write the same local directory, one writes, and the others wait for it.

    Args:
        source: Data that `tfdist.data.as_source` accepts.
        directory: Directory to write; its last part is the name of the files,
            `NAME-00000-of-00010.tfrecord`.
        shard_bytes: Approximate size of each file in bytes; default: 100 MB.
        compression: None (default), or "GZIP": smaller files that can only be read from beginning
            to end.
        workers: Number of threads, each of which writes a file; default: one for each processor.
        progress: Function called from time to time with the number of examples written and their
            total, which is None if unknown; called from any thread.

    Returns:
        The content of `dataset.json`: "examples", "features", "shards" and more.

    Raises:
        ValueError: If the source is empty, if its examples cannot be stored or read, or if the
            directory cannot be written or holds something else.
        TimeoutError: If another process has been writing this dataset and has made no progress for
            ten minutes.

    Example:
        >>> import tempfile
        >>> from tfdist.data.sources.records import records
        >>> directory = os.path.join(tempfile.mkdtemp(), "numbers")
        >>> manifest = write((np.arange(5.0), np.arange(5)), directory)
        >>> [shard["file"] for shard in manifest["shards"]], manifest["features"]
        (['numbers-00000-of-00001.tfrecord'], {'x': 'bytes of float64', 'y': 'int64'})
        >>> [(float(x), int(y)) for x, y in records(directory).dataset().take(2)]
        [(0.0, 0), (1.0, 1)]
    """
    source = as_source(source)
    _check(shard_bytes, compression, workers)
    directory = files_io.absolute(directory)
    encoder, sample = _sample(source)
    plan = _plan(source, encoder, sample, shard_bytes, compression or "")
    writing = os.path.join(directory, dataset_file.UNFINISHED)
    with contextlib.ExitStack() as locks:
        if not files.exists(os.path.join(directory, dataset_file.NAME)):
            _check_no_records(directory)
            with writable(directory):
                files.make_dirs(writing)
            _acquire_lock(locks, directory)
        if files.exists(os.path.join(directory, dataset_file.NAME)):
            manifest = dataset_file.read(directory)
            assert manifest is not None
            _check_same(directory, manifest, plan)
            _check_sizes(directory, manifest)
            return manifest
        plan = _resume(directory, plan)
        group = max(1, min(256, _GROUP_BYTES * len(sample) // (1 + sum(map(len, sample)))))
        shards = Shards(
            source,
            encoder,
            directory,
            plan["compression"],
            group,
            Progress(progress, plan["examples"]),
        )
        return _finish(directory, plan, shards, workers or os.cpu_count() or 1)


def verify(directory: str | os.PathLike, workers: int | None = None) -> dict[str, Any]:
    """Verify the checksums of all files of a dataset that `write` made.

    Args:
        directory: Directory of the dataset.
        workers: Number of threads; default: one for each processor.

    Returns:
        The content of `dataset.json`.

    Raises:
        ValueError: If a file is missing or differs from what was written; the message names the
            first.
    """
    directory = files_io.absolute(directory)
    manifest = dataset_file.read(directory)
    if manifest is None:
        raise ValueError(
            f"{directory}: expected a data set that tfdist wrote; found no {dataset_file.NAME}. "
            "Correct the path."
        )
    _check_sizes(directory, manifest)
    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        sums = pool.map(
            lambda shard: sha256(os.path.join(directory, shard["file"])), manifest["shards"]
        )
        for shard, checksum in zip(manifest["shards"], sums, strict=True):
            if checksum != shard["sha256"]:
                raise ValueError(
                    f"{os.path.join(directory, shard['file'])}: damaged: expected SHA-256 "
                    f"{shard['sha256']}, received {checksum}. Copy it again from an intact copy, "
                    "or delete the directory and write the data set again."
                )
    return manifest


def _check(shard_bytes: Any, compression: Any, workers: Any) -> None:
    if compression not in (None, "", "GZIP"):
        raise ValueError(f'compression: expected None or "GZIP"; received {compression!r}.')
    for key, value in {
        "shard_bytes": shard_bytes,
        "workers": 1 if workers is None else workers,
    }.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{key}: expected a whole number, 1 or more; received {value!r}.")


# --- Plan: content and number of files ----------------------------------------------------------
def _sample(source: Source) -> tuple[Encoder, list[bytes]]:
    """Return the encoder of a source's examples, and a sample of serialized examples.

    The sample is spread over the whole source if it can be read at random; else it is its first
    examples.
    """
    if source.cardinality == 0:
        raise ValueError(
            f"{source.name}: expected examples to write; it has none. Look at where it is read "
            "from."
        )
    ranges = [(0, _SAMPLE if source.cardinality is None else min(_SAMPLE, source.cardinality))]
    if source.cardinality is not None and source.scan is None and source.walk is None:
        spread = np.unique(
            np.linspace(0, source.cardinality - 1, _SAMPLE).astype(np.int64)
        ).tolist()
        ranges = [(number, number + 1) for number in spread]
    has_stored = source.scan is not None or source.raw is not None
    pairs = selected_examples(
        source,
        ranges,
        lambda example, stored: (example, stored) if has_stored else (example,),
        has_stored,
    )
    examples = list(
        name_unreadable(
            source, iter(pairs), [number for range_ in ranges for number in range(*range_)]
        )
    )
    if not examples:
        raise ValueError(
            f"{source.name}: expected examples to write; it has none. Look at where it is read "
            "from."
        )
    encoder = Encoder.of(source)
    if has_stored:
        encoder = encoder.with_images(
            [pair[0] for pair in examples], [pair[1].numpy() for pair in examples]
        )
    parts = [encoder.prepare(*pair, *([] if has_stored else [None])) for pair in examples]
    return encoder, [
        encoder.serialize({name: part.numpy() for name, part in values.items()}) for values in parts
    ]


def _plan(
    source: Source, encoder: Encoder, sample: list[bytes], shard_bytes: int, compression: str
) -> dict[str, Any]:
    """Return the plan of a dataset: all that a later call needs to resume."""
    content = b"".join(sample)
    ratio = len(zlib.compress(content)) / len(content) if compression else 1.0
    size = (len(content) / len(sample) + FRAME) * ratio
    counts = None
    if source.walk is None:
        examples = source.cardinality
        assert examples is not None
        shards = min(examples, max(1, math.ceil(examples * size / shard_bytes)))
        counts = [examples * (i + 1) // shards - examples * i // shards for i in range(shards)]
    return {
        "name": source.name,
        "examples": source.cardinality,
        "classes": source.classes,
        "class_names": None if source.class_names is None else list(source.class_names),
        "features": {name: str(feature) for name, feature in encoder.features.columns.items()},
        "structure": dataset_file.to_json(encoder.features.structure),
        "compression": compression,
        "shard_bytes": shard_bytes,
        "sample": hashlib.sha256(content).hexdigest(),
        "counts": counts,
        "limit": shard_bytes / ratio,
    }


# --- Directory -----------------------------------------------------------------------------------
def _check_no_records(directory: str) -> None:
    """Raise ValueError if the directory holds records of no unfinished dataset."""
    if files.is_dir(directory) and not files.exists(
        os.path.join(directory, dataset_file.UNFINISHED)
    ):
        others = sorted(name for name in files.list_dir(directory) if "tfrecord" in name.lower())
        # Another process may have finished just now.
        finished = files.exists(os.path.join(directory, dataset_file.NAME))
        if others and not finished:
            raise ValueError(
                f"directory={directory!r} already holds records, such as {others[0]}. Name another "
                "directory, or empty this one."
            )


def _acquire_lock(locks: contextlib.ExitStack, directory: str) -> None:
    """Wait for another process that writes this directory, as long as it makes progress."""
    if files_io.is_remote(directory):
        return
    while True:
        previous = _unfinished_files(directory)
        try:
            locks.enter_context(
                files_io.locked(
                    os.path.join(directory, ".write.lock"), STALLED_S, f"writing {directory}"
                )
            )
            return
        except TimeoutError:
            if _unfinished_files(directory) == previous:
                raise


def _unfinished_files(directory: str) -> list[tuple[str, int]]:
    """Return names and sizes of the unfinished files."""
    with contextlib.suppress(OSError):
        return sorted(
            (entry.name, entry.stat().st_size)
            for entry in os.scandir(os.path.join(directory, dataset_file.UNFINISHED))
        )
    return []


def _check_same(directory: str, existing: dict[str, Any], plan: dict[str, Any]) -> None:
    """Raise ValueError if the directory holds, or is to hold, another dataset."""
    keys = (
        _PLAN_KEYS
        if None in (existing["examples"], plan["examples"])
        else (*_PLAN_KEYS, "examples")
    )
    for key in keys:
        if existing[key] != plan[key]:
            difference = (
                "its first examples differ"
                if key == "sample"
                else f"its {key}: {existing[key]!r} there, {plan[key]!r} here"
            )
            raise ValueError(
                f"directory={directory!r} holds another data set than {plan['name']}: "
                f"{difference}. Name another directory, or delete this one."
            )


def _check_sizes(directory: str, manifest: dict[str, Any]) -> None:
    for shard in manifest["shards"]:
        path = os.path.join(directory, shard["file"])
        if not files.exists(path):
            raise ValueError(
                f"{path}: missing. Copy it again, or delete the directory and write the data set "
                "again."
            )
        size = files.stat(path).size
        if size != shard["bytes"]:
            raise ValueError(
                f"{path}: damaged: expected {shard['bytes']} bytes, received {size}. Copy it again "
                "from an intact copy, or delete the directory and write the data set again."
            )


def _resume(directory: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of the call that began this directory; this plan if none did."""
    path = os.path.join(directory, dataset_file.UNFINISHED, _PLAN)
    existing = dataset_file.read_checked(path)
    if existing is not None:
        _check_same(directory, existing, plan)
        return existing
    with writable(directory):
        dataset_file.write_checked(path, plan)
    return plan


def _finish(directory: str, plan: dict[str, Any], shards: Shards, workers: int) -> dict[str, Any]:
    """Write the missing files, rename all to their final names, and write `dataset.json`."""
    if plan["counts"] is None:
        entries = shards.write_on(plan["limit"])
        plan = {**plan, "counts": [entry["examples"] for entry in entries]}
        with writable(directory):
            dataset_file.write_checked(
                os.path.join(directory, dataset_file.UNFINISHED, _PLAN), plan
            )
    else:
        entries = shards.write_all(plan["counts"], workers)
    with writable(directory):
        paths = shards.move(entries)
        for index, entry in zip(open_indexes(paths, plan["compression"]), entries, strict=True):
            assert index.records == entry["examples"], (
                f"{index.path}: {index.records} records of {entry['examples']}"
            )
        keys = ("name", "classes", "class_names", *_PLAN_KEYS)
        examples = sum(entry["examples"] for entry in entries)
        dataset_file.write(
            directory, {"examples": examples, **{key: plan[key] for key in keys}, "shards": entries}
        )
        files.remove_tree(os.path.join(directory, dataset_file.UNFINISHED))
    manifest = dataset_file.read(directory)
    assert manifest is not None
    return manifest
