"""Script runner: runs a user's script like Python does, and saves its uncaught exception.

Usage:
    python -m tfdist.launch.script_runner FILE.py ARGS...
    python -m tfdist.launch.script_runner -m MODULE ARGS...
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

from tfdist.launch.import_record import ImportRecorder
from tfdist.runtime.launch_protocol import ERROR_FILE, IMPORTS_FILE, private

_RUNNER_FILES = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    """Run the script or module on the command line."""
    run(sys.argv[1:])


def run(words: list[str]) -> None:
    """Run a task in this process, and exit as Python would.

    Args:
        words: FILE.py ARGS, or -m MODULE ARGS.

    Raises:
        SystemExit: If the task raises it; also after an exception, with the error's `exit_code` or
            1.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1 PID` writes every thread's stack to the log
    prepare(words)
    if IMPORTS_FILE in os.environ:
        sys.meta_path.insert(0, ImportRecorder(os.environ[IMPORTS_FILE], os.environ))
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except KeyboardInterrupt:
        # A Ctrl-C that the launcher has passed on: its traceback does not help.
        sys.exit(128 + signal.SIGINT)
    except SystemExit as stop:
        # `raise SystemExit(78) from error`: the task has printed the error; the report includes it.
        if stop.__cause__ is not None:
            write_error(os.environ.get(ERROR_FILE), stop.__cause__)
        raise
    except Exception as error:
        error.__traceback__ = _user_part(error.__traceback__)
        write_error(os.environ.get(ERROR_FILE), error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(getattr(error, "exit_code", 1))  # our own errors say whether a restart can help


def prepare(words: list[str]) -> None:
    """Set `sys.argv` and the first entry of `sys.path` as Python does.

    Args:
        words: FILE.py ARGS, or -m MODULE ARGS.
    """
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        return
    sys.argv[:] = words
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))


def write_error(path: str | None, error: BaseException) -> None:
    """Write an exception as JSON, completely or not at all.

    Args:
        path: Path of the error file; None to write nothing.
        error: Exception to write.
    """
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
        with open(
            f"{path}.tmp", "w", encoding="utf-8", errors="backslashreplace", opener=private
        ) as file:
            json.dump(record, file)
        os.replace(f"{path}.tmp", path)


def _user_part(trace):
    while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNER_FILES:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
