"""Train on disks that are full, read-only or missing: `disks.py PLACE OUT`.

PLACE is an empty directory to mount a small disk at.

It runs in a mount namespace of its own. What each training came to goes to OUT as JSON.
"""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np

import tfdist
from tfdist.backup.store import Store

EPOCHS = 6
STEPS = 2
DISK = 2 << 20


def train(directory, callback=None):
    """Train, and return the error or the history, and how many steps were run."""
    keras.utils.set_random_seed(1)
    strategy = tfdist.make_strategy("one_device", devices="cpu")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input([100]), keras.layers.Dense(200), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.001), "mse")
    x = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
    data = tfdist.data.pipeline((x, x[:, :1]), 4, seed=3)
    result = {"error": None, "history": None}
    try:
        result["history"] = model.fit(
            data,
            epochs=EPOCHS,
            callbacks=[callback or tfdist.BackupAndRestore(directory, delete_checkpoint=False)],
            verbose=0,
        ).history
    except Exception as error:
        result["error"] = [type(error).__name__, str(error)]
    return {
        **result,
        "iterations": int(model.optimizer.iterations.numpy()),
        "files": sorted(os.listdir(directory)) if os.path.isdir(directory) else None,
    }


def mount(*words):
    subprocess.run(["mount", *words], check=True, capture_output=True)


def main(mount_point, out):
    mount_point = pathlib.Path(mount_point)
    results = {}
    results["elsewhere"] = train(f"{mount_point}-elsewhere")
    mount("-t", "tmpfs", "-o", f"size={DISK}", "none", str(mount_point))
    directory = mount_point / "backup"
    filler = mount_point / "filler"
    size = max(file.stat().st_size for file in pathlib.Path(f"{mount_point}-elsewhere").iterdir())
    filler.write_bytes(
        bytes(DISK - size * 5 // 2)
    )  # with two snapshots that are kept, a third finds no room
    results["full"] = train(directory)
    numbers = Store(directory).numbers()
    facts = [Store.read(Store(directory).path(number)).facts for number in numbers]
    results["kept"] = [[number, fact["epoch"]] for number, fact in zip(numbers, facts, strict=True)]
    with open(filler, "ab", buffering=0) as file:  # to the last byte
        for size in (4096, 1):
            while True:
                try:
                    if file.write(bytes(size)) < size:
                        break
                except OSError:
                    break
    results["no byte left"] = train(directory)
    mount("-o", "remount,ro", str(mount_point))
    results["read-only"] = train(directory)
    results["read-only, new"] = train(mount_point / "new")
    for name in (".", "new"):
        callback = tfdist.TensorBoard(mount_point, name)
        results[f"read-only, TensorBoard {name}"] = train(mount_point / name, callback)
    mount("-o", "remount,rw", str(mount_point))
    filler.unlink()
    results["room again"] = train(directory)
    (mount_point / "file").write_text("a file")
    results["a file"] = train(mount_point / "file")
    results["below a file"] = train(mount_point / "file" / "backup")
    results["no such place"] = train("/proc/nowhere/backup")
    pathlib.Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
