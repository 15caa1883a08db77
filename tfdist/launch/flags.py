"""Command-line flags of `tfdist launch`: definition, parsing and validation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tfdist.cluster.addresses import address_problem
from tfdist.cluster.spec import DATA_WORKERS
from tfdist.runtime.cli_arguments import Parser, flag_of, nearest_flag, real, whole

_DESCRIPTION = """\
Runs COMMAND once per task of a cluster, each with its own TF_CONFIG.

  tfdist launch --workers 4 -- train.py --learning_rate 0.1
  tfdist launch --workers 2 -- tfdist train --config=configs/digits.py
  tfdist launch --cluster cluster.yaml --task worker:1 -- train.py      (this task, on this host)
  tfdist launch --rendezvous a:2222 --max-workers 4 --min-workers 2 --restarts 9 -- train.py \
   (on each host)

Without --cluster all tasks run on this machine, on free ports, cut off from the network. COMMAND \
is a Python
file, -m MODULE, `tfdist train`, or any program. Ctrl-C ends all tasks, a second one at once.
"""
_EPILOG = """\
exit code: 0 when all tasks did their work; else that of the task which failed first (128 + \
signal when one
killed it), 42 when the tasks were asked to end and saved their state: the same command goes on \
from there,
130 after Ctrl-C, 1 when --check has found something wrong, 2 for a mistake on this command line.
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the words into the launcher's flags and COMMAND.

    Args:
        argv: Words after `launch`.

    Returns:
        The validated flags, and the words after `--`.

    Raises:
        ValueError: If a flag is wrong. The message names the flag, the expected and the received
            value.

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
                f"expected `--` before the COMMAND, received {word!r}; write: tfdist launch ... "
                f"-- {word}"
            )
        nearest = nearest_flag(word, list(map(flag_of, vars(flags))))
        remedy = (
            f"; did you mean {nearest}?"
            if nearest
            else "; the COMMAND's own flags go after `--` and its name"
        )
        raise ValueError(f"expected a flag of the launcher, received {word}{remedy}")
    if flags.cluster is None and flags.task is not None:
        raise ValueError(
            "--task: expected together with --cluster FILE, received alone; without it all tasks "
            "run here"
        )
    if flags.cluster is not None and flags.data_workers is not None:
        raise ValueError(
            "--data-workers: expected without --cluster, received both; start `python -m "
            "tfdist.data.service HOST:PORT` on the hosts that are to read data, and set "
            f"{DATA_WORKERS}=HOST:PORT,... for all tasks"
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
            f"{given[0]}: expected without --cluster, received both; {flags.cluster} says which "
            "tasks exist"
        )
    if flags.standby and not flags.restarts and flags.rendezvous is None:
        raise ValueError(
            f"--standby: expected together with --restarts K, received --standby {flags.standby} "
            "alone; without restarts nothing is handed over to standby processes"
        )
    _check_hosts(flags)
    if flags.workers == 0 and not flags.chief:
        raise ValueError(
            "--workers: expected at least 1 where there is no --chief, received 0; nobody would "
            "train"
        )
    return flags, words[end + 1 :]


def _check_hosts(flags: argparse.Namespace) -> None:
    """Check the combination of the multi-host flags and set their defaults."""
    alone = (
        "token_file",
        "host",
        "max_workers",
        "min_workers",
        "restart_window",
        "host_timeout",
        "join_timeout",
    )
    if flags.rendezvous is None:
        for name in alone:
            if getattr(flags, name) is not None:
                raise ValueError(
                    f"{flag_of(name)}: expected together with --rendezvous HOST:PORT, received "
                    "alone"
                )
        return
    if problem := address_problem(flags.rendezvous):
        raise ValueError(f"--rendezvous: {flags.rendezvous!r} {problem}")
    for name in ("cluster", "ps", "chief", "evaluator", "data_workers"):
        if getattr(flags, name) is not None:
            raise ValueError(
                f"{flag_of(name)}: expected without --rendezvous, where all tasks are workers, "
                "received both"
            )
    if flags.max_workers is None:
        raise ValueError(
            "--max-workers: expected how many workers all hosts together run, received nothing "
            "beside --rendezvous"
        )
    if flags.workers == 0:
        raise ValueError("--workers: expected at least 1 beside --rendezvous, received 0")
    flags.min_workers = flags.max_workers if flags.min_workers is None else flags.min_workers
    if flags.min_workers > flags.max_workers:
        raise ValueError(
            f"--min-workers: expected at most --max-workers {flags.max_workers}, received "
            f"{flags.min_workers}"
        )
    for name, default in (("restart_window", 30.0), ("host_timeout", 5.0), ("join_timeout", 300.0)):
        if getattr(flags, name) is None:
            setattr(flags, name, default)
    for name in ("host_timeout", "join_timeout"):
        if not getattr(flags, name):
            raise ValueError(f"{flag_of(name)}: expected more than 0 seconds, received 0")


def _threads(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected auto or a whole number of at least 1, received {text!r}"
        )
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tfdist launch",
        usage="tfdist launch [FLAGS] -- COMMAND ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    seconds = real("seconds, 0 or more", lambda value: 0 <= value < float("inf"))
    local = parser.add_argument_group("a cluster on this machine")
    local.add_argument("--workers", type=whole(0), metavar="N", help="number of workers (1)")
    local.add_argument("--ps", type=whole(0), metavar="M", help="number of parameter servers (0)")
    local.add_argument(
        "--chief", action="store_true", default=None, help="a chief besides the workers"
    )
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
    written.add_argument(
        "--cluster", metavar="FILE", help="YAML or JSON file: job names and their addresses"
    )
    written.add_argument(
        "--task", metavar="worker:1", help="the task to run here (all with an address of this host)"
    )
    hosts = parser.add_argument_group(
        "several hosts that agree by themselves: the same command on each"
    )
    hosts.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the launchers meet: a free port of the first host",
    )
    hosts.add_argument(
        "--token-file",
        metavar="FILE",
        help="the secret that all hosts share (the variable TFDIST_TOKEN)",
    )
    hosts.add_argument(
        "--host",
        metavar="ADDRESS",
        help="of this host for the others (where it reaches the rendezvous from)",
    )
    hosts.add_argument(
        "--max-workers",
        type=whole(1),
        metavar="B",
        help="workers on all hosts together; --workers is those of this host",
    )
    hosts.add_argument(
        "--min-workers",
        type=whole(1),
        metavar="A",
        help="go on with as few, where hosts are lost (B)",
    )
    hosts.add_argument(
        "--restart-window",
        type=seconds,
        metavar="S",
        help="seconds that the others wait for a lost host, or for one more (30)",
    )
    hosts.add_argument(
        "--host-timeout",
        type=seconds,
        metavar="S",
        help="seconds without a sign of life after which a host counts as lost (5)",
    )
    hosts.add_argument(
        "--join-timeout",
        type=seconds,
        metavar="S",
        help="seconds for A workers to come together (300)",
    )
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument(
        "--threads", type=_threads, metavar="N", help="threads per task (auto: cores / tasks here)"
    )
    tasks.add_argument(
        "--grace",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds to end by themselves before SIGKILL (10)",
    )
    tasks.add_argument(
        "--evaluator-wait",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds for the evaluator to finish (300)",
    )
    tasks.add_argument(
        "--check",
        action="store_true",
        help="let `tfdist doctor` look first, with --cluster on all hosts at once; start only if "
        "nothing fails",
    )
    faults = parser.add_argument_group("failures")
    faults.add_argument(
        "--restarts",
        type=whole(0),
        default=0,
        metavar="K",
        help="how often to start again after a failure (0); preemptions are not counted",
    )
    faults.add_argument(
        "--standby",
        type=whole(0),
        metavar="N",
        help="processes that wait with TensorFlow imported, 0.7 GB each, so that a restart begins "
        "at once (with --restarts one for each Python task here, as far as memory allows; else 0)",
    )
    faults.add_argument(
        "--hang-timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds without a step after which a task counts as hung (300; 0: never)",
    )
    faults.add_argument(
        "--start-timeout",
        type=seconds,
        default=1800.0,
        metavar="S",
        help="the same while TensorFlow compiles (1800; 0: never)",
    )
    faults.add_argument(
        "--chaos",
        metavar="PLAN",
        help='inject faults, such as "kill worker:1@step=37; corrupt newest"; "none" for the run '
        "to compare with",
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
