"""Configuration errors of tfdist, printed as one sentence instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, TRANSIENT_CODE


def exit_on_configuration_error(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; for errors that tfdist raised, print a sentence and end the process.

    Such errors are printed without a traceback.

    Args:
        function: Function to call.
        *args: Its positional arguments.

    Returns:
        The value that the function returns.

    Raises:
        SystemExit: With code 78 or 75; the error is its cause.
    """
    try:
        return function(*args)
    except (ValueError, TimeoutError) as error:
        if not _raised_by_tfdist(error.__traceback__):
            raise
        print(f"error: {error}", file=sys.stderr)
        code = TRANSIENT_CODE if isinstance(error, TimeoutError) else CONFIGURATION_CODE
        raise SystemExit(getattr(error, "exit_code", code)) from error


def _raised_by_tfdist(trace: TracebackType | None) -> bool:
    name = ""
    trace = (
        trace and trace.tb_next
    )  # the frame of `exit_on_configuration_error` itself does not count
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return name.partition(".")[0] == __name__.partition(".")[0]
