"""Try what a worker can keep when the other one of its cluster is killed.

    # All ways, writes benchmarks/reports/survivors.{md,json}.
    python benchmarks/survivors.py
    # Two of the ways, writes nothing.
    python benchmarks/survivors.py --quick

Two processes train under `tf.distribute.MultiWorkerMirroredStrategy`, without tfdist. One kills
itself by SIGKILL, and the other one tries a way to go on. Each way has processes of its own. The
last way uses the Python implementation of tfdist's native collectives instead of a cluster of
TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from common.processes import ProcessFailed, run_main
from common.report import (
    add_options,
    add_parts,
    begin,
    conclude,
    fill_options,
    heading,
    table,
    verdict,
)

from tfdist.cluster.addresses import free_ports

ROUNDS = 3
STEPS = 3
WAYS = {
    "wait": "wait in the collective",
    "between steps": "the same, if the worker is killed between two steps",
    "first lost": "the same, if the first worker is killed, which leads the cluster",
    "new group": "then a collective with another group key",
    "reset": "reset TensorFlow's context (a private function)",
    "same ports": "reset, and form a new cluster on the same ports",
    "new ports": "reset, and form a new cluster on new ports",
    "native": "native collectives in Python, without a cluster of TensorFlow",
}
WITH_A_NEW_WORKER = ("same ports", "new ports", "native")
QUICK = ("reset", "native")
WORKER = pathlib.Path(__file__).parent / "common" / "survivors_worker.py"
Facts = dict[str, tuple[str, float]]  # outcome and seconds since the loss, by name


def run(way: str, steps: int, timeout: float) -> Facts:
    """Return what the survivor noted.

    Raises:
        ProcessFailed: If it noted nothing after the loss.
    """
    lost = 0 if way == "first lost" else 1
    roles = {"survivor": 1 - lost, "lost": lost}
    if way in WITH_A_NEW_WORKER:
        roles["new"] = lost
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    with tempfile.TemporaryDirectory(prefix="survivors-") as directory:
        path = pathlib.Path(directory)
        a, b, c, d = free_ports(4)
        ports = f"{a},{b}", f"{c},{d}"
        processes = {}
        try:
            for role, rank in roles.items():
                words = [way, role, str(rank), directory, *ports, str(steps)]
                with (path / f"{role}.log").open("w") as log:
                    processes[role] = subprocess.Popen(
                        [sys.executable, str(WORKER), *words],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environ,
                    )
            try:
                code = processes["survivor"].wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
        facts: Facts = {}
        if (path / "facts.jsonl").exists():
            for line in (path / "facts.jsonl").read_text().splitlines():
                name, outcome, seconds = json.loads(line)
                facts[name] = normalized(outcome), seconds
        if not facts:
            logs = [f"--- {role}\n{(path / f'{role}.log').read_text()[-3000:]}" for role in roles]
            raise ProcessFailed("\n".join([f"{way}: the survivor noted nothing", *logs]))
        if code != 0:
            end = f"did not end in {timeout:g} s" if code is None else f"ended with code {code}"
            facts["the process"] = (
                end,
                timeout if code is None else max(s for _, s in facts.values()),
            )
        return facts


def normalized(outcome: str) -> str:
    """Return an outcome without what differs between runs."""
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", outcome)


def outcomes(rounds: list[Facts], name: str) -> str:
    """Return the outcomes of a fact; those of several rounds if they differ."""
    return " / ".join(dict.fromkeys(facts[name][0] for facts in rounds if name in facts))


def goes_on(rounds: list[Facts]) -> bool:
    """Return whether training went on in all rounds, with equal results, and the process lived."""
    return all(
        facts.get("weights and momentum at the end", ("",))[0].startswith("those")
        and facts["the process"][0] == "lives"
        for facts in rounds
    )


def keeps_graph(rounds: list[Facts]) -> bool:
    """Return whether training went on with the step that was traced before."""
    return goes_on(rounds) and outcomes(rounds, "the step was traced again") == "0 times"


def judge(results: dict[str, list[Facts]]) -> list[dict]:
    """Compare the ways that lead on with those that docs/faults.md names."""
    kept = [way for way in WAYS if way in results and keeps_graph(results[way])]
    led_on = [way for way in WAYS if way in results and goes_on(results[way])]
    return [
        {
            "name": name,
            "bar": ", ".join(way for way in bar if way in results) or "none",
            "found": ", ".join(found) or "none",
            "passed": found == [way for way in bar if way in results],
        }
        for name, found, bar in (
            ("ways in which training goes on", led_on, ["new ports", "native"]),
            ("of these with the traced graph", kept, ["native"]),
        )
    ]


def report(results: dict[str, list[Facts]], verdicts: list[dict], facts: dict) -> str:
    """Return the report as Markdown."""
    lines = heading("What a worker keeps when the other one is killed", facts)
    lines += [
        "Two workers train under `tf.distribute.MultiWorkerMirroredStrategy`, one kills itself by",
        "SIGKILL, and the survivor tries a way to go on. Where a new process takes the place of",
        "the lost one, it has imported TensorFlow before. Training goes on if weights and momentum",
        "are in the end those of an undisturbed run, bit for bit, and the process lives 15 s more.",
        "Seconds are those since the loss, medians of all rounds.",
        "",
        *table("", "expected", "found", ""),
    ]
    for each in verdicts:
        cells = each["name"], each["bar"], each["found"], verdict(each["passed"], True)
        lines.append(f"| {' | '.join(cells)} |")
    for way, rounds in results.items():
        lines += ["", f"## `{way}`: {WAYS[way]}", "", "| | outcome | seconds |", "|---|---|--:|"]
        for name in dict.fromkeys(name for each in rounds for name in each):
            seconds = statistics.median(each[name][1] for each in rounds if name in each)
            text = outcomes(rounds, name).replace("|", "\\|")
            lines.append(f"| {name} | {text} | {seconds:.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Run the benchmark, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--ways", WAYS, default=None)
    add_options(parser, ROUNDS, f"steps before the loss, and after it, default {STEPS}")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=STEPS)
    facts = begin("survivors.py", argv, args.rounds)
    results: dict[str, list[Facts]] = {}
    for number in range(args.rounds):
        for way in args.ways or (QUICK if args.quick else WAYS):
            found = run(way, args.steps or STEPS, args.timeout)
            results.setdefault(way, []).append(found)
            print(f"round {number + 1} of {args.rounds}: {way}", file=sys.stderr, flush=True)
    verdicts = judge(results)
    text = report(results, verdicts, facts)
    return conclude(args, "survivors", facts, verdicts, text, facts_by_way=results)


if __name__ == "__main__":
    run_main(main)
