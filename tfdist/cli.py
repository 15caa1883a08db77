"""Entry point of `tfdist COMMAND`: imports only the module of the command."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence

import tfdist
from tfdist.runtime.command import Group, Subcommand, refuse
from tfdist.runtime.completion import script

COMMANDS = {
    "new": Subcommand("tfdist.tools.new:main", "write a small project that trains at once"),
    "launch": Subcommand(
        "tfdist.launch.main:main",
        "run a script as a group of processes: workers, chief, evaluator, parameter servers",
    ),
    "agent": Subcommand(
        "tfdist.launch.engines.agent_command:main",
        "supervise one task that srun, mpirun or Kubernetes has started",
    ),
    "submit": Subcommand(
        "tfdist.launch.submit:main", "give a launch to a scheduler (Slurm or Kubernetes), as a job"
    ),
    "jobs": Subcommand("tfdist.launch.job_commands:jobs", "list the submitted jobs"),
    "logs": Subcommand("tfdist.launch.job_commands:logs", "show the output of a submitted job"),
    "cancel": Subcommand("tfdist.launch.job_commands:cancel", "end a submitted job"),
    "train": Subcommand(
        "tfdist.run.train_command:main",
        "train what a config file describes: tfdist train --config=FILE.py",
    ),
    "data": Subcommand(
        "tfdist.tools.data:main", "list, show and copy data sets; audit a data pipeline"
    ),
    "check": Subcommand(
        "tfdist.tools.check.main:main",
        "say which traps a Keras script has on the way to several replicas, by line",
    ),
    "doctor": Subcommand(
        "tfdist.tools.doctor.main:main", "check this host, a cluster or a run before it starts"
    ),
    "verify": Subcommand(
        "tfdist.tools.verify.main:main",
        "check that several replicas compute the same as one, step by step",
    ),
    "plan": Subcommand(
        "tfdist.tools.plan:main",
        "predict the memory and traffic of a run on N devices, and recommend a strategy",
    ),
    "bench": Subcommand(
        "tfdist.tools.bench.main:main",
        "measure how training, inference or all-reduces scale with more replicas",
    ),
    "report": Subcommand(
        "tfdist.tools.report.main:main", "write an HTML file about runs or a benchmark"
    ),
    "goodput": Subcommand(
        "tfdist.tools.goodput_command:main", "say which share of a job's time was training"
    ),
    "chaos": Subcommand(
        "tfdist.tools.chaos:main", "report how a launch recovered from injected faults"
    ),
}

_GROUP = Group(
    "tfdist",
    "Distributed training for Keras 3 on TensorFlow. `tfdist --version` prints the version,\n"
    "and `tfdist --completion bash|zsh|fish` a script that completes words in a shell.",
    COMMANDS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `tfdist` command.

    Args:
        argv: Words after `tfdist`; default: those of this process.

    Returns:
        The exit code: 0 for success, 2 for a mistake on the command line, else the value that the
        command returned, or 141 if nobody reads the rest of its output (`tfdist ... | head`).

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        tfdist ...
        0
    """
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # of --help
            _flush()
            raise
        _flush()
        return code
    except BrokenPipeError:
        if sys.stdout is None or not _is_unread(sys.stdout.fileno()):  # another pipe is broken
            raise
        # Python flushes what is left once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print("tfdist", tfdist.__version__)
        return 0
    if words[:1] == ["--completion"]:
        try:
            print(script(" ".join(words[1:]), _GROUP), end="")
        except ValueError as error:
            return refuse("tfdist", error)
        return 0
    return _GROUP(words)


def _flush() -> None:
    if sys.stdout is not None:  # it was not closed from the beginning
        sys.stdout.flush()


def _is_unread(file: int) -> bool:
    """Return whether a file descriptor leads to a pipe or socket whose other end is closed."""
    poll = select.poll()
    poll.register(file, 0)
    return bool(poll.poll(0))
