"""A main function becomes a program with tfdist's flags whose configuration errors are plain sentences."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import absl.app
from absl import flags as absl_flags

from tfdist import flags
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, TRANSIENT_CODE


def run(main: Callable[[list[str]], Any], argv: Sequence[str] | None = None) -> None:
    """Parses the command line, tfdist's flags beside the script's own, and ends the process as `main` says.

    `tfdist.make_strategy()` without arguments then takes what the flags say.

    Args:
        main: Called with the words that are no flags, the program's name first.
        argv: Command line; default: that of the process.

    Raises:
        SystemExit: Always: code 0 or what `main` returns; 78 for errors in flags or configuration, printed
            without a traceback; 75 when other tasks of the cluster were absent.

    Example:
        >>> run(lambda argv: print(argv), ["train.py", "a file"])
        Traceback (most recent call last):
        SystemExit
    """
    flags.define()
    absl.app.run(
        functools.partial(plainly, main), None if argv is None else list(argv), flags_parser=_parse
    )


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function; errors that tfdist itself raised end the process with a sentence, no traceback.

    Args:
        function: What to call.
        *args: With what.

    Returns:
        What the function returns.

    Raises:
        SystemExit: With code 78 or 75; the error is its cause.
    """
    try:
        return function(*args)
    except (ValueError, TimeoutError) as error:
        if not _raised_by_us(error.__traceback__):
            raise
        print(f"error: {error}", file=sys.stderr)
        code = TRANSIENT_CODE if isinstance(error, TimeoutError) else CONFIGURATION_CODE
        raise SystemExit(getattr(error, "exit_code", code)) from error


def _parse(argv: list[str]) -> list[str]:
    try:
        return absl_flags.FLAGS(argv)
    except absl_flags.Error as error:
        print(f"error: {error}\n`{argv[0]} --help` lists the flags.", file=sys.stderr)
        raise SystemExit(CONFIGURATION_CODE) from error


def _raised_by_us(trace: TracebackType | None) -> bool:
    name, trace = "", trace and trace.tb_next  # our own frame, `plainly`, tells nothing
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return name.partition(".")[0] == __name__.partition(".")[0]
