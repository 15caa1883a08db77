"""Entry point of `tfdist data audit`: starts an audit's workers and prints the results."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence

from tfdist.runtime.cli_arguments import real, whole
from tfdist.runtime.command import COMMON_EXIT_CODES, Command
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE
from tfdist.tools.audit import rendering
from tfdist.tools.audit.processes import WorkerError, Workers
from tfdist.tools.audit.settings import Settings, check_function
from tfdist.tools.common.process_logs import keep

TIMEOUT_S = 600.0
_DESCRIPTION = """\
Reads the data pipeline of a run without training, in as many processes as the run will have, and
checks the rows that each of them read: every example exactly once per epoch, on one worker only;
equally many steps on all workers; and in each global batch the rows that follow from seed, epoch
and step. Then it measures what each stage of the data pipeline costs.

  tfdist data audit --config=configs/digits.py --workers 2 --epochs 2
  tfdist data audit --config=configs/digits.py --workers 3 --config.data.global_batch=96
  tfdist data audit --pipeline=train.py:make_pipeline --workers 2
"""


def _check(flags: argparse.Namespace, words: Sequence[str]) -> None:
    if bool(words) == bool(flags.pipeline):
        raise ValueError(
            "expected --config=FILE, or --pipeline=FILE.py:FUNCTION; received "
            + ("both." if words else "neither.")
        )
    if flags.pipeline and flags.split:
        raise ValueError(
            "--split: expected together with --config, whose data pipelines it chooses between; "
            "received --pipeline."
        )


def _audit(flags: argparse.Namespace, words: list[str]) -> int:
    from tfdist.run import train_command

    # Report mistakes in the arguments before any worker starts.
    if flags.pipeline:
        check_function(flags.pipeline)
    else:
        train_command.parse(words)
    with contextlib.ExitStack() as stack:
        directory = (
            str(keep(flags.keep))
            if flags.keep
            else stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-audit-"))
        )
        settings = Settings(
            directory,
            tuple(words),
            flags.pipeline,
            flags.split or "train",
            flags.workers,
            flags.devices,
            flags.epochs,
            flags.first_epoch,
            flags.first_step,
            flags.stage_seconds,
        )
        try:
            with Workers(settings, flags.timeout) as workers:
                return _follow(settings, workers)
        except WorkerError as error:
            print(
                f"{'error' if error.code == CONFIGURATION_CODE else 'audit failed'}: {error}",
                file=sys.stderr,
            )
            return error.code


def _follow(settings: Settings, workers: Workers) -> int:
    """Lead the workers from phase to phase, and print each result as soon as it is known."""
    print(rendering.beginning(settings, workers.pids), flush=True)
    ready = workers.wait("ready", doing="while it made its data pipeline")
    print(rendering.header(settings, ready[0]), flush=True)
    workers.send("read")
    read = workers.wait("read", doing="while it read")
    epochs = [workers.reported(rank, "epoch") for rank in range(settings.workers)]
    print(rendering.speeds(settings, epochs), flush=True)
    workers.send("verify", [0])
    [verdict] = workers.wait(
        "verified", "offence", ranks=[0], doing="while it checked what was read"
    )
    if verdict["event"] == "offence":
        print(rendering.failure(verdict), file=sys.stderr)
        return 1
    print(rendering.proof(settings, ready[0], verdict, read), flush=True)
    if settings.stage_seconds:
        workers.send("stages", [0])
        [end] = workers.wait("stages", ranks=[0], doing="while it measured stages")
        print(
            rendering.stages(settings, ready[0], workers.reported(0, "stage"), end["stored"]),
            flush=True,
        )
    return 0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--pipeline",
        metavar="FILE.py:FUNCTION",
        help="function that returns a data pipeline, used instead of a config",
    )
    add(
        "--split",
        choices=("train", "eval"),
        help="which data pipeline of the config to read: for training or evaluation (train)",
    )
    add("--workers", type=whole(1), default=1, metavar="N", help="number of processes (1)")
    add(
        "--devices",
        type=whole(1),
        default=1,
        metavar="D",
        help="number of replicas in each process (1)",
    )
    add("--epochs", type=whole(1), default=1, metavar="E", help="number of epochs to read (1)")
    add(
        "--first-epoch",
        type=whole(0),
        default=0,
        metavar="E",
        help="number of the first epoch to read (0)",
    )
    add(
        "--first-step",
        type=whole(0),
        default=0,
        metavar="S",
        help="step of the first epoch to begin at, as after a resume (0)",
    )
    add(
        "--timeout",
        type=real("a number of at least 1", lambda value: value >= 1),
        default=TIMEOUT_S,
        metavar="S",
        help=f"seconds without a heartbeat after which a worker counts as hung ({TIMEOUT_S:g})",
    )
    add(
        "--stage-seconds",
        type=real("a number of at least 0", lambda value: value >= 0),
        default=2.0,
        metavar="S",
        help="seconds to measure each stage (2; 0 means no measurement)",
    )
    add(
        "--keep",
        metavar="DIR",
        help="directory in which to keep the logs and records of the workers (none)",
    )


main = Command(
    name="tfdist data audit",
    usage="tfdist data audit --config=FILE [--config.SECTION.KEY=VALUE ...] [FLAGS]\n"
    "       tfdist data audit --pipeline=FILE.py:FUNCTION [FLAGS]",
    description=_DESCRIPTION,
    exit_codes={
        **COMMON_EXIT_CODES,
        0: "all rows are the expected ones",
        1: "a row is not the expected one, or a worker failed or was late",
        CONFIGURATION_CODE: "the config, the data pipeline or the data are wrong",
    },
    run=_audit,
    add_flags=_add_flags,
    check=_check,
    takes_config=True,
)
