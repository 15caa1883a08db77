"""Keys of collectives, without TensorFlow's cache, which would keep each of them."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils as _cross_device_utils


def hook_keys() -> None:
    """Make the key of a collective a tensor without TensorFlow's cache of Python numbers.

    Each call of a function with collectives takes new keys, and an eager tensor that is made of a
    Python number stays in a cache without a limit (tensorflow #68196), 0.7 kB each. NumPy's numbers
    are not cached.
    """
    launcher = _cross_device_utils.CollectiveReplicaLauncher
    original = launcher._next_instance_key

    @functools.wraps(original)
    def next_instance_key(self):
        if not self._use_unique_instance_key() or not tf.executing_eagerly():
            return original(self)
        key = self._collective_keys.get_instance_key(self._group_key, self._device)
        with tf.device("CPU:0"):
            return tf.constant(np.int32(key))

    launcher._next_instance_key = next_instance_key
