"""The place of a fit in its training becomes signs of life for the launcher, and faults where a chaos plan wants them."""

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


class ChaosError(RuntimeError):
    """What `raise` in a chaos plan raises."""


class Heartbeat:
    """What the fits of one process tell.

    Args:
        is_chief: Whether this process writes.
    """

    def __init__(self, is_chief: bool):
        self._told = told = Launched.from_environ()
        self._progress = progress()
        self._is_chief = is_chief
        plan = fault_plan.parse(told.chaos) if told.chaos else ()
        journal = read_journal(told.log_dir) if plan and told.log_dir else []
        self._faults = [
            fault for fault in fault_plan.left(plan, journal) if fault.of(told.task, is_chief)
        ]
        # Of all tasks, struck or not: workers whose calls differ in length would wait for each other for ever.
        self._pauses = sorted(fault.step for fault in plan if fault.step is not None)
        self.epoch, self.step = 0, 0
        self._length: int | None = None
        self._stepped = False

    def begin(self, epoch: int, length: int | None) -> None:
        """A fit begins.

        Args:
            epoch: Its first.
            length: Steps in an epoch; None: not known.
        """
        self.epoch, self.step, self._length, self._stepped = epoch, 0, length, False
        self.beat(Phase.TRACING)
        self.moment("start")

    def end(self) -> None:
        """The fit is over; how long what follows may take is not ours to say."""
        self.beat(Phase.IDLE)

    def at(self, epoch: int, step: int) -> None:
        """The fit has come to this step of this epoch; faults of that step strike."""
        self.epoch, self.step = epoch, step
        self.beat(Phase.RUNNING)
        if not self._stepped:
            self._stepped = True
            self._note("stepping")
        for fault in [
            fault
            for fault in self._faults
            if fault.step is not None and self.total >= fault.step and fault.task
        ]:
            self._strike(fault)

    def beat(self, phase: str) -> None:
        """A sign of life, of `contract.Phase`."""
        self._progress.beat(phase, self.epoch, self.step, self.total)

    @property
    def total(self) -> int:
        """Steps since training began, as far as the length of an epoch is known."""
        return self.epoch * (self._length or 0) + self.step

    def next_pause(self, epoch: int, step: int) -> int | None:
        """The next step of an epoch after which a fault is to strike, in whatever task; None: there is none.

        Args:
            epoch: The epoch, which may have begun since `at` was last called.
            step: Steps of it that are done.
        """
        begin = epoch * (self._length or 0)
        return next((pause - begin for pause in self._pauses if pause > begin + step), None)

    def moment(self, name: str) -> None:
        """Faults of this moment strike.

        Args:
            name: As in a plan: "start", "saving", "saved", "restoring", "end".

        Raises:
            OSError: The disk is full, as the plan has it.
        """
        for fault in [fault for fault in self._faults if fault.moment == name]:
            self._strike(fault)
        full = next(
            (
                f
                for f in self._faults
                if f.verb == "fill disk" and name == "saving" and self.total >= (f.step or 0)
            ),
            None,
        )
        if full is not None:
            self._strike(full)
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (chaos: {full.text})")

    def _strike(self, fault: fault_plan.Fault) -> None:
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
        told = self._told
        note(
            told.log_dir,
            event,
            task=told.task,
            attempt=told.attempt,
            epoch=self.epoch,
            step=self.step,
            total=self.total,
            **facts,
        )


def length(data: Any) -> int | None:
    """Batches of a data set; None where that is not known, as of arrays."""
    found = batches(data)
    return found if found is not None and found > 0 else None


def size(data: Any) -> int:
    """Batches of a data set or rows of an array, -1 where unknown."""
    if (found := batches(data)) is not None:
        return found
    first = next((x for x in tf.nest.flatten(data) if x is not None), None)
    return len(first) if isinstance(first, Sized) else -1


def batches(data: Any) -> int | None:
    """What a data set says of its batches, 0 or less where it does not know; None of anything else."""
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality())
    return int(data.num_batches or -1) if isinstance(data, keras.utils.PyDataset) else None
