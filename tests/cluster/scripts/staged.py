"""Train on the stages of a cluster, and on the chief alone, and write both results.

The command is `staged.py RESULT [EPOCHS [SNAPSHOTS]]`.

With a directory for snapshots the first attempt kills a worker in its third epoch.
"""

import json
import os
import pathlib
import signal
import sys

import tfdist

pathlib.Path(f"{os.environ['TFDIST_TASK']}.pid").write_text(str(os.getpid()))

devices = tfdist.pipeline_devices(timeout=15, start_timeout=60)

import keras  # noqa: E402
import numpy as np  # noqa: E402


def build():
    keras.utils.set_random_seed(5)
    inputs = keras.Input((8,))
    first = keras.layers.Dense(8, activation="relu")(inputs)
    x = first
    for _ in range(2):
        x = keras.layers.Dense(8, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Add()([x, first])))


class Kill(keras.callbacks.Callback):
    """Kill a worker in the third epoch, when the snapshot of its second step is surely written."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch, os.environ["TFDIST_ATTEMPT"]) == (2, 4, "0"):
            os.kill(int(pathlib.Path("worker:1.pid").read_text()), signal.SIGKILL)


def trained(model, epochs, *callbacks):
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    say = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: print(f"{model.name} epoch {epoch + 1}", flush=True)
    )
    history = model.fit(
        tfdist.data.pipeline((X, Y), 4, seed=1),
        epochs=epochs,
        verbose=0,
        callbacks=[say, *callbacks],
    ).history
    return {
        **history,
        "evaluated": model.evaluate(X, Y, verbose=0),
        "predicted": model.predict(X[:5], verbose=0).tolist(),
    }


rows = np.random.RandomState(0)
X = rows.randn(24, 8).astype("float32")
Y = rows.randn(24, 2).astype("float32")
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 2
staged = tfdist.parallel.pipeline(
    build(), 2, microbatches=2, data=len(devices) // 2, devices=devices
)
results = trained(
    staged,
    epochs,
    *([tfdist.BackupAndRestore(sys.argv[3], save_freq=2), Kill()] if len(sys.argv) > 3 else []),
)
staged.save_weights(f"{sys.argv[1]}.weights.h5")
places = sorted({v.value.device for v in [*staged.variables, *staged.optimizer.variables[2:]]})
alone = build()
expected = trained(alone, epochs)
other = build()
other.load_weights(f"{sys.argv[1]}.weights.h5")
weights = max(
    float(np.abs(a.numpy() - b.numpy()).max())
    for a, b in zip(alone.weights, other.weights, strict=True)
)
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump({"staged": results, "alone": expected, "places": places, "weights": weights}, file)
