"""Standby process: imports TensorFlow in advance, then runs a task of the launcher.

    python -m tfdist.launch.standby_process FD

FD is a socket. Both sides send JSON lines: the launcher sends the modules to import, the process
sends "ready", the launcher sends a task, and the process sends "begun". From there on it behaves
like `tfdist.launch.script_runner`.
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
from tfdist.runtime.import_hook import without_collections

NICE = 10  # at 19, beside tasks that use all cores, the imports would take minutes
COMM = "/proc/self/comm"  # the name that `ps` and `top` show
OOM_SCORE = "/proc/self/oom_score_adj"
AUTOGROUP = "/proc/self/autogroup"  # only this weighs sessions against each other, see sched(7)
READY = "ready"
BEGUN = "begun"


def main() -> None:
    """Import, wait and run one task; exit without a task when the launcher is gone."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    lines = channel.makefile("r", encoding="utf-8")
    task = wait_for_task(channel, lines.readline)
    lines.close()
    channel.close()
    script_runner.run(task["words"])


def wait_for_task(
    channel: socket.socket, readline: Callable[[], str], imports: bool = True
) -> dict[str, Any]:
    """Prepare this process; return the task once all of it but the code is in place.

    Args:
        channel: Socket to the launcher.
        readline: Function that returns the launcher's next line; "" when the launcher is gone.
        imports: Whether to import the modules that the launcher names, default True.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a traceback does not help here
    order = _receive(readline)
    script_runner.prepare(order["words"])
    before = dict(os.environ)
    if imports:
        restore = _lower_priority()
        try:
            with without_collections(freezes=True):
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
        sys.path[0] = task["cwd"]  # as for any `python -m`
    sys.orig_argv[:] = task["command"]
    signal.signal(signal.SIGINT, interrupt)
    _send(channel, {"state": BEGUN})
    return task


def _import(name: str) -> None:
    """Import a module; ignore one that the task tried to import and did not find."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise


def _receive(readline: Callable[[], str]) -> dict[str, Any]:
    """Return the launcher's next message; exit if the launcher is gone."""
    line = readline()
    if not line.endswith("\n"):
        _exit(0)  # skips TensorFlow's shutdown, which takes a second
    return json.loads(line)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone; the next read shows this
        channel.sendall(json.dumps(message).encode() + b"\n")


def _lower_priority() -> Callable[[], None]:
    """Lower this process's priority; return a function that restores it.

    An ordinary user may lower the priority of a process, but rarely raise it again. A thread tries
    this first, because Linux gives each thread its own priority. The OOM killer ends standby
    processes before training tasks.
    """
    undo = [_overwrite(OOM_SCORE, "1000"), _overwrite(COMM, "tfdist-standby")]
    nice = os.nice(0)
    if nice < NICE and _may_return_to(nice):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        undo.append(lambda: _set_priority_of_all_threads(nice))
    undo.append(_overwrite(AUTOGROUP, str(NICE)))

    def restore() -> None:
        for restore_one in undo:
            restore_one()

    return restore


def _may_return_to(nice: int) -> bool:
    """Return whether a process with the lower priority may get this one again."""
    allowed: list[bool] = []

    def probe() -> None:
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, NICE)
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            allowed.append(True)

    if sys.platform == "linux":  # elsewhere the priority belongs to the process
        thread = threading.Thread(target=probe)
        thread.start()
        thread.join()
    return bool(allowed)


def _set_priority_of_all_threads(nice: int) -> None:
    """Set the priority of every thread.

    Threads that an import has started have the lower priority, too.
    """
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def _overwrite(path: str, text: str) -> Callable[[], None]:
    """Write a kernel setting; return a function that restores the old value.

    A kernel without the setting is not an error.
    """
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
