"""Test that each batch has the rows of the order, whatever the source.

Each replica reads its own rows, and errors name bad examples.
"""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.pipeline import Epochs, pipeline
from tfdist.data.portable import graph_of, nodes
from tfdist.data.reading import Window
from tfdist.data.sources.records import records
from tfdist.data.sources.source import Source, of_arrays, of_generator

LENGTHS = (5, 0, 7, 3)
COUNT = sum(LENGTHS)
IN_ORDER = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("stream")
    numbers = iter(range(COUNT))
    for file, length in enumerate(LENGTHS):
        with tf.io.TFRecordWriter(str(root / str(file))) as writer:
            for _ in range(length):
                writer.write(str(next(numbers)).encode())
    return tf.constant([str(root / str(file)) for file in range(len(LENGTHS))])


def stream(files):
    def scan(file, first, count):
        return tf.data.TFRecordDataset(files[file]).skip(first).take(count)

    spec = tf.TensorSpec([], tf.int64)
    return Source(
        "stream",
        spec,
        COUNT,
        scan=scan,
        lengths=LENGTHS,
        decode=lambda s: tf.strings.to_number(s, tf.int64),
    )


def single(bad=-1, label=lambda n: n, classes=None):
    """Return a source read one by one, whose example `bad` cannot be."""

    def read(number):
        with tf.control_dependencies(
            [tf.debugging.Assert(tf.not_equal(number, bad), ["unreadable"])]
        ):
            return tf.cast(number, tf.float32), label(number)

    spec = (tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64))
    describe = lambda number: tf.strings.join(["file ", tf.strings.as_string(number)])  # noqa: E731
    return Source("singles", spec, COUNT, classes, read=read, describe=describe)


def expected(batches, epoch, first_step=0):
    return [
        batches.order.batch(epoch, step).numpy().tolist()
        for step in range(first_step, batches.order.steps)
    ]


def rows(dataset):
    """Return the first component of each batch."""
    return [
        np.asarray(batch[0] if isinstance(batch, tuple) else batch, np.int64).tolist()
        for batch in dataset
    ]


def shared(batches, replicas, **where):
    """Return the batches that each replica reads."""
    return [batches.replica_rows(r, 1, replicas, **where) for r in range(replicas)]


def joined(shares):
    """Return the batches that the replicas' shares make together."""
    shares = [list(share) for share in shares]
    assert len({len(share) for share in shares}) == 1
    for parts in zip(*shares, strict=True):
        assert len({(int(p.rows), float(p.fingerprint)) for p in parts}) == 1
    return [
        [n for p in parts for n in p.numbers.numpy().tolist()]
        for parts in zip(*shares, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "replicas", "first_step"), [("arrays", 3, 0), ("singles", 2, 1), ("transformed", 2, 0)]
)
def test_batches_and_shares_are_those_of_the_order(kind, replicas, first_step):
    batches = pipeline(
        single() if kind == "singles" else np.arange(COUNT),
        6,
        seed=3,
        transform=(lambda x: x) if kind == "transformed" else None,
    )
    batches.epochs.next = 1
    assert rows(batches) == expected(batches, 1)
    assert joined(shared(batches, replicas, epoch=1, first_step=first_step)) == expected(
        batches, 1, first_step
    )
    if kind != "transformed":  # it is read as the singles are
        assert rows(batches.of_epoch(1, first_step=2)) == expected(batches, 1, first_step=2)
        assert rows(batches.of_epoch(1, first_step=batches.order.steps)) == []


def test_a_stream_shared_across_its_parts_resumes_in_a_block(files, monkeypatch):
    """It resumes anywhere else, too.

    Its data sets take long to make: the test reads each from several positions.
    """
    monkeypatch.setattr(sys.modules[Epochs.__module__], "SMALLEST_BLOCK", 2)
    batches = pipeline(
        stream(files), 4, seed=3, shuffle=8
    )  # 4 parts of 3 examples, in blocks of 2; and a batch of 3
    assert (batches.order.streams, batches.order.block, batches.order.steps) == (4, 2, 4)
    batches.epochs.next = 1
    assert rows(batches) == expected(batches, 1)
    now = [0, 0]

    def position(_):
        return tuple(
            tf.ensure_shape(x, [])
            for x in tf.numpy_function(lambda: tuple(map(np.int64, now)), [], (tf.int64, tf.int64))
        )

    shares = [
        batches.batches.replica_rows(Window(r, 1, 2), tf.data.Dataset.from_tensors(0).map(position))
        for r in range(2)
    ]
    for now[:] in ([1, 1], [0, 3], [1, batches.order.steps]):
        assert joined(shares) == expected(batches, *now)


def test_a_stream_in_order_is_in_order(files):
    assert rows(pipeline(stream(files), 4, shuffle=False)) == IN_ORDER


def test_a_generator_is_shared_by_rows():
    source = of_generator(lambda: iter(range(COUNT)), tf.TensorSpec([], tf.int64))
    batches = pipeline(source, 4, shuffle=5)
    seen = joined(shared(batches, 2, epoch=0))
    assert seen == rows(batches)
    assert sorted(n for batch in seen for n in batch) == list(range(COUNT))
    assert joined(shared(batches, 2, epoch=0, first_step=2)) == seen[2:]


@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_padding_has_no_weight_and_keeps_the_mean(kind):
    x = np.arange(10.0, dtype=np.float32)
    source = (
        (x, x)
        if kind == "arrays"
        else tf.data.Dataset.from_tensor_slices((x, x)).filter(lambda x, y: True)
    )
    batches = pipeline(source, 4, tail="pad", shuffle=False)
    assert batches.element_spec[0].shape == [4]
    *_, (values, _, weights) = batches
    assert np.mean(values * weights) == pytest.approx(np.mean(x[8:]))
    assert weights.numpy().tolist() == [2, 2, 0, 0]
    last = [list(batches.replica_rows(r, 1, 2, epoch=0))[-1] for r in range(2)]
    assert [share.numbers.numpy().tolist() for share in last] == [[8, 9], [-1, -1]]
    assert [int(share.rows) for share in last] == [4, 4]


def test_padding_multiplies_the_user_s_weights():
    x = np.ones([3, 1], np.float32)
    weighted = pipeline((x, x, np.array([1.0, 2, 3])), 2, tail="pad", shuffle=False)
    assert [w.numpy().tolist() for _, _, w in weighted] == [[1, 2], [6, 0]]
    with pytest.raises(ValueError, match=r"arrays: tail=\"pad\" .* Expected examples \(x, y\)"):
        pipeline(x, 2, tail="pad")


def test_dropping_leaves_whole_batches():
    batches = pipeline(np.arange(10), 4, tail="drop")
    assert [len(b) for b in batches] == [4, 4]
    assert batches.element_spec.shape == [4]


def test_randomness_follows_from_seed_epoch_and_example(files):
    def noisy(x, seed):
        return tf.stack([tf.cast(x, tf.float32), tf.random.stateless_uniform([], seed)])

    def seen(batches, epoch=2):
        batches.epochs.next = epoch
        return {int(x): float(noise) for batch in batches for x, noise in batch.numpy()}

    one = pipeline(np.arange(COUNT), 4, transform=noisy)
    noise_of = seen(one)
    assert len(noise_of) == COUNT
    assert noise_of == seen(
        pipeline(stream(files), 5, shuffle=False, transform=noisy)
    )  # other batches, another order and way of reading
    assert not set(noise_of.values()) & set(seen(one, 3).values())
    assert not set(noise_of.values()) & set(
        seen(pipeline(np.arange(COUNT), 4, seed=1, transform=noisy)).values()
    )


def test_batch_transforms_get_a_seed_for_each_row():
    def noisy(x, seeds):
        return tf.stack(
            [
                tf.cast(x, tf.float32),
                tf.map_fn(lambda s: tf.random.stateless_uniform([], s), seeds, tf.float32),
            ],
            1,
        )

    def seen(shares):
        return {int(x): float(noise) for share in shares for x, noise in share.data.numpy()}

    batches = pipeline(np.arange(8), 4, batch_transform=noisy)
    parts = {}
    for replica in range(2):
        parts |= seen(batches.replica_rows(replica, 1, 2, epoch=0))
    assert parts == seen(batches.replica_rows(0, 1, 1, epoch=0))
    assert len(set(parts.values())) == 8


def test_a_bad_example_is_named():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"singles: cannot be read or decoded.*file 7"
    ):
        list(pipeline(single(bad=7), 4))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"expected a label from 0 to 9.*\[10\].*file 10"
    ):
        list(pipeline(single(classes=10), COUNT, shuffle=False, transform=lambda x, y: (x, y)))

    changed = of_arrays((np.arange(4), np.arange(4)), classes=4).map(lambda x, y: (x, y + 2))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"expected a label from 0 to 3.*\[4\]"
    ):
        list(pipeline(changed, 4, shuffle=False))

    def fails(x, y):
        with tf.control_dependencies([tf.debugging.Assert(x != 9, ["odd"])]):
            return tf.identity(x), y

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"singles: cannot be transformed.*file 9"
    ):
        list(pipeline(single(), 4, transform=fails))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"to the batch.*Shapes are"):
        list(pipeline(single(), 4, transform=lambda x, y: tf.zeros(tf.cast(x, tf.int32))))


def test_where_nothing_can_be_read_the_first_batch_ends_the_pass():
    tried = []

    def read(number):
        def refuse(number):
            tried.append(int(number))
            raise OSError("gone")

        return tf.ensure_shape(tf.numpy_function(refuse, [number], tf.int64), [])

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"gone: cannot be read or decoded.*example [0-3]"
    ):
        list(
            pipeline(
                Source("gone", tf.TensorSpec([], tf.int64), 10_000, read=read), 4, shuffle=False
            )
        )
    assert max(tried) < 1000


def test_failed_read_is_tried_a_second_time():
    tried = []

    def read(number):
        def second(number):
            tried.append(int(number))
            if number == 5 and tried.count(5) == 1:
                raise OSError("hiccup")
            return number

        return tf.ensure_shape(tf.numpy_function(second, [number], tf.int64), [])

    batches = pipeline(
        Source("hiccup", tf.TensorSpec([], tf.int64), 16, read=read), 4, shuffle=False
    )
    assert rows(batches) == np.arange(16).reshape(4, 4).tolist()
    assert tried.count(5) == 2


def test_bad_examples_are_left_out_counted_and_reported():
    batches = pipeline(single(bad=7), 4, ignore_errors=1)
    weights = {
        int(x): float(w)
        for values, _, w in ((x, y, w) for x, y, w in batches)
        for x, w in zip(values.numpy(), w.numpy(), strict=True)
    }
    assert batches.errors.report() == "example 7: file 7"
    assert sum(weights.values()) == COUNT - 1  # the row of 7 holds zeros, as does example 0

    def fails(x, y):
        return tf.ensure_shape(tf.cond(x > 2, lambda: tf.zeros([2]), lambda: tf.zeros([3])), [3]), y

    with pytest.raises(tf.errors.OpError, match="more than ignore_errors=3 examples"):
        list(pipeline(single(), 4, transform=fails, ignore_errors=3))
    with pytest.raises(
        ValueError,
        match=r"ignore_errors: expected dense examples of a static shape.*tf.ensure_shape",
    ):
        list(
            pipeline(
                single(),
                4,
                transform=lambda x, y: (tf.zeros(tf.cast(x, tf.int32)), y),
                ignore_errors=3,
            )
        )


def test_examples_of_arrays_are_never_skipped():
    x, _, weight = next(
        iter(pipeline((np.arange(3), np.arange(3)), 3, shuffle=False, ignore_errors=1))
    )
    assert (x.numpy().tolist(), weight.numpy().tolist()) == ([0, 1, 2], [1, 1, 1])


def test_labels_can_be_left_out():
    batches = pipeline(
        (np.arange(5), np.arange(5)),
        2,
        shuffle=False,
        labels=False,
        transform=lambda x, y: (x * 10, y),
    )
    assert rows(batches) == [[0, 10], [20, 30], [40]]


@pytest.mark.parametrize("kind", ["singles", "stream"])
def test_a_cache_holds_the_same_examples(kind, files):
    kept = pipeline(single() if kind == "singles" else stream(files), 4, cache=True, shuffle=False)
    assert rows(kept) == IN_ORDER
    assert kept.batches.source.gather is not None


def test_threads_and_memory_are_bounded_and_device_prefetch_is_last():
    batches = pipeline(np.arange(5), 2, threads=2, ram_budget=10**6, device="/cpu:0", shuffle=False)
    options = batches.batches.options
    assert (
        options.threading.private_threadpool_size,
        options.autotune.cpu_budget,
        options.autotune.ram_budget,
    ) == (2, 2, 10**6)
    assert rows(batches) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pipeline(np.arange(10), 10).replica_rows(0, 1, 3),
            "global_batch=10: expected a multiple of the 3 replicas.*9 and 12",
        ),
        (lambda: pipeline(np.arange(10), 2).replica_rows(0, 1, 3), "the nearest is 3"),
        (
            lambda: pipeline(np.arange(2), 3).replica_rows(0, 1, 3),
            r"arrays has 2 examples, fewer than the 3 replicas",
        ),
        (
            lambda: pipeline(np.arange(3), 3, tail="cut"),
            "tail: expected one of partial, pad, drop; received 'cut'",
        ),
        (lambda: pipeline(np.arange(3), 3, ignore_errors=-1), "ignore_errors: expected"),
        (
            lambda: pipeline(tf.data.Dataset.range(3), 3, ignore_errors=1),
            "ignore_errors: tf.data.Dataset is a tf.data.Dataset or generator of yours",
        ),
        (lambda: pipeline(np.arange(3), 2, tail="pad", labels=False), "labels=False: expected"),
        (
            lambda: of_arrays((np.zeros(3), np.array([0, 1, 2])), "mine", classes=2),
            "mine: expected labels from 0 to 1.* received 2 in example 2",
        ),
        (lambda: pipeline(np.arange(3), 3, seed=2**63), "seed: expected an integer of 64 bits"),
        (lambda: pipeline(np.arange(3), 3, threads=0), "threads: expected a number, 1 or more"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_examples_of_different_shapes_are_refused_before_reading():
    images = Source(
        "images",
        tf.TensorSpec([None, None, 3], tf.uint8),
        3,
        read=lambda n: tf.zeros([n, n, 3], tf.uint8),
    )
    with pytest.raises(
        ValueError, match=r"images: its examples have no common shape.*Resize them with transform="
    ):
        pipeline(images, 2)


@pytest.mark.parametrize(("batch", "tail"), [(5, "partial"), (4, "drop")])
def test_a_stream_begun_at_its_end_is_empty(batch, tail, files):
    """Check a stream whose batches are all full; the one above has a short one."""
    batches = pipeline(stream(files), batch, tail=tail)
    assert list(batches.replica_rows(0, 1, 1, epoch=0, first_step=batches.order.steps)) == []


def test_the_parts_of_a_pass_load_their_own_steps(files):
    loaded = []

    def note(x):
        return tf.ensure_shape(
            tf.numpy_function(lambda x: loaded.append(int(x)) or x, [x], tf.int64), []
        )

    batches = pipeline(stream(files), 3, transform=note)
    zero = tf.data.Dataset.from_tensors((tf.constant(0, tf.int64), tf.constant(0, tf.int64)))
    every_second = [
        share.numbers.numpy().tolist() for share in batches.batches._make(Window(), zero, 2)
    ]
    assert every_second == expected(batches, 0)[::2]
    assert sorted(loaded) == sorted(number for step in every_second for number in step)


# Each operation costs half a millisecond when a data pipeline is made, and a third when a pass
# begins.
@pytest.mark.parametrize(("kind", "most"), [("arrays", 100), ("random", 240), ("stream", 640)])
def test_the_graph_of_a_pass_has_few_operations(kind, most, tmp_path):
    if kind == "arrays":
        source = np.arange(COUNT)
    else:
        with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
            for number in range(COUNT):
                writer.write(str(number).encode())
        source = records(tmp_path, access=kind)
    graph = tf.compat.v1.GraphDef.FromString(graph_of(pipeline(source, 4).of_epoch(0)))
    operations = len(nodes(graph))
    assert operations <= most


def test_a_transform_is_traced_once_and_rows_of_replicas_are_kept():
    traced = []

    def transform(x):
        traced.append(x)
        return x + 1

    batches = pipeline(np.arange(8), 4, transform=transform)
    first, last = (batches.replica_rows(replica, 1, 2) for replica in range(2))
    assert len(traced) == 1
    assert batches.replica_rows(0, 1, 2) is first is not last
    passes = [[share.numbers.numpy().tolist() for share in first] for _ in range(2)]
    assert passes == [[step[:2] for step in expected(batches, epoch)] for epoch in range(2)]
    assert batches.epochs.next == 2


def add_seven(kind):
    """Return a function that adds 7 to a number by a resource of TensorFlow."""
    if kind == "table":
        numbers = tf.range(COUNT, dtype=tf.int64)
        initializer = tf.lookup.KeyValueTensorInitializer(numbers, numbers + 7)
        return tf.lookup.StaticHashTable(initializer, -1).lookup
    if kind == "lookup layer":
        lookup = keras.layers.IntegerLookup(vocabulary=list(range(COUNT)))
        return lambda number: lookup(number) + 6  # 0 stands for what is not in the vocabulary
    if kind == "variable":
        seven = tf.Variable(7, dtype=tf.int64)
        return lambda number: number + seven
    brightness = keras.layers.RandomBrightness(0.5, value_range=(0, 1))
    return lambda number: (
        number + 7 + tf.cast(brightness(tf.zeros([1, 1, 3]))[0, 0, 0] * 0, tf.int64)
    )


@pytest.mark.parametrize("kind", ["table", "lookup layer", "variable", "augmentation layer"])
@pytest.mark.parametrize("where", ["transform", "source"])
def test_examples_may_be_changed_by_tables_variables_and_layers(kind, where):
    add = add_seven(kind)
    if where == "transform":
        batches = pipeline(np.arange(COUNT), 4, shuffle=False, transform=add)
    else:
        batches = pipeline(single().map(lambda x, y: add(y)), 4, shuffle=False)
    assert [x.numpy().tolist() for x in batches] == [[n + 7 for n in step] for step in IN_ORDER]
    parts = [batches.replica_rows(replica, 1, 2) for replica in range(2)]
    rows = [x for two in zip(*parts, strict=True) for part in two for x in part.data.numpy()]
    assert rows == [n + 7 for n in range(COUNT)]
