"""Command-line flags of `tfdist doctor`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

from tfdist.runtime.cli_arguments import Parser, about_config, flag_of, nearest_flag, real, whole

# Seconds to wait for the other hosts, alone and with --together, and seconds that --serve serves.
ASK_S = 30.0
TOGETHER_S = 300.0
SERVE_S = 600.0

_DESCRIPTION = """\
Finds what is wrong with this host, a cluster and a run, before TensorFlow starts.

  tfdist doctor                                                     (this host)
  tfdist doctor --config=configs/digits.py --workers 2              (and a run)
  tfdist doctor --cluster cluster.yaml --place /shared/runs --serve (on each host but one)
  tfdist doctor --cluster cluster.yaml --place /shared/runs         (on that one)
  tfdist launch --cluster cluster.yaml --check -- train.py          (on all hosts at once)

Each check passes, warns or fails, with a remedy. \
--config and --config.KEY=VALUE are those of `tfdist train`.
"""
_EPILOG = """\
exit code: 0 when no check fails; 1 when one does; 2 for a mistake on this command line.
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Args:
        argv: Arguments after `tfdist doctor`.

    Returns:
        The flags, and the arguments about the config.

    Raises:
        ValueError: A flag is wrong. The message names the flag, and what was expected and received.

    Example:
        >>> flags, words = parse(["--workers", "2", "--place", "a", "b", "--json"])
        >>> flags.workers, flags.place, words
        (2, ['a', 'b'], [])
    """
    flags, words = _parser().parse_known_args(argv)
    for place, word in enumerate(words):
        if about_config(word) or (
            place and re.fullmatch(r"--?config(\.[\w.]+)?", words[place - 1])
        ):
            continue
        if not word.startswith("-"):
            raise ValueError(f"expected flags only, received the word {word!r}")
        known = ["--config", *map(flag_of, vars(flags))]
        nearest = nearest_flag(word, known)
        remedy = f"did you mean {nearest}?" if nearest else f"expected one of {', '.join(known)}"
        raise ValueError(f"{word}: no such flag; {remedy}")
    _check_config(words)
    if flags.cluster is None:
        for name in ("task", "serve", "together"):
            if getattr(flags, name):
                raise ValueError(f"--{name}: expected together with --cluster FILE, received alone")
        if flags.timeout is not None:
            raise ValueError(
                "--timeout: expected together with --cluster FILE, whose hosts are waited for; "
                "received alone"
            )
    elif not os.path.isfile(flags.cluster):
        raise ValueError(
            f"--cluster {flags.cluster}: expected a file, received none; "
            f"there is no such file in {os.getcwd()}"
        )
    if flags.serve and flags.together:
        raise ValueError(
            "--serve: expected without --together, where each host serves and asks, received both"
        )
    if flags.serve and flags.json:
        raise ValueError(
            "--json: expected without --serve, which goes on until its end, received both"
        )
    flags.timeout = flags.timeout or (
        SERVE_S if flags.serve else TOGETHER_S if flags.together else ASK_S
    )
    flags.place = flags.place or []
    return flags, words


def _check_config(words: Sequence[str]) -> None:
    files = [word for word in words if re.match(r"--?config(=|$)", word)]
    if words and len(files) != 1:
        raise ValueError(
            "--config: expected one config file, such as --config=configs/digits.py; "
            f"received {len(files)}"
        )
    for word in files:
        path = (
            word.partition("=")[2] if "=" in word else (list(words) + [""])[words.index(word) + 1]
        ).partition(":")[0]
        if not os.path.isfile(path):
            raise ValueError(
                f"--config={path}: expected a Python file that defines get_config(), "
                f"received none; there is no such file in {os.getcwd()}"
            )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tfdist doctor",
        usage="tfdist doctor [FLAGS] [--config=FILE.py [--config.SECTION.KEY=VALUE ...]]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    seconds = real("seconds above 0", lambda value: 0 < value < 1e6)
    add("--cluster", metavar="FILE", help="YAML or JSON file: job names and their addresses")
    add("--task", metavar="worker:1", help="the task of this host (all with an address of it)")
    add(
        "--workers",
        type=whole(1),
        metavar="N",
        help="tasks that will run on this host (1, or those that the cluster has here)",
    )
    add(
        "--place",
        nargs="+",
        action="extend",
        metavar="DIR",
        help="directories that training writes to, shared by all hosts (those of the config)",
    )
    add(
        "--serve",
        action="store_true",
        help="answer the doctors of other hosts, until --timeout or Ctrl-C",
    )
    add(
        "--together",
        action="store_true",
        help="serve and ask, and wait for all other hosts, which do so too",
    )
    add(
        "--timeout",
        type=seconds,
        metavar="S",
        help=f"seconds for other hosts to come ({ASK_S:g}; together {TOGETHER_S:g}), "
        f"or to serve ({SERVE_S:g})",
    )
    add("--quick", action="store_true", help="without TensorFlow, whose import takes seconds")
    add("--json", action="store_true", help="print JSON for programs")
    return parser
