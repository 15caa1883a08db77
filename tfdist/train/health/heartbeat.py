"""Heartbeat: reports training progress to the launcher and injects faults of a chaos plan."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sized
from typing import Any

import keras
import tensorflow as tf

from tfdist.runtime import fault_plan
from tfdist.runtime.launch_protocol import Launched, Phase, note, progress, read_journal
from tfdist.runtime.time_account import time_account


class ChaosError(RuntimeError):
    """Exception that the fault `raise` of a chaos plan raises."""


class Heartbeat:
    """Heartbeat of the fits of one process.

    Args:
        is_chief: Whether this process is the chief.

    Attributes:
        epoch: Current epoch, from 0.
        step: Number of steps done in this epoch.
    """

    def __init__(self, is_chief: bool):
        launched = Launched.from_environ()
        self._launched = launched
        self._progress = progress()
        self._is_chief = is_chief
        plan = fault_plan.parse(launched.chaos) if launched.chaos else ()
        journal = read_journal(launched.log_dir) if plan and launched.log_dir else []
        self._faults = [
            fault for fault in fault_plan.left(plan, journal) if fault.of(launched.task, is_chief)
        ]
        # Pauses are the same in all tasks, whether or not a fault strikes there. Workers whose
        # calls differ in length would wait for each other forever.
        self._pauses = sorted(fault.step for fault in plan if fault.step is not None)
        self.epoch = 0
        self.step = 0
        self._length: int | None = None
        self._stepped = False
        self._phase = Phase.IDLE

    def begin(self, epoch: int, length: int | None) -> None:
        """Start a fit.

        Args:
            epoch: First epoch of the fit, from 0.
            length: Number of steps in an epoch; None if unknown.
        """
        self.epoch = epoch
        self.step = 0
        self._length = length
        self._stepped = False
        self.beat(Phase.TRACING)
        self.moment("start")

    def end(self) -> None:
        """End the fit.

        The duration of what follows is unknown, so the phase becomes `Phase.IDLE`.
        """
        self.beat(Phase.IDLE)

    def at(self, epoch: int, step: int, done: int = 0) -> None:
        """Report the current epoch and step of the fit, and inject the faults of that step.

        Args:
            epoch: Epoch, from 0.
            step: Number of its steps that are done.
            done: Number of steps that have run since the last report, default 0.
        """
        self.epoch = epoch
        self.step = step
        account = time_account()
        account.add_steps(done)
        if not self._stepped:
            account.base = max(0, self.total - done)
        account.reached = self.total
        self.beat(Phase.RUNNING)
        if not self._stepped:
            self._stepped = True
            self._note("stepping")
        for fault in [
            fault
            for fault in self._faults
            if fault.step is not None and self.total >= fault.step and fault.task
        ]:
            self._inject(fault)

    def beat(self, phase: str) -> None:
        """Send a heartbeat with a phase of `launch_protocol.Phase`."""
        self._phase = phase
        self._progress.beat(phase, self.epoch, self.step, self.total)

    def beat_within_fit(self, phase: str) -> None:
        """Send a heartbeat with a phase if a `fit` or `evaluate` is running."""
        if self._phase != Phase.IDLE:
            self.beat(phase)

    def expect_tracing(self, function: Any) -> None:
        """Send a heartbeat before Keras builds and traces a function within a fit.

        Args:
            function: The model's `test_function` or `predict_function`; None unless Keras has made
                it.
        """
        if function is None:
            self.beat_within_fit(Phase.TRACING)

    @property
    def total(self) -> int:
        """Return the steps since training began, as far as the length of an epoch is known."""
        return self.epoch * (self._length or 0) + self.step

    def next_pause(self, epoch: int, step: int) -> int | None:
        """Return the next step after which a fault strikes any task; None if there is none.

        The step is counted from the beginning of the epoch.

        Args:
            epoch: Epoch, from 0. It may have begun since `at` was last called.
            step: Number of its steps that are done.
        """
        begin = epoch * (self._length or 0)
        return next((pause - begin for pause in self._pauses if pause > begin + step), None)

    def moment(self, name: str) -> None:
        """Inject the faults of a moment.

        Args:
            name: Name as in a chaos plan: "start", "saving", "saved", "restoring", "end".

        Raises:
            OSError: If the chaos plan simulates a full disk.
        """
        for fault in [fault for fault in self._faults if fault.moment == name]:
            self._inject(fault)
        full = next(
            (
                f
                for f in self._faults
                if f.verb == "fill disk" and name == "saving" and self.total >= (f.step or 0)
            ),
            None,
        )
        if full is not None:
            self._inject(full)
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (chaos: {full.text})")

    def _inject(self, fault: fault_plan.Fault) -> None:
        self._faults.remove(fault)
        self._note(
            fault_plan.EVENT,
            number=fault.number,
            text=fault.text,
            pid=os.getpid(),
            seconds=fault.seconds,
        )
        if fault.verb in fault_plan.SIGNALS:
            os.kill(os.getpid(), fault_plan.SIGNALS[fault.verb])
        elif fault.verb == "hang":
            while True:
                time.sleep(1.0)
        elif fault.verb == "raise":
            raise ChaosError(f"chaos: {fault.text}")

    def _note(self, event: str, **facts) -> None:
        launched = self._launched
        note(
            launched.log_dir,
            event,
            task=launched.task,
            attempt=launched.attempt,
            epoch=self.epoch,
            step=self.step,
            total=self.total,
            **facts,
        )


def length(data: Any) -> int | None:
    """Return the number of batches of a data set; None where it is unknown, as for arrays."""
    count = batches(data)
    return count if count is not None and count > 0 else None


def size(data: Any) -> int:
    """Return the number of batches of a data set or rows of an array; -1 if unknown."""
    if (count := batches(data)) is not None:
        return count
    first = next((x for x in tf.nest.flatten(data) if x is not None), None)
    return len(first) if isinstance(first, Sized) else -1


def batches(data: Any) -> int | None:
    """Return the number of batches that a data set reports, 0 or less if it does not know.

    For anything else, return None.
    """
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality())
    return int(data.num_batches or -1) if isinstance(data, keras.utils.PyDataset) else None
