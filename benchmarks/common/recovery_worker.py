"""Train the CNN of configs/digits.py in a worker.

The worker notes when it has come how far.

tfdist launch --workers 2 -- \\
    benchmarks/common/recovery_worker.py DIRECTORY SAVE_FREQ EPOCHS STANDBYS [MODEL]
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

from tfdist.runtime.launch_protocol import Launched, Phase, note, progress, read_journal

WAIT_S = 120
LARGE_BATCH = 4
CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "digits.py"


def main(
    directory: str, save_freq: str, epochs: str, standbys: str, model_name: str = "cnn"
) -> None:
    """Train as a task of a launch, with a line in its journal at each stage."""
    launched = Launched.from_environ()

    def reached(stage: str) -> None:
        note(launched.log_dir, stage, task=launched.task, attempt=launched.attempt)

    reached("started")
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    reached("imported")
    import tfdist
    from tfdist.cluster import preflight

    check = preflight.check

    def check_and_note(*args, **kwargs) -> None:
        check(*args, **kwargs)
        reached("preflight")

    preflight.check = check_and_note
    strategy = tfdist.make_strategy("auto")
    reached("joined")
    model, batches = _built(strategy) if model_name == "cnn" else _large(strategy, model_name)
    reached("built")
    backup = tfdist.BackupAndRestore(os.path.join(directory, "backup"), int(save_freq))
    model.fit(
        batches,
        epochs=int(epochs),
        verbose=0,
        callbacks=[backup, _waiting(launched.log_dir, int(standbys))],
    )


def _large(strategy, name: str):
    """Return ResNet-50 or a transformer of 12 layers, and 24 small batches."""
    import keras
    import numpy as np

    from tfdist import data

    rng = np.random.default_rng(0)
    rows = 24 * LARGE_BATCH
    labels = rng.integers(0, 10, rows)
    with strategy.scope():
        if name == "resnet50":
            rows_x = rng.normal(size=(rows, 32, 32, 3)).astype(np.float32)
            model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
        else:
            rows_x = rng.integers(0, 1000, (rows, 32))
            tokens = keras.Input([32], dtype="int32")
            x = keras.layers.Embedding(1000, 128)(tokens)
            for _ in range(12):
                y = keras.layers.LayerNormalization()(x)
                x = x + keras.layers.MultiHeadAttention(4, 32)(y, y)
                y = keras.layers.Dense(512, "gelu")(keras.layers.LayerNormalization()(x))
                x = x + keras.layers.Dense(128)(y)
            x = keras.layers.GlobalAveragePooling1D()(x)
            model = keras.Model(tokens, keras.layers.Dense(10, "softmax")(x))
        model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    return model, data.pipeline((rows_x, labels), LARGE_BATCH, seed=1)


def _waiting(log_dir: str, standbys: int):
    """Return a callback that holds training after its first step until standby processes are ready.

    A failure mostly comes hours after the start. Here faults follow each other within a second.
    """
    import keras

    def ready() -> int:
        lines = [line for line in read_journal(log_dir) if line["event"] == "standby"]
        gone = {line["pid"] for line in lines if line["what"] in ("taken", "lost", "refused")}
        return len({line["pid"] for line in lines if line["what"] == "ready"} - gone)

    def stepping() -> bool:
        launched = Launched.from_environ()
        this_task = (launched.attempt, launched.task)
        lines = [line for line in read_journal(log_dir) if line["event"] == "stepping"]
        return any((line["attempt"], line["task"]) == this_task for line in lines)

    class Waiting(keras.callbacks.Callback):
        waited = not standbys

        def on_train_batch_begin(self, batch, logs=None):
            if self.waited or not stepping():  # the first step is timed
                return
            self.waited = True
            end = time.monotonic() + WAIT_S
            while ready() < standbys:
                assert time.monotonic() < end, f"no {standbys} standby processes after {WAIT_S} s"
                progress().beat(Phase.RUNNING, 0, batch)  # not hung
                time.sleep(0.1)

    return Waiting()


def _built(strategy):
    """Return the model and the data pipeline that the config file describes."""
    import keras

    from tfdist import models
    from tfdist.run import input_pipeline, train_command

    settings = train_command.parse([f"--config={CONFIG}"])
    keras.utils.set_random_seed(settings.train.seed)
    batches = input_pipeline.pipeline(settings, "train")
    shape, classes = input_pipeline.shapes(batches)
    with strategy.scope():
        model = models.build(
            settings.model.name,
            **{"input_shape": shape, "classes": classes, **settings.model.options},
        )
        model.compile(
            keras.optimizers.Adam(settings.train.learning_rate),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    return model, batches


if __name__ == "__main__":
    main(*sys.argv[1:])
