"""Measure step rate, bytes and accuracy of two workers under each policy of `tfdist.sync`.

    python benchmarks/sync.py            # all models, writes benchmarks/reports/sync.{md,json}
    python benchmarks/sync.py --quick    # a few steps of each, writes nothing

The two processes of tfdist hold a model for each policy, and train one at a time, by turns with
tf_keras in two processes of its own. Rounds visit every variant, each second round in reverse
order; ratios are taken within a round. Before, each trains a new model on the same examples of the
digits, in the same order, and is evaluated on those that were left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
    ratios_of,
    row,
    spread,
    table,
    verdict,
)
from common.sync_workers import EVERY, RANK, VARIANTS, serve
from common.workers import ONE_THREAD, Job, Model
from fit_overhead import MODELS

from tfdist import ClusterSpec

ROUNDS = 5
STOCK = "tf_keras"
STEPS = {"cnn": 144, "mlp": 288, "mlp50": 16}  # of each variant and round; multiples of EVERY
EPOCHS = {"cnn": 20, "mlp": 40, "mlp50": 3}  # of the digits, before accuracies are compared
# Trainings of each variant of `LOSS`, whose accuracies are averaged: 1 % are four of the digits
# that were left out.
SEEDS = 3
TITLES = {
    "mean": "gradients, float32 (the default)",
    "bfloat16": "gradients, `comm_dtype` bfloat16",
    "float16": "gradients, `comm_dtype` float16",
    "accumulate": "gradients, one exchange for 4 steps",
    "local": f"local SGD, {EVERY} steps",
    "diloco": f"DiLoCo, {EVERY} steps",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero2 bfloat16": "ZeRO-2, `comm_dtype` bfloat16",
    "power": f"PowerSGD, rank {RANK}, as a user's function",
    STOCK: "tf_keras `fit`, stock strategy",
}
# Model -> (variant, measured against, at least so many times its speed).
SPEED = {"mlp50": [("zero2 bfloat16", STOCK, 1.6)], "cnn": [("diloco", "mean", 1.5)]}
LOSS = {
    "cnn": [("diloco", "mean", 0.01)],
    "mlp": [("diloco", "mean", 0.01)],
}  # ... at most so much less accurate


class Team(Processes):
    """Run the two workers of tfdist, or of tf_keras, on one model.

    Args:
        framework: "tfdist" or "tf_keras".
        model: The model.
        cores: A core for each worker.
        logs: Directory for their output.
        timeout: Seconds that any answer may take.
    """

    def __init__(
        self, framework: str, model: Model, cores: list[int], logs: pathlib.Path, timeout: float
    ):
        super().__init__(framework, logs, timeout)
        cluster = ClusterSpec.local(len(cores))
        jobs = [
            Job(framework, model, cluster.for_task("worker", rank), core, timeout)
            for rank, core in enumerate(cores)
        ]
        self._workers = [
            self.start(f"{framework}-worker-{rank}", serve, job) for rank, job in enumerate(jobs)
        ]

    def ready(self) -> int:
        """Wait until the models are built; return their number of parameters."""
        return max(self.answers(self._workers, "build the models"))

    def ask(self, what: str, variant: str, *more: int) -> list[float]:
        """Return the answers of both workers, see `common.sync_workers.serve`."""
        self.order(self._workers, what, variant, *more)
        return self.answers(self._workers, f"tell {what} of {variant!r}")


def measure(name: str, args: argparse.Namespace) -> dict:
    """Run all variants of one model.

    Returns:
        "parameters"; and by variant "seconds": per step in each round, "bytes": that a worker sends
        in a step, "accuracy".
    """
    model = MODELS[name]
    steps = args.steps or STEPS[name]
    frameworks = ["tfdist", *([STOCK] if importlib.util.find_spec(STOCK) else [])]
    variants = [*VARIANTS, *frameworks[1:]]
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    with contextlib.ExitStack() as stack:
        logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sync-")))
        teams = {}
        for framework in frameworks:
            team = Team(framework, model, args.cores, logs, args.timeout)
            teams[framework] = team
            stack.callback(team.end)
        parameters = {team.ready() for team in teams.values()}
        if len(parameters) != 1:
            raise ProcessFailed(
                f"{model.title}: the frameworks built different models; parameters: {parameters}"
            )
        of = {variant: teams[STOCK if variant == STOCK else "tfdist"] for variant in variants}
        epochs = args.epochs or EPOCHS[name]
        compared = {v for verdict in LOSS.get(name, []) for v in verdict[:2]}
        seeds = {v: SEEDS if v in compared and not args.quick else 1 for v in variants}
        accuracy = {}
        for variant in variants:  # the first training traces and compiles, too
            accuracies = [
                max(of[variant].ask("accuracy", variant, epochs, seed))
                for seed in range(1, 1 + seeds[variant])
            ]
            accuracy[variant] = statistics.mean(accuracies)
            print(
                f"{model.title}, {variant}: accuracies "
                f"{', '.join(f'{each:.2%}' for each in accuracies)}",
                file=sys.stderr,
                flush=True,
            )
        for number in range(args.rounds):
            for variant in variants if number % 2 == 0 else reversed(variants):
                seconds[variant].append(max(of[variant].ask("time", variant, steps)) / steps)
            rates = "  ".join(f"{variant} {1 / seconds[variant][-1]:.1f}" for variant in variants)
            print(
                f"{model.title}, round {number + 1} of {args.rounds}, steps/s: {rates}",
                file=sys.stderr,
                flush=True,
            )
        sent = {variant: max(of[variant].ask("bytes", variant)) for variant in VARIANTS}
    return {
        "parameters": parameters.pop(),
        "steps": steps,
        "seconds": seconds,
        "bytes": sent,
        "accuracy": accuracy,
        "trainings": seeds,
    }


def judge(results: dict) -> list[dict]:
    """Compare ratios of speeds within each round, and differences of accuracy, with their bars."""
    verdicts = []
    for name, result in results.items():
        for variant, other, bar in SPEED.get(name, []):
            ratios = [
                b / a
                for a, b in zip(
                    result["seconds"][variant], result["seconds"].get(other, []), strict=False
                )
            ]
            passed = statistics.median(ratios) >= bar if ratios else None
            verdicts.append(
                {
                    "model": name,
                    "what": f"speed of {variant} / {other}",
                    "bar": f">= {bar}",
                    "values": ratios,
                    "passed": passed,
                }
            )
        for variant, other, bar in LOSS.get(name, []):
            less = result["accuracy"][other] - result["accuracy"][variant]
            verdicts.append(
                {
                    "model": name,
                    "what": f"accuracy of {other} - {variant}",
                    "bar": f"<= {bar}",
                    "values": [less],
                    "passed": less <= bar,
                }
            )
    return verdicts


def report(results: dict, verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Synchronization policies: speed, traffic and accuracy", facts)
    lines += [
        (
            "Two workers on one machine, each on a core of its own with one thread, Adam, "
            "steps_per_execution 1. Images of 28 x 28 made of the digits."
        ),
        (
            "Medians over the rounds, min..max in brackets. Bytes are what a worker sends in a "
            "step, on average. Accuracy is that on digits that were left"
        ),
        (
            f"out, after equally many examples; where a bar is about it, the mean of {SEEDS} "
            "trainings."
        ),
    ]
    for name, result in results.items():
        model = MODELS[name]
        lines += [
            "",
            (
                f"## {model.title}: {result['parameters']:,} parameters, {model.replica_batch} "
                "examples per worker and step"
            ),
            "",
        ]
        lines += table("policy", "steps/s", "of the default's", "kB a step", "accuracy")
        for variant, seconds in result["seconds"].items():
            ratios = ratios_of(result["seconds"], "mean", variant)
            sent = f"{result['bytes'][variant] / 1e3:,.1f}" if variant in result["bytes"] else ""
            rates = spread([1 / s for s in seconds], ".1f")
            lines += row(
                TITLES[variant],
                rates,
                spread(ratios, ".2f"),
                sent,
                f"{result['accuracy'][variant]:.2%}",
            )
    if verdicts:
        lines += ["", *table("bar", "measured", "bar", "")]
        for each in verdicts:
            form = ".2f" if each["what"].startswith("speed") else ".4f"
            lines += row(
                f"{MODELS[each['model']].title}: {each['what']}",
                spread(each["values"], form) if each["values"] else "",
                each["bar"],
                verdict(each["passed"], bool(each["values"])),
            )
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--models", MODELS)
    add_options(
        parser,
        ROUNDS,
        "timed steps per variant and round, default: "
        f"{', '.join(f'{steps} ({name})' for name, steps in STEPS.items())}",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        help="of the digits, default: "
        f"{', '.join(f'{epochs} ({name})' for name, epochs in EPOCHS.items())}",
    )
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=EVERY)
    args.cores = cores(parser)
    args.epochs = args.epochs or (1 if args.quick else None)
    facts = begin("sync.py", argv, args.rounds, **ONE_THREAD)
    results = {name: measure(name, args) for name in args.models}
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "sync", facts, verdicts, text, models=results)


if __name__ == "__main__":
    run_main(main)
