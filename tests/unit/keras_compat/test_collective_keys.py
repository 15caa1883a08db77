"""Test that keys of collectives are not kept."""

import sys

import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys

import tfdist


def test_no_key_of_a_call_is_kept(monkeypatch):
    keys = []
    original = CollectiveKeys.get_instance_key

    def get_instance_key(self, group_key, device):
        keys.append(original(self, group_key, device) + 100_000)  # no number that Python shares
        return keys[-1]

    monkeypatch.setattr(CollectiveKeys, "get_instance_key", get_instance_key)
    strategy = tfdist.make_strategy("mirrored", devices=["CPU:0", "CPU:1"])

    def total():
        return tf.distribute.get_replica_context().all_reduce("sum", tf.ones([2]))

    function = tf.function(lambda: strategy.run(total))
    for _ in range(2):
        values = strategy.experimental_local_results(function())
        assert [value.numpy().tolist() for value in values] == [[2, 2], [2, 2]]
    assert len(keys) == 4  # of two calls on two devices
    unused = [int("112345")]
    assert {sys.getrefcount(key) for key in keys} == {sys.getrefcount(key) for key in unused}
