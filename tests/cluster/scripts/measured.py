"""Measure a worker's steps, with the second one slowed.

The command is `measured.py INDEX DIRECTORY [DELAY [MEASURED]]`.
"""

import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

STEPS = 30
EPOCHS = 2
BATCH = 16
DELAY_S = 0.05  # seconds of the second worker's forward pass


class Slow(keras.layers.Layer):
    """Sleep in the forward pass."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, x):
        def wait(x):
            time.sleep(self.seconds)
            return x

        return x + 0 * tf.ensure_shape(
            tf.numpy_function(wait, [tf.stop_gradient(x)], tf.float32), x.shape
        )

    def compute_output_shape(self, shape):
        return shape


def main(index, directory, delay=DELAY_S, measured="1"):
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([6]),
                Slow(float(delay) if index == "1" else 0),
                keras.layers.Dense(8),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    x = np.ones([STEPS * BATCH, 6], np.float32)
    batches = tfdist.data.pipeline((x, x[:, :1]), BATCH)
    callbacks = [tfdist.StepBreakdown(directory)] if measured == "1" or index == "0" else []
    try:
        model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    except ValueError as error:
        pathlib.Path(directory, f"error-{index}").write_text(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
