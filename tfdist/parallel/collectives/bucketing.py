"""Bucketed collectives: all-reduce, reduce-scatter and all-gather over packed tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.group import Group
from tfdist.parallel.replica_weight import Weight


def all_reduce(
    group: Group,
    tensors: list,
    name: str,
    bucket_bytes: int,
    comm_dtype: str | None = None,
    factor: Weight = 1.0,
) -> list:
    """Sum tensors over a group with one all-reduce for each bucket of small tensors.

    Args:
        group: Replicas that exchange the tensors.
        tensors: Dense tensors of known shape; None stays None.
        name: Name of this call, as for `Group.all_reduce`.
        bucket_bytes: Maximum size of a bucket in bytes; a larger tensor has a bucket for itself.
        comm_dtype: Dtype in which tensors are sent, as for `Group.all_reduce`.
        factor: Factor of this replica's tensors, as for `Group.all_reduce`.

    Returns:
        Sums in the order and shapes of `tensors`.
    """
    positions = [i for i, x in enumerate(tensors) if x is not None]
    present = [tensors[i] for i in positions]
    result = list(tensors)
    plan = flat_shards.buckets(
        [x.shape.num_elements() * x.dtype.size for x in present],
        [x.dtype for x in present],
        bucket_bytes,
    )
    for number, bucket in enumerate(plan):
        members = (
            [tf.reshape(present[i], [-1]) for i in bucket]
            if len(bucket) > 1
            else [present[bucket[0]]]
        )
        sums = _exchange_packed(
            members,
            0,
            0,
            functools.partial(
                group.all_reduce, name=f"{name}/{number}", comm_dtype=comm_dtype, factor=factor
            ),
        )
        for i, part in zip(bucket, sums, strict=True):
            result[positions[i]] = tf.reshape(part, present[i].shape)
    return result


def reduce_scatter(
    group: Group,
    tensors: Sequence[tf.Tensor | None],
    plan: Sequence[Sequence[int]],
    name: str,
    comm_dtype: str | None = None,
    factor: Weight = 1.0,
) -> list[tf.Tensor | None]:
    """Return this replica's rows of the sums of tensors over a group.

    Args:
        group: Replicas that exchange the tensors.
        tensors: Tensors `[size, n]`, as from `flat_shards.to_rows`; None stays None.
        plan: Buckets, each the indices of tensors that one reduce-scatter exchanges.
        name: Name of this call, as for `Group.all_reduce`.
        comm_dtype: Dtype in which tensors are sent, as for `Group.reduce_scatter`.
        factor: Factor of this replica's tensors, as for `Group.all_reduce`.

    Returns:
        Tensors `[n]`, in the order of `tensors`.
    """
    result: list[tf.Tensor | None] = [None] * len(tensors)
    for number, bucket in enumerate(plan):
        if members := {i: x for i in bucket if (x := tensors[i]) is not None}:
            sums = reduce_scatter_bucket(
                group, list(members.values()), f"{name} {number}", comm_dtype, factor
            )
            for i, part in zip(members, sums, strict=True):
                result[i] = part
    return result


def reduce_scatter_bucket(
    group: Group,
    tensors: list[tf.Tensor],
    name: str,
    comm_dtype: str | None = None,
    factor: Weight = 1.0,
) -> list[tf.Tensor]:
    """Return what `reduce_scatter` does, of the tensors of one bucket; `name` is its own."""
    return _exchange_packed(
        tensors,
        1,
        0,
        functools.partial(group.reduce_scatter, name=name, comm_dtype=comm_dtype, factor=factor),
    )


def all_gather(
    group: Group, tensors: Sequence[tf.Tensor | None], plan: Sequence[Sequence[int]], name: str
) -> Iterator[tuple[int, tf.Tensor]]:
    """Gather the rows of tensors from all replicas of a group, one bucket after the other.

    Args:
        group: Replicas that exchange the tensors.
        tensors: This replica's rows `[n]`, one for each tensor; a None is skipped.
        plan: Buckets, each the indices of tensors that one all-gather exchanges.
        name: Name of this call, as for `Group.all_reduce`.

    Yields:
        Index of a tensor in `tensors`, and its rows from all replicas, `[size, n]`.
    """
    for number, bucket in enumerate(plan):
        if members := {i: x for i in bucket if (x := tensors[i]) is not None}:
            whole = _exchange_packed(
                list(members.values()),
                0,
                1,
                functools.partial(group.all_gather, name=f"{name} {number}"),
            )
            yield from zip(members, whole, strict=True)


def _exchange_packed(
    tensors: list[tf.Tensor],
    axis: int,
    result_axis: int,
    exchange: Callable[[tf.Tensor], tf.Tensor],
) -> list[tf.Tensor]:
    """Exchange tensors as one tensor.

    Args:
        tensors: Tensors of one bucket.
        axis: Axis along which the tensors are concatenated before the exchange.
        result_axis: Axis along which the result is split after the exchange.
        exchange: Collective that is called once.

    Returns:
        Parts of the result, one for each of `tensors`.
    """
    if len(tensors) == 1:
        return [exchange(tensors[0])]
    return tf.split(
        exchange(tf.concat(tensors, axis)), [x.shape[axis] for x in tensors], result_axis
    )
