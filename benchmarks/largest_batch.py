"""Measure epochs an hour at the largest batch that fits a memory, for each way to spread a model.

    # Writes benchmarks/reports/largest_batch.{md,json}.
    python benchmarks/largest_batch.py
    # One round, writes nothing.
    python benchmarks/largest_batch.py --quick

`tfdist plan --find-batch` says the batches, and `tfdist train` trains at each, one way after the
other in a round. Two devices are logical CPUs of one process, which share the cores.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
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

TFDIST = ("-m", "tfdist")
ROUNDS = 3
EPOCHS = 5
MEMORY = "208MB"  # little more than data parallel needs for its smallest batch
WAYS = ("data parallel", "ZeRO-2", "FSDP (ZeRO-3)")
MODEL = (
    "--config=digits",
    "--config.data.tail=drop",
    "--config.model.name=mlp",
    "--config.model.options={}",
    "--config.model.options.widths=(2048,2048,2048)",
)
# Bars on the time of an epoch over that of data parallel.
BARS = dict.fromkeys(WAYS[1:], 1.0)


def find_batches(timeout: float) -> dict[str, dict]:
    """Return what `tfdist plan --find-batch` says of each way."""
    words = (
        *TFDIST,
        "plan",
        *MODEL,
        "--devices",
        "2",
        "--memory",
        MEMORY,
        "--find-batch",
        "--json",
    )
    ways = json.loads(run_python(words, timeout, "tfdist plan"))["ways"]
    return {way["name"]: way for way in ways if way["name"] in WAYS}


def epoch_seconds(way: dict, epochs: int, timeout: float) -> float:
    """Train at the largest batch of a way, and return the seconds of the median epoch."""
    with tempfile.TemporaryDirectory(prefix="largest-batch-") as directory:
        settings = {
            "strategy.devices": "cpu:0,cpu:1",
            "data.global_batch": way["global_batch"],
            "train.learning_rate": way["learning_rate"],
            "train.epochs": epochs,
            "output.dir": f"{directory}/run",
            "output.save_model": "false",
        }
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        if way["how"].startswith("parallel."):
            flags.append(f"--config.{way['how']}")
        run_python([*TFDIST, "train", *MODEL, *flags], timeout, f"tfdist train, {way['name']}")
        lines = pathlib.Path(directory, "run", "history.jsonl").read_text().splitlines()
        return statistics.median(json.loads(line)["seconds"] for line in lines[1:])


def report(
    ways: dict[str, dict], seconds: dict[str, list[float]], verdicts: list[dict], facts: dict
) -> str:
    """Return the report as Markdown."""
    lines = heading("Epochs an hour at the largest batch", facts)
    lines += [
        (
            "An MLP of three layers of 2048 on 1,500 digits, with Adam, on two logical CPUs, each "
            f"with {MEMORY} by the prediction of `tfdist plan --find-batch`, which says the "
            "batches; none is larger than the data set. Medians over the rounds, min..max in "
            "brackets, of the median epoch without the first."
        ),
        "",
        *table("", "largest global batch", "epochs an hour", "time / data parallel"),
    ]
    for name, values in seconds.items():
        lines += row(
            name,
            str(ways[name]["global_batch"]),
            spread([3600 / each for each in values], ",.0f"),
            spread(ratios_of(seconds, name, WAYS[0]), ".2f"),
        )
    lines += ["", "## Bars", "", *ratio_rows(verdicts, "time of an epoch / data parallel")]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, ROUNDS, f"epochs of each training, default: {EPOCHS}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=2)
    facts = begin("largest_batch.py", argv, args.rounds)
    ways = find_batches(args.timeout)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(args.rounds):
        for name in WAYS if number % 2 == 0 else WAYS[::-1]:
            seconds[name].append(epoch_seconds(ways[name], args.steps or EPOCHS, args.timeout))
            print(f"{name}: {seconds[name][-1]:.3f} s", file=sys.stderr, flush=True)
    verdicts = [
        ratio_verdict(name, bar, ratios_of(seconds, name, WAYS[0])) for name, bar in BARS.items()
    ]
    text = report(ways, seconds, verdicts, facts)
    batches = {name: way["global_batch"] for name, way in ways.items()}
    return conclude(args, "largest_batch", facts, verdicts, text, batches=batches, seconds=seconds)


if __name__ == "__main__":
    run_main(main)
