"""Figures of a run's curves: metrics over epochs and over time, and throughput."""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.runtime.formatting import scaled, units_of_time
from tfdist.telemetry.step_records import Window
from tfdist.tools.report import style
from tfdist.tools.report.read import TRAINING, VALIDATION, Curve
from tfdist.tools.report.style import Figure

_DOTS = 40  # curves with at most this many points show a marker at each
_LEGEND = 8  # most names in a legend
_COLOURS = {TRAINING: style.BLUE, VALIDATION: style.ORANGE}


def metric(name: str, curves: Mapping[str, Curve]) -> Figure | None:
    """Plot a metric of training and validation over epochs or steps.

    Return None if it has no finite value.
    """
    nonempty = {split: curve for split, curve in curves.items() if curve.y}
    if not nonempty:
        return None
    unit = next(iter(nonempty.values())).unit
    lines = [(split, curve.x, curve.y, _COLOURS[split], "-") for split, curve in nonempty.items()]
    return Figure(
        f"{slug(name)}",
        _title(name),
        "",
        functools.partial(_lines, title=_title(name), lines=lines, x=unit, y=name),
    )


def metric_over_time(
    name: str, curves: Mapping[str, Curve], begun: float, begins: Sequence[float]
) -> Figure | None:
    """Plot a metric over wall time, or return None if no file has the times.

    Args:
        name: Name of the metric.
        curves: Curves of training and validation.
        begun: Time when the run began, in seconds since 1970.
        begins: Times when the run was restarted, in seconds since 1970.
    """
    timed = {split: curve for split, curve in curves.items() if curve.times}
    if not timed:
        return None
    longest = max(curve.times[-1] for curve in timed.values()) - begun
    size, unit = units_of_time(longest)
    lines = [
        (split, [(t - begun) / size for t in curve.times], curve.y, _COLOURS[split], "-")
        for split, curve in timed.items()
    ]
    timestamps = [(when - begun) / size for when in begins]
    draw = functools.partial(
        _lines,
        title=f"{_title(name)} over time",
        lines=lines,
        x=f"time since the run began [{unit}]",
        y=name,
        timestamps=timestamps,
    )
    return Figure(f"{slug(name)}-over-time", f"{_title(name)} over time", "", draw)


def rates(curves: Mapping[str, Curve]) -> Figure | None:
    """Plot the examples per second of each epoch by worker; None without any values."""
    nonempty = {who: curve for who, curve in curves.items() if curve.y}
    if not nonempty:
        return None
    lines = [
        (who, curve.x, curve.y, colour, dash)
        for (who, curve), (colour, dash) in zip(nonempty.items(), looks(), strict=False)
    ]
    title = "Throughput by epoch"
    caption = (
        "Examples of all replicas together; validation is not counted. The first epoch compiles."
    )
    draw = functools.partial(_lines, title=title, lines=lines, x="epoch", y="examples/s", zero=True)
    return Figure("throughput-by-epoch", title, caption, draw)


def throughput(step_breakdown: Mapping[int, Sequence[Window]]) -> Figure | None:
    """Plot the examples per second of each window of steps by worker.

    Return None if no window is left after those that compiled are left out.
    """
    nonempty = {
        rank: [window for window in windows if window.steady]
        for rank, windows in step_breakdown.items()
    }
    nonempty = {rank: windows for rank, windows in nonempty.items() if windows}
    if not nonempty:
        return None
    begun = min(
        window.time - window.seconds for windows in step_breakdown.values() for window in windows
    )
    size, unit = units_of_time(max(windows[-1].time for windows in nonempty.values()) - begun)
    lines = []
    for (rank, windows), (colour, dash) in zip(nonempty.items(), looks(), strict=False):
        points = _points(windows, begun)
        lines.append(
            (
                f"worker {rank}",
                [at / size for at, _ in points],
                [rate for _, rate in points],
                colour,
                dash,
            )
        )
    title = "Throughput by worker"
    caption = (
        "Examples of the global batches that each worker took part in, by its own clock; "
        "windows that compiled are left out."
    )
    draw = functools.partial(
        _lines,
        title=title,
        lines=lines,
        x=f"time since the first step [{unit}]",
        y="examples/s",
        zero=True,
    )
    return Figure("throughput-by-worker", title, caption, draw)


def compared(name: str, runs: Sequence[tuple[str, Curve]], split: str) -> Figure | None:
    """Plot one metric of several runs, or return None if fewer than two runs have it.

    Args:
        name: Name of the metric.
        runs: Pairs of a run's name and its curve.
        split: Split that the curves belong to, "training" or "validation".
    """
    nonempty = [(run, curve) for run, curve in runs if curve.y]
    if len(nonempty) < 2:
        return None
    lines = [
        (run, curve.x, curve.y, colour, dash)
        for (run, curve), (colour, dash) in zip(nonempty, looks(), strict=False)
    ]
    draw = functools.partial(
        _lines, title=f"{_title(name)}, {split}", lines=lines, x=nonempty[0][1].unit, y=name
    )
    return Figure(f"compared-{slug(name)}", f"{_title(name)} of the runs, {split}", "", draw)


def bars(
    name: str, title: str, values: Sequence[tuple[str, float]], unit: str, caption: str = ""
) -> Figure:
    """Draw one bar per name."""
    return Figure(
        name,
        title,
        caption,
        functools.partial(_bars, title=title, values=values, unit=unit),
        (style.NARROW[0], 1.3 + 0.26 * len(values)),
    )


def looks() -> itertools.chain:
    """Return colours and dashes for any number of lines, distinct in greyscale, too."""
    return itertools.chain.from_iterable(
        itertools.repeat([(colour, dash) for dash in style.DASHES for colour in style.CYCLE], 50)
    )


def slug(name: str) -> str:
    """Convert a name to a part of a file name.

    Example:
        >>> slug("Top 5/accuracy")
        'top-5-accuracy'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "metric"


def shorten(text: str, length: int = 28) -> str:
    """Shorten a text so that it fits into a legend.

    Example:
        >>> shorten("a very long name of a run", 11)
        'a very lon…'
    """
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def legend(drawing: Any, axes: Any, columns: int = 4, least: int = 2) -> None:
    """Draw a legend beneath the axes, where it covers no curve.

    There is no legend for fewer lines than `least`.
    """
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < least:
        return
    if len(labels) > _LEGEND:
        handles = handles[: _LEGEND - 1]
        labels = [*labels[: _LEGEND - 1]]
        handles.append(axes.plot([], [], " ")[0])
        labels.append(f"and {len(axes.get_legend_handles_labels()[1]) - _LEGEND + 1} more")
    longest = max(map(len, labels))
    drawing.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), columns, max(1, 60 // (longest + 6))),
    )


def _points(windows: Sequence[Window], begun: float) -> list[tuple[float, float]]:
    """Return pairs of a time in seconds since `begun` and the examples per second.

    There is a gap (NaN) where a window's steps do not continue those of the previous window.
    Windows of few steps, as at the beginning of an epoch, are merged into the next window.
    """
    few = statistics.median(window.steps for window in windows) / 2
    points: list[tuple[float, float]] = []
    group: list[Window] = []
    before = None
    for window in sorted(windows, key=lambda window: window.time):
        if before is not None and window.step - window.steps != before.step:
            points.append((window.time - begun, math.nan))
            group = []
        group = [*group, window]
        before = window
        if sum(one.steps for one in group) >= few:
            points.append(
                (
                    window.time - begun,
                    sum(one.examples for one in group) / sum(one.seconds for one in group),
                )
            )
            group = []
    return points


def _lines(
    drawing: Any,
    *,
    title: str,
    lines: Sequence[tuple[str, Sequence[float], Sequence[float], str, str]],
    x: str,
    y: str,
    timestamps: Sequence[float] = (),
    zero: bool = False,
) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = drawing.add_subplot()
    axes.set_title(shorten(title, 48))
    for mark in timestamps:
        axes.axvline(
            mark,
            color=style.RED,
            linewidth=0.9,
            linestyle=":",
            label="begun again" if mark == timestamps[0] else None,
        )
    for name, xs, ys, colour, dash in lines:
        dots = "o" if len(xs) <= _DOTS else None
        axes.plot(xs, ys, color=colour, linestyle=dash, marker=dots, label=shorten(name))
    values = [value for _, _, ys, _, _ in lines for value in ys if not math.isnan(value)]
    if min(values) > 0 and max(values) > 100 * min(values) and not zero:
        axes.set_yscale("log")
    elif zero:
        axes.set_ylim(0, 1.08 * max(values) or 1)
    if x == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        first = min(min(xs) for _, xs, _, _, _ in lines)
        last = max(max(xs) for _, xs, _, _, _ in lines)
        axes.set_xlim(first - 0.3, last + 0.3)
    if "time" in x:
        axes.set_xlim(left=0)
    axes.set_xlabel(x)
    axes.set_ylabel(shorten(y, 36))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter(lambda value, _: scaled(value))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    legend(drawing, axes)


def _bars(drawing: Any, *, title: str, values: Sequence[tuple[str, float]], unit: str) -> None:
    axes = drawing.add_subplot()
    axes.set_title(shorten(title, 48))
    positions = range(len(values))
    drawn = axes.barh(positions, [value for _, value in values], color=style.BLUE, height=0.62)
    axes.bar_label(drawn, [scaled(value) for _, value in values], padding=4, color=style.INK)
    axes.set_yticks(positions, [shorten(name, 22) for name, _ in values])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.15 * max([value for _, value in values] + [1e-9]))
    axes.xaxis.set_major_formatter(lambda value, _: scaled(value))
    axes.set_xlabel(unit)


def _title(name: str) -> str:
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]
