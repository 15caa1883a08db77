"""Measure how much memory of a process grows with each training, and with each epoch.

    # Writes benchmarks/reports/memory_growth.{md,json}.
    python benchmarks/memory_growth.py
    # Few trainings, writes nothing.
    python benchmarks/memory_growth.py --quick

Each way runs in a process of its own: first one long training, then many short ones, each with a
new strategy and a new model. The first third of either is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import sys
import tempfile

from common.processes import run_main, run_python
from common.report import (
    add_options,
    begin,
    conclude,
    fill_options,
    heading,
    ratio_rows,
    ratio_verdict,
    ratios_of,
    row,
    spread,
    table,
)

ROUNDS = 1
TRAININGS = 30  # a third is not counted
EPOCHS_EACH = 6  # epochs of the long training for each short one
STOCK = "tf.distribute.MirroredStrategy"
WAYS = (
    "Keras, without a strategy",
    STOCK,
    "tfdist one_device",
    "tfdist mirrored",
    "tfdist mirrored, BackupAndRestore(save_freq=10), TensorBoard",
)
# Bars on the growth over that of TensorFlow's own strategy.
BARS = {"tfdist one_device": 1.0, "tfdist mirrored": 1.0, WAYS[-1]: 1.0}


def resident() -> float:
    """Return the resident memory of this process in bytes."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def measure(way: str, trainings: int) -> None:
    """Train in this process, and print the bytes that 100 epochs and one training add."""
    import keras
    import numpy as np
    import tensorflow as tf

    x = np.random.default_rng(0).random((24 * 64, 64), dtype="float32")
    y = (9 * x[:, :1]).astype("int32")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = ["CPU:0", "CPU:1"]

    def make_strategy():
        if way == STOCK:
            return tf.distribute.MirroredStrategy(devices)
        if not way.startswith("tfdist"):
            return tf.distribute.get_strategy()
        import tfdist

        if "one_device" in way:
            return tfdist.make_strategy("one_device", devices=devices[:1])
        return tfdist.make_strategy("mirrored", devices=devices)

    def make_model():
        layers = [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return model

    def train(rows: int, epochs: int, *callbacks: keras.callbacks.Callback) -> None:
        with make_strategy().scope():
            model = make_model()
        own = list(callbacks)
        with tempfile.TemporaryDirectory(prefix="memory-growth-") as directory:
            if "BackupAndRestore" in way:
                import tfdist

                own.append(tfdist.BackupAndRestore(f"{directory}/backup", save_freq=10))
                own.append(tfdist.TensorBoard(f"{directory}/logs"))
            model.fit(x[:rows], y[:rows], 64, epochs, verbose=0, callbacks=own)

    class Readings(keras.callbacks.Callback):
        """The resident memory at the end of some epochs."""

        def __init__(self, epochs: int):
            super().__init__()
            self.at = {epochs // 3: 0.0, epochs: 0.0}

        def on_epoch_end(self, epoch, logs=None):
            if epoch + 1 in self.at:
                self.at[epoch + 1] = resident()

    epochs = EPOCHS_EACH * trainings
    readings = Readings(epochs)
    train(len(x), epochs, readings)
    (first, before), (last, after) = readings.at.items()
    of_epochs = 100 * (after - before) / (last - first)
    for number in range(trainings):
        if number == trainings // 3:
            before = resident()
        train(4 * 64, 1)
    of_training = (resident() - before) / (trainings - trainings // 3)
    print(json.dumps({"100 epochs": of_epochs, "training": of_training}))


def report(grown: dict[str, dict[str, list[float]]], verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Growth of memory in a process that trains", facts)
    lines += [
        (
            "An MLP with BatchNormalization and Dropout on two logical CPUs. Growth of the "
            "resident memory in MB: for 100 epochs of 24 steps in one `fit`, and for each further "
            "strategy, model and `fit` in one process."
        ),
        "",
        *table("", "100 epochs", "a strategy, a model and a fit"),
    ]
    for way in WAYS:
        lines += row(
            way,
            *(spread([value / 1e6 for value in grown[kind][way]], ",.2f") for kind in grown),
        )
    lines += ["", "## Bars", "", *ratio_rows(verdicts, f"growth / {STOCK}")]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, ROUNDS, f"number of trainings, default: {TRAININGS}")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=3)
    trainings = args.steps or TRAININGS
    if args.way:
        measure(args.way, trainings)
        return 0
    facts = begin("memory_growth.py", argv, args.rounds, TF_CPP_MIN_LOG_LEVEL="3")
    grown: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.rounds):
        for way in WAYS:
            words = [__file__, "--way", way, "--steps", str(trainings)]
            printed = run_python(words, args.timeout, way).splitlines()[-1]
            for kind, bytes_ in json.loads(printed).items():
                grown.setdefault(kind, {}).setdefault(way, []).append(bytes_)
            print(f"{way}: {printed}", file=sys.stderr, flush=True)
    verdicts = [
        ratio_verdict(f"{name}, {kind}", bar, ratios_of(grown[kind], name, STOCK))
        for name, bar in BARS.items()
        for kind in grown
    ]
    return conclude(
        args, "memory_growth", facts, verdicts, report(grown, verdicts, facts), grown=grown
    )


if __name__ == "__main__":
    run_main(main)
