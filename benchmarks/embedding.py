"""Measure a large embedding table under two and four workers: time, memory and bytes of a step.

    # 10 M rows; writes benchmarks/reports/embedding.{md,json}; needs about 16 GB of memory.
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
BATCH = 250  # examples of each worker
MIB = 1 << 20
WHOLE = "Embedding read whole, Adagrad"
ROWS = "Embedding, Adagrad"
GATHERED = "Embedding read whole, FSDP, Adagrad"
LOOKED_UP = "Embedding, FSDP, Adagrad"
SHARDED = "ShardedEmbedding, FSDP, Adagrad"
WHOLE_ADAM = "Embedding read whole, Adam"
LAZY = "ShardedEmbedding, FSDP, LazyAdam"
WAYS = {
    2: (WHOLE, ROWS, GATHERED, LOOKED_UP, SHARDED, WHOLE_ADAM, LAZY),
    4: (WHOLE, ROWS, SHARDED, LAZY),
}
RESIDENT = 1.15  # bar: memory between steps over 1/N of that with whole tables
SPEED = 0.2  # bar: time of a step over that with whole tables
GATHERING = 0.5  # bar: time of a step over that of FSDP with Keras' layer, which gathers the table
READING = 0.5  # bar: time of a step that reads rows over that of one that reads the table
SAME = 1e-4  # bar: relative difference of the losses
Results = dict[tuple[int, str], dict[str, list[float]]]  # by number of workers, and way


def measure(
    workers: int, way: str, communication: str, args: argparse.Namespace
) -> dict[str, float]:
    """Return the figures of the process that needs most, and the bytes that one sends."""
    with tempfile.TemporaryDirectory(prefix="embedding-") as directory:
        team = Processes(f"{way}, {communication}", pathlib.Path(directory), args.timeout)
        try:
            cluster = ClusterSpec.local(workers)
            members = [
                team.start(
                    f"worker-{rank}",
                    serve,
                    Job(
                        way,
                        args.rows,
                        BATCH * workers,
                        communication,
                        cluster.for_task("worker", rank),
                        args.cores[rank % len(args.cores)],
                        args.timeout,
                    ),
                )
                for rank in range(workers)
            ]
            weights = team.answers(members, "build the model")[0]
            team.order(members, args.steps)
            figures = team.answers(members, f"train {args.steps} steps")
        finally:
            team.end()
    most = {key: max(each[key] for each in figures) for key in figures[0]}
    return {**most, "weights": weights, "sent": most["sent"] / workers}


def judge(results: Results) -> list[dict]:
    """Compare memory, time and losses with their bars."""
    found: dict[tuple[str, float], float] = {}
    for workers in WAYS:
        whole, sharded = results[workers, WHOLE], results[workers, SHARDED]
        for name, key in (("memory of the process", "resident"), ("tensors between steps", "held")):
            found[f"{workers} workers: {name} / 1/{workers} of {WHOLE}", RESIDENT] = (
                workers * max(sharded[key]) / max(whole[key])
            )
        found[f"{workers} workers: difference of the loss to {WHOLE}", SAME] = max(
            abs(a / b - 1) for a in sharded["loss"] for b in whole["loss"]
        )
    for workers, way, other, bar in (
        (2, SHARDED, WHOLE, SPEED),
        (4, SHARDED, WHOLE, SPEED),
        (2, LAZY, WHOLE_ADAM, SPEED),
        (2, ROWS, WHOLE, READING),
        (2, SHARDED, GATHERED, GATHERING),
        (2, LOOKED_UP, GATHERED, GATHERING),
    ):
        seconds = {way: results[workers, way]["seconds"] for way in WAYS[workers]}
        found[f"{workers} workers: time of {way} / {other}", bar] = statistics.median(
            ratios_of(seconds, way, other)
        )
    return [
        {"name": name, "bar": bar, "found": value, "passed": value <= bar}
        for (name, bar), value in found.items()
    ]


def report(results: Results, verdicts: list[dict], facts: dict, rows: int) -> str:
    """Return the report as Markdown."""
    lines = heading("A large embedding table under two and four workers", facts)
    lines += [
        (
            f"A table of {rows:,} x {WIDTH} float32, {rows * WIDTH * 4 / MIB:,.0f} MiB; {BATCH} "
            f"examples a step of each worker, each with {IDS} random ids: those of two workers "
            f"touch {min(1.0, 2 * BATCH * IDS / rows):.2%} of the rows. Two workers have one core "
            "each, four share two. `Embedding` is that of Keras, of which tfdist reads only rows; "
            "`read whole` is what Keras does by itself: it reads the table, and takes rows of "
            "that. Without FSDP each worker holds the whole table. LazyAdam does not move the rows "
            "that a batch does not use, so its losses differ from Adam's."
        ),
        (
            "Medians over the rounds, min..max in brackets. Memory is the most of all workers: "
            "what the process holds, without what it held before the model was made, and tensors "
            "between steps and in a step, as TensorFlow's allocator counts them. Sent: what a "
            "worker sends through the network, measured with `ring`."
        ),
        "",
        *table("", "workers", "s/step", "MiB held", "tensors", "in a step", "MiB sent a step"),
    ]
    for (workers, way), each in results.items():
        lines += row(
            way,
            str(workers),
            spread(each["seconds"], ".3f"),
            f"{max(each['resident']) / MIB:,.0f}",
            f"{max(each['held']) / MIB:,.0f}",
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
    contenders = [(workers, way) for workers, ways in WAYS.items() for way in ways]
    results: Results = {each: {} for each in contenders}
    for number in range(args.rounds + 1):
        for workers, way in contenders if number % 2 == 0 else contenders[::-1]:
            figures = measure(workers, way, "auto" if number else "ring", args)
            print(
                f"{way}, {workers} workers, round {number}: {figures}", file=sys.stderr, flush=True
            )
            for key, value in figures.items():
                if (key == "sent") == (number == 0):
                    results[workers, way].setdefault(key, []).append(value)
    verdicts = judge(results)
    text = report(results, verdicts, facts, args.rows)
    named = {f"{workers} workers, {way}": each for (workers, way), each in results.items()}
    return conclude(args, "embedding", facts, verdicts, text, results=named)


if __name__ == "__main__":
    run_main(main)
