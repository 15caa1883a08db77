"""Figures of step breakdowns: a bar per worker or setup, and layers over the steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.runtime.formatting import scaled
from tfdist.telemetry.step_records import PARTS, Window, per_step
from tfdist.tools.report import style
from tfdist.tools.report.curves import shorten
from tfdist.tools.report.style import Figure

# In the order of the layers: work, then what distribution adds, then what keeps the devices idle.
NAMES = {
    "forward_backward": ("forward, backward", style.BLUE),
    "update": ("update", style.SKY),
    "gradient_sync": ("gradient sync", style.ORANGE),
    "wait": ("waiting for others", style.RED),
    "input": ("input", style.GREEN),
    "host": ("host", style.GREY),
}
assert set(NAMES) == set(PARTS)
_BINS = 60  # approximate number of bins of the layers
_ROWS = 24  # most bars of a figure


def by_worker(step_breakdown: Mapping[int, Sequence[Window]]) -> Figure | None:
    """Draw one bar per worker that breaks down its mean step.

    Return None if all windows compiled.
    """
    rows = [
        (f"worker {rank}", parts)
        for rank, windows in step_breakdown.items()
        if (parts := per_step(windows))
    ]
    return stacked("step_breakdown-by-worker", "A mean step of each worker", rows) if rows else None


def stacked(name: str, title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> Figure:
    """Draw one stacked bar per name.

    Args:
        name: Name of the figure's file.
        title: Title of the figure.
        rows: Pairs of a name and the seconds of each of `PARTS` in a step.
    """
    left = len(rows) - _ROWS
    caption = "Steps of calls that compiled are left out."
    if left > 0:
        caption += f" The first {_ROWS} of {len(rows)} are shown."
    draw = functools.partial(_bars, title=title, rows=rows[:_ROWS])
    return Figure(name, title, caption, draw, (style.WIDE[0], 1.45 + 0.3 * min(len(rows), _ROWS)))


def over_steps(step_breakdown: Mapping[int, Sequence[Window]]) -> Figure | None:
    """Plot the step breakdown over the steps, as layers of a mean over all workers.

    Return None if there are fewer than two windows to draw.
    """
    windows = [
        window for own in step_breakdown.values() for window in final_windows(own) if window.steady
    ]
    ends = sorted({window.step for window in windows})
    if len(ends) < 2:
        return None
    first = min(window.step - window.steps for window in windows)
    edges = [first]
    layers = []
    for end in ends:
        # Windows of few steps, as at the beginning of an epoch, are merged into the next one.
        if end - edges[-1] < (ends[-1] - first) / _BINS and end != ends[-1]:
            continue
        parts = per_step(window for window in windows if edges[-1] < window.step <= end)
        edges.append(end)
        layers.append(parts)
    title = "The step over training"
    caption = (
        "Mean of all workers. Of steps that were done twice, the later time; windows that "
        "compiled are left out."
    )
    step_times = [1e3 * sum(parts.values()) for parts in layers]
    top = outlier_free_limit(step_times, [high - low for low, high in itertools.pairwise(edges)])
    if top < max(step_times):
        caption += (
            f" Steps above {scaled(top)} ms are cut off at the top; the longest took "
            f"{scaled(max(step_times))} ms."
        )
    return Figure(
        "step_breakdown-over-steps",
        title,
        caption,
        functools.partial(_layers, title=title, edges=edges, layers=layers, top=top),
        style.WIDE,
    )


def outlier_free_limit(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return an axis limit that keeps a few outliers from shrinking the other values.

    Args:
        values: One or more values.
        weights: Weight of each value.

    Example:
        >>> outlier_free_limit([10.0, 11.0, 12.0], [1, 1, 1])
        13.0
        >>> outlier_free_limit([10.0] * 30 + [500.0], [1] * 31)
        15.0
    """
    ranked = sorted(zip(values, weights, strict=True))
    sums = itertools.accumulate(weight for _, weight in ranked)
    most = next(
        value for (value, _), done in zip(ranked, sums, strict=True) if done >= 0.95 * sum(weights)
    )
    return 1.5 * most if max(values) > 2 * most else round(max(values) * 13 / 12, 9)


def final_windows(windows: Sequence[Window]) -> list[Window]:
    """Return the windows whose steps were not repeated later, sorted by step.

    Steps are repeated after a restart, for example.

    Example:
        >>> parts = dict.fromkeys(PARTS, 0.1)
        >>> first, lost, again = (
        ...     Window(0, time, 0, step, 8, 512, 0.6, parts)
        ...     for time, step in ((1.0, 8), (2.0, 16), (9.0, 16))
        ... )
        >>> [window.time for window in final_windows([first, lost, again])]
        [1.0, 9.0]
    """
    final: list[Window] = []
    for window in sorted(windows, key=lambda window: -window.time):
        if not final or window.step <= final[-1].step - final[-1].steps:
            final.append(window)
    return final[::-1]


def _bars(drawing: Any, *, title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    axes = drawing.add_subplot()
    axes.set_title(shorten(title, 80))
    positions = list(range(len(rows)))
    left = [0.0] * len(rows)
    widest = max(sum(parts.values()) for _, parts in rows)
    for part, (label, colour) in NAMES.items():
        widths = [1e3 * parts.get(part, 0.0) for _, parts in rows]
        axes.barh(
            positions,
            widths,
            left=left,
            color=colour,
            height=0.62,
            label=label,
            edgecolor=style.PAPER,
            linewidth=0.6,
        )
        for position, begin, width in zip(positions, left, widths, strict=True):
            share = width / (1e3 * sum(rows[position][1].values()) or 1.0)
            # `width` is in ms and `widest` in s: 4.5 % of the longest bar is enough for a label.
            if width > 45 * widest:
                dark = colour in (style.ORANGE, style.SKY, style.GREY)
                axes.text(
                    begin + width / 2,
                    position,
                    f"{100 * share:.0f} %",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="#10151b" if dark else "#fdfdfd",
                )
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for position, total in zip(positions, left, strict=True):
        axes.text(total + 12 * widest, position, f"{scaled(total)} ms", va="center", fontsize=7.5)
    axes.set_xlim(0, 1110 * widest)
    axes.set_yticks(positions, [shorten(name, 34) for name, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda value, _: scaled(value))
    axes.set_xlabel("time per step [ms]")
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)


def _layers(
    drawing: Any,
    *,
    title: str,
    edges: Sequence[int],
    layers: Sequence[Mapping[str, float]],
    top: float,
) -> None:
    axes = drawing.add_subplot()
    axes.set_title(title)
    values = [[1e3 * parts[part] for parts in layers] for part in NAMES]
    axes.stackplot(
        edges,
        [[*row, row[-1]] for row in values],
        step="post",
        colors=[colour for _, colour in NAMES.values()],
        labels=[label for label, _ in NAMES.values()],
        edgecolor=style.PAPER,
        linewidth=0.3,
    )
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, top)
    axes.set_xlabel("steps since training began")
    axes.set_ylabel("time per step [ms]")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: scaled(value))
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
