"""Standby processes: a pool of processes with TensorFlow imported, for fast restarts.

The first tasks of a launch start as fresh processes, and record their imports and their environment
(`import_record`). Once they train, the pool starts processes with the same image, one after the
other, at low priority. A restart hands its tasks over to the ready processes. If a property has
changed since a standby process started (a variable, the cores), the task starts as a fresh process,
which only costs time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.import_record import Imports, changed, read_imports
from tfdist.launch.standby_process import BEGUN, READY
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime.formatting import format_bytes
from tfdist.runtime.guardian import Guardian, kill_group
from tfdist.runtime.launch_protocol import IMPORTS_FILE, note
from tfdist.runtime.resource_limits import cores, memory

BYTES = 700 << 20  # memory of a process with TensorFlow, Keras and TFDS
MEMORY_SHARE = 0.5  # fraction of the available memory; the rest is for the training tasks
IMPORT_S = 300.0  # timeout at low priority on a busy machine
HANDOVER_S = 3.0  # timeout; a hand-over takes milliseconds
END_S = 10.0
MAX_LOST = 3  # consecutive losses after which the pool gives up
CORES_PER_START = 8  # cores per process that imports at the same time
EVENT = "standby"  # journal event


@dataclasses.dataclass(frozen=True)
class Image:
    """Properties that a process has from its start and cannot change.

    Attributes:
        environ: Environment variables, except those of a single task.
        imports: Modules that the process imports.
        cores: Numbers of the cores that it may use.
    """

    environ: Mapping[str, str]
    imports: Imports
    cores: tuple[int, ...]

    def start_environ(self) -> dict[str, str]:
        """Return the variables for its start: those of a task when it imported TensorFlow."""
        environ = dict(self.environ)
        for name, value in self.imports.environ.items():
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
        return environ


class Standby:
    """One standby process and the channel to it.

    Args:
        image: Image of the process.
        words: Program of the tasks, which determines the first entry of `sys.path`.
    """

    def __init__(self, image: Image, words: Sequence[str]):
        self.image = image
        self.started = time.monotonic()
        self.ready = False
        self.error = ""  # error of its imports
        self._unread = b""
        self._channel, child_end = socket.socketpair()
        with child_end:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tfdist.launch.standby_process", str(child_end.fileno())],
                env=image.start_environ(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[child_end.fileno()],
            )
        self._send({"modules": image.imports.modules, "words": list(words)})

    @property
    def pid(self) -> int:
        """Return its process id, which is also the id of its group."""
        return self.popen.pid

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        return self.popen.poll() is not None

    def look(self) -> bool:
        """Read its next message; return whether it has just become ready."""
        if self.ready:
            return False
        message = self._message(0.0)
        self.ready = message.get("state") == READY
        self.error = message.get("error", "")
        return self.ready

    def hand_over(self, plan: TaskPlan, inject_fault: Callable[[int], None]) -> bool:
        """Make it the process of a task.

        Args:
            plan: Plan of the task.
            inject_fault: Function that receives its process id; a fault plan may kill it there.

        Returns:
            Whether it runs the task now. If not, end it before you start another process.
        """
        inject_fault(self.pid)
        self._send(
            {
                "words": list(plan.words),
                "command": list(plan.argv),
                "environ": dict(plan.environ),
                "cwd": os.getcwd(),
            }
        )
        started = self._message(HANDOVER_S).get("state") == BEGUN
        self._channel.close()
        return started

    def end(self) -> None:
        """Kill it and free its resources."""
        kill_group(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(END_S)
        self._channel.close()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def _send(self, message: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # it has ended; the missing answer shows this
            self._channel.settimeout(HANDOVER_S)
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _message(self, seconds: float) -> dict[str, str]:
        """Return its next message; {} if there is none in time, or the process has ended."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError, ValueError):
            while b"\n" not in self._unread:
                self._channel.settimeout(max(0.0, deadline - time.monotonic()))
                data = self._channel.recv(1 << 16)
                if not data:
                    return {}
                self._unread += data
            line, _, self._unread = self._unread.partition(b"\n")
            return json.loads(line)
        return {}


class Standbys:
    """The pool of standby processes of a launcher.

    Args:
        count: Number of processes to keep; None for one per Python task, as far as memory allows.
        guardian: Guardian that kills them if this process dies.
        log_dir: Log directory of the launch, for its journal.
        show_line: Function that shows a line to the user.
        available: Function that returns the available bytes of memory, or None if unknown.
    """

    def __init__(
        self,
        count: int | None,
        guardian: Guardian,
        log_dir: str,
        show_line: Callable[[str], None],
        available: Callable[[], int | None] = lambda: memory()[0],
    ):
        self._count = count
        self._guardian = guardian
        self._log_dir = log_dir
        self._show_line = show_line
        self._available = available
        self._pool: list[Standby] = []
        self._imports: dict[str, Imports] = {}  # by task
        self._lost = 0
        self._disabled = count == 0
        self._warned_of_memory = False

    def keep(self, plans: Sequence[TaskPlan], training: bool) -> None:
        """Maintain the pool; call it twice a second while an attempt runs.

        Args:
            plans: Plans of the attempt's tasks.
            training: Whether they train, so that there is time to start further processes.
        """
        for standby in list(self._pool):
            if standby.look():
                note(self._log_dir, EVENT, what="ready", pid=standby.pid)
            if standby.ended or standby.error:
                reason = standby.error or f"ended with code {standby.popen.poll()}"
                self._lose(standby, "lost", reason, final=bool(standby.error))
            elif not standby.ready and time.monotonic() - standby.started > IMPORT_S:
                self._lose(standby, "lost", f"not ready after {IMPORT_S:g} s")
        plans = [plan for plan in plans if plan.words]
        target = len(plans) if self._count is None else self._count
        starting = sum(not standby.ready for standby in self._pool)
        limit = max(1, len(cores()) // CORES_PER_START)
        if self._disabled or not training or len(self._pool) >= target or starting >= limit:
            return
        image = self._image(plans)
        if image is not None and self._has_memory():
            self._start(image, plans[0].words)

    def take(self, plan: TaskPlan, inject_fault: Callable[[int], None]) -> subprocess.Popen | None:
        """Return a process that has begun to run a task, or None to start a fresh one.

        Args:
            plan: Plan of the task.
            inject_fault: See `Standby.hand_over`.
        """
        for standby in [
            candidate for candidate in self._pool if plan.words and not candidate.ended
        ]:
            standby.look()
            if not standby.ready:
                continue
            if difference := _difference(standby.image, plan):
                self._lose(standby, "refused", difference)
                continue
            if plan.words[0] == "-m" and plan.words[1] in standby.image.imports.modules:
                reason = f"it has imported {plan.words[1]}, which {plan.name} runs as a program"
                note(self._log_dir, EVENT, what="passed over", pid=standby.pid, why=reason)
                continue
            if standby.hand_over(plan, inject_fault):
                self._pool.remove(standby)
                self._lost = 0
                note(self._log_dir, EVENT, what="taken", pid=standby.pid, task=plan.name)
                return standby.popen
            self._lose(standby, "lost", f"no answer at the hand-over to {plan.name}")
        return None

    def close(self) -> None:
        """End all standby processes."""
        self._disabled = True
        for standby in self._pool:
            self._end(standby)
        self._pool.clear()

    def _start(self, image: Image, words: Sequence[str]) -> None:
        try:
            standby = Standby(image, words)
        except OSError as error:  # no process, no memory, no descriptors
            self._give_up(f"cannot be started: {error}")
            return
        self._guardian.add(standby.pid)
        self._pool.append(standby)
        note(self._log_dir, EVENT, what="started", pid=standby.pid)

    def _lose(self, standby: Standby, what: str, reason: str, final: bool = False) -> None:
        self._pool.remove(standby)
        self._end(standby)
        note(self._log_dir, EVENT, what=what, pid=standby.pid, why=reason)
        if what == "lost":
            self._lost += 1
        if final or self._lost >= MAX_LOST:
            self._give_up(reason)

    def _end(self, standby: Standby) -> None:
        standby.end()
        self._guardian.remove(standby.pid)

    def _give_up(self, reason: str) -> None:
        if not self._disabled:
            self._disabled = True
            note(self._log_dir, EVENT, what="off", why=reason)
            self._show_line(
                f"tfdist: no more standby processes ({reason}); restarts start new processes"
            )

    def _image(self, plans: Sequence[TaskPlan]) -> Image | None:
        """Return the common image of all tasks; None before they have imported TensorFlow."""
        for plan in plans:
            # A task in a standby process records nothing: its image is the previous one.
            task_imports = read_imports(plan.environ[IMPORTS_FILE])
            if task_imports.modules:
                self._imports[plan.name] = task_imports
        if not all(plan.name in self._imports for plan in plans):
            return None
        imports = [self._imports[plan.name] for plan in plans]
        environs = [_shared(plan.environ) for plan in plans]
        for plan, environ, recorded in zip(plans, environs, imports, strict=True):
            differing = changed(environs[0], environ) or changed(
                _text(imports[0].environ), _text(recorded.environ)
            )
            if differing:
                names = ", ".join(differing)
                self._give_up(f"{names} of {plan.name} differs from that of {plans[0].name}")
                return None
        modules = dict.fromkeys(name for recorded in imports for name in recorded.modules)
        return Image(environs[0], Imports(tuple(modules), imports[0].environ), cores())

    def _has_memory(self) -> bool:
        available = self._available()
        if available is None or available * MEMORY_SHARE >= BYTES:
            self._warned_of_memory = False
            return True
        if not self._warned_of_memory:
            self._warned_of_memory = True
            reason = (
                f"{format_bytes(available)} of memory is available, and "
                f"{format_bytes(BYTES / MEMORY_SHARE)} is needed"
            )
            note(self._log_dir, EVENT, what="no memory", why=reason)
            if self._count is not None:  # requested by the user
                self._show_line(
                    f"tfdist: --standby {self._count}: no standby process, because {reason}"
                )
        return False


def _difference(image: Image, plan: TaskPlan) -> str:
    """Return in words how a task differs from an image, or "" if it does not."""
    if differing := changed(image.environ, _shared(plan.environ)):
        return f"{', '.join(differing)} of {plan.name} differs"
    if image.cores != cores():
        return f"it may use cores {list(image.cores)}, {plan.name} {list(cores())}"
    return ""


def _shared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of one task in one attempt, which no import reads."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("TFDIST_") and name != "TF_CONFIG"
    }


def _text(environ: Mapping[str, str | None]) -> dict[str, str]:
    return {name: "" if value is None else value for name, value in environ.items()}
