"""Rows of weights become whole weights for a moment, and their gradients become the rows of a sum; which layer uses them is not known here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_compat.parallel import Sharded, freed_with_graph, own_copy
from tfdist.parallel import rows
from tfdist.parallel.collectives import Group


class Gathering:
    """The exchange of weights and of their gradients.

    Args:
        forth: In which weights are gathered.
        back: In which gradients are summed; a group of its own, so that neither waits for the other.
        gather_dtype: In which weights travel; None: their own.
        grad_dtype: In which gradients travel; None: that of the weights.
        scale: Gives what gradients are multiplied with before they are summed.
        bucket_bytes: Weights of a layer that are smaller travel together, in buckets of at most so many bytes.
    """

    def __init__(self, forth: Group, back: Group, gather_dtype: str | None, grad_dtype: str | None, scale: Callable[[], float], bucket_bytes: int):
        self.forth, self.back, self.gather_dtype, self.grad_dtype, self._scale = forth, back, gather_dtype, grad_dtype, scale
        self._bucket_bytes = bucket_bytes

    def gather(self, variables: Sequence[Sharded], parts: Sequence[tf.Tensor], name: str, gates: Sequence[tf.Tensor], compute_dtype: str) -> list[tf.Tensor]:
        """Whole weights.

        Args:
            variables: The weights.
            parts: This replica's row of each.
            name: Of this call.
            gates: Nothing is sent before these are known.
            compute_dtype: Of the layer; weights that traveled in it stay so.
        """
        whole: dict[int, tf.Tensor] = {}
        with tf.control_dependencies(list(gates)) if gates else contextlib.nullcontext():
            for number, bucket in enumerate(self._buckets(variables, parts)):
                sent = [self._narrowed(parts[i]) for i in bucket]
                received = self.forth.all_gather(tf.concat(sent, 0) if len(sent) > 1 else sent[0], f"{name} {number}")
                pieces = tf.split(received, [x.shape[0] for x in sent], axis=1) if len(sent) > 1 else [received]
                for i, piece in zip(bucket, pieces, strict=True):
                    value = rows.from_rows(piece, variables[i].tfdist_shape)
                    whole[i] = value if value.dtype.name == compute_dtype else tf.cast(value, parts[i].dtype)
        return [whole[i] for i in range(len(variables))]

    def scatter(self, variables: Sequence[Sharded], parts: Sequence[tf.Tensor], grads: Sequence[Any], name: str) -> list[tf.Tensor | None]:
        """This replica's row of the sum of each gradient; None stays None.

        Args:
            variables: The weights.
            parts: This replica's row of each.
            grads: Of the whole weights.
            name: Of this call.
        """
        sums: list[tf.Tensor | None] = [None] * len(variables)
        scale = self._scale()
        places = [i for i, g in enumerate(grads) if g is not None]
        for number, bucket in enumerate(self._buckets([variables[i] for i in places], [parts[i] for i in places])):
            members = [places[i] for i in bucket]
            given = []
            for i in members:
                dense = tf.cast(tf.convert_to_tensor(grads[i]), parts[i].dtype)
                given.append(rows.to_rows(tf.reshape(dense, variables[i].tfdist_shape), self.back.size))
            total = self.back.reduce_scatter(tf.concat(given, 1) if len(given) > 1 else given[0], f"{name} {number}", self.grad_dtype)
            total = total if scale == 1.0 else total * tf.cast(scale, total.dtype)
            for i, part in zip(members, tf.split(total, [x.shape[1] for x in given]) if len(given) > 1 else [total], strict=True):
                sums[i] = part
        return sums

    def gathered(self, variables: Sequence[Sharded], name: str, gates: Sequence[tf.Tensor], compute_dtype: str) -> list[tf.Tensor]:
        """Whole weights that stay until their gradients are known.

        Args:
            variables: The weights.
            name: Of this call.
            gates: Nothing is sent before these are known.
            compute_dtype: Of the layer.
        """

        @tf.custom_gradient
        def gather(*parts):
            def grad(*grads):
                return self.scatter(variables, parts, grads, f"{name} sum")

            return self.gather(variables, parts, name, gates, compute_dtype), grad

        return freed_with_graph(list(gather(*[own_copy(v) for v in variables])))

    def _narrowed(self, x: tf.Tensor) -> tf.Tensor:
        return tf.identity(x) if self.gather_dtype is None else tf.cast(x, self.gather_dtype)

    def _buckets(self, variables: Sequence[Sharded], parts: Sequence[tf.Tensor]) -> list[list[int]]:
        """Places of the variables that travel together."""
        kinds = [part.dtype for part in parts]
        return rows.buckets([rows.elements(v.tfdist_shape) * kind.size for v, kind in zip(variables, kinds, strict=True)], kinds, self._bucket_bytes)
