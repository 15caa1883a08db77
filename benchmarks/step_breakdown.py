"""Measure the cost of measuring steps: `fit` with and without `tfdist.StepBreakdown`.

    # Writes benchmarks/reports/step_breakdown.{md,json}.
    python benchmarks/step_breakdown.py
    # A few steps of each, writes nothing.
    python benchmarks/step_breakdown.py --quick

Epochs with and without the callback take turns in processes that stay alive, each second round the
other way around. Other work on a machine only ever makes epochs slower, by far more than the effect
to be measured: so the quickest ones are compared. The two are different graphs, each with its place
in memory, which makes either some percent faster than the other as long as a process lives: so the
median over several starts of the processes counts.
"""

from __future__ import annotations

import argparse
import collections
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
    positive,
    row,
    spread,
    table,
    verdict,
)
from common.workers import EXAMPLES, ONE_THREAD, Job, Model, serve

from tfdist import ClusterSpec

ROUNDS = 6
STARTS = 7
BAR = 1.02
MODELS = {
    "cnn": Model("CNN", 32, (128,), replica_batch=64, steps=30),
    "mlp": Model("MLP", 0, (128, 128), replica_batch=64, steps=150),
}
ALONE = 2.5  # one worker makes about that many times the steps of two in the same time
MEASURES = ("quiet", "step_breakdown")


def measure(
    model: Model, workers: int, rounds: int, steps: int, cores: list[int], timeout: float
) -> dict[str, list[float]]:
    """Return the slowest worker's seconds per step in each round, without and with the callback."""
    seconds = collections.defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="step_breakdown-") as directory:
        team = Processes(
            f"{model.title} on {workers} worker{'s' * (workers > 1)}",
            pathlib.Path(directory),
            timeout,
        )
        try:
            cluster = ClusterSpec.local(workers)
            jobs = [
                Job(
                    "tfdist",
                    model,
                    cluster.for_task("worker", rank),
                    cores[rank],
                    timeout,
                    directory,
                )
                for rank in range(workers)
            ]
            members = [team.start(f"worker-{rank}", serve, job) for rank, job in enumerate(jobs)]
            team.answers(members, "build the model")
            for number in range(-1, rounds):  # the first one traces and compiles
                for name in MEASURES if number % 2 == 0 else MEASURES[::-1]:
                    team.order(members, name, steps if number >= 0 else 3)
                    slowest = max(team.answers(members, f"run {steps} steps of {name!r}")) / steps
                    if number >= 0:
                        seconds[name].append(slowest)
                if number >= 0:
                    ratio = seconds["step_breakdown"][-1] / seconds["quiet"][-1]
                    print(
                        f"{team.name}, round {number + 1} of {rounds}: {100 * (ratio - 1):+.1f} %",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            team.end()
    return dict(seconds)


def judge(results: dict[str, list]) -> list[dict]:
    """Compare the ratio of times with and without the step breakdown with the bar."""
    verdicts = []
    for name, starts in results.items():
        ratios = [min(seconds["step_breakdown"]) / min(seconds["quiet"]) for seconds in starts]
        ratio = statistics.median(ratios)
        verdicts.append(
            {"name": name, "bar": BAR, "ratio": ratio, "ratios": ratios, "passed": ratio <= BAR}
        )
    return verdicts


def report(results: dict, verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Overhead of the step breakdown", facts)
    lines += [
        (
            f"Synthetic images of 28 x 28 in memory ({EXAMPLES}), Adam, 64 examples per worker "
            "and step, each worker on a core of its own with"
        ),
        (
            "one thread; epochs of about half a second, of which each writes records and curves, "
            "and in which two workers exchange their times once."
        ),
        (
            "The quickest round of each start of the processes; of these the median over the "
            "starts (min..max)."
        ),
        "",
    ]
    lines += table("", "ms/step", "ms/step measured", "cost, %", f"bar {100 * (BAR - 1):.0f} %")
    for name, each in zip(results, verdicts, strict=True):
        times = [
            spread([1e3 * min(seconds[kind]) for seconds in results[name]], ".3f")
            for kind in MEASURES
        ]
        lines += row(
            name,
            *times,
            spread([100 * (ratio - 1) for ratio in each["ratios"]], "+.1f"),
            verdict(each["passed"], True),
        )
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--models", MODELS)
    parser.add_argument(
        "--starts",
        type=positive,
        help=f"how often the processes are started, for so many rounds, default {STARTS}",
    )
    defaults = ", ".join(f"{model.steps} ({name})" for name, model in MODELS.items())
    add_options(
        parser,
        ROUNDS,
        f"timed steps of two workers in each epoch, default: {defaults}; one worker makes "
        f"{ALONE:g} times as many",
    )
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=5)
    args.starts = args.starts or (1 if args.quick else STARTS)
    args.cores = cores(parser)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    facts = {**begin("step_breakdown.py", argv, args.rounds, **ONE_THREAD), "Starts": args.starts}
    results = {}
    for name in args.models:
        model = MODELS[name]
        for workers in (1, 2):
            steps = int((args.steps or model.steps) * (ALONE if workers == 1 else 1))
            title = f"{model.title}, {'one worker' if workers == 1 else 'two workers'}"
            results[title] = [
                measure(model, workers, args.rounds, steps, args.cores, args.timeout)
                for _ in range(args.starts)
            ]
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "step_breakdown", facts, verdicts, text, seconds=results)


if __name__ == "__main__":
    run_main(main)
