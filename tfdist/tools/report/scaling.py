"""Figures of a benchmark: scaling, efficiency, inference and all-reduce bandwidth."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.runtime.formatting import TIMES, format_bytes, scaled
from tfdist.tools.bench.results import Setup
from tfdist.tools.report import style
from tfdist.tools.report.bench import label, rate
from tfdist.tools.report.curves import legend, looks, shorten
from tfdist.tools.report.style import Figure

_TITLES = {
    "strong": (
        "Strong scaling",
        (
            "The global batch stays what it is: replicas share its examples. Bars reach from "
            "the slowest round to the fastest."
        ),
    ),
    "weak": (
        "Weak scaling",
        (
            "The global batch grows with the replicas. Bars reach from the slowest round to "
            "the fastest."
        ),
    ),
}


def scaling(setups: Sequence[Setup], mode: str) -> Figure | None:
    """Plot examples per second over replicas, with the ideal line.

    Return None if nothing was measured in this mode.

    Args:
        setups: Setups of the benchmark.
        mode: "strong" or "weak".
    """
    measured = [setup for setup in setups if mode in setup.modes and setup.rates]
    if not measured:
        return None
    title, caption = _TITLES[mode]
    return Figure(
        f"scaling-{mode}",
        title,
        caption,
        functools.partial(_scaling, title=title, setups=measured),
        (style.NARROW[0], 3.2),
    )


def efficiency(setups: Sequence[Setup]) -> Figure | None:
    """Draw one bar per setup with several replicas, or return None if there is none."""
    measured = [setup for setup in setups if setup.efficiency is not None and setup.replicas > 1]
    if not measured:
        return None
    title = "Efficiency"
    caption = "Speed-up over one replica, divided by the number of replicas: 100 % is ideal."
    return Figure(
        "efficiency",
        title,
        caption,
        functools.partial(_efficiency, title=title, setups=measured),
        (style.WIDE[0], 1.3 + 0.28 * len(measured)),
    )


def inference(setups: Sequence[Setup]) -> Figure | None:
    """Plot examples per second over the batch size; None if nothing was measured."""
    title = "Inference"
    caption = (
        "Examples per second of all replicas. Bars reach from the slowest round to the fastest."
    )
    return _over(
        "inference",
        title,
        caption,
        setups,
        lambda setup: setup.global_batch,
        lambda setup: setup.rates,
        "global batch [examples]",
        "examples/s",
    )


def bandwidth(setups: Sequence[Setup]) -> Figure | None:
    """Plot the all-reduce bandwidth over its bytes; None if nothing was measured."""
    title = "Bandwidth"

    def rates(setup: Setup) -> list[float]:
        return [
            setup.bus_bandwidth * setup.step / seconds / 1e9 for seconds in setup.seconds if seconds
        ]

    caption = (
        "Bytes that cross each link in a second (bus bandwidth). Bars reach from the slowest "
        "round to the fastest."
    )
    return _over(
        "bandwidth",
        title,
        caption,
        setups,
        lambda setup: setup.bytes,
        rates,
        "bytes of the sum",
        "GB/s",
    )


def latency(setups: Sequence[Setup]) -> Figure | None:
    """Plot the all-reduce time over its bytes; None if nothing was measured."""
    title = "Time of a sum"
    return _over(
        "latency",
        title,
        "Small sums show the latency, large ones the bandwidth.",
        setups,
        lambda setup: setup.bytes,
        lambda setup: [1e3 * seconds for seconds in setup.seconds],
        "bytes of the sum",
        "ms",
        log=True,
    )


def _over(
    name: str,
    title: str,
    caption: str,
    setups: Sequence[Setup],
    x: Callable[[Setup], float],
    y: Callable[[Setup], Sequence[float]],
    x_label: str,
    y_label: str,
    log: bool = False,
) -> Figure | None:
    lines: dict[str, list[tuple[float, Sequence[float]]]] = {}
    for setup in sorted(setups, key=x):
        values = [value for value in y(setup) if value > 0]
        if values and x(setup) > 0:
            lines.setdefault(f"{setup.strategy} {TIMES}{setup.replicas}", []).append(
                (x(setup), values)
            )
    if not lines:
        return None
    draw = functools.partial(_lines, title=title, lines=lines, x=x_label, y=y_label, log=log)
    return Figure(name, title, caption, draw, (style.NARROW[0], 3.1))


def _lines(
    drawing: Any,
    *,
    title: str,
    lines: dict[str, list[tuple[float, Sequence[float]]]],
    x: str,
    y: str,
    log: bool,
) -> None:
    axes = drawing.add_subplot()
    axes.set_title(title)
    for (name, points), (colour, dash) in zip(lines.items(), looks(), strict=False):
        _points(axes, [(at, values) for at, values in points], colour, dash, name)
    ticks = sorted({at for points in lines.values() for at, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        ticks, [format_bytes(tick, binary=True) if "bytes" in x else scaled(tick) for tick in ticks]
    )
    axes.set_xticks([], minor=True)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: scaled(value))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    legend(drawing, axes, least=1)


def _scaling(drawing: Any, *, title: str, setups: Sequence[Setup]) -> None:
    axes = drawing.add_subplot()
    axes.set_title(title)
    one = _baseline(setups)
    most = max(setup.replicas for setup in setups)
    if one is not None and most > 1:
        axes.plot(
            [1, most],
            [one, one * most],
            color=style.MUTED,
            linestyle="--",
            linewidth=1.1,
            label="ideal",
        )
    names = list(dict.fromkeys(setup.strategy for setup in setups))
    for index, (name, (colour, _)) in enumerate(zip(names, looks(), strict=False)):
        own = sorted(
            (setup for setup in setups if setup.strategy == name), key=lambda setup: setup.replicas
        )
        # Shift the points of each strategy, so that their bars stand side by side.
        shift = 0.012 * most * (index - (len(names) - 1) / 2)
        points = [(setup.replicas + shift, setup.rates) for setup in own]
        _points(axes, points, colour, "-", name)
        if one is not None and own[0].replicas > 1:
            axes.plot(
                [1, points[0][0]],
                [one, statistics.median(points[0][1])],
                color=colour,
                linestyle=":",
                linewidth=1,
            )
    axes.set_xticks(sorted({setup.replicas for setup in setups}))
    axes.set_xlim(0.8 if most > 1 else 0.5, most + 0.06 * most + 0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("replicas")
    axes.set_ylabel("examples/s")
    axes.yaxis.set_major_formatter(lambda value, _: scaled(value))
    legend(drawing, axes, columns=3, least=1)


def _points(
    axes: Any, points: Sequence[tuple[float, Sequence[float]]], colour: str, dash: str, name: str
) -> None:
    """Plot a line of medians, each with a bar from the smallest to the largest value."""
    middles = [statistics.median(values) for _, values in points]
    axes.errorbar(
        [at for at, _ in points],
        middles,
        yerr=[
            [middle - min(values) for middle, (_, values) in zip(middles, points, strict=True)],
            [max(values) - middle for middle, (_, values) in zip(middles, points, strict=True)],
        ],
        color=colour,
        linestyle=dash,
        marker="o",
        markersize=4,
        capsize=2.5,
        elinewidth=1,
        label=shorten(name),
    )


def _efficiency(drawing: Any, *, title: str, setups: Sequence[Setup]) -> None:
    axes = drawing.add_subplot()
    axes.set_title(title)
    positions = range(len(setups))
    values = [100 * (setup.efficiency or 0.0) for setup in setups]
    colours = [style.ORANGE if setup.modes == ("weak",) else style.BLUE for setup in setups]
    drawn = axes.barh(positions, values, color=colours, height=0.62)
    axes.bar_label(drawn, [f"{value:.0f} %" for value in values], padding=4, color=style.INK)
    axes.axvline(100, color=style.MUTED, linestyle="--", linewidth=1.1)
    axes.set_yticks(positions, [shorten(label(setup), 40) for setup in setups])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(112.0, 1.1 * max(values)))
    axes.set_xlabel("efficiency [%]")


def _baseline(setups: Sequence[Setup]) -> float | None:
    """Return the examples per second of one replica, or None if it was not measured."""
    rates = [rate(setup) / setup.speedup for setup in setups if setup.speedup]
    return statistics.median(rates) if rates else None
