"""Iterators over the batches of one device, which end at once.

Where a distributed data set has several devices, TensorFlow copies the batches of each by an
iterator with an autotuner of its own, which tunes nothing, and for which the end of the iterator
may wait up to a minute; see `tfdist.data.autotune`. These iterators do not have the options of the
data set.

If a `tf.function` makes such an iterator, its end holds a thread of TensorFlow's operations until
another one has run an operation that frees it: on one core, the function would never end. The only
CPU device of a process needs no copies, and gets its batches without.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops as _iterators
from tensorflow.python.distribute import input_lib as _input_lib


def hook_device_iterators() -> None:
    """Let the iterators over each device's batches end without an autotuner or a free thread."""
    original = _iterators._create_device_dataset

    @functools.wraps(original)
    def create(*args, **kwargs):
        options = tf.data.Options()
        options.autotune.enabled = False
        return original(*args, **kwargs).with_options(options)

    _iterators._create_device_dataset = create

    make_iterator = _input_lib._SingleWorkerOwnedDatasetIterator._make_iterator

    @functools.wraps(make_iterator)
    def make(self):
        if not tf.executing_eagerly() and _is_one_cpu(self._devices):
            # The mode says that there is one iterator for each replica.
            self._options = (self._options or tf.distribute.InputOptions())._replace(
                experimental_fetch_to_device=False,
                experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
            )
        make_iterator(self)

    _input_lib._SingleWorkerOwnedDatasetIterator._make_iterator = make

    distributed_init = _input_lib.DistributedIterator.__init__

    @functools.wraps(distributed_init)
    def init(self, *args, **kwargs):
        distributed_init(self, *args, **kwargs)
        # A function that takes the iterator derives the type of its parts from these options.
        self._options = getattr(self._iterators[0], "_options", self._options)

    _input_lib.DistributedIterator.__init__ = init


def _is_one_cpu(devices: Sequence[str]) -> bool:
    return [tf.DeviceSpec.from_string(device).device_type for device in devices] == ["CPU"]
