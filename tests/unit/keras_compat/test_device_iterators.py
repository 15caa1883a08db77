"""Test that no iterator over a distributed data set has an autotuner, which may delay its end."""

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


def batches():
    return tf.data.Dataset.range(8).batch(4)
