"""Measure training compiled by XLA (`jit_compile=True`) on one and two replicas.

    # Writes benchmarks/reports/xla.{md,json}.
    python benchmarks/xla.py
    # A few steps of each, writes nothing.
    python benchmarks/xla.py --quick

A process trains each network with and without XLA, which take turns; ratios are taken within a
round. Two replicas are logical CPUs of one process. Bars are on wall times: run it on a machine
that does nothing else.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile

from common.processes import Processes, run_main
from common.report import (
    add_options,
    add_parts,
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
from common.xla_worker import NETWORKS, Job, serve

ROUNDS = 7
STEPS = 200  # so that what each `fit` takes once counts little
FIRST = 3  # steps that compile
REPLICAS = 1, 2
REPLICA_BATCH = 64
# Wall time of a step with XLA over that without, of the networks that XLA makes faster.
BARS = {"transformer": 0.77, "CNN, average pooling": 0.77}


def measure(network: str, replicas: int, args: argparse.Namespace) -> dict:
    """Return parameters, differences, and CPU and wall seconds with and without XLA."""
    name = f"{network}, {replicas} replicas"
    seconds: dict = {what: {"xla": [], "off": []} for what in ("first", "cpu", "wall")}
    with tempfile.TemporaryDirectory(prefix="xla-") as directory:
        team = Processes(name, pathlib.Path(directory), args.timeout)
        try:
            member = team.start("process", serve, Job(network, replicas, REPLICA_BATCH))
            (parameters,) = team.answers([member], "build the model")
            for number in range(-1, args.rounds):  # the first one compiles
                if number == 0:
                    team.order([member], "differences")
                    ((of_losses, of_weights),) = team.answers([member], "compare")
                for xla in (False, True) if number % 2 else (True, False):
                    steps = FIRST if number < 0 else args.steps or STEPS
                    team.order([member], xla, steps)
                    ((cpu, wall),) = team.answers([member], "train")
                    key = "xla" if xla else "off"
                    if number < 0:
                        seconds["first"][key].append(FIRST * cpu)
                    else:
                        seconds["cpu"][key].append(cpu)
                        seconds["wall"][key].append(wall)
        finally:
            team.end()
    middle = {k: f"{1e3 * statistics.median(v):.2f}" for k, v in seconds["cpu"].items()}
    print(f"{name}, CPU ms: {middle}", file=sys.stderr, flush=True)
    return {
        "parameters": parameters,
        "seconds": seconds,
        "losses": of_losses,
        "weights": of_weights,
    }


def judge(results: dict[str, dict[int, dict]]) -> list[dict]:
    """Compare the ratios of wall times with their bars."""
    verdicts = []
    for network, bar in BARS.items():
        for replicas, result in results.get(network, {}).items():
            ratios = ratios_of(result["seconds"]["wall"], "xla", "off")
            verdicts.append(ratio_verdict(f"{network}, replicas: {replicas}", bar, ratios))
    return verdicts


def report(results: dict[str, dict[int, dict]], verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("XLA with replicas", facts)
    lines += [
        (
            f"`jit_compile=True` beside `False`, Adam, metric accuracy, {REPLICA_BATCH} examples "
            "for each replica and step. One replica: `one_device`; two: `mirrored` with two "
            "logical CPUs, which share the cores. TensorFlow chooses the number of threads."
        ),
        (
            "Medians over the rounds, min..max in brackets; ratios are of times within a round. "
            f"The first steps are the `fit` of {FIRST} steps that traces and compiles. "
            "Differences are those after these steps."
        ),
    ]
    for network, by_replicas in results.items():
        parameters = next(iter(by_replicas.values()))["parameters"]
        lines += ["", f"## {network}: {parameters:,} parameters", ""]
        lines += table("", "without XLA", "with XLA", "with / without")
        for replicas, result in by_replicas.items():
            seconds = result["seconds"]
            for key, what in (("cpu", "CPU ms of a step"), ("wall", "wall ms of a step")):
                times = seconds[key]
                cells = [spread([1e3 * s for s in times[k]], ".2f") for k in ("off", "xla")]
                label = f"{what}, replicas: {replicas}"
                lines += row(label, *cells, spread(ratios_of(times, "xla", "off"), ".2f"))
            first = seconds["first"]
            cells = [f"{first[k][0]:.2f}" for k in ("off", "xla")]
            ratio = f"{first['xla'][0] / first['off'][0]:.1f}"
            lines += row(f"CPU s of the first steps, replicas: {replicas}", *cells, ratio)
        for replicas, result in by_replicas.items():
            lines += [
                "",
                (
                    f"Largest difference after the first steps, replicas: {replicas}: of the loss "
                    f"{result['losses']:.1e}, of a weight {result['weights']:.1e}."
                ),
            ]
    lines += ["", "## Bars", "", *ratio_rows(verdicts, "with / without XLA, wall time")]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--networks", NETWORKS)
    add_options(parser, ROUNDS, f"timed steps per round, default: {STEPS}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=3)
    facts = begin("xla.py", argv, args.rounds)
    results = {
        network: {replicas: measure(network, replicas, args) for replicas in REPLICAS}
        for network in args.networks
    }
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "xla", facts, verdicts, text, networks=results)


if __name__ == "__main__":
    run_main(main)
