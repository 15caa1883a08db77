"""Embedding layer with its table sharded over servers or replicas; only batch rows move.

Under parameter servers, row `i` of the table is row `i // shards` of shard `i % shards`.
Vocabularies are often sorted by frequency, and this spreads the frequent rows. Each shard is a
weight of its own, which TensorFlow puts on the next parameter server in turn. In files, and for
`get_table` and `set_table`, the shards are one table. Under synchronous strategies,
`tfdist.parallel.fsdp` shards the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import table_lookups

__all__ = ["ShardedEmbedding"]

# Number of values of the largest table that is initialized as a whole: 256 MB of float32, in the
# memory of each parameter server.
MAX_WHOLE_VALUES = 2**26

# Distance between the seeds of neighbouring shards: any odd constant that the seeds of other layers
# do not reach.
_SEED_STRIDE = 104_729

# Initializers whose distribution does not depend on the shape.
_BY_VALUE = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
    keras.initializers.RandomUniform,
    keras.initializers.RandomNormal,
    keras.initializers.TruncatedNormal,
)
_BY_ROW = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)
_UNSUPPORTED = ("lora_rank", "lora_alpha", "quantization_config")


@keras.saving.register_keras_serializable(package="tfdist")
class ShardedEmbedding(keras.layers.Layer):
    """Version of `keras.layers.Embedding` with its table sharded over servers or replicas.

    A step reads rows from their parameter servers and sends gradients of these rows back. The
    traffic is that of the batch, however large the table. With several shards each distinct id
    travels once.

    Under synchronous strategies, call `tfdist.parallel.fsdp(model)`: each replica then holds a part
    of the table and of its optimizer states. Instead of the table, a step sends the distinct ids of
    the batch, their rows, and the gradients of the rows. Without `fsdp`, each replica holds the
    whole table.

    Results, gradients and weights files are those of `keras.layers.Embedding`. Either layer reads
    the other's files, whatever the number of shards. But an id out of range is an error everywhere,
    also where Keras takes -1 as the last row or a GPU gives zeros. Adam, RMSprop and Adagrad square
    the sum of an id's gradients, as they do for `keras.layers.Embedding` under a strategy of
    tfdist. Without such a strategy and with one shard, Keras squares the parts one by one. Of
    Keras' optimizers only SGD without momentum and Adagrad update only the batch's rows, and so
    does `tfdist.optimizers.LazyAdam`. The others compute on a whole shard and its optimizer states,
    where it is.

    Initial values are those of `keras.layers.Embedding` with the same seeded initializer, if the
    table has up to 2**26 values, or one shard. Several shards of a larger table are never in one
    memory: each is initialized by itself, with its own seed, and initializers that depend on the
    shape (such as `glorot_uniform`) are refused. Under `fsdp`, replicas initialize their parts of
    such a table in the same way, if the model is made in `tfdist.parallel.deferred()`. The values
    then depend on the number of replicas. `get_table`, `set_table`, saving and loading, and under
    `fsdp` an initializer that depends on the shape, hold the whole table in one memory.

    A regularizer or constraint acts on all rows in every step: workers then read and send the whole
    table each time. `activity_regularizer` touches only the rows of the batch.

    A file of a whole model (`.keras`) names this class: `import tfdist.layers` before
    `keras.models.load_model`.

    The input is ids `[...]` of any rank, dense, ragged or sparse. The output is `[..., output_dim]`
    in the layer's compute dtype.

    Args:
        input_dim: Number of rows; ids are 0 to `input_dim - 1`.
        output_dim: Number of values of a row.
        embeddings_initializer: Initializer of the table `[input_dim, output_dim]`, default
            "uniform".
        embeddings_regularizer: None, or L1, L2 or L1L2: sums over single values, which shards can
            add up.
        embeddings_constraint: None, `NonNeg`, or `MaxNorm`, `MinMaxNorm` or `UnitNorm` with
            `axis=1`: constraints that act on each row alone.
        mask_zero: Whether id 0 is padding, which layers that use masks skip; default False.
        weights: Initial table `[input_dim, output_dim]`, or a list of it.
        shards: Number of shards. None: when the layer is built, the number of parameter servers of
            the strategy in scope, else 1. A saved model keeps its number, because its optimizer has
            a state for each shard.
        **kwargs: Arguments `name`, `dtype`, `trainable` and `activity_regularizer` of Keras'
            layers.

    Raises:
        ValueError: If an argument is wrong, or cannot be applied to shards.

    Example:
        >>> layer = ShardedEmbedding(5, 2, shards=2)
        >>> layer.set_table([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]])
        >>> layer(np.array([[3, 0, 3]])).numpy().tolist()
        [[[6.0, 7.0], [0.0, 1.0], [6.0, 7.0]]]
        >>> [tuple(w.shape) for w in layer.weights]
        [(3, 2), (2, 2)]
    """

    built: bool  # Keras sets it

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        shards: int | None = None,
        **kwargs: Any,
    ):
        for name in _UNSUPPORTED:
            if kwargs.pop(name, None) is not None:
                raise ValueError(
                    f"ShardedEmbedding: {name} is not supported; use keras.layers.Embedding."
                )
        super().__init__(**kwargs)
        if self.quantization_mode is not None:
            raise ValueError(
                "ShardedEmbedding: dtype: expected a policy without quantization, received "
                f"{self.dtype_policy.name!r}; use keras.layers.Embedding."
            )
        self.input_dim = _positive("input_dim", input_dim)
        self.output_dim = _positive("output_dim", output_dim)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = _check_regularizer(
            keras.regularizers.get(embeddings_regularizer)
        )
        self.embeddings_constraint = _check_constraint(keras.constraints.get(embeddings_constraint))
        if not isinstance(mask_zero, bool):
            raise ValueError(
                f"ShardedEmbedding: mask_zero: expected True or False, received {mask_zero!r}."
            )
        self.mask_zero = mask_zero
        self.shards = shards
        if shards is not None and _positive("shards", shards) > input_dim:
            raise ValueError(
                f"ShardedEmbedding: shards: expected at most input_dim={input_dim}, received "
                f"{shards}."
            )
        self.supports_masking = mask_zero
        self.autocast = False  # float ids stay as they are: bfloat16 would round 257 to 256
        self.supports_jit = shards in (None, 1)  # XLA needs to know how many rows each shard gives
        if weights is not None:
            self.set_table(
                weights[0] if isinstance(weights, list) and len(weights) == 1 else weights
            )

    def build(self, input_shape: Any = None) -> None:
        """See `keras.layers.Layer`."""
        if self.built:
            return
        self.shards = self.shards or min(_parameter_servers(), self.input_dim)
        self._parts = [
            self.add_weight(
                shape=(len(range(shard, self.input_dim, self.shards)), self.output_dim),
                initializer=_shard_initializer(
                    self.embeddings_initializer,
                    (self.input_dim, self.output_dim),
                    shard,
                    self.shards,
                ),
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
                autocast=False,  # a cast would read the whole shard; rows are cast instead
                name="embeddings" if self.shards == 1 else f"embeddings_{shard}",
            )
            for shard in range(self.shards)
        ]
        self.built = True

    def call(self, inputs):
        """See `keras.layers.Layer`."""
        if isinstance(inputs, tf.RaggedTensor):
            return tf.ragged.map_flat_values(self.call, inputs)
        if isinstance(inputs, tf.SparseTensor):
            inputs = tf.sparse.to_dense(inputs)  # missing ids are 0, as in keras.layers.Embedding
        ids = tf.convert_to_tensor(inputs)
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int64)
        with tf.control_dependencies([self._check_range(ids)]):
            rows = _look_up(self._parts, tf.reshape(ids, [-1]))
        rows = tf.reshape(
            tf.cast(rows, self.compute_dtype), tf.concat([tf.shape(ids), [self.output_dim]], 0)
        )
        return tf.ensure_shape(rows, ids.shape.concatenate(self.output_dim))

    def _check_range(self, ids: tf.Tensor):
        """Assert that ids are in range.

        TensorFlow's own message would name the row's number in its shard, which does not help the
        user.
        """
        return table_lookups.check_range(
            ids,
            self.input_dim,
            f"{self.name}: expected ids from 0 to {self.input_dim - 1} (input_dim - 1); received "
            "these lowest and highest ids:",
        )

    def compute_mask(self, inputs, mask=None):
        """See `keras.layers.Layer`."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape):
        """See `keras.layers.Layer`."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs):
        """See `keras.layers.Layer`."""
        shape = self.compute_output_shape(inputs.shape)
        ragged = getattr(inputs, "ragged", False)
        return keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=ragged)

    def get_table(self) -> np.ndarray:
        """Return the whole table.

        This is a method, not a property, because Keras evaluates all properties of a layer while it
        saves a model.

        Returns:
            The table `[input_dim, output_dim]`, in the dtype of the weights.
        """
        self.build()
        table = np.empty(
            (self.input_dim, self.output_dim), tf.as_dtype(self.variable_dtype).as_numpy_dtype
        )
        for shard, part in enumerate(self._parts):
            table[shard :: self.shards] = part.numpy()
        return table

    def set_table(self, table: Any) -> None:
        """Set the whole table.

        Args:
            table: Values `[input_dim, output_dim]`.

        Raises:
            ValueError: If the table has another shape.
        """
        table = np.asarray(table)
        if table.shape != (self.input_dim, self.output_dim):
            raise ValueError(
                f"{self.name}: expected a table of shape {(self.input_dim, self.output_dim)}, "
                f"that is (input_dim, output_dim); received {table.shape}."
            )
        self.build()
        for shard, part in enumerate(self._parts):
            part.assign(table[shard :: self.shards])

    def save_own_variables(self, store) -> None:
        """See `keras.layers.Layer`."""
        if self.built:
            store["0"] = self.get_table()

    def load_own_variables(self, store) -> None:
        """See `keras.layers.Layer`."""
        if not self.built:
            return super().load_own_variables(store)  # Keras explains why it has no weights
        if list(store.keys()) != ["0"]:
            raise ValueError(
                f"{self.name}: expected one array, '0', of an embedding table; the file has "
                f"{sorted(store.keys())}. Tables saved with quantization or by another layer "
                "cannot be read."
            )
        self.set_table(store["0"])

    def get_config(self) -> dict[str, Any]:
        """See `keras.layers.Layer`."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
            "shards": self.shards,
        }


# Weights files name a model's layers by their classes, and each class must read the other's files.
ShardedEmbedding.__name__ = keras.layers.Embedding.__name__


# --- Lookup ---------------------------------------------------------------------------------------
def _look_up(parts: list[keras.Variable], ids: tf.Tensor) -> tf.Tensor:
    """Return rows `[n, output_dim]` for ids `[n]`.

    Each row is read, and updated, on the device of its shard.
    """
    if len(parts) == 1:
        return table_lookups.rows(parts[0], ids)
    distinct, position = tf.unique(ids)
    owner = tf.cast(distinct % len(parts), tf.int32)
    row_indices = tf.dynamic_partition(distinct // len(parts), owner, len(parts))
    positions = tf.dynamic_partition(tf.range(tf.size(distinct)), owner, len(parts))
    return _repeat(
        tf.dynamic_stitch(
            positions,
            [table_lookups.rows(part, i) for part, i in zip(parts, row_indices, strict=True)],
        ),
        position,
    )


@tf.custom_gradient
def _repeat(rows: tf.Tensor, position: tf.Tensor):
    """Return rows `[n, output_dim]` at positions `[n]` of rows `[k, output_dim]`.

    The custom gradient adds up duplicates; TensorFlow's own gradient would not.
    """

    def gradient(upstream):
        return tf.math.unsorted_segment_sum(upstream, position, tf.shape(rows)[0]), None

    return tf.gather(rows, position), gradient


# --- Building -------------------------------------------------------------------------------------
def _parameter_servers() -> int:
    """Return the number of parameter servers of the strategy in scope, 1 if it has none.

    They are counted by devices, because the strategy's `cluster_resolver` is None.
    """
    servers = isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)
    return connected_tasks("ps") if servers else 1


def connected_tasks(job: str) -> int:
    """Return how many tasks of a job this process has connected to."""
    devices = (
        tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices("CPU")
    )
    return len({device.task for device in devices if device.job == job})


def _shard_initializer(
    initializer: Any, table: tuple[int, int], shard: int, shards: int
) -> Callable:
    """Return the initializer of a shard; it is called on the shard's device."""
    if shards == 1:
        return initializer
    if table[0] * table[1] <= MAX_WHOLE_VALUES:
        return lambda shape, dtype=None: initializer(table, dtype=dtype)[shard::shards]
    if not _is_by_value(initializer):
        raise ValueError(
            f"ShardedEmbedding: embeddings_initializer: a table {table} of more than "
            f"{MAX_WHOLE_VALUES} values is initialized in parts. Expected one of "
            f"{', '.join(cls.__name__ for cls in _BY_VALUE)} (of one value, with a number or "
            f"nothing as seed); received {initializer}."
        )
    return _of_shard(initializer, shard)


def part_initializers(
    initializer: Callable, table: tuple[int, int], parts: int
) -> list[Callable] | None:
    """Return the initializers of the parts of a table that is too large to be made as a whole.

    Args:
        initializer: Initializer of the whole table.
        table: Shape of the table.
        parts: Number of parts.

    Returns:
        An initializer for each part; None if the table may be whole in one memory, or must be,
        because the initializer depends on its shape.
    """
    if parts == 1 or table[0] * table[1] <= MAX_WHOLE_VALUES or not _is_by_value(initializer):
        return None
    # Without a seed, each takes the next number of Python's generator, in all processes alike.
    return [_of_shard(initializer, part) for part in range(parts)]


def _is_by_value(initializer: Any) -> bool:
    """Return whether an initializer treats all values alike and can have other seeds."""
    return (
        type(initializer) in _BY_VALUE
        and not np.ndim(getattr(initializer, "value", 0))
        and isinstance(initializer.get_config().get("seed"), int | None)
    )


def _of_shard(initializer: Any, shard: int) -> Any:
    """Return an initializer of the same kind with a seed of its own for a shard."""
    config = initializer.get_config()
    if isinstance(config.get("seed"), int):  # None: each shard gets a new seed anyway
        config["seed"] = (config["seed"] + shard * _SEED_STRIDE) % 2**32
    return type(initializer).from_config(config)


# --- Arguments ------------------------------------------------------------------------------------
def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(
            f"ShardedEmbedding: {name}: expected a positive integer, received {value!r}."
        )
    return value


def _check_regularizer(regularizer: Any) -> Any:
    if regularizer is None or type(regularizer) in (
        keras.regularizers.L1,
        keras.regularizers.L2,
        keras.regularizers.L1L2,
    ):
        return regularizer
    raise ValueError(
        "ShardedEmbedding: embeddings_regularizer: expected L1, L2, L1L2 or None, as the sum "
        f"over shards must equal the whole; received {regularizer}. Use activity_regularizer for "
        "the rows of a batch, or keras.layers.Embedding."
    )


def _check_constraint(constraint: Any) -> Any:
    rows_only = type(constraint) in _BY_ROW and constraint.axis in (1, -1, [1], [-1])
    if constraint is None or type(constraint) is keras.constraints.NonNeg or rows_only:
        return constraint
    received = (
        f"{type(constraint).__name__}(axis={constraint.axis})"
        if type(constraint) in _BY_ROW
        else repr(constraint)
    )
    raise ValueError(
        "ShardedEmbedding: embeddings_constraint: expected NonNeg, or MaxNorm, MinMaxNorm or "
        f"UnitNorm with axis=1, as a column's values lie in several shards; received {received}."
    )
