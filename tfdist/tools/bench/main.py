"""Entry point of `tfdist bench`: runs all setups in rounds and writes the report.

Training happens in the processes of each setup, never in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tfdist
from tfdist.runtime.command import COMMON_EXIT_CODES, Command, usage_errors
from tfdist.runtime.cpu_settings import uses_onednn
from tfdist.runtime.formatting import counted
from tfdist.runtime.installed_packages import version_of
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE
from tfdist.runtime.resource_limits import cores
from tfdist.tools.bench import rendering
from tfdist.tools.bench.flags import DESCRIPTION, USAGE, add_flags, check, make_jobs
from tfdist.tools.bench.groups import Group, GroupError
from tfdist.tools.bench.jobs import Case, Job
from tfdist.tools.bench.notes import notes
from tfdist.tools.bench.reason import Facts, reason
from tfdist.tools.bench.results import FILE, Bench, Setup, baseline, compared

if TYPE_CHECKING:
    from tfdist import config

PAGE = "bench.md"


def _run(flags: argparse.Namespace, words: list[str]) -> int:
    from tfdist.run import train_command

    settings = train_command.parse(words) if words else None
    with usage_errors():
        jobs = make_jobs(flags, words, settings)
        out = _directory(flags.out, settings.name if settings else "allreduce")
    return _bench(flags, settings, jobs, out, shlex.join(["tfdist", "bench", *flags.argv]))


def _bench(
    flags: argparse.Namespace, settings: config.Run | None, jobs: list[Job], out: Path, command: str
) -> int:
    name = settings.name if settings else "allreduce"
    begun = time.time()
    load = os.getloadavg()[0]
    with Rounds(jobs, flags.timeout, out / "logs") as rounds:
        rounds.prepare()
        for number in range(flags.rounds):
            if rounds.alive:
                rounds.measure(number, flags.rounds)
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(cores()),
        "memory": _memory(),
        "gpus": rounds.gpus,
        "load": load,
    }
    options = {
        "steps": jobs[0].steps,
        "warmup": flags.warmup,
        "rounds": flags.rounds,
        "threads": flags.threads,
        "parameters": rounds.parameters,
    }
    setups = compared(rounds.setups())
    if settings:
        facts = Facts(
            machine["cores"],
            rounds.on_cpu,
            flags.threads,
            settings.data.cache,
            settings.train.steps_per_execution,
            settings.strategy.communication,
            settings.sync.comm_dtype,
            settings.sync.kind,
            settings.parallel.zero,
            uses_onednn() is not False,
        )
        setups = tuple(
            dataclasses.replace(each, reason=reason(each, baseline(setups, each), facts))
            for each in setups
        )
    bench = Bench(
        flags.kind,
        name,
        command,
        begun,
        settings.to_dict() if settings else None,
        machine,
        _versions(),
        options,
        setups,
        notes(flags.kind, setups),
    )
    _write(out / FILE, json.dumps(bench.to_json(), indent=1) + "\n")
    _write(out / PAGE, rendering.markdown(bench))
    print(
        json.dumps(bench.to_json(), indent=1) if flags.json else f"\n{rendering.text(bench)}\n",
        flush=True,
    )
    print(f"written: {out / FILE}, {out / PAGE}", file=sys.stderr)
    return CONFIGURATION_CODE if rounds.misconfigured else int(any(setup.error for setup in setups))


class Rounds(contextlib.AbstractContextManager):
    """Process groups of all jobs, measured one at a time.

    The groups stay alive from the first round to the last.

    Args:
        jobs: Jobs to measure.
        timeout: Longest wait for a group, in seconds.
        logs: Directory for the output of groups that fail.
    """

    def __init__(self, jobs: Sequence[Job], timeout: float, logs: Path):
        self._stack = contextlib.ExitStack()
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-bench-"))
        self._jobs = [
            dataclasses.replace(job, directory=os.path.join(directory, job.title)) for job in jobs
        ]
        self._timeout = timeout
        self._logs = logs
        self._started: dict[Job, Group] = {}
        self._groups: dict[Job, Group] = {}  # groups that have not failed
        self._errors: dict[Job, GroupError] = {}
        self._measurements: dict[tuple[Job, int], list[list[dict[str, Any]]]] = {}
        self._times: dict[Job, int] = dict.fromkeys(self._jobs, 0)
        self._facts: dict[Job, dict[str, Any]] = {}

    def __exit__(self, *problem: Any) -> None:
        for group in self._groups.values():
            group.end()  # tell all groups first, so that they exit in parallel
        self._stack.__exit__(*problem)

    def prepare(self) -> None:
        """Start all groups one after another. Each compiles what it measures."""
        for job in self._jobs:
            begin = time.monotonic()
            with self._failing(job):
                group = self._stack.enter_context(Group(job, self._timeout))
                self._started[job] = group
                self._facts[job] = group.ready()[0]
                self._groups[job] = group
                _log(
                    f"{job.strategy}, {counted(job.replicas, 'replica')}: ready after "
                    f"{time.monotonic() - begin:.0f} s"
                )

    def measure(self, number: int, rounds: int) -> None:
        """Measure each case of each group once.

        Every second round runs in reverse order, so that a drift in the machine's speed
        affects all setups alike.

        Args:
            number: Index of the round.
            rounds: Number of rounds, for messages.
        """
        begin = time.monotonic()
        order = [(job, case) for job in self._jobs for case in range(len(job.cases))]
        for job, case in order if number % 2 == 0 else reversed(order):
            if job not in self._groups:
                continue
            with self._failing(job):
                self._measurements.setdefault((job, case), []).append(
                    self._groups[job].measure(case, self._times[job])
                )
                self._times[job] += 1
        _log(f"round {number + 1} of {rounds}: {time.monotonic() - begin:.0f} s")

    def setups(self) -> list[Setup]:
        """Return the results of each case of each job."""
        return [
            self._setup(job, number, case)
            for job in self._jobs
            for number, case in enumerate(job.cases)
        ]

    @property
    def alive(self) -> bool:
        """Return whether a group is left that has not failed."""
        return bool(self._groups)

    @property
    def misconfigured(self) -> bool:
        """Return whether the first group found an error in the config.

        The first group is the baseline, if there is one.
        """
        error = self._errors.get(self._jobs[0])
        return error is not None and error.code == CONFIGURATION_CODE

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model; 0 if no model was built."""
        return max((facts["parameters"] for facts in self._facts.values()), default=0)

    @property
    def gpus(self) -> list[str]:
        """Return the names of the GPUs that TensorFlow sees; empty if replicas use CPUs."""
        return next((facts["gpus"] for facts in self._facts.values()), [])

    @property
    def on_cpu(self) -> bool:
        """Return whether replicas compute on CPUs."""
        return not self.gpus

    def _setup(self, job: Job, number: int, case: Case) -> Setup:
        setup = Setup(
            job.strategy, job.replicas, job.workers, case.modes, case.global_batch, case.bytes
        )
        if job in self._errors:
            return dataclasses.replace(setup, error=str(self._errors[job]))
        return measured(setup, self._measurements[job, number])

    @contextlib.contextmanager
    def _failing(self, job: Job):
        """Record and report a `GroupError`, and stop the group that raised it.

        A stopped group takes no CPU time from the other groups, which continue.
        """
        try:
            yield
        except GroupError as error:
            self._errors[job] = error
            self._groups.pop(job, None)
            _log(f"{job.strategy}, {counted(job.replicas, 'replica')}: FAILED: {error}")
            self._started[job].close()
            self._keep(job)

    def _keep(self, job: Job) -> None:
        self._logs.mkdir(exist_ok=True)
        for path in [Path(job.directory) / "log", *Path(job.directory).glob("launch/*.log")]:
            shutil.copyfile(path, self._logs / f"{job.title}-{path.stem}.log")


def measured(setup: Setup, rounds: Sequence[Sequence[dict[str, Any]]]) -> Setup:
    """Fill in a setup with the measurements of its processes.

    Args:
        setup: Setup to fill in.
        rounds: Measurements of each worker in each round: "steps", "examples" and "seconds", and in
            training also "step_breakdown" and "bytes".

    Returns:
        The setup. The slowest worker defines the time of a round. The step breakdown is taken from
        the median round, so that its parts add up.
    """
    last = [max(workers, key=lambda measurement: measurement["seconds"]) for workers in rounds]
    seconds = tuple(worker["seconds"] / worker["steps"] for worker in last)
    median = seconds.index(statistics.median_low(seconds))
    return dataclasses.replace(
        setup,
        bytes=setup.bytes or last[median].get("bytes", 0),
        seconds=seconds,
        rates=tuple(worker["examples"] / worker["seconds"] for worker in last)
        if setup.global_batch
        else (),
        step_breakdown={
            rank: worker["step_breakdown"]
            for rank, worker in enumerate(rounds[median])
            if worker.get("step_breakdown")
        },
    )


def _directory(requested: str | None, name: str) -> Path:
    """Create and return the directory of the report.

    It is `requested`, or else the first of runs/bench-NAME, runs/bench-NAME-2 and so on that does
    not exist.
    """
    if requested is not None:
        path = Path(requested)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out: expected a directory, received {requested}, which is a file")
    else:
        number = 1
        while (
            path := Path("runs") / f"bench-{name}{'' if number == 1 else f'-{number}'}"
        ).exists():
            number += 1
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _versions() -> dict[str, str]:
    versions = {name: str(version_of(name)) for name in ("tensorflow", "keras")}
    return {"tfdist": tfdist.__version__, "python": platform.python_version(), **versions}


main = Command(
    name="tfdist bench",
    usage=USAGE,
    description=DESCRIPTION,
    exit_codes={
        **COMMON_EXIT_CODES,
        0: "all setups were measured",
        1: "a setup failed; the error names it, and the report shows the others",
        CONFIGURATION_CODE: "the config is wrong",
    },
    run=_run,
    add_flags=add_flags,
    check=check,
    takes_config=True,
)
