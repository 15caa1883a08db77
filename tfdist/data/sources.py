"""What a user names as data becomes a Source of single examples; the order of reading never varies."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from tfdist.data import digits  # noqa: F401  registers tfdist_digits

PREPARE_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class Source:
    """Examples that can be read over and over, in the same order.

    Attributes:
        name: For messages, such as "mnist[train]".
        dataset: Makes the `tf.data.Dataset` of single examples.
        element_spec: What one example is, a nest of `tf.TensorSpec`.
        cardinality: Number of examples; None where only reading could tell.
        classes: Number of classes of the label; None where there are none, or nobody said how many.
    """

    name: str
    dataset: Callable[[], tf.data.Dataset] = dataclasses.field(repr=False)
    element_spec: Any
    cardinality: int | None = None
    classes: int | None = None

    @classmethod
    def of(cls, data: Any) -> Source:
        """The Source behind what a user passes as data.

        Args:
            data: A Source; the name of a TFDS data set, whose split "train" is meant; a `tf.data.Dataset` of
                single examples; or arrays, rows first, in a tuple or dict such as `(x, y)`.

        Returns:
            The Source.

        Raises:
            ValueError: For anything else, for arrays of unequal length and for a data set without end.

        Example:
            >>> import numpy as np
            >>> Source.of((np.zeros([5, 2]), np.arange(5))).cardinality
            5
        """
        if isinstance(data, Source):
            return data
        if isinstance(data, str):
            return load(data, "train")
        if isinstance(data, tf.data.Dataset):
            return _of_dataset("tf.data.Dataset", data)
        return _of_arrays(data)


def load(name: str, split: str, data_dir: str | os.PathLike | None = None) -> Source:
    """A split of a TFDS data set, prepared first where it is not.

    Of several workers that share `data_dir` one prepares, and the others wait for it. Our own `tfdist_digits`
    is made from scikit-learn's copy and downloads nothing; others are downloaded by TFDS the first time.

    Args:
        name: A name that TFDS knows, "mnist", "my_dataset/config:1.0.0"; or of a data set that lies prepared
            in `data_dir`.
        split: Split or slice of one: "train", "train[:80%]".
        data_dir: Where prepared data sets lie; default: where TFDS keeps them (`~/tensorflow_datasets`, or
            `TFDS_DATA_DIR`).

    Returns:
        A Source of `(x, y)`; of dicts of features where the data set does not say which feature is the label.

    Raises:
        ValueError: For an unknown name or split, and where preparing takes a package that is not installed.
        TimeoutError: When another process has been preparing this data set for ten minutes.

    Example:
        >>> import tempfile
        >>> source = load("tfdist_digits", "test", data_dir=tempfile.mkdtemp())
        >>> source.cardinality, source.classes, source.element_spec[0].shape
        (297, 10, TensorShape([8, 8, 1]))
    """
    builder = _builder(name, data_dir)
    if not _is_prepared(builder):
        _prepare(builder, PREPARE_TIMEOUT)
        builder = _builder(name, data_dir)  # one that knows what now lies on the disk

    def dataset() -> tf.data.Dataset:
        return builder.as_dataset(
            split=split,
            as_supervised=builder.info.supervised_keys is not None,
            read_config=tfds.ReadConfig(try_autocache=False),  # caching is the pipeline's affair
        )

    try:
        first = dataset()
    except (ValueError, KeyError) as error:
        expected = ", ".join(builder.info.splits)
        raise ValueError(
            f"split={split!r}: no such split of {name}; expected one of {expected}, or a slice such as "
            f"'{next(iter(builder.info.splits), 'train')}[:80%]'."
        ) from error
    source = _of_dataset(f"{name}[{split}]", first)
    return dataclasses.replace(source, dataset=dataset, classes=_classes(builder.info))


def _builder(name: str, data_dir: str | os.PathLike | None) -> tfds.core.DatasetBuilder:
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        # TFDS' own message lists every data set there is.
        nearest = difflib.get_close_matches(name, tfds.list_builders(with_community_datasets=False), n=3)
        hint = f"Did you mean {' or '.join(nearest)}? " if nearest else ""
        raise ValueError(
            f"{name!r}: no such data set, neither in TFDS nor prepared under {data_dir or 'its default data_dir'}. "
            f"{hint}Correct the name; import the module that defines it, if it is your own; or pass data_dir=, if it "
            "lies elsewhere."
        ) from error


def _is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    # TFDS' own is_prepared() warns when the answer is no.
    return (builder.data_path / "dataset_info.json").exists()


def _prepare(builder: tfds.core.DatasetBuilder, timeout: float) -> None:
    """Prepares a data set unless another process does so first; TFDS renames the finished directory into place."""
    if "://" in builder.data_dir:
        raise ValueError(
            f"{builder.name} is not prepared in {builder.data_dir}, where workers cannot lock each other out. Prepare it "
            f"once by hand: tfds build {builder.name}, or copy it from a local data_dir."
        )
    root = Path(builder.data_dir).parent
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / ".prepare.lock", timeout, f"preparing {builder.name} in {root}"):
        if not _is_prepared(builder):
            logging.info("Preparing %s in %s", builder.name, builder.data_dir)
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))


@contextlib.contextmanager
def _lock(path: Path, timeout: float, purpose: str) -> Iterator[None]:
    """Holds a file's lock, which the system frees even when its holder is killed."""
    deadline = time.monotonic() + timeout
    with open(path, "a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise TimeoutError(
                        f"Waited {timeout:g} s for {file.read() or 'another process'}, which is {purpose} and holds the "
                        f"lock {path}. See whether it still works; end it and start again if it hangs."
                    ) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _classes(info: tfds.core.DatasetInfo) -> int | None:
    if not info.supervised_keys:
        return None
    label = info.supervised_keys[1]
    return getattr(info.features[label], "num_classes", None) if isinstance(label, str) else None


def _of_dataset(name: str, dataset: tf.data.Dataset) -> Source:
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"{name} never ends, so that no epoch does; expected a finite data set: use .take(examples)."
        )
    known = None if cardinality == tf.data.UNKNOWN_CARDINALITY else cardinality
    return Source(name, lambda: dataset, dataset.element_spec, known)


def _of_arrays(arrays: Any) -> Source:
    shapes = [tuple(getattr(x, "shape", ())) for x in tf.nest.flatten(arrays)]
    if not shapes or not all(shapes):
        raise ValueError(
            "source: expected the name of a data set, a Source, a tf.data.Dataset, or arrays such as (x, y) with the "
            f"examples along the first axis; received {type(arrays).__name__}."
        )
    rows = [shape[0] for shape in shapes]
    if len(set(rows)) > 1:
        raise ValueError(
            f"source: expected arrays of equal length, received {', '.join(map(str, rows))} rows. "
            "Cut them to the same examples."
        )
    with tf.device("CPU"):
        return _of_dataset("arrays", tf.data.Dataset.from_tensor_slices(arrays))
