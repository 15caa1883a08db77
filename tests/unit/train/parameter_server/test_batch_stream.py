"""Test that a data set reads the same in every process, or is known not to."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.forkserver import Popen
from tests.processes import environment
from tfdist import data
from tfdist.train.parameter_server import batch_stream
from tfdist.train.parameter_server.batch_stream import Stream
from tfdist.train.parameter_server.dispatch import RemoteRunner, WorkItem

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


def numbers(count=40):
    return tf.data.Dataset.range(count)


def make(dataset, seed=7, by_workers=True):
    return Stream(dataset, HOST, by_workers, seed=seed)


READER = """
import pickle, sys
import tensorflow as tf
from tfdist.train.parameter_server.batch_stream import dataset_variant
spec = tf.TensorSpec(None, tf.int64)
batches = {}
for name, graph in pickle.load(open(sys.argv[1], "rb")).items():
    elements = tf.data.experimental.from_variant(dataset_variant(tf.constant(graph)), spec)
    batches[name] = [tf.reshape(x, [-1]).numpy().tolist() for x in elements]
pickle.dump(batches, open(sys.argv[2], "wb"))
"""

DATA_SETS = {
    "in order": lambda: numbers().map(lambda x: x * 2).batch(4),
    "shuffled": lambda: numbers().shuffle(40),
    "shuffled and batched": lambda: numbers().shuffle(10).batch(4),
    "seeded": lambda: numbers().shuffle(40, seed=3),
    "once": lambda: numbers().shuffle(40, reshuffle_each_iteration=False),
    "seeded once": lambda: numbers().shuffle(40, seed=3, reshuffle_each_iteration=False),
    "in parts": lambda: (
        numbers().batch(8).flat_map(lambda x: tf.data.Dataset.from_tensor_slices(x).shuffle(8))
    ),
    "permuted by a map": lambda: numbers().batch(40).map(tf.random.shuffle).unbatch(),
    "drawn": lambda: tf.data.Dataset.random().take(5),
    "raced": lambda: (
        numbers().shuffle(40).map(lambda x: x + 1, num_parallel_calls=4, deterministic=False)
    ),
    "raced by files": lambda: numbers().interleave(
        tf.data.Dataset.from_tensors, 4, num_parallel_calls=4, deterministic=False
    ),
    "cached": lambda: numbers().cache().shuffle(40),
    "paired": lambda: tf.data.Dataset.zip((numbers().shuffle(40), numbers().shuffle(40))).map(
        lambda x, y: tf.stack([x, y])
    ),
    "a pipeline": lambda: data.pipeline(np.arange(40), 8, seed=5),
    "looked up": lambda: numbers().map(squares().lookup),
}


def squares():
    keys = tf.range(40, dtype=tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys**2), -1)


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """Return the elements read by two other processes, by (data set, seed, pass)."""
    directory = tmp_path_factory.mktemp("stream")
    tf.random.set_seed(None)  # other tests set it, and a shuffle inside of a map keeps to it
    graphs = {}
    for name, dataset in DATA_SETS.items():
        for seed, passes in ((1, 2), (2, 1)):
            made = make(dataset(), seed)
            assert made.by_workers, name
            graphs |= {(name, seed, number): iter(made).graph for number in range(1, 1 + passes)}
    (directory / "graphs").write_bytes(pickle.dumps(graphs))
    readers = [  # a fresh one, and one that starts sooner
        start(
            [sys.executable, "-c", READER, str(directory / "graphs"), str(directory / str(i))],
            env=environment(),
        )
        for i, start in enumerate((subprocess.Popen, Popen))
    ]
    assert [reader.wait(120) for reader in readers] == [0, 0]
    return [pickle.loads((directory / str(i)).read_bytes()) for i in range(2)]


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_process_reads_the_same_order(orders, name):
    one, two = ({key: order for key, order in each.items() if key[0] == name} for each in orders)
    assert one == two


@pytest.mark.parametrize(
    "name", ["shuffled", "seeded", "in parts", "permuted by a map", "cached", "raced"]
)
def test_each_pass_has_an_order_of_its_own_and_every_example(orders, name):
    one, two = (np.ravel(orders[0][name, 1, number]).tolist() for number in (1, 2))
    assert one != two
    assert sorted(one) == sorted(two) == list(range(name == "raced", 40 + (name == "raced")))


@pytest.mark.parametrize("name", ["once", "seeded once"])
def test_a_shuffle_that_does_not_reshuffle_keeps_its_order(orders, name):
    assert orders[0][name, 1, 1] == orders[0][name, 1, 2] != list(range(40))


def test_orders_follow_from_the_seeds(orders):
    assert orders[0]["shuffled", 1, 1] != orders[0]["shuffled", 2, 1]
    assert orders[0]["seeded", 1, 1] == orders[0]["seeded", 2, 1]
    assert (
        iter(make(numbers().shuffle(40), None)).graph
        != iter(make(numbers().shuffle(40), None)).graph
    )


def test_data_pipeline_yields_the_same_elements_on_workers(orders):
    here = DATA_SETS["a pipeline"]()
    for number in (1, 2):
        assert orders[0]["a pipeline", 1, number] == [x.tolist() for x in here.as_numpy_iterator()]


def test_a_pass_of_the_workers_is_an_epoch_of_the_pipeline():
    dataset = DATA_SETS["a pipeline"]()
    dataset.epochs.next = 5
    one = make(dataset)
    assert iter(one).graph != iter(one).graph
    assert dataset.epochs.next == 7


def test_epochs_of_a_pipeline_of_an_epoch_of_another_are_its_own():
    inner = DATA_SETS["a pipeline"]().of_epoch(0).unbatch()
    stream = make(data.pipeline(inner, 8, seed=5))
    here = [
        [x.tolist() for x in data.pipeline(inner, 8, seed=5).of_epoch(e).as_numpy_iterator()]
        for e in (0, 1)
    ]
    there = []
    for _ in range(2):
        variant = batch_stream.dataset_variant(tf.constant(iter(stream).graph))
        batches = tf.data.experimental.from_variant(variant, stream.element_spec)
        there.append([x.tolist() for x in batches.as_numpy_iterator()])
    assert there == here
    assert here[0] != here[1]


def test_two_shuffles_of_one_data_set_draw_their_own_numbers(orders):
    assert any(a != b for a, b in orders[0]["paired", 1, 1])


def test_ordered_data_keep_their_order(orders):
    assert np.ravel(orders[0]["in order", 1, 1]).tolist() == list(range(0, 80, 2))
    assert np.ravel(orders[0]["looked up", 2, 1]).tolist() == [n**2 for n in range(40)]


def immovable():
    variable = tf.Variable(1, dtype=tf.int64)
    big = tf.zeros([batch_stream.MAX_MOVED_BYTES // 4, 2])
    return {
        "Python code": numbers().map(lambda x: tf.py_function(lambda v: v, [x], tf.int64)),
        "NumPy code": numbers().map(lambda x: tf.numpy_function(lambda v: v, [x], tf.int64)),
        "a generator": tf.data.Dataset.from_generator(
            lambda: iter(range(3)), output_signature=tf.TensorSpec((), tf.int32)
        ),
        "a variable": numbers().map(lambda x: x + variable),
        "much data in a map": numbers().map(lambda x: big[x]),
        "much data": tf.data.Dataset.from_tensor_slices(
            np.zeros((batch_stream.MAX_MOVED_BYTES // 2, 1), np.float32)
        ),
    }


@pytest.mark.parametrize(
    "what",
    ["Python code", "NumPy code", "a generator", "a variable", "much data in a map", "much data"],
)
def test_data_that_cannot_move_are_read_by_the_coordinator(what):
    assert not make(immovable()[what]).by_workers


def test_coordinator_can_be_chosen_to_read():
    assert make(numbers()).by_workers
    assert not make(numbers(), by_workers=False).by_workers


def test_keras_gets_shapes_before_the_first_batch_and_loses_none():
    stream = make(numbers().batch(4), by_workers=False)
    assert isinstance(stream.symbolic_batch(), tf.TensorSpec)
    one = iter(stream)
    assert [one.batch().numpy()[0] for _ in range(10)] == list(range(0, 40, 4))
    assert one.position == one.length == 10
    with pytest.raises(StopIteration):
        one.batch()


def test_length_of_a_stream():
    assert iter(make(numbers())).length == 40
    assert iter(make(numbers().repeat())).length is None
    assert iter(make(numbers().filter(lambda x: x > 3))).length is None


@pytest.mark.usefixtures("mirrored")  # for a second device, which stands for a worker
@pytest.mark.parametrize(("batches", "stacks"), [(None, False), (3, False), (3, True)])
def test_arguments_travel_with_the_call_to_a_worker(batches, stacks):
    """Test that a tensor made on a worker does not travel before.

    It would in a call that keeps all of Python waiting for a worker that is stopped.
    """
    runner = RemoteRunner(None, None, keras.Sequential(), None, None, None, None, HOST)
    runner._seeds = tf.zeros([0, 2], tf.int64)
    runner._pass = types.SimpleNamespace(graph=b"a data set")
    graph = types.SimpleNamespace(opener="open", function="run", stacks=stacks)
    with tf.device(HOST):
        rows = batches and [
            tf.zeros([n + 1, 2]) for n in range(batches)
        ]  # as read, each of another shape
    devices = []
    indices = []

    def call(function, *given):
        devices.extend(x.device for x in given if isinstance(x, tf.Tensor))
        indices.append(int(given[-2]) if function == "run" else None)
        return tf.zeros([6]) if function == "run" else "an iterator"

    with tf.device("/cpu:1"):
        runner.execute(0, [WorkItem(3, batches or 2, rows, graph=graph)], call)
    assert devices == [HOST] * (3 * 3 if batches else 5)
    assert indices == ([3, 4, 5] if batches else [None, 3])


def test_late_steps_of_lost_workers_do_not_count():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.build((None, 1))
    pool = types.SimpleNamespace(requeued=0)
    runner = RemoteRunner(pool, None, model, model.train_step, None, None, None, HOST)
    iterations = model.optimizer.iterations
    iterations.assign(7)  # a fit goes on where another has ended
    pool.requeued = 2
    assert runner._count_updates() == 7
    runner._end = 7
    iterations.assign_add(2)
    assert runner._count_updates() == int(iterations) == 7
    for requeued, assigned in ((2, 10), (2, 0), (0, 8)):  # a callback's own assignments stay
        pool.requeued = requeued
        iterations.assign(assigned)
        assert runner._count_updates() == int(iterations) == assigned
