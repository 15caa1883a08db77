"""Measure how long saves stop training: in memory and on the disk, by size and interval.

    # All parts, writes benchmarks/reports/snapshots.{md,json}.
    python benchmarks/snapshots.py
    # One short fit of each kind, writes nothing.
    python benchmarks/snapshots.py --quick
    # Some models only, writes a report of its own.
    python benchmarks/snapshots.py --sizes 0 3 --out /tmp/snapshots

Processes stay alive, and short fits of all kinds take turns, each second turn in reverse order.
Ratios are taken between fits of one turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
    cores,
    fill_options,
    heading,
    row,
    spread,
    table,
    verdict_rows,
)
from common.snapshots_worker import Cost, Job, serve

from tfdist import ClusterSpec
from tfdist.launch.snapshot_server import SnapshotServer

ROUNDS = 6
EPOCHS = 5
STEPS = 20  # of an epoch of a large model; that of the CNN has 24
INTERVAL = 10
# Model's snapshot in MB, 0 for the CNN; workers; kinds of saves with their intervals.
SETUPS = (
    (0, 1, (("pause", 10), ("disk", 10), ("memory", 10), ("both", 10), ("memory", 2))),
    (0, 2, (("pause", 10), ("disk", 10), ("memory", 10), ("copied", 10), ("both", 10))),
    (3, 1, (("pause", 10), ("disk", 10), ("memory", 10))),
    (50, 1, (("pause", 10), ("disk", 10), ("memory", 10))),
    (50, 2, (("pause", 10), ("disk", 10), ("memory", 10), ("copied", 10))),
    (500, 1, (("pause", 10), ("disk", 10), ("memory", 10))),
    (2000, 1, (("pause", 10), ("disk", 10), ("memory", 10))),
)
LARGE = 1000  # MB: from this size on, each kind is measured in one epoch
TITLES = {
    "none": "no saves",
    "pause": "pauses every {}, without a save",
    "disk": "on the disk every {}",
    "memory": "in memory every {}",
    "copied": "in memory every {}, and copied to a second host",
    "both": "in memory every {}, on the disk every 10th of these",
}
SECRET = b"of the benchmark"
COST = 0.02  # share of a step's time in which training stands still
DISK_COST = 0.01  # of it for the saves on the disk beside those in memory
THROUGHPUT_COST = 0.05  # share of the steps in a second; pauses of the calls are in it
Kind = tuple[str, int]
Costs = dict[Kind, list[Cost]]


def measure(megabytes: int, workers: int, kinds: list[Kind], args: argparse.Namespace) -> Costs:
    """Return the costs of the slowest worker in each fit, by kind of saves."""
    costs: Costs = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="snap-")))
        server = stack.enter_context(contextlib.closing(SnapshotServer()))
        hosts = [
            stack.enter_context(contextlib.closing(SnapshotServer("127.0.0.1", SECRET)))
            for _ in range(workers)
        ]
        peers = [(f"{i}", f"127.0.0.1:{host.port}") for i, host in enumerate(hosts)]
        for i, host in enumerate(hosts):
            host.meet(peers, i, 0)
        team = Processes(f"{workers} workers", directory, args.timeout)
        stack.callback(team.end)
        cluster = ClusterSpec.local(workers)
        jobs = [
            Job(
                cluster.for_task("worker", rank),
                args.cores[rank::workers],
                server.name,
                hosts[rank].name,
                str(directory),
                megabytes,
                STEPS,
                args.timeout,
            )
            for rank in range(workers)
        ]
        processes = [team.start(f"worker-{rank}", serve, job) for rank, job in enumerate(jobs)]
        team.answers(processes, "build the model")

        def fit(kind: Kind, epochs: int) -> Cost:
            team.order(processes, *kind, epochs)
            each = team.answers(processes, f"train with saves {kind}")
            return max(each, key=lambda cost: cost.stall)

        large = megabytes >= LARGE
        for kind in kinds[:1] if large else kinds:  # traces
            fit(kind, 1)
        for number in range(1 if large else args.rounds):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                costs[kind].append(fit(kind, args.steps or (1 if large else EPOCHS)))
            print(f"{megabytes} MB, {workers} workers: round {number + 1}", file=sys.stderr)
    return costs


def shares(costs: Costs, kind: Kind, attribute: str) -> list[float]:
    """Return what saves cost as shares of the time, or CPU time, of fits without saves."""
    base = costs["none", INTERVAL]
    if attribute in ("stall", "blocking"):
        return [getattr(b, attribute) / a.seconds for a, b in zip(base, costs[kind], strict=True)]
    return [
        getattr(b, attribute) / getattr(a, attribute) - 1
        for a, b in zip(base, costs[kind], strict=True)
    ]


def report(results: dict[tuple[int, int], Costs], verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Cost of snapshots in memory and on the disk", facts)
    lines += [
        "The stall is the time in which training waits for a save, as `tfdist goodput` counts it.",
        "CPU of the main thread is the part of it that no other process can cause. Both are shares",
        "of the wall time without saves. A pause ends a call of several steps, as each save does.",
        "Medians, min..max.",
        "",
    ]
    lines += table("bar", "bar", "found", "")
    lines += verdict_rows(verdicts)
    for (megabytes, workers), costs in results.items():
        name = f"{megabytes} MB" if megabytes else "CNN of configs/digits.py, 0.64 MB"
        lines += ["", f"## {name}, {workers} worker{'s' * (workers > 1)}", ""]
        lines += table(
            "saves",
            "ms per step",
            "throughput lost",
            "stall per save, ms",
            "stall",
            "CPU of the main thread",
            "more CPU of all threads",
        )
        steps = STEPS if megabytes else 24
        for kind, each in costs.items():
            saves = steps / kind[1]
            cells = (
                [
                    spread([x / (1 + x) for x in shares(costs, kind, "seconds")], ".1%"),
                    spread([1e3 * cost.stall / saves for cost in each], ".2f"),
                    *(
                        spread(shares(costs, kind, name), ".1%")
                        for name in ("stall", "blocking", "cpu")
                    ),
                ]
                if kind[0] != "none"
                else [""] * 5
            )
            lines += row(
                TITLES[kind[0]].format(kind[1]),
                spread([1e3 * cost.seconds / steps for cost in each], ".2f"),
                *cells,
            )
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Run the benchmark, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--sizes", None, default=None, type=int, help="of SETUPS, in MB; default all")
    add_options(parser, ROUNDS, f"epochs of each fit, default {EPOCHS}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=1)
    args.cores = cores(parser)
    facts = begin("snapshots.py", argv, args.rounds)
    results = {
        (megabytes, workers): measure(megabytes, workers, [("none", INTERVAL), *kinds], args)
        for megabytes, workers, kinds in SETUPS
        if args.sizes is None or megabytes in args.sizes
    }
    verdicts = []
    for (megabytes, workers), costs in results.items():
        if megabytes:
            continue
        both, memory = (shares(costs, (kind, INTERVAL), "stall") for kind in ("both", "memory"))
        slower = shares(costs, ("memory", INTERVAL), "seconds")
        more = [a - b for a, b in zip(both, memory, strict=True)]
        every = TITLES["memory"].format(INTERVAL)
        for name, bar, found in (
            (f"stall, {every}", COST, memory),
            (f"stall, {TITLES['both'].format(INTERVAL)}", COST, both),
            ("stall, of these on the disk", DISK_COST, more),
            (f"throughput lost, {every}", THROUGHPUT_COST, [x / (1 + x) for x in slower]),
        ):
            verdicts.append(
                {
                    "name": f"{name}, {workers} workers",
                    "bar": bar,
                    "found": statistics.median(found),
                    "passed": statistics.median(found) <= bar,
                }
            )
    figures = {
        f"{megabytes} MB, {workers} workers": {
            f"{name} {interval}": list(map(dataclasses.asdict, each))
            for (name, interval), each in costs.items()
        }
        for (megabytes, workers), costs in results.items()
    }
    text = report(results, verdicts, facts)
    return conclude(args, "snapshots", facts, verdicts, text, **{"costs_by_epoch": figures})


if __name__ == "__main__":
    run_main(main)
