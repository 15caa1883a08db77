"""Measure the ImageNet recipe on a synthetic tree, beside a plain Keras loop.

    # Writes benchmarks/reports/imagenet.{md,json}.
    python benchmarks/imagenet.py
    # One round of two epochs, writes nothing.
    python benchmarks/imagenet.py --quick

All train a narrow ResNet-34 on the images of examples/synthetic_imagenet.py, one after the other,
in processes of their own. The plain loop is Keras with a tf.data input as one writes it by hand.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import runpy
import sys
import tempfile
from collections.abc import Sequence

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

from tfdist.telemetry import step_records

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROUNDS = 3
EPOCHS = 6
SIZE = 64
FILTERS = 8
BATCH = 40
RATE = 0.05
IMAGES = {"train": 60, "validation": 10}  # of a class
KERAS = "Keras, by hand"
LAUNCH = "launch", "--workers", "2", "--show", "none", "--log-dir"
SETUPS: dict[str, Sequence[str]] = {  # further words of the config
    "one device": (),
    "mirrored, 2 devices": ("--config.strategy.devices=cpu:0,cpu:1",),
    "FSDP, 2 devices": ("--config.strategy.devices=cpu:0,cpu:1", "--config.parallel.zero=3"),
    "2 workers": (),
}
WRONG = 0.05  # bar on the share of the 200 validation images
# Bars on the time of an image over that of the plain loop, which writes no logs.
TIME = {"one device": 1.1}


def train(name: str, tree: pathlib.Path, epochs: int, timeout: float) -> dict[str, float]:
    """Return accuracy, images/s, and the share of the time that steps wait for images."""
    with tempfile.TemporaryDirectory(prefix="imagenet-run-") as text:
        directory = pathlib.Path(text)
        if name == KERAS:
            result = directory / "result.json"
            script = ROOT / "benchmarks" / "common" / "imagenet_keras.py"
            numbers = map(str, (SIZE, FILTERS, BATCH, epochs, RATE))
            run_python([str(script), str(tree), *numbers, str(result)], timeout, name)
            return json.loads(result.read_text())
        options = {
            "data.data_dir": tree,
            "data.image_size": SIZE,
            "data.global_batch": BATCH,
            "model.options.filters": FILTERS,
            "train.epochs": epochs,
            "train.schedule": "cosine",
            "train.schedule_options": "{}",
            "train.learning_rate": RATE,
            "telemetry.step_breakdown": "true",
            "telemetry.images": 0,
            "output.dir": directory / "run",
        }
        flags = [f"--config.{key}={value}" for key, value in options.items()]
        command = ["train", "--config=imagenet_resnet34", *flags, *SETUPS[name]]
        if name == "2 workers":
            command = [*LAUNCH, str(directory / "logs"), "--", "tfdist", *command]
        run_python(["-m", "tfdist", *command], timeout, name)
        summary = json.loads((directory / "run" / "summary.json").read_text())
        windows = [
            window
            for each in step_records.read(directory / "run").values()
            for window in each
            if window.steady
        ]
        waits = sum(window.parts["input"] for window in windows)
        return {
            "accuracy": summary["metrics"]["accuracy"],
            "rate": summary["examples_per_second"],
            "input": waits / sum(window.seconds for window in windows),
        }


def judge(results: dict[str, dict[str, list[float]]]) -> list[dict]:
    """Compare times and accuracies with their bars."""
    seconds = times(results)
    return [
        *(
            ratio_verdict(f"{name}: time / plain loop", bar, ratios_of(seconds, name, KERAS))
            for name, bar in TIME.items()
        ),
        *(
            ratio_verdict(
                f"{name}: wrong images", WRONG, [1 - each for each in results[name]["accuracy"]]
            )
            for name in SETUPS
        ),
    ]


def report(results: dict[str, dict[str, list[float]]], verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    count = 20 * IMAGES["train"]
    lines = heading("The ImageNet recipe on synthetic images", facts)
    lines += [
        (
            f"ResNet-34 with {FILTERS} filters in its first stage (64 in the paper), images of "
            f"{SIZE} x {SIZE} from {count:,} JPEGs of ImageNet's sizes in 20 classes, {BATCH} "
            "images a step, all replicas together; random crops and flips, SGD with momentum, "
            f"cosine schedule from {RATE}. Devices are logical CPUs, and all share the cores."
        ),
        (
            "Medians over the rounds, min..max in brackets. Images/s are those of the median epoch "
            "without the first. Input is the share of the time of steps that they wait for images."
        ),
        "",
        *table("", "images/s", "beside the plain loop", "accuracy", "input"),
    ]
    seconds = times(results)
    for name, result in results.items():
        ratios = [1 / ratio for ratio in ratios_of(seconds, name, KERAS)]
        lines += row(
            name,
            spread(result["rate"], ".0f"),
            spread(ratios, ".2f"),
            spread(result["accuracy"], ".3f"),
            spread(result["input"], ".2f") if "input" in result else "",
        )
    lines += ["", "## Bars", "", *ratio_rows(verdicts, "")]
    return "\n".join(lines) + "\n"


def times(results: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the seconds of an image in each round."""
    return {name: [1 / rate for rate in result["rate"]] for name, result in results.items()}


def write_tree(tree: pathlib.Path) -> None:
    """Write the images in directories for each class, which the plain loop reads."""
    module = runpy.run_path(str(ROOT / "examples" / "synthetic_imagenet.py"))
    module["write"](tree, **IMAGES, folders=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, ROUNDS, f"epochs of each training, default: {EPOCHS}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=2)
    facts = begin("imagenet.py", argv, args.rounds)
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="imagenet-") as directory:
        tree = pathlib.Path(directory)
        write_tree(tree)
        for _ in range(args.rounds):
            for name in (KERAS, *SETUPS):
                figures = train(name, tree, args.steps or EPOCHS, args.timeout)
                print(f"{name}: {figures}", file=sys.stderr, flush=True)
                for key, value in figures.items():
                    results.setdefault(name, {}).setdefault(key, []).append(value)
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "imagenet", facts, verdicts, text, results=results)


if __name__ == "__main__":
    run_main(main)
