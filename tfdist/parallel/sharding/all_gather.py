"""All-gather of sharded weights and reduce-scatter of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_compat.parallel import Sharded, freed_with_graph, own_copy
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.bucketing import all_gather, reduce_scatter_bucket
from tfdist.parallel.collectives.group import Group
from tfdist.parallel.replica_weight import Weight, weighted


def own_parts(variables: Sequence[Sharded]) -> list[tf.Tensor]:
    """Return this replica's row of each weight; no gradient reaches that of a frozen one."""
    return [own_copy(v) if v.trainable else tf.stop_gradient(own_copy(v)) for v in variables]


class Gathering:
    """Collectives that gather sharded weights and reduce-scatter their gradients.

    Args:
        forward_group: Group for the all-gather of weights.
        backward_group: Group for the reduce-scatter of gradients. It is a separate group, so that
            weights and gradients do not wait for each other.
        gather_dtype: Dtype in which weights are sent. None: the dtype of the weights.
        grad_dtype: Dtype in which gradients are sent. None: the dtype of the weights.
        scale: Function that returns the factor of this replica's gradients.
        bucket_bytes: Largest size of a bucket in bytes. Smaller weights of one layer are sent
            together in buckets.
    """

    def __init__(
        self,
        forward_group: Group,
        backward_group: Group,
        gather_dtype: str | None,
        grad_dtype: str | None,
        scale: Callable[[], Weight],
        bucket_bytes: int,
    ):
        self.forward_group = forward_group
        self.backward_group = backward_group
        self.gather_dtype = gather_dtype
        self.grad_dtype = grad_dtype
        self.scale = scale
        self._bucket_bytes = bucket_bytes

    def gather(
        self,
        variables: Sequence[Sharded],
        name: str,
        gates: Sequence[tf.Tensor],
        compute_dtype: str,
        parts: Sequence[tf.Tensor] | None = None,
    ) -> list[tf.Tensor]:
        """Return the whole weights; the gradients of the parts are the `scatter` of theirs.

        Args:
            variables: Sharded weights.
            name: Name of this call.
            gates: Tensors that must be computed before anything is sent.
            compute_dtype: Compute dtype of the layer. Weights that were sent in this dtype are
                not cast back.
            parts: This replica's row of each weight. None: rows that `own_parts` returns.
        """
        trained = [v.trainable for v in variables]

        @tf.custom_gradient
        def gather(*parts):
            def grad(*grads):
                wanted = [g if train else None for g, train in zip(grads, trained, strict=True)]
                return self.scatter(variables, parts, wanted, f"{name} sum")

            return self._gather(variables, parts, name, gates, compute_dtype), grad

        whole = freed_with_graph(list(gather(*(own_parts(variables) if parts is None else parts))))
        return [
            x if train else tf.stop_gradient(x) for x, train in zip(whole, trained, strict=True)
        ]

    def scatter(
        self,
        variables: Sequence[Sharded],
        parts: Sequence[tf.Tensor],
        grads: Sequence[Any],
        name: str,
    ) -> list[tf.Tensor | None]:
        """Return this replica's row of the sum of each gradient; None stays None.

        The gradient of a replica's own gradients is `gather` of that of the rows.

        Args:
            variables: Sharded weights.
            parts: This replica's row of each weight.
            grads: Gradients of the whole weights.
            name: Name of this call.
        """
        rows: list[tf.Tensor | None] = [None] * len(variables)
        for number, bucket in enumerate(self._buckets(variables, parts)):
            if members := [i for i in bucket if grads[i] is not None]:
                sums = self._sum(
                    [variables[i] for i in members],
                    [tf.convert_to_tensor(grads[i]) for i in members],
                    parts[members[0]].dtype,
                    f"{name} {number}",
                )
                for i, row in zip(members, sums, strict=True):
                    rows[i] = row
        return rows

    def _gather(
        self,
        variables: Sequence[Sharded],
        parts: Sequence[tf.Tensor],
        name: str,
        gates: Sequence[tf.Tensor],
        compute_dtype: str,
    ) -> list[tf.Tensor]:
        whole: dict[int, tf.Tensor] = {}
        with tf.control_dependencies(list(gates)) if gates else contextlib.nullcontext():
            for i, received in all_gather(
                self.forward_group,
                [self._cast(x) for x in parts],
                self._buckets(variables, parts),
                name,
            ):
                value = flat_shards.from_rows(received, variables[i].tfdist_shape)
                whole[i] = (
                    value if value.dtype.name == compute_dtype else tf.cast(value, parts[i].dtype)
                )
        return [whole[i] for i in range(len(variables))]

    def _sum(
        self,
        variables: Sequence[Sharded],
        grads: Sequence[tf.Tensor],
        dtype: tf.DType,
        name: str,
    ) -> list[tf.Tensor]:
        """Return this replica's rows of the sums of the gradients of one bucket.

        Args:
            variables: Sharded weights.
            grads: Gradients of the whole weights.
            dtype: Dtype of the sums.
            name: Name of this call.
        """

        @tf.custom_gradient
        def total(*grads):
            def grad(*upstream):
                # Those of the replica's own loss: its factor comes with the next sum.
                whole = self.gather(
                    variables, f"{name} gradient", [], grads[0].dtype.name, upstream
                )
                return [tf.cast(x, g.dtype) for x, g in zip(whole, grads, strict=True)]

            scale = self.scale()
            # A factor that all replicas share is cheaper after the sum, on this replica's part.
            varies = not isinstance(scale, float)
            rows = [
                flat_shards.to_rows(
                    tf.reshape(tf.cast(g, dtype), v.tfdist_shape), self.backward_group.size
                )
                for g, v in zip(grads, variables, strict=True)
            ]
            sums = reduce_scatter_bucket(
                self.backward_group, rows, name, self.grad_dtype, scale if varies else 1.0
            )
            return sums if varies else weighted(sums, scale), grad

        return freed_with_graph(list(total(*grads)))

    def _cast(self, x: tf.Tensor) -> tf.Tensor:
        return tf.identity(x) if self.gather_dtype is None else tf.cast(x, self.gather_dtype)

    def _buckets(self, variables: Sequence[Sharded], parts: Sequence[tf.Tensor]) -> list[list[int]]:
        """Return the indices of the variables in each bucket."""
        kinds = [part.dtype for part in parts]
        return flat_shards.buckets(
            [
                flat_shards.elements(v.tfdist_shape) * kind.size
                for v, kind in zip(variables, kinds, strict=True)
            ],
            kinds,
            self._bucket_bytes,
        )
