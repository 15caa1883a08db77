"""Measure the bubble of pipeline-parallel schedules, beside theory's, and their peak memory.

    # Writes benchmarks/reports/pipeline_parallel.{md,json}.
    python benchmarks/pipeline_parallel.py
    # A few steps of each, writes nothing.
    python benchmarks/pipeline_parallel.py --quick

The bubble needs as many devices as stages, all equally fast. Where there are fewer cores than
stages, stages that compute would show the machine's cores instead of the schedule: so each stage
sleeps in its forward pass, and twice as long in its backward pass. What is measured beyond theory
is what TensorFlow's executor and tfdist add. Memory is that of real layers: bytes of tensors, as
TensorFlow's allocator counts them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys

from common.processes import run_main, run_python
from common.report import (
    add_options,
    begin,
    conclude,
    fill_options,
    heading,
    row,
    spread,
    table,
    verdict,
)

from tfdist.parallel.pipeline_parallel.schedule import bubble, duration, tasks

WORKER = pathlib.Path(__file__).parent / "common" / "pipeline_parallel_worker.py"
STAGES = 4
MICROBATCHES = (8, 16)
FORWARD_S = 0.02  # seconds of sleep; backward is twice that
SCHEDULES = ("gpipe", "1f1b")
ROUNDS = 3
STEPS = 5
OF_GPIPE = 0.45  # the most of GPipe's peak memory that 1F1B may take
MEMORY = {
    "GPipe": ("gpipe", False),
    "1F1B": ("1f1b", False),
    "GPipe, recompute": ("gpipe", True),
    "1F1B, recompute": ("1f1b", True),
}


def measure(timeout: float, **order: object) -> list[float]:
    """Return the figures that a process of its own measures."""
    what = ", ".join(map(str, order.values()))
    printed = run_python([str(WORKER), json.dumps(order)], timeout, what)
    return json.loads(printed.splitlines()[-1])


def theory(schedule: str, microbatches: int) -> float:
    """Return the seconds of a step in which nothing but sleep takes time."""
    return duration(tasks(STAGES, microbatches, schedule), FORWARD_S, 2 * FORWARD_S)


def waiting(microbatches: int, seconds: float) -> float:
    """Return the part of a step in which a stage did not sleep."""
    return 1 - microbatches * 3 * FORWARD_S / seconds


def most(microbatches: int) -> float:
    """Return the bar for a bubble: that of a step with one more forward and backward pass."""
    return STAGES / (microbatches + STAGES)


def run(args: argparse.Namespace) -> dict[str, dict]:
    """Return seconds of steps by schedule and micro-batch count, and peak bytes by schedule.

    Rounds take turns.
    """
    seconds: dict[str, list[float]] = {
        f"{kind} {m}": [] for m in MICROBATCHES for kind in SCHEDULES
    }
    peaks: dict[str, list[float]] = {name: [] for name in MEMORY}
    for number in range(args.rounds):
        for key in seconds:
            kind, m = key.split()
            order = {
                "schedule": kind,
                "stages": STAGES,
                "microbatches": int(m),
                "seconds": FORWARD_S,
                "steps": args.steps,
            }
            seconds[key].append(statistics.median(measure(args.timeout, kind="sleep", **order)))
            print(
                f"round {number + 1} of {args.rounds}: {key}: {seconds[key][-1]:.3f} s",
                file=sys.stderr,
                flush=True,
            )
        for name, (kind, recompute) in MEMORY.items():
            order = {
                "schedule": kind,
                "stages": STAGES,
                "microbatches": MICROBATCHES[-1],
                "recompute": recompute,
                "steps": args.steps,
            }
            peaks[name].append(max(measure(args.timeout, kind="memory", **order)))
            print(
                f"round {number + 1} of {args.rounds}: {name}: {peaks[name][-1] / 2**20:.1f} MiB",
                file=sys.stderr,
                flush=True,
            )
    return {"seconds": seconds, "peaks": peaks}


def judge(results: dict[str, dict]) -> list[dict]:
    """Compare the medians of the rounds with the bars."""
    bubbles = []
    for key, values in results["seconds"].items():
        m = int(key.split()[1])
        part = waiting(m, statistics.median(values))
        bubbles.append(
            {
                "name": f"bubble {key}",
                "theory": bubble(STAGES, m),
                "bar": most(m),
                "found": part,
                "passed": part <= most(m),
            }
        )
    ratio = statistics.median(results["peaks"]["1F1B"]) / statistics.median(
        results["peaks"]["GPipe"]
    )
    return [
        *bubbles,
        {"name": "memory", "bar": OF_GPIPE, "found": ratio, "passed": ratio <= OF_GPIPE},
    ]


def report(results: dict[str, dict], verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    by_name = {each["name"]: each for each in verdicts}
    lines = heading("Pipeline stages: bubble and memory", facts)
    lines += [
        (
            f"{STAGES} stages, each a device of its own that sleeps {1e3 * FORWARD_S:g} ms in a "
            f"forward and {2e3 * FORWARD_S:g} ms in a backward pass: they stand"
        ),
        (
            "for equally fast devices, which this machine has too few cores for. In theory a step "
            "is M + S - 1 turns, each a forward and a backward pass, and in"
        ),
        (
            "S - 1 of them a stage waits: that is the bubble. Measured, it is the part of a step "
            "in which a stage did not sleep. Bar: S of M + S turns, as of a"
        ),
        (
            "step that is one turn longer: beginning all passes must take less than a turn, and a "
            "schedule that loses one misses the bar. Medians of the rounds"
        ),
        "(min..max).",
        "",
    ]
    lines += table("", "step, s", "theory, s", "bubble, %", "theory, %", "bar, %", "")
    for key, values in results["seconds"].items():
        kind, m = key.split()
        gaps = spread([100 * waiting(int(m), value) for value in values], ".1f")
        judged = by_name[f"bubble {key}"]
        cells = [
            spread(values, ".3f"),
            f"{theory(kind, int(m)):.3f}",
            gaps,
            f"{100 * judged['theory']:.1f}",
            f"{100 * judged['bar']:.1f}",
        ]
        lines += row(f"{kind}, {m} micro-batches", *cells, verdict(judged["passed"], True))
    lines += [
        "",
        (
            "Bytes of all tensors of a step: weights, batch, activations and gradients of "
            f"{STAGES} stages on one device, {MICROBATCHES[-1]} micro-batches of 256 rows,"
        ),
        (
            "16 Dense layers of 256 units with ReLU, SGD; the most of the steps of each round. "
            "Stage s, from 0, holds activations of S - s micro-batches with 1F1B,"
        ),
        (
            "and of M with GPipe: 10 parts of 64. With weights, gradients and batch, which both "
            "hold, that is 0.3 of GPipe's peak; the bar leaves half as much"
        ),
        "again for what TensorFlow holds from one operation to the next.",
        "",
    ]
    lines += table("", "peak, MiB", "of GPipe's", f"bar {OF_GPIPE}")
    whole = statistics.median(results["peaks"]["GPipe"])
    for name, values in results["peaks"].items():
        passed = by_name["memory"]["passed"] if name == "1F1B" else None
        lines += row(
            name,
            spread([value / 2**20 for value in values], ".1f"),
            f"{statistics.median(values) / whole:.2f}",
            verdict(passed, True),
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, ROUNDS, f"timed steps of each process, default {STEPS}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=2)
    args.steps = args.steps or STEPS
    facts = begin(
        "pipeline_parallel.py",
        argv,
        args.rounds,
        TF_NUM_INTEROP_THREADS="16",
        TF_NUM_INTRAOP_THREADS="1",
        TF_ENABLE_ONEDNN_OPTS="1",
    )
    results = run(args)
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "pipeline_parallel", facts, verdicts, text, **results)


if __name__ == "__main__":
    run_main(main)
