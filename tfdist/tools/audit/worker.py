"""Commands of an audit's worker: read its rows, verify all rows, measure stages."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.errors import location_of
from tfdist.data.order import Order, StreamOrder
from tfdist.tools.audit import row_records, stage_throughput
from tfdist.tools.audit.settings import Settings
from tfdist.tools.audit.verdict import AuditError, Plan, verify
from tfdist.tools.common import events, example_text

_REPORT_S = 2.0  # seconds between two signs of life while steps are checked


class Worker:
    """Worker of an audit, with one method per command: `read`, `verify` and `stages`.

    Args:
        settings: Settings of the audit.
        rank: Rank of this process.
        report: Function that records an event.
    """

    def __init__(self, settings: Settings, rank: int, report: Callable[..., None]):
        tf.config.set_visible_devices([], "GPU")  # else each process would take all GPU memory
        self.settings = settings
        self.rank = rank
        self.report = report
        pipeline: Any = settings.make_pipeline()
        self.pipeline = pipeline
        self.batches = pipeline.batches
        devices = settings.devices
        self.window = (rank * devices, devices, settings.workers * devices)
        begin = {"epoch": settings.first_epoch, "first_step": settings.first_step}
        self.resumed = pipeline.replica_rows(*self.window, **begin) if settings.first_step else None
        self.local_rows = pipeline.replica_rows(*self.window)
        order = pipeline.order
        if order is not None and settings.first_step >= order.steps:
            raise ValueError(
                f"--first-step={settings.first_step}: expected one of the epoch's "
                f"{order.steps} steps, 0 to {order.steps - 1}."
            )
        source = self.batches.source
        report(
            "ready",
            source=source.name,
            examples=source.cardinality,
            global_batch=self.batches.global_batch,
            tail=self.batches.tail,
            seed=self.batches.seed,
            shuffle=self.batches.buffer is not None,
            order=None
            if order is None
            else {"kind": type(order).__name__, "steps": order.steps, **dataclasses.asdict(order)},
        )

    def read(self) -> None:
        """Read the epochs, and record each step."""
        settings = self.settings
        with open(settings.file(self.rank, "steps"), "wb", buffering=0) as file:
            for epoch in range(settings.first_epoch, settings.first_epoch + settings.epochs):
                self.pipeline.epochs.next = epoch
                if self.resumed is not None and epoch == settings.first_epoch:
                    self._epoch(file, self.resumed, epoch, settings.first_step)
                else:
                    self._epoch(file, self.local_rows, epoch, 0)
        left_out = {str(number): where for number, where in self.pipeline.errors.failed.items()}
        self.report("read", left_out=left_out)

    def verify(self) -> None:
        """Check the steps that all workers recorded against the order that all reported."""
        settings = self.settings
        ready = self._last_events("ready")
        read = self._last_events("read")
        order = ready[0]["order"]
        plan = Plan(
            None if order is None else _order(order),
            ready[0]["examples"],
            ready[0]["global_batch"],
            ready[0]["tail"],
            range(settings.first_epoch, settings.first_epoch + settings.epochs),
            settings.first_step,
            settings.devices,
        )
        left_out = [{int(number): where for number, where in of["left_out"].items()} for of in read]
        recorded = [
            functools.partial(row_records.read, settings.file(rank, "steps"))
            for rank in range(settings.workers)
        ]
        try:
            for rank, facts in enumerate(ready):
                for name, value in facts.items():
                    if value != ready[0][name]:
                        text = (
                            f"expected {name} to be as on worker 0, {ready[0][name]}; "
                            f"received {value}"
                        )
                        raise AuditError(text, settings.first_epoch, worker=rank)
            verdict = verify(
                recorded, plan, left_out, _every(_REPORT_S, lambda: self.report("verifying"))
            )
        except AuditError as error:
            numbers = [n for n in (error.expected, error.received) if n is not None]
            locations = {str(number): self._describe(number) for number in numbers}
            self.report("offence", text=str(error), places=locations)
        else:
            self.report("verified", **dataclasses.asdict(verdict))

    def stages(self) -> None:
        """Measure the throughput of each stage of the data pipeline."""
        for stage in stage_throughput.measure(
            self.batches, self.window, self.settings.stage_seconds
        ):
            self.report("stage", name=stage.name, rate=stage.rate)
        self.report("stages", stored=stage_throughput.stored_bytes(self.batches))

    def _epoch(self, file: Any, batches: tf.data.Dataset, epoch: int, step: int) -> None:
        begin = time.monotonic()
        first = None
        count = 0
        examples = 0
        size = 0
        for batch in batches:
            first = time.monotonic() - begin if first is None else first
            numbers = batch.numbers.numpy()
            batch_bytes = sum(
                example_text.byte_size(part)
                for part in tf.nest.flatten(batch.data)
                if tf.is_tensor(part)
            )
            row_records.append(
                file,
                row_records.Step(
                    epoch,
                    step + count,
                    int(batch.rows),
                    float(batch.fingerprint),
                    batch_bytes,
                    numbers,
                ),
            )
            count += 1
            examples += int(np.count_nonzero(numbers >= 0))
            size += batch_bytes
        self.report(
            "epoch",
            epoch=epoch,
            steps=count,
            examples=examples,
            size=size,
            seconds=time.monotonic() - begin,
            first=first,
        )

    def _last_events(self, name: str) -> list[dict[str, Any]]:
        """Return the last event of this name of each worker, by rank."""
        last = []
        for rank in range(self.settings.workers):
            path = self.settings.file(rank, "events")
            event = events.last(events.read(path), name)
            if event is None:
                raise ValueError(
                    f"worker {rank}: expected an event {name!r} in {path}, received none; the file "
                    "was cut short, so run the audit again"
                )
            last.append(event)
        return last

    def _describe(self, number: int) -> str | None:
        """Return where an example is stored, or None if that is unknown."""
        source = self.batches.source
        return location_of(source, number) if 0 <= number < (source.cardinality or 0) else None


def _order(facts: dict[str, Any]) -> Order:
    fields = {name: value for name, value in facts.items() if name not in ("kind", "steps")}
    if facts["kind"] == "StreamOrder":
        return StreamOrder(**{**fields, "lengths": tuple(fields["lengths"])})
    return Order(**fields)


def _every(seconds: float, function: Callable[[], None]) -> Callable[[], None]:
    """Wrap a function so that it runs at most once per `seconds`."""
    last = time.monotonic()

    def call() -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            last = time.monotonic()
            function()

    return call
