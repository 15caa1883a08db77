"""Test that iterators over distributed data sets end: at once, and also within a function."""

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops, multi_device_iterator_ops

import tfdist


@pytest.fixture
def iterated(monkeypatch):
    """Return a list of the data sets that TensorFlow makes iterators over, on host and devices."""
    found = []
    for owner in (iterator_ops.OwnedIterator, multi_device_iterator_ops.OwnedMultiDeviceIterator):
        original = owner.__init__

        def noting(self, dataset=None, *args, original=original, **kwargs):
            found.append(dataset)
            original(self, dataset, *args, **kwargs)

        monkeypatch.setattr(owner, "__init__", noting)
    return found


def distributed(strategy, data, how):
    if how == "dataset":
        return strategy.experimental_distribute_dataset(data)
    return strategy.distribute_datasets_from_function(lambda context: data)


@pytest.mark.parametrize("how", ["dataset", "function"])
def test_iterators_over_a_distributed_data_set_have_no_autotuner(how, iterated):
    strategy = tfdist.make_strategy("mirrored", devices=["cpu:0", "cpu:1"])
    rows = [int(strategy.reduce("SUM", x, 0)) for x in distributed(strategy, batches(), how)]
    assert sum(rows) == sum(range(8))
    assert [each.options().autotune.enabled for each in iterated] == [False] * 3


@pytest.mark.parametrize("how", ["dataset", "function"])
def test_an_autotuner_that_a_user_asks_for_is_kept(how, iterated):
    options = tf.data.Options()
    options.autotune.enabled = True
    strategy = tfdist.make_strategy("one_device", devices="cpu")
    iter(distributed(strategy, batches().with_options(options), how))
    assert iterated[0].options().autotune.enabled is True


@pytest.mark.parametrize("kind", ["multi_worker_mirrored", "mirrored"])
def test_a_function_that_begins_a_pass_ends_with_one_thread(kind, run_python):
    code = f"""
import tfdist
devices = 2 if {kind!r} == "mirrored" else "cpu"
strategy = tfdist.make_strategy({kind!r}, devices=devices, threads=1)
import tensorflow as tf
data = tf.data.Dataset.range(100).map(lambda x: x * 2, num_parallel_calls=2).batch(4).prefetch(2)
data = strategy.experimental_distribute_dataset(data)

@tf.function
def first_batches():
    iterator = iter(data)
    return [total_of_the_next(iterator) for _ in range(3)]

@tf.function
def total_of_the_next(iterator):
    return strategy.reduce("SUM", strategy.run(tf.identity, args=(next(iterator),)), 0)

print([int(total) for total in first_batches()])
"""
    done = run_python(code)
    assert done.stdout.strip() == "[12, 44, 76]", done.stderr


def batches():
    return tf.data.Dataset.range(8).batch(4)
