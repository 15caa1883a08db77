"""Measure the cost of shuffling the numbers of examples: time, and memory of a fresh process.

No examples are read.

The examples are their own numbers, so that what is measured is order alone.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable

BATCH = 1024
TIMED = 1_000_000  # examples, at most


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a process: a key of `MEASURES`, and how many examples it measures.

    Args:
        measure: Key of `MEASURES`.
        examples: Number of examples.
        buffer: Examples that `Dataset.shuffle` holds.
        cores: Cores that the process may use.
    """

    measure: str
    examples: int
    buffer: int
    cores: tuple[int, ...]


def serve(job: Job) -> tuple[dict, Callable]:
    """Measure at once; the process takes no orders."""
    os.sched_setaffinity(0, job.cores)
    return MEASURES[job.measure](job), lambda: None


def _tfdist(job: Job) -> dict:
    return _measure(lambda examples: _numbers(examples), job.examples)


def _tf_data(job: Job) -> dict:
    import tensorflow as tf

    def make(examples):
        return (
            tf.data.Dataset.range(examples)
            .shuffle(min(examples, job.buffer))
            .batch(BATCH)
            .prefetch(tf.data.AUTOTUNE)
        )

    return _measure(make, job.examples)


def _resume(job: Job) -> dict:
    """Return the seconds to an epoch's last batch, with a new and an existing data pipeline."""
    next(iter(_numbers(10 * BATCH)))
    begin = time.perf_counter()
    batches = _numbers(job.examples)
    built = time.perf_counter()
    last = batches.order.steps - 1
    iterator = iter(batches.of_epoch(0, last))
    batch = next(iterator)
    end = time.perf_counter()
    last_examples = job.examples - last * BATCH
    if (
        batch.shape[0] != last_examples
        or next(iterator, None) is not None
        or (batch.numpy() != batches.order.batch(0, last).numpy()).any()
    ):
        raise ValueError(
            f"expected the last batch of {last_examples} examples, and no other; received {batch}"
        )
    return {"all": end - begin, "iterator": end - built}


MEASURES = {"tfdist": _tfdist, "tf_data": _tf_data, "resume": _resume}


def _numbers(examples: int):
    """Return a data pipeline of tfdist whose examples are their own numbers."""
    import tensorflow as tf

    from tfdist.data import Source, pipeline

    return pipeline(
        Source("numbers", tf.TensorSpec([], tf.int64), cardinality=examples, gather=tf.identity),
        BATCH,
    )


def _measure(make: Callable, examples: int) -> dict:
    """Time one pass, after a small one that starts threads and loads code.

    Returns:
        "first": seconds from making the data set to its first batch; "million": seconds per million
            examples after that;
        "memory": bytes that the process grew by, at its peak.
    """
    for _ in make(10 * BATCH):
        pass
    # See proc(5): the peak is now what is held now.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    begin = time.perf_counter()
    iterator = iter(make(examples))
    next(iterator)
    first = time.perf_counter() - begin
    steps = min(examples, TIMED) // BATCH - 1
    begin = time.perf_counter()
    for _ in range(steps):
        next(iterator)
    seconds = time.perf_counter() - begin
    return {
        "first": first,
        "million": 1e6 * seconds / (steps * BATCH),
        "memory": _status("VmHWM") - before,
    }


def _status(field: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
