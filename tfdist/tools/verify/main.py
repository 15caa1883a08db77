"""Entry point of `tfdist verify`: runs the recording processes and compares their steps.

Training happens in child processes, never in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist.runtime.cli_arguments import real, require_config, whole
from tfdist.runtime.command import COMMON_EXIT_CODES, Command
from tfdist.runtime.formatting import counted
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE
from tfdist.tools.common.process_logs import keep

STRATEGIES = ("multi_worker_mirrored", "mirrored", "central_storage", "one_device")
_DESCRIPTION = """\
Trains a few steps of a run with one replica, and on the same global batches with several, and
compares loss, metrics, gradient norms, weights, moving statistics and optimizer variables after
each step. It prints the first difference that is larger than rounding, and the probable cause.

  tfdist verify --config=configs/digits.py                      (two workers on this host)
  tfdist verify --config=configs/digits.py --workers 3 --steps 8
  tfdist verify --config=configs/digits.py --strategy mirrored --devices 2
  tfdist verify --config=configs/digits.py --config.model.name=model.py:build

Dropout and noise are switched off, because each replica draws its own.
"""


def check(flags: argparse.Namespace, words: Sequence[str]) -> None:
    """Check the combination of the flags, and fill in strategy, workers and devices.

    Args:
        flags: Flags of the command, which are changed in place.
        words: Config arguments.

    Raises:
        ValueError: If flags contradict each other. The message names the flag, the expected and the
            received value.
    """
    require_config(words)
    if flags.strategy is not None or flags.workers is not None:
        fill_in_strategy(flags, "multi_worker_mirrored")


def fill_in_strategy(flags: argparse.Namespace, default: str) -> None:
    """Fill in strategy, workers and devices.

    Args:
        flags: Flags of the command, which are changed in place.
        default: Strategy if there is no --strategy.

    Raises:
        ValueError: If the strategy is not supported, or the flags do not fit together.
    """
    origin = "--strategy" if flags.strategy is not None else "strategy.name"
    flags.strategy = flags.strategy or default
    if flags.strategy == "parameter_server":
        raise ValueError(
            f"{origin}: expected a synchronous strategy, received parameter_server, whose steps "
            "depend on which worker is faster and so differ from those of one replica. Verify the "
            "same model and data with --strategy multi_worker_mirrored. Or train with "
            "parameter_server and with one_device, and compare the final evaluations"
        )
    if flags.strategy not in STRATEGIES:
        near = difflib.get_close_matches(flags.strategy, STRATEGIES, n=1)
        raise ValueError(
            f"{origin}: expected one of {', '.join(STRATEGIES)}; received "
            f"{flags.strategy!r}{f'. Did you mean {near[0]}?' if near else ''}"
        )
    if flags.strategy == "multi_worker_mirrored":
        flags.workers = 2 if flags.workers is None else flags.workers
        if flags.workers == 1 and flags.devices is None:
            raise ValueError(
                "--workers: expected at least 2 with multi_worker_mirrored, received 1, which is "
                "one replica. For several devices in one process use --strategy mirrored "
                "--devices 2"
            )
    elif flags.workers not in (None, 1):
        raise ValueError(
            f"--workers: expected 1, because {flags.strategy} trains in one process; received "
            f"{flags.workers}. For several replicas use --devices, such as --devices 2"
        )
    elif flags.devices is None and flags.strategy != "one_device":
        flags.devices = "2"


def _verify(flags: argparse.Namespace, words: list[str]) -> int:
    from tfdist import config
    from tfdist.run import train_command

    settings = train_command.parse(words)  # report config errors at once
    if settings.sync != config.Sync():
        raise ValueError(
            "sync: expected its defaults, with which N replicas equal one, received others; a "
            "policy that rounds, omits or delays updates differs by design. Leave the section out "
            "to verify model and data"
        )
    if flags.strategy is None:
        usual = "multi_worker_mirrored" if flags.devices is None else "mirrored"
        named = settings.strategy.name
        fill_in_strategy(flags, usual if named == "auto" else named)
    with contextlib.ExitStack() as stack:
        directory = (
            Path(os.path.abspath(keep(flags.keep)))
            if flags.keep
            else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-verify-")))
        )
        return _compare(flags, words, settings, directory)


def _compare(flags: argparse.Namespace, words: list[str], settings: Any, directory: Path) -> int:
    from tfdist.tools.verify import rendering
    from tfdist.tools.verify.compare import compare
    from tfdist.tools.verify.processes import RecordingFailed
    from tfdist.tools.verify.recording import Recording, read
    from tfdist.tools.verify.settings import COMPILED, EAGER, ROUNDING, Settings, first_device

    show_line: Callable[[str], None] = (
        (lambda text: None) if flags.json else (lambda text: print(text, flush=True))
    )
    replicas = _replicas(flags)
    show_line(
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
        show_line(
            f"parallel.zero={settings.parallel.zero}: gradients are not compared, because each of "
            "several replicas holds only a part of them; the updates that they cause are compared"
        )
        if more and not (clustered and flags.devices is None):
            together = ()
            show_line(
                "not compiled: left out, because uncompiled replicas of one process run one after "
                "another, and cannot run collectives"
            )

    def make_settings(name: str, **options: Any) -> Settings:
        subdirectory = directory / name
        subdirectory.mkdir()
        return Settings(str(subdirectory), **common, **options)

    # Strategies with one process record the single replica in that process. Workers have processes
    # of their own, so the single replica gets its own process too, which sees no cluster.
    runs = (
        [("", make_settings("one", alone=alone, modes=(), devices=first_device(flags.devices)))]
        if clustered
        else []
    )
    communications = [settings.strategy.communication] if clustered else [""]
    if clustered and not flags.quick:
        communications.append("auto" if communications[0] == "ring" else "ring")
    for number, communication in enumerate(communications):
        modes = (COMPILED, *(together if not number else ()))
        options = {"communication": communication} if clustered else {"alone": alone}
        several = make_settings(
            f"several-{number}",
            modes=modes,
            strategy=flags.strategy,
            devices=flags.devices,
            **options,
        )
        runs.append((f"{communication.upper()}, " if clustered else "", several))

    one: dict[str, list[Recording]] = {}
    comparisons = {}
    failure = None
    code = None
    for prefix, process in runs:
        try:
            _start(process, flags)
        except RecordingFailed as error:
            failure = f"{prefix}{error}"
            code = error.code
        if process.alone:
            one, missing = read({mode: [process.file(mode, 0, alone=True)] for mode in alone})
            if missing:
                print(
                    (
                        "error: the run with one replica failed, so there is nothing to compare "
                        f"with:\n{failure or missing}"
                    ),
                    file=sys.stderr,
                )
                return CONFIGURATION_CODE if code == CONFIGURATION_CODE else 1
            for line in rendering.preamble(
                one[COMPILED][0], flags.steps, settings.train.steps_per_execution
            ):
                show_line(line)
        if failure:
            break
        recorded, missing = read(
            {
                mode: [process.file(mode, rank) for rank in range(flags.workers or 1)]
                for mode in process.modes
            }
        )
        failure = f"{prefix}{missing}" if missing else None
        for mode, recordings in recorded.items():
            name = f"{prefix}{'compiled' if mode == COMPILED else 'not compiled'}"
            comparisons[name] = compare(
                one[COMPILED][0], recordings, one[ROUNDING][0], flags.tolerance
            )
        if failure:
            break
    reference = one[COMPILED][0]
    rounding = one[ROUNDING][0]
    if more:
        comparisons["one replica, not compiled"] = compare(
            reference, one[EAGER], rounding, flags.tolerance
        )
    return _report(flags, show_line, replicas, comparisons, failure, reference.draws())


def _report(
    flags: argparse.Namespace,
    show_line: Callable[[str], None],
    replicas: str,
    comparisons: dict,
    failure: str | None,
    drawn: list[str],
) -> int:
    from tfdist.tools.verify import rendering

    if flags.json:
        print(
            json.dumps(
                {
                    **rendering.facts(comparisons, drawn),
                    **({"same": False, "failure": failure} if failure else {}),
                },
                indent=2,
            )
        )
    else:
        for line in (
            [
                *rendering.table(comparisons),
                *rendering.lenient(next(iter(comparisons.values()))),
            ]
            if comparisons
            else []
        ):
            show_line(line)
        show_line("")
        for line in (
            rendering.failed(replicas, failure)
            if failure
            else rendering.verdict(comparisons, drawn, replicas)
        ):
            show_line(line)
    return (
        0
        if comparisons
        and not failure
        and not drawn
        and all(comparison.same for comparison in comparisons.values())
        else 1
    )


def _start(settings: Any, flags: argparse.Namespace) -> None:
    """Run the process or the launch that records the steps."""
    from tfdist.tools.verify import processes

    directory = Path(settings.directory)
    record = ["tfdist.tools.verify.record", settings.to_json()]
    bound = f"{flags.timeout:g}"
    if settings.strategy == "multi_worker_mirrored":
        who = f"{flags.workers} workers ({settings.communication})"
        launch = [
            "tfdist",
            "launch",
            "--workers",
            str(flags.workers),
            "--log-dir",
            str(directory / "logs"),
            "--show",
            "none",
            "--color",
            "never",
        ]
        record = [*launch, "--hang-timeout", bound, "--start-timeout", bound, "--", "-m", *record]
    else:
        who = f"the process of {settings.strategy}" if settings.modes else "one replica"
    processes.run(record, directory / "log", flags.timeout, who)


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


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    above_zero = real("a number above 0", lambda value: 0 < value < float("inf"))
    add("--workers", type=whole(1), metavar="N", help="number of workers on this host (2)")
    add(
        "--strategy",
        metavar="NAME",
        help=(
            f"{', '.join(STRATEGIES)} (that of the config; if it is auto, multi_worker_mirrored, "
            "or mirrored with --devices)"
        ),
    )
    add(
        "--devices",
        metavar="D",
        help='devices of each process: 2, "cpu:0,cpu:1" or "gpu" (2 with mirrored and '
        "central_storage)",
    )
    add("--steps", type=whole(1), default=5, metavar="N", help="number of steps to train (5)")
    add(
        "--tolerance",
        type=above_zero,
        default=1e-4,
        metavar="T",
        help="relative difference that always counts as equal (1e-4)",
    )
    add(
        "--quick",
        action="store_true",
        help=("compare only compiled steps with the communication of the config, as in training"),
    )
    add(
        "--timeout",
        type=above_zero,
        default=600.0,
        metavar="S",
        help="seconds that each group of processes may take (600)",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--keep", metavar="DIR", help="directory in which to keep recordings and logs (none)")


main = Command(
    name="tfdist verify",
    usage="tfdist verify --config=FILE [--config.SECTION.KEY=VALUE ...] [FLAGS]",
    description=_DESCRIPTION,
    exit_codes={
        **COMMON_EXIT_CODES,
        0: "several replicas compute the same as one",
        1: "they do not, or the comparison is inconclusive, or a process failed",
        CONFIGURATION_CODE: "the config is wrong",
    },
    run=_verify,
    add_flags=_add_flags,
    check=check,
    takes_config=True,
)
