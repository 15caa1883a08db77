"""Many tensors become few collectives."""

from __future__ import annotations

import tensorflow as tf

from tfdist.parallel import rows
from tfdist.parallel.collectives import Group


def all_reduce(group: Group, tensors: list, name: str, bucket_bytes: int, wire: str | None = None) -> list:
    """The sums of tensors over a group, small ones packed together.

    Args:
        group: The replicas.
        tensors: Dense; None stays None.
        name: Of this call.
        bucket_bytes: Most that is packed together.
        wire: As for `Group.all_reduce`.
    """
    places = [i for i, x in enumerate(tensors) if x is not None]
    given = [tensors[i] for i in places]
    result = list(tensors)
    plan = rows.buckets([x.shape.num_elements() * x.dtype.size for x in given], [x.dtype for x in given], bucket_bytes)
    for number, bucket in enumerate(plan):
        members = [given[i] for i in bucket]
        flat = tf.concat([tf.reshape(x, [-1]) for x in members], 0) if len(members) > 1 else members[0]
        total = group.all_reduce(flat, f"{name}/{number}", wire=wire)
        parts = tf.split(total, [rows.elements(x.shape) for x in members]) if len(members) > 1 else [total]
        for i, x, part in zip(bucket, members, parts, strict=True):
            result[places[i]] = tf.reshape(part, x.shape)
    return result
