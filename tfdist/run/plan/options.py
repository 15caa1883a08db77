"""Analytic memory and communication costs of each option to distribute training.

All figures are computed from the needs of a training step on one device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.parallel.pipeline_parallel import schedule
from tfdist.parallel.sharding import product_costs
from tfdist.parallel.sharding.product_costs import Product
from tfdist.runtime.formatting import format_bytes

# Names of options.
ONE_DEVICE = "one device"
DATA_PARALLEL = "data parallel"
FSDP = "FSDP (ZeRO-3)"
PIPELINE = "pipeline parallel"
LARGEST_BATCH = 1 << 20  # where neither memory nor examples bound the batch
BYTES_OF_LOOKUP = 11  # of a lookup in a sharded table, for each byte of its rows, as measured


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a model that is cut for pipeline parallelism.

    Attributes:
        weights: Bytes of the stage's trainable variables.
        frozen: Bytes of its other variables.
        share: Share of the model's activations, by the size of the layers' outputs, from 0 to 1.
        passed: Bytes that the stage sends for each example: outputs to later stages and gradients
            to earlier ones. None if the model does not tell, because a length is known with the
            data only.
    """

    weights: int
    frozen: int
    share: float
    passed: int | None


@dataclasses.dataclass(frozen=True)
class Needs:
    """Memory that a training step needs on one device.

    Attributes:
        weights: Bytes of each trainable variable.
        units: Bytes of the weights of each layer that FSDP gathers at once.
        frozen: Bytes of all other variables: frozen weights, statistics, seeds and metrics.
        slots: Bytes of the optimizer's state that grows with the weights.
        scalars: Bytes of the optimizer's other state.
        fixed: Bytes of a step that do not depend on the number of rows, apart from gradients.
        per_row: Bytes of a step for each example: activations.
        rows: Number of examples in the global batch.
        examples: Number of examples of an epoch; None if it is unknown.
        partial: Whether the last batch of an epoch may be a partial one.
        learning_rate: Learning rate for `rows` examples; None if it follows the global batch by
            itself.
        adaptive: Whether the optimizer is adaptive, such as Adam.
        stages: Stages of the model for the devices; empty if it cannot be cut.
        not_sharded: Reason why ZeRO and FSDP cannot shard the optimizer; "" if they can.
        not_cut: Reason why the model cannot be cut into stages; "" if it can.
        frozen_weights: Bytes of each frozen weight that FSDP shards.
        tables: Bytes of each trainable table of which FSDP looks up rows; they are among `weights`,
            and not among `units`.
        frozen_tables: Bytes of each frozen table of which FSDP looks up rows; they are among
            `frozen_weights`.
        table_rows: Bytes of the rows of tables for each example; None if the model does not tell.
            Then the memory of lookups is left out.
        updates_rows: Whether the optimizer updates only the rows of a table that a batch has used.
        products: Products in each of `units` whose kernels FSDP need not gather. Empty: none.
        fused: Whether one kernel updates a variable, without copies of it.
    """

    weights: Sequence[int]
    units: Sequence[int]
    frozen: int
    slots: int
    scalars: int
    fixed: int
    per_row: float
    rows: int
    examples: int | None = None
    partial: bool = True
    learning_rate: float | None = None
    adaptive: bool = True
    stages: Sequence[Stage] = ()
    not_sharded: str = ""
    not_cut: str = ""
    frozen_weights: Sequence[int] = ()
    tables: Sequence[int] = ()
    frozen_tables: Sequence[int] = ()
    table_rows: int | None = 0
    updates_rows: bool = False
    products: Sequence[Sequence[Product]] = ()
    fused: bool = False

    @property
    def trainable(self) -> int:
        """Return the bytes of all trainable variables."""
        return sum(self.weights)

    @property
    def last(self) -> int:
        """Return the number of examples in the last batch of an epoch."""
        return (self.examples or 0) % self.rows or self.rows if self.partial else self.rows


@dataclasses.dataclass(frozen=True)
class Option:
    """One option to distribute training, with the memory and traffic of each device.

    Attributes:
        name: Name of the option.
        how: Setting or call that selects the option.
        devices: Number of devices that it takes.
        resident: Bytes that a device holds between steps.
        peak: Maximum bytes that a device needs in a step.
        sent: Bytes that a device sends to others in a step; None if they are unknown.
        why: Cost of the option, in words.
        refused: Reason why the option is not possible; "" if it is possible.
    """

    name: str
    how: str
    devices: int
    resident: int
    peak: int
    sent: int | None
    why: str = ""
    refused: str = ""


def all_options(needs: Needs, devices: int, microbatches: int = 8) -> list[Option]:
    """Return all options to train on a number of devices, the simplest first.

    ZeRO-1 follows ZeRO-2, because ZeRO-2 needs no more memory and sends less.

    Args:
        needs: Needs of a training step on one device.
        devices: Number of devices, at least 1.
        microbatches: Number of micro-batches of pipeline parallelism, default 8.

    Returns:
        The options, including those that are not possible.
    """
    options = [_one(needs)]
    if devices > 1:
        options += [
            _mirrored(needs, devices),
            _mirrored(needs, devices, comm_dtype=True),
            _zero(needs, devices, 2),
            _zero(needs, devices, 2, comm_dtype=True),
        ]
        options += [
            _zero(needs, devices, 1),
            _fsdp(needs, devices),
            _pipeline(needs, devices, microbatches),
        ]
    return options


def largest_batches(
    needs: Needs, devices: int, memory: int, microbatches: int = 8
) -> list[tuple[Option, int]]:
    """Return each option that is possible, with the largest global batch that fits the memory.

    All devices get equally many examples, and all micro-batches of a pipeline.

    Args:
        needs: Needs of a training step on one device.
        devices: Number of devices.
        memory: Memory of a device in bytes.
        microbatches: Number of micro-batches of pipeline parallelism, default 8.

    Returns:
        The options at these batches, and the batches; 0 if the smallest one does not fit, in which
        case the option is that of the smallest one.
    """

    def at(rows: int) -> list[Option]:
        return all_options(
            dataclasses.replace(needs, rows=rows, partial=False), devices, microbatches
        )

    largest = []
    for index, option in enumerate(all_options(needs, devices, microbatches)):
        unit = microbatches if option.name == PIPELINE else option.devices
        smallest = at(unit)[index]
        if smallest.refused:
            continue
        fits = 0
        too_large = (needs.examples or LARGEST_BATCH) // unit + 1
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if at(middle * unit)[index].peak <= memory:
                fits = middle
            else:
                too_large = middle
        largest.append((at(fits * unit)[index] if fits else smallest, fits * unit))
    return largest


def rate_for(needs: Needs, batch: int) -> float | None:
    """Return the learning rate for a global batch; None if it follows the batch by itself.

    For SGD it grows with the batch (Goyal et al. 2017, arXiv 1706.02677), for adaptive optimizers
    with its square root (Malladi et al. 2022, arXiv 2205.10287).

    Args:
        needs: Needs of a training step, with its learning rate.
        batch: Number of examples of the global batch.
    """
    if needs.learning_rate is None:
        return None
    share = batch / needs.rows
    return needs.learning_rate * (math.sqrt(share) if needs.adaptive else share)


def name_of(zero: int, comm_dtype: str | None, devices: int) -> str:
    """Return the name of the option that settings of a run choose.

    Args:
        zero: ZeRO stage.
        comm_dtype: Dtype in which gradients are sent; None: unchanged.
        devices: Number of devices.

    Example:
        >>> name_of(0, "bfloat16", 2), name_of(3, None, 2), name_of(3, None, 1)
        ('data parallel, bfloat16', 'FSDP (ZeRO-3)', 'one device')
    """
    if devices == 1:
        return ONE_DEVICE
    if zero == 3:
        return FSDP
    rounded = ", bfloat16" if comm_dtype and zero != 1 else ""
    return (f"ZeRO-{zero}" if zero else DATA_PARALLEL) + rounded


def choose(options: Sequence[Option], memory: int | None) -> tuple[Option | None, str]:
    """Choose the first option that fits the memory of a device.

    The simplest options come first. Each later option that saves memory costs more, or is harder
    to use.

    Args:
        options: Options that `all_options` returned.
        memory: Memory of a device in bytes; None if it is unknown.

    Returns:
        The option, None if none fits; and the reason in words.
    """
    possible = [option for option in options if option.devices > 1 and not option.refused]
    several = possible or list(options)
    # Keep only options that need less memory than every option before them.
    several = [
        option
        for index, option in enumerate(several)
        if all(option.peak < before.peak for before in several[:index])
    ]
    if memory is None:
        return (
            several[0],
            "how much memory a device has is not known; "
            "with enough, the simplest option is the fastest",
        )
    fits = [option for option in several if option.peak <= memory]
    if not fits:
        least = min(several, key=lambda option: option.peak)
        return None, (
            f"{least.name} needs the least, {format_bytes(least.peak)} at its peak; "
            "take more devices, a smaller global "
            'batch, or train.precision="mixed_bfloat16"'
        )
    before = several[: several.index(fits[0])]
    if not before:
        return fits[0], "it fits, and nothing simpler uses all devices"
    needed = format_bytes(before[-1].peak)
    return fits[0], f"the first that fits: {before[-1].name} needs {needed} at its peak"


def _one(needs: Needs) -> Option:
    resident = needs.trainable + needs.frozen + needs.slots + needs.scalars
    peak = resident + needs.trainable + _step(needs, 1)
    return Option(ONE_DEVICE, 'strategy.name="one_device"', 1, resident, peak, 0)


def _step(needs: Needs, devices: int, shards: int = 1) -> int:
    """Return the bytes of a step on one of several replicas, apart from gradients.

    They hold the activations, and what the optimizer computes for a variable or for its shard.
    """
    return (
        needs.fixed
        + math.ceil(needs.per_row * math.ceil(needs.rows / devices))
        + _update(needs) // shards
    )


def _update(needs: Needs) -> int:
    """Return the bytes that the optimizer computes for the largest variable, without state."""
    return 2 * max(needs.weights, default=0)


def _mirrored(needs: Needs, devices: int, comm_dtype: bool = False) -> Option:
    resident = needs.trainable + needs.frozen + needs.slots + needs.scalars
    peak = resident + 2 * needs.trainable + _step(needs, devices)  # gradients, and their sums
    sent = 2 * _others(needs.trainable, devices) // (2 if comm_dtype else 1)
    if comm_dtype:
        return Option(
            f"{DATA_PARALLEL}, bfloat16",
            'sync.comm_dtype="bfloat16"',
            devices,
            resident,
            peak,
            sent,
            "gradients are rounded to 8 bits",
        )
    return Option(DATA_PARALLEL, 'strategy.name="auto"', devices, resident, peak, sent)


def _zero(needs: Needs, devices: int, stage: int, comm_dtype: bool = False) -> Option:
    part = _part(needs, devices)
    # The first `part` holds the shards that the optimizer updates.
    resident = needs.trainable + needs.frozen + part + _slots(needs, devices) + needs.scalars
    # Gradients, and the shard of their sums that the device keeps.
    peak = resident + needs.trainable + _step(needs, devices, devices) + part
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
    return Option(name, how, devices, resident, peak, sent, why, needs.not_sharded)


def _fsdp(needs: Needs, devices: int) -> Option:
    part = _part(needs, devices)
    frozen_part = _shards(needs.frozen_weights, devices)
    frozen = needs.frozen - sum(needs.frozen_weights) + frozen_part
    resident = part + frozen + _slots(needs, devices) + needs.scalars
    examples = math.ceil(needs.rows / devices)
    multiplied = _multiplied(needs, examples, devices)
    units = [
        unit - sum(product.kernel_bytes for product in products)
        for unit, products in zip(needs.units, multiplied, strict=True)
    ]
    products = [product for of_unit in multiplied for product in of_unit]
    of_products = [product.exchanged(examples, devices) for product in products]
    whole = _without(needs.weights, needs.tables)  # weights that are gathered or multiplied
    updated = dataclasses.replace(needs, weights=whole) if needs.updates_rows else needs
    exchanged = (needs.table_rows or 0) * examples
    # Gradients of kernels that are not gathered are complete in the backward pass, and a kernel
    # updates by them at once, without the copies that an optimizer may compute.
    of_kernels = [p.kernel_bytes for p in products if p.trained and needs.fused]
    computed = dataclasses.replace(updated, weights=_without(updated.weights, of_kernels))
    # The three layers are the weights of the layer in use and of the next, and a layer's gradients.
    peak = (
        resident
        + _part(updated, devices)
        + 3 * max(units, default=0)
        + _step(computed, devices, devices)
        + BYTES_OF_LOOKUP * exchanged
        + 2 * max(of_products, default=0)  # what is sent, and what comes
    )
    # The last layers keep what they gather.
    kept = sum(units[len(units) - schedule.layers_kept(units, 1, part) :])
    trained = sum(whole) - sum(p.kernel_bytes for p in products if p.trained)
    frozen_whole = sum(_without(needs.frozen_weights, needs.frozen_tables)) - sum(
        p.kernel_bytes for p in products if not p.trained
    )
    gathered = 2 * (trained + frozen_whole) - kept
    sent = None
    if needs.table_rows is not None:
        sent = _others(gathered + trained + 2 * (exchanged + sum(of_products)), devices)
    return Option(
        FSDP,
        "parallel.zero=3",
        devices,
        resident,
        peak,
        sent,
        "rows of the batch travel, not large kernels"
        if sum(p.kernel_bytes for p in products) > trained + frozen_whole
        else "forward is computed twice",
        needs.not_sharded,
    )


def _multiplied(needs: Needs, examples: int, devices: int) -> list[list[Product]]:
    """Return for each layer that FSDP gathers the products whose kernels it does not gather."""
    products = needs.products or [()] * len(needs.units)
    return [
        [of_unit[i] for i in product_costs.multiplied(of_unit, unit, examples, devices)]
        for of_unit, unit in zip(products, needs.units, strict=True)
    ]


def _pipeline(needs: Needs, devices: int, microbatches: int) -> Option:
    how = f"parallel.stages={devices} parallel.microbatches={microbatches}"
    refused = needs.not_cut
    if not refused and needs.rows % microbatches:
        refused = f"{microbatches} micro-batches do not divide the batch of {needs.rows} examples"
    if not refused and needs.last % microbatches:
        refused = (
            f"{microbatches} micro-batches do not divide an epoch's last batch of "
            f'{needs.last} examples; take data.tail="drop"'
        )
    if refused:
        return Option(PIPELINE, how, devices, 0, 0, None, "", refused)
    resident = [
        stage.weights
        + stage.frozen
        + math.ceil(needs.slots * stage.weights / max(1, needs.trainable))
        + needs.scalars
        for stage in needs.stages
    ]
    rows = needs.rows // microbatches
    in_flight = [
        schedule.max_in_flight(own) for own in schedule.tasks(devices, microbatches, "1f1b")
    ]
    steps = [
        math.ceil(
            needs.fixed * stage.share + needs.per_row * stage.share * rows * stored_microbatches
        )
        for stage, stored_microbatches in zip(needs.stages, in_flight, strict=True)
    ]
    # A stage holds its summed gradients, and either the gradients of a micro-batch or what the
    # optimizer computes.
    peak = max(
        there + stage.weights + max(stage.weights, _update(needs)) + step
        for there, stage, step in zip(resident, needs.stages, steps, strict=True)
    )
    passed = [stage.passed for stage in needs.stages if stage.passed is not None]
    sent = max(passed) * needs.rows if len(passed) == devices else None
    return Option(
        PIPELINE,
        how,
        devices,
        max(resident),
        peak,
        sent,
        f"{schedule.bubble(devices, microbatches):.0%} of the time a device waits",
    )


def _others(count: int, devices: int) -> int:
    """Return the bytes that go to the other devices when each device keeps its part."""
    return count * (devices - 1) // devices


def _part(needs: Needs, devices: int) -> int:
    """Return the bytes of the shards of all trainable variables that one device holds."""
    return _shards(needs.weights, devices)


def _shards(variables: Sequence[int], devices: int) -> int:
    """Return the bytes of the shards of variables that one device holds.

    Each variable is padded so that all its shards have equally many rows.
    """
    return sum(-(-count // devices) for count in variables)


def _without(weights: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return the bytes of weights that are not among others; those may have one twice."""
    rest = list(weights)
    for each in others:
        if each in rest:
            rest.remove(each)
    return rest


def _slots(needs: Needs, devices: int) -> int:
    return math.ceil(needs.slots * _part(needs, devices) / max(1, needs.trainable))
