"""Entry point for scripts: parses tfdist's flags, and prints configuration errors plainly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import absl.app
from absl import flags as absl_flags

from tfdist import flags
from tfdist.runtime import startup_lines
from tfdist.runtime.configuration_errors import exit_on_configuration_error
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE

__all__ = ["run"]


def run(main: Callable[[list[str]], Any], argv: Sequence[str] | None = None) -> None:
    """Parse the command line, run `main`, and end the process with its result.

    tfdist's flags are added to the script's own. `tfdist.make_strategy()` without arguments then
    uses the values of the flags.

    Args:
        main: Function that is called with the words that are no flags, starting with the program's
            name.
        argv: Command line; default: that of the process.

    Raises:
        SystemExit: Always, with code 0 or the value that `main` returns; 78 for errors in flags or
            configuration, printed without a traceback; 75 when other tasks of the cluster were
            absent.

    Example:
        >>> run(lambda argv: print(argv), ["train.py", "a file"])
        Traceback (most recent call last):
        SystemExit
    """
    flags.define()
    absl.app.run(
        functools.partial(exit_on_configuration_error, main),
        None if argv is None else list(argv),
        flags_parser=_parse,
    )


def _parse(argv: list[str]) -> list[str]:
    try:
        words = absl_flags.FLAGS(argv)
    except absl_flags.Error as error:
        print(f"error: {error}\n`{argv[0]} --help` lists the flags.", file=sys.stderr)
        raise SystemExit(CONFIGURATION_CODE) from error
    # A callback that TensorFlow gives absl finds the devices next, and would print lines.
    if tensorflow := sys.modules.get("tensorflow"):
        startup_lines.find_devices(tensorflow)
    return words
