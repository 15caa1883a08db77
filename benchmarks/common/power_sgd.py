"""Send gradient matrices as products of two thin ones, by a user's function for `tfdist.sync`.

This is PowerSGD (Vogels et al. 2019, arXiv:1905.13727).

It is not in tfdist; docs/sync.md says why.
"""

from __future__ import annotations

import tensorflow as tf

import tfdist


class PowerSGD:
    """Add what a replica left out to its next gradient (error feedback).

    Products begin with those of the step before (warm start).

    Args:
        rank: Columns of the thin matrices.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._state: dict[
            int, tuple[tf.Variable, tf.Variable]
        ] = {}  # index of a gradient -> what was left out, and the second thin matrix

    def __call__(self, gradients: list) -> list:
        """Return the sums of gradients over the replicas; those of matrices are approximate."""
        group = tfdist.parallel.replicas("power")
        result = list(gradients)
        places = [i for i, g in enumerate(gradients) if g is not None]
        matrices = [
            i for i in places if gradients[i].shape.rank > 1 and self._saves(gradients[i].shape)
        ]
        others = [i for i in places if i not in matrices]
        whole = {}
        lefts = {}
        for i in matrices:
            left_out, right = self._of(i, gradients[i].shape)
            whole[i] = tf.reshape(gradients[i], left_out.shape) + left_out
            lefts[i] = whole[i] @ right
        sums = _sum(group, [*(lefts[i] for i in matrices), *(gradients[i] for i in others)], "left")
        for i, total in zip(others, sums[len(matrices) :], strict=True):
            result[i] = total
        lefts = {i: tf.linalg.qr(total)[0] for i, total in zip(matrices, sums, strict=False)}
        own = {i: tf.matmul(whole[i], lefts[i], transpose_a=True) for i in matrices}
        for i, right in zip(
            matrices, _sum(group, [own[i] for i in matrices], "right"), strict=True
        ):
            left_out, before = self._state[i]
            left_out.assign(whole[i] - tf.matmul(lefts[i], own[i], transpose_b=True))
            before.assign(right)
            result[i] = tf.reshape(tf.matmul(lefts[i], right, transpose_b=True), gradients[i].shape)
        return result

    def _saves(self, shape: tf.TensorShape) -> bool:
        rows = shape.num_elements() // shape[-1]
        columns = shape[-1]
        return self._rank * (rows + columns) < rows * columns / 2

    def _of(self, index: int, shape: tf.TensorShape) -> tuple[tf.Variable, tf.Variable]:
        if index not in self._state:
            rows = shape.num_elements() // shape[-1]
            columns = shape[-1]
            with tf.init_scope():
                right = tf.random.stateless_normal(
                    [columns, self._rank], [index, 1]
                )  # equal on all replicas
                self._state[index] = tf.Variable(tf.zeros([rows, columns])), tf.Variable(right)
        return self._state[index]


def _sum(group, tensors: list, name: str) -> list:
    """Sum tensors over the replicas, in one collective."""
    if not tensors:
        return []
    total = group.all_reduce(tf.concat([tf.reshape(x, [-1]) for x in tensors], 0), name)
    parts = tf.split(total, [x.shape.num_elements() for x in tensors])
    return [tf.reshape(part, x.shape) for part, x in zip(parts, tensors, strict=True)]
