"""Standby processes: started beforehand, with TensorFlow imported, so that a restart need not wait for that.

The first tasks of a launch start as ever, and record what they import and in which environment
(`imports`). Once they train, the pool starts processes in that image, one after the other, at low
priority. A restart hands its tasks over to those that are ready. Whatever is not as it was when a
standby process started (a variable, the cores) costs nothing but the time of a fresh start.
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

from tfdist.launch.guardian import Guardian, kill_group
from tfdist.launch.import_record import Imports, changed, read_imports
from tfdist.launch.standby_process import BEGUN, READY
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime.launch_protocol import IMPORTS_FILE, note
from tfdist.runtime.resource_limits import cores, memory

BYTES = 700 << 20  # of one with TensorFlow, Keras and TFDS
SHARE = 0.5  # of the memory that is available; the rest is for what trains
IMPORT_SECONDS = 300.0  # at low priority, on a machine that has other work
HANDOVER_SECONDS = 3.0  # takes milliseconds
END_SECONDS = 10.0
MOST_LOST = 3  # in a row, after which there are no more
CORES_PER_START = 8  # cores for each process that imports at the same time
EVENT = "standby"  # of the journal


@dataclasses.dataclass(frozen=True)
class Image:
    """Properties that a process has from its start and keeps.

    Attributes:
        environ: Variables, but for those of one task alone.
        imports: What it imports.
        cores: Numbers of the cores that it may use.
    """

    environ: Mapping[str, str]
    imports: Imports
    cores: tuple[int, ...]

    def start_environ(self) -> dict[str, str]:
        """Return the variables to start it with: those of a task when it imported TensorFlow."""
        environ = dict(self.environ)
        for name, value in self.imports.environ.items():
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
        return environ


class Standby:
    """One process and the channel to it.

    Args:
        image: What it is to be like.
        words: The program of the tasks, which decides where imports look first.
    """

    def __init__(self, image: Image, words: Sequence[str]):
        self.image = image
        self.started = time.monotonic()
        self.ready = False
        self.error = ""  # of its imports
        self._unread = b""
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tfdist.launch.standby_process", str(theirs.fileno())],
                env=image.start_environ(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._send({"modules": image.imports.modules, "words": list(words)})

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self.popen.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.popen.poll() is not None

    def look(self) -> bool:
        """Read its next message; return whether it has just become ready."""
        if self.ready:
            return False
        message = self._message(0.0)
        self.ready = message.get("state") == READY
        self.error = message.get("error", "")
        return self.ready

    def hand_over(self, plan: TaskPlan, strike: Callable[[int], None]) -> bool:
        """Make it the process of a task.

        Args:
            plan: The task.
            strike: Called with its process id; a chaos plan may kill it.

        Returns:
            Whether it runs the task now. Otherwise it is to be ended before another process begins.
        """
        strike(self.pid)
        self._send(
            {
                "words": list(plan.words),
                "command": list(plan.argv),
                "environ": dict(plan.environ),
                "cwd": os.getcwd(),
            }
        )
        begun = self._message(HANDOVER_SECONDS).get("state") == BEGUN
        self._channel.close()
        return begun

    def end(self) -> None:
        """End it, and free what it held."""
        kill_group(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(END_SECONDS)
        self._channel.close()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def _send(self, message: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the answer will tell
            self._channel.settimeout(HANDOVER_SECONDS)
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _message(self, seconds: float) -> dict[str, str]:
        """Return its next message; an empty one if there is none in time, or it is gone."""
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
    """The standby processes of a launcher.

    Args:
        count: How many to keep; None: one for each Python task, as far as memory allows.
        guard: Kills them should this process die.
        log_dir: Of the launch, for its journal.
        say: Takes lines for a person.
        available: Returns how many bytes of memory may still be taken; None: unknown.
    """

    def __init__(
        self,
        count: int | None,
        guardian: Guardian,
        log_dir: str,
        say: Callable[[str], None],
        available: Callable[[], int | None] = lambda: memory()[0],
    ):
        self._count = count
        self._guard = guardian
        self._log_dir = log_dir
        self._say = say
        self._available = available
        self._pool: list[Standby] = []
        self._imports: dict[str, Imports] = {}  # by task
        self._lost = 0
        self._off = count == 0
        self._short = False

    def keep(self, plans: Sequence[TaskPlan], training: bool) -> None:
        """Look after the pool; called twice a second while an attempt runs.

        Args:
            plans: The tasks of the attempt.
            training: Whether they train, so that there is time to start further processes.
        """
        for standby in list(self._pool):
            if standby.look():
                note(self._log_dir, EVENT, what="ready", pid=standby.pid)
            if standby.ended or standby.error:
                why = standby.error or f"ended with code {standby.popen.poll()}"
                self._lose(standby, "lost", why, final=bool(standby.error))
            elif not standby.ready and time.monotonic() - standby.started > IMPORT_SECONDS:
                self._lose(standby, "lost", f"not ready after {IMPORT_SECONDS:g} s")
        plans = [plan for plan in plans if plan.words]
        wanted = len(plans) if self._count is None else self._count
        starting = sum(not standby.ready for standby in self._pool)
        limit = max(1, len(cores()) // CORES_PER_START)
        if self._off or not training or len(self._pool) >= wanted or starting >= limit:
            return
        image = self._image(plans)
        if image is not None and self._has_memory():
            self._start(image, plans[0].words)

    def take(self, plan: TaskPlan, strike: Callable[[int], None]) -> subprocess.Popen | None:
        """Return a process that has begun to run a task; None: start a fresh one.

        Args:
            plan: The task.
            strike: See `Standby.hand_over`.
        """
        for standby in [each for each in self._pool if plan.words and not each.ended]:
            standby.look()
            if not standby.ready:
                continue
            if difference := _difference(standby.image, plan):
                self._lose(standby, "refused", difference)
                continue
            if plan.words[0] == "-m" and plan.words[1] in standby.image.imports.modules:
                why = f"it has imported {plan.words[1]}, which {plan.name} runs as a program"
                note(self._log_dir, EVENT, what="passed over", pid=standby.pid, why=why)
                continue
            if standby.hand_over(plan, strike):
                self._pool.remove(standby)
                self._lost = 0
                note(self._log_dir, EVENT, what="taken", pid=standby.pid, task=plan.name)
                return standby.popen
            self._lose(standby, "lost", f"no answer at the hand-over to {plan.name}")
        return None

    def close(self) -> None:
        """End all that wait."""
        self._off = True
        for standby in self._pool:
            self._end(standby)
        self._pool.clear()

    def _start(self, image: Image, words: Sequence[str]) -> None:
        try:
            standby = Standby(image, words)
        except OSError as error:  # no process, no memory, no descriptors
            self._give_up(f"cannot be started: {error}")
            return
        self._guard.add(standby.pid)
        self._pool.append(standby)
        note(self._log_dir, EVENT, what="started", pid=standby.pid)

    def _lose(self, standby: Standby, what: str, why: str, final: bool = False) -> None:
        self._pool.remove(standby)
        self._end(standby)
        note(self._log_dir, EVENT, what=what, pid=standby.pid, why=why)
        if what == "lost":
            self._lost += 1
        if final or self._lost >= MOST_LOST:
            self._give_up(why)

    def _end(self, standby: Standby) -> None:
        standby.end()
        self._guard.remove(standby.pid)

    def _give_up(self, why: str) -> None:
        if not self._off:
            self._off = True
            note(self._log_dir, EVENT, what="off", why=why)
            self._say(f"tfdist: no more standby processes ({why}); restarts start fresh ones")

    def _image(self, plans: Sequence[TaskPlan]) -> Image | None:
        """Return what all tasks have in common; None before they have imported TensorFlow."""
        for plan in plans:
            # A task that was handed over records nothing: its image was the one before.
            found = read_imports(plan.environ[IMPORTS_FILE])
            if found.modules:
                self._imports[plan.name] = found
        if not all(plan.name in self._imports for plan in plans):
            return None
        imports = [self._imports[plan.name] for plan in plans]
        environs = [_shared(plan.environ) for plan in plans]
        for plan, environ, each in zip(plans, environs, imports, strict=True):
            differing = changed(environs[0], environ) or changed(
                _text(imports[0].environ), _text(each.environ)
            )
            if differing:
                names = ", ".join(differing)
                self._give_up(f"{names} of {plan.name} differs from that of {plans[0].name}")
                return None
        modules = dict.fromkeys(name for each in imports for name in each.modules)
        return Image(environs[0], Imports(tuple(modules), imports[0].environ), cores())

    def _has_memory(self) -> bool:
        available = self._available()
        if available is None or available * SHARE >= BYTES:
            self._short = False
            return True
        if not self._short:
            self._short = True
            why = f"{available / 1e9:.1f} GB of memory are available, {BYTES / SHARE / 1e9:.1f} needed"
            note(self._log_dir, EVENT, what="no memory", why=why)
            if self._count is not None:  # asked for
                self._say(f"tfdist: --standby {self._count}: no standby process, as {why}")
        return False


def _difference(image: Image, plan: TaskPlan) -> str:
    """Return in words what a task needs otherwise than an image has it; "" for nothing."""
    if differing := changed(image.environ, _shared(plan.environ)):
        return f"{', '.join(differing)} of {plan.name} differs"
    if image.cores != cores():
        return f"it may use cores {list(image.cores)}, {plan.name} {list(cores())}"
    return ""


def _shared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of one task in one attempt, which nothing reads early."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("TFDIST_") and name != "TF_CONFIG"
    }


def _text(environ: Mapping[str, str | None]) -> dict[str, str]:
    return {name: "" if value is None else value for name, value in environ.items()}
