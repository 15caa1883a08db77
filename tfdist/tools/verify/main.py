"""Entry point of `tfdist verify`: runs the recording processes and compares their steps.

Training happens in child processes, never in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist import app
from tfdist.runtime.cli_arguments import Parser, flags_beside_config, real, refuse, whole
from tfdist.runtime.formatting import counted
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE
from tfdist.runtime.termination import ending
from tfdist.tools.common.process_logs import keep

STRATEGIES = ("multi_worker_mirrored", "mirrored", "central_storage", "one_device")
_DESCRIPTION = """\
Trains a few steps of a run with one replica, and the same global batches with several, and \
compares loss, metrics, the norms of the
gradients, weights, moving statistics and the optimizer's variables after each step. Tells the \
first difference that is more than
rounding, and what it probably comes from.

  tfdist verify --config=configs/digits.py                                       (two workers on \
this machine)
  tfdist verify --config=configs/digits.py --workers 3 --steps 8
  tfdist verify --config=configs/digits.py --strategy mirrored --devices 2
  tfdist verify --config=configs/digits.py --config.model.name=model.py:build

Dropout and noise are switched off for it, as each replica draws its own, by design.
"""
_EPILOG = """\
exit code: 0 when several replicas compute what one computes; 1 when they do not, when that cannot \
be told, or when their processes
fail; 2 for a mistake on this command line; 78 for a mistake in the config, or in what one replica \
makes of it.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command `tfdist verify`.

    Args:
        argv: Command-line arguments after `tfdist verify`.

    Returns:
        The exit code.
    """
    try:
        flags, words = parse(argv)
    except ValueError as error:
        return refuse("tfdist verify", error)
    return app.plainly(_verify, flags, words)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Args:
        argv: Command-line arguments after `tfdist verify`.

    Returns:
        The flags, and the config flags.

    Raises:
        ValueError: A flag is unknown or wrong. The message names the flag, what was expected and
            what was received.

    Example:
        >>> flags, words = parse(["--config=a.py", "--workers", "3", "--config.train.seed=1"])
        >>> flags.strategy, flags.workers, words
        ('multi_worker_mirrored', 3, ['--config=a.py', '--config.train.seed=1'])
    """
    flags, words = flags_beside_config(_parser(), argv)
    if flags.strategy is not None or flags.workers is not None:
        settle(flags, "multi_worker_mirrored")
    return flags, words


def settle(flags: argparse.Namespace, default: str) -> None:
    """Fill in strategy, workers and devices.

    Args:
        flags: Flags from `parse`, which are changed in place.
        default: Strategy if there is no --strategy.

    Raises:
        ValueError: The strategy is not supported, or the flags do not fit together.
    """
    where = "--strategy" if flags.strategy is not None else "strategy.name"
    flags.strategy = flags.strategy or default
    if flags.strategy == "parameter_server":
        raise ValueError(
            f"{where}: parameter_server is asynchronous: its steps depend on which worker is "
            "quicker, so that none equals one replica's. Check its result instead: train it and "
            "one_device with `tfdist train`, and compare what both evaluate at the end. Or "
            "verify the same model and data with --strategy multi_worker_mirrored"
        )
    if flags.strategy not in STRATEGIES:
        near = difflib.get_close_matches(flags.strategy, STRATEGIES, n=1)
        raise ValueError(
            f"{where}: expected one of {', '.join(STRATEGIES)}; received "
            f"{flags.strategy!r}{f'. Did you mean {near[0]}?' if near else ''}"
        )
    if flags.strategy == "multi_worker_mirrored":
        flags.workers = 2 if flags.workers is None else flags.workers
        if flags.workers == 1 and flags.devices is None:
            raise ValueError(
                "--workers: expected at least 2 with multi_worker_mirrored, received 1, which is "
                "one replica. For several devices of one process: --strategy mirrored --devices 2"
            )
    elif flags.workers not in (None, 1):
        raise ValueError(
            f"--workers: {flags.strategy} trains in one process; received {flags.workers}. Use "
            "--devices, such as --devices 2"
        )
    elif flags.devices is None and flags.strategy != "one_device":
        flags.devices = "2"


def _verify(flags: argparse.Namespace, words: list[str]) -> int:
    from tfdist import config
    from tfdist.run import train_command

    settings = train_command.parse(words)  # report config errors at once
    if settings.sync != config.Sync():
        raise ValueError(
            "sync: expected its defaults, with which N replicas equal one; a policy that rounds, "
            "leaves out or delays what replicas exchange differs by design. Leave the section "
            "out to verify model and data"
        )
    if flags.strategy is None:
        usual = "multi_worker_mirrored" if flags.devices is None else "mirrored"
        settle(flags, usual if settings.strategy.name == "auto" else settings.strategy.name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending())  # also ends the child processes on a signal
        directory = (
            Path(os.path.abspath(keep(flags.keep)))
            if flags.keep
            else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-verify-")))
        )
        try:
            return _compare(flags, words, settings, directory)
        except KeyboardInterrupt:
            print("verify interrupted; its processes are ended", file=sys.stderr)
            return 128 + signal.SIGINT


def _compare(flags: argparse.Namespace, words: list[str], settings: Any, directory: Path) -> int:
    from tfdist.tools.verify import rendering as telling
    from tfdist.tools.verify.compare import compare
    from tfdist.tools.verify.processes import Failed
    from tfdist.tools.verify.recording import Recording, read
    from tfdist.tools.verify.settings import COMPILED, EAGER, ROUNDING, Settings, first_device

    say: Callable[[str], None] = (
        (lambda text: None) if flags.json else (lambda text: print(text, flush=True))
    )
    replicas = _replicas(flags)
    say(
        f"{settings.name}: {replicas} ({flags.strategy}) against one replica, "
        f"{counted(flags.steps, 'step')}"
    )
    common = {
        "config": tuple(words),
        "steps": flags.steps,
        "timeout": min(settings.strategy.timeout, flags.timeout),
    }
    more = () if flags.quick else (EAGER,)

    alone = (COMPILED, ROUNDING, *more)
    clustered = flags.strategy == "multi_worker_mirrored"
    together = more
    if settings.parallel.zero:
        say(
            f"parallel.zero={settings.parallel.zero}: the one replica holds all; gradients, of "
            "which each of several has a part, are not compared, what becomes of them is"
        )
        if more and not (clustered and flags.devices is None):
            together = ()
            say(
                "not compiled: left out, as replicas of one process then run one after the "
                "other, and cannot exchange parts"
            )

    def told(name: str, **what: Any) -> Settings:
        place = directory / name
        place.mkdir()
        return Settings(str(place), **common, **what)

    # Strategies with one process record the single replica in that process. Workers have processes
    # of their own, so the single replica gets its own process too, which sees no cluster.
    runs = (
        [("", told("one", alone=alone, ways=(), devices=first_device(flags.devices)))]
        if clustered
        else []
    )
    communications = [settings.strategy.communication] if clustered else [""]
    if clustered and not flags.quick:
        communications.append("auto" if communications[0] == "ring" else "ring")
    for number, communication in enumerate(communications):
        ways = (COMPILED, *(together if not number else ()))
        what = {"communication": communication} if clustered else {"alone": alone}
        several = told(
            f"several-{number}", ways=ways, strategy=flags.strategy, devices=flags.devices, **what
        )
        runs.append((f"{communication.upper()}, " if clustered else "", several))

    one: dict[str, list[Recording]] = {}
    found = {}
    failure = None
    code = None
    for prefix, process in runs:
        try:
            _start(process, flags)
        except Failed as error:
            failure = f"{prefix}{error}"
            code = error.code
        if process.alone:
            one, missing = read({way: [process.file(way, 0, alone=True)] for way in alone})
            if missing:
                print(
                    (
                        "error: one replica alone fails, so that there is nothing to compare "
                        f"with:\n{failure or missing}"
                    ),
                    file=sys.stderr,
                )
                return CONFIGURATION_CODE if code == CONFIGURATION_CODE else 1
            for line in telling.preamble(
                one[COMPILED][0], flags.steps, settings.train.steps_per_execution
            ):
                say(line)
        if failure:
            break
        recorded, missing = read(
            {
                way: [process.file(way, rank) for rank in range(flags.workers or 1)]
                for way in process.ways
            }
        )
        failure = f"{prefix}{missing}" if missing else None
        for way, recordings in recorded.items():
            name = f"{prefix}{'compiled' if way == COMPILED else 'not compiled'}"
            found[name] = compare(one[COMPILED][0], recordings, one[ROUNDING][0], flags.tolerance)
        if failure:
            break
    reference = one[COMPILED][0]
    rounding = one[ROUNDING][0]
    if more:
        found["one replica, not compiled"] = compare(
            reference, one[EAGER], rounding, flags.tolerance
        )
    return _tell(flags, say, replicas, found, failure, reference.draws())


def _tell(
    flags: argparse.Namespace,
    say: Callable[[str], None],
    replicas: str,
    found: dict,
    failure: str | None,
    drawn: list[str],
) -> int:
    from tfdist.tools.verify import rendering as telling

    if flags.json:
        print(
            json.dumps(
                {
                    **telling.facts(found, drawn),
                    **({"same": False, "failure": failure} if failure else {}),
                },
                indent=2,
            )
        )
    else:
        for line in (
            [*telling.table(found), *telling.lenient(next(iter(found.values())))] if found else []
        ):
            say(line)
        say("")
        for line in (
            telling.failed(replicas, failure)
            if failure
            else telling.verdict(found, drawn, replicas)
        ):
            say(line)
    return (
        0
        if found
        and not failure
        and not drawn
        and all(comparison.same for comparison in found.values())
        else 1
    )


def _start(told: Any, flags: argparse.Namespace) -> None:
    """Run the process or the launch that records the steps."""
    from tfdist.tools.verify import processes

    place = Path(told.directory)
    record = ["tfdist.tools.verify.record", told.to_json()]
    bound = f"{flags.timeout:g}"
    if told.strategy == "multi_worker_mirrored":
        who = f"{flags.workers} workers ({told.communication})"
        launch = [
            "tfdist",
            "launch",
            "--workers",
            str(flags.workers),
            "--log-dir",
            str(place / "logs"),
            "--show",
            "none",
            "--color",
            "never",
        ]
        record = [*launch, "--hang-timeout", bound, "--start-timeout", bound, "--", "-m", *record]
    else:
        who = f"the process of {told.strategy}" if told.ways else "one replica"
    processes.run(record, place / "log", flags.timeout, who)


def _replicas(flags: argparse.Namespace) -> str:
    if flags.strategy == "multi_worker_mirrored":
        return counted(flags.workers, "worker") + (
            f" with devices {flags.devices}" if flags.devices else ""
        )
    if flags.strategy == "one_device":
        return "one device"
    names = flags.devices.split(",")
    return (
        counted(int(flags.devices), "device")
        if flags.devices.isdigit()
        else counted(len(names), "device")
        if len(names) > 1
        else f"devices {flags.devices}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tfdist verify",
        usage="tfdist verify --config=FILE.py [--config.SECTION.KEY=VALUE ...] [flags]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    above_zero = real("a number above 0", lambda value: 0 < value < float("inf"))
    add("--workers", type=whole(1), metavar="N", help="workers, on this machine (2)")
    add(
        "--strategy",
        metavar="NAME",
        help=(
            f"{', '.join(STRATEGIES)} (the config's; else multi_worker_mirrored, or mirrored with "
            "--devices)"
        ),
    )
    add(
        "--devices",
        metavar="D",
        help='devices of a process: 2, "cpu:0,cpu:1", "gpu" (2 with mirrored and central_storage)',
    )
    add("--steps", type=whole(1), default=5, metavar="N", help="steps to train (5)")
    add(
        "--tolerance",
        type=above_zero,
        default=1e-4,
        metavar="T",
        help="relative difference that is always allowed (1e-4)",
    )
    add(
        "--quick",
        action="store_true",
        help=(
            "the way that training takes alone: no steps that are not compiled, no other "
            "communication"
        ),
    )
    add(
        "--timeout",
        type=above_zero,
        default=600.0,
        metavar="S",
        help="seconds that each set of processes may take (600)",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--keep", metavar="DIR", help="keep recordings and logs in this directory")
    return parser
