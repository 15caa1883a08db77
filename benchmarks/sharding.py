"""Measure bytes per process and step time of ZeRO stages 1 to 3, beside plain data parallel.

    # 200 M parameters; writes benchmarks/reports/sharding.{md,json}; needs about 10 GB of memory.
    python benchmarks/sharding.py
    # A small model, writes nothing.
    python benchmarks/sharding.py --quick

Bytes are those of tensors, as TensorFlow counts them: resident between two steps, and the most
within a step. Workers of one contender run at a time; contenders take turns in each round.
"""

from __future__ import annotations

import argparse
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
    row,
    spread,
    table,
    verdict_rows,
)
from common.shards import Job, serve
from common.workers import ONE_THREAD

from tfdist import ClusterSpec

ROUNDS = 2
STEPS = 8  # the first of them find memory that was not used before
MIB = 1 << 20
# Processes: contenders. Plain data parallel takes the same memory on any number of them.
CONTENDERS = {
    2: ("data parallel", "zero 1", "zero 2", "fsdp", "fsdp, gathered", "fsdp, kept"),
    4: ("zero 2", "fsdp", "fsdp, gathered"),
}
TO_BEAT = 587, 873  # MiB resident and in a step, FSDP in 4 processes: this project's prototype
NEAR = 0.1
# Tolerance of a loss after some steps. Ways differ in the order of their sums, and in which of
# oneDNN's products fits where a buffer begins: after two steps by at most 3e-7 in a weight, which 8
# blocks make more of. A learning rate that is 1 % off shows as 1e-3.
SAME = 1e-4


def theory(way: str, processes: int, weights: int, layer: float) -> dict[str, float]:
    """Return the bytes between steps, and the most within a step.

    Between steps these are weights, Adam's two slots, and the part of the weights that ZeRO 1 and 2
    update. In a step gradients are added, and what is kept of their sums. Those of data parallel
    training take the gradients' place.

    Args:
        way: One of `CONTENDERS`.
        processes: Number of processes.
        weights: Bytes of all weights.
        layer: Bytes of a block's weights.

    >>> theory("data parallel", 2, 100, 10), theory("zero 2", 2, 100, 10)
    ({'resident': 300, 'peak': 400}, {'resident': 250.0, 'peak': 305.0})
    >>> theory("fsdp", 4, 100, 10), theory("fsdp, gathered", 4, 100, 10)
    ({'resident': 75.0, 'peak': 100.0}, {'resident': 75.0, 'peak': 110.0})
    """
    if way == "data parallel":
        return {"resident": 3 * weights, "peak": 4 * weights}
    if way.startswith("zero"):
        resident = weights + 3 * weights / processes
        # A kernel is gathered beside the one that it replaces.
        return {"resident": resident, "peak": resident + weights / processes + layer / 2}
    gathered = {"fsdp": 0, "fsdp, gathered": layer, "fsdp, kept": weights}
    return {
        "resident": 3 * weights / processes,
        "peak": 4 * weights / processes + gathered[way],
    }


def measure(way: str, processes: int, args: argparse.Namespace) -> tuple[int, list[dict]]:
    """Return the bytes of the weights, and the figures of each process."""
    with tempfile.TemporaryDirectory(prefix="sharding-") as directory:
        team = Processes(f"{way} in {processes} processes", pathlib.Path(directory), args.timeout)
        try:
            cluster = ClusterSpec.local(processes)
            members = []
            for rank in range(processes):
                core = args.cores[rank % len(args.cores)]
                job = Job(
                    way,
                    args.width,
                    args.blocks,
                    args.batch,
                    cluster.for_task("worker", rank),
                    core,
                    args.timeout,
                )
                members.append(team.start(f"worker-{rank}", serve, job))
            weights = team.answers(members, "build the model")[0]
            team.order(members, args.steps)
            return weights, team.answers(members, f"train {args.steps} steps")
        finally:
            team.end()


def judge(results: dict) -> list[dict]:
    """Compare the figures with their bars."""
    verdicts = []
    for (way, processes), entry in results.items():
        for kind, expected in theory(way, processes, entry["weights"], entry["layer"]).items():
            off = entry[kind] / expected - 1
            verdicts.append(
                {
                    "name": f"{way}, {processes} processes: {kind} bytes against theory",
                    "bar": NEAR,
                    "found": off,
                    # Under FSDP, a gradient may be gone before the last is there.
                    "passed": abs(off) <= NEAR or (off < 0 and (way, kind) == ("fsdp", "peak")),
                }
            )
    plain = results.get(("data parallel", 2))
    for (way, processes), entry in results.items() if plain else ():
        if entry is plain:
            continue
        off = max(abs(a / b - 1) for a in entry["losses"] for b in plain["losses"])
        verdicts.append(
            {
                "name": f"{way}, {processes} processes: loss against data parallel",
                "bar": SAME,
                "found": off,
                "passed": off <= SAME,
            }
        )
        if processes == 2:
            ratio = statistics.median(
                a / b for a, b in zip(entry["seconds"], plain["seconds"], strict=True)
            )
            verdicts.append(
                {
                    "name": f"{way}, 2 processes: step time over that of data parallel",
                    "bar": 1.0,
                    "found": ratio,
                    "passed": ratio <= 1,
                }
            )
    if ("fsdp", 4) in results:
        for kind, bar in zip(("resident", "peak"), TO_BEAT, strict=True):
            mebibytes = results["fsdp", 4][kind] / MIB
            verdicts.append(
                {
                    "name": f"fsdp, 4 processes: {kind} MiB of the prototype",
                    "bar": bar,
                    "found": mebibytes,
                    "passed": mebibytes <= bar,
                }
            )
    return verdicts


def report(results: dict, verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Sharding: memory and step time", facts)
    lines += [
        (
            "MiB of tensors per process, of the process with the most, as TensorFlow's allocator "
            "counts them, which rounds up. In theory P bytes of weights"
        ),
        (
            "make 3 P resident with data parallel, P + 3 P / N with ZeRO stages 1 and 2, and 3 P "
            "/ N with FSDP: weights and Adam's two slots. In a step"
        ),
        (
            "gradients come to it, and their sums: P, where sums take the place of gradients; "
            "P / N with ZeRO, as the factors of gradients travel, and a kernel that is gathered; "
            "P / N with FSDP, and a layer's weights where they are gathered. FSDP gathers"
        ),
        (
            'no block here, as the rows of the batch are fewer bytes. That of "gathered" and '
            '"kept" does not know the batch. Seconds: the quickest step of the slowest'
        ),
        (
            "process; median over the rounds (min..max). Processes share two cores: so steps of 4 "
            "processes are not compared."
        ),
        "",
        (
            "Bars. Bytes: within 10 % of theory, which leaves out the batch, activations and what "
            "is under way. Step time in 2 processes: at most data parallel's of the"
        ),
        (
            "same round, as memory is not to be paid for with time. Loss, the mean over all "
            f"steps: within {SAME:g} of data parallel's, as sums are rounded in another"
        ),
        (
            "order, and nothing else may differ. MiB of the prototype: what this project's first "
            "FSDP took."
        ),
        "",
    ]
    lines += table(
        "", "processes", "MiB resident", "in theory", "MiB in a step", "in theory", "s/step"
    )
    for (way, processes), entry in results.items():
        expected = theory(way, processes, entry["weights"], entry["layer"])
        pairs = [
            f"{each[kind] / MIB:.0f}" for kind in ("resident", "peak") for each in (entry, expected)
        ]
        lines += row(way, str(processes), *pairs, spread(entry["seconds"], ".2f"))
    lines += ["", *table("", "bar", "found", "")]
    lines += verdict_rows(verdicts)
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(
        parser,
        "--ways",
        sorted({way for ways in CONTENDERS.values() for way in ways}),
        default=None,
    )
    add_parts(parser, "--processes", sorted(CONTENDERS), type=int)
    add_options(parser, ROUNDS, f"timed steps, default {STEPS}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=2)
    args.steps = args.steps or STEPS
    args.width, args.blocks, args.batch = (256, 4, 8) if args.quick else (1768, 8, 32)
    args.cores = cores(parser)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    # Without oneDNN, on processors that it is not made for, TensorFlow counts no bytes.
    facts = begin("sharding.py", argv, args.rounds, **ONE_THREAD, TF_ENABLE_ONEDNN_OPTS="1")
    results: dict = {}
    for number in range(args.rounds):
        for processes in args.processes:
            for way in CONTENDERS[processes] if number % 2 == 0 else CONTENDERS[processes][::-1]:
                if args.ways and way not in args.ways:
                    continue
                weights, figures = measure(way, processes, args)
                entry = results.setdefault(
                    (way, processes),
                    {
                        "weights": weights,
                        "layer": 32 * args.width**2,
                        "seconds": [],
                        "losses": [],
                    },
                )
                entry["seconds"].append(max(each["seconds"] for each in figures))
                for kind in ("resident", "peak"):
                    entry[kind] = max(entry.get(kind, 0), *(each[kind] for each in figures))
                entry["losses"].append(figures[0]["loss"])
                print(
                    f"{way}, {processes} processes, round {number + 1}: {entry}",
                    file=sys.stderr,
                    flush=True,
                )
    facts["Parameters"] = f"{next(iter(results.values()))['weights'] // 4:,}"
    verdicts = judge(results)
    rows = [{"way": way, "processes": n, **entry} for (way, n), entry in results.items()]
    text = report(results, verdicts, facts)
    return conclude(args, "sharding", facts, verdicts, text, results=rows)


if __name__ == "__main__":
    run_main(main)
