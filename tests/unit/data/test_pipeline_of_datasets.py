"""Test that data pipelines of data sets yield every example, ordered by seed and epoch alone."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist import data


def order(dataset):
    return [int(i) for batch in dataset for i in batch]


def numbers(count=20):
    return tf.data.Dataset.range(count)


def test_each_epoch_has_its_order_whatever_the_global_seed():
    pipeline = data.pipeline(numbers(), 6, seed=3)
    epochs = [order(pipeline) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for seed in (1, 2):
        tf.random.set_seed(seed)
        again = data.pipeline(numbers(), 6, seed=3)
        assert [order(again) for _ in range(3)] == epochs
    assert order(data.pipeline(numbers(), 6, seed=4)) != epochs[0]


def test_the_next_epoch_can_be_set():
    pipeline = data.pipeline(numbers(), 6, cache=True)
    epochs = [order(pipeline) for _ in range(3)]
    pipeline.epochs.next = 1
    assert [order(pipeline), order(pipeline)] == epochs[1:]


@pytest.mark.parametrize("shuffle", [False, 1])
def test_without_shuffle_the_order_is_the_source_s(shuffle):
    assert order(data.pipeline(numbers(), 6, shuffle=shuffle)) == list(range(20))


def test_a_small_buffer_moves_examples_but_little():
    places = order(data.pipeline(numbers(100), 10, shuffle=5))
    assert sorted(places) == list(range(100))
    assert places != sorted(places)
    assert all(example < position + 5 for position, example in enumerate(places))


def test_batches_are_global_and_counted():
    assert [len(b) for b in data.pipeline(numbers(), 6)] == [6, 6, 6, 2]
    assert int(data.pipeline(numbers(), 6).cardinality()) == 4
    assert [len(b) for b in data.pipeline(numbers(), 6, tail="drop")] == [6, 6, 6]
    unknown = numbers().filter(lambda i: i % 2 == 0)
    assert [len(b) for b in data.pipeline(unknown, 6)] == [6, 4]


def test_arrays_and_transform():
    x = {"a": np.arange(5.0), "b": np.zeros([5, 2])}
    pipeline = data.pipeline(
        (x, np.arange(5)), 5, shuffle=False, transform=lambda x, y: (x["a"] * 2, y)
    )
    features, labels = next(iter(pipeline))
    np.testing.assert_array_equal(features, 2 * labels.numpy())


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ((np.zeros(5), np.zeros(4)), {}, "equal length, received 5, 4 rows"),
        (3, {}, "received int"),
        ([], {}, "received list"),
        (np.zeros(0), {}, "0 examples, too few for one batch"),
        (
            np.zeros(5),
            {"tail": "drop"},
            "arrays has 5 examples, too few for one batch of global_batch=8",
        ),
        (np.zeros(5), {"global_batch": 0}, "global_batch: expected a number, 1 or more"),
        (np.zeros(5), {"global_batch": True}, "global_batch: expected a number, 1 or more"),
        (np.zeros(5), {"shuffle": 0}, "shuffle: expected a number, 1 or more"),
    ],
)
def test_bad_input_is_refused(source, options, message):
    with pytest.raises(ValueError, match=message):
        data.pipeline(source, **{"global_batch": 8, **options})


def test_data_without_end_is_refused():
    with pytest.raises(ValueError, match="would never end"):
        data.pipeline(tf.data.Dataset.range(3).repeat(), 8)
