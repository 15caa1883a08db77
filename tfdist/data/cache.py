"""Caches of a Source in memory or in TFRecord files.

The examples are read once, when the cache is created. A source with `walk` is cached in memory
during its first pass instead.
"""

from __future__ import annotations

import dataclasses
import itertools

import tensorflow as tf

from tfdist.data.errors import location_of
from tfdist.data.sources.source import Source, check_labels
from tfdist.data.writing.record_shards import name_unreadable

_BATCH = 1024  # examples in one read


def cached(source: Source, cache: bool | str) -> Source:
    """Return a Source of the same examples, kept in memory or in a directory.

    Args:
        source: The source.
        cache: True: in memory; decoded if all examples have one shape, else as they are stored. A
            directory: in TFRecord files there.

    Returns:
        A Source. If `source` has `walk` and the cache is in memory, the first pass fills the cache.

    Raises:
        ValueError: If an example cannot be read (with its place), if a label is not one of the
            classes, or if the examples have neither one shape nor a stored form.

    Example:
        >>> cached(Source.of(tf.data.Dataset.range(3)), True).cardinality
        3
    """
    if source.gather is not None:
        return source
    if not isinstance(cache, bool):
        from tfdist.data.sources.records import records
        from tfdist.data.writing.writer import write

        write(source, cache)
        return records(cache)
    if source.walk is not None:
        examples = source.walk().cache()
        return dataclasses.replace(source, walk=lambda: examples)
    if all(
        isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined()
        for s in tf.nest.flatten(source.element_spec)
    ):
        return _of_tensors(source, _read(source, source.dataset()))
    if source.raw is None or (source.assemble is None and source.decode is None):
        raise ValueError(
            f"cache: the examples of {source.name} have no common shape ({source.element_spec}). "
            "Resize them with source.map(...) first, or pass cache=DIRECTORY."
        )
    raw = source.raw
    decode = source.decode
    assemble = source.assemble
    numbers = tf.data.Dataset.range(source.cardinality)
    stored = _read(source, numbers.map(raw, num_parallel_calls=tf.data.AUTOTUNE))

    def read(number):
        if assemble is not None:
            return assemble(number, stored[number])
        assert decode is not None
        return decode(stored[number])

    return dataclasses.replace(source, scan=None, read=read, raw=lambda number: stored[number])


def _of_tensors(source: Source, tensors) -> Source:
    label = tensors[1] if isinstance(tensors, tuple) and len(tensors) > 1 else None
    if (
        source.classes is not None
        and isinstance(label, tf.Tensor)
        and label.dtype.is_integer
        and label.shape.rank == 1
    ):
        check_labels(
            source.name,
            label.numpy(),
            source.classes,
            lambda number: location_of(source, number) or f"example {number}",
        )
    return dataclasses.replace(
        source,
        read=None,
        scan=None,
        raw=None,
        gather=lambda numbers: tf.nest.map_structure(lambda x: tf.gather(x, numbers), tensors),
    )


def _read(source: Source, dataset: tf.data.Dataset):
    """Read all elements of a dataset with one element per example, `[examples, ...]`."""
    try:
        parts = list(dataset.batch(_BATCH))
    except tf.errors.OpError:
        for _ in name_unreadable(
            source, iter(dataset), itertools.count()
        ):  # names the first that cannot be read
            pass
        raise
    with tf.device("CPU"):
        return tf.nest.map_structure(lambda *x: tf.concat(x, 0), *parts)
