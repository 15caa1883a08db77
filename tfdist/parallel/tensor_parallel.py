"""Tensor parallelism for a pair of Dense layers, split by columns and rows (Megatron-LM)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

_state = threading.local()


@contextlib.contextmanager
def sharded_over(devices: Sequence[str]) -> Iterator[None]:
    """Make `ShardedMLP` compute its shards on these devices within the context.

    Args:
        devices: Names of the devices. Shard i goes to device i, modulo their number.
    """
    outer = getattr(_state, "devices", None)
    _state.devices = list(devices)
    try:
        yield
    finally:
        _state.devices = outer


def shard_of(variable: keras.Variable) -> int:
    """Return the index of the stage's device that holds a variable; 0 for all but shards."""
    return getattr(variable, "tfdist_tensor_shard", 0)


class ShardedMLP(keras.layers.Layer):
    """Two Dense layers, split over devices as in Megatron-LM.

    The layer computes `Dense(units)(Dense(hidden, activation)(x))` (Shoeybi et al. 2019, section
    3). Shard i holds some columns of the first kernel with their bias, and the same rows of the
    second kernel. So each shard needs the whole input, but no result of another shard, and their
    outputs are summed once. In a model of `tfdist.parallel.pipeline(..., tensor=T)` device i of the
    stage holds and computes shard i. Elsewhere all shards are computed on the layer's device.

    Args:
        hidden: Units of the first Dense layer; a multiple of `shards`.
        units: Units of the second Dense layer.
        shards: Number of shards.
        activation: Elementwise activation of the first Dense layer, a name or a function; default
            none.
        use_bias: Whether both Dense layers have biases, default True.
        kernel_initializer: Initializer of both kernels, default "glorot_uniform". Fan-in and
            fan-out are those of the whole kernels.

    Raises:
        ValueError: If `hidden`, `units` or `shards` is not a positive integer, or `shards` does not
            divide `hidden`.
    """

    def __init__(
        self,
        hidden: int,
        units: int,
        shards: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        for name, value in (("hidden", hidden), ("units", units), ("shards", shards)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"ShardedMLP: {name}: expected a whole number from 1, received {value!r}."
                )
        if hidden % shards:
            raise ValueError(
                f"ShardedMLP: hidden: expected a multiple of shards={shards}, received {hidden}."
            )
        self.hidden = hidden
        self.units = units
        self.shards = shards
        self.use_bias = use_bias
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.supports_masking = True

    def build(self, input_shape):
        """See `keras.layers.Layer`."""
        width = input_shape[-1]
        part = self.hidden // self.shards
        first, second = (
            _clone(self.kernel_initializer)(shape)
            for shape in ((width, self.hidden), (self.hidden, self.units))
        )
        self.columns = []
        self.biases = []
        self.rows = []
        for i in range(self.shards):
            own = slice(i * part, (i + 1) * part)
            self.columns.append(
                self._shard(i, "column_kernel", (width, part), _constant(first[:, own]))
            )
            self.rows.append(
                self._shard(i, "row_kernel", (part, self.units), _constant(second[own]))
            )
            if self.use_bias:
                self.biases.append(self._shard(i, "column_bias", (part,), "zeros"))
        self.bias = (
            self.add_weight(shape=(self.units,), initializer="zeros", name="bias")
            if self.use_bias
            else None
        )
        self.built = True

    def _shard(self, number: int, name: str, shape: tuple, initializer: Any) -> keras.Variable:
        variable = self.add_weight(shape=shape, initializer=initializer, name=f"{name}_{number}")
        variable.tfdist_tensor_shard = number
        return variable

    def call(self, inputs):
        """See `keras.layers.Layer`."""
        devices = getattr(_state, "devices", None)
        parts = []
        for i in range(self.shards):
            weights = [v[i] for v in (self.columns, self.rows, self.biases) if v]
            tensors = [inputs, *(keras.ops.convert_to_tensor(v) for v in weights)]
            parts.append(
                _on_device(devices[i % len(devices)], self._part, tensors)
                if devices
                else self._part(*tensors)
            )
        total = tf.add_n(parts)
        return total if self.bias is None else total + keras.ops.convert_to_tensor(self.bias)

    def _part(self, inputs, column, row, bias=None):
        inner = tf.tensordot(inputs, column, 1)
        return tf.tensordot(self.activation(inner if bias is None else inner + bias), row, 1)

    def set_dense(self, first: keras.layers.Dense, second: keras.layers.Dense) -> None:
        """Copy the weights of a pair of Dense layers into the shards.

        Args:
            first: Dense layer with `hidden` units.
            second: Dense layer with `units` units.

        Raises:
            ValueError: If the pair has other units or biases than this layer, or one of the three
                layers is not built.
        """
        for name, dense, units in (("first", first, self.hidden), ("second", second, self.units)):
            if (dense.units, dense.use_bias) != (units, self.use_bias):
                raise ValueError(
                    f"ShardedMLP.set_dense: {name}: expected Dense({units}, "
                    f"use_bias={self.use_bias}), received Dense({dense.units}, "
                    f"use_bias={dense.use_bias})."
                )
        if not all(layer.built for layer in (self, first, second)):
            raise ValueError(
                "ShardedMLP.set_dense: expected layers that have weights; call each on an input, "
                "or build(shape), first."
            )
        columns, rows = (keras.ops.convert_to_numpy(layer.kernel) for layer in (first, second))
        part = self.hidden // self.shards
        for i in range(self.shards):
            own = slice(i * part, (i + 1) * part)
            self.columns[i].assign(columns[:, own])
            self.rows[i].assign(rows[own])
            if self.use_bias:
                self.biases[i].assign(keras.ops.convert_to_numpy(first.bias)[own])
        if self.bias is not None:
            self.bias.assign(second.bias)

    def compute_output_shape(self, input_shape):
        """See `keras.layers.Layer`."""
        return (*input_shape[:-1], self.units)

    def get_config(self):
        """See `keras.layers.Layer`."""
        own = {
            "hidden": self.hidden,
            "units": self.units,
            "shards": self.shards,
            "use_bias": self.use_bias,
        }
        return {
            **super().get_config(),
            **own,
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }


def _clone(initializer: Any) -> Any:
    """Return a clone that draws other values; return a function as it is."""
    return (
        initializer.clone()
        if isinstance(initializer, keras.initializers.Initializer)
        else initializer
    )


def _constant(value: Any) -> Callable:
    return lambda shape, dtype=None: keras.ops.cast(value, dtype)


def _on_device(device: str, function: Callable, tensors: list[tf.Tensor]) -> tf.Tensor:
    """Compute a function and its gradient on a device.

    Without this, a tape computes the gradient on the device that is current when the gradient is
    requested.
    """

    @tf.custom_gradient
    def on_device(*tensors):
        with tf.device(device), tf.GradientTape() as tape:
            tape.watch(tensors)
            output = function(*tensors)

        def gradient(upstream):
            with tf.device(device):
                return tape.gradient(output, tensors, upstream)

        return tf.identity(output), gradient

    return on_device(*tensors)
