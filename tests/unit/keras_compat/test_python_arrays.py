"""Test which datasets may give arrays of Python."""

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat.python_arrays import runs_python


def test_datasets_of_tensors_do_not_run_python(tmp_path):
    """Their functions may use variables and tables."""
    path = str(tmp_path / "records")
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(b"a")
    names = keras.layers.StringLookup(vocabulary=["a"])
    scale = tf.Variable(2.0)
    numbers = tf.data.Dataset.from_tensor_slices(np.arange(4.0, dtype="float32"))
    for data in (
        numbers.map(lambda x: x * scale).shuffle(4).batch(2).cache(),
        tf.data.TFRecordDataset(path).map(names),
        tf.data.Dataset.range(2).flat_map(lambda i: tf.data.Dataset.range(i)),
        tf.data.Dataset.zip(numbers, numbers.map(tf.function(lambda x: x + 1.0))),
    ):
        assert not runs_python(data)
        list(data)


def test_functions_that_tensorflow_does_not_tell_may_run_python():
    legacy = tf.compat.v1.data.Dataset.range(2).map_with_legacy_function(lambda x: x)
    assert runs_python(legacy)
