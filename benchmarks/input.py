"""Measure images per second of data pipelines, and time and memory of orders.

Data pipelines run side by side. Orders have up to 10^9 examples.

    python benchmarks/input.py            # all parts, writes benchmarks/reports/input.{md,json}
    python benchmarks/input.py --quick    # a little of each, writes nothing

Every data pipeline has a process of its own on the same cores, which stays alive; only one runs at
a time. Rounds visit every contender, each second round in reverse order; ratios are taken within a
round. What an order costs is measured in a new process for every size. The images are made once,
under the system's directory of temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from common import input_order, input_pipelines
from common.input_images import HEIGHT, WIDTH, folder, size
from common.input_pipelines import BATCH, KERAS_SIDE, SIDE
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

ROUNDS = 5
UNTIMED = 16  # batches of a pass before tf.data has found its number of threads
STEPS = 40  # batches of a pass that are timed
PARTS = ("images", "order")


@dataclasses.dataclass(frozen=True)
class Contender:
    """Describe a data pipeline: title, key in `input_pipelines.PIPELINES`, and package."""

    title: str
    pipeline: str
    package: str = "tensorflow"


CONTENDERS = {
    "t": Contender("tfdist.data", "tfdist"),
    "h": Contender("tf.data, tuned by hand", "tf_data"),
    "k": Contender("keras.utils.image_dataset_from_directory", "keras"),
    "p": Contender("PyTorch DataLoader, Pillow", "torch", package="torch"),
}
BARS = {"t/h": 0.97, "t/k": 1.5, "t/p": 1.5}
SIZES = (10**5, 10**6, 10**7, 10**8, 10**9)
BUFFER = 10**7
ORDERS = {"tfdist": "tfdist, global shuffle", "tf_data": "Dataset.shuffle"}
GROWTH_BYTES = 10e6
RESUME_S = 1.0


class Group(Processes):
    """Run one process, which takes one order at a time.

    Args:
        name: For messages.
        target: Function to run, see `common.processes.Processes.start`.
        job: Argument of the function.
        options: The logs' directory, and seconds that any answer may take.
    """

    def __init__(self, name: str, target: Callable, job: Any, *options: Any):
        super().__init__(name, *options)
        self._only = self.start(name, target, job, children=True)

    def answer(self, task: str) -> Any:
        """Return the process's next answer."""
        return self.answers([self._only], task)[0]

    def measure(self, *words: Any) -> Any:
        """Return the process's answer to an order."""
        self.order([self._only], *words)
        return self.answer(f"measure {words}")


def images(args: argparse.Namespace, cores: tuple[int, ...]) -> dict:
    """Run all data pipelines.

    Returns:
        "files" and "bytes" of the folder; "contenders": by letter a list of what each round gave;
        "skipped": the reason, for those that cannot run.
    """
    print(f"Making {args.images} images, or finding them ...", file=sys.stderr, flush=True)
    directory = folder(args.images, len(cores))
    files, total = size(directory)
    absent = [key for key, c in CONTENDERS.items() if not importlib.util.find_spec(c.package)]
    skipped = {key: f"{CONTENDERS[key].package} is not installed" for key in absent}
    results: dict = {key: [] for key in CONTENDERS if key not in skipped}
    with contextlib.ExitStack() as stack:
        logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="input-")))
        groups = {}
        for key in results:
            job = input_pipelines.Job(CONTENDERS[key].pipeline, directory, cores)
            groups[key] = Group(job.pipeline, input_pipelines.serve, job, logs, args.timeout)
            stack.callback(groups[key].end)
            groups[key].answer("build the pipeline")
        for group in groups.values():  # traces, and brings the files into memory
            group.measure(1, args.untimed)
        for number in range(args.rounds):
            for key in list(results)[:: 1 if number % 2 == 0 else -1]:
                got = groups[key].measure(args.untimed, args.steps)
                count = BATCH * args.steps
                speed = {"rate": count / got.pop("seconds"), "cpu": 1e3 * got.pop("cpu") / count}
                results[key].append(speed | got)
            rates = "  ".join(f"{key} {values[-1]['rate']:.0f}" for key, values in results.items())
            print(
                f"images, round {number + 1} of {args.rounds}, images/s: {rates}",
                file=sys.stderr,
                flush=True,
            )
    return {"files": files, "bytes": total, "contenders": results, "skipped": skipped}


def order(args: argparse.Namespace, cores: tuple[int, ...]) -> dict:
    """Measure shuffling, in a new process for each size and way.

    Returns:
        "tfdist" and "tf_data": by number of examples a list of what each round gave; "resume": such
            a list.
    """
    sizes = [n for n in SIZES if not args.quick or n in (SIZES[0], SIZES[-1])]
    results: dict = {name: {n: [] for n in sizes} for name in ORDERS} | {"resume": []}
    with tempfile.TemporaryDirectory(prefix="input-") as logs:

        def run(name: str, examples: int) -> dict:
            job = input_order.Job(name, examples, args.buffer, cores)
            group = Group(
                f"{name}-{examples}", input_order.serve, job, pathlib.Path(logs), args.timeout
            )
            try:
                return group.answer(f"measure {name} on {examples:,} examples")
            finally:
                group.end()

        for number in range(_order_rounds(args.rounds)):
            cells = [(name, n) for n in sizes for name in ORDERS]
            for name, n in cells if number % 2 == 0 else reversed(cells):
                results[name][n].append(run(name, n))
            results["resume"].append(run("resume", SIZES[-1]))
            last = "  ".join(
                f"{name} {_power(n)} {results[name][n][-1]['memory'] / 1e6:.0f}"
                for name, n in cells
            )
            print(
                f"order, round {number + 1} of {_order_rounds(args.rounds)}, MB: {last}",
                file=sys.stderr,
                flush=True,
            )
    return results


def _order_rounds(rounds: int) -> int:
    """Return fewer rounds, as the figures differ by orders of magnitude."""
    return -(-rounds // 3)


def judge(results: dict) -> list[dict]:
    """Compare speed ratios within each round, memory growth, and seconds with the bars."""
    verdicts = []
    for ratio, bar in BARS.items() if "images" in results else ():
        over, under = (results["images"]["contenders"].get(key, []) for key in ratio.split("/"))
        rounds = [a["rate"] / b["rate"] for a, b in zip(over, under, strict=False)]
        median = statistics.median(rounds) if rounds else None
        passed = None if median is None else median >= bar
        verdicts.append(
            {"what": ratio, "bar": bar, "median": median, "rounds": rounds, "passed": passed}
        )
    if "order" in results:
        peaks = {
            n: statistics.median(r["memory"] for r in rounds)
            for n, rounds in results["order"]["tfdist"].items()
        }
        growth = max(peaks.values()) - peaks[SIZES[0]]
        resumed = [r["all"] for r in results["order"]["resume"]]
        median = statistics.median(resumed)
        passed = median < RESUME_S
        verdicts.append(
            {
                "what": "growth",
                "bar": GROWTH_BYTES,
                "median": growth,
                "passed": growth <= GROWTH_BYTES,
            }
        )
        verdicts.append(
            {
                "what": "resume",
                "bar": RESUME_S,
                "median": median,
                "rounds": resumed,
                "passed": passed,
            }
        )
    return verdicts


def report(results: dict, verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Input pipelines: throughput, and cost of the order", facts)
    lines += ["Medians over the rounds, min..max in brackets; ratios are of speeds within a round."]
    return (
        "\n".join([*lines, *_report_images(results, verdicts), *_report_order(results, verdicts)])
        + "\n"
    )


def _report_images(results: dict, verdicts: list[dict]) -> list[str]:
    if "images" not in results:
        return []
    got = results["images"]
    lines = ["", f"## JPEG files to batches [{BATCH}, {SIDE}, {SIDE}, 3] of float32", ""]
    kilobytes = got["bytes"] / got["files"] / 1e3
    lines += [
        (
            f"{got['files']:,} files of {WIDTH} x {HEIGHT}, {kilobytes:.0f} kB each, in the page "
            "cache. All shuffle all files,"
        ),
        (
            "crop and flip at random, scale to [0, 1], and batch. (t), (h) and (p) cut out a "
            "random area of 8 to 100 % and resize it;"
        ),
        (
            "(t) and (h) decode that area alone, (p) has no way to. (k) resizes the whole image "
            f"to {KERAS_SIDE}, and cuts a square of"
        ),
        (
            f"{SIDE} out of it: what Keras' layers offer, and less work. TensorFlow decodes JPEG "
            "by a faster, less exact transform than"
        ),
        (
            "Pillow, and Pillow alone smooths what it makes smaller. (t) alone fixes the order, "
            "and the crop of every example in every"
        ),
        (
            "epoch. (t), (h) and (k) have the threads that tf.data finds, (p) a process per core. "
            "Memory is that of the process and"
        ),
        "its children.",
        "",
    ]
    lines += table("pipeline", "images/s", "CPU ms/image", "s to the first batch", "MB")
    for key, contender in CONTENDERS.items():
        label = f"({key}) {contender.title}"
        if key in got["skipped"]:
            lines += row(label, f"skipped: {got['skipped'][key]}", "", "", "")
            continue
        rounds = got["contenders"][key]
        figures = (
            spread([r[name] for r in rounds], form)
            for name, form in (("rate", ".0f"), ("cpu", ".2f"), ("first", ".2f"))
        )
        lines += row(label, *figures, f"{max(r['memory'] for r in rounds) / 1e6:,.0f}")
    lines += ["", *table("ratio", "median", "bar", "")]
    for each in (v for v in verdicts if v["what"] in BARS):
        values = each["rounds"]
        ratio = spread(values, ".2f") if values else ""
        word = verdict(each["passed"], bool(values))
        lines += row(each["what"], ratio, f">= {each['bar']}", word)
    return lines


def _report_order(results: dict, verdicts: list[dict]) -> list[str]:
    if "order" not in results:
        return []
    got = results["order"]
    bars = {v["what"]: v for v in verdicts}
    lines = ["", "## The order of N examples, which are their own numbers", ""]
    lines += [
        (
            f"Batches of {input_order.BATCH:,}. Memory is what a new process grows by, at its "
            "peak. `Dataset.shuffle` mixes all"
        ),
        "examples among each other only where its buffer, given in brackets, holds all.",
        "",
    ]
    lines += table("N", "s to the first batch", "s per million after it", "MB")
    for name, title in ORDERS.items():
        for n, rounds in got[name].items():
            buffer = f" ({_power(min(n, results['buffer']))})" if name == "tf_data" else ""
            label = f"{title}, {_power(n)}{buffer}"
            figures = (spread([r[key] for r in rounds], ".2f") for key in ("first", "million"))
            lines += row(label, *figures, spread([r["memory"] / 1e6 for r in rounds], ".1f"))
    growth = bars["growth"]
    resume = bars["resume"]
    seconds, again = (spread([r[key] for r in got["resume"]], ".2f") for key in ("all", "iterator"))
    megabytes = f"{growth['median'] / 1e6:.1f} MB"
    most = f"<= {growth['bar'] / 1e6:.0f} MB"
    last = f"to the last batch of {_power(SIZES[-1])}"
    lines += ["", *table("what", "median", "bar", "")]
    lines += row(
        f"tfdist's memory: growth from {_power(SIZES[0])}",
        megabytes,
        most,
        verdict(growth["passed"], True),
    )
    lines += row(
        f"{last}, no pipeline before",
        f"{seconds} s",
        f"< {resume['bar']:g} s",
        verdict(resume["passed"], True),
    )
    lines += row(f"{last}, of a pipeline", f"{again} s", "none", "")
    return lines


def _power(number: int) -> str:
    """Format a power of ten as people write it; any other number in full."""
    return f"10^{len(str(number)) - 1}" if str(number).strip("0") == "1" else f"{number:,}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--parts", PARTS)
    add_options(parser, ROUNDS, f"timed batches per pipeline and round, default {STEPS}")
    parser.add_argument(
        "--images", type=positive, help=f"JPEG files, default {BATCH * (UNTIMED + STEPS + 8)}"
    )
    parser.add_argument(
        "--cores", type=positive, help="how many cores the pipelines have, default: all"
    )
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=4)
    args.steps = args.steps or STEPS
    args.untimed, args.buffer = (2, SIZES[0]) if args.quick else (UNTIMED, BUFFER)
    needed = BATCH * (args.untimed + args.steps)
    args.images = args.images or needed + 8 * BATCH
    if args.images < needed:
        parser.error(
            f"--images {args.images}: a pass needs {needed} at least; more of them, or fewer "
            "--steps"
        )
    usable = len(os.sched_getaffinity(0))
    args.cores = args.cores or usable
    if args.cores > usable:
        parser.error(f"--cores {args.cores}: this process may use {usable}")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    cores = tuple(sorted(os.sched_getaffinity(0))[: args.cores])
    facts = begin("input.py", argv, args.rounds)
    facts |= {"Pillow": importlib.metadata.version("pillow"), "Cores of the pipelines": len(cores)}
    results: dict = {"buffer": args.buffer}
    for name, run in (("images", images), ("order", order)):
        if name in args.parts:
            results[name] = run(args, cores)
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "input", facts, verdicts, text, parts=results)


if __name__ == "__main__":
    run_main(main)
