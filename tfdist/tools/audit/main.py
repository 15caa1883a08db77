"""The command `tfdist data audit`, which starts the audit's workers and reports."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Sequence

from tfdist import app
from tfdist.runtime.cli_arguments import Parser, flags_beside_config, real, refuse, whole
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE
from tfdist.runtime.termination import ending
from tfdist.tools.audit import report
from tfdist.tools.audit.processes import WorkerError, Workers
from tfdist.tools.audit.settings import Settings, check_function
from tfdist.tools.common.process_logs import keep

TIMEOUT = 600.0
_DESCRIPTION = """\
Reads the input pipeline of a run, without a model, in as many processes as the run will have, \
and checks what they took:
every example exactly once per epoch, none on two workers, equally many steps on all, and each \
global batch, row by row, the
one that follows from seed, epoch and step. Then measures what each stage of the pipeline costs.

  tfdist data audit --config=configs/digits.py --workers 2 --epochs 2
  tfdist data audit --config=configs/digits.py --workers 3 --config.data.global_batch=96
  tfdist data audit --pipeline=train.py:make_pipeline --workers 2
"""
_EPILOG = """\
exit code: 0 when all is as it should be; 1 with the first example that is not, or when a worker \
fails or is late; 2 for a
mistake on this command line; 78 for a mistake in the config, the data, or what does not fit them.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command `tfdist data audit`.

    Args:
        argv: Command-line arguments after `tfdist data audit`.

    Returns:
        The exit code.
    """
    try:
        flags, words = parse(argv)
    except ValueError as error:
        return refuse("tfdist data audit", error)
    return app.plainly(_audit, flags, words)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Args:
        argv: Command-line arguments after `tfdist data audit`.

    Returns:
        The flags, and the arguments about the config.

    Raises:
        ValueError: If a flag is wrong. The message names the flag, the expected value and the
            received value.

    Example:
        >>> flags, words = parse(["--config=a.py", "--workers", "2", "--config.data.cache=true"])
        >>> flags.workers, words
        (2, ['--config=a.py', '--config.data.cache=true'])
    """
    flags, words = flags_beside_config(_parser(), argv, needed=False)
    if bool(words) == bool(flags.pipeline):
        raise ValueError(
            "expected --config=FILE.py, or --pipeline=FILE.py:FUNCTION; received "
            + ("both." if words else "neither.")
        )
    if flags.pipeline and flags.split:
        raise ValueError(
            "--split: it chooses between a config's pipelines; received --pipeline, which is one."
        )
    return flags, words


def _audit(flags: argparse.Namespace, words: Sequence[str]) -> int:
    from tfdist.run import train_command

    # Report mistakes in the arguments before any worker starts.
    if flags.pipeline:
        check_function(flags.pipeline)
    else:
        train_command.parse(words)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending())  # a signal ends the workers, too
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
        except KeyboardInterrupt:
            print("audit interrupted; its workers are ended", file=sys.stderr)
            return 128 + signal.SIGINT


def _follow(settings: Settings, workers: Workers) -> int:
    """Lead the workers from phase to phase, and print each result as soon as it is known."""
    print(report.beginning(settings, workers.pids), flush=True)
    ready = workers.wait("ready", doing="while it made its pipeline")
    print(report.header(settings, ready[0]), flush=True)
    workers.tell("read")
    read = workers.wait("read", doing="while it read")
    epochs = [workers.said(rank, "epoch") for rank in range(settings.workers)]
    print(report.speeds(settings, epochs), flush=True)
    workers.tell("verify", [0])
    [verdict] = workers.wait(
        "verified", "offence", ranks=[0], doing="while it checked what was read"
    )
    if verdict["event"] == "offence":
        print(report.offence(verdict), file=sys.stderr)
        return 1
    print(report.proof(settings, ready[0], verdict, read), flush=True)
    if settings.stage_seconds:
        workers.tell("stages", [0])
        [end] = workers.wait("stages", ranks=[0], doing="while it measured stages")
        print(
            report.stages(settings, ready[0], workers.said(0, "stage"), end["stored"]), flush=True
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tfdist data audit",
        usage="tfdist data audit --config=FILE.py [--config.SECTION.KEY=VALUE ...] [flags]\n"
        "       tfdist data audit --pipeline=FILE.py:FUNCTION [flags]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--pipeline",
        metavar="FILE.py:FUNCTION",
        help="instead of a config: a function that returns what tfdist.data.pipeline does",
    )
    add(
        "--split",
        choices=("train", "eval"),
        help="the config's pipeline for training or for evaluation (train)",
    )
    add("--workers", type=whole(1), default=1, metavar="N", help="processes (1)")
    add("--devices", type=whole(1), default=1, metavar="D", help="replicas of each (1)")
    add("--epochs", type=whole(1), default=1, metavar="E", help="epochs to read (1)")
    add("--first-epoch", type=whole(0), default=0, metavar="E", help="the first of them (0)")
    add(
        "--first-step",
        type=whole(0),
        default=0,
        metavar="S",
        help="step of it to begin at, as after a resume (0)",
    )
    add(
        "--timeout",
        type=real("a number of at least 1", lambda value: value >= 1),
        default=TIMEOUT,
        metavar="S",
        help=f"longest time without a sign of a worker's life, in seconds ({TIMEOUT:g})",
    )
    add(
        "--stage-seconds",
        type=real("a number of at least 0", lambda value: value >= 0),
        default=2.0,
        metavar="S",
        help="seconds to measure each stage; 0: not at all (2)",
    )
    add("--keep", metavar="DIR", help="keep the workers' logs and what they took in this directory")
    return parser
