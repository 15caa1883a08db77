"""Facts in which the supported versions of Keras differ."""

import functools

import keras
import numpy as np


@functools.cache
def sums_activities() -> bool:
    """Return whether this Keras sums activity regularizers over the rows of the batch.

    Then the sum of each replica, or micro-batch, is that of its own rows alone.
    """
    layer = keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer="l1")
    layer(np.ones((1, 1)))
    of_one = float(layer.losses[0])
    layer(np.ones((2, 1)))
    return float(layer.losses[-1]) > 1.5 * of_one
