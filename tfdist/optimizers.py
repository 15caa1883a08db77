"""Optimizer for large embedding tables: updates only the rows that a batch has used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of, fused_updates
from tfdist.keras_compat.parallel import innermost
from tfdist.keras_compat.sparse_gradients import merge_duplicates

log = logging.getLogger("tfdist")

__all__ = ["LazyAdam"]

# Options of Keras' optimizers that need dense gradients.
_DENSE = ("global_clipnorm", "gradient_accumulation_steps", "loss_scale_factor")
_TABLE = "embeddings"  # begins the name of a table


@keras.saving.register_keras_serializable(package="tfdist")
class LazyAdam(keras.optimizers.Adam):
    """Version of Adam that updates only the rows of sparse gradients, and their moments.

    `keras.optimizers.Adam` computes on the whole table of an embedding in each step: the moments of
    all rows decay, and move rows that the batch has not used. `LazyAdam` leaves these rows and
    their moments as they are, so that the time of a step does not depend on the size of the table.
    Its numbers therefore differ from those of Adam, but for rows that are used in each step. All
    other weights are updated as by Adam.

    Sparse gradients are those of `keras.layers.Embedding` and `tfdist.layers.ShardedEmbedding`,
    unless a regularizer or another layer uses the table, too; then a line of the log says that its
    gradient is dense. Weight decay and moving averages (`use_ema`) still act on all rows.

    Args:
        *args: Arguments of `keras.optimizers.Adam`, of which the first is the learning rate.
        **kwargs: Arguments of `keras.optimizers.Adam`. To clip gradients, use `clipnorm` or
            `clipvalue`.

    Raises:
        ValueError: If an argument needs dense gradients.

    Example:
        >>> layer = keras.layers.Embedding(4, 2, "zeros")
        >>> model = keras.Sequential([keras.Input([1]), layer])
        >>> model.compile(LazyAdam(0.5), "mse")
        >>> _ = model.fit(tf.constant([[2], [2]]), tf.ones([2, 1, 2]), verbose=0)
        >>> layer.embeddings.numpy()[:, 0].round(2).tolist()
        [0.0, 0.0, 0.5, 0.0]
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._found_dense: set[str] = set()
        for name in _DENSE:
            if value := getattr(self, name):
                raise ValueError(
                    f"LazyAdam: {name}: expected None, received {value!r}: the gradient of a table "
                    "would be as large as the table. Use keras.optimizers.Adam, or clip by "
                    "clipnorm or clipvalue."
                )

    def apply(self, grads, trainable_variables=None):
        """See `keras.optimizers.Optimizer`; sums the rows of an index before they are clipped."""
        if not _merged_by_engine():
            grads = [merge_duplicates(g) for g in grads]
        return super().apply(grads, trainable_variables)

    @fused_updates.fusible
    def update_step(self, gradient, variable, learning_rate):
        """See `keras.optimizers.Adam`."""
        if isinstance(gradient, tf.IndexedSlices):
            # XLA takes what it pads the rows of one merge with for rows of another one.
            if not _merged_by_engine() and tf.distribute.has_strategy():  # of several replicas
                gradient = merge_duplicates(gradient)
            fused_updates.update_rows(self, gradient, variable, learning_rate)
            return
        updated = fused_updates.variable_of(self, variable)
        if updated.name.startswith(_TABLE) and updated.path not in self._found_dense:
            self._found_dense.add(updated.path)
            log.warning(
                "LazyAdam: the gradient of %s is dense, so that all of its rows are updated in "
                "each step, as by Adam. See docs/sharding.md, Adam for tables.",
                updated.path,
            )
        super().update_step(gradient, variable, learning_rate)


def _merged_by_engine() -> bool:
    """Return whether the engine of a strategy of tfdist merges the rows of an index."""
    return engine_of(tf.distribute.get_strategy()) is not None


def check_sparse(optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], cause: str) -> None:
    """Raise ValueError if a `LazyAdam` would be given a sparse gradient as a dense one.

    Args:
        optimizer: Outermost optimizer.
        grads: Gradients that will be made dense; None for no gradient.
        cause: Subject of the error message: what makes them dense.

    Raises:
        ValueError: If the optimizer is a `LazyAdam`, and a gradient is sparse.
    """
    sparse = any(isinstance(g, tf.IndexedSlices) for g in grads)
    if sparse and isinstance(innermost(optimizer), LazyAdam):
        raise ValueError(
            f"LazyAdam: expected sparse gradients of embedding tables, but {cause} makes them "
            "dense, and all rows would be updated. Leave it out, or use keras.optimizers.Adam."
        )
