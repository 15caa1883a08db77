"""Text rendering of the results of an audit: tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfdist.runtime.formatting import aligned, counted, format_bytes
from tfdist.tools.audit.settings import Settings

_SHOWN = 10  # most examples listed as left out


class Cost(NamedTuple):
    """Time that one stage of the data pipeline adds.

    Attributes:
        name: Name of the stage.
        rate: Examples per second of all stages up to this one.
        part: Share of this stage in the time of all stages, from 0 to 1.
    """

    name: str
    rate: float
    part: float


def costs(stages: Sequence[tuple[str, float]]) -> list[Cost]:
    """Compute the time that each stage adds to the stages before it.

    A stage with all stages before it cannot take longer than the whole data pipeline. Where
    measurement noise says otherwise, its time is limited to the time of the whole.

    Args:
        stages: Pairs of a stage's name and the examples per second of all stages up to this one.

    Returns:
        The cost of each stage.

    Example:
        >>> [
        ...     (c.name, round(c.part, 2))
        ...     for c in costs([("read", 1000.0), ("decode", 90.0), ("batch", 100.0)])
        ... ]
        [('read', 0.1), ('decode', 0.9), ('batch', 0.0)]
    """
    seconds = [1 / max(rate for _, rate in stages[index:]) for index in range(len(stages))]
    return [
        Cost(name, rate, (until - before) / seconds[-1])
        for (name, rate), before, until in zip(stages, [0.0, *seconds], seconds, strict=False)
    ]


def beginning(settings: Settings, pids: Sequence[int]) -> str:
    """Describe the audit's processes, before anything is known about the data pipeline.

    Args:
        settings: Settings of the audit.
        pids: Process id of each worker.

    Returns:
        Lines without the last newline, as all functions of this module do.
    """
    of = (
        f"{counted(len(pids), 'worker')} of "
        f"{counted(settings.devices, 'replica')}{' each' if len(pids) > 1 else ''}"
    )
    return f"{of}, {'process' if len(pids) == 1 else 'processes'} {', '.join(map(str, pids))}"


def header(settings: Settings, ready: dict[str, Any]) -> str:
    """Describe the data pipeline that is audited.

    Args:
        settings: Settings of the audit.
        ready: Event "ready" of a worker.
    """
    order = ready["order"]
    examples = ready["examples"]
    count = "an unknown number of examples" if examples is None else counted(examples, "example")
    steps = f", {counted(order['steps'], 'step')} an epoch" if order else ""
    how = f"shuffled with seed {ready['seed']}" if ready["shuffle"] else "not shuffled"
    how += "" if order else ", read from beginning to end by every worker"
    begin = f" from step {settings.first_step} on" if settings.first_step else ""
    return (
        f"{ready['source']}: {count}, {how}\n"
        f"global batch {ready['global_batch']}{steps}, tail {ready['tail']}\n"
        f"{_epochs(settings)}{begin}"
    )


def speeds(settings: Settings, epochs: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Tabulate the read speed of each worker and of all workers together.

    Args:
        settings: Settings of the audit.
        epochs: Events "epoch" of each worker.
    """
    rows = [("worker", "steps", "examples", "seconds", "examples/s", "MB/s", "first batch")]
    longest = 0.0
    examples = 0
    size = 0
    for rank, each in enumerate(epochs):
        sums = {
            name: sum(epoch[name] for epoch in each)
            for name in ("steps", "examples", "seconds", "size")
        }
        rows.append(
            (
                str(rank),
                f"{sums['steps']:,}",
                *_speed(sums["examples"], sums["seconds"], sums["size"]),
                f"{each[0]['first'] or 0:.2f} s",
            )
        )
        longest = max(longest, sums["seconds"])
        examples += sums["examples"]
        size += sums["size"]
    if settings.workers > 1:
        rows.append(("all", "", *_speed(examples, longest, size), ""))
    return "\n" + "\n".join(aligned(rows))


def proof(
    settings: Settings,
    ready: dict[str, Any],
    verdict: dict[str, Any],
    read: Sequence[dict[str, Any]],
) -> str:
    """Describe the properties that the audit has proved.

    Args:
        settings: Settings of the audit.
        ready: Event "ready" of a worker.
        verdict: Event "verified".
        read: Event "read" of each worker.
    """
    exceptions = []
    if verdict["left_out"]:
        exceptions.append(
            f"{counted(verdict['left_out'], 'row')} whose example cannot be read (ignore_errors)"
        )
    if verdict["dropped"]:
        exceptions.append(f'{counted(verdict["dropped"], "example")} of the tails (tail="drop")')
    exceptions_text = f", but for {' and '.join(exceptions)}" if exceptions else ""
    lines = [
        "",
        (
            f"proved for {_epochs(settings)}, "
            f"{counted(verdict['steps'], 'batch', 'batches')}, "
            f"{counted(verdict['examples'], 'example')}:"
        ),
    ]
    if verdict["whole"]:
        lines.append(f"  every example exactly once per epoch{exceptions_text}")
    if settings.first_step:
        before = f"steps 0 to {settings.first_step - 1} of epoch {settings.first_epoch}"
        lines.append(
            f"  ({before} count as their order has them)"
            if ready["order"]
            else f"  ({before} were not checked, nor was the completeness of that epoch)"
        )
    lines += [
        "  no example on two workers" if settings.workers > 1 else "  no example twice",
        "  equally many steps on all workers, and equal fingerprints",
    ]
    if ready["order"]:
        lines.append(
            "  each global batch, row by row, is that which follows from seed, epoch and step"
        )
    else:
        lines.append(
            "  the source is read from beginning to end, in the same order by all workers; "
            "there is no expected order to compare it with"
        )
    reasons = {int(number): reason for each in read for number, reason in each["left_out"].items()}
    lines += [
        f"  left out: example {number}: {reasons[number]}" for number in sorted(reasons)[:_SHOWN]
    ]
    if len(reasons) > _SHOWN:
        lines.append(f"  left out: {counted(len(reasons) - _SHOWN, 'more example')}")
    return "\n".join(lines)


def failure(event: dict[str, Any]) -> str:
    """Describe the first error that the audit found.

    Args:
        event: Event "offence".
    """
    lines = [f"audit failed: {event['text']}."]
    lines += [
        f"  example {number} is {location}"
        for number, location in event["places"].items()
        if location
    ]
    return "\n".join(lines)


def stages(
    settings: Settings,
    ready: dict[str, Any],
    measured: Sequence[dict[str, Any]],
    stored: float | None,
) -> str:
    """Tabulate the cost of each stage, and name the bottleneck of the data pipeline.

    Args:
        settings: Settings of the audit.
        ready: Event "ready" of a worker.
        measured: Events "stage", in the order of the stages.
        stored: Bytes of a stored example on average, or None if unknown.
    """
    parts = costs([(event["name"], event["rate"]) for event in measured])
    rows = [
        ("up to stage", "examples/s", "of the time"),
        *((cost.name, f"{cost.rate:,.0f}", f"{cost.part:.0%}") for cost in parts),
    ]
    bound = max(parts, key=lambda cost: cost.part)
    step = ready["global_batch"] / settings.workers / parts[-1].rate
    lines = [
        "",
        "worker 0 alone:",
        "\n".join(aligned(rows)),
        (
            f"bounded by: {bound.name}. A model that takes less than {1000 * step:.3g} ms a "
            "step waits for the next batch."
        ),
    ]
    if stored is not None:
        lines.append(
            f"stored: {stored:,.0f} bytes an example, {format_bytes(stored * parts[-1].rate)}/s"
        )
    return "\n".join(lines)


def _speed(examples: int, seconds: float, size: int) -> tuple[str, str, str, str]:
    return (
        f"{examples:,}",
        f"{seconds:.1f}",
        f"{examples / seconds:,.0f}",
        f"{size / seconds / 1e6:,.1f}",
    )


def _epochs(settings: Settings) -> str:
    last = settings.first_epoch + settings.epochs - 1
    return f"epoch {last}" if settings.epochs == 1 else f"epochs {settings.first_epoch} to {last}"
