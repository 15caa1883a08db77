"""Slurm as a scheduler: submits batch scripts, and follows the jobs."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.launch.engines import slurm_commands, slurm_job, slurm_launch
from tfdist.launch.engines.fleet import NoRoom
from tfdist.launch.engines.schedulers import JobLine
from tfdist.launch.engines.slurm_script import batch_script

COMMENT = "tfdist"  # marks the jobs of `tfdist submit`
READ_S = 0.5  # interval at which the output is read
ASK_S = 5.0  # interval at which Slurm is asked for the state
JOB = re.compile(r"\d+(_\d+)?")

is_installed = slurm_commands.is_installed


def manifest(flags: argparse.Namespace, launch_words: Sequence[str], command: Sequence[str]) -> str:
    """See `Scheduler.manifest`."""
    options = [f"--comment={COMMENT}"]
    if flags.array:
        options.append(f"--array={flags.array}")
    options += slurm_launch.request(flags, name=flags.job_name)
    # The job has the options of its submission, whatever a config file says later.
    launch = [sys.executable, "-m", "tfdist", "launch", "--on", "slurm", "--config=none"]
    return batch_script(options, [*launch, *launch_words, "--", *command], setup=flags.setup)


def submit(flags: argparse.Namespace, manifest: str) -> str:
    """See `Scheduler.submit`."""
    slurm_commands.check_installed()
    try:
        result = subprocess.run(
            ["sbatch", "--parsable"],
            input=manifest,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=slurm_commands.COMMAND_S,
        )
    except FileNotFoundError as error:
        raise ValueError("--on slurm: `sbatch` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise NoRoom("Slurm: `sbatch` did not answer; look at `scontrol ping`") from error
    if result.returncode:
        raise slurm_commands.refusal("sbatch", result.stderr or result.stdout)
    return result.stdout.strip().partition(";")[0]


def jobs() -> list[JobLine]:
    """See `Scheduler.jobs`."""
    text = slurm_commands.run(
        "squeue", "--noheader", f"--user={os.geteuid()}", "--format=%i\t%T\t%j\t%M\t%R\t%k"
    )
    # Only the first component of a heterogeneous job has the comment. Slurm calls it 17+0.
    lines = [line.replace("+0\t", "\t", 1).split("\t") for line in text.splitlines()]
    return [JobLine(*line[:5]) for line in lines if len(line) == 6 and line[5] == COMMENT]


def logs(job: str, follow: bool, show: Callable[[str], Any], tell: Callable[[str], Any]) -> None:
    """See `Scheduler.logs`."""
    _check(job)
    path = ""
    state = ""
    position = 0
    asked = -ASK_S
    while True:
        if time.monotonic() - asked >= ASK_S:
            asked = time.monotonic()
            before = state
            path, state = _output_of(job)
            if not path:
                raise ValueError(f"job {job} has no output file: it runs no batch script")
            if state != before and not os.path.exists(path):
                tell(f"job {job} has written nothing yet: {state}")
        position += _show_from(path, position, show)
        is_over = state.partition(" ")[0] in slurm_job.FINAL_STATES
        if is_over or not follow:
            if not os.path.exists(path) and not follow and not is_over:
                raise NoRoom(f"job {job} has no output yet ({state}); add --follow to wait for it")
            return
        time.sleep(READ_S)


def cancel(job: str) -> None:
    """See `Scheduler.cancel`."""
    _check(job)
    _, state = _output_of(job)
    if state.partition(" ")[0] in slurm_job.FINAL_STATES:
        raise ValueError(f"job {job} is over already: {state}")
    slurm_commands.run("scancel", job)


def _check(job: str) -> None:
    if not JOB.fullmatch(job):
        raise ValueError(
            f"JOB: expected the number of a job such as 17, or of a task of an array such as 17_3, "
            f"received {job!r}; `tfdist jobs` lists your jobs"
        )


def _output_of(job: str) -> tuple[str, str]:
    """Return the output file of a job, and its state in words."""
    found = slurm_job.find(job)
    words = found.state if found.reason == "None" else f"{found.state} ({found.reason})"
    return found.output, words


def _show_from(path: str, position: int, show: Callable[[str], Any]) -> int:
    """Show what a file has from a position on; return the number of bytes."""
    try:
        with open(path, "rb") as file:
            file.seek(position)
            data = file.read()
    except FileNotFoundError:
        return 0
    except PermissionError as error:
        raise ValueError(f"{path}: {error.strerror}: the job belongs to another user") from error
    if data:
        show(data.decode("utf-8", "replace"))
    return len(data)
