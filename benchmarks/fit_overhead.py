"""Two pinned workers on this machine become steps per second of `fit`, beside other ways to train the same model.

    python benchmarks/fit_overhead.py            # all models, writes benchmarks/reports/fit_overhead.{md,json}
    python benchmarks/fit_overhead.py --quick    # a few steps of each, writes nothing

The processes of all variants stay alive while a model is measured, and only those of one variant run at a time. Rounds visit
every variant, each second round in reverse order; ratios are taken within a round, so that a machine that slows down for a
minute slows both of their sides.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import threading
import time

from _workers import EXAMPLES, Job, Model, serve

from tfdist import ClusterSpec

MODELS = {
    "cnn": Model("CNN", 32, (128,), replica_batch=64, steps=150),
    "mlp": Model("MLP", 0, (128, 128), replica_batch=64, steps=300),
    "mlp50": Model("MLP of 50 MB", 0, (2304, 2304, 2304), replica_batch=32, steps=20),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train: which framework, which of its measures, how many workers, and the package it needs."""

    title: str
    framework: str
    measure: str
    workers: int = 2
    package: str = "tensorflow"


VARIANTS = {
    "t": Variant("tfdist `fit`", "tfdist", "quiet"),
    "p": Variant("tfdist `fit`, progress bar", "tfdist", "progress"),
    "a": Variant("tf_keras `fit`, stock strategy", "tf_keras", "quiet", package="tf_keras"),
    "b": Variant("hand-written loop, stock strategy", "hand_loop", "step"),
    "c": Variant("PyTorch DDP, gloo", "ddp", "step", package="torch"),
    "t1": Variant("tfdist `fit`, one worker alone", "tfdist", "quiet", workers=1),
    "a1": Variant("tf_keras `fit`, one worker alone", "tf_keras", "quiet", workers=1, package="tf_keras"),
    "g": Variant("forward and backward alone", "hand_loop", "gradient"),
    "u": Variant("forward, backward and update alone", "hand_loop", "local"),
    "r": Variant("all-reduce of the gradients' bytes alone", "hand_loop", "all_reduce"),
}
SMALL = {"t/a": 1.6, "t/b": 0.95, "t/c": 1.3, "p/t": 0.97}
BARS = {"cnn": SMALL, "mlp": SMALL, "mlp50": {"t/a": 1.2, "t/b": None, "t/c": None, "p/t": 0.97}}

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
QUIET_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "GLOO_SOCKET_IFNAME": "lo"}


class WorkerFailed(RuntimeError):
    """A worker raised, died or did not answer in time; the message ends with its output."""


class Team:
    """The processes of one framework on one model, which run when told to.

    Args:
        framework: A key of `_workers.FRAMEWORKS`.
        model: The model.
        cores: A core for each worker.
        logs: Directory for their output.
        timeout: Seconds that any answer may take.
    """

    def __init__(self, framework: str, model: Model, cores: list[int], logs: pathlib.Path, timeout: float):
        self.name = f"{framework} on {len(cores)} workers"
        self._timeout = timeout
        self._processes: dict = {}  # connection -> process
        self._logs: dict = {}  # connection -> file of its output
        cluster = ClusterSpec.local(len(cores))
        context = multiprocessing.get_context("spawn")
        for rank, core in enumerate(cores):
            screen, terminal = os.openpty()  # progress bars are drawn as on a person's terminal
            log = logs / f"{framework}-{len(cores)}-worker-{rank}.log"
            ours, theirs = context.Pipe()
            job = Job(framework, model, cluster.for_task("worker", rank), core, os.ttyname(terminal), timeout)
            process = context.Process(target=serve, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            threading.Thread(target=_copy, args=(screen, terminal, log), daemon=True).start()
            self._processes[ours], self._logs[ours] = process, log

    def ready(self) -> int:
        """Waits until all workers have built the model; returns its number of parameters."""
        return max(self._answers("build the model"))

    def measure(self, name: str, steps: int) -> float:
        """Seconds per step of the slowest worker."""
        for connection in self._processes:
            with contextlib.suppress(BrokenPipeError):  # a dead worker has left its reason in its answer
                connection.send((name, steps))
        return max(self._answers(f"run {steps} steps of {name!r}")) / steps

    def end(self) -> None:
        """Kills the processes: they hold nothing that is needed."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(10)

    def _answers(self, task: str) -> list:
        deadline = time.monotonic() + self._timeout
        waiting, answers = list(self._processes), []
        while waiting:
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            for connection in ready:
                waiting.remove(connection)
                try:
                    answers.append(connection.recv())
                except (EOFError, ConnectionResetError):
                    answers.append(f"process {self._processes[connection].pid} died")
                if isinstance(answers[-1], str):
                    raise self._failed(task, answers[-1], [connection])
            if not ready:
                raise self._failed(task, f"no answer in {self._timeout:g} s; allow more with --timeout", waiting)
        return answers

    def _failed(self, task: str, reason: str, connections: list) -> WorkerFailed:
        outputs = [f"--- {self._logs[c].name}\n{self._logs[c].read_text(errors='replace')[-4000:]}" for c in connections]
        return WorkerFailed("\n".join([f"{self.name}, asked to {task}: {reason}", *outputs]))


def _copy(screen: int, terminal: int, log: pathlib.Path) -> None:
    """Copies what a worker prints to a file; our end of the terminal stays open, so that reading never fails."""
    with log.open("wb", buffering=0) as file:
        while chunk := os.read(screen, 65536):
            file.write(chunk)


def measure(model: Model, rounds: int, steps: int, cores: list[int], timeout: float) -> dict:
    """Runs all variants of one model.

    Returns:
        "parameters": their number; "seconds": for each variant a list, seconds per step in each round; "skipped": for each
        variant that cannot run, why.
    """
    skipped = {k: f"{v.package} is not installed" for k, v in VARIANTS.items() if not importlib.util.find_spec(v.package)}
    variants = {k: v for k, v in VARIANTS.items() if k not in skipped}
    seconds = collections.defaultdict(list)
    with contextlib.ExitStack() as stack:
        logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fit-overhead-")))
        teams, counts = {}, {}
        for key in dict.fromkeys((v.framework, v.workers) for v in variants.values()):
            teams[key] = team = Team(key[0], model, cores[: key[1]], logs, timeout)
            stack.callback(team.end)
            counts[team.name] = team.ready()
        if len(set(counts.values())) != 1:
            raise WorkerFailed(f"{model.title}: the frameworks built different models; parameters: {counts}")
        for v in variants.values():  # traces and compiles every variant
            teams[v.framework, v.workers].measure(v.measure, 3)
        for number in range(rounds):
            order = list(variants.items())
            for key, v in order if number % 2 == 0 else reversed(order):
                seconds[key].append(teams[v.framework, v.workers].measure(v.measure, steps))
            rates = "  ".join(f"{k} {1 / seconds[k][-1]:.1f}" for k in variants)
            print(f"{model.title}, round {number + 1} of {rounds}, steps/s: {rates}", file=sys.stderr, flush=True)
    return {"parameters": counts.popitem()[1], "steps": steps, "seconds": dict(seconds), "skipped": skipped}


def judge(results: dict) -> list[dict]:
    """Ratios of speeds within each round, against their bars."""
    verdicts = []
    for name, result in results.items():
        for ratio, bar in BARS[name].items():
            over, under = (result["seconds"].get(k, []) for k in ratio.split("/"))
            ratios = [u / o for o, u in zip(over, under, strict=False)]
            median = statistics.median(ratios) if ratios else None
            passed = None if bar is None or median is None else median >= bar
            verdicts.append({"model": name, "ratio": ratio, "bar": bar, "median": median, "rounds": ratios, "passed": passed})
    return verdicts


def report(results: dict, verdicts: list[dict], about: dict) -> str:
    """The Markdown that is printed and written."""
    lines = ["# What `fit` costs on two workers", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += [f"Synthetic images of 28 x 28 in memory ({EXAMPLES}), Adam, steps_per_execution 1, each worker on a core of its own with",
              "one thread. Medians over the rounds, min..max in brackets; ratios are of speeds within a round."]  # fmt: skip
    for name, result in results.items():
        model, seconds = MODELS[name], result["seconds"]
        lines += ["", f"## {model.title}: {result['parameters']:,} parameters, {model.replica_batch} examples per worker and step", ""]
        lines += _table("variant", "steps/s", "ms/step", "examples/s")
        for key, v in VARIANTS.items():
            label = f"({key}) {v.title}"
            if key in result["skipped"]:
                lines += _row(label, f"skipped: {result['skipped'][key]}", "", "")
                continue
            rates = [1 / s for s in seconds[key]]
            examples = f"{statistics.median(rates) * model.replica_batch * v.workers:,.0f}" if key not in "gur" else ""
            lines += _row(label, _spread(rates, ".1f"), f"{1e3 * statistics.median(seconds[key]):.1f}", examples)
        lines += ["", *_table("ratio", "median", "bar", "")]
        for verdict in (v for v in verdicts if v["model"] == name):
            values, bar = verdict["rounds"], verdict["bar"]
            word = {None: "" if values else "not measured", True: "pass", False: "FAIL"}[verdict["passed"]]
            lines += _row(verdict["ratio"], _spread(values, ".2f") if values else "", f">= {bar}" if bar else "none", word)
        gradient, local, sync, step = (1e3 * statistics.median(seconds[k]) for k in "gurb")
        lines += ["", f"Parts of a step, ms: forward and backward {gradient:.1f}, update {local - gradient:.1f}, sync {sync:.1f};"]
        lines += [f"together {local + sync:.1f}, where the hand-written loop takes {step:.1f}."]
    return "\n".join(lines) + "\n"


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def _row(label: str, *cells: str) -> list[str]:
    return [f"| {label:46} | " + " | ".join(f"{cell:>24}" for cell in cells) + " |"]


def _table(label: str, *cells: str) -> list[str]:
    return [*_row(label, *cells), "|---|" + "--:|" * len(cells)]


def _versions() -> str:
    packages = ("tfdist", "tensorflow", "keras", "tf_keras", "torch", "numpy")
    found = [f"{p} {importlib.metadata.version(p)}" for p in packages if importlib.util.find_spec(p)]
    return ", ".join([f"Python {platform.python_version()}", *found])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--rounds", type=_positive, help="rounds over all variants, default 5")
    defaults = ", ".join(f"{model.steps} ({name})" for name, model in MODELS.items())
    parser.add_argument("--steps", type=_positive, help=f"timed steps per variant and round, default: {defaults}")
    parser.add_argument("--cores", type=int, nargs=2, metavar="CORE", help="cores of the two workers, default: the first two")
    parser.add_argument("--timeout", type=_positive, default=300, help="seconds that any wait may take, default 300")
    parser.add_argument("--out", type=pathlib.Path, help="directory of the report, default benchmarks/reports; none with --quick")
    parser.add_argument("--quick", action="store_true", help="smoke run: 1 round of 5 steps, its figures mean nothing")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 5)
    if args.quick:
        args.steps = args.steps or 5
    elif args.out is None:
        args.out = pathlib.Path(__file__).parent / "reports"
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        parser.error(f"two workers need a core each, but this process may use only {usable}; give it two, or run elsewhere")
    args.cores = args.cores or usable[:2]
    if len(set(args.cores)) < 2 or not set(args.cores) <= set(usable):
        parser.error(f"--cores: expected two different cores of {usable}, received {args.cores}")
    return args


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, received {text!r}")
    return value


def main(argv: list[str]) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files and processes are cleared up
    os.environ.update(ONE_THREAD | QUIET_CPU)  # for the workers
    about = {
        "Command": f"`{shlex.join(['python', 'benchmarks/fit_overhead.py', *argv])}`",
        "Date": datetime.date.today().isoformat(),
        "Versions": _versions(),
        "Machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "Rounds": args.rounds,
    }
    results = {}
    try:
        for name in args.models:
            model = MODELS[name]
            results[name] = measure(model, args.rounds, args.steps or model.steps, args.cores, args.timeout)
    except WorkerFailed as failure:
        print(f"fit_overhead: {failure}", file=sys.stderr)
        return 2
    verdicts = judge(results)
    text = report(results, verdicts, about)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "fit_overhead.md").write_text(text)
        document = {"about": about, "bars": verdicts, "models": results}
        (args.out / "fit_overhead.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(not args.quick and any(v["passed"] is False for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
