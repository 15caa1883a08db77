"""A standby process: imports TensorFlow beforehand, and runs the task that the launcher hands it.

    python -m tfdist.launch.standby_process FD

FD is a socket. Both sides send JSON lines: the launcher what to import, the process "ready", the
launcher a task, the process "begun". From there on nothing tells it from `tfdist.launch.script_runner`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from os import _exit
from typing import Any

from tfdist.launch import script_runner

NICE = 19  # the lowest priority
COMM = "/proc/self/comm"  # the name that `ps` and `top` show
OOM_SCORE = "/proc/self/oom_score_adj"
AUTOGROUP = "/proc/self/autogroup"  # see sched(7): sessions share the cores by this alone
READY, BEGUN = "ready", "begun"


def main() -> None:
    """Imports, waits and runs one task; ends without one when the launcher is gone."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    lines = channel.makefile("r", encoding="utf-8")
    task = wait_for_task(channel, lines.readline)
    lines.close()
    channel.close()
    script_runner.run(task["words"])


def wait_for_task(
    channel: socket.socket, readline: Callable[[], str], imports: bool = True
) -> dict[str, Any]:
    """Prepare this process, and return the task once all of it but the code is in place.

    Args:
        channel: To the launcher.
        readline: Returns the launcher's next line; "" when it is gone.
        imports: Whether to import what the launcher says.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a traceback helps nobody here
    order = _receive(readline)
    script_runner.prepare(order["words"])
    before = dict(os.environ)
    if imports:
        restore = _stand_back()
        try:
            for name in order["modules"]:
                _import(name)
        except BaseException as error:
            _send(channel, {"error": f"{type(error).__name__}: {error}"})
            raise
        restore()
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _send(channel, {"state": READY})
    task = _receive(readline)
    os.environ.clear()
    os.environ.update({**task["environ"], **added})
    os.chdir(task["cwd"])
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        sys.path[0] = task["cwd"]  # as of any `python -m`
    sys.orig_argv[:] = task["command"]
    signal.signal(signal.SIGINT, interrupt)
    _send(channel, {"state": BEGUN})
    return task


def _import(name: str) -> None:
    """Import a module; one that the task asked for and did not find is left out."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise


def _receive(readline: Callable[[], str]) -> dict[str, Any]:
    """Return the launcher's next message; end this process where the launcher is gone."""
    line = readline()
    if not line.endswith("\n"):
        _exit(0)  # TensorFlow's own end takes a second
    return json.loads(line)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone: the next line says so
        channel.sendall(json.dumps(message).encode() + b"\n")


def _stand_back() -> Callable[[], None]:
    """Lower this process's priority; return what undoes it.

    An ordinary user may lower the priority of a process, but rarely raise it again. This is tried
    in a thread, which Linux gives a priority of its own. Memory that runs out ends standby
    processes before those that train.
    """
    undo = [_overwrite(OOM_SCORE, "1000"), _overwrite(COMM, "tfdist-standby")]
    nice = os.nice(0)
    if _may_return_to(nice):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        undo.append(lambda: _set_priority_of_all_threads(nice))
    undo.append(_overwrite(AUTOGROUP, str(NICE)))

    def restore() -> None:
        for each in undo:
            each()

    return restore


def _may_return_to(nice: int) -> bool:
    """Return whether a process with the lowest priority may take this one again."""
    allowed: list[bool] = []

    def probe() -> None:
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, NICE)
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            allowed.append(True)

    if sys.platform == "linux":  # elsewhere the priority is the process's
        thread = threading.Thread(target=probe)
        thread.start()
        thread.join()
    return bool(allowed)


def _set_priority_of_all_threads(nice: int) -> None:
    """Set the priority of every thread; those that an import has started have the lowest, too."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def _overwrite(path: str, text: str) -> Callable[[], None]:
    """Write a setting of the kernel; return what writes the old one back. No kernel need have it."""
    try:
        with open(path, "r+", encoding="ascii") as file:
            before = file.read().strip().rpartition("nice ")[2]  # autogroup: "NAME nice N"
            file.seek(0)
            file.write(text)
    except OSError:
        return lambda: None

    def undo() -> None:
        with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
            file.write(before)

    return undo


if __name__ == "__main__":
    main()
