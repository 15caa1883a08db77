"""Measure tfdist's `fit` on parameter-server clusters on this machine, beside tf_keras' `fit`.

The results are speed, CPU time and accuracy.

    # All parts, writes benchmarks/reports/parameter_server.{md,json}.
    python benchmarks/parameter_server.py
    # A little of each, writes nothing.
    python benchmarks/parameter_server.py --quick

Each contender has a cluster of its own: one chief, two workers, one parameter server for the CNN,
two for the embedding. All processes stay alive while a part is measured, and only those of one
contender run at a time. Rounds visit every contender, each second round in reverse order; ratios
are taken within a round. Everything runs in a private network namespace where the system allows it:
the bytes on its loopback interface are the benchmark's own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
    fill_options,
    heading,
    positive,
    row,
    spread,
    table,
    verdict,
)
from common.tasks import BATCH, LENGTH, ROWS, WIDTH, Job, chief, serve

from tfdist import ClusterSpec
from tfdist.launch import isolation

# Thread settings as of `tfdist launch` where tasks outnumber the cores, and no messages about what
# killed processes leave behind.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
}
ROUNDS = 3
WORKERS = 2
PER_EXECUTION = (1, 10, 50)


@dataclasses.dataclass(frozen=True)
class Contender:
    """Describe one way to train a model: a framework, and a key of `common.tasks.LAYERS`."""

    title: str
    framework: str
    layers: str


@dataclasses.dataclass(frozen=True)
class Part:
    """Describe a model, and how it is measured.

    Args:
        title: Title in the report.
        servers: Parameter servers.
        optimizer: Optimizer of all contenders.
        contenders: By the letter that the report has for each.
        bars: Ratio of speeds -> whether the bars hold for it.
        steps: Steps that are timed at once; as many go before them as warm-up.
        per_execution: Values of `steps_per_execution`.
    """

    title: str
    servers: int
    optimizer: str
    contenders: dict[str, Contender]
    bars: dict[str, bool]
    steps: int
    per_execution: tuple[int, ...] = PER_EXECUTION


_EMBEDDINGS = {
    "s": Contender("tfdist `fit`, ShardedEmbedding", "tfdist", "sharded"),
    "e": Contender("tfdist `fit`, keras Embedding", "tfdist", "embedding"),
    "k": Contender("tf_keras `fit`, its Embedding", "tf_keras", "embedding"),
}
_CNN = {
    "t": Contender("tfdist `fit`", "tfdist", "cnn"),
    "k": Contender("tf_keras `fit`, stock strategy", "tf_keras", "cnn"),
}
_TABLE = f"Embedding of {ROWS:,} x {WIDTH}, ids [{BATCH}, {LENGTH}]"
SPEED = {
    "cnn": Part("Small CNN, Adam", 1, "adam", _CNN, {"t/k": True}, 300),
    "embedding": Part(f"{_TABLE}, SGD", 2, "sgd", _EMBEDDINGS, {"s/k": True, "e/k": True}, 60),
    "embedding_adam": Part(
        f"{_TABLE}, Adam", 2, "adam", _EMBEDDINGS, {"s/k": False, "e/k": False}, 40, (10,)
    ),
}
PARTS = (
    "cnn",
    "first_batch",
    "accuracy",
    "embedding",
    "embedding_adam",
)  # those with the same clusters together
FIRST_BATCH = {  # how -> framework, title, bar in seconds
    "arrays": ("tfdist", "tfdist `fit(x, y)`, NumPy arrays", 2.0),
    "from_tensor_slices": ("tfdist", "tfdist `fit`, tf.data from_tensor_slices", 2.0),
    "DatasetCreator": ("tf_keras", "tf_keras `fit`, the same on each worker", None),
}
MEGABYTES = 100


def bar_of(per_execution: int) -> float:
    """Return the least ratio of tfdist's speed to tf_keras' that passes."""
    return 1.2 if per_execution == 10 else 1.0


class Cluster(Processes):
    """Run the processes of one contender.

    Args:
        framework: A key of `common.tasks.FRAMEWORKS`.
        servers: Parameter servers; 0: no cluster, one process alone.
        logs: Directory for their output.
        timeout: Seconds that any answer may take.
    """

    def __init__(self, framework: str, servers: int, logs: pathlib.Path, timeout: float):
        super().__init__(f"{framework} with {servers} parameter servers", logs, timeout)
        spec = ClusterSpec.local(workers=WORKERS, ps=servers, chief=True) if servers else None
        for task in spec.tasks if spec else ():
            if task.type != "chief":
                job = Job(framework, spec.for_task(task.type, task.index), timeout)
                self.start(f"{framework}-{servers}-{task.type}-{task.index}", serve, job)
        job = Job(framework, spec.for_task("chief", 0) if spec else None, timeout)
        self._chief = self.start(f"{framework}-{servers}-chief", chief, job)

    def ready(self) -> None:
        """Wait until the chief is connected to all others."""
        self.answers([self._chief], "connect")

    def measure(self, *words):
        """Return the result of a method of `common.tasks.Trainer`, which the first word names."""
        self.order([self._chief], *words)
        return self.answers([self._chief], " ".join(map(str, words[:4])))[0]


class Clusters:
    """Start clusters, by framework and number of parameter servers, when first needed."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._stack = contextlib.ExitStack()
        self._running: dict[tuple[str, int], Cluster] = {}
        self._logs = pathlib.Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="parameter-server-"))
        )

    def __enter__(self) -> Clusters:
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def get(self, *keys: tuple[str, int]) -> list[Cluster]:
        """Return these clusters, connected; end others that an earlier part started."""
        for key in self._running.keys() - set(keys):
            self._running.pop(key).end()
        new = [key for key in dict.fromkeys(keys) if key not in self._running]
        for key in new:
            cluster = Cluster(*key, self._logs, self._timeout)
            self._running[key] = cluster
            self._stack.callback(cluster.end)
        for key in new:
            self._running[key].ready()
        return [self._running[key] for key in keys]


def speed(part: Part, clusters: Clusters, rounds: int, steps: int | None) -> dict:
    """Run all contenders of a part.

    Returns:
        Contender letter -> steps_per_execution -> list by round: "steps_per_second",
        "cpu_milliseconds" of a step, of each process, "bytes" of a step.
    """
    running = clusters.get(*((c.framework, part.servers) for c in part.contenders.values()))
    cells = [
        (key, c, cluster, n)
        for (key, c), cluster in zip(part.contenders.items(), running, strict=True)
        for n in part.per_execution
    ]
    results: dict = {key: {n: [] for n in part.per_execution} for key in part.contenders}

    def measure(contender: Contender, cluster: Cluster, per_execution: int, count: int) -> dict:
        # Four executions at least: two for each worker.
        count = -(-max(count, 2 * WORKERS * per_execution) // per_execution) * per_execution
        got = cluster.measure(
            "speed", contender.layers, part.optimizer, per_execution, count, cluster.pids
        )
        return {
            "steps_per_second": count / got["seconds"],
            "cpu_milliseconds": {
                name: 1e3 * seconds / count for name, seconds in got["cpu"].items()
            },
            "bytes": got["bytes"] / count,
        }

    for _, contender, cluster, n in cells:  # traces and warms up
        measure(contender, cluster, n, 1)
    for number in range(rounds):
        for key, contender, cluster, n in cells if number % 2 == 0 else reversed(cells):
            results[key][n].append(measure(contender, cluster, n, steps or part.steps))
        rates = "  ".join(
            f"{key}{n} {results[key][n][-1]['steps_per_second']:.1f}" for key, _, _, n in cells
        )
        print(
            f"{part.title}, round {number + 1} of {rounds}, steps/s: {rates}",
            file=sys.stderr,
            flush=True,
        )
    return results


def first_batch(clusters: Clusters, rounds: int, megabytes: float) -> dict:
    """Return the seconds to the first batch of data in memory, for much data and for next to none.

    Each round has a new model.

    Contenders without a bar take long, and are measured once.
    """
    running = clusters.get(*((framework, 1) for framework, _, _ in FIRST_BATCH.values()))
    results: dict = {how: {"seconds": [], "of_little": []} for how in FIRST_BATCH}
    for number in range(rounds):
        cells = [
            (how, c)
            for how, c in zip(FIRST_BATCH, running, strict=True)
            if number == 0 or FIRST_BATCH[how][2]
        ]
        for how, cluster in cells if number % 2 == 0 else reversed(cells):
            results[how]["of_little"].append(cluster.measure("first_batch", how, 0))
            results[how]["seconds"].append(cluster.measure("first_batch", how, megabytes))
        print(
            f"first batch, round {number + 1} of {rounds}: {results}", file=sys.stderr, flush=True
        )
    return results


def accuracy(clusters: Clusters, seeds: int, epochs: int) -> dict:
    """Return the accuracy after a number of epochs, by seed, of one process and of two workers.

    In one process every step follows the one before.
    """
    alone, workers = clusters.get(("tfdist", 0), ("tfdist", 1))
    results: dict = {"synchronous": [], "parameter_server": []}
    with tempfile.TemporaryDirectory() as data_dir:
        for seed in range(seeds):
            for name, cluster in (("synchronous", alone), ("parameter_server", workers)):
                results[name].append(cluster.measure("accuracy", seed, epochs, data_dir))
            last = "  ".join(f"{name} {values[-1]:.2%}" for name, values in results.items())
            print(f"accuracy, seed {seed + 1} of {seeds}: {last}", file=sys.stderr, flush=True)
    return results


def judge(results: dict) -> list[dict]:
    """Compare the ratios of speeds within each round, and the seconds, with the bars."""
    verdicts = []
    for name in (n for n in SPEED if n in results):
        for ratio, barred in SPEED[name].bars.items():
            over, under = (results[name][key] for key in ratio.split("/"))
            for n in over:
                rounds = [
                    a["steps_per_second"] / b["steps_per_second"]
                    for a, b in zip(over[n], under[n], strict=True)
                ]
                median = statistics.median(rounds)
                bar = bar_of(n) if barred else None
                passed = None if bar is None else median >= bar
                verdicts.append(
                    {
                        "part": name,
                        "what": ratio,
                        "per_execution": n,
                        "bar": bar,
                        "median": median,
                        "rounds": rounds,
                        "passed": passed,
                    }
                )
    for how, result in results.get("first_batch", {}).items():
        median = statistics.median(result["seconds"])
        bar = FIRST_BATCH[how][2]
        passed = None if bar is None else median < bar
        verdicts.append(
            {"part": "first_batch", "what": how, "bar": bar, "median": median, "passed": passed}
        )
    return verdicts


def report(results: dict, verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Parameter servers: throughput and accuracy", facts)
    lines += [
        (
            f"One chief, {WORKERS} workers and the parameter servers, all on this machine, one "
            "thread per operation. Synthetic data in"
        ),
        (
            f"memory, {BATCH} examples per step. tf_keras is Keras 2 under TensorFlow's own "
            "ParameterServerStrategy, with a"
        ),
        (
            "DatasetCreator. CPU is that of all processes of the job; bytes are those on the "
            "loopback interface. Medians over the"
        ),
        "rounds, min..max in brackets; ratios are of speeds within a round.",
    ]
    for name, part in SPEED.items():
        if name not in results:
            continue
        servers = f"{part.servers} parameter server{'s' * (part.servers > 1)}"
        lines += ["", f"## {part.title}; {servers}", ""]
        lines += table("contender, steps_per_execution", "steps/s", "CPU ms/step", "kB/step")
        for n in part.per_execution:
            for key, contender in part.contenders.items():
                got = results[name][key][n]
                rates = spread([g["steps_per_second"] for g in got], ".1f")
                cpu = spread([sum(g["cpu_milliseconds"].values()) for g in got], ".1f")
                sent = f"{statistics.median(g['bytes'] for g in got) / 1e3:,.1f}"
                lines += row(f"({key}) {contender.title}, {n}", rates, cpu, sent)
        lines += ["", *table("ratio, steps_per_execution", "median", "bar", "")]
        for each in (v for v in verdicts if v["part"] == name):
            bar = f">= {each['bar']}" if each["bar"] else "none"
            lines += row(
                f"{each['what']}, {each['per_execution']}",
                spread(each["rounds"], ".2f"),
                bar,
                verdict(each["passed"], True),
            )
    if "first_batch" in results:
        lines += [
            "",
            f"## First batch of {MEGABYTES} MB in memory",
            "",
            "Seconds from calling `fit` to the end of the first step. The model is",
            "built, the step is traced anew. Beside it the same with one batch of data.",
            "",
        ]
        lines += table("data", "seconds", "one batch alone", "bar", "")
        for each in (v for v in verdicts if v["part"] == "first_batch"):
            got = results["first_batch"][each["what"]]
            bar = f"< {each['bar']:g} s" if each["bar"] else "none"
            seconds = (spread(got[key], ".2f") for key in ("seconds", "of_little"))
            lines += row(FIRST_BATCH[each["what"]][1], *seconds, bar, verdict(each["passed"], True))
    if "accuracy" in results:
        one, many = (results["accuracy"][key] for key in ("synchronous", "parameter_server"))
        lost = [100 * (a - b) for a, b in zip(one, many, strict=True)]
        lines += [
            "",
            "## Accuracy after equal epochs",
            "",
            (
                f"configs/digits_ps.py, {facts['Epochs']} epochs, {len(one)} seeds; the 297 test "
                "images."
            ),
            "",
        ]
        lines += table("training", "mean", "min..max")
        for label, values in (
            ("one process, synchronous", one),
            (f"{WORKERS} workers, 1 parameter server", many),
        ):
            lines += row(
                label, f"{statistics.mean(values):.2%}", f"{min(values):.2%}..{max(values):.2%}"
            )
        lines += row(
            "lost, percentage points, by seed",
            f"{statistics.mean(lost):.2f}",
            f"{min(lost):.2f}..{max(lost):.2f}",
        )
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--parts", PARTS)
    defaults = ", ".join(f"{part.steps} ({name})" for name, part in SPEED.items())
    add_options(parser, ROUNDS, f"least number of timed steps, default: {defaults}")
    parser.add_argument("--seeds", type=positive, help="trainings for the accuracy, default 5")
    parser.add_argument("--epochs", type=positive, help="of each of them, default 10")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=10)
    args.seeds = args.seeds or (1 if args.quick else 5)
    args.epochs = args.epochs or (1 if args.quick else 10)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    refusal = isolation.isolate()  # before any thread or process
    if refusal:
        print(
            f"{isolation.warning(refusal)}\nBytes on the loopback interface are those of all "
            "programs.",
            file=sys.stderr,
        )
    facts = begin("parameter_server.py", argv, args.rounds, **ONE_THREAD) | {"Epochs": args.epochs}
    results = {}
    with Clusters(args.timeout) as clusters:
        for name in (p for p in PARTS if p in args.parts):
            if name == "first_batch":
                results[name] = first_batch(clusters, args.rounds, MEGABYTES)
            elif name == "accuracy":
                results[name] = accuracy(clusters, args.seeds, args.epochs)
            else:
                results[name] = speed(SPEED[name], clusters, args.rounds, args.steps)
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "parameter_server", facts, verdicts, text, parts=results)


if __name__ == "__main__":
    run_main(main)
