"""tf.data's tuner, which no data set has that did not ask for it."""

from __future__ import annotations

import os

import tensorflow as tf


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same elements, without the thread that tunes how many calls run at a time: `AUTOTUNE` means one for each core, or for each
    thread of a pool of the data set's own, up to 16.

    The end of an iterator waits for that thread, with Python's lock held. It sleeps for as long as the iterator has lived, up to a
    minute, and is woken before it can see that it is to end: TensorFlow's `StartCancel` calls back first and only then counts as
    cancelled. If it is quick, it sleeps on: of forty iterators of 90 seconds one took 51 seconds to end. One process that
    stalls makes all others of a training wait.

    A data set whose options say something of the tuner, its cores or its memory keeps them.
    """
    asked = dataset.options().autotune
    if any(value is not None for value in (asked.enabled, asked.cpu_budget, asked.ram_budget)):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    if asked.initial_parallelism is None:
        options.autotune.initial_parallelism = max(16, os.cpu_count() or 1)
    return dataset.with_options(options)
