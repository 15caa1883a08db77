"""Measure the optimizer's updates under tfdist, beside Keras' own updates.

    # Writes benchmarks/reports/updates.{md,json}.
    python benchmarks/updates.py
    # A few steps of each, writes nothing.
    python benchmarks/updates.py --quick

Both are measured in one process of one core, and take turns; ratios are taken within a round. The
time of a first step, which traces the step, is that of a new process. All times are CPU times of
the process, which other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
from collections import defaultdict

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
from common.update_workers import NETWORKS, OPTIMIZERS, UPDATES, Job, first_step, serve
from common.workers import ONE_THREAD, Model

ROUNDS = 3
STARTS = 2
MODELS = {
    "mlp": Model("MLP", 0, (128, 128), replica_batch=64, steps=300),
    "cnn": Model("CNN", 32, (128,), replica_batch=64, steps=60),
    "mlp50": Model("MLP of 50 MB", 0, (2304, 2304, 2304), replica_batch=32, steps=10),
}
# Time under tfdist over that of Keras: of Adam's update, and of a step of `fit`.
BARS = {"mlp": (1.0, 1.02), "cnn": (1.0, 1.02), "mlp50": (0.4, 1.0)}
WHAT = {"update": "update alone", "fit": "step of `fit`"}


def measure(model: Model, args: argparse.Namespace) -> dict:
    """Return a model's parameters, and seconds by measure, optimizer and update."""
    seconds: dict = {}
    with tempfile.TemporaryDirectory(prefix="updates-") as directory:
        team = Processes(model.title, pathlib.Path(directory), args.timeout)
        try:
            member = team.start("process", serve, Job(model, args.cores[0]))
            (parameters,) = team.answers([member], "build the model")
            jobs = [("update", title) for title in OPTIMIZERS] + [("fit", "Adam")]
            for what, title in jobs:
                times: dict[str, list] = {name: [] for name in UPDATES}
                for number in range(-1, args.rounds):  # the first one traces
                    for name in UPDATES if number % 2 == 0 else UPDATES[::-1]:
                        steps = (args.steps or model.steps) if number >= 0 else 3
                        team.order([member], what, title, name, steps)
                        (answer,) = team.answers([member], f"run {what} of {title}")
                        if number >= 0:
                            times[name].append(answer)
                seconds.setdefault(what, {})[title] = times
                middle = "  ".join(f"{k} {1e3 * statistics.median(times[k]):.3f}" for k in UPDATES)
                print(f"{model.title}, {what}, {title}, ms: {middle}", file=sys.stderr, flush=True)
        finally:
            team.end()
    return {"parameters": parameters, "seconds": seconds}


def start(network: str, update: str, args: argparse.Namespace) -> float:
    """Return the seconds of a network's first step, in a new process."""
    with tempfile.TemporaryDirectory(prefix="updates-") as directory:
        team = Processes(network, pathlib.Path(directory), args.timeout)
        try:
            job = Job(None, args.cores[0], network, update)
            member = team.start("process", first_step, job)
            (seconds,) = team.answers([member], "run the first step")
        finally:
            team.end()
    print(f"{network}, first step, {update}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return seconds


def judge(results: dict, starts: dict) -> list[dict]:
    """Compare the ratios of times with their bars."""
    found = []
    for model, result in results.items():
        for what, bar in zip(WHAT, BARS[model], strict=True):
            name = f"{MODELS[model].title}, Adam: {WHAT[what]}"
            found.append((name, bar, ratios_of(result["seconds"][what]["Adam"], *UPDATES)))
    for network, times in starts.items():
        found.append((f"{network}: first step", 1.0, ratios_of(times, *UPDATES)))
    return [ratio_verdict(*each) for each in found]


def report(results: dict, starts: dict, verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Updates of optimizers", facts)
    lines += [
        (
            "One process on one core with one thread, strategy `one_device`. Keras' own updates "
            "are those of a subclass that defines `update_step`."
        ),
        (
            "CPU times. An update is measured alone, in a graph loop. Medians over the rounds, "
            "min..max in brackets; ratios are of times within a round."
        ),
    ]
    for name, result in results.items():
        lines += ["", f"## {MODELS[name].title}: {result['parameters']:,} parameters", ""]
        lines += table("", "CPU ms, Keras", "CPU ms, tfdist", "tfdist / Keras")
        for what, of_optimizers in result["seconds"].items():
            for title, times in of_optimizers.items():
                form = ".3f" if statistics.median(times["Keras"]) < 0.1 else ".1f"
                cells = [spread([1e3 * s for s in times[k]], form) for k in reversed(UPDATES)]
                ratios = spread(ratios_of(times, *UPDATES), ".2f")
                lines += row(f"{title}, {WHAT[what]}", *cells, ratios)
    lines += ["", "## First step: tracing the step, and running it once (AdamW)", ""]
    lines += table("", "CPU s, Keras", "CPU s, tfdist", "tfdist / Keras")
    for network, times in starts.items():
        cells = [spread(times[k], ".2f") for k in reversed(UPDATES)]
        lines += row(network, *cells, spread(ratios_of(times, *UPDATES), ".2f"))
    lines += ["", "## Bars", "", *ratio_rows(verdicts, "tfdist / Keras")]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--models", MODELS)
    defaults = ", ".join(f"{model.steps} ({name})" for name, model in MODELS.items())
    add_options(parser, ROUNDS, f"timed updates and steps per round, default: {defaults}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=3)
    args.cores = cores(parser)
    facts = begin("updates.py", argv, args.rounds, **ONE_THREAD)
    results = {name: measure(MODELS[name], args) for name in args.models}
    starts: dict = {network: defaultdict(list) for network in NETWORKS}
    for number in range(1 if args.quick else STARTS):
        for network, times in starts.items():
            for update in UPDATES if number % 2 == 0 else UPDATES[::-1]:
                times[update].append(start(network, update, args))
    verdicts = judge(results, starts)
    text = report(results, starts, verdicts, facts)
    return conclude(args, "updates", facts, verdicts, text, models=results, first_steps=starts)


if __name__ == "__main__":
    run_main(main)
