"""Sources of TFDS datasets, prepared on first use.

If several processes need the same dataset, one prepares it and the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.data import files_io
from tfdist.data.batch_rows import plain
from tfdist.data.sources.record_index import Index, open_indexes
from tfdist.data.sources.records import of_indexes
from tfdist.data.sources.source import Source, of_dataset

if TYPE_CHECKING:  # it takes seconds to import
    import tensorflow_datasets as tfds

PREPARE_TIMEOUT_S = 600.0
# TFDS interleaves so many files, with so many consecutive examples of each, unless a dataset
# disables shuffling.
_INTERLEAVED_FILES = 16
_INTERLEAVED_EXAMPLES = 16


def load(
    name: str,
    split: str,
    data_dir: str | os.PathLike | None = None,
    index_dir: str | os.PathLike | None = None,
) -> Source:
    """Return a split of a TFDS dataset, which is prepared first if necessary.

    If several workers share `data_dir`, one prepares the dataset and the others wait. The dataset
    `tfdist_digits` is a part of this package; TFDS downloads other datasets on first use. The order
    of examples is the order of `tfds.load(name, split=split)`.

    Args:
        name: Name of a dataset that TFDS knows, "mnist", "my_dataset/config:1.0.0"; or of a
            prepared dataset in `data_dir`.
        split: Split or slice of a split: "train", "train[:80%]".
        data_dir: Directory of prepared datasets; default: TFDS' own (`~/tensorflow_datasets`, or
            `TFDS_DATA_DIR`).
        index_dir: Directory for the indexes of the record files, see `records`; default: beside the
            files.

    Returns:
        A Source of `(x, y)`; of dicts of features if the dataset does not declare a label. Its
        examples can be read at random if its files are local TFRecords, else only from the first to
        the last.

    Raises:
        ValueError: If the name or the split is unknown, or if preparing needs a package that is not
            installed.
        TimeoutError: If another process has been preparing this dataset for ten minutes.

    Example:
        >>> import tempfile
        >>> source = load("tfdist_digits", "test", data_dir=tempfile.mkdtemp())
        >>> source.cardinality, source.classes, source.element_spec[0].shape
        (297, 10, TensorShape([8, 8, 1]))
    """
    builder = _builder(name, data_dir)
    if not _is_prepared(builder):
        _prepare(builder, PREPARE_TIMEOUT_S)
        builder = _builder(name, data_dir)  # reads the files that now exist
    try:
        parts = builder.info.splits[split].file_instructions
    except (ValueError, KeyError) as error:
        expected = ", ".join(builder.info.splits)
        raise ValueError(
            f"split={split!r}: no such split of {name}; expected one of {expected}, or a slice "
            f"such as '{next(iter(builder.info.splits), 'train')}[:80%]'."
        ) from error
    title = f"{name}[{split}]"
    if not parts:
        raise ValueError(f"split={split!r}: holds no examples of {name}. Take a larger slice.")
    if _is_indexed(builder):
        source = _of_records(
            title, builder, parts, None if index_dir is None else os.fspath(index_dir)
        )
    else:
        source = _of_builder(title, builder, split)
    label = _label(builder.info)
    classes = getattr(label, "num_classes", None)
    names = getattr(label, "names", None)
    return dataclasses.replace(source, classes=classes, class_names=tuple(names) if names else None)


def _is_indexed(builder: tfds.core.DatasetBuilder) -> bool:
    """Return whether the files are local TFRecords."""
    return getattr(
        builder.info.file_format, "value", None
    ) == "tfrecord" and not files_io.is_remote(str(builder.data_path))


def _of_records(
    title: str, builder: tfds.core.DatasetBuilder, parts: Sequence[Any], index_dir: str | None
) -> Source:
    """Return a Source of parts of record files, given as TFDS' file instructions."""
    paths = [files_io.absolute(part.filename) for part in parts]
    whole = {index.path: index for index in open_indexes(list(dict.fromkeys(paths)), "", index_dir)}
    indexes = []
    for path, part in zip(paths, parts, strict=True):
        if whole[path].records != part.examples_in_shard:
            raise ValueError(
                f"{path}: expected {part.examples_in_shard} records, as {builder.name} says; "
                f"received {whole[path].records}. Delete the data set and prepare it again."
            )
        indexes.append(
            Index(path, "", part.take, whole[path].offsets[part.skip : part.skip + part.take])
        )
    keys = builder.info.supervised_keys

    @plain
    def decode(serialized: tf.Tensor) -> Any:
        features = builder.info.features.deserialize_example(serialized)
        return tf.nest.map_structure(lambda key: features[key], keys) if keys else features

    cycle = 1 if builder.info.disable_shuffling else _INTERLEAVED_FILES
    order = (
        interleaved([part.take for part in parts], cycle, _INTERLEAVED_EXAMPLES)
        if len(parts) > 1 and cycle > 1
        else None
    )
    return of_indexes(title, indexes, decode, order=order)


def interleaved(lengths: Sequence[int], cycle: int, block: int) -> np.ndarray:
    """Return the order in which `tf.data.Dataset.interleave` takes the examples of files.

    Args:
        lengths: Number of examples of each file.
        cycle: Number of files open at a time.
        block: Number of consecutive examples taken from a file.

    Returns:
        Numbers of the examples, int64 `[examples]`, counted on from file to file.

    Example:
        >>> interleaved([3, 1, 2], cycle=2, block=2).tolist()
        [0, 1, 3, 2, 4, 5]
    """
    ends = np.cumsum(lengths)
    waiting = iter(
        [(int(end) - length, int(end)) for length, end in zip(lengths, ends, strict=True)]
    )
    slots: list[tuple[int, int] | None] = [None] * cycle
    blocks: list[np.ndarray] = []
    slot = 0
    more = True
    while more or any(slots):
        if slots[slot] is None:
            slots[slot] = next(waiting, None)
            more = slots[slot] is not None and more
        pending = slots[slot]
        if pending is not None:
            begin = pending[0]
            end = min(pending[0] + block, pending[1])
            blocks.append(np.arange(begin, end, dtype=np.int64))
            slots[slot] = (end, pending[1]) if end - begin == block else None
        slot = (slot + 1) % cycle
    return np.concatenate(blocks)


def _of_builder(title: str, builder: tfds.core.DatasetBuilder, split: str) -> Source:
    """Return a Source that TFDS itself reads, from the first example to the last."""
    import tensorflow_datasets as tfds

    def walk() -> tf.data.Dataset:
        return builder.as_dataset(
            split=split,
            as_supervised=builder.info.supervised_keys is not None,
            read_config=tfds.ReadConfig(try_autocache=False),  # `pipeline(cache=...)` caches
        )

    try:
        source = of_dataset(title, walk())
    except NotImplementedError as error:
        raise ValueError(
            f"{title}: TFDS cannot read {getattr(builder.info.file_format, 'value', 'these')} "
            "files as a tf.data.Dataset. Prepare it in another data_dir as "
            f'records: tfds.builder("{builder.name}", data_dir=..., '
            'file_format="tfrecord").download_and_prepare().'
        ) from error
    return dataclasses.replace(source, walk=walk)


def _builder(name: str, data_dir: str | os.PathLike | None) -> tfds.core.DatasetBuilder:
    import tensorflow_datasets as tfds

    from tfdist.data.sources import digits  # noqa: F401  registers tfdist_digits

    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        # TFDS' own message lists every dataset there is.
        nearest = difflib.get_close_matches(
            name, tfds.list_builders(with_community_datasets=False), n=3
        )
        hint = f"Did you mean {' or '.join(nearest)}? " if nearest else ""
        raise ValueError(
            f"{name!r}: no such data set, neither in TFDS nor prepared under "
            f"{data_dir or 'its default data_dir'}. {hint}Correct the name, import the module that "
            "defines the data set, or pass data_dir=."
        ) from error


def _is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    # TFDS' own is_prepared() logs a warning if the answer is no.
    return (builder.data_path / "dataset_info.json").exists()


def _prepare(builder: tfds.core.DatasetBuilder, timeout: float) -> None:
    """Prepare a dataset unless another process does so first.

    TFDS renames the finished directory into place.
    """
    if files_io.is_remote(builder.data_dir):
        raise ValueError(
            f"{builder.name} is not prepared in {builder.data_dir}, and tfdist does not prepare "
            "data sets on a remote file system, which has no locks. Prepare it once with "
            f"`tfds build {builder.name}`, or copy it from a local data_dir."
        )
    import tensorflow_datasets as tfds

    root = Path(builder.data_dir).parent
    root.mkdir(parents=True, exist_ok=True)
    with files_io.locked(root / ".prepare.lock", timeout, f"preparing {builder.name} in {root}"):
        if not _is_prepared(builder):
            logging.info("Preparing %s in %s", builder.name, builder.data_dir)
            with _preserved_random_state():
                builder.download_and_prepare(
                    download_config=tfds.download.DownloadConfig(try_download_gcs=False)
                )


@contextlib.contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Restore the random states of Python and NumPy afterwards.

    TFDS draws random numbers while it prepares a dataset. Otherwise the initial weights of the
    first run would differ from the weights of later runs.
    """
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _label(info: tfds.core.DatasetInfo) -> Any:
    """Return the feature that is the label; None if there is none."""
    keys = info.supervised_keys
    return info.features[keys[1]] if keys and isinstance(keys[1], str) else None
