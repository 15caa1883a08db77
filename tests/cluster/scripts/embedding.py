"""Train an embedding on parameter servers, and report where it lies and what it sends.

The command is `embedding.py OUT [LAYER [OPTIMIZER]]`.

LAYER is "sharded" (the default) or "keras", OPTIMIZER "sgd" (the default), "adam" or "adagrad". The
chief writes the report, JSON, to OUT:

    shards              shapes of the table's weights, in order
    devices             the task of each, such as "ps:0"
    table_bytes         size of the table
    bytes_per_step      what passed the loopback interface in a step, of all processes in this
                        network namespace
    seconds_per_step    time of a step
    losses              mean loss of each epoch
    iterations          the optimizer's count of steps, of STEPS * EPOCHS
    untouched           whether all rows that occur in no batch are as they were
    trained             share of the other rows that changed
    saved_shape         shape of the table in a weights file
    saved_equal         whether a model with keras.layers.Embedding, in this process alone, reads
                        that file and predicts the same
    lazy_losses         mean loss of each epoch of more training, with LazyAdam
    lazy_untouched      whether these rows are still as they were
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

ROWS = 200_000
WIDTH = 16
LENGTH = 10
BATCH = 32
STEPS = 60
EPOCHS = 3
RATES = {"sgd": 1.0, "adam": 0.01, "adagrad": 0.1}


def data():
    """Return examples; half of an example's ids are drawn from few, so that batches repeat them.

    The label follows from the first.
    """
    rng = np.random.default_rng(0)
    shape = (BATCH * STEPS, LENGTH)
    ids = np.where(
        rng.random(shape) < 0.5, rng.integers(0, ROWS, shape), rng.integers(0, 50, shape)
    )
    return ids.astype("int32"), (ids[:, :1] % 2).astype("float32")


def build(layer):
    inputs = keras.Input((LENGTH,), dtype="int32")
    return keras.Model(
        inputs, keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(layer(inputs)))
    )


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface of this network namespace has received."""
    lines = pathlib.Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (received,) = (
        line.split(":")[1].split()[0] for line in lines if line.strip().startswith("lo:")
    )
    return int(received)


def task(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.job}:{spec.task}"


class Traffic(keras.callbacks.Callback):
    """Measure traffic in all epochs but the first, in which graphs are made and sent."""

    def __init__(self):
        super().__init__()
        self.start = (0, 0.0)
        self.end = (0, 0.0)

    def on_epoch_end(self, epoch, logs=None):
        self.end = loopback_bytes(), time.monotonic()
        if epoch == 0:
            self.start = self.end

    def per_step(self):
        """Return bytes and seconds."""
        return [
            (end - start) / (STEPS * (EPOCHS - 1))
            for start, end in zip(self.start, self.end, strict=True)
        ]


def main(out: str, kind: str = "sharded", optimizer: str = "sgd") -> None:
    strategy = tfdist.make_strategy("parameter_server")
    x, y = data()
    keras.utils.set_random_seed(1)
    embedding = tfdist.layers.ShardedEmbedding if kind == "sharded" else keras.layers.Embedding
    with strategy.scope():
        layer = embedding(ROWS, WIDTH)
        model = build(layer)
        model.compile(optimizer, "binary_crossentropy")
        model.optimizer.learning_rate = RATES[optimizer]

    file = pathlib.Path(out).with_suffix(".weights.h5")
    alone = build(keras.layers.Embedding(ROWS, WIDTH))  # outside of the scope: in this process

    def saved():
        """Return the table after saving it to a file and loading it."""
        model.save_weights(file)
        alone.load_weights(file)
        return alone.layers[1].get_weights()[0]

    before = saved()
    traffic = Traffic()
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[traffic])
    after = saved()
    changed = (before != after).any(1)
    used = np.isin(np.arange(ROWS), x)
    sent, seconds = traffic.per_step()
    report = {
        "shards": [list(part.shape) for part in layer.weights],
        "devices": [task(part.value.device) for part in layer.weights],
        "table_bytes": before.nbytes,
        "bytes_per_step": round(sent),
        "seconds_per_step": seconds,
        "losses": history.history["loss"],
        "iterations": int(model.optimizer.iterations.numpy()),
        "untouched": not bool(changed[~used].any()),
        "trained": float(changed[used].mean()),
        "saved_shape": list(after.shape),
        "saved_equal": bool(
            np.allclose(
                alone.predict(x[:64], verbose=0), model.predict(x[:64], verbose=0), atol=1e-6
            )
        ),
    }
    with strategy.scope():
        model.compile(tfdist.optimizers.LazyAdam(0.01), "binary_crossentropy")
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    report["lazy_losses"] = history.history["loss"]
    report["lazy_untouched"] = not bool((before != saved()).any(1)[~used].any())
    pathlib.Path(out).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
