"""Sentences that compare the setups of a benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tfdist.runtime.formatting import counted, format_bytes, milliseconds
from tfdist.tools.bench.results import MODES, Setup

STORAGE_NOTE = (
    "Central storage (data parallel) keeps one copy of the variables, copied out to the replicas "
    "in each step; mirrored (distributed data parallel) keeps a copy on each, and sums gradients."
)
BANDWIDTHS = (
    "Algorithm bandwidth is the bytes of a replica over the time of a sum; bus bandwidth is "
    "2 (n - 1) / n of it, what each of n replicas sends in a ring, so that numbers of replicas "
    "can be compared."
)


def notes(kind: str, setups: Sequence[Setup]) -> tuple[str, ...]:
    """Return sentences that compare setups, to be printed after the tables.

    Args:
        kind: Kind of benchmark, one of `results.KINDS`.
        setups: Setups that were measured.

    Returns:
        Sentences. For training, they compare central storage with mirrored. For inference, they
        give the speed-up of more devices on small and on large batches. For all-reduces, they give
        the latency and bandwidth of each strategy.
    """
    done = [setup for setup in setups if setup.seconds]
    if kind == "scaling":
        pairs = [
            sentence
            for mode in MODES
            for sentence in _central(mode, [setup for setup in done if mode in setup.modes])
        ]
        return (*pairs, STORAGE_NOTE) if pairs else ()
    by_group: dict[tuple[str, int], list[Setup]] = {}
    for setup in done:
        by_group.setdefault((setup.strategy, setup.replicas), []).append(setup)
    write = _predicted if kind == "predict" else _reduced
    sentences = tuple(sentence for group in by_group.values() if (sentence := write(group)))
    return (*sentences, BANDWIDTHS) if sentences and kind == "allreduce" else sentences


def _central(mode: str, setups: Sequence[Setup]) -> list[str]:
    """Compare central storage with mirrored at the largest number of replicas of both."""
    central, mirrored = (
        {s.replicas: s for s in setups if s.replicas > 1 and s.strategy == name}
        for name in ("central_storage", "mirrored")
    )
    common = central.keys() & mirrored.keys()
    if not common:
        return []
    pair = central[max(common)], mirrored[max(common)]
    first, second = sorted(pair, key=lambda setup: setup.rate, reverse=True)
    # Compare rates of the same round: a slow phase of the machine affects both.
    ratios = [quick / slow for quick, slow in zip(first.rates, second.rates, strict=False)]
    return [
        f"{mode.capitalize()} scaling, {counted(first.replicas, 'replica')}: {first.strategy} is "
        f"{statistics.median(ratios):.2f} times as fast as {second.strategy} ({min(ratios):.2f} "
        f"to {max(ratios):.2f} over the rounds)."
    ]


def _predicted(group: Sequence[Setup]) -> str:
    """Return the speed-up of more devices, on the smallest and on the largest batch."""
    known = sorted(
        (setup for setup in group if setup.speedup is not None and setup.replicas > 1),
        key=lambda setup: setup.global_batch,
    )
    if not known:
        return ""
    cases = [
        f"{setup.speedup:.2f} times the speed of one on batches of {setup.global_batch}"
        for setup in known[:1] + known[1:][-1:]
    ]
    return f"{known[0].strategy} with {counted(known[0].replicas, 'device')}: {', '.join(cases)}."


def _reduced(group: Sequence[Setup]) -> str:
    least = min(group, key=lambda setup: setup.bytes)
    best = max(group, key=lambda setup: setup.bus_bandwidth)
    return (
        f"{least.strategy} with {counted(least.replicas, 'replica')}: latency "
        f"{milliseconds(least.step)} (the median of {format_bytes(least.bytes, binary=True)}), "
        f"bandwidth up to {format_bytes(best.bus_bandwidth)}/s on the bus "
        f"(at {format_bytes(best.bytes, binary=True)})."
    )
