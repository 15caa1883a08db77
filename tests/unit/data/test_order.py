"""Test that seed, epoch, step and global batch alone determine which examples form a batch.

Every shuffle is uniform.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfdist.data.order import (
    TAILS,
    Order,
    StreamOrder,
    example_seeds,
    key_of,
    permute,
    rows_of_replicas,
)

properties = settings(max_examples=12, deadline=None, derandomize=True, database=None)

SEEDS = st.integers(-(2**63), 2**63 - 1)
EPOCHS = st.integers(0, 2**40)

# Chi-square in standard deviations. Seeds are fixed, so that a test passes always or never.
LIMIT = 5


@st.composite
def orders(draw, kinds=(Order, StreamOrder), shuffles=(False, True)):
    """Draw orders of 1 to 32 examples, with global batches from 1 to more than there are.

    Files may be empty.
    """
    lengths = draw(st.lists(st.integers(0, 8), min_size=1, max_size=4).filter(any))
    streams = draw(st.integers(1, 4))
    options = {
        "global_batch": streams * draw(st.integers(1, 5)),
        "seed": draw(SEEDS),
        "shuffle": draw(st.sampled_from(shuffles)),
        "tail": draw(st.sampled_from(TAILS)),
    }
    if draw(st.sampled_from(kinds)) is Order:
        return Order(sum(lengths), **options)
    return StreamOrder.of(lengths, streams=streams, block=draw(st.integers(1, 12)), **options)


def whole(order, epoch):
    return order.numbers(epoch, range(order.examples)).numpy()


def epoch_of(order, epoch):
    """Return all batches of an epoch, in order of steps."""
    return [order.batch(epoch, step).numpy() for step in range(order.steps)]


def excess(cells, count):
    """Return how far the chi-square of these cells is above that of equally likely ones.

    The unit is one standard deviation.
    """
    observed = np.bincount(np.ravel(cells), minlength=count)
    expected = observed.sum() / count
    return (np.sum((observed - expected) ** 2) / expected - (count - 1)) / math.sqrt(
        2 * (count - 1)
    )


def keys_of_epochs(count, seed=3):
    return next(
        iter(tf.data.Dataset.range(count).map(lambda epoch: key_of(seed, epoch)).batch(count))
    ).numpy()


def keys_of_seeds(count, epoch=3):
    seeds = tf.data.Dataset.range(-count // 2, count - count // 2)
    return next(iter(seeds.map(lambda seed: key_of(seed, epoch)).batch(count))).numpy()


def places(positions, count, keys):
    """Return the values of each key's permutation at these positions, [keys, positions]."""
    numbers = permute(np.tile(positions, len(keys)), count, np.repeat(keys, len(positions), 0))
    return numbers.numpy().reshape(len(keys), len(positions))


# Each example once


@properties
@given(orders(), EPOCHS)
@example(Order(3, 8), 0)
@example(StreamOrder.of([5, 0, 4, 3, 7], 8, streams=2, block=3), 0)
@example(StreamOrder.of([2, 1], 8, streams=2, block=3), 0)
def test_an_epoch_has_each_example_once(order, epoch):
    batches = epoch_of(order, epoch)
    sizes = [len(batch) for batch in batches]
    assert sizes[: order.full] == [order.global_batch] * order.full
    assert sizes == [order.rows(step) for step in range(order.steps)]
    seen = sorted(number for batch in batches for number in batch)
    if order.tail == "drop":
        assert len(batches) == order.full == order.examples // order.global_batch
        assert len(set(seen)) == len(seen) == order.full * order.global_batch
        assert set(seen) <= set(range(order.examples))
    else:
        assert seen == list(range(order.examples))


@pytest.mark.parametrize(
    "count", [1, 2, 3, 255, 2**16 - 1, 2**16, 2**16 + 1, 2**16 + 2, 2**18 + 1, 2**20 + 1]
)
def test_a_permutation_has_each_number_once(count):
    # TensorFlow's op gives a number twice where the greatest one is a power of 4, from 2^16 on.
    np.testing.assert_array_equal(
        np.sort(permute(np.arange(count), count, [5, 6, 7])), np.arange(count)
    )


@properties
@given(st.integers(1, 2**62), st.integers(0, 2**62), SEEDS, EPOCHS, st.integers(1, 500))
def test_large_orders_keep_their_range_and_repeat_nothing(examples, first, seed, epoch, count):
    examples = max(examples, 2**16)
    positions = np.unique((first + np.arange(count)) % examples)
    numbers = Order(examples, 32, seed).numbers(epoch, positions).numpy()
    assert 0 <= numbers.min() <= numbers.max() < examples
    assert len(set(numbers)) == len(positions)


@pytest.mark.parametrize("examples", [10**9 + 7, 2**31, 2**31 + 1, 10**15 + 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_last_step_of_many_examples_needs_no_memory_for_the_others(examples, shuffle):
    order = Order(examples, 1000, seed=1, shuffle=shuffle)
    last = order.batch(0, order.steps - 1).numpy()  # 10^15 numbers would take 8 petabytes
    assert len(last) == order.rows(order.steps - 1) == (examples % 1000 or 1000)
    if not shuffle:
        np.testing.assert_array_equal(last, np.arange(examples - len(last), examples))
    stream = StreamOrder.of(
        [examples // 2, 0, examples - examples // 2],
        1000,
        seed=1,
        shuffle=shuffle,
        streams=4,
        block=5000,
    )
    numbers = stream.numbers(2**33, [0, 999, examples - 1]).numpy()
    assert len(set(numbers)) == 3
    assert 0 <= numbers.min() <= numbers.max() < examples


# Whoever asks, whenever


@properties
@given(orders(), EPOCHS, st.randoms(use_true_random=False))
def test_numbers_depend_on_their_position_alone(order, epoch, random):
    everything = whole(order, epoch)
    for step in random.sample(
        range(order.steps), min(order.steps, 3)
    ):  # a run that begins anywhere, in any order
        first = step * order.global_batch
        np.testing.assert_array_equal(
            order.batch(epoch, step), everything[first : first + order.global_batch]
        )
    positions = [random.randrange(order.examples) for _ in range(5)]
    np.testing.assert_array_equal(order.numbers(epoch, positions), everything[positions])
    assert order.numbers(epoch, np.zeros(0, np.int64)).shape == (0,)


@settings(properties, max_examples=200)
@given(st.integers(0, 300), st.lists(st.integers(1, 8), min_size=1, max_size=9))
def test_workers_share_the_rows_of_a_batch(rows, devices):
    replicas = sum(devices)
    alone = [rows_of_replicas(rows, replica, 1, replicas) for replica in range(replicas)]
    assert [row for begin, end in alone for row in range(begin, end)] == list(range(rows))
    most = -(-rows // replicas)
    assert all(end - begin == most for begin, end in alone[: rows // most if most else None])
    if rows % replicas == 0:
        assert {end - begin for begin, end in alone} == {rows // replicas}
    firsts = [0, *itertools.accumulate(devices)]
    for first, count in zip(
        firsts, devices, strict=False
    ):  # a worker's rows are those of its replicas
        begin, end = rows_of_replicas(rows, first, count, replicas)
        assert [*range(begin, end)] == [
            row for one in alone[first : first + count] for row in range(*one)
        ]


@properties
@given(orders(), EPOCHS, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_workers_together_have_the_batch(order, epoch, devices, data):
    step = data.draw(st.integers(0, max(order.steps - 1, 0)))
    batch = order.batch(epoch, step).numpy()
    rows = tf.cast(order.rows(tf.constant(step, tf.int64), tf.minimum), tf.int64)
    shares = []
    for first, count in zip(itertools.accumulate([0, *devices]), devices, strict=False):
        begin, end = rows_of_replicas(rows, first, count, sum(devices), tf.minimum)
        assert (int(begin), int(end)) == rows_of_replicas(len(batch), first, count, sum(devices))
        shares.append(order.numbers(epoch, step * order.global_batch + tf.range(begin, end)))
    np.testing.assert_array_equal(tf.concat(shares, 0), batch)


@pytest.mark.parametrize(
    "order", [Order(20, 8, 7), StreamOrder.of([8, 0, 12], 8, seed=7, streams=2, block=16)]
)
def test_numbers_are_the_same_within_graphs(order):
    epoch = 2**40
    expected = np.concatenate(epoch_of(order, epoch))
    batch = tf.function(order.batch, input_signature=[tf.TensorSpec([], tf.int64)] * 2)
    traced = [
        batch(tf.constant(epoch, tf.int64), tf.constant(step, tf.int64))
        for step in range(order.steps)
    ]
    np.testing.assert_array_equal(tf.concat(traced, 0), expected)
    epochs = tf.data.Dataset.from_tensors(tf.constant(epoch, tf.int64))
    steps = tf.data.Dataset.range(order.steps)
    mapped = epochs.flat_map(
        lambda epoch: steps.map(lambda step: order.batch(epoch, step), num_parallel_calls=2)
    )
    np.testing.assert_array_equal(np.concatenate([*mapped.as_numpy_iterator()]), expected)


# Epochs and seeds


@pytest.mark.parametrize(
    "order", [Order(40, 40), StreamOrder.of([15, 25], 40, streams=2, block=20)]
)
def test_epochs_and_seeds_differ(order):
    asked = [(0, epoch) for epoch in (0, 1, 2**31, 2**32, 2**63 - 1)]
    asked += [(seed, 0) for seed in (1, -1, 2**31, 2**32, -(2**32), 2**63 - 1, -(2**63))]
    seen = {
        tuple(dataclasses.replace(order, seed=seed).batch(epoch, 0).numpy())
        for seed, epoch in asked
    }
    assert len(seen) == len(asked)


def test_a_fixed_order_is_the_same_in_each_epoch_and_for_each_seed():
    for order in (Order(10, 4, shuffle=False), StreamOrder.of([3, 7], 4, shuffle=False, streams=2)):
        other = dataclasses.replace(order, seed=5)
        np.testing.assert_array_equal(whole(order, 0), whole(other, 9))


def test_each_example_has_a_seed_of_its_own_in_each_epoch():
    numbers = np.array([0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**40])
    seeds = [
        tuple(row)
        for seed in (0, -5)
        for epoch in (0, 1, 2**33)
        for row in example_seeds(seed, epoch, numbers).numpy()
    ]
    assert len(set(seeds)) == len(seeds) == 6 * len(numbers)
    np.testing.assert_array_equal(
        example_seeds(0, 1, numbers[::-1])[::-1], example_seeds(0, 1, numbers)
    )
    assert example_seeds(0, 1, tf.constant(3, tf.int64)).shape == (2,)


# The source's own order, and its files


@properties
@given(orders(kinds=(Order,), shuffles=(False,)), EPOCHS)
def test_without_shuffling_positions_are_numbers(order, epoch):
    np.testing.assert_array_equal(whole(order, epoch), np.arange(order.examples))


@properties
@given(orders(kinds=(StreamOrder,), shuffles=(False,)), EPOCHS)
def test_without_shuffling_each_part_of_a_stream_is_in_order(order, epoch):
    np.testing.assert_array_equal(order.files(epoch), np.arange(len(order.lengths)))
    numbers = whole(order, epoch)
    begin = order.tail_begin
    # Rows of a part are neighbours in each batch; its batches follow each other.
    parts = numbers[:begin].reshape(order.full, order.streams, order.per_stream).swapaxes(0, 1)
    np.testing.assert_array_equal(parts.ravel(), np.arange(begin))
    np.testing.assert_array_equal(numbers[begin:], np.arange(begin, order.examples))
    if order.streams == 1:
        np.testing.assert_array_equal(numbers, np.arange(order.examples))


@properties
@given(orders(kinds=(StreamOrder,), shuffles=(True,)), EPOCHS)
def test_a_stream_permutes_files_and_blocks_of_its_parts(order, epoch):
    files = order.files(epoch).numpy()
    assert sorted(files) == list(range(len(order.lengths)))
    ends = np.cumsum(order.lengths)
    inside = [np.arange(ends[file] - order.lengths[file], ends[file]) for file in files]
    sequence = np.concatenate(inside)  # the examples as files are read
    np.testing.assert_array_equal(
        order.sequence(epoch).ends, np.cumsum([len(numbers) for numbers in inside])
    )
    np.testing.assert_array_equal(
        order.numbers_of(epoch, tf.range(order.examples, dtype=tf.int64)), sequence
    )
    numbers = whole(order, epoch)
    begin = order.tail_begin
    parts = numbers[:begin].reshape(order.full, order.streams, order.per_stream).swapaxes(0, 1)
    parts = [*parts.reshape(order.streams, order.part), numbers[begin:]]
    stored = [*sequence[:begin].reshape(order.streams, order.part), sequence[begin:]]
    for given_out, read in zip(parts, stored, strict=True):
        for first in range(0, len(read), order.block):
            held = slice(first, first + order.block)
            assert sorted(given_out[held]) == sorted(read[held])


def test_a_block_beyond_the_part_permutes_all_of_it():
    order = StreamOrder.of([100], 10, block=10**9)
    assert np.abs(whole(order, 0) - np.arange(100)).mean() > 20  # 33 is expected of a full shuffle


# Uniform


def test_all_orders_of_four_examples_are_equally_likely():
    keys = np.concatenate([keys_of_epochs(240), keys_of_seeds(240)])
    permutations = map(tuple, places(np.arange(4), 4, keys))
    ranks = {order: rank for rank, order in enumerate(itertools.permutations(range(4)))}
    assert excess([ranks[order] for order in permutations], 24) < LIMIT


def test_all_orders_of_five_files_are_equally_likely():
    permutations = tf.data.Dataset.range(3000).map(StreamOrder.of([1] * 5, 1).files).batch(3000)
    ranks = {order: rank for rank, order in enumerate(itertools.permutations(range(5)))}
    assert excess([ranks[tuple(row)] for row in next(iter(permutations)).numpy()], 120) < LIMIT


# One count for each kind of the op's ciphers: 16 bits and walks, 16, 20, 28, which has a fault of
# its own, and 30 bits.
@pytest.mark.parametrize("count", [1000, 60_000, 10**6, 2**28, 10**9])
@pytest.mark.parametrize("keys", [keys_of_epochs, keys_of_seeds])
def test_places_are_uniform_and_independent(keys, count):
    positions = places(count // 3 + np.arange(16), count, keys(2500 if count > 1000 else 1000))
    sixteenth = positions * 16 // count
    cells = min(1024, count // 50)
    assert max(excess(sixteenth[:, column], 16) for column in range(16)) < LIMIT
    for apart in (1, 2, 8):  # rows of a batch
        assert excess(sixteenth[:, :-apart] * 16 + sixteenth[:, apart:], 256) < LIMIT
        assert (
            excess((positions[:, apart:] - positions[:, :-apart]) % count * cells // count, cells)
            < LIMIT
        )
    for apart in (1, 2):  # epochs, or seeds
        assert excess(sixteenth[:-apart] * 16 + sixteenth[apart:], 256) < LIMIT
        assert (
            excess((positions[apart:] - positions[:-apart]) % count * cells // count, cells) < LIMIT
        )


@pytest.mark.parametrize("count", [10**6, 2**20, 2**28, 10**9])
def test_neighbours_within_an_epoch_are_independent(count):
    numbers = Order(count, 256, seed=1).numbers(0, np.arange(500_000)).numpy()
    assert excess(numbers * 64 // count, 64) < LIMIT
    for apart in (1, 2, 4, 16, 256):
        pairs = numbers[:-apart] * 64 // count * 64 + numbers[apart:] * 64 // count
        assert excess(pairs, 4096) < LIMIT


def test_blocks_of_a_stream_are_permuted_independently():
    order = StreamOrder.of([2**20], 16, seed=1, streams=2, block=512)
    within = np.arange(1024)[:, None] * 512 + np.arange(8)
    shuffled = [
        order.shuffle_within(
            0, tf.fill([8192], tf.constant(part, tf.int64)), within.ravel(), order.part
        )
        for part in (0, 1)
    ]
    eighth = [np.reshape(places, [1024, 8]) % 512 // 64 for places in shuffled]
    for part in eighth:
        assert max(excess(part[:, column], 8) for column in range(8)) < LIMIT
        assert excess(part[:, :-1] * 8 + part[:, 1:], 64) < LIMIT
        for apart in (1, 2, 256):  # of a key's words, the op takes as few as 8 bits
            assert excess(part[:-apart] * 8 + part[apart:], 64) < LIMIT
    assert excess(eighth[0] * 8 + eighth[1], 64) < LIMIT


# The same tomorrow


def test_orders_equal_those_of_earlier_versions():
    # A checkpoint relies on these numbers: a run resumed in the middle of an epoch sees each
    # example once only if the order has not changed. If a new TensorFlow fails here, its ops
    # permute in another way: users must finish runs begun before with the old one, and the release
    # notes have to say so. Never simply copy the new numbers.
    assert key_of(3, 4).numpy().tolist() == [-1860230133, -671226999, -1390659934]
    assert example_seeds(3, 4, 2**32 + 1).numpy().tolist() == [-1860230134, -671227000]
    for seed, epoch, examples, step, numbers in (
        (0, 0, 10, 1, [1, 8, 6, 2]),
        (1, 0, 10, 1, [1, 7, 2, 6]),
        (0, 1, 10, 1, [4, 1, 8, 2]),
        (-3, 2**33, 2**16 + 1, 2**14, [31294]),
        (5, 2, 10**6, 100, [691848, 817364, 237296, 70903]),
        (5, 2, 10**8, 100, [33133666, 71129239, 59536368, 21922169]),
        (2**40, 7, 10**9, 249_999_999, [82443264, 527269620, 453147149, 384182249]),
    ):
        assert Order(examples, 4, seed).batch(epoch, step).numpy().tolist() == numbers
    stream = StreamOrder.of([5, 0, 4, 3, 7], 8, seed=1, streams=2, block=3)
    assert stream.files(2).numpy().tolist() == [4, 1, 3, 0, 2]
    assert [batch.tolist() for batch in epoch_of(stream, 2)] == [
        [13, 12, 14, 17, 0, 11, 10, 1],
        [15, 16, 18, 9, 3, 2, 5, 4],
        [7, 8, 6],
    ]
