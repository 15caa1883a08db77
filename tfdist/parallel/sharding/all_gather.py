"""All-gather of sharded weights and reduce-scatter of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_compat.parallel import Sharded, freed_with_graph, own_copy
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.bucketing import all_gather, reduce_scatter
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
        parts: Sequence[tf.Tensor],
        name: str,
        gates: Sequence[tf.Tensor],
        compute_dtype: str,
    ) -> list[tf.Tensor]:
        """Return the whole weights.

        Args:
            variables: Sharded weights.
            parts: This replica's row of each weight.
            name: Name of this call.
            gates: Tensors that must be computed before anything is sent.
            compute_dtype: Compute dtype of the layer. Weights that were sent in this dtype are
                not cast back.
        """
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

    def scatter(
        self,
        variables: Sequence[Sharded],
        parts: Sequence[tf.Tensor],
        grads: Sequence[Any],
        name: str,
    ) -> list[tf.Tensor | None]:
        """Return this replica's row of the sum of each gradient; None stays None.

        Args:
            variables: Sharded weights.
            parts: This replica's row of each weight.
            grads: Gradients of the whole weights.
            name: Name of this call.
        """
        scale = self.scale()
        # A factor that all replicas share is cheaper after the sum, on this replica's part.
        varies = not isinstance(scale, float)
        rows: list[tf.Tensor | None] = [None] * len(variables)
        for i, (g, v, part) in enumerate(zip(grads, variables, parts, strict=True)):
            if g is not None:
                rows[i] = flat_shards.to_rows(
                    tf.reshape(tf.cast(tf.convert_to_tensor(g), part.dtype), v.tfdist_shape),
                    self.backward_group.size,
                )
        sums = reduce_scatter(
            self.backward_group,
            rows,
            self._buckets(variables, parts),
            name,
            self.grad_dtype,
            scale if varies else 1.0,
        )
        return sums if varies else weighted(sums, scale)

    def gather_with_gradient(
        self,
        variables: Sequence[Sharded],
        name: str,
        gates: Sequence[tf.Tensor],
        compute_dtype: str,
    ) -> list[tf.Tensor]:
        """Return whole weights that stay in memory until their gradients are computed.

        Args:
            variables: Sharded weights.
            name: Name of this call.
            gates: Tensors that must be computed before anything is sent.
            compute_dtype: Compute dtype of the layer.
        """
        trained = [v.trainable for v in variables]

        @tf.custom_gradient
        def gather(*parts):
            def grad(*grads):
                wanted = [g if train else None for g, train in zip(grads, trained, strict=True)]
                return self.scatter(variables, parts, wanted, f"{name} sum")

            return self.gather(variables, parts, name, gates, compute_dtype), grad

        whole = freed_with_graph(list(gather(*own_parts(variables))))
        return [
            x if train else tf.stop_gradient(x) for x, train in zip(whole, trained, strict=True)
        ]

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
