"""The words after `tfdist launch` become checked flags and the user's command; nothing is started here."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from tfdist.arguments import Parser, whole
from tfdist.cluster import DATA_WORKERS

_DESCRIPTION = """\
Runs COMMAND once per task of a cluster, each with its own TF_CONFIG.

  tfdist launch --workers 4 -- train.py --learning_rate 0.1
  tfdist launch --workers 2 -- tfdist train --config=configs/digits.py
  tfdist launch --cluster cluster.yaml --task worker:1 -- train.py      (this task, on this host)

Without --cluster all tasks run on this machine, on free ports, cut off from the network. COMMAND is a Python
file, -m MODULE, `tfdist train`, or any program. Ctrl-C ends all tasks, a second one at once.
"""
_EPILOG = """\
exit code: 0 when all tasks did their work; else that of the task which failed first (128 + signal when one
killed it), 130 after Ctrl-C, 2 for a mistake on this command line.
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits the words into flags and COMMAND.

    Args:
        argv: The words after `launch`.

    Returns:
        The checked flags, and the words after `--`.

    Raises:
        ValueError: Names the flag, what was expected and received.

    Example:
        >>> flags, command = parse(["--workers", "4", "--", "train.py", "--lr", "1"])
        >>> flags.workers, flags.ps, command
        (4, None, ['train.py', '--lr', '1'])
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    flags, unknown = _parser().parse_known_args(words[:end])
    for word in unknown:
        if not word.startswith("-"):
            raise ValueError(
                f"expected `--` before the COMMAND, received {word!r}; write: tfdist launch ... -- {word}"
            )
        known = ["--" + name.replace("_", "-") for name in vars(flags)]
        nearest = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), known, n=1)
        remedy = (
            f"; did you mean {nearest[0]}?"
            if nearest
            else "; the COMMAND's own flags go after `--` and its name"
        )
        raise ValueError(f"expected a flag of the launcher, received {word}{remedy}")
    if flags.cluster is None and flags.task is not None:
        raise ValueError(
            "--task: expected together with --cluster FILE, received alone; without it all tasks run here"
        )
    if flags.cluster is not None and flags.data_workers is not None:
        raise ValueError(
            "--data-workers: expected without --cluster, received both; start `python -m tfdist.data.service HOST:PORT` on the "
            f"hosts that are to read data, and set {DATA_WORKERS}=HOST:PORT,... for all tasks"
        )
    counts = {
        "--workers": flags.workers,
        "--ps": flags.ps,
        "--chief": flags.chief,
        "--evaluator": flags.evaluator,
    }
    given = [flag for flag, value in counts.items() if value is not None]
    if flags.cluster is not None and given:
        raise ValueError(
            f"{given[0]}: expected without --cluster, received both; {flags.cluster} says which tasks exist"
        )
    if flags.workers == 0 and not flags.chief:
        raise ValueError(
            "--workers: expected at least 1 where there is no --chief, received 0; nobody would train"
        )
    return flags, words[end + 1 :]


def _threads(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected auto or a whole number of at least 1, received {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, received {text!r}")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tfdist launch",
        usage="tfdist launch [FLAGS] -- COMMAND ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    local = parser.add_argument_group("a cluster on this machine")
    local.add_argument("--workers", type=whole(0), metavar="N", help="number of workers (1)")
    local.add_argument("--ps", type=whole(0), metavar="M", help="number of parameter servers (0)")
    local.add_argument("--chief", action="store_true", default=None, help="a chief besides the workers")
    local.add_argument(
        "--evaluator", action="store_true", default=None, help="an evaluator besides the workers"
    )
    local.add_argument(
        "--data-workers",
        type=whole(0),
        metavar="N",
        help="processes that read data for the tasks (0); see pipeline(service=True)",
    )
    local.add_argument(
        "--allow-remote",
        action="store_true",
        help="let tasks use the network, and other hosts reach them (as ever with --cluster)",
    )
    written = parser.add_argument_group("a cluster of several hosts")
    written.add_argument("--cluster", metavar="FILE", help="YAML or JSON file: job names and their addresses")
    written.add_argument(
        "--task", metavar="worker:1", help="the task to run here (all with an address of this host)"
    )
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument(
        "--threads", type=_threads, metavar="N", help="threads per task (auto: cores / tasks here)"
    )
    tasks.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds to end by themselves before SIGKILL (10)",
    )
    tasks.add_argument(
        "--evaluator-wait",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="seconds for the evaluator to finish (300)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--log-dir", metavar="D", help="directory for the tasks' logs (a new runs/launch-DATE-TIME)"
    )
    output.add_argument(
        "--show", choices=("all", "chief", "none"), default="all", help="whose output to show (all)"
    )
    output.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="(auto; see NO_COLOR)"
    )
    output.add_argument("--no-prefix", action="store_true", help="lines without their task's name")
    return parser
