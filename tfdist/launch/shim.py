"""A user's script runs as if Python had started it, and its uncaught exception becomes an error file, nothing else.

python -m tfdist.launch.shim FILE.py ARGS...
python -m tfdist.launch.shim -m MODULE ARGS...
"""

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback

from tfdist.contract import ERROR_FILE

_OURS = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1 PID` writes every thread's stack to the log
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # a Ctrl-C, passed on by the launcher: where it struck helps nobody
    except SystemExit as stop:
        if stop.__cause__ is not None:  # `raise SystemExit(78) from error`: the error was told plainly, the report names it
            write_error(os.environ.get(ERROR_FILE), stop.__cause__)
        raise
    except Exception as error:
        error.__traceback__ = _users_part(error.__traceback__)
        write_error(os.environ.get(ERROR_FILE), error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(getattr(error, "exit_code", 1))  # our own errors say whether a restart can help


def write_error(path: str | None, error: BaseException) -> None:
    """Writes an exception as JSON, whole or not at all; `path` None: nobody asked for it."""
    if path is None:
        return
    record = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    # A full disk must not hide the exception itself, which is printed next.
    with contextlib.suppress(OSError):
        with open(f"{path}.tmp", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(record, file)
        os.replace(f"{path}.tmp", path)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def _users_part(trace):
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
