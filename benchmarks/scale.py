"""Measure what many tasks cost before they train: preflight, rendezvous and launcher.

    # All parts with 16 to 1024 tasks, writes benchmarks/reports/scale.{md,json}.
    python benchmarks/scale.py
    # 16 tasks once, writes nothing.
    python benchmarks/scale.py --quick

All tasks run on this machine and train nothing. Those of a preflight, and the members of a
rendezvous, are threads of a few processes. Those of a launch are shells that write a heartbeat each
second.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from common.light_tasks import (
    HOST_TIMEOUT_S,
    MembersJob,
    PreflightJob,
    preflights,
    rendezvous_members,
    rendezvous_server,
)
from common.processes import Processes, ProcessFailed
from common.report import (
    add_options,
    add_parts,
    begin,
    conclude,
    fill_options,
    heading,
    positive,
    row,
    table,
    verdict,
)

from tfdist.cluster.addresses import free_ports

ROUNDS = 3
TASKS = (16, 64, 256, 1024)
ALL_PAIRS_UP_TO = 64  # tasks; 256 did not meet within 150 s
PROCESSES = 2  # of the light tasks, beside the one of the first task or of the server
BAR_TASKS, BAR_S = 256, 30.0
IDLE_S = 10.0
END_S = 60.0
PORT_TRIES = 5
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
POLL_S = 0.05
# A task that waits a second without starting a process, which would be most of its work.
TASK = """
exec 3<> <(:)
echo $EPOCHREALTIME > "$0/$TFDIST_TASK.part"; mv "$0/$TFDIST_TASK.part" "$0/$TFDIST_TASK"
while :; do
  beats=$((beats + 1))
  echo "running 0 $beats $beats $beats" > "$TFDIST_PROGRESS_FILE"
  read -rt 1 -u 3
done
"""

Figures = dict[str, float]


def measure_preflight(count: int, timeout: float, all_pairs: bool = False) -> Figures:
    """Return the figures of one preflight; threads and memory are those of the first task.

    If another program takes one of the ports meanwhile, it is repeated on others.
    """
    for _ in range(PORT_TRIES):
        try:
            return _measure_preflight(count, timeout, all_pairs)
        except ProcessFailed as failure:
            if "PortTaken" not in str(failure):
                raise
    raise ProcessFailed(f"preflight of {count} tasks: its ports were taken {PORT_TRIES} times")


def _measure_preflight(count: int, timeout: float, all_pairs: bool) -> Figures:
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
    shares = [(0,), *(tuple(range(1, count))[k::PROCESSES] for k in range(PROCESSES))]
    with tempfile.TemporaryDirectory() as logs:
        processes = Processes(f"preflight of {count} tasks", pathlib.Path(logs), timeout)
        try:
            connections = [
                processes.start(
                    str(k), preflights, PreflightJob(addresses, share, all_pairs, timeout)
                )
                for k, share in enumerate(shares)
            ]
            for connection in connections:
                connection.recv()
            started = time.time()
            processes.order(connections)
            figures = processes.answers(connections, "meet")
        finally:
            processes.end()
    first = next(each for each in figures if each["first"])
    return {
        "seconds": max(each["ended"] for each in figures) - started,
        "messages": sum(each["messages"] for each in figures),
        "threads": first["threads"],
        "memory_mib": first["memory_mib"],
        "cpu_s": sum(each["cpu_s"] for each in figures),
    }


def measure_rendezvous(count: int, timeout: float) -> Figures:
    """Return the figures of a rendezvous, whose threads and memory are those of its server."""
    with tempfile.TemporaryDirectory() as logs:
        processes = Processes(f"rendezvous of {count} hosts", pathlib.Path(logs), timeout)
        try:
            server = processes.start("server", rendezvous_server, count)
            ((address,),) = processes.answers([server], "start")
            members = [
                processes.start(
                    str(k),
                    rendezvous_members,
                    MembersJob(address, tuple(range(count))[k::PROCESSES], timeout),
                )
                for k in range(PROCESSES)
            ]
            for connection in members:
                connection.recv()

            def figures() -> Figures:
                processes.order([server])
                return processes.answers([server], "tell its figures")[0]

            def order(word: str, generation: int) -> tuple[float, int]:
                started = time.time()
                processes.order(members, word, generation)
                answers = processes.answers(members, word)
                seconds = max(each["ended"] for each in answers) - started
                return seconds, int(max(each["generation"] for each in answers))

            formed_s, _ = order("join", 0)
            formed = figures()
            time.sleep(IDLE_S)
            idle = figures()
            _, generation = order("", 0)
            formed_again_s, _ = order("fail", generation + 1)
        finally:
            processes.end()
    seconds = idle["time"] - formed["time"]
    return {
        "seconds": formed_s,
        "starts": generation + 1,
        "again_s": formed_again_s,
        "messages": formed["messages"],
        "messages_per_s": (idle["messages"] - formed["messages"]) / seconds,
        "cpu_percent": 100 * (idle["cpu_s"] - formed["cpu_s"]) / seconds,
        "threads": idle["threads"],
        "memory_mib": idle["memory_mib"],
    }


def measure_launch(count: int, timeout: float) -> Figures:
    """Return the figures of `tfdist launch` with light tasks, and of its process.

    Raises:
        ProcessFailed: The tasks did not start, or the launcher did not end, in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        ups = path / "up"
        ups.mkdir()
        command = [sys.executable, "-m", "tfdist", "launch", "--workers", str(count)]
        command += ["--show", "none", "--log-dir", str(path / "log")]
        command += ["--", "bash", "-c", TASK, str(ups)]
        started = time.time()
        with (path / "out").open("wb") as out:
            launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + timeout
            while sum(1 for up in os.scandir(ups) if "." not in up.name) < count:
                if launcher.poll() is not None or time.monotonic() > end:
                    raise ProcessFailed(
                        f"launch of {count} tasks: not all started\n"
                        + (path / "out").read_text(errors="replace")[-4000:]
                    )
                time.sleep(POLL_S)
            all_up = max(float(up.read_text()) for up in ups.iterdir()) - started
            before = _cpu_s(launcher.pid)
            begun = time.monotonic()
            time.sleep(IDLE_S)
            cpu = (_cpu_s(launcher.pid) - before) / (time.monotonic() - begun)
            status = _status(launcher.pid)
            interrupted = time.monotonic()
            launcher.send_signal(signal.SIGINT)
            try:
                launcher.wait(END_S)
            except subprocess.TimeoutExpired as error:
                raise ProcessFailed(f"launch of {count} tasks: it does not end") from error
            return {
                "seconds": all_up,
                "cpu_percent": 100 * cpu,
                "threads": int(status["Threads"]),
                "memory_mib": int(status["VmHWM"].split()[0]) / 1024,
                "end_s": time.monotonic() - interrupted,
            }
        finally:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()


def _cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def _status(pid: int) -> dict[str, str]:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


PARTS: dict[str, Callable[[int, float], Figures]] = {
    "preflight": measure_preflight,
    "preflight_all_pairs": lambda count, timeout: measure_preflight(count, timeout, True),
    "rendezvous": measure_rendezvous,
    "launch": measure_launch,
}


def measure(tasks: list[int], parts: list[str], rounds: int, timeout: float) -> dict:
    """Return the figures of all rounds, by part and number of tasks."""
    results: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for number in range(rounds):
        for part in parts:
            for count in tasks:
                if part == "preflight_all_pairs" and count > ALL_PAIRS_UP_TO:
                    continue
                figures = PARTS[part](count, timeout)
                results[part][str(count)].append(figures)
                text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
                print(f"round {number + 1} of {rounds}, {part}, {count} tasks: {text}", flush=True)
    return {part: dict(of_part) for part, of_part in results.items()}


def judge(results: dict) -> list[dict]:
    """Compare the median time of a preflight with the bar."""
    rounds = results.get("preflight", {}).get(str(BAR_TASKS), [])
    seconds = statistics.median(each["seconds"] for each in rounds) if rounds else None
    return [
        {
            "name": f"preflight of {BAR_TASKS} tasks, s",
            "measured": seconds,
            "bar": f"<= {BAR_S:g}",
            "passed": None if seconds is None else seconds <= BAR_S,
        }
    ]


ROWS = {
    "preflight": {
        "seconds until all have met": ("seconds", ".2f"),
        "messages": ("messages", ",.0f"),
        "CPU time of all tasks, s": ("cpu_s", ".1f"),
        "threads of the first task": ("threads", ".0f"),
        "memory of the first task, MiB": ("memory_mib", ".0f"),
    },
    "preflight_all_pairs": {
        "seconds until all have met": ("seconds", ".2f"),
        "messages": ("messages", ",.0f"),
        "CPU time of all tasks, s": ("cpu_s", ".1f"),
    },
    "rendezvous": {
        "seconds until all have their order to start": ("seconds", ".2f"),
        "starts until then (hosts too slow count as lost)": ("starts", ".0f"),
        "messages until then": ("messages", ",.0f"),
        "messages a second afterwards (heartbeats)": ("messages_per_s", ",.0f"),
        "CPU of the server afterwards, % of a core": ("cpu_percent", ".1f"),
        "threads of the server": ("threads", ".0f"),
        "memory of the server, MiB": ("memory_mib", ".0f"),
        "seconds from a failure to the next start": ("again_s", ".2f"),
    },
    "launch": {
        "seconds until all run": ("seconds", ".2f"),
        "CPU of the launcher afterwards, % of a core": ("cpu_percent", ".1f"),
        "threads of the launcher": ("threads", ".0f"),
        "memory of the launcher, MiB": ("memory_mib", ".0f"),
        "seconds from Ctrl-C to the end": ("end_s", ".2f"),
    },
}
TITLES = {
    "preflight": "Preflight",
    "preflight_all_pairs": "Preflight in which all pairs meet, as up to 32 tasks",
    "rendezvous": "Rendezvous of launchers, one task each",
    "launch": "Launcher of tasks on one machine",
}
NOTES = {
    "preflight": (
        "A message is a request or a reply; each two of them have a connection of their own."
    ),
    "preflight_all_pairs": (
        "The same tasks, beyond 32 for comparison only. 256 tasks did not meet within 150 s."
    ),
    "rendezvous": (
        f"Clients of a rendezvous, one for each host, that send heartbeats for `--host-timeout` "
        f"{HOST_TIMEOUT_S:g} s. A client that gets no time for that long counts as a lost host, "
        "and the others start again."
    ),
    "launch": (
        "`tfdist launch` of shells that write a heartbeat a second. Their memory is not counted."
    ),
}


def report(results: dict, verdicts: list[dict], facts: dict, notes: str) -> str:
    lines = heading("Many tasks: what meeting, rendezvous and launcher cost", facts)
    lines += [
        "All tasks run on this machine and train nothing, so these figures are tfdist's own part, "
        "without TensorFlow, and all tasks share the cores. Medians over the rounds, min..max in "
        "brackets.",
        "",
    ]
    if notes:
        lines += [notes, ""]
    lines += table("bar", "measured", "", "")
    for each in verdicts:
        measured = "-" if each["measured"] is None else f"{each['measured']:.3g}"
        lines += row(
            each["name"],
            measured,
            each["bar"],
            verdict(each["passed"], each["measured"] is not None),
        )
    for part, of_part in results.items():
        lines += ["", f"## {TITLES[part]}", "", NOTES[part], ""]
        lines += table("tasks", *of_part)
        for label, (name, form) in ROWS[part].items():
            cells = [_spread([each[name] for each in of_part[count]], form) for count in of_part]
            lines += row(label, *cells)
    return "\n".join(lines) + "\n"


def _spread(values: list[float], form: str) -> str:
    median = f"{statistics.median(values):{form}}"
    ends = [f"{min(values):{form}}", f"{max(values):{form}}"]
    return median if ends == [median, median] else f"{median} ({'..'.join(ends)})"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(
        parser,
        "--tasks",
        None,
        default=None,
        type=positive,
        help=f"numbers of tasks, default {' '.join(map(str, TASKS))}",
    )
    add_parts(parser, "--parts", PARTS)
    parser.add_argument(
        "--notes", default="", help="sentence for the report, such as what else was running"
    )
    add_options(parser, ROUNDS, "not used")
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS, quick_steps=1)
    args.tasks = args.tasks or ([TASKS[0]] if args.quick else list(TASKS))
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    facts = begin("scale.py", argv, args.rounds)
    try:
        results = measure(args.tasks, args.parts, args.rounds, args.timeout)
    except ProcessFailed as failure:
        print(f"scale: {failure}", file=sys.stderr)
        return 2
    verdicts = judge(results)
    text = report(results, verdicts, facts, args.notes)
    return conclude(args, "scale", facts, verdicts, text, notes=args.notes, **results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
