"""Verification of the rows that all workers read: counts, or the first error."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdist.data.order import Order, rows_of_replicas
from tfdist.tools.audit.row_records import Step

Recorded = Callable[[], Iterator[Step]]  # starts to read a worker's steps


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows that the workers were expected to read.

    Attributes:
        order: Order of the data pipeline. None if it has none; then the audit only checks that all
            workers see the same data.
        examples: Number of examples; None if only reading tells.
        global_batch: Number of rows of a full batch.
        tail: Handling of the last batch: "partial", "pad" or "drop".
        epochs: Epochs to check.
        first_step: Step at which the first of them begins.
        devices: Number of replicas per worker.
    """

    order: Order | None
    examples: int | None
    global_batch: int
    tail: str
    epochs: range
    first_step: int = 0
    devices: int = 1


@dataclasses.dataclass
class Verdict:
    """Counts of everything that was verified.

    Attributes:
        steps: Number of batches.
        examples: Number of their rows that hold an example.
        left_out: Number of rows whose example could not be read, as `ignore_errors` allows.
        dropped: Number of examples in the tails that `tail="drop"` leaves out.
        whole: Number of epochs that were read from their beginning, or that are complete, by their
            order, together with the earlier steps.
    """

    steps: int = 0
    examples: int = 0
    left_out: int = 0
    dropped: int = 0
    whole: int = 0


class AuditError(Exception):
    """The first error that the audit found.

    Attributes:
        epoch: Epoch of the error.
        step: Step of the error; None if it does not belong to one step.
        row: Row of the global batch; None if it does not belong to one row.
        worker: Rank of the worker; None if it does not belong to one worker.
        expected: Number of the expected example, if one was expected.
        received: Number of the example that was received instead.
    """

    def __init__(
        self,
        text: str,
        epoch: int,
        step: int | None = None,
        row: int | None = None,
        worker: int | None = None,
        expected: int | None = None,
        received: int | None = None,
    ):
        self.epoch = epoch
        self.step = step
        self.row = row
        self.worker = worker
        self.expected = expected
        self.received = received
        names = {"epoch": epoch, "step": step, "row": row, "worker": worker}
        position = ", ".join(
            f"{name} {value}" for name, value in names.items() if value is not None
        )
        super().__init__(f"{position}: {text}")


class NumberSet:
    """Bit set of the example numbers that have been seen.

    Args:
        count: Initial capacity; the set grows as needed.

    Example:
        >>> numbers = NumberSet(8)
        >>> [numbers.add(np.array(some)) for some in ([3, 1], [4, 3], [5, 5])]
        [None, 1, 1]
        >>> numbers.missing(5).tolist(), numbers.missing(2).tolist()
        ([0, 2], [0])
    """

    def __init__(self, count: int):
        self._bits: np.ndarray = np.zeros(count // 8 + 1, np.uint8)

    def add(self, numbers: np.ndarray) -> int | None:
        """Add numbers, and return the position of the first that was seen before, or None.

        Args:
            numbers: Numbers of examples, int64 `[k]`, each 0 or more.
        """
        most = int(numbers.max(initial=0)) // 8 + 1
        if most > len(self._bits):
            self._bits = np.concatenate([self._bits, np.zeros(most, np.uint8)])
        byte: np.ndarray = numbers // 8
        bit = (1 << (numbers % 8)).astype(np.uint8)
        twice = self._bits[byte] & bit != 0
        _, first = np.unique(numbers, return_index=True)
        again: np.ndarray = np.ones(len(numbers), bool)
        again[first] = False
        np.bitwise_or.at(self._bits, byte, bit)
        positions = np.flatnonzero(twice | again)
        return int(positions[0]) if len(positions) else None

    def missing(self, count: int) -> np.ndarray:
        """Return the numbers below `count` that have not been seen, int64 `[...]`."""
        if 8 * len(self._bits) < count:
            self._bits = np.concatenate([self._bits, np.zeros(count // 8 + 1, np.uint8)])
        return np.flatnonzero(np.unpackbits(self._bits, count=count, bitorder="little") == 0)

    def count(self) -> int:
        """Return the largest number seen plus 1, or 0 if none was seen."""
        used = np.flatnonzero(self._bits)
        return int(used[-1]) * 8 + int(self._bits[used[-1]]).bit_length() if len(used) else 0


def verify(
    recorded: Sequence[Recorded],
    plan: Plan,
    left_out: Sequence[Mapping[int, str]],
    alive: Callable[[], None] = lambda: None,
) -> Verdict:
    """Check all rows that the workers read.

    Args:
        recorded: One function per worker, which starts reading the worker's steps.
        plan: Rows that the workers were expected to read.
        left_out: Examples that each worker could not read and was allowed to leave out.
        alive: Function that is called after each step.

    Returns:
        The counts of what was verified.

    Raises:
        AuditError: If the rows are not the expected ones; the message has the first error.
    """
    verdict = Verdict()
    queues = [_Queue(begin()) for begin in recorded]
    for epoch in plan.epochs:
        _Epoch(plan, epoch, recorded, left_out).check(queues, verdict, alive)
    return verdict


class _Queue:
    """Steps of a worker, with a look at the next one before it is taken."""

    def __init__(self, steps: Iterator[Step]):
        self._steps = steps
        self._next = next(steps, None)

    def take(self, epoch: int, step: int) -> Step | None:
        """Take and return the next step if it is this one; otherwise return None."""
        following = self._next
        if following is None or (following.epoch, following.step) != (epoch, step):
            return None
        self._next = next(self._steps, None)
        return following


class _Epoch:
    """Check of one epoch over all workers."""

    def __init__(
        self,
        plan: Plan,
        epoch: int,
        recorded: Sequence[Recorded],
        left_out: Sequence[Mapping[int, str]],
    ):
        self.plan = plan
        self.epoch = epoch
        self.recorded = recorded
        self.left_out = left_out
        self.seen = NumberSet(plan.examples or 0)
        self.padded = False
        if plan.order is not None:
            self._batch = tf.function(
                plan.order.batch, input_signature=[tf.TensorSpec([], tf.int64)] * 2
            )

    def check(self, queues: Sequence[_Queue], verdict: Verdict, alive: Callable[[], None]) -> None:
        """Check all steps of the epoch, and that no example is missing."""
        order = self.plan.order
        first = self.plan.first_step if self.epoch == self.plan.epochs.start else 0
        for step in range(first if order else 0):
            # These steps were read before the audit began, so they count as seen.
            if self.seen.add(self._expected(step)) is not None:
                self._fail("the order itself has an example twice", step)
            alive()
        for step in itertools.count(first):
            batches = [queue.take(self.epoch, step) for queue in queues]
            present = [batch for batch in batches if batch is not None]
            if not present:
                break
            if len(present) < len(batches):
                reader = batches.index(present[0])
                text = f"expected a batch, as worker {reader} has one; received none"
                self._fail(
                    f"{text}. Training would wait for it forever", step, worker=batches.index(None)
                )
            self._check_step(step, present, verdict)
            verdict.steps += 1
            alive()
        if step == first:
            self._fail("expected batches; no worker received any", step)
        if order is not None and step != order.steps:
            self._fail(f"expected {order.steps} steps; all workers ended after {step}")
        if order is not None or not first:  # otherwise the earlier examples are unknown
            verdict.dropped += self._check_complete(step)
            verdict.whole += 1

    def _check_step(self, step: int, batches: Sequence[Step], verdict: Verdict) -> None:
        plan = self.plan
        devices = self.plan.devices
        rows = batches[0].rows
        expected = None
        if plan.order is not None:
            expected = self._expected(step)
            if plan.tail == "pad":
                expected = np.pad(
                    expected, (0, plan.global_batch - len(expected)), constant_values=-1
                )
            rows = len(expected)
        for worker, batch in enumerate(batches):
            if batch.rows != rows:
                self._fail(
                    f"expected a global batch of {rows} rows; received one of {batch.rows}",
                    step,
                    worker=worker,
                )
            begin, end = rows_of_replicas(rows, worker * devices, devices, len(batches) * devices)
            if expected is not None:
                verdict.left_out += self._compare(
                    step, worker, begin, expected[begin:end], batch.numbers
                )
            else:
                self._check_padding(step, worker, begin, batch.numbers)
                if len(batch.numbers) != end - begin:
                    text = (
                        f"expected {end - begin} rows of the batch, {begin} to {end - 1}; "
                        f"received {len(batch.numbers)}"
                    )
                    self._fail(text, step, worker=worker)
            real = np.flatnonzero(batch.numbers >= 0)
            repeated = self.seen.add(batch.numbers[real])
            if repeated is not None:
                row = begin + int(real[repeated])
                number = int(batch.numbers[real[repeated]])
                self._fail(
                    f"received {self._name(number, step, row)}", step, row, worker, received=number
                )
            verdict.examples += len(real)
        for worker, batch in enumerate(batches):
            if batch.fingerprint != batches[0].fingerprint:
                text = (
                    f"expected the fingerprint of worker 0's batch, {batches[0].fingerprint}; "
                    f"received {batch.fingerprint}"
                )
                self._fail(text, step, worker=worker)

    def _compare(
        self, step: int, worker: int, begin: int, expected: np.ndarray, received: np.ndarray
    ) -> int:
        """Compare a worker's rows with the order, and return how many were left out as allowed."""
        count = min(len(expected), len(received))
        wrong = np.flatnonzero(expected[:count] != received[:count]).tolist()
        if len(expected) != len(received):
            wrong.append(count)
        left_out = 0
        for row in wrong:
            due = int(expected[row]) if row < len(expected) else -1
            number = int(received[row]) if row < len(received) else -1
            if number < 0 and row < len(received) and due in self.left_out[worker]:
                self.seen.add(expected[row : row + 1])
                left_out += 1
                continue
            expected_text = "none" if due < 0 else f"example {due}"
            received_text = "none" if number < 0 else self._name(number, step, begin + row)
            if row >= count:
                expected_text += f", as its rows are {begin} to {begin + len(expected) - 1}"
            at = (step, begin + row, worker)
            self._fail(
                f"expected {expected_text}; received {received_text}",
                *at,
                due if due >= 0 else None,
                number if number >= 0 else None,
            )
        return left_out

    def _check_padding(self, step: int, worker: int, begin: int, numbers: np.ndarray) -> None:
        """Check that only the end of the last batch is padding."""
        padding = numbers < 0
        if self.padded or (padding.any() and self.plan.tail != "pad"):
            self._fail(
                "expected an example; received none", step, begin + int(np.argmax(padding)), worker
            )
        self.padded = bool(padding.any()) and worker == len(self.recorded) - 1

    def _check_complete(self, steps: int) -> int:
        """Check that every example was seen, and return how many the dropped tail leaves out."""
        last = self.seen.count() - 1
        total = last + 1 if self.plan.examples is None else self.plan.examples
        if last >= total:
            self._fail(f"expected examples below {total}; received example {last}", received=last)
        dropped = 0
        if self.plan.tail == "drop":
            dropped = min(
                max(total - steps * self.plan.global_batch, 0), self.plan.global_batch - 1
            )
        missing = self.seen.missing(total)
        if len(missing) > dropped:
            more = f", and {len(missing) - 1} more such" if len(missing) > 1 else ""
            self._fail(
                f"expected example {missing[0]}, which no worker received{more}",
                expected=int(missing[0]),
            )
        return len(missing)

    def _expected(self, step: int) -> np.ndarray:
        return self._batch(tf.constant(self.epoch, tf.int64), tf.constant(step, tf.int64)).numpy()

    def _name(self, number: int, step: int, row: int) -> str:
        """Describe an example, and the worker that had it earlier in the same epoch."""
        devices = self.plan.devices
        for worker, begin in enumerate(self.recorded):
            for recorded_step in begin():
                if recorded_step.epoch != self.epoch or recorded_step.step > step:
                    continue
                first, _ = rows_of_replicas(
                    recorded_step.rows, worker * devices, devices, len(self.recorded) * devices
                )
                for index in np.flatnonzero(recorded_step.numbers == number):
                    if (recorded_step.step, first + index) < (step, row):
                        return (
                            f"example {number}, which worker {worker} had in step "
                            f"{recorded_step.step}, row {first + index}"
                        )
        return f"example {number}"

    def _fail(
        self, text: str, step=None, row=None, worker=None, expected=None, received=None
    ) -> None:
        raise AuditError(text, self.epoch, step, row, worker, expected, received)
