"""What a model needs on one device becomes what each way to spread it needs on each of several: arithmetic, nothing is measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.parallel.pipeline_parallel import schedule


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the model, cut for a pipeline.

    Attributes:
        weights: Bytes of its trainable variables.
        frozen: Bytes of its other variables.
        share: Of the model's activations, by the size of layers' outputs, from 0 to 1.
        passed: Bytes for each example that it sends: outputs to later stages, gradients to earlier ones; None: the model does not say, as
            a length is known with the data only.
    """

    weights: int
    frozen: int
    share: float
    passed: int | None


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a training step needs on one device.

    Attributes:
        weights: Bytes of each trainable variable.
        units: Bytes of trainable variables of each layer that FSDP gathers at once.
        frozen: Bytes of all other variables: statistics, seeds, metrics.
        slots: Bytes of the optimizer's state that grows with the weights.
        scalars: Bytes of its other state.
        fixed: Bytes of a step that stay the same with any number of rows, apart from gradients.
        per_row: Bytes of a step for each example: activations.
        rows: Examples of the global batch.
        last: Of an epoch's last one.
        stages: The model cut for the devices; none where it cannot be.
        not_sharded: Why ZeRO and FSDP cannot take the optimizer; "": they can.
        not_cut: Why the model cannot be cut; "": it can.
    """

    weights: Sequence[int]
    units: Sequence[int]
    frozen: int
    slots: int
    scalars: int
    fixed: int
    per_row: float
    rows: int
    last: int
    stages: Sequence[Stage] = ()
    not_sharded: str = ""
    not_cut: str = ""

    @property
    def trainable(self) -> int:
        """Bytes of all trainable variables."""
        return sum(self.weights)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to spread a training, and what each device needs.

    Attributes:
        name: Of the way.
        how: What to write to have it.
        devices: How many it takes.
        resident: Bytes that are there between steps.
        peak: Bytes that a step needs, at most.
        sent: Bytes that a device sends to others in a step; None: not known.
        why: What it costs, in words.
        refused: Why it cannot be had; "": it can.
    """

    name: str
    how: str
    devices: int
    resident: int
    peak: int
    sent: int | None
    why: str = ""
    refused: str = ""


def ways(needs: Needs, devices: int, microbatches: int = 8) -> list[Way]:
    """All ways over so many devices, the simplest first.

    ZeRO-1 comes behind ZeRO-2, which needs no more, and sends less.

    Args:
        needs: Of one device.
        devices: How many there are, 1 or more.
        microbatches: Of a pipeline.
    """
    found = [_one(needs)]
    if devices > 1:
        found += [
            _mirrored(needs, devices),
            _mirrored(needs, devices, comm_dtype=True),
            _zero(needs, devices, 2),
            _zero(needs, devices, 2, comm_dtype=True),
        ]
        found += [
            _zero(needs, devices, 1),
            _fsdp(needs, devices),
            _pipeline(needs, devices, microbatches),
        ]
    return found


def choose(found: Sequence[Way], memory: int | None) -> tuple[Way | None, str]:
    """The way to take, and why: the first that fits, as each later one that saves memory costs more, or is harder to use.

    Args:
        found: Of `ways`.
        memory: Bytes of a device; None: not known.
    """
    several = [way for way in found if way.devices > 1 and not way.refused] or list(found)
    several = [
        way
        for place, way in enumerate(several)
        if all(way.peak < before.peak for before in several[:place])
    ]  # each saves memory
    if memory is None:
        return (
            several[0],
            "how much memory a device has is not known; with enough, the simplest way is the quickest",
        )
    fits = [way for way in several if way.peak <= memory]
    if not fits:
        least = min(several, key=lambda way: way.peak)
        return None, (
            f"none fits: the least, {least.name}, needs {least.peak / 1e9:.2f} GB at its peak; take more devices, a smaller "
            'global batch, or train.precision="mixed_bfloat16"'
        )
    before = several[: several.index(fits[0])]
    if not before:
        return fits[0], "it fits, and nothing simpler uses all devices"
    return fits[
        0
    ], f"the first that fits: {before[-1].name} needs {before[-1].peak / 1e9:.2f} GB at its peak"


def _one(needs: Needs) -> Way:
    resident = needs.trainable + needs.frozen + needs.slots + needs.scalars
    peak = resident + needs.trainable + _step(needs, 1)
    return Way("one device", 'strategy.name="one_device"', 1, resident, peak, 0)


def _step(needs: Needs, devices: int, shards: int = 1) -> int:
    """Bytes of a step on one of several replicas, apart from gradients: activations, and what an optimizer computes of a variable or its shard."""
    return (
        needs.fixed
        + math.ceil(needs.per_row * math.ceil(needs.rows / devices))
        + _update(needs) // shards
    )


def _update(needs: Needs) -> int:
    """Bytes of what an optimizer computes of the largest variable, apart from its state."""
    return 2 * max(needs.weights, default=0)


def _mirrored(needs: Needs, devices: int, comm_dtype: bool = False) -> Way:
    resident = needs.trainable + needs.frozen + needs.slots + needs.scalars
    peak = resident + 2 * needs.trainable + _step(needs, devices)  # gradients, and their sums
    sent = 2 * _others(needs.trainable, devices) // (2 if comm_dtype else 1)
    if comm_dtype:
        return Way(
            "data parallel, bfloat16",
            'sync.comm_dtype="bfloat16"',
            devices,
            resident,
            peak,
            sent,
            "gradients are rounded to 8 bits",
        )
    return Way("data parallel", 'strategy.name="auto"', devices, resident, peak, sent)


def _zero(needs: Needs, devices: int, stage: int, comm_dtype: bool = False) -> Way:
    part = _part(needs, devices)
    resident = (
        needs.trainable + needs.frozen + part + _slots(needs, devices) + needs.scalars
    )  # with the shards that the optimizer updates
    peak = (
        resident + needs.trainable + _step(needs, devices, devices) + part
    )  # gradients, and the part of their sums that is kept
    gradients = _others(needs.trainable, devices) * (2 if stage == 1 else 1)
    sent = (gradients + _others(needs.trainable, devices)) // (2 if comm_dtype else 1)
    name = f"ZeRO-{stage}" + (", bfloat16" if comm_dtype else "")
    how = f"parallel.zero={stage}" + (' sync.comm_dtype="bfloat16"' if comm_dtype else "")
    why = (
        "gradients and updates are rounded to 8 bits"
        if comm_dtype
        else "ZeRO-2 sends less"
        if stage == 1
        else ""
    )
    return Way(name, how, devices, resident, peak, sent, why, needs.not_sharded)


def _fsdp(needs: Needs, devices: int) -> Way:
    part = _part(needs, devices)
    resident = part + needs.frozen + _slots(needs, devices) + needs.scalars
    largest = max(needs.units, default=0)
    peak = (
        resident + part + 3 * largest + _step(needs, devices, devices)
    )  # weights of the layer in use and of the next, and a layer's gradients
    stay = needs.units[len(needs.units) - schedule.kept(needs.units, 1, part) :]
    sent = 3 * _others(needs.trainable, devices) - _others(sum(stay), devices)
    return Way(
        "FSDP (ZeRO-3)",
        "parallel.zero=3",
        devices,
        resident,
        peak,
        sent,
        "forward is computed twice",
        needs.not_sharded,
    )


def _pipeline(needs: Needs, devices: int, microbatches: int) -> Way:
    how = f"tfdist.parallel.pipeline(model, {devices}, microbatches={microbatches})"
    refused = needs.not_cut
    if not refused and needs.rows % microbatches:
        refused = f"{microbatches} micro-batches do not divide the batch of {needs.rows} examples"
    if not refused and needs.last % microbatches:
        refused = f'{microbatches} micro-batches do not divide an epoch\'s last batch of {needs.last} examples; take data.tail="drop"'
    if refused:
        return Way("pipeline", how, devices, 0, 0, None, "", refused)
    resident = [
        stage.weights
        + stage.frozen
        + math.ceil(needs.slots * stage.weights / max(1, needs.trainable))
        + needs.scalars
        for stage in needs.stages
    ]
    rows = needs.rows // microbatches
    in_flight = [schedule.held(own) for own in schedule.tasks(devices, microbatches, "1f1b")]
    steps = [
        math.ceil(needs.fixed * stage.share + needs.per_row * stage.share * rows * held)
        for stage, held in zip(needs.stages, in_flight, strict=True)
    ]
    # A stage's sums of gradients, and those of a micro-batch, or what the optimizer computes.
    peak = max(
        there + stage.weights + max(stage.weights, _update(needs)) + step
        for there, stage, step in zip(resident, needs.stages, steps, strict=True)
    )
    passed = [stage.passed for stage in needs.stages if stage.passed is not None]
    sent = max(passed) * needs.rows if len(passed) == devices else None
    return Way(
        "pipeline",
        how,
        devices,
        max(resident),
        peak,
        sent,
        f"{schedule.bubble(devices, microbatches):.0%} of the time a device waits",
    )


def _others(count: int, devices: int) -> int:
    """What goes to the other devices, where each keeps its part."""
    return count * (devices - 1) // devices


def _part(needs: Needs, devices: int) -> int:
    """The rows of all trainable variables that one device holds; each is padded to equal rows."""
    return sum(-(-count // devices) for count in needs.weights)


def _slots(needs: Needs, devices: int) -> int:
    return math.ceil(needs.slots * _part(needs, devices) / max(1, needs.trainable))
