"""Command-line flags of `tfdist doctor`: definition and validation."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from tfdist.config import packaged
from tfdist.runtime.cli_arguments import config_files, real, whole

# Seconds to wait for the other hosts, alone and with --together, and seconds that --serve serves.
ASK_S = 30.0
TOGETHER_S = 300.0
SERVE_S = 600.0

USAGE = "tfdist doctor [FLAGS] [--config=FILE [--config.SECTION.KEY=VALUE ...]]"
DESCRIPTION = """\
Checks a host, a cluster and a run before training starts.

  check this host, or this host and a run:
  tfdist doctor
  tfdist doctor --config=configs/digits.py --workers 2

  check a cluster: serve on all hosts but one, then ask them from that one:
  tfdist doctor --cluster cluster.yaml --directory /shared/runs --serve
  tfdist doctor --cluster cluster.yaml --directory /shared/runs

  check a cluster from all hosts at once, and start the training if no check fails:
  tfdist launch --cluster cluster.yaml --check -- train.py

Each check passes, warns or fails, and names a remedy.
"""


def check(flags: argparse.Namespace, words: Sequence[str]) -> None:
    """Check the combination of the flags, and set defaults that depend on several of them.

    Args:
        flags: Flags of the command.
        words: Config arguments.

    Raises:
        ValueError: If flags contradict each other. The message names the flag, the expected and the
            received value.
    """
    _check_config(words)
    if flags.cluster is None:
        for name in ("task", "serve", "together"):
            if getattr(flags, name):
                raise ValueError(f"--{name}: expected together with --cluster FILE, received alone")
        if flags.timeout is not None:
            raise ValueError(
                "--timeout: expected together with --cluster FILE, received alone; it limits "
                "the wait for the hosts of the cluster"
            )
    elif not os.path.isfile(flags.cluster):
        raise ValueError(
            f"--cluster {flags.cluster}: expected a file, but there is no such file in "
            f"{os.getcwd()}"
        )
    if flags.serve and flags.together:
        raise ValueError(
            "--serve: expected without --together, with which each host serves too; received both"
        )
    if flags.serve and flags.json:
        raise ValueError(
            "--json: expected without --serve, which prints lines while it runs; received both"
        )
    flags.timeout = flags.timeout or (
        SERVE_S if flags.serve else TOGETHER_S if flags.together else ASK_S
    )
    flags.directory = flags.directory or []


def _check_config(words: Sequence[str]) -> None:
    files = config_files(words)
    if words and len(files) != 1:
        raise ValueError(
            "--config: expected one config file, such as --config=configs/digits.py; "
            f"received {len(files)}"
        )
    for file in files:
        packaged.find(file.partition(":")[0])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command to a parser."""
    add = parser.add_argument
    seconds = real("seconds above 0", lambda value: 0 < value < 1e6)
    add("--cluster", metavar="FILE", help="YAML or JSON file with the addresses of each job")
    add(
        "--task",
        metavar="worker:1",
        help="task of this host (all tasks with an address of this host)",
    )
    add(
        "--workers",
        type=whole(1),
        metavar="N",
        help="number of tasks that will run on this host (1, or those of the cluster)",
    )
    add(
        "--directory",
        nargs="+",
        action="extend",
        metavar="DIR",
        help="directories that training writes to and that all hosts share (those of the config)",
    )
    add(
        "--serve",
        action="store_true",
        help="answer the doctors of other hosts until --timeout or Ctrl-C",
    )
    add(
        "--together",
        action="store_true",
        help="serve and ask, and wait until all other hosts have done so too",
    )
    add(
        "--timeout",
        type=seconds,
        metavar="S",
        help=f"seconds to wait for other hosts ({ASK_S:g}; with --together {TOGETHER_S:g}), or to "
        f"serve ({SERVE_S:g})",
    )
    add(
        "--quick",
        action="store_true",
        help="skip the checks that import TensorFlow, which takes seconds",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
