"""Measure `fit` on a GPU under tfdist, beside stock Keras and a loop of PyTorch.

    # All models, writes benchmarks/reports/gpu.{md,json}.
    python benchmarks/gpu.py
    # A few steps of each, writes nothing.
    python benchmarks/gpu.py --quick

The processes take turns on the first GPU, and ratios are taken within a round. Times are
wall times: work on a GPU is no CPU time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from common.gpu_workers import MODELS, Job, serve
from common.processes import Processes, run_main
from common.report import (
    add_options,
    add_parts,
    begin,
    conclude,
    fill_options,
    heading,
    ratio_rows,
    ratio_verdict,
    ratios_of,
    row,
    spread,
    table,
)

ROUNDS = 5
WARM_UP = 3  # steps
CONTENDERS = {  # title: framework, `jit_compile`
    "tfdist": ("tfdist", "auto"),
    "tfdist, no XLA": ("tfdist", False),
    "Keras": ("keras", "auto"),
    "Keras, no XLA": ("keras", False),
    "torch": ("torch", False),
}
PRECISIONS = {"float32 (TF32)": False, "bfloat16": True}
# Time of a step under tfdist, as it is without options, over that of stock Keras.
BAR = 1.0


def measure(
    name: str, bfloat16: bool, team: Processes, members: dict, args: argparse.Namespace
) -> dict:
    """Return the parameter count, and seconds per step by contender, a list over the rounds."""
    model = MODELS[name]
    steps = args.steps or model.steps
    team.order(list(members.values()), name, bfloat16, WARM_UP)
    counts = team.answers(list(members.values()), f"compile {model.title}")
    times: dict[str, list[float]] = {contender: [] for contender in members}
    for number in range(args.rounds):
        order = list(members.items())
        for contender, member in order if number % 2 else reversed(order):
            team.order([member], name, bfloat16, steps)
            ((_, seconds),) = team.answers([member], f"train {model.title}")
            times[contender].append(seconds)
    middle = "  ".join(
        f"{contender} {1e3 * statistics.median(v):.3f}" for contender, v in times.items()
    )
    print(f"{model.title}, bfloat16={bfloat16}, ms: {middle}", file=sys.stderr, flush=True)
    return {"parameters": counts[0][0], "seconds": times}


def judge(results: dict) -> list[dict]:
    """Compare the ratios of times with their bar."""
    return [
        ratio_verdict(
            f"{MODELS[name].title}, {precision}: tfdist / Keras",
            BAR,
            ratios_of(result["seconds"], "tfdist", "Keras"),
        )
        for name, by_precision in results.items()
        for precision, result in by_precision.items()
    ]


def report(results: dict, verdicts: list[dict], contenders: list[str], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("`fit` on a GPU", facts)
    lines += [
        (
            "Adam, loss and accuracy, batches from the host's memory. tfdist trains under the "
            "strategy `one_device`, Keras without a strategy; `jit_compile` is Keras' default, "
            '"auto", where the title says nothing of XLA. PyTorch runs a loop with its fused Adam, '
            "channels last, and without `torch.compile`."
        ),
        (
            "Wall ms of a step: medians over the rounds, min..max in brackets; ratios are of times "
            "within a round."
        ),
    ]
    if missing := [contender for contender in CONTENDERS if contender not in contenders]:
        lines += [f"Not measured, as not installed: {', '.join(missing)}."]
    for name, by_precision in results.items():
        parameters = next(iter(by_precision.values()))["parameters"]
        title = (
            f"{MODELS[name].title}: {parameters:,} parameters, batch {MODELS[name].replica_batch}"
        )
        lines += ["", f"## {title}", "", *table("wall ms", *by_precision)]
        for contender in contenders:
            cells = [
                spread([1e3 * s for s in result["seconds"][contender]], ".2f")
                for result in by_precision.values()
            ]
            lines += row(contender, *cells)
    lines += ["", "## Bars", "", *ratio_rows(verdicts, "ratio of wall times")]
    return "\n".join(lines) + "\n"


def gpu_name(number: str) -> str | None:
    """Return the name and the driver of a GPU; None if nvidia-smi shows none."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["--query-gpu=name,driver_version", "--format=csv,noheader"]
    command = ["nvidia-smi", "-i", number, *query]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--models", MODELS)
    add_options(parser, ROUNDS, "timed steps per round, default: 10 to 300, by model")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=3)
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    gpu = gpu_name(number)
    if gpu is None:
        parser.error("this benchmark needs an NVIDIA GPU, and nvidia-smi shows none here")
    growth = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # the processes share the GPU
    facts = begin("gpu.py", argv, args.rounds, CUDA_VISIBLE_DEVICES=number, **growth)
    facts["GPU"] = gpu
    has_torch = importlib.util.find_spec("torchvision") is not None
    contenders = [name for name in CONTENDERS if has_torch or name != "torch"]
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:
        team = Processes("gpu", pathlib.Path(directory), args.timeout)
        try:
            members = {
                contender: team.start(contender, serve, Job(*CONTENDERS[contender]))
                for contender in contenders
            }
            team.answers(list(members.values()), "start")
            results = {
                name: {
                    precision: measure(name, bfloat16, team, members, args)
                    for precision, bfloat16 in PRECISIONS.items()
                }
                for name in args.models
            }
        finally:
            team.end()
    verdicts = judge(results)
    text = report(results, verdicts, contenders, facts)
    return conclude(args, "gpu", facts, verdicts, text, models=results)


if __name__ == "__main__":
    run_main(main)
