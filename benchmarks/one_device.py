"""Measure `fit` on one device under tfdist, beside stock Keras and tf_keras.

    # All models, writes benchmarks/reports/one_device.{md,json}.
    python benchmarks/one_device.py
    # A few steps of each, writes nothing.
    python benchmarks/one_device.py --quick
    # Some models only, writes a report of its own.
    python benchmarks/one_device.py --models mlp --out /tmp/one_device

The processes of all frameworks stay alive while a model is measured, and take turns on one core;
ratios are taken within a round. A first step is measured in new processes, where TensorFlow itself
starts, and again for another model in the same process. Times are CPU times of the process, which
other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import pathlib
import statistics
import sys
import tempfile

from common.one_device_workers import FRAMEWORKS, INPUTS, ON_BATCHES, Job, first_step, serve
from common.processes import Processes, run_main
from common.report import (
    add_options,
    add_parts,
    begin,
    conclude,
    cores,
    fill_options,
    heading,
    ratio_rows,
    ratio_verdict,
    ratios_of,
    row,
    spread,
    table,
)
from common.workers import ONE_THREAD, Model

ROUNDS = 5
STARTS = 3
MODELS = {
    "cnn": Model("CNN", 32, (128,), replica_batch=64, steps=120),
    "mlp": Model("MLP", 0, (128, 128), replica_batch=64, steps=320),
    "mlp50": Model("MLP of 50 MB", 0, (2304, 2304, 2304), replica_batch=32, steps=16),
}
# Time under tfdist over that of another framework: of a step, and of `compile` and a first step.
STEP_BAR = 1.0
FIRST_BAR = 1.1
SINGLE = {
    "callback": "step of `fit` with a callback that reads the logs of each batch",
    "train_on_batch": "`train_on_batch`, whose loss is read",
}
FIRST = {"process": "first step of a process", "model": "first step of another model"}


def measure(model: Model, frameworks: list[str], args: argparse.Namespace) -> dict:
    """Return CPU seconds per step, by kind of steps and framework, a list over the rounds."""
    steps = args.steps or model.steps
    kinds = *INPUTS, *ON_BATCHES
    seconds: dict = {kind: collections.defaultdict(list) for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="one-device-") as directory:
        team = Processes(model.title, pathlib.Path(directory), args.timeout)
        try:
            members = {
                name: team.start(name, serve, Job(name, model, args.cores[0]))
                for name in frameworks
            }
            team.answers(list(members.values()), "build the model")
            for number in range(-1, args.rounds):  # the first one traces
                for kind in kinds:
                    order = list(members.items())
                    for name, member in order if number % 2 else reversed(order):
                        team.order([member], kind, steps if number >= 0 else 2)
                        ((cpu, _),) = team.answers([member], f"run {kind}")
                        if number >= 0:
                            seconds[kind][name].append(cpu)
        finally:
            team.end()
    for kind, times in seconds.items():
        middle = "  ".join(f"{k} {1e3 * statistics.median(v):.2f}" for k, v in times.items())
        print(f"{model.title}, {kind}, ms: {middle}", file=sys.stderr, flush=True)
    return seconds


def start(model: Model, name: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the CPU seconds of the first step in a new process, and of another model's."""
    with tempfile.TemporaryDirectory(prefix="one-device-") as directory:
        team = Processes(name, pathlib.Path(directory), args.timeout)
        try:
            member = team.start(name, first_step, Job(name, model, args.cores[0]))
            (first,) = team.answers([member], "run the first step")
            later = []
            for _ in range(3):
                team.order([member], "tf.data")
                later += team.answers([member], "run another model's first step")
        finally:
            team.end()
    return first, statistics.median(later)


def judge(results: dict, frameworks: list[str]) -> list[dict]:
    """Compare the ratios of times with their bars."""
    verdicts = []
    for model, times_of in results.items():
        for what, times in times_of.items():
            bar = FIRST_BAR if what in FIRST else STEP_BAR
            for other in frameworks[1:]:
                ratios = ratios_of(times, "tfdist", other)
                name = f"{MODELS[model].title}, {FIRST.get(what, what)}: tfdist / {other}"
                verdicts.append(ratio_verdict(name, bar, ratios))
    return verdicts


def report(results: dict, verdicts: list[dict], frameworks: list[str], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("`fit` on one device", facts)
    lines += [
        (
            "One process on one core with one thread, Adam, metric accuracy. tfdist trains under "
            "the strategy `one_device`, the others without a strategy."
        ),
        (
            "CPU times: medians over the rounds, min..max in brackets. A first step is `compile` "
            "and `fit` of one batch."
        ),
    ]
    if missing := [name for name in FRAMEWORKS if name not in frameworks]:
        lines += [f"Not measured, as not installed: {', '.join(missing)}."]
    for model, times_of in results.items():
        lines += ["", f"## {MODELS[model].title}", ""]
        lines += table("CPU ms", *frameworks)
        for what, times in times_of.items():
            label = {**FIRST, **SINGLE}.get(what, f"step, input from {what}")
            cells = [spread([1e3 * s for s in times[name]], ".2f") for name in frameworks]
            lines += row(label, *cells)
    lines += ["", "## Bars", "", *ratio_rows(verdicts, "ratio of CPU times")]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--models", MODELS, default=None)
    defaults = ", ".join(f"{model.steps} ({name})" for name, model in MODELS.items())
    add_options(parser, ROUNDS, f"timed steps per input and round, default: {defaults}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=3)
    args.cores = cores(parser)
    facts = begin("one_device.py", argv, args.rounds, **ONE_THREAD)
    frameworks = [
        name for name in FRAMEWORKS if name != "tf_keras" or importlib.util.find_spec("tf_keras")
    ]
    results: dict = {}
    for key in args.models or MODELS:
        model = MODELS[key]
        results[key] = measure(model, frameworks, args)
        starts: dict = {what: collections.defaultdict(list) for what in FIRST}
        for number in range(1 if args.quick else STARTS):
            for name in frameworks if number % 2 == 0 else frameworks[::-1]:
                times = start(model, name, args)
                for what, seconds in zip(FIRST, times, strict=True):
                    starts[what][name].append(seconds)
        results[key].update(starts)
    verdicts = judge(results, frameworks)
    text = report(results, verdicts, frameworks, facts)
    return conclude(args, "one_device", facts, verdicts, text, models=results)


if __name__ == "__main__":
    run_main(main)
