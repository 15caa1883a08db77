"""End a fit in the middle, as if its process had been killed."""

import keras


class Stop(Exception):
    """Raised to end the fit."""


class Interrupts(keras.callbacks.Callback):
    """End a fit after so many of its steps."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise Stop
