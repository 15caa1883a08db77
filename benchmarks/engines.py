"""Measure how fast each engine starts a training, and how fast it goes on after a killed worker.

    # All engines that are installed, writes benchmarks/reports/engines.{md,json}.
    python benchmarks/engines.py
    # One round of a launch on this machine, writes nothing.
    python benchmarks/engines.py --quick

Engines are started as for tests/engines, all on this machine, and take turns in each round. Every
training has two workers. Once both have made 15 steps, worker:1 is killed by SIGKILL from outside.
To add an engine, add an entry to `ENGINES`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from common.engines_worker import EVENTS, SAVE_FREQ, STEP_S
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
)

from tfdist.runtime.launch_protocol import read_journal

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "common" / "engines_worker.py"
ROUNDS = 3
WORKERS = 2
KILL_AT = 15  # steps
POLL_S = 0.02
END_S = 60.0
LOGS = "logs"
READY = ("standby", "ready")  # in the journal
TFDIST = (sys.executable, "-m", "tfdist")
VARIABLES = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
PASSED_ON = [f"--env={name}={value}" for name, value in VARIABLES.items()]


@dataclasses.dataclass(frozen=True)
class Start:
    """Describe how to start a training, and how to end it.

    Args:
        command: Command without the words of the script.
        environ: Its environment.
        end: Command that ends the training; empty: SIGTERM to the first one does.
    """

    command: list[str]
    environ: dict[str, str]
    end: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Engine:
    """Describe an engine.

    Args:
        title: Name in the report.
        start: Returns how to start a training, given what the module's `running()` yields.
        module: Module of tests.engines with `missing()` and `running()`; "": there is none.
        programs: Programs that it needs, with the packages of apt that have them.
        restarts: Whether it starts a training again after a failure.
        standbys: Number of standby processes that are ready before the worker is killed.
    """

    title: str
    start: Callable[[Any], Start]
    module: str = ""
    programs: dict[str, str] = dataclasses.field(default_factory=dict)
    restarts: bool = True
    standbys: int = 0

    def missing(self) -> str | None:
        """Return why the engine cannot run here."""
        for program, package in self.programs.items():
            if shutil.which(program) is None:
                return f"{program} is not installed (apt-get install {package})"
        if not self.module:
            return None
        try:
            return self.fixture().missing()
        except ModuleNotFoundError as error:
            return f"there is no {error.name}"

    def fixture(self) -> Any:
        return importlib.import_module(f"tests.engines.{self.module}")


def local_environ() -> dict[str, str]:
    from tests.processes import lean

    return lean({**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT)})


def launch(*flags: str) -> list[str]:
    return [*TFDIST, "launch", f"--workers={WORKERS}", "--restarts=9", *flags, "--"]


def start_local(_: Any, *flags: str) -> Start:
    return Start(launch(*flags), local_environ())


def start_ssh(server: Any) -> Start:
    hosts = importlib.import_module("tests.engines.ssh_server").HOSTS
    flags = ["--on=ssh", f"--hosts={','.join(hosts)}", f"--ssh-command={server.command}"]
    return Start(launch(*flags, f"--remote-python={server.python}", *PASSED_ON), local_environ())


def start_slurm(cluster: Any) -> Start:
    return Start(launch("--on=slurm", f"--nodes={WORKERS}", *PASSED_ON), cluster.environ)


def start_mpirun(_: Any) -> Start:
    environ = {
        **local_environ(),
        # In a container one is root, and has fewer cores than processes.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    return Start(["mpirun", "-n", str(WORKERS), *TFDIST, "agent", "--"], environ)


def start_ray(cluster: Any) -> Start:
    environ = {**cluster.environ, "RAY_ADDRESS": cluster.address}
    return Start(launch("--on=ray", *PASSED_ON), environ)


def start_kubernetes(cluster: Any) -> Start:
    image = importlib.import_module("tests.engines.kubernetes_cluster").IMAGE
    words = ["--on=kubernetes", "--kind=job", f"--image={image}", "--job-name=bench"]
    words += [f"--workers={WORKERS}", "--restarts=9", *PASSED_ON]
    return Start(
        [*TFDIST, "submit", *words, "--"],
        cluster.environ,
        [*TFDIST, "cancel", "job/bench", "--on=kubernetes"],
    )


ENGINES = {
    "local": Engine(
        "this machine, with standby processes",
        lambda none: start_local(none, f"--standby={WORKERS}", f"--log-dir={LOGS}"),
        standbys=WORKERS,
    ),
    "local_fresh": Engine(
        "this machine, --standby 0", lambda none: start_local(none, "--standby=0")
    ),
    "ssh": Engine("ssh", start_ssh, "ssh_server"),
    "slurm": Engine("Slurm", start_slurm, "slurm_cluster"),
    "mpirun": Engine(
        "mpirun, tfdist agent", start_mpirun, programs={"mpirun": "openmpi-bin"}, restarts=False
    ),
    "kubernetes": Engine("Kubernetes, indexed Job", start_kubernetes, "kubernetes_cluster"),
    "ray": Engine("Ray", start_ray, "ray_cluster"),
}
COLUMNS = {
    "launched": "command to both scripts' start",
    "stepped": "command to first step",
    "relaunched": "kill to both scripts' start",
    "recovered": "kill to next step",
}
Figures = dict[str, float]


class Training:
    """Run one training, whose processes note what they do in a file.

    Args:
        start: How to start and end it.
        directory: For its file, its snapshots and its output.
        timeout: Seconds that any wait may take.
    """

    def __init__(self, start: Start, directory: pathlib.Path, timeout: float):
        self._start = start
        self._events = directory / EVENTS
        self._out = directory / "out"
        self._directory = directory
        self._timeout = timeout
        self.began = time.time()
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                [*start.command, str(SCRIPT), str(directory)],
                cwd=directory,
                env=start.environ,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self, event: str, least: int = 0, after: float = 0.0, but: set = frozenset()) -> float:
        """Return when the last of all workers first noted an event.

        Args:
            event: Event of the script.
            least: Number of the step, at the least.
            after: Time after which it must be.
            but: Processes that do not count.
        """
        end = time.monotonic() + self._timeout
        while True:
            times: dict[str, float] = {}
            for line in self.lines():
                if (
                    line["event"] == event
                    and line.get("step", 0) >= least
                    and line["time"] > after
                    and line["process"] not in but
                ):
                    times.setdefault(line["task"], line["time"])
            if len(times) == WORKERS:
                return max(times.values())
            code = self._process.poll()
            if time.monotonic() > end or (code is not None and (code or not self._start.end)):
                raise ProcessFailed(
                    f"waited for {event!r} of {WORKERS} workers; exit code of the command: {code}\n"
                    + self._out.read_text(errors="replace")[-4000:]
                )
            time.sleep(POLL_S)

    def wait_for_standbys(self, count: int) -> None:
        """Wait until standby processes are ready."""
        end = time.monotonic() + self._timeout
        while True:
            lines = read_journal(str(self._directory / LOGS)) if count else []
            ready = [line for line in lines if (line["event"], line.get("what")) == READY]
            if len(ready) >= count:
                return
            if time.monotonic() > end:
                raise ProcessFailed(f"only {len(ready)} of {count} standby processes are ready")
            time.sleep(POLL_S)

    def lines(self) -> list[dict]:
        """Return what the workers have noted."""
        if not self._events.exists():
            return []
        text = self._events.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def kill(self, task: str) -> tuple[float, set]:
        """Kill a worker; return when, and all processes that there were."""
        lines = self.lines()
        found = next(line for line in reversed(lines) if line["task"] == task)
        os.kill(own_pid(found["namespace"], found["pid"]), signal.SIGKILL)
        return time.time(), {line["process"] for line in lines}

    def end(self) -> None:
        """End the training."""
        if self._start.end:
            subprocess.run(
                self._start.end, env=self._start.environ, cwd=self._directory, timeout=END_S
            )
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


def own_pid(namespace: int, pid: int) -> int:
    """Return this process's id of a process, whose own namespace may be another."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(entry / "ns" / "pid").st_ino == namespace:
                status = (entry / "status").read_text()
                ids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                if int(ids.split()[-1]) == pid:
                    return int(entry.name)
    raise ProcessFailed(f"process {pid} of namespace {namespace} is gone")


def measure(engine: Engine, timeout: float) -> Figures:
    """Return the figures of one training."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(engine.fixture().running()) if engine.module else None
        home = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="engines-", ignore_cleanup_errors=True)
        )
        training = Training(engine.start(cluster), pathlib.Path(home), timeout)
        stack.callback(training.end)
        began = training.began
        figures = {
            "launched": training.wait("started") - began,
            "stepped": training.wait("step") - began,
        }
        training.wait("step", KILL_AT)
        if engine.restarts:
            training.wait_for_standbys(engine.standbys)
            killed, former = training.kill("worker:1")
            figures |= {
                "relaunched": training.wait("started", after=killed, but=former) - killed,
                "recovered": training.wait("step", after=killed, but=former) - killed,
            }
        return figures


def run(names: list[str], rounds: int, timeout: float) -> tuple[dict, dict]:
    """Return the figures of all rounds by engine, and why engines did not run."""
    not_run = {name: reason for name in names if (reason := ENGINES[name].missing())}
    results: dict[str, list[Figures]] = collections.defaultdict(list)
    ready = [name for name in names if name not in not_run]
    for number in range(rounds):
        for name in ready if number % 2 == 0 else reversed(ready):
            if name in not_run:
                continue
            load = os.getloadavg()[0]
            try:
                results[name].append({**measure(ENGINES[name], timeout), "load": load})
            except (ProcessFailed, AssertionError, subprocess.SubprocessError) as failure:
                not_run[name] = f"failed in round {number + 1}"
                print(f"engines: {name}: {failure}", file=sys.stderr, flush=True)
                continue
            text = ", ".join(f"{key} {value:.1f}" for key, value in results[name][-1].items())
            print(f"round {number + 1} of {rounds}, {name}: {text}", file=sys.stderr, flush=True)
    return dict(results), not_run


def report(names: list[str], results: dict, not_run: dict, facts: dict, notes: str) -> str:
    """Return the report as Markdown."""
    lines = heading(
        "Engines: seconds to the first step, and from a killed worker to the next", facts
    )
    lines += [
        f"Two workers of a small CNN, whose steps take {STEP_S:g} s by a sleep, with a snapshot "
        f"every {SAVE_FREQ} steps. All engines run on this machine, so the figures show what an "
        "engine adds to the start of TensorFlow, and not what a network or an image costs. "
        f"worker:1 is killed after {KILL_AT} steps, and once standby processes are ready. Seconds "
        "until the later one of the two workers; medians over the rounds, min..max in brackets.",
        "",
    ]
    if notes:
        lines += [notes, ""]
    lines += table("engine", *COLUMNS.values(), "load before")
    for name in names:
        figures = results.get(name, [])
        if not figures:
            cells = ["not run"] * len(COLUMNS) + [""]
        else:
            cells = [
                spread([each[key] for each in figures], ".1f") if key in figures[0] else "-"
                for key in (*COLUMNS, "load")
            ]
        lines += row(ENGINES[name].title, *cells)
    lines += [
        "",
        "`mpirun` ends at the first failure, and starts nothing again. Kubernetes waits 10 s and "
        "more before it replaces a failed pod; the kubelet of the tests makes it skip that.",
    ]
    if not_run:
        reasons = [f"- {ENGINES[name].title}: {reason}" for name, reason in not_run.items()]
        lines += ["", "Not run, or not in all rounds:", "", *reasons]
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_parts(parser, "--engines", ENGINES, default=None)
    parser.add_argument(
        "--notes", default="", help="sentence for the report, such as what else was running"
    )
    add_options(parser, ROUNDS)
    args = parser.parse_args(argv)
    fill_options(args, ROUNDS)
    args.engines = args.engines or (["local_fresh"] if args.quick else list(ENGINES))
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    sys.path.insert(0, str(ROOT))  # for the fixtures of the tests
    facts = begin("engines.py", argv, args.rounds)
    results, not_run = run(args.engines, args.rounds, args.timeout)
    failed = any(reason.startswith("failed") for reason in not_run.values())
    text = report(args.engines, results, not_run, facts, args.notes)
    code = conclude(
        args, "engines", facts, [], text, notes=args.notes, seconds=results, not_run=not_run
    )
    return code or int(failed)


if __name__ == "__main__":
    run_main(main)
