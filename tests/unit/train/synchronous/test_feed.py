"""Test that replicas get all rows of a batch, whatever its form, and sum gradients correctly."""

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parity.cases import dataset
from tfdist.data.batch_rows import count_rows
from tfdist.data.order import rows_of_replicas
from tfdist.data.pipeline import pipeline
from tfdist.parallel.placement import Placement
from tfdist.train.synchronous import gradient_sum
from tfdist.train.synchronous.feed import Batch, Feed, batch_of, replica_rows, replica_slices

HOST = "/cpu:0"
ROWS = 10
BATCH = 4  # a short last batch


def placements(workers, local_replicas=1):
    return [Placement(workers, rank, local_replicas) for rank in range(workers)]


def fed(data, placement):
    return list(Feed(data, placement, HOST))


def fed_to_keras(data, placement):
    """Return the batch from which Keras infers shapes, and the batches that a step then draws."""
    feed = Feed(data, placement, HOST)
    return feed.symbolic_batch(), list(feed)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 60, 61])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_shares_are_a_partition_whose_short_ones_come_last(rows, replicas):
    shares = [rows_of_replicas(rows, r, 1, replicas) for r in range(replicas)]
    assert [i for begin, end in shares for i in range(begin, end)] == list(range(rows))
    sizes = [end - begin for begin, end in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert rows_of_replicas(rows, 0, replicas, replicas) == (0, rows)


def test_placement_counts_and_names():
    placement = Placement(workers=2, rank=1, local_replicas=3, tasks=("chief:0", "worker:0"))
    assert (placement.replicas, placement.first_replica, placement.is_chief) == (6, 3, False)
    assert (placement.task(1), Placement(2).task(1)) == ("worker:0", "worker:1")


def ragged():
    return tf.ragged.range(tf.range(ROWS))


def sparse():
    return tf.sparse.from_dense(tf.reshape(tf.range(3 * ROWS), (ROWS, 3)))


ELEMENTS = {  # made when asked for: tensors start TensorFlow
    "tensor": lambda: (np.arange(ROWS),),
    "tuple": lambda: (np.arange(ROWS), np.arange(2.0 * ROWS).reshape(ROWS, 2), np.ones(ROWS)),
    "dicts": lambda: ({"a": np.arange(ROWS), "b": {"c": np.eye(ROWS)}}, {"y": np.arange(ROWS)}),
    "string": lambda: (np.array([f"row {i}" for i in range(ROWS)]), np.arange(ROWS)),
    "bool and not a number": lambda: (np.arange(ROWS) % 2 == 0, np.full(ROWS, np.nan)),
    "ragged": lambda: (ragged(), np.arange(ROWS)),
    "ragged in a dict": lambda: ({"a": ragged()},),
    "sparse": lambda: (sparse(), np.arange(ROWS)),
    "sparse alone": lambda: (sparse(),),
}


def dense(x):
    if isinstance(x, tf.SparseTensor):
        return tf.sparse.to_dense(x)
    return x.to_tensor(shape=(None, ROWS)) if isinstance(x, tf.RaggedTensor) else x


def rows_of(batches):
    """Return each component of these batches, all rows in one array."""
    components = zip(*([dense(x) for x in tf.nest.flatten(b)] for b in batches), strict=True)
    return [np.concatenate(parts) for parts in components]


@pytest.mark.parametrize("replicas", [1, 2])
def test_tuple_with_one_component_keeps_its_type(replicas):
    """Keras takes the parts of `(x, y)` as inputs and targets, and those of `((a, b),)` as x."""
    data = tf.data.Dataset.from_tensor_slices(((np.arange(ROWS), np.ones(ROWS)),)).batch(BATCH)
    for batch in fed(data, Placement(workers=1, local_replicas=replicas)):
        tf.nest.assert_same_structure(batch.data, data.element_spec)
    slices = replica_slices(data, Placement(workers=1, local_replicas=replicas))
    tf.nest.assert_same_structure(slices.element_spec, data.element_spec)


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("replicas", [1, 2])
def test_named_tuple_keeps_its_type(replicas):
    """tf.data does not unpack it into arguments as it does a tuple."""
    data = tf.data.Dataset.from_tensor_slices(Pair(np.arange(ROWS), np.ones(ROWS))).batch(BATCH)
    for batch in fed(data, Placement(workers=1, local_replicas=replicas)):
        assert isinstance(batch.data, Pair)


@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_row_reaches_one_worker(kind, workers):
    data = dataset(*ELEMENTS[kind](), batch=BATCH)
    by_worker = [fed(data, placement) for placement in placements(workers)]
    in_order = [batch.data for step in zip(*by_worker, strict=True) for batch in step]
    for received, expected in zip(rows_of(in_order), rows_of(data), strict=True):
        np.testing.assert_array_equal(received, expected)
    tf.nest.assert_same_structure(in_order[0], data.element_spec)
    if workers > 1:
        assert [int(b.rows) for b in by_worker[-1]] == [4, 4, 2]
        checksums = [[float(b.checksum) for b in batches] for batches in by_worker]
        np.testing.assert_array_equal(checksums, [checksums[0]] * workers)


def test_a_worker_without_rows_gets_an_empty_batch_of_the_same_shape():
    batches = [fed(dataset(np.ones((1, 5))), placement)[0] for placement in placements(3)]
    assert [b.data.shape for b in batches] == [(1, 5), (0, 5), (0, 5)]


@pytest.mark.parametrize("other", ["order", "value", "rows"])
def test_other_batches_have_another_checksum(other):
    x = np.arange(12.0)
    changed = {"order": np.roll(x, 1), "value": x + 1e-3, "rows": x[:-1]}[other]
    first, second = (fed(dataset(a), Placement(2))[0].checksum for a in (x, changed))
    assert float(first) != float(second)


@pytest.mark.parametrize("workers", [1, 2])
def test_keras_gets_shapes_for_its_first_batch_and_no_batch_is_lost(workers):
    data = dataset({"a": np.arange(ROWS)}, np.zeros((ROWS, 2)), batch=BATCH)
    shapes, batches = fed_to_keras(data, Placement(workers))
    assert shapes == data.element_spec
    assert len(batches) == 3


def test_components_that_are_absent_stay_absent():
    """Keras marks a missing sample weight in a data set by an empty Optional."""
    data = dataset(np.arange(ROWS), batch=BATCH).map(
        lambda x: (x, x, tf.experimental.Optional.empty(None))
    )
    for placement in (*placements(1), *placements(2)):
        shapes, batches = fed_to_keras(data, placement)
        assert shapes[2] is None
        assert replica_rows(batches[0], 0, placement, HOST)[2] is None
    x, weight = batch_of((np.arange(4), None), Placement(2, 1)).data
    assert weight is None
    assert x.numpy().tolist() == [2, 3]


@pytest.mark.parametrize("kind", ["tuple", "ragged", "sparse"])
def test_local_replicas_share_their_workers_rows(kind):
    data = dataset(*ELEMENTS[kind](), batch=BATCH)
    parts = []
    for steps in zip(
        *(fed(data, placement) for placement in placements(2, local_replicas=2)), strict=True
    ):
        for placement, batch in zip(placements(2, local_replicas=2), steps, strict=True):
            parts += [replica_rows(batch, local, placement, HOST) for local in range(2)]
    for received, expected in zip(rows_of(parts), rows_of(data), strict=True):
        np.testing.assert_array_equal(received, expected)


def test_loops_outside_of_keras_get_the_same_rows():
    data = dataset(np.arange(ROWS), batch=BATCH)
    for placement in placements(2, local_replicas=2):
        slices = [x.numpy().tolist() for x in replica_slices(data, placement)]
        from_feed = [
            replica_rows(b, local, placement, HOST).numpy().tolist()
            for b in fed(data, placement)
            for local in range(2)
        ]
        assert slices == from_feed


def generator(rows):
    spec = tf.TensorSpec([None, 16], tf.float32)
    return tf.data.Dataset.from_generator(lambda: map(rows, range(4)), output_signature=spec)


def numpy_function(rows, number):
    return tf.ensure_shape(tf.numpy_function(rows, [number], tf.float32), [None, 16])


def flattened(rows):
    data = generator(rows)
    return tf.data.Dataset.range(1).flat_map(lambda _: data)


def drawn(rows):
    iterator = iter(generator(rows))
    return tf.data.Dataset.range(4).map(lambda _: iterator.get_next())


def in_condition(rows):
    return tf.data.Dataset.range(4).map(
        lambda number: tf.cond(
            number < 9, lambda: numpy_function(rows, number), lambda: tf.ones([8, 16])
        )
    )


def transformed(rows):
    def transform(numbers):
        return numpy_function(lambda numbers: rows(numbers[0] // 8), numbers)

    return pipeline(np.arange(32), 8, shuffle=False, batch_transform=transform)


def of_variant(rows):
    variant = tf.data.experimental.to_variant(generator(rows))
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([None, 16], tf.float32))


OF_PYTHON = {  # data sets of four batches, of a function that returns the batch of a number
    "generator": generator,
    "generator, then others": lambda rows: generator(rows).map(lambda x: {"x": x}).take(4),
    "generator in a function": lambda rows: tf.data.Dataset.range(1).flat_map(
        lambda _: generator(rows)
    ),
    "generator that a function uses": flattened,
    "iterator that a function uses": drawn,
    "variant": of_variant,
    "numpy_function": lambda rows: tf.data.Dataset.range(4).map(
        lambda number: numpy_function(rows, number)
    ),
    "numpy_function in a condition": in_condition,
    "numpy_function in a data pipeline": transformed,
}


@pytest.mark.parametrize("kind", OF_PYTHON)
@pytest.mark.parametrize("way", ["workers", "devices", "slices", "loop"])
def test_arrays_that_python_keeps_are_not_overwritten(kind, way, mirrored, kept):
    """TensorFlow writes results over rows that it cut from an array, but not over the array."""
    data = OF_PYTHON[kind](lambda number: kept[number])

    def rounded(batch):
        return tf.reduce_sum([tf.reduce_sum(tf.round(x)) for x in tf.nest.flatten(batch)])

    def rounded_of(batch, placement):
        return [rounded(replica_rows(batch, local, placement, HOST)) for local in range(2)]

    if way == "loop":
        batches = iter(mirrored.experimental_distribute_dataset(data))
        step = tf.function(lambda: mirrored.run(rounded, (next(batches),)))
    elif way == "slices":
        batches = iter(replica_slices(data, Placement(workers=2)))
        step = tf.function(lambda: rounded(next(batches)))
    elif way == "devices":
        placement = Placement(workers=1, local_replicas=2)
        batches = iter(Feed(data, placement, HOST)).iterator
        step = tf.function(lambda: rounded_of(next(batches), placement))
    else:
        batches = iter(Feed(data, Placement(workers=2), HOST)).iterator
        step = tf.function(lambda: rounded(next(batches).data))
    for _ in range(4):
        step()
    np.testing.assert_array_equal(kept, np.full_like(kept, 0.3))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_of_python_come_as_they_are(dtype, workers):
    x = (np.arange(ROWS * 2).reshape(ROWS, 2) % 7).astype(tf.as_dtype(dtype).as_numpy_dtype)
    labels = np.array([f"row {i}" for i in range(ROWS)])
    spec = tf.TensorSpec([ROWS, 2], dtype), {"y": tf.TensorSpec([ROWS], tf.string)}
    data = tf.data.Dataset.from_generator(lambda: [(x, {"y": labels})], output_signature=spec)
    data = data.map(lambda x, y: (x, y, ragged(), sparse(), None))
    parts = [fed(data, placement)[0].data for placement in placements(workers)]
    tf.nest.assert_same_structure(parts[0], data.element_spec)
    expected = rows_of(data.map(lambda *parts: parts[:4]))
    for received, whole in zip(rows_of([part[:4] for part in parts]), expected, strict=True):
        np.testing.assert_array_equal(received, whole)


@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_of_python_may_have_parts_without_rows(replicas):
    """Keras makes an Optional of a weight that is None."""
    data = tf.data.Dataset.from_generator(
        lambda: [np.arange(4.0)], output_signature=tf.TensorSpec([4], tf.float32)
    )
    nothing = tf.experimental.Optional.empty(tf.TensorSpec([None]))
    numbers = tf.data.Dataset.range(2)
    data = data.map(lambda x: (x, nothing, numbers))
    (batch,) = fed(data, Placement(workers=1, local_replicas=replicas))
    assert batch.data[0].numpy().tolist() == [0, 1, 2, 3]
    assert not batch.data[1].has_value()
    assert list(batch.data[2].as_numpy_iterator()) == [0, 1]


def test_batches_are_even_only_if_their_shapes_prove_it():
    def even(*arrays, replicas=2, **kwargs):
        return Feed(dataset(*arrays, **kwargs), Placement(replicas), HOST).even

    assert even(np.zeros(8), batch=4, drop_remainder=True)
    assert not even(np.zeros(8), batch=4)
    assert not even(np.zeros(8), batch=4, drop_remainder=True, replicas=3)
    assert even(np.zeros(8), batch=3, replicas=1)
    assert not even(sparse(), batch=4, drop_remainder=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_even_batches_keep_a_static_number_of_rows(workers):
    def static(rows, placement):
        data = tf.data.Dataset.range(3 * rows).batch(rows, drop_remainder=True)
        feed = Feed(data, placement, HOST)
        found = set()
        for batch in feed.dataset.map(
            lambda batch: (
                found.update(
                    replica_rows(batch, local, placement, HOST, feed.even).shape[0]
                    for local in range(placement.local_replicas)
                )
                or batch
            )
        ):
            assert len(batch.data) == rows // workers or not feed.even
        return found

    for placement in placements(workers, local_replicas=2):
        assert static(8, placement) == {8 // placement.replicas}
        assert static(7, placement) == {None}


def of_two_sizes(first, second, **kwargs):
    """Return a data set of tuples of 16 rows and 8, in batches of these sizes."""
    return tf.data.Dataset.zip(
        tf.data.Dataset.range(16).batch(first, **kwargs),
        tf.data.Dataset.range(8).batch(second, **kwargs),
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("loop", [False, True])
def test_parts_of_a_batch_may_have_different_numbers_of_rows(workers, loop):
    data = of_two_sizes(8, 4, drop_remainder=True)
    found = []
    for placement in placements(workers, local_replicas=2):
        if loop:
            found += replica_slices(data, placement)
        else:
            found += [
                replica_rows(batch, local, placement, HOST, even=True)
                for batch in fed(data, placement)
                for local in range(2)
            ]
    assert {(len(x), len(y)) for x, y in found} == {(4 // workers, 2 // workers)}
    for part, rows in enumerate((16, 8)):
        assert sorted(np.concatenate([each[part] for each in found])) == list(range(rows))


@pytest.mark.parametrize("workers", [1, 2])
def test_numbers_of_rows_that_replicas_cannot_share_are_an_error(workers):
    placement = Placement(workers, local_replicas=2)
    expected = r"same number of rows, received.*drop_remainder.*multiple of the \d replicas"
    for give in (fed, replica_slices):
        with pytest.raises(ValueError, match=expected):
            give(of_two_sizes(8, 5, drop_remainder=True), placement)
        for sizes in ((8, 4), (8, 5)):
            with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
                list(give(of_two_sizes(*sizes), placement))
    with pytest.raises(ValueError, match=expected):
        batch_of((np.arange(8), np.arange(4)), placement)
    for kind in (sparse, ragged):
        rows = tf.data.Dataset.from_tensor_slices(kind()).batch(4)
        zipped = tf.data.Dataset.zip(rows, tf.data.Dataset.range(9).batch(3))
        with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
            fed(zipped, placement)


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(ValueError, match="holds no tensor"):
        count_rows((None, {}))


def test_data_distributed_by_the_user_stay_as_they_are():
    assert replica_rows(
        Batch([tf.range(2), tf.range(3)]), 1, Placement(2, 0, 2), HOST
    ).numpy().tolist() == [0, 1, 2]
    assert replica_rows(Batch(tf.range(3)), 0, Placement(2, 0, 1), HOST).numpy().tolist() == [
        0,
        1,
        2,
    ]


# --- Gradients ------------------------------------------------------------------------------------
def test_gradients_of_any_dtype_are_summed_and_none_stays_none(mirrored):
    def replica():
        context = tf.distribute.get_replica_context()
        n = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
        grads = [
            n,
            None,
            tf.cast(n, tf.float16),
            tf.IndexedSlices(n[None], tf.constant([0]), tf.constant([1])),
            n * 10,
        ]
        sums = gradient_sum.sum_over_replicas(context, grads)
        assert sums[1] is None
        return [tf.reduce_sum(getattr(s, "values", s)) for s in sums if s is not None]

    results = tf.function(lambda: mirrored.run(replica))()
    for replica_sums in zip(
        *(mirrored.experimental_local_results(r) for r in results), strict=True
    ):
        assert [float(s) for s in replica_sums] == [3, 3, 3, 30]


@pytest.fixture(scope="module")
def models(mirrored):
    """Return a model of Keras alone and one of two replicas."""
    made = []
    for strategy in (tf.distribute.get_strategy(), mirrored):
        with strategy.scope():
            made.append(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
            made[-1].compile("sgd", "mse", metrics=["mae"])
    return made


def reshuffled(rows=8):
    x = np.linspace(0, 7, rows, dtype="float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((x, x)).shuffle(8)


def validated_by_itself():
    data = reshuffled().batch(2)
    return {"x": data, "validation_data": data.take(2)}


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: {"x": reshuffled().batch(2)},
        lambda: {"x": reshuffled().batch(2).filter(lambda x, y: True)},
        lambda: {"x": reshuffled().batch(2), "steps_per_epoch": 2},
        # tf.data reads some batches ahead without tfdist, in time-dependent numbers: not so many
        # that another pass begins, for which it draws a seed.
        lambda: {"x": reshuffled(rows=64).repeat().batch(2), "steps_per_epoch": 11},
        validated_by_itself,
    ],
    ids=["passes", "unknown length", "parts of passes", "endless", "validated"],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras learns the length so
def test_a_data_set_that_reshuffles_has_the_same_orders_as_in_keras(models, arguments):
    histories = []
    for model in models:
        model.set_weights([np.full([1, 1], 0.5), np.zeros([1])])
        keras.utils.set_random_seed(1)
        given = arguments()
        fits = [model.fit(**given, epochs=3, verbose=0).history for _ in range(2)]
        histories.append([values for history in fits for values in history.values()])
    np.testing.assert_allclose(*histories, rtol=1e-4)
