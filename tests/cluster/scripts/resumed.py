"""Train a worker with a backup after every second step, and kill it at a step.

The command is `resumed.py DIRECTORY OUT whole|sharded|diloco [EPOCH STEP]`.
"""

import os
import pathlib
import pickle
import signal
import sys

import keras
import numpy as np

import tfdist

EXAMPLES = 100
BATCH = 12  # the last batch has 4 rows
EPOCHS = 3


class Kill(keras.callbacks.Callback):
    def __init__(self, epoch, step):
        super().__init__()
        self.where = (epoch, step)
        self.epoch = None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch + 1) == self.where:
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory, out, how, *where):
    strategy = tfdist.make_strategy(sync=tfdist.sync.DiLoCo(every=4) if how == "diloco" else None)
    from tfdist import data

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 5)).astype(np.float32)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input([5]), keras.layers.Dense(6, "relu"), keras.layers.Dense(1)]
        )
        if how == "sharded":
            tfdist.parallel.fsdp(model)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    batches = data.pipeline((x, x.sum(axis=1, keepdims=True)), BATCH, seed=3)
    early = keras.callbacks.EarlyStopping("loss", patience=9)
    callbacks = [
        tfdist.BackupAndRestore(directory, save_freq=2),
        early,
        *([Kill(*map(int, where))] if where else []),
    ]
    history = model.fit(batches, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    result = {
        "history": history.history,
        "weights": model.get_weights(),
        "iterations": int(model.optimizer.iterations.numpy()),
        "best": early.best,
    }
    pathlib.Path(out).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
