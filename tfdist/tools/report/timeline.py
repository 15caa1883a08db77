"""Timeline figure of a launch: training progress, and the phases of each attempt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from tfdist.runtime.fault_plan import EVENT
from tfdist.runtime.formatting import scaled, units_of_time
from tfdist.tools.recovery import Attempt
from tfdist.tools.report import style
from tfdist.tools.report.read import Launch
from tfdist.tools.report.style import Figure

_LANES = 30  # most attempts of a figure
_SAVES = 400  # more marks would blur into a band
_NEAR = 0.025  # faults closer than this share of the axis have one label


@dataclasses.dataclass(frozen=True)
class Lane:
    """An attempt on the time axis; all times are in seconds since the launch began.

    Attributes:
        number: Number of the attempt, from 0.
        begin: Time when its tasks were started.
        first: Time when its first step was done; None if no step was done.
        detected: Time when a failure was detected; None if none was.
        end: Time when all its tasks had ended, or else the time of its last event.
        restored: Time when its state was restored; None if it started from scratch.
        saves: Times when snapshots were complete.
        points: Pairs (time, steps since training began), in order.
    """

    number: int
    begin: float
    first: float | None
    detected: float | None
    end: float
    restored: float | None
    saves: tuple[float, ...]
    points: tuple[tuple[float, int], ...]


def lanes(launch: Launch) -> list[Lane]:
    """Return the attempts of a launch as lanes of the time axis."""
    begun = launch.recovery.begun
    return [_lane(attempt, begun) for attempt in launch.recovery.attempts]


def progress(launch: Launch, name: str) -> Figure:
    """Plot the steps over time, and the phases of each attempt.

    Args:
        launch: The launch.
        name: Name of the figure's file.
    """
    attempts = lanes(launch)
    title = "Steps done, and what each attempt did"
    caption = (
        "Where the line goes back, steps were lost; they were done again from the snapshot "
        "that was restored."
    )
    if len(attempts) > _LANES:
        caption += f" The last {_LANES} of {len(attempts)} attempts are shown."
    faults = [(number, fault.when) for number, fault in enumerate(launch.recovery.fault_reports, 1)]
    draw = functools.partial(
        _draw,
        title=title,
        attempts=attempts[-_LANES:],
        faults=faults,
        end=launch.recovery.seconds,
    )
    return Figure(
        name, title, caption, draw, (style.WIDE[0], 3.5 + 0.2 * min(len(attempts), _LANES))
    )


def grouped(faults: Sequence[tuple[int, float]], near: float) -> list[tuple[str, float]]:
    """Group the numbers of faults that are too close to each other to be shown apart.

    Args:
        faults: Pairs of a fault's number and its time.
        near: Distance for one number below which faults share a label, in the unit of the times.

    Returns:
        Pairs of a label and its time, which is that of the group's first fault.

    Example:
        >>> grouped([(1, 10.0), (2, 10.5), (3, 30.0)], near=1.0)
        [('1, 2', 10.0), ('3', 30.0)]
    """
    groups: list[tuple[list[int], float]] = []
    for number, when in sorted(faults, key=lambda fault: fault[1]):
        if groups and when - groups[-1][1] < near * len(groups[-1][0]):
            groups[-1][0].append(number)
        else:
            groups.append(([number], when))
    return [
        (
            ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} to {numbers[-1]}",
            when,
        )
        for numbers, when in groups
    ]


def _lane(attempt: Attempt, begun: float) -> Lane:
    lines = attempt.lines
    own = [
        line for line in lines if line["event"] in ("restored", "stepping", "saved", EVENT, "ended")
    ]
    points = sorted(
        (line["time"] - begun, int(line["total"])) for line in own if line.get("total") is not None
    )

    def when(event: str) -> float | None:
        line = attempt.first(event)
        return None if line is None else line["time"] - begun

    ended = when("ended")
    return Lane(
        number=lines[0]["attempt"],
        begin=lines[0]["time"] - begun,
        first=when("stepping"),
        detected=when("detected"),
        end=lines[-1]["time"] - begun if ended is None else ended,
        restored=when("restored"),
        saves=tuple(line["time"] - begun for line in lines if line["event"] == "saved"),
        points=tuple(points),
    )


def _draw(
    drawing: Any,
    *,
    title: str,
    attempts: Sequence[Lane],
    faults: Sequence[tuple[int, float]],
    end: float,
) -> None:
    size, unit = units_of_time(end)
    above, below = drawing.subplots(2, sharex=True, height_ratios=(2.2, 0.45 + 0.2 * len(attempts)))
    above.set_title(title, pad=17)  # leaves space for the numbers of faults
    for lane, after in zip(attempts, [*attempts[1:], None], strict=True):
        if lane.points and after and after.points:
            t, step = lane.points[-1]
            later, again = after.points[0]
            above.plot(
                [t / size, later / size],
                [step, again],
                color=style.MUTED,
                linestyle=":",
                linewidth=1,
            )
        if lane.points:
            above.plot(
                [t / size for t, _ in lane.points],
                [step for _, step in lane.points],
                color=style.BLUE,
                marker="o",
                markersize=2.5,
                clip_on=False,
            )
    above.set_ylabel("steps done")
    above.set_ylim(bottom=0)
    above.yaxis.set_major_formatter(lambda value, _: scaled(value))
    above.tick_params(axis="x", length=0)

    positions = list(range(len(attempts)))
    for label, colour, spans in _phases(attempts):
        below.barh(
            [position for position, _, _ in spans],
            [(b - a) / size for _, a, b in spans],
            left=[a / size for _, a, _ in spans],
            color=colour,
            height=0.6,
            label=label,
        )
    saves = [(t / size, position) for position, lane in enumerate(attempts) for t in lane.saves]
    if 0 < len(saves) <= _SAVES:
        below.plot(
            *zip(*saves, strict=True),
            "|",
            color=style.INK,
            markersize=6,
            markeredgewidth=0.9,
            label="saved",
        )
    restored = [
        (lane.restored / size, position)
        for position, lane in enumerate(attempts)
        if lane.restored is not None
    ]
    if restored:
        below.plot(
            *zip(*restored, strict=True), "^", color=style.GREEN, markersize=5.5, label="restored"
        )
    shown = [fault for fault in faults if fault[1] >= attempts[0].begin]
    for _, when in shown:
        for axes in (above, below):
            axes.axvline(
                when / size,
                color=style.RED,
                linewidth=0.9,
                linestyle=":",
                label="fault" if axes is below and when == shown[0][1] else None,
            )
    for text, when in grouped(shown, _NEAR * max(end, 1e-9)):
        above.text(
            when / size,
            1.0,
            text,
            color=style.RED,
            ha="center",
            va="bottom",
            fontsize=7,
            fontweight="bold",
            transform=above.get_xaxis_transform(),
        )
    below.set_yticks(positions, [f"attempt {lane.number}" for lane in attempts])
    below.set_ylim(len(attempts) - 0.4, -0.6)
    below.grid(visible=False, axis="y")
    first = attempts[0].begin / size
    last = max(end, 1e-9) / size
    below.set_xlim(first, last + 0.01 * (last - first))
    below.set_xlabel(f"time since the launch began [{unit}]")
    handles, labels = below.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=6)


def _phases(attempts: Sequence[Lane]) -> list[tuple[str, str, list[tuple[int, float, float]]]]:
    """Return the phases of all attempts, without phases that no attempt had.

    Each phase has a name, a colour and its spans `(row, from, to)`.
    """
    starting = []
    training = []
    ending = []
    for position, lane in enumerate(attempts):
        failed = lane.end if lane.detected is None else lane.detected
        first = failed if lane.first is None else min(lane.first, failed)
        starting.append((position, lane.begin, first))
        training.append((position, first, failed))
        ending.append((position, failed, lane.end))
    phases = (
        ("starting", style.GREY, starting),
        ("training", style.SKY, training),
        ("ending", style.ORANGE, ending),
    )
    return [
        (name, colour, nonempty)
        for name, colour, spans in phases
        if (nonempty := [span for span in spans if span[2] > span[1]])
    ]
