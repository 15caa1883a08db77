"""Iterators over the batches of one device, which end at once.

Where a distributed data set has several devices, TensorFlow copies the batches of each by an
iterator with an autotuner of its own, which tunes nothing, and for which the end of the iterator
may wait up to a minute; see `tfdist.data.autotune`. These iterators do not have the options of the
data set.
"""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops as _iterators


def hook_device_iterators() -> None:
    """Make the iterators over each device's batches without an autotuner."""
    original = _iterators._create_device_dataset

    @functools.wraps(original)
    def create(*args, **kwargs):
        options = tf.data.Options()
        options.autotune.enabled = False
        return original(*args, **kwargs).with_options(options)

    _iterators._create_device_dataset = create
