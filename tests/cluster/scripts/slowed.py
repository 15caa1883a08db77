"""Train with a second worker whose data are slow in the first attempt: `slowed.py DIRECTORY`.

Each worker that ends leaves its epochs and steps in DIRECTORY.
"""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

STEPS = 40
EPOCHS = 12
BATCH = 8
DELAY_S = 0.03  # of each batch


def slowly(seconds):
    def wait(x):
        time.sleep(seconds)
        return x

    return lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape), y)


def main(directory):
    root = pathlib.Path(directory)
    task = os.environ["TFDIST_TASK"]
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones([STEPS * BATCH, 6], np.float32)
    batches = tfdist.data.pipeline((x, x[:, :1]), BATCH, seed=3)
    is_slow = task == "worker:1" and os.environ["TFDIST_ATTEMPT"] == "0"
    batches = batches.map(slowly(DELAY_S if is_slow else 0.0))
    backup = tfdist.BackupAndRestore(root / "backup", save_freq=20)
    history = model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=[backup])
    facts = {"epochs": history.epoch, "steps": int(model.optimizer.iterations.numpy())}
    (root / f"{task.replace(':', '-')}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
