"""Train a small CNN as a task of any engine, with steps of a tenth of a second, and note the times.

python benchmarks/common/engines_worker.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import uuid

STEPS = 24  # of an epoch
EPOCHS = 100  # far more than the benchmark waits for
SAVE_FREQ = 10  # steps
STEP_S = 0.1  # so that a fault is between two steps
EVENTS = "events.jsonl"


def main(directory: str) -> None:
    """Train, and write a line for the start of this process and for each step."""
    about = {
        "task": os.environ["TFDIST_TASK"],
        "process": uuid.uuid4().hex,  # other ids are used again
        "pid": os.getpid(),
        "namespace": os.stat("/proc/self/ns/pid").st_ino,  # a pod has process ids of its own
    }

    def note(event: str, **facts: int) -> None:
        line = json.dumps({**about, "event": event, "time": time.time(), **facts}) + "\n"
        with (pathlib.Path(directory) / EVENTS).open("a") as file:
            file.write(line)

    note("started")
    import keras
    import numpy as np

    import tfdist

    strategy = tfdist.make_strategy("auto")
    rng = np.random.default_rng(0)
    images = rng.normal(size=(64 * STEPS, 8, 8, 1)).astype(np.float32)
    labels = rng.integers(0, 10, len(images))
    with strategy.scope():
        model = tfdist.models.build("cnn", input_shape=(8, 8, 1), classes=10)
        model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            note("step", step=int(self.model.optimizer.iterations))
            time.sleep(STEP_S)

    backup = tfdist.BackupAndRestore(os.path.join(directory, "backup"), SAVE_FREQ)
    batches = tfdist.data.pipeline((images, labels), 64, seed=1)
    model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=[backup, Notes()])


if __name__ == "__main__":
    main(*sys.argv[1:])
