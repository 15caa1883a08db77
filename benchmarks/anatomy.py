"""`fit` with and without `tfdist.Anatomy` becomes what measuring steps costs.

    python benchmarks/anatomy.py            # writes benchmarks/reports/anatomy.{md,json}
    python benchmarks/anatomy.py --quick    # a few steps of each, writes nothing

The processes of a model stay alive; epochs with and without the callback take turns, each second round the other way around. A ratio
is taken between two epochs that follow each other, so that a machine that slows down slows both of them. Beside the time on the clock,
processor time is measured, which other work on the machine disturbs less; each worker has a core to itself, which it keeps busy.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time

from _processes import Processes, ProcessFailed
from _report import QUIET_CPU, about, add_options, conclude, fill_options, row, spread, table, verdict
from _workers import EXAMPLES, Job, Model, serve

from tfdist import ClusterSpec

ROUNDS = 12
BAR = 1.02
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
MODELS = {
    "cnn": Model("CNN", 32, (128,), replica_batch=64, steps=60),
    "mlp": Model("MLP", 0, (128, 128), replica_batch=64, steps=300),
}
ALONE = 2.5  # one worker makes about that many times the steps of two in the same time
MEASURES = ("quiet", "anatomy")


def measure(model: Model, workers: int, rounds: int, steps: int, cores: list[int], timeout: float) -> dict[str, list[float]]:
    """Seconds per step, in each round, without and with the anatomy: of the slowest worker, and "cpu" of all workers together."""
    seconds = collections.defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="anatomy-") as directory:
        team = Processes(f"{model.title} on {workers} worker{'s' * (workers > 1)}", pathlib.Path(directory), timeout)
        try:
            cluster = ClusterSpec.local(workers)
            jobs = [Job("tfdist", model, cluster.for_task("worker", rank), cores[rank], timeout, directory) for rank in range(workers)]
            members = [team.start(f"worker-{rank}", serve, job) for rank, job in enumerate(jobs)]
            team.answers(members, "build the model")
            for number in range(-1, rounds):  # the first one traces and compiles
                for name in MEASURES if number % 2 == 0 else MEASURES[::-1]:
                    before = processor_seconds()
                    team.order(members, name, steps if number >= 0 else 3)
                    found = max(team.answers(members, f"run {steps} steps of {name!r}")) / steps
                    if number >= 0:
                        seconds[name].append(found)
                        seconds[f"cpu {name}"].append((processor_seconds() - before) / steps)
                if number >= 0:
                    ratio, cpu = (seconds[f"{kind}anatomy"][-1] / seconds[f"{kind}quiet"][-1] - 1 for kind in ("", "cpu "))
                    print(f"{team.name}, round {number + 1} of {rounds}: {100 * ratio:+.1f} %, CPU {100 * cpu:+.1f} %", file=sys.stderr, flush=True)
        finally:
            team.end()
    return dict(seconds)


def processor_seconds() -> float:
    """Of the workers' processes since they began, threads that have ended included."""
    # What clock_getcpuclockid(3) gives for a process, which Python does not have.
    return sum(time.clock_gettime((~process.pid << 3) | 2) for process in multiprocessing.active_children() if process.pid)


def judge(results: dict) -> list[dict]:
    """Processor time of an epoch with the anatomy over that without, of the same round, against the bar."""
    verdicts = []
    for name, seconds in results.items():
        ratios = [measured / plain for plain, measured in zip(seconds["cpu quiet"], seconds["cpu anatomy"], strict=True)]
        median = statistics.median(ratios)
        verdicts.append({"name": name, "bar": BAR, "median": median, "rounds": ratios, "passed": median <= BAR})
    return verdicts


def report(results: dict, verdicts: list[dict], facts: dict) -> str:
    """The Markdown that is printed and written."""
    lines = ["# What the anatomy of steps costs", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    lines += [f"Synthetic images of 28 x 28 in memory ({EXAMPLES}), Adam, 64 examples per worker and step, each worker on a core of its own with",
              "one thread; epochs of about a second, of which each writes records and curves, and in which two workers exchange their times once.",
              "Medians over the rounds, min..max in brackets.", ""]  # fmt: skip
    lines += table("", "ms/step", "cost, %", "CPU ms/step", "CPU cost, %", f"CPU: bar {100 * (BAR - 1):.0f} %")
    for name, each in zip(results, verdicts, strict=True):
        plain, measured = (results[name][kind] for kind in MEASURES)
        costs = [100 * (b / a - 1) for a, b in zip(plain, measured, strict=True)]
        cpu, cpu_costs = [1e3 * s for s in results[name]["cpu quiet"]], [100 * (ratio - 1) for ratio in each["rounds"]]
        cells = spread([1e3 * s for s in plain], ".3f"), spread(costs, "+.1f"), spread(cpu, ".3f"), spread(cpu_costs, "+.1f")
        lines += row(name, *cells, verdict(each["passed"], True))
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    defaults = ", ".join(f"{model.steps} ({name})" for name, model in MODELS.items())
    add_options(parser, ROUNDS, f"timed steps of two workers in each epoch, default: {defaults}; one worker makes {ALONE:g} times as many")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=5)
    args.cores = sorted(os.sched_getaffinity(0))[:2]
    if len(args.cores) < 2:
        parser.error(f"two workers need a core each, but this process may use only {args.cores}; give it two, or run elsewhere")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files and processes are cleared up
    os.environ.update(ONE_THREAD | QUIET_CPU)  # for the workers
    facts = about("anatomy.py", argv, args.rounds)
    results = {}
    try:
        for name in args.models:
            model = MODELS[name]
            for workers in (1, 2):
                steps = int((args.steps or model.steps) * (ALONE if workers == 1 else 1))
                title = f"{model.title}, {'one worker' if workers == 1 else 'two workers'}"
                results[title] = measure(model, workers, args.rounds, steps, args.cores, args.timeout)
    except ProcessFailed as failure:
        print(f"anatomy: {failure}", file=sys.stderr)
        return 2
    verdicts = judge(results)
    return conclude(args, "anatomy", report(results, verdicts, facts), {"about": facts, "bars": verdicts, "seconds": results})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
