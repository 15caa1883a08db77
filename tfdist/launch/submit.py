"""Entry point of `tfdist submit`: gives a launch to a scheduler, as a job."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from tfdist.launch import config_options
from tfdist.launch import flags as launch_flags
from tfdist.launch.engines import kubernetes_scheduler, schedulers
from tfdist.runtime.cli_arguments import Parser, flag_of
from tfdist.runtime.command import COMMON_EXIT_CODES, Command, usage_errors
from tfdist.runtime.launch_protocol import TRANSIENT_CODE, take_token

RESTARTS = 3  # nobody looks at a job while it runs
DESCRIPTION = """\
Gives a launch to a scheduler as a job, and prints the number of the job. The job runs `tfdist
launch` on its nodes. It is queued again after a preemption, once the training is saved, and after
the loss of a node, which counts as a restart.

  tfdist submit --workers 4 --nodes 2 --time 600 -- train.py --epochs 90
  tfdist submit --dry-run --workers 4 -- train.py
  tfdist submit --on kubernetes --image registry.example/train:1 --workers 4 -- train.py
"""
OF_SLURM = ("array", "setup", "nodes", "partition", "time", "account", "slurm_options")


def _run(flags: argparse.Namespace, words: list[str]) -> int:
    take_token()
    with usage_errors():
        scheduler = schedulers.find(flags.on)
        manifest = scheduler.manifest(flags, launch_words(flags), words)
        if flags.dry_run:
            print(manifest, end="")
        else:
            print(scheduler.submit(flags, manifest))
    return 0


def launch_words(flags: argparse.Namespace) -> list[str]:
    """Return those flags of the command line that are for the launch in the job.

    Args:
        flags: Flags of `tfdist submit`.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    config_options.add_flag(parser)
    _add_job_flags(parser)
    launch_flags.add_slurm_flags(parser)
    kubernetes_scheduler.add_flags(parser)
    own, _ = launch_flags.split(flags.argv)
    _, rest = parser.parse_known_args(own)
    given = {word.partition("=")[0] for word in rest}
    return [
        *rest,
        *([] if "--workers" in given else ["--workers", str(flags.workers)]),
        *([] if "--restarts" in given else ["--restarts", str(flags.restarts)]),
    ]


def _add_job_flags(parser) -> None:
    job = parser.add_argument_group("job")
    schedulers.add_flag(job)
    job.add_argument("--dry-run", action="store_true", help="print the script, and send nothing")
    job.add_argument(
        "--job-name", default="tfdist", metavar="NAME", help="name of the job (tfdist)"
    )
    job.add_argument(
        "--array",
        metavar="LIST",
        help="make a job for each number, such as 0-9 or 0-9%%2 (at most 2 at once); COMMAND finds "
        "its own in SLURM_ARRAY_TASK_ID",
    )
    job.add_argument(
        "--setup", metavar="WORDS", help='shell commands to run first, such as "module load cuda"'
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    _add_job_flags(parser)
    launch_flags.add_flags(parser, on=False)
    kubernetes_scheduler.add_flags(parser)
    parser.set_defaults(restarts=RESTARTS)


def _check(flags: argparse.Namespace, words: Sequence[str]) -> None:
    if not words:
        raise ValueError("COMMAND: expected a command after `--`, received none")
    if flags.queue_timeout is not None:
        raise ValueError(
            f"{flag_of('queue_timeout')}: expected with `tfdist launch`, received here; a "
            "submitted job waits for as long as it takes"
        )
    if flags.array is not None and not re.fullmatch(r"[\d,:-]+(%\d+)?", flags.array):
        raise ValueError(
            f"--array: expected numbers such as 0-9 or 1,3%2, received {flags.array!r}"
        )
    for scheduler, names in (("slurm", OF_SLURM), ("kubernetes", kubernetes_scheduler.FLAGS)):
        for name in names:
            if flags.on not in (None, scheduler) and getattr(flags, name) is not None:
                raise ValueError(
                    f"{flag_of(name)}: expected together with --on {scheduler}, received --on "
                    f"{flags.on}"
                )
    on = flags.on
    flags.on = "slurm"  # whose checks of the launch's flags hold on each scheduler
    launch_flags.check(flags, words)
    flags.on = on
    if flags.workers is None:
        others = launch_flags.other_tasks(flags)
        flags.workers = max((flags.nodes or 1) - others, 0 if flags.chief else 1)


main = Command(
    name="tfdist submit",
    usage="tfdist submit [FLAGS] -- COMMAND ...",
    description=DESCRIPTION,
    exit_codes={
        **COMMON_EXIT_CODES,
        0: "the job is in the queue; with --dry-run, the script is printed",
        TRANSIENT_CODE: "the scheduler does not answer",
    },
    run=_run,
    add_flags=_add_flags,
    check=_check,
    split=launch_flags.split,
    others="Write COMMAND and its own flags after `--`: tfdist submit [FLAGS] -- COMMAND ...",
    defaults=config_options.from_section(others=("queue_timeout",)),
)
