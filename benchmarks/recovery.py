"""Measure the time until launches with killed workers train again.

    # All parts, writes benchmarks/reports/recovery.{md,json}.
    python benchmarks/recovery.py
    # One launch of each kind, writes nothing.
    python benchmarks/recovery.py --quick

Each round is two launches of two workers with a chaos plan, whose journals have the times: one with
standby processes, one without, in alternating order. `snapshots.py` measures what saves cost.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from common.processes import ProcessFailed, run_main
from common.report import (
    add_options,
    add_parts,
    begin,
    conclude,
    fill_options,
    heading,
    row,
    spread,
    table,
    verdict,
)

from tfdist.runtime.launch_protocol import read_journal

ROUNDS = 3
SAVE_FREQ = 10  # steps
EPOCHS = 5  # of a launch
HANG_TIMEOUT_S = 5
HANG_BOUND_S = (
    HANG_TIMEOUT_S + 2.0
)  # a look every 0.5 s, another to be sure, and 1 s for the stacks
FAULTS = {
    "worker": "kill worker:1@step=20",  # with a save due just then: the most that can be lost
    "chief": "kill chief@step=37",
    "writing": "kill chief@step=61",  # one step after a save
    "hung": "hang worker:1@step=85",
}
TITLES = {
    "worker": "worker killed",
    "chief": "chief killed",
    "writing": "chief killed one step after a save",
    "hung": "worker hung",
}
# Each stage ends with an event of the journal, of the task that comes last; whose time it is.
STAGES = (
    ("detected", "detection", "ours"),
    ("ended", "teardown: the others end", "ours"),
    ("started", "launcher, until the script runs", "ours"),
    ("imported", "import of TensorFlow and Keras", "TensorFlow's"),
    ("preflight", "import of tfdist, preflight", "ours"),
    ("joined", "TensorFlow's cluster, strategy", "TensorFlow's"),
    ("built", "model and data", "the script's"),
    ("fitting", "beginning of `fit`: the workers agree, which traces", "TensorFlow's"),
    ("restored", "restoring", "ours"),
    ("stepping", "tracing, first step", "TensorFlow's"),
)
LARGE = {"resnet50": "ResNet-50, 32 x 32", "transformer": "transformer, 12 layers of 128"}
KINDS = {"standby": 2, "fresh": 0}  # standby processes
DETECTION_S = 1.0
RECOVERY_S = 2.0
OWN_S = 0.5
Recoveries = dict[str, dict[str, list["Recovery"]]]


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Hold the cost of one fault: seconds by stage, and steps that were run again."""

    fault: str
    stages: dict[str, float]
    lost: int


def launch(
    directory: pathlib.Path,
    faults: list[str],
    standbys: int,
    timeout: float,
    model: str = "cnn",
    epochs: int = EPOCHS,
) -> list[Recovery]:
    """Run a launch with these faults, one after the other, and return their recoveries.

    Raises:
        ProcessFailed: The launch failed or took too long.
    """
    script = pathlib.Path(__file__).parent / "common" / "recovery_worker.py"
    logs = directory / "logs"
    plan = "; ".join(FAULTS[fault] for fault in faults)
    words = [
        sys.executable,
        "-m",
        "tfdist",
        "launch",
        "--workers",
        "2",
        "--restarts",
        "9",
        "--hang-timeout",
        str(HANG_TIMEOUT_S),
        "--standby",
        str(standbys),
        "--log-dir",
        str(logs),
        "--chaos",
        plan,
        "--",
        str(script),
        str(directory),
        str(SAVE_FREQ),
        str(epochs),
        str(standbys),
        model,
    ]
    try:
        done = subprocess.run(
            words,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise ProcessFailed(str(late)) from None
    if done.returncode:
        raise ProcessFailed(
            f"`tfdist launch --chaos {plan!r}` ended with code {done.returncode}:\n"
            f"{done.stdout[-4000:]}"
        )
    return recoveries(read_journal(str(logs)), faults)


def recoveries(journal: list[dict], faults: list[str]) -> list[Recovery]:
    """Read the recoveries from the faults of a launch from its journal."""
    recovered = []
    for number, name in enumerate(faults):
        fault = next(
            line for line in journal if line["event"] == "fault" and line["number"] == number
        )
        attempt = fault["attempt"] + 1
        later = [line for line in journal if line["time"] >= fault["time"]]
        begin = next(
            line["time"]
            for line in later
            if line["event"] == "attempt" and line["attempt"] == attempt
        )
        times = {
            event: next(line["time"] for line in later if line["event"] == event)
            for event in ("detected", "ended")
        }
        for event in ("started", "imported", "preflight", "joined", "built", "stepping"):
            times[event] = max(
                line["time"]
                for line in later
                if line["event"] == event and line["attempt"] == attempt
            )
        restored = [
            line
            for line in later
            if line["event"] == "restored" and begin < line["time"] < times["stepping"]
        ]
        last = max(restored, key=lambda line: line["time"])
        times |= {"restored": last["time"], "fitting": last["time"] - last["seconds"]}
        ends = [fault["time"], *(times[event] for event, _, _ in STAGES)]
        first = min(
            line["total"]
            for line in later
            if line["event"] == "stepping" and line["attempt"] == attempt
        )
        stages = {
            event: end - before
            for (event, _, _), before, end in zip(STAGES, ends, ends[1:], strict=False)
        }
        recovered.append(Recovery(name, stages, fault["total"] - (first - 1)))
    return recovered


def recover(faults: list[str], rounds: int, timeout: float) -> Recoveries:
    """Return the recoveries of all rounds, by kind of launch and by fault."""
    recoveries: Recoveries = {kind: collections.defaultdict(list) for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
                for each in launch(pathlib.Path(directory), faults, KINDS[kind], timeout):
                    recoveries[kind][each.fault].append(each)
            totals = "  ".join(
                f"{name} {total(each[-1]):.1f}" for name, each in recoveries[kind].items()
            )
            print(
                f"launch {number + 1} of {rounds}, {kind}, seconds until the next step: {totals}",
                file=sys.stderr,
                flush=True,
            )
    return recoveries


def restart_large(rounds: int, timeout: float) -> Recoveries:
    """Return larger models' recoveries from the loss of a worker, by model and kind of launch."""
    recoveries: Recoveries = {model: collections.defaultdict(list) for model in LARGE}
    for number in range(rounds):
        for model in LARGE:
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
                    recoveries[model][kind] += launch(
                        pathlib.Path(directory), ["worker"], KINDS[kind], timeout, model, epochs=1
                    )
                seconds = total(recoveries[model][kind][-1])
                print(
                    f"{model}, {kind}: {seconds:.1f} s until the next step",
                    file=sys.stderr,
                    flush=True,
                )
    return recoveries


def total(recovery: Recovery) -> float:
    """Return the seconds from the failure to the next step."""
    return sum(recovery.stages.values())


def ours(recovery: Recovery) -> float:
    """Return the seconds of a recovery that are tfdist's own."""
    return sum(recovery.stages[event] for event, _, whose in STAGES if whose == "ours")


def judge(recoveries: Recoveries) -> list[dict]:
    """Compare figures with their bars: the worst of all rounds, or the median."""

    def of(*faults: str, kinds: Iterable[str] = KINDS) -> list[Recovery]:
        known = [recoveries.get(kind, {}) for kind in kinds]
        return [each for by_fault in known for name in faults for each in by_fault.get(name, ())]

    ready = of("worker", "chief", "writing", kinds=["standby"])
    killed = of("worker", "chief", "writing")
    within = of("worker", "chief", "hung")
    rows: list[tuple[str, float | None, str, float]] = [
        (
            "detection of a dead process, s",
            max((each.stages["detected"] for each in killed), default=None),
            "<",
            DETECTION_S,
        ),
        (
            "detection of a hung process, s",
            max((each.stages["detected"] for each in of("hung")), default=None),
            "<=",
            HANG_BOUND_S,
        ),
        (
            "from kill to next step with standby processes, median, s",
            statistics.median(map(total, ready)) if ready else None,
            "<=",
            RECOVERY_S,
        ),
        (
            "of it tfdist's own, median, s",
            statistics.median(map(ours, ready)) if ready else None,
            "<=",
            OWN_S,
        ),
        (
            f"lost steps, saved every {SAVE_FREQ}",
            max((each.lost for each in within), default=None),
            "<=",
            SAVE_FREQ,
        ),
    ]
    return [
        {
            "name": name,
            "value": value,
            "bar": f"{sign} {bar}",
            "passed": None if value is None else value < bar or (sign == "<=" and value == bar),
        }
        for name, value, sign, bar in rows
    ]


def report(recoveries: Recoveries, large: Recoveries, verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("Recovery time after a failure", facts)
    lines += [
        (
            "The CNN of `configs/digits.py`: 24 steps of 64 images an epoch. Medians over the "
            "rounds, min..max in brackets."
        ),
        "",
        *table("bar", "measured", "", ""),
    ]
    for each in verdicts:
        value = "" if each["value"] is None else f"{each['value']:.3g}"
        lines += row(
            each["name"], value, each["bar"], verdict(each["passed"], each["value"] is not None)
        )
    for kind, by_fault in recoveries.items():
        names = list(by_fault)
        how = (
            "With standby processes" if KINDS[kind] else "Without standby processes (`--standby 0`)"
        )
        lines += [
            "",
            f"## {how}: from a failure to the next step",
            "",
            "Two workers on this machine, `tfdist launch --chaos`. Seconds.",
            "",
        ]
        lines += table("stage", *(TITLES[name] for name in names), "whose time")
        for event, title, whose in STAGES:
            lines += row(
                title,
                *(spread([each.stages[event] for each in by_fault[name]], ".2f") for name in names),
                whose,
            )
        lines += row(
            "**all**", *(spread(list(map(total, by_fault[name])), ".1f") for name in names), ""
        )
        lines += row(
            "**tfdist's own**",
            *(spread([ours(each) for each in by_fault[name]], ".2f") for name in names),
            "",
        )
        lines += row(
            f"steps lost, saved every {SAVE_FREQ}",
            *(spread([each.lost for each in by_fault[name]], ".0f") for name in names),
            "",
        )
    if recoveries:
        lines += [
            "",
            (
                "A file is written while training goes on. A chief that is killed before the file "
                "is complete takes it along: then the snapshot"
            ),
            (
                "before it counts, and the steps run since the save began are lost besides those "
                "of an interval."
            ),
        ]
    if large:
        columns = [(model, kind) for model in large for kind in KINDS]
        lines += [
            "",
            "## Larger models: from the death of a worker to the next step",
            "",
            (
                f"Two workers, batches of 4. Rounds: {len(next(iter(large.values()))['fresh'])}. "
                "Seconds."
            ),
            "",
        ]
        lines += table(
            "stage",
            *(
                f"{LARGE[model]}, {'standby' if KINDS[kind] else 'without'}"
                for model, kind in columns
            ),
            "whose time",
        )
        for event, title, whose in STAGES:
            lines += row(
                title,
                *(
                    spread([each.stages[event] for each in large[model][kind]], ".2f")
                    for model, kind in columns
                ),
                whose,
            )
        lines += row(
            "**all**",
            *(spread(list(map(total, large[model][kind])), ".1f") for model, kind in columns),
            "",
        )
        lines += row(
            "**tfdist's own**",
            *(spread(list(map(ours, large[model][kind])), ".2f") for model, kind in columns),
            "",
        )
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--parts", ("recover", "large"))
    add_options(parser, ROUNDS)
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    facts = begin("recovery.py", argv, args.rounds)
    faults = ["worker"] if args.quick else list(FAULTS)
    recoveries = recover(faults, args.rounds, args.timeout) if "recover" in args.parts else {}
    large = restart_large(args.rounds, args.timeout) if "large" in args.parts else {}
    verdicts = judge(recoveries)
    text = report(recoveries, large, verdicts, facts)
    figures = {
        "recoveries": {
            kind: {name: list(map(dataclasses.asdict, values)) for name, values in each.items()}
            for kind, each in recoveries.items()
        },
        "larger_models": {
            model: {kind: list(map(dataclasses.asdict, values)) for kind, values in each.items()}
            for model, each in large.items()
        },
    }
    return conclude(args, "recovery", facts, verdicts, text, **figures)


if __name__ == "__main__":
    run_main(main)
