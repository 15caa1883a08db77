"""Measure all-reduces between processes: TensorFlow's, tfdist's own, and gloo's.

    # 4 KB to 200 MB in 2 and 4 processes of a host; writes benchmarks/reports/allreduce.{md,json}.
    python benchmarks/allreduce.py
    # 4 processes, as if on two hosts with 1 Gbit/s; writes benchmarks/reports/allreduce_hosts.*.
    python benchmarks/allreduce.py --hosts
    # Small sizes, writes nothing.
    python benchmarks/allreduce.py --quick

The processes of all contenders are the same; contenders take turns in each round.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import tempfile

from common.allreduce_worker import (
    COPY,
    EACH_WITH_EACH,
    GLOO,
    IN_PLACE,
    RING,
    SHARED,
    SHARED_ON_HOSTS,
    Job,
    contenders,
    serve,
)
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
ON_HOSTS = (4_000, 64_000, 500_000, 2_800_000, 12_000_000, 50_000_000)
SHARE = 0.6  # of the time between all processes, where those of each of two hosts share memory
# The process of --hosts is in a network of its own, whose loopback device is as slow as a network.
IN_NETWORK = "--in-network"
SLOW_NETWORK = (
    "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms && "
    'exec "$@"'
)


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
                        args.hosts,
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
                    names = contenders(args.hosts)
                    for contender in names if number % 2 == 0 else names[::-1]:
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


def wall_times(results: dict, size: int) -> dict[str, list[float]]:
    """Return the rounds' wall times of a size in milliseconds, by contender."""
    return {
        contender: [1e3 * each["wall"] for each in results[contender, size]]
        for contender in contenders(on_hosts=True)
    }


def judge_hosts(results: dict) -> list[dict]:
    """Compare shared memory on two hosts with sockets alone, from 64 KB on."""
    return [
        ratio_verdict(
            f"{size / 1e6:g} MB",
            SHARE,
            ratios_of(wall_times(results, size), SHARED_ON_HOSTS, EACH_WITH_EACH),
        )
        for size in ON_HOSTS[1:]
        if (SHARED_ON_HOSTS, size) in results
    ]


def report_hosts(results: dict, verdicts: list[dict], facts: dict) -> str:
    """Return the report of two hosts as Markdown."""
    sizes = sorted({size for _, size in results})
    lines = heading("All-reduce between two processes on each of two hosts", facts)
    lines += [
        "Sum of one float32 tensor, called through a `tf.function`, into new memory. The four",
        "processes have a thread each and share two cores. Those of a host use memory or UNIX",
        "sockets; all else goes through a loopback device that is limited to 1 Gbit/s in both",
        "directions together. Milliseconds of wall time in the slowest process, median over the",
        "rounds (min..max).",
        "",
        *table("wall ms", *(f"{size / 1e6:g} MB" for size in sizes)),
    ]
    for contender in contenders(on_hosts=True):
        lines += row(
            contender, *(spread(wall_times(results, size)[contender], ".3g") for size in sizes)
        )
    lines += ["", *ratio_rows(verdicts, f"{SHARED_ON_HOSTS}, over {EACH_WITH_EACH}")]
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--processes", (2, 3, 4), default=[2, 4], type=int, help="default: 2 4")
    parser.add_argument(
        "--hosts", action="store_true", help="4 processes, as if on two hosts; needs unshare and tc"
    )
    parser.add_argument(IN_NETWORK, action="store_true", help=argparse.SUPPRESS)
    add_options(parser, ROUNDS, "timed calls, default as many as take 0.4 s")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=3)
    args.sizes = QUICK if args.quick else ON_HOSTS if args.hosts else SIZES
    if args.hosts:
        args.processes = [4]
        if missing := [name for name in ("unshare", "ip", "tc") if not shutil.which(name)]:
            parser.error(f"--hosts: needs the programs {', '.join(missing)}")
    args.cores = cores(parser)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.hosts and not args.in_network:
        command = [sys.executable, __file__, *argv, IN_NETWORK]
        names = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", SLOW_NETWORK, "sh"]
        os.execvp(names[0], [*names, *command])
    shown = [word for word in argv if word != IN_NETWORK]
    facts = begin("allreduce.py", shown, args.rounds, **ONE_THREAD)
    results = {processes: measure(processes, args) for processes in args.processes}
    rows = [
        {"processes": processes, "contender": contender, "bytes": size, "rounds": figures}
        for processes, entry in results.items()
        for (contender, size), figures in entry.items()
    ]
    if args.hosts:
        verdicts = judge_hosts(results[4])
        text = report_hosts(results[4], verdicts, facts)
        return conclude(args, "allreduce_hosts", facts, verdicts, text, results=rows)
    verdicts = judge(results[2]) if 2 in results else []
    text = report(results, verdicts, facts)
    return conclude(args, "allreduce", facts, verdicts, text, results=rows)


if __name__ == "__main__":
    run_main(main)
