"""Train in a worker that tests disturb: `chaotic.py DIRECTORY [SAVE_FREQ [STRATEGY]]`.

Each worker that ends leaves its result in DIRECTORY.

With CHAOTIC_MEMORY a snapshot goes to memory after that many steps.
With CHAOTIC_PACE each step takes that many seconds more until there is a file DIRECTORY/hurry, and
nothing depends on the number of replicas, as Dropout does.
"""

import os
import pathlib
import pickle
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

EXAMPLES = 100
BATCH = 12  # the last batch of each epoch has 4 rows
EPOCHS = 4
STEPS = -(-EXAMPLES // BATCH)


class Seen(keras.metrics.Metric):
    """Return the sum of squares of the examples' numbers, which only the right set gives."""

    def __init__(self):
        super().__init__(name="seen", dtype="float64")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total", dtype="float64")

    def update_state(self, y, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y[:, 1], tf.float64) ** 2))

    def result(self):
        return tf.convert_to_tensor(self.total)  # the variable itself would change later


class Pace(keras.callbacks.Callback):
    """Slow training down until the file `hurry` exists."""

    def __init__(self, seconds, hurry):
        super().__init__()
        self.seconds = seconds
        self.hurry = hurry

    def on_train_batch_begin(self, batch, logs=None):
        if not self.hurry.exists():
            time.sleep(self.seconds)


def loss(y, y_pred):
    return tf.square(y[:, :1] - y_pred)


def main(directory, save_freq="3", name="auto"):
    root = pathlib.Path(directory)
    pace = float(os.environ.get("CHAOTIC_PACE", "0"))
    if name == "mirrored":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
    strategy = tfdist.make_strategy(
        "auto" if name in ("fsdp", "zero") else name,
        **({"devices": ["CPU:0", "CPU:1"]} if name == "mirrored" else {}),
    )
    from tfdist import data

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 5)).astype(np.float32)
    y = np.stack([x.sum(axis=1), np.arange(1, EXAMPLES + 1)], 1).astype(np.float32)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([5]),
                keras.layers.Dense(6, "relu"),
                keras.layers.Dropout(0.0 if pace else 0.1, seed=4),
                keras.layers.Dense(1),
            ]
        )
        if name == "fsdp":
            tfdist.parallel.fsdp(model)
        optimizer = keras.optimizers.Adam(0.01)
        if name == "zero":
            optimizer = tfdist.parallel.zero(optimizer)
        model.compile(optimizer, loss, metrics=[Seen()])
    callbacks = [
        tfdist.BackupAndRestore(
            root / "backup",
            save_freq=int(save_freq) if save_freq.isdecimal() else save_freq,
            memory_freq=int(os.environ.get("CHAOTIC_MEMORY", "0")) or None,
        ),
        keras.callbacks.EarlyStopping("val_loss", patience=9),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
        keras.callbacks.CSVLogger(root / "log.csv"),
        tfdist.TensorBoard(root / "logs", write_graph=False),
    ]
    if pace:
        callbacks.append(Pace(pace, root / "hurry"))
    train = data.pipeline((x, y), BATCH, seed=3)
    test = data.pipeline((x[:30], y[:30]), BATCH)
    history = model.fit(train, epochs=EPOCHS, validation_data=test, callbacks=callbacks, verbose=0)
    result = {
        "history": history.history,
        "epochs": history.epoch,
        "weights": model.get_weights(),
        "iterations": int(model.optimizer.iterations.numpy()),
    }
    (root / f"{os.environ['TFDIST_TASK'].replace(':', '-')}.pickle").write_bytes(
        pickle.dumps(result)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
