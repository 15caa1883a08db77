"""Many tensors become few collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.group import Group


def all_reduce(
    group: Group, tensors: list, name: str, bucket_bytes: int, comm_dtype: str | None = None
) -> list:
    """The sums of tensors over a group, small ones packed together.

    Args:
        group: The replicas.
        tensors: Dense; None stays None.
        name: Of this call.
        bucket_bytes: Most that is packed together.
        comm_dtype: As for `Group.all_reduce`.
    """
    places = [i for i, x in enumerate(tensors) if x is not None]
    given = [tensors[i] for i in places]
    result = list(tensors)
    plan = flat_shards.buckets(
        [x.shape.num_elements() * x.dtype.size for x in given],
        [x.dtype for x in given],
        bucket_bytes,
    )
    for number, bucket in enumerate(plan):
        members = (
            [tf.reshape(given[i], [-1]) for i in bucket] if len(bucket) > 1 else [given[bucket[0]]]
        )
        sums = _together(
            members,
            0,
            0,
            functools.partial(group.all_reduce, name=f"{name}/{number}", comm_dtype=comm_dtype),
        )
        for i, part in zip(bucket, sums, strict=True):
            result[places[i]] = tf.reshape(part, given[i].shape)
    return result


def reduce_scatter(
    group: Group,
    tensors: Sequence[tf.Tensor | None],
    plan: Sequence[Sequence[int]],
    name: str,
    comm_dtype: str | None = None,
) -> list[tf.Tensor | None]:
    """This replica's rows of the sums of tensors over a group.

    Args:
        group: The replicas.
        tensors: `[size, n]` each, as of `rows.to_rows`; None stays None.
        plan: Places of the tensors that travel together.
        name: Of this call.
        comm_dtype: As for `Group.reduce_scatter`.

    Returns:
        `[n]` each.
    """
    result: list[tf.Tensor | None] = [None] * len(tensors)
    for number, bucket in enumerate(plan):
        if members := {i: x for i in bucket if (x := tensors[i]) is not None}:
            sums = _together(
                list(members.values()),
                1,
                0,
                functools.partial(
                    group.reduce_scatter, name=f"{name} {number}", comm_dtype=comm_dtype
                ),
            )
            for i, part in zip(members, sums, strict=True):
                result[i] = part
    return result


def all_gather(
    group: Group, tensors: Sequence[tf.Tensor | None], plan: Sequence[Sequence[int]], name: str
) -> Iterator[tuple[int, tf.Tensor]]:
    """The rows of tensors of all replicas of a group, one bucket after the other.

    Args:
        group: The replicas.
        tensors: This replica's row of each, `[n]`; of None nothing is gathered.
        plan: Places of the tensors that travel together.
        name: Of this call.

    Yields:
        The place of each, and `[size, n]`.
    """
    for number, bucket in enumerate(plan):
        if members := {i: x for i in bucket if (x := tensors[i]) is not None}:
            whole = _together(
                list(members.values()),
                0,
                1,
                functools.partial(group.all_gather, name=f"{name} {number}"),
            )
            yield from zip(members, whole, strict=True)


def _together(
    members: list[tf.Tensor], given: int, received: int, exchange: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Exchanges tensors as one, which joins them along the axis `given` and comes back so along the axis `received`."""
    if len(members) == 1:
        return [exchange(members[0])]
    return tf.split(
        exchange(tf.concat(members, given)), [x.shape[given] for x in members], received
    )
