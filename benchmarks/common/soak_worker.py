"""Train for ever, with a snapshot every few steps: `soak_worker.py DIRECTORY`.

Each worker keeps its process id in DIRECTORY, for `benchmarks/soak.py`.
"""

import os
import pathlib
import sys

import keras
import numpy as np

import tfdist

BATCH = 32
STEPS = 50  # of an epoch
SAVE_FREQ = 10  # steps
MEMORY_FREQ = 4  # steps
EPOCHS = 10**6


def main(directory: str) -> None:
    """Train until the process is ended."""
    root = pathlib.Path(directory)
    (root / f"{os.environ['TFDIST_TASK'].replace(':', '-')}.pid").write_text(str(os.getpid()))
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([64]),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    random = np.random.default_rng(1)
    x = random.normal(size=[STEPS * BATCH, 64]).astype(np.float32)
    y = random.integers(0, 10, STEPS * BATCH).astype(np.int32)
    model.fit(
        tfdist.data.pipeline((x, y), BATCH, seed=3),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            tfdist.BackupAndRestore(root / "backup", save_freq=SAVE_FREQ, memory_freq=MEMORY_FREQ)
        ],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
