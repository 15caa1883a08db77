"""Measure all-reduces between processes of one host: TensorFlow's, tfdist's own, and gloo's.

    # 4 KB to 200 MB in 2 and 4 processes; writes benchmarks/reports/allreduce.{md,json}.
    python benchmarks/allreduce.py
    # Small sizes, writes nothing.
    python benchmarks/allreduce.py --quick

The processes of all contenders are the same; contenders take turns in each round.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile

from common.allreduce_worker import (
    COPY,
    GLOO,
    IN_PLACE,
    RING,
    SHARED,
    Job,
    contenders,
    serve,
)
from common.processes import Processes, run_main
from common.report import (
    add_options,
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
from common.workers import ONE_THREAD

from tfdist import ClusterSpec
from tfdist.cluster.addresses import free_ports

ROUNDS = 3
SIZES = (4_000, 64_000, 500_000, 2_800_000, 12_000_000, 50_000_000, 200_000_000)
QUICK = (4_000, 2_800_000)
SECONDS = 0.4  # of a contender's calls with one size, in a round
LARGE = 12_000_000  # bytes from which the CPU time is compared with that of a copy
COPIES = 1.3


def measure(processes: int, args: argparse.Namespace) -> dict:
    """Return the rounds' figures by contender and size: of the slowest process, and mean CPU."""
    results: dict = {}
    with tempfile.TemporaryDirectory(prefix="allreduce-") as directory:
        team = Processes(f"{processes} processes", pathlib.Path(directory), args.timeout)
        try:
            cluster = ClusterSpec.local(processes)
            port = free_ports(1)[0]
            members = [
                team.start(
                    f"worker-{rank}",
                    serve,
                    Job(
                        cluster.for_task("worker", rank),
                        args.cores[rank % len(args.cores)],
                        port,
                        args.timeout,
                    ),
                )
                for rank in range(processes)
            ]
            team.answers(members, "connect")

            def call(contender: str, size: int, times: int) -> dict[str, float]:
                team.order(members, contender, size, times)
                answers = team.answers(members, f"sum {size} bytes by {contender}")
                return {
                    "wall": max(each["wall"] for each in answers),
                    "cpu": statistics.fmean(each["cpu"] for each in answers),
                }

            for number in range(args.rounds):
                for size in args.sizes:
                    order = contenders() if number % 2 == 0 else contenders()[::-1]
                    for contender in order:
                        once = call(contender, size, 2)["wall"]
                        times = args.steps or max(3, min(1000, int(SECONDS / once)))
                        figures = call(contender, size, times)
                        results.setdefault((contender, size), []).append(figures)
                        print(
                            f"{processes} processes, round {number + 1}: {contender}, {size} "
                            f"bytes: {figures}",
                            file=sys.stderr,
                            flush=True,
                        )
        finally:
            team.end()
    return results


def ratio(results: dict, kind: str, contender: str, other: str, size: int) -> float:
    """Return the median over the rounds of a contender's time over that of another."""
    pairs = zip(results[contender, size], results[other, size], strict=True)
    return statistics.median(a[kind] / b[kind] for a, b in pairs)


def judge(results: dict) -> list[dict]:
    """Compare shared memory in 2 processes with its bars."""
    bars = [
        (IN_PLACE, "CPU time over that of a copy", "cpu", COPY, COPIES, LARGE),
        (SHARED, "wall time over that of TensorFlow's ring", "wall", RING, 1.0, 0),
        (SHARED, "CPU time over that of TensorFlow's ring", "cpu", RING, 1.0, 0),
    ]
    if GLOO in contenders():
        bars.append((IN_PLACE, "wall time over that of gloo", "wall", GLOO, 1.0, 0))
        bars.append((IN_PLACE, "CPU time over that of gloo", "cpu", GLOO, 1.0, 0))
    verdicts = []
    for ours, what, kind, other, bar, least in bars:
        for size in sorted({size for _, size in results if size >= least}):
            found = ratio(results, kind, ours, other, size)
            verdicts.append(
                {
                    "name": f"{ours}, {size / 1e6:g} MB: {what}",
                    "bar": bar,
                    "found": found,
                    "passed": found <= bar,
                }
            )
    return verdicts


def report(results: dict[int, dict], verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("All-reduce between processes of one host", facts)
    lines += [
        "Sum of one float32 tensor, called through a `tf.function`, into new memory. Sums in place",
        "replace their input, as those of gradients in a training step do; they and gloo's are",
        "called without TensorFlow. The copy is NumPy's, into memory that it has.",
        "Wall: the median of the calls in the slowest process.",
        "CPU: the mean of a call in a process, with the system's part. Milliseconds, median over",
        "the rounds (min..max). Each process has one thread and one core; four processes share two",
        "cores. TCP goes through the loopback device.",
        "",
    ]
    for processes, figures in results.items():
        sizes = sorted({size for _, size in figures})
        for kind, title in (("wall", "wall ms"), ("cpu", "CPU ms")):
            lines += table(
                f"{processes} processes: {title}", *(f"{size / 1e6:g} MB" for size in sizes)
            )
            for contender in contenders():
                cells = [
                    spread([1e3 * each[kind] for each in figures[contender, size]], ".3g")
                    for size in sizes
                ]
                lines += row(contender, *cells)
            if GLOO not in contenders():
                missing = "skipped, needs the package torch"
                lines += row(GLOO, missing, *["-"] * (len(sizes) - 1))
            lines.append("")
    lines += table("2 processes", "bar", "found", "")
    lines += verdict_rows(verdicts)
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--processes", nargs="+", type=int, choices=(2, 3, 4), default=[2, 4], help="default: 2 4"
    )
    add_options(parser, ROUNDS, "timed calls, default as many as take 0.4 s")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=3)
    args.sizes = QUICK if args.quick else SIZES
    args.cores = cores(parser)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    facts = begin("allreduce.py", argv, args.rounds, **ONE_THREAD)
    results = {processes: measure(processes, args) for processes in args.processes}
    verdicts = judge(results[2]) if 2 in results else []
    rows = [
        {"processes": processes, "contender": contender, "bytes": size, "rounds": figures}
        for processes, entry in results.items()
        for (contender, size), figures in entry.items()
    ]
    text = report(results, verdicts, facts)
    return conclude(args, "allreduce", facts, verdicts, text, results=rows)


if __name__ == "__main__":
    run_main(main)
