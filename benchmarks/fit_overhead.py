"""Measure steps per second of `fit` in two workers, beside other ways to train the same model.

    # All models, writes benchmarks/reports/fit_overhead.{md,json}.
    python benchmarks/fit_overhead.py
    # A few steps of each, writes nothing.
    python benchmarks/fit_overhead.py --quick

The processes of all variants stay alive while a model is measured, and only those of one variant
run at a time. Rounds visit every variant, each second round in reverse order; ratios are taken
within a round, so that a machine that slows down for a minute slows both of their sides.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import statistics
import sys
import tempfile

from common.processes import Processes, ProcessFailed, run_main
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
    verdict,
)
from common.workers import EXAMPLES, ONE_THREAD, Job, Model, serve

from tfdist import ClusterSpec

ROUNDS = 5
MODELS = {
    "cnn": Model("CNN", 32, (128,), replica_batch=64, steps=150),
    "mlp": Model("MLP", 0, (128, 128), replica_batch=64, steps=300),
    "mlp50": Model("MLP of 50 MB", 0, (2304, 2304, 2304), replica_batch=32, steps=20),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """Describe one way to train: framework, measure, number of workers, and required package."""

    title: str
    framework: str
    measure: str
    workers: int = 2
    package: str = "tensorflow"


VARIANTS = {
    "t": Variant("tfdist `fit`", "tfdist", "quiet"),
    "p": Variant("tfdist `fit`, progress bar", "tfdist", "progress"),
    "f": Variant("tfdist `fit`, weights sharded by `fsdp`", "tfdist_fsdp", "quiet"),
    "a": Variant("tf_keras `fit`, stock strategy", "tf_keras", "quiet", package="tf_keras"),
    "b": Variant("hand-written loop, stock strategy", "hand_loop", "step"),
    "c": Variant("PyTorch DDP, gloo", "ddp", "step", package="torch"),
    "i": Variant("tfdist `fit`, two workers, no exchange", "tfdist_independent", "quiet"),
    "t1": Variant("tfdist `fit`, one worker alone", "tfdist", "quiet", workers=1),
    "a1": Variant(
        "tf_keras `fit`, one worker alone", "tf_keras", "quiet", workers=1, package="tf_keras"
    ),
    "g": Variant("forward and backward alone", "hand_loop", "gradient"),
    "u": Variant("forward, backward and update alone", "hand_loop", "local"),
    "r": Variant("all-reduce of the gradients' bytes alone", "hand_loop", "all_reduce"),
}
BARS = {"t/a": 1.8, "t/b": 0.95, "t/c": 1.3, "p/t": 0.97}
# Weak scaling: each of two workers beside one alone, as many examples each; beside two alone at the
# same time, which share the host's memory and caches (i), it is what the exchange costs.
WEAK = {
    "cnn": {"t/t1": 0.75, "t/i": 0.75},
    "mlp": {},
    "mlp50": {"t/t1": 0.85, "t/i": 0.85, "f/t1": 0.85},
}


class Team(Processes):
    """Run the processes of one framework on one model.

    Args:
        framework: A key of `common.workers.FRAMEWORKS`.
        model: The model.
        cores: A core for each worker.
        logs: Directory for their output.
        timeout: Seconds that any answer may take.
    """

    def __init__(
        self, framework: str, model: Model, cores: list[int], logs: pathlib.Path, timeout: float
    ):
        super().__init__(f"{framework} on {len(cores)} workers", logs, timeout)
        cluster = ClusterSpec.local(len(cores))
        self._workers = [
            self.start(
                f"{framework}-{len(cores)}-worker-{rank}",
                serve,
                Job(framework, model, cluster.for_task("worker", rank), core, timeout),
            )
            for rank, core in enumerate(cores)
        ]

    def ready(self) -> int:
        """Wait until all workers have built the model; return its number of parameters."""
        return max(self.answers(self._workers, "build the model"))

    def measure(self, name: str, steps: int) -> float:
        """Return the seconds per step of the slowest worker."""
        self.order(self._workers, name, steps)
        return max(self.answers(self._workers, f"run {steps} steps of {name!r}")) / steps


def measure(model: Model, rounds: int, steps: int, cores: list[int], timeout: float) -> dict:
    """Run all variants of one model.

    Returns:
        "parameters": their number; "seconds": for each variant a list, seconds per step in each
            round; "skipped": for each
        variant that cannot run, why.
    """
    skipped = {
        k: f"{v.package} is not installed"
        for k, v in VARIANTS.items()
        if not importlib.util.find_spec(v.package)
    }
    variants = {k: v for k, v in VARIANTS.items() if k not in skipped}
    seconds = collections.defaultdict(list)
    with contextlib.ExitStack() as stack:
        logs = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="fit-overhead-"))
        )
        teams = {}
        counts = {}
        for key in dict.fromkeys((v.framework, v.workers) for v in variants.values()):
            team = Team(key[0], model, cores[: key[1]], logs, timeout)
            teams[key] = team
            stack.callback(team.end)
            counts[team.name] = team.ready()
        if len(set(counts.values())) != 1:
            raise ProcessFailed(
                f"{model.title}: the frameworks built different models; parameters: {counts}"
            )
        for v in variants.values():  # traces and compiles every variant
            teams[v.framework, v.workers].measure(v.measure, 3)
        for number in range(rounds):
            order = list(variants.items())
            for key, v in order if number % 2 == 0 else reversed(order):
                seconds[key].append(teams[v.framework, v.workers].measure(v.measure, steps))
            rates = "  ".join(f"{k} {1 / seconds[k][-1]:.1f}" for k in variants)
            print(
                f"{model.title}, round {number + 1} of {rounds}, steps/s: {rates}",
                file=sys.stderr,
                flush=True,
            )
    return {
        "parameters": counts.popitem()[1],
        "steps": steps,
        "seconds": dict(seconds),
        "skipped": skipped,
    }


def judge(results: dict) -> list[dict]:
    """Compare the ratios of speeds within each round with their bars."""
    verdicts = []
    for name, result in results.items():
        for ratio, bar in (BARS | WEAK[name]).items():
            over, under = (result["seconds"].get(k, []) for k in ratio.split("/"))
            ratios = [u / o for o, u in zip(over, under, strict=False)]
            median = statistics.median(ratios) if ratios else None
            passed = None if median is None else median >= bar
            verdicts.append(
                {
                    "model": name,
                    "ratio": ratio,
                    "bar": bar,
                    "median": median,
                    "rounds": ratios,
                    "passed": passed,
                }
            )
    return verdicts


def report(results: dict, verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Overhead of `fit` on two workers", facts)
    lines += [
        (
            f"Synthetic images of 28 x 28 in memory ({EXAMPLES}), Adam, steps_per_execution 1, "
            "each worker on a core of its own with"
        ),
        (
            "one thread. Medians over the rounds, min..max in brackets; ratios are of speeds "
            "within a round."
        ),
    ]
    for name, result in results.items():
        model = MODELS[name]
        seconds = result["seconds"]
        lines += [
            "",
            (
                f"## {model.title}: {result['parameters']:,} parameters, {model.replica_batch} "
                "examples per worker and step"
            ),
            "",
        ]
        lines += table("variant", "steps/s", "ms/step", "examples/s")
        for key, v in VARIANTS.items():
            label = f"({key}) {v.title}"
            if key in result["skipped"]:
                lines += row(label, f"skipped: {result['skipped'][key]}", "", "")
                continue
            rates = [1 / s for s in seconds[key]]
            examples = (
                f"{statistics.median(rates) * model.replica_batch * v.workers:,.0f}"
                if key not in "gur"
                else ""
            )
            lines += row(
                label,
                spread(rates, ".1f"),
                f"{1e3 * statistics.median(seconds[key]):.1f}",
                examples,
            )
        lines += ["", *table("ratio", "median", "bar", "")]
        for each in (v for v in verdicts if v["model"] == name):
            values = each["rounds"]
            bar = each["bar"]
            word = verdict(each["passed"], bool(values))
            lines += row(
                each["ratio"],
                spread(values, ".2f") if values else "",
                f">= {bar}",
                word,
            )
        gradient, local, sync, step = (1e3 * statistics.median(seconds[k]) for k in "gurb")
        host = [one / both for both, one in zip(seconds["i"], seconds["t1"], strict=True)]
        lines += [
            "",
            f"i/t1, what this host gives two workers that exchange nothing: {spread(host, '.2f')}.",
            "",
            (
                f"Parts of a step, ms: forward and backward {gradient:.1f}, update "
                f"{local - gradient:.1f}, sync {sync:.1f};"
            ),
        ]
        lines += [f"together {local + sync:.1f}, where the hand-written loop takes {step:.1f}."]
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--models", MODELS)
    defaults = ", ".join(f"{model.steps} ({name})" for name, model in MODELS.items())
    add_options(parser, ROUNDS, f"timed steps per variant and round, default: {defaults}")
    parser.add_argument(
        "--cores",
        type=int,
        nargs=2,
        metavar="CORE",
        help="cores of the two workers, default: the first two",
    )
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=5)
    args.cores = args.cores or cores(parser)
    usable = sorted(os.sched_getaffinity(0))
    if len(set(args.cores)) < 2 or not set(args.cores) <= set(usable):
        parser.error(f"--cores: expected two different cores of {usable}, received {args.cores}")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    facts = begin("fit_overhead.py", argv, args.rounds, **ONE_THREAD)
    results = {}
    for name in args.models:
        model = MODELS[name]
        results[name] = measure(
            model, args.rounds, args.steps or model.steps, args.cores, args.timeout
        )
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "fit_overhead", facts, verdicts, text, models=results)


if __name__ == "__main__":
    run_main(main)
