"""Lookup of rows in a sharded embedding table: only ids and rows of the batch travel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdist.keras_compat.parallel import Sharded, freed_with_graph, own_copy
from tfdist.parallel.replica_weight import Weight, weighted
from tfdist.parallel.sharding.sharded_variables import Store


def rows(store: Store, table: Sharded, ids: tf.Tensor, scale: Callable[[], Weight]) -> tf.Tensor:
    """Return rows of a sharded table.

    Each replica gathers the ids of all and looks up what it holds of their rows. The rows are the
    sum over the replicas, in which all but one add zeros. In backward, each replica gathers the
    gradients of all rows, and keeps those of its part, as a sparse gradient.

    Args:
        store: Store of the table. Call this in the context of one of its replicas.
        table: Table `[input_dim, output_dim]`.
        ids: Ids of this replica, int `[n]`; replicas may have different numbers of them.
        scale: Function that returns the factor of this replica's gradients.

    Returns:
        Rows `[n, output_dim]` in the dtype of the table.
    """
    context = tf.distribute.get_replica_context()
    rank = store.group.rank
    width = table.tfdist_shape[1]
    part = own_copy(table)
    part_length = part.shape[0]
    all_ids = context.all_gather(tf.cast(ids, tf.int64), axis=0)
    counts = context.all_gather(tf.shape(ids), axis=0)
    first = tf.reduce_sum(counts[:rank])
    # Positions in this replica's part of the flat table, `[rows of all replicas, output_dim]`.
    positions = all_ids[:, None] * width + tf.range(width, dtype=tf.int64) - rank * part_length
    is_own = (positions >= 0) & (positions < part_length)

    @tf.custom_gradient
    def look_up(part):
        found = tf.gather(part, tf.where(is_own, positions, 0))
        with _without_packing_warning():
            whole = context.all_reduce(
                tf.distribute.ReduceOp.SUM, tf.where(is_own, found, tf.zeros([], part.dtype))
            )

        def grad(upstream):
            (own_upstream,) = weighted([upstream], scale())
            return tf.IndexedSlices(
                tf.boolean_mask(context.all_gather(own_upstream, axis=0), is_own),
                tf.boolean_mask(positions, is_own),
                tf.constant([part_length], tf.int64),
            )

        return tf.identity(whole[first : first + tf.shape(ids)[0]]), grad

    return freed_with_graph([look_up(part)])[0]


@contextlib.contextmanager
def _without_packing_warning() -> Iterator[None]:
    """Hide that TensorFlow does not pack a tensor whose number of rows it does not know."""

    def passes(record) -> bool:
        return "not packing values" not in str(record.msg)

    logger = tf.get_logger()
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
