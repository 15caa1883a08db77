"""Fault injection by the launcher: faults that a task cannot inject into itself.

These are faults of servers, of files and of standby processes, and the end of a stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from tfdist.launch.task_plan import Role
from tfdist.launch.task_process import Process
from tfdist.runtime import fault_plan
from tfdist.runtime.guardian import kill_group
from tfdist.runtime.launch_protocol import note, read_journal

CHECK_S = 0.1


class Chaos:
    """The launcher's part of a fault plan.

    Args:
        faults: Faults of the plan.
        log_dir: Log directory of the launch.
    """

    def __init__(self, faults: Sequence[fault_plan.Fault], log_dir: str):
        self._faults = tuple(faults)
        self._log_dir = log_dir
        # fault number -> (process id, time to continue)
        self._stopped: dict[int, tuple[int, float]] = {}
        self._last_check = 0.0

    def poll(self, group: Sequence[Process]) -> None:
        """Inject the faults that are due, and continue processes whose stop is over.

        Args:
            group: Processes of the current attempt.
        """
        now = time.monotonic()
        if now - self._last_check < CHECK_S:
            return
        self._last_check = now
        journal = read_journal(self._log_dir)
        living = {process.pid: process for process in group if not process.ended}
        for line in journal:
            if (
                line["event"] == fault_plan.EVENT
                and None not in (line.get("pid"), line.get("seconds"))
                and line["number"] not in self._stopped
            ):
                self._stopped[line["number"]] = line["pid"], now + line["seconds"]
        for pid, until in self._stopped.values():
            if pid in living and now >= until and living[pid].state == "T":
                living[pid].inject(signal.SIGCONT)
        reached = max(
            (heartbeat.total for process in group if (heartbeat := process.heartbeat)), default=0
        )
        serving = {
            process.plan.name: process
            for process in living.values()
            if process.plan.role is Role.SERVES
        }
        for fault in fault_plan.left(self._faults, journal):
            if fault.step is None or reached < fault.step:
                continue
            if fault.verb == "corrupt newest":
                self._corrupt(fault, journal)
            elif fault.task in serving and fault.verb in fault_plan.SIGNALS:
                process = serving[fault.task]
                self._note(
                    fault, task=fault.task, pid=process.pid, total=reached, seconds=fault.seconds
                )
                process.inject(fault_plan.SIGNALS[fault.verb])

    def hand_over(self, pid: int) -> None:
        """Kill a standby process that is about to receive a task, if such a fault is due.

        Args:
            pid: Process id of the standby process.
        """
        for fault in fault_plan.left(self._faults, read_journal(self._log_dir)):
            if fault.verb == "kill standby":
                self._note(fault, pid=pid)
                kill_group(pid)
                return

    def between(self) -> None:
        """Inject the faults that are due between two attempts."""
        journal = read_journal(self._log_dir)
        for fault in fault_plan.left(self._faults, journal):
            if fault.verb == "corrupt newest" and fault.step is None:
                self._corrupt(fault, journal)

    def _corrupt(self, fault: fault_plan.Fault, journal: Sequence[dict]) -> None:
        """Flip a bit in the middle of the newest snapshot, if it is a local file."""
        path = next(
            (
                line["path"]
                for line in reversed(journal)
                if line["event"] == "saved" and os.path.exists(line["path"])
            ),
            None,
        )
        if path is None:
            return
        self._note(fault, path=path)
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            file.seek(os.path.getsize(path) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    def _note(self, fault: fault_plan.Fault, **facts) -> None:
        note(self._log_dir, fault_plan.EVENT, number=fault.number, text=fault.text, **facts)
