"""Lookup of rows in a sharded embedding table: only distinct ids and their rows travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.keras_compat import local_component
from tfdist.keras_compat.parallel import Sharded, freed_with_graph
from tfdist.keras_compat.sparse_gradients import mark_distinct
from tfdist.keras_compat.table_lookups import source
from tfdist.parallel.collectives.group import Group
from tfdist.parallel.replica_weight import weighted
from tfdist.parallel.sharding.all_gather import Gathering

# Numbers of slots, each at most 1/8 more than the one before: TensorFlow remembers each shape of a
# collective.
_SLOTS = np.array([eighths << power for power in range(28) for eighths in range(8, 16)], np.int64)


def rows(gathering: Gathering, table: Sharded, ids: tf.Tensor, name: str) -> tf.Tensor:
    """Return rows of a sharded table.

    Each replica sends each of its distinct ids to the replica that holds the row, by an all-to-all,
    and gets the row by another. In backward, a third one takes the summed gradient of each row back
    to where it is held, as a part of a sparse gradient.

    Args:
        gathering: Collectives of the table. Call this in the context of one of its replicas.
        table: Table `[input_dim, output_dim]`.
        ids: Ids of this replica, int `[n]`; replicas may have different numbers of them.
        name: Name of this call.

    Returns:
        Rows `[n, output_dim]` in the dtype of the table.
    """
    group = gathering.forward_group
    width = table.tfdist_shape[1]
    part = local_component(table, group.local)
    (part_length,) = part.shape
    if group.size == 1:
        # Not merged: in a step that XLA compiles, rows may be merged only once (`LazyAdam`).
        values = _values(part, _positions(tf.cast(ids, tf.int64), width))
        return tf.cast(tf.cast(values, gathering.gather_dtype or values.dtype), values.dtype)
    distinct, position = tf.unique(tf.cast(ids, tf.int64))
    requests = _requests(group, distinct, width, part_length, name)
    wanted = group.all_to_all(requests.to_slots(tf.gather(distinct, requests.row), -1), name)
    if requests.one_per_row:
        own = tf.where(wanted >= 0)  # none of an empty slot
        numbers = tf.gather_nd(wanted, own) - group.rank * part_length // width
        values = _whole_rows(part, numbers, width)
    else:
        # Positions in this replica's part of the flat table, `[replicas, slots, output_dim]`.
        begin = wanted * width - group.rank * part_length
        positions = begin[..., None] + tf.range(width, dtype=tf.int64)
        own = tf.where((positions >= 0) & (positions < part_length))
        values = _values(part, tf.gather_nd(positions, own))
    found = tf.scatter_nd(own, values, tf.concat([tf.shape(wanted, tf.int64), [width]], 0))
    found = tf.ensure_shape(found, [*wanted.shape, width])
    if not table.trainable:
        found = tf.stop_gradient(found)
    rows_of_requests = requests.from_slots(_exchange(gathering, found, name))
    return tf.gather(requests.sum(rows_of_requests), position)


def _whole_rows(part: tf.Variable, numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Return rows of a part that has whole rows; the gradient has each of its values once.

    Args:
        part: Part `[rows * width]`.
        numbers: Numbers of the rows, int64 `[n]`.
        width: Number of values of a row.
    """

    def merged(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows, row = tf.unique(numbers)
        sums = tf.math.unsorted_segment_sum(upstream, row, tf.size(rows))
        return sums, mark_distinct(tf.reshape(_positions(rows, width), [-1]))

    return _gather(part, _positions(numbers, width), merged)


def _positions(numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Return the positions in a flat part of the values of rows, `[n, width]`."""
    return numbers[:, None] * width + tf.range(width, dtype=tf.int64)


def _values(part: tf.Variable, positions: tf.Tensor) -> tf.Tensor:
    """Return values of a part of a table, whose gradient may have a value more than once.

    Args:
        part: Part `[part_length]`.
        positions: Positions of the values, int64 of any shape.
    """
    return _gather(part, positions, lambda upstream: (upstream, tf.reshape(positions, [-1])))


def _gather(
    part: tf.Variable,
    positions: tf.Tensor,
    gradient_of: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
) -> tf.Tensor:
    """Return values of a part of a table; the gradient of the part is sparse.

    TensorFlow's own gradient of a gather from a variable has an int32 shape, which a large part
    exceeds.

    Args:
        part: Part `[part_length]`.
        positions: Positions of the values, int64 of any shape.
        gradient_of: Function of the gradient of the values that returns values and indices of that
            of the part.
    """

    @tf.custom_gradient
    def gather(positions):
        def grad(upstream, variables):
            assert len(variables) == 1
            values, indices = gradient_of(upstream)
            shape = tf.constant(part.shape.as_list(), tf.int64)
            return None, [tf.IndexedSlices(tf.reshape(values, [-1]), indices, shape)]

        return tf.gather(source(part), positions), grad

    return freed_with_graph([gather(positions)])[0]


def _exchange(gathering: Gathering, rows: tf.Tensor, name: str) -> tf.Tensor:
    """Send rows to the replicas that asked for them; in backward, their gradients come back.

    Args:
        gathering: Collectives of the table.
        rows: Rows by the replica that asked for them, `[replicas, slots, output_dim]`.
        name: Name of this call.

    Returns:
        Rows by the replica that holds them.
    """

    def send(group: Group, x: tf.Tensor, dtype: str | None, what: str) -> tf.Tensor:
        received = group.all_to_all(tf.cast(x, dtype or x.dtype), f"{name} {what}")
        return tf.cast(received, rows.dtype)

    @tf.custom_gradient
    def exchange(rows):
        def grad(upstream):
            (weighed,) = weighted([tf.convert_to_tensor(upstream)], gathering.scale())
            return send(gathering.backward_group, weighed, gathering.grad_dtype, "gradients")

        return send(gathering.forward_group, rows, gathering.gather_dtype, "rows"), grad

    return freed_with_graph([exchange(rows)])[0]


@dataclasses.dataclass(frozen=True)
class _Requests:
    """Describe the requests of a replica: each asks one replica for what it holds of one row.

    Each request has a slot. All replicas have as many slots for each of the others, because the
    tensors of an all-to-all have one shape.

    Attributes:
        row: Index of each request's row among the distinct rows, int `[requests]`.
        count: Number of distinct rows, int.
        replicas: Number of replicas.
        slot: Slot of each request, among `replicas * slots`, int `[requests]`.
        slots: Number of slots for each replica, int.
        one_per_row: Whether there is one request for each distinct row, in their order.
    """

    row: tf.Tensor
    count: tf.Tensor
    replicas: int
    slot: tf.Tensor
    slots: tf.Tensor
    one_per_row: bool

    def to_slots(self, values: tf.Tensor, default: int) -> tf.Tensor:
        """Return values `[requests, ...]` by slot, `[replicas, slots, ...]`, with a default."""
        shape = tf.concat([[self.replicas * self.slots], tf.shape(values)[1:]], 0)
        filled = tf.tensor_scatter_nd_update(
            tf.fill(shape, tf.constant(default, values.dtype)), self.slot[:, None], values
        )
        divided = tf.concat([[self.replicas, self.slots], tf.shape(values)[1:]], 0)
        return tf.ensure_shape(
            tf.reshape(filled, divided), [self.replicas, None, *values.shape[1:]]
        )

    def from_slots(self, values: tf.Tensor) -> tf.Tensor:
        """Return values `[requests, ...]` of values by slot, `[replicas, slots, ...]`."""
        flat = tf.reshape(
            values, tf.concat([[self.replicas * self.slots], tf.shape(values)[2:]], 0)
        )
        return tf.gather(flat, self.slot)

    def sum(self, values: tf.Tensor) -> tf.Tensor:
        """Return the sum of the values `[requests, ...]` that belong to each distinct row."""
        if self.one_per_row:
            return values
        return tf.math.unsorted_segment_sum(values, self.row, self.count)


def _requests(
    group: Group, distinct: tf.Tensor, width: int, part_length: int, name: str
) -> _Requests:
    """Return the requests for distinct rows of a table whose parts are flat.

    Args:
        group: Group of all replicas.
        distinct: Distinct ids, int64 `[n]`.
        width: Number of values of a row.
        part_length: Number of values that each replica holds; a row may lie in several parts.
        name: Name of this call.
    """
    first = distinct * width // part_length
    last = (distinct * width + width - 1) // part_length
    one_per_row = part_length % width == 0
    parts_of_row = (
        1 if one_per_row else min(group.size, (width + part_length - 2) // part_length + 1)
    )
    owners = first[:, None] + tf.range(parts_of_row, dtype=tf.int64)
    places = tf.where(owners <= last[:, None])
    owner = tf.cast(tf.gather_nd(owners, places), tf.int32)
    numbers = tf.range(tf.size(owner))
    by_owner = tf.dynamic_partition(numbers, owner, group.size)
    counts = tf.stack([tf.size(x) for x in by_owner])
    most = group.all_reduce(tf.cast(tf.reduce_max(counts), tf.int64), f"{name} slots", "Max")
    slots = tf.cast(tf.gather(_SLOTS, tf.searchsorted(_SLOTS, most[None]))[0], tf.int32)
    ordered = tf.concat(by_owner, 0)
    slot_in_order = numbers + tf.gather(
        tf.range(group.size) * slots - tf.cumsum(counts, exclusive=True), tf.gather(owner, ordered)
    )
    return _Requests(
        row=tf.cast(places[:, 0], tf.int32),
        count=tf.size(distinct),
        replicas=group.size,
        slot=tf.scatter_nd(ordered[:, None], slot_in_order, tf.shape(owner)),
        slots=slots,
        one_per_row=one_per_row,
    )
