"""Measure a large embedding table under two workers: time, memory and bytes of a step.

    # 10 M rows; writes benchmarks/reports/embedding.{md,json}; needs about 12 GB of memory.
    python benchmarks/embedding.py
    # A small table, writes nothing.
    python benchmarks/embedding.py --quick

Contenders take turns in each round. Bytes are those of the loopback device while nothing else
sends, with collectives that use no shared memory; times are with those that tfdist chooses.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile

from common.embedding_worker import IDS, WIDTH, Job, serve
from common.processes import Processes, run_main
from common.report import (
    add_options,
    begin,
    conclude,
    cores,
    fill_options,
    heading,
    ratios_of,
    row,
    spread,
    table,
    verdict_rows,
)
from common.workers import ONE_THREAD

from tfdist import ClusterSpec

ROUNDS = 3
STEPS = 5
WORKERS = 2
BATCH = 500
MIB = 1 << 20
WHOLE = "Embedding"
GATHERED = "Embedding, FSDP"
SHARDED = "ShardedEmbedding, FSDP"
WAYS = (WHOLE, GATHERED, SHARDED)
MEMORY = 0.6  # bar: bytes in a step over those with whole tables; 1/2 and the rows under way
TIME = 0.5  # bar: time of a step over that of FSDP with Keras' layer, which gathers the table
SAME = 1e-4  # bar: relative difference of the losses


def measure(way: str, communication: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of the process that needs most, and the bytes that one sends."""
    with tempfile.TemporaryDirectory(prefix="embedding-") as directory:
        team = Processes(f"{way}, {communication}", pathlib.Path(directory), args.timeout)
        try:
            cluster = ClusterSpec.local(WORKERS)
            members = [
                team.start(
                    f"worker-{rank}",
                    serve,
                    Job(
                        way,
                        args.rows,
                        BATCH,
                        communication,
                        cluster.for_task("worker", rank),
                        args.cores[rank % len(args.cores)],
                        args.timeout,
                    ),
                )
                for rank in range(WORKERS)
            ]
            weights = team.answers(members, "build the model")[0]
            team.order(members, args.steps)
            figures = team.answers(members, f"train {args.steps} steps")
        finally:
            team.end()
    most = {key: max(each[key] for each in figures) for key in figures[0]}
    return {**most, "weights": weights, "sent": most["sent"] / WORKERS}


def judge(results: dict[str, dict[str, list[float]]]) -> list[dict]:
    """Compare memory, time and losses with their bars."""
    whole, sharded = results[WHOLE], results[SHARDED]
    seconds = {way: each["seconds"] for way, each in results.items()}
    found = {
        ("MiB in a step / those of Embedding", MEMORY): max(sharded["peak"]) / max(whole["peak"]),
        ("time / that of Embedding, FSDP", TIME): statistics.median(
            ratios_of(seconds, SHARDED, GATHERED)
        ),
        ("difference of the loss to Embedding", SAME): max(
            abs(a / b - 1) for a in sharded["loss"] for b in whole["loss"]
        ),
    }
    return [
        {"name": name, "bar": bar, "found": value, "passed": value <= bar}
        for (name, bar), value in found.items()
    ]


def report(
    results: dict[str, dict[str, list[float]]], verdicts: list[dict], facts: dict, rows: int
) -> str:
    """Return the report as Markdown."""
    lines = heading("A large embedding table under two workers", facts)
    lines += [
        (
            f"A table of {rows:,} x {WIDTH} float32, {rows * WIDTH * 4 / MIB:,.0f} MiB, with "
            f"Adagrad; {BATCH} examples a step of both workers, each with {IDS} random ids, which "
            f"touch {min(1.0, BATCH * IDS / rows):.2%} of the rows. Each worker has one core. "
            "`Embedding` is that of Keras; without FSDP each worker holds the whole table."
        ),
        (
            "Medians over the rounds, min..max in brackets; MiB of tensors in a worker, the most. "
            "Sent: what a worker sends through the network, measured with `ring`."
        ),
        "",
        *table("", "s/step", "MiB resident", "MiB in a step", "MiB sent a step"),
    ]
    for way, each in results.items():
        lines += row(
            way,
            spread(each["seconds"], ".3f"),
            f"{max(each['resident']) / MIB:,.0f}",
            f"{max(each['peak']) / MIB:,.0f}",
            f"{each['sent'][0] / MIB:,.2f}",
        )
    lines += ["", "## Bars", "", *table("", "bar", "found", ""), *verdict_rows(verdicts)]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, help="rows of the table, default: 10 million")
    add_options(parser, ROUNDS, f"timed steps, default {STEPS}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=2)
    args.steps = args.steps or STEPS
    args.rows = args.rows or (20_000 if args.quick else 10_000_000)
    args.cores = cores(parser)
    facts = begin("embedding.py", argv, args.rounds, **ONE_THREAD)
    results: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for number in range(args.rounds + 1):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            figures = measure(way, "auto" if number else "ring", args)
            print(f"{way}, round {number}: {figures}", file=sys.stderr, flush=True)
            for key, value in figures.items():
                if (key == "sent") == (number == 0):
                    results[way].setdefault(key, []).append(value)
    verdicts = judge(results)
    text = report(results, verdicts, facts, args.rows)
    return conclude(args, "embedding", facts, verdicts, text, results=results)


if __name__ == "__main__":
    run_main(main)
