"""Test that data sets have tf.data's tuner only if they asked for it.

The others run as many calls at a time as before.
"""

import threading

import pytest
import tensorflow as tf

from tfdist.data.autotune import untuned
from tfdist.parallel.placement import Placement
from tfdist.train.synchronous.feed import Feed


def with_autotune(data, **values):
    options = tf.data.Options()
    for name, value in values.items():
        setattr(options.autotune, name, value)
    return data.with_options(options)


def test_parallel_calls_run_at_the_same_time_without_the_tuner():
    four = threading.Barrier(4)

    def meet(x):
        four.wait(timeout=60)
        return x

    options = tf.data.Options()
    options.threading.private_threadpool_size = 4  # wherever this runs
    data = tf.data.Dataset.range(8).map(
        lambda x: tf.numpy_function(meet, [x], tf.int64), num_parallel_calls=tf.data.AUTOTUNE
    )
    assert list(untuned(data.with_options(options)).as_numpy_iterator()) == list(range(8))


@pytest.mark.parametrize(
    "asked",
    [{"enabled": True}, {"enabled": False}, {"cpu_budget": 2}, {"ram_budget": 10**6}],
    ids=str,
)
def test_tuner_that_a_user_asks_for_is_kept(asked):
    data = with_autotune(tf.data.Dataset.range(4), **asked)
    assert untuned(data) is data


def test_chosen_parallelism_is_kept():
    autotune = (
        untuned(with_autotune(tf.data.Dataset.range(4), initial_parallelism=3)).options().autotune
    )
    assert (autotune.enabled, autotune.initial_parallelism) == (False, 3)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("begun", [False, True])
def test_steps_read_data_without_the_tuner(replicas, begun):
    feed = Feed(tf.data.Dataset.range(8).batch(4), Placement(replicas, 0, 1), "/cpu:0")
    if begun:
        feed.begin_at(0, 1)
    assert feed.next_pass().options().autotune.enabled is False
