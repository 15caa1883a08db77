"""Default `tf.data` options: the autotuner is off unless a dataset asks for it."""

from __future__ import annotations

import os

import tensorflow as tf


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset without the autotuner thread.

    The thread tunes how many calls run at a time. Without it, `AUTOTUNE` means one call for each
    core, or for each thread of the dataset's private thread pool, up to 16.

    The destruction of an iterator waits for that thread, with Python's lock (the GIL) held. The
    thread sleeps for as long as the iterator has lived, up to a minute, and is woken before it can
    see that it has to end: TensorFlow's `StartCancel` first runs its callbacks and only then counts
    as cancelled. If the thread is quick, it goes back to sleep: of forty iterators of 90 seconds,
    one took 51 seconds to end. One process that stalls makes all other processes of a training run
    wait.

    A dataset keeps the autotuner if its options set the autotuner, its CPU budget or its RAM
    budget.

    Args:
        dataset: The dataset.

    Returns:
        A dataset of the same elements.
    """
    asked = dataset.options().autotune
    if any(value is not None for value in (asked.enabled, asked.cpu_budget, asked.ram_budget)):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    if asked.initial_parallelism is None:
        options.autotune.initial_parallelism = max(16, os.cpu_count() or 1)
    return dataset.with_options(options)
