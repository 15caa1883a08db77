"""Run a script, unchanged, and write the losses and metrics of each epoch to a file.

The command is `python -m tests.ecosystem.guide_runner WAY OUT SCRIPT`, in each process of the way.
What Keras' own scripts would download is made up: pictures of ten classes, as many as the
originals. They are so easy to tell apart that rounding does not decide how a training goes on.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import pickle
import runpy
import sys

os.environ.setdefault("MPLBACKEND", "agg")

import keras
import numpy as np

ROWS = {"train": 60_000, "test": 10_000}
EPOCHS: list[dict[str, float]] = []


def pictures(*shape):
    """Return `load_data` of a data set of Keras, with rows of this shape."""

    def load_data():
        rng = np.random.default_rng(0)
        classes = rng.integers(0, 200, (10, *shape))
        sets = []
        for rows in ROWS.values():
            labels = rng.integers(0, 10, rows)
            sets.append((classes[labels] + rng.integers(0, 50, (rows, *shape)), labels))
        return tuple((x.astype("uint8"), y.astype("uint8")) for x, y in sets)

    return load_data


def note_epochs() -> None:
    """Note the logs of each epoch, in all fits of a script."""
    of_keras = keras.callbacks.History.on_epoch_end

    def on_epoch_end(self, epoch, logs=None):
        of_keras(self, epoch, logs)
        EPOCHS.append({name: float(np.mean(value)) for name, value in (logs or {}).items()})

    keras.callbacks.History.on_epoch_end = on_epoch_end


def main(way: str, out: str, script: str) -> None:
    if way == "plain":
        assert "tfdist" not in sys.modules
    else:
        import tfdist

        tfdist.init(**{"name": "mirrored", "devices": 2} if way == "mirrored" else {"timeout": 60})
    keras.datasets.mnist.load_data = pictures(28, 28)
    keras.datasets.cifar10.load_data = pictures(32, 32, 3)
    keras.applications.VGG19 = functools.partial(keras.applications.VGG19, weights=None)
    keras.utils.plot_model = lambda *args, **kwargs: None  # draws with Graphviz
    note_epochs()
    keras.utils.set_random_seed(1)
    if importlib.util.find_spec("torch"):  # its DataLoader shuffles; workers need the same order
        importlib.import_module("torch").manual_seed(1)
    directory = pathlib.Path(out).parent / way  # workers share their files
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    pathlib.Path(out).write_bytes(pickle.dumps(EPOCHS))


if __name__ == "__main__":
    main(*sys.argv[1:])
