"""Test that Keras asks the functions and attributes that tfdist hooks for distributions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import distribution_lib
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from tfdist.keras_compat import distribution


@pytest.fixture
def asked(monkeypatch, logical_devices):
    """Return the calls of the functions of Keras' backend module, which return their names."""
    calls = []

    def function(name):
        def call(*args, **kwargs):
            calls.append(name)
            return {"num_processes": 3, "process_id": 1, "list_devices": ["cpu:0"]}.get(name, name)

        return call

    for name in distribution.FUNCTIONS:
        monkeypatch.setattr(distribution_lib, name, function(name), raising=False)
    return calls


def test_keras_calls_the_functions_of_its_backend(asked):
    public = keras.distribution
    made = public.DataParallel()
    public.initialize("a:1", 1, 0)
    public.distribute_tensor(tf.zeros([2]), public.TensorLayout([None], made.device_mesh))
    if hasattr(public, "get_device_count"):
        public.get_device_count()
    else:
        asked.append("get_device_count")  # newer than 3.10
    assert set(asked) == set(distribution.FUNCTIONS)
    assert made._is_multi_process
    distribution.leave_data_to_engine(made)
    data = tf.data.Dataset.range(6).batch(3)
    if hasattr(made, "auto_shard_dataset"):  # newer than 3.10
        adapted = TFDatasetAdapter(data, distribution=made).get_tf_dataset()
        np.testing.assert_array_equal(list(adapted), list(data))
        assert not made.auto_shard_dataset  # which Keras after 3.15 reads alone
    assert distribution.devices_of(made) == ["cpu:0"]
    assert distribution.shards_data(made)
    assert not distribution.shards_data(public.DataParallel(auto_shard_dataset=False))


def test_keras_keeps_the_distribution_where_the_hook_sees_it(monkeypatch):
    seen = []
    monkeypatch.setattr(global_state, "set_global_attribute", lambda *args: seen.append(args))
    keras.distribution.set_distribution(None)
    assert seen == [(distribution._ATTRIBUTE, None)]
