"""The chapter of a run: key figures, plots and tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist import config
from tfdist.runtime.formatting import NOTHING, counted, duration, figure, moment
from tfdist.runtime.goodput import CATEGORIES, REMEDIES, Goodput
from tfdist.telemetry.step_records import per_step
from tfdist.tools.recovery import FaultReport
from tfdist.tools.report import curves, step_figures, timeline
from tfdist.tools.report.page import Chapter, Section, Table, Tile, drawn
from tfdist.tools.report.read import TRAINING, VALIDATION, Curve, Launch, Run
from tfdist.tools.report.run_files import section

_METRICS = 12  # most metrics that are plotted
_FAULTS = 60  # most rows in a table of faults
_SESSIONS = 60  # most rows in the table of sessions


def chapter(run: Run, name: str) -> Chapter:
    """Create the chapter of a run.

    Args:
        run: The run.
        name: Name of the chapter.
    """
    left = list(run.metrics)[_METRICS:]
    more = []
    if left:
        more.append(
            f"{counted(len(left), 'curve')} of {len(run.metrics)}, as a page shows {_METRICS}: "
            f"{', '.join(left[:20])}; TensorBoard has all"
        )
    sections = [
        _metrics(run),
        _throughput(run),
        _step_breakdown(run),
        _goodput(run),
        _history(run),
        _settings(run),
        _ending(run),
    ]
    return Chapter(
        name=name,
        title=run.name,
        subtitle=_subtitle(run),
        badge=_badge(run),
        tiles=tiles(run),
        sections=[section for section in sections if section is not None],
        problems=run.problems,
        absent=(*run.absent, *more),
    )


def tiles(run: Run) -> list[Tile]:
    """Return the key figures of a run, as far as its files have them."""
    run_tiles = []
    scores, of = final(run)
    for name, value in sorted(scores.items(), key=lambda item: item[0] == "loss"):
        run_tiles.append(Tile(percent(name, value), f"{name.replace('_', ' ')}, {of}"))
    speed = rate(run)
    if speed is not None:
        run_tiles.append(Tile(f"{speed:,.0f}", "examples/s"))
    epochs = done(run)
    if epochs is not None:
        planned = section(run.config, "train").get("epochs")
        if isinstance(planned, int) and planned != epochs:
            run_tiles.append(Tile(f"{epochs:,}", f"of {planned:,} epochs"))
        else:
            run_tiles.append(Tile.count(epochs, "epoch"))
    if run.goodput is not None:
        run_tiles.append(Tile(f"{100 * run.goodput.share:.1f} %", "goodput"))
    counts = {"replica": fact(run, "replicas"), "restart": run.restarts, "lost step": run.lost}
    run_tiles += [
        Tile.count(number, noun) for noun, number in counts.items() if isinstance(number, int)
    ]
    seconds = (run.summary or {}).get("seconds")
    if isinstance(seconds, int | float):
        run_tiles.append(
            Tile(duration(seconds), "in the last attempt" if run.restarts else "in all")
        )
    return run_tiles


def final(run: Run) -> tuple[dict[str, float], str]:
    """Return the last known values of at most three metrics, and their source in words."""
    names = [name for name in run.metrics if name != "learning_rate"][:3]
    summary = run.summary or {}
    scores = {
        name: float(value) for name in names if isinstance(value := summary.get(name), int | float)
    }
    if scores:
        return scores, "evaluation"
    for split in (VALIDATION, TRAINING):
        scores = {
            name: curve.y[-1]
            for name in names
            if (curve := run.metrics[name].get(split)) and curve.y
        }
        if scores:
            return (
                scores,
                f"{split}, last {next(iter(run.metrics[name][split].unit for name in scores))}",
            )
    return {}, ""


def percent(name: str, value: float) -> str:
    """Format a metric's value; a share is shown in per cent.

    Example:
        >>> percent("val_accuracy", 0.93602), percent("loss", 0.26629)
        ('93.60 %', '0.2663')
    """
    return f"{100 * value:.2f} %" if "accuracy" in name and 0 <= value <= 1 else figure(value)


def rate(run: Run) -> float | None:
    """Return the examples per second from the summary, else from the last epoch."""
    value = (run.summary or {}).get("examples_per_second")
    if isinstance(value, int | float):
        return float(value)
    return next((curve.y[-1] for curve in run.rates.values() if curve.y), None)


def done(run: Run) -> int | None:
    """Return the number of epochs that are done, or None if no file tells."""
    if run.epochs:
        return int(run.epochs[-1]["step"]) + 1
    ends = [curve.x[-1] for curve in _all(run) if curve.x and curve.unit == "epoch"]
    return int(max(ends)) if ends else None


def fact(run: Run, name: str) -> Any:
    """Return a value from the summary, else from the last session, else None."""
    sources: list[Mapping[str, Any]] = [run.summary or {}, *run.sessions[::-1][:1]]
    return next((source[name] for source in sources if source.get(name) is not None), None)


def _all(run: Run) -> Iterator[Curve]:
    for by_split in run.metrics.values():
        yield from by_split.values()


def _subtitle(run: Run) -> str:
    parts = []
    data, model = (section(run.config, key).get("name") for key in ("data", "model"))
    if model and data:
        parts.append(f"{model} on {data}")
    strategy = fact(run, "strategy")
    workers = fact(run, "workers")
    if strategy:
        parts.append(
            f"{strategy}, {counted(workers, 'worker')}"
            if isinstance(workers, int)
            else str(strategy)
        )
    if run.begun is not None:
        parts.append(f"begun {moment(run.begun)}")
    return " · ".join([*parts, str(run.path)])


def _badge(run: Run) -> tuple[str, bool] | None:
    if run.summary is not None:
        return "finished", True
    codes = [launch.recovery.code for launch in run.launches[-1:]]
    if codes == [0]:
        return "finished", True
    if run.config is None and not run.launches:
        return None  # logs of a script: no file has its state
    return (
        ("runs, or was killed", False)
        if codes in ([], [None])
        else (f"ended with code {codes[0]}", False)
    )


def _metrics(run: Run) -> Section | None:
    begins = _begins(run)
    figures = []
    for name, by_split in list(run.metrics.items())[:_METRICS]:
        figures.append(curves.metric(name, by_split))
        if run.begun is not None and name != "learning_rate":
            figures.append(curves.metric_over_time(name, by_split, run.begun, begins))
    curve_figures = drawn(*figures)
    names = list(
        dict.fromkeys(name for line in run.epochs for name in line if name not in ("step", "time"))
    )
    rows = [
        [
            str(int(line["step"]) + 1),
            *(figure(line[name]) if name in line else "" for name in names),
        ]
        for line in run.epochs
    ]
    table = Table(
        rows,
        ["epoch", *names],
        right=range(len(names) + 1),
        caption="All epochs in numbers",
        folded=True,
    )
    return Section("Curves", curve_figures, [table]) if curve_figures or rows else None


def _begins(run: Run) -> list[float]:
    """Return the times when training was restarted, in seconds since 1970."""
    if len(run.sessions) > 1:
        return [session["time"] for session in run.sessions[1:]]
    first_steps = [
        lane.first + launch.recovery.begun
        for launch in run.launches
        for lane in timeline.lanes(launch)
        if lane.first is not None
    ]
    return first_steps[1:]


def _throughput(run: Run) -> Section | None:
    figures = drawn(curves.throughput(run.step_breakdown), curves.rates(run.rates))
    return Section("Throughput", figures) if figures else None


def _step_breakdown(run: Run) -> Section | None:
    if not run.step_breakdown:
        return None
    figures = drawn(
        step_figures.by_worker(run.step_breakdown), step_figures.over_steps(run.step_breakdown)
    )
    rows = []
    for rank, windows in run.step_breakdown.items():
        parts = per_step(windows)
        if parts:
            whole = sum(parts.values())
            shares = {
                label: f"{1e3 * parts[part]:.3g} ms ({100 * parts[part] / whole:.0f} %)"
                for part, (label, _) in step_figures.NAMES.items()
            }
            rows.append({"": f"worker {rank}", "step": f"{1e3 * whole:.3g} ms", **shares})
    table = Table.of(rows, right=range(1, 8), caption="In numbers", folded=True)
    compiled = (
        "All windows contain calls that compiled, which do not represent a usual step: train for "
        "more steps."
    )
    text = [] if figures else [compiled]
    return Section("Where the time of a step goes", figures, [table], text)


def _goodput(run: Run) -> Section | None:
    goodput = run.goodput
    if goodput is None:
        return None
    rows = [
        {"": name, "time": duration(seconds), "share": share(seconds, goodput), "what": what}
        for name, what in CATEGORIES.items()
        if (seconds := goodput.seconds[name]) > 0
    ]
    losses = [
        {"largest losses": name, "time": duration(seconds), "remedy": REMEDIES[name]}
        for name, seconds in goodput.losses
    ]
    tables = [
        Table.of(rows, right=(1, 2), long=(3,), caption="Each second of the job"),
        Table.of(losses, right=(1,), long=(2,)),
    ]
    text = [
        f"Goodput {100 * goodput.share:.1f} %: the share of training in "
        f"{duration(goodput.wall)}, over {counted(goodput.attempts, 'attempt')}."
    ]
    return Section("Goodput", (), tables, [*text, *goodput.problems])


def share(seconds: float, goodput: Goodput) -> str:
    """Format a part of the job's time as a share of it."""
    return f"{100 * seconds / goodput.wall:.1f} %"


def _history(run: Run) -> Section | None:
    figures = []
    tables = []
    text = []
    for number, launch in enumerate(run.launches, 1):
        own = "" if len(run.launches) == 1 else f"-{number}"
        if any(lane.points for lane in timeline.lanes(launch)):
            figures.append(timeline.progress(launch, f"restarts{own}"))
        tables.append(_fault_table(launch))
        text.append(_launched(launch))
    if run.sessions:
        tables.append(_sessions(run))
    return (
        Section("Restarts and resumes", figures, tables, text)
        if run.launches or run.sessions
        else None
    )


def _launched(launch: Launch) -> str:
    recovery = launch.recovery
    here = os.path.relpath(launch.path)
    text = (
        f"Launch in {launch.path if here.startswith('..') else here}, "
        f"{moment(recovery.begun)}: {counted(len(recovery.attempts), 'attempt')} in "
        f"{duration(recovery.seconds)}, "
    )
    text += f"{counted(launch.lost, 'step')} lost"
    if recovery.interval is not None:
        text += f", a snapshot every {counted(recovery.interval, 'step')}"
    if recovery.code is None:
        return text + ". It has not ended: it runs, or its launcher was killed."
    if recovery.code:
        return text + (
            ". It ended with code "
            f"{recovery.code}{f': {recovery.refusal}' if recovery.refusal else ''}."
        )
    return text + "."


def _fault_table(launch: Launch) -> Table:
    def seconds(value: float | None) -> str:
        return NOTHING if value is None else duration(value)

    fault_reports: list[FaultReport] = launch.recovery.fault_reports
    rows = [
        {
            "": str(number),
            "fault": fault_report.text,
            "struck at": seconds(fault_report.when),
            "detected after": seconds(fault_report.detected),
            "recovered after": seconds(fault_report.recovered),
            "lost steps": NOTHING if fault_report.lost is None else f"{fault_report.lost:,}",
            "resumed from": fault_report.origin or NOTHING,
        }
        for number, fault_report in enumerate(fault_reports[:_FAULTS], 1)
    ]
    caption = "What each fault has cost"
    if len(fault_reports) > _FAULTS:
        caption += f"; the first {_FAULTS} of {len(fault_reports)}, `tfdist chaos report` has all"
    return Table.of(rows, right=(2, 3, 4, 5), caption=caption)


def _sessions(run: Run) -> Table:
    rows = []
    for session in run.sessions[-_SESSIONS:]:
        row = {
            "begun": moment(session["time"]),
            "from": f"epoch {session['epoch'] + 1}, step {session['step']}",
            "": "resumed" if session.get("resumed") else "new",
        }
        for key in ("attempt", "strategy", "workers", "replicas", "global_batch"):
            value = session.get(key)
            row[key.replace("_", " ")] = NOTHING if value is None else str(value)
        rows.append(row)
    once = len(rows) == 1
    return Table.of(rows, right=(3, 5, 6, 7), caption="Each start of training", folded=once)


def _settings(run: Run) -> Section | None:
    tables = []
    default = config.Run().to_dict()
    plain: list[tuple[str, str, bool]] = []
    for key, value in (run.config or {}).items():
        if isinstance(value, dict):
            rows = list(_flat(value, default.get(key)))
            tables.append(_two(key, rows))
        else:
            plain.append((key, words(value), value != default.get(key, value)))
    if plain:
        tables.insert(0, _two("run", plain))
    if run.sessions:
        tables.append(_versions(run))
    text = ["Bold: differs from the default."] if run.config else []
    return Section("Configuration and versions", (), tables, text, columns=True) if tables else None


def _flat(
    section: Mapping[str, Any], default: Any, prefix: str = ""
) -> Iterator[tuple[str, str, bool]]:
    default = default if isinstance(default, dict) else {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, default.get(key), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", words(value), default.get(key) != value


def _two(title: str, rows: list[tuple[str, str, bool]]) -> Table:
    return Table(
        [row[:2] for row in rows],
        marked=[index for index, row in enumerate(rows) if row[2]],
        caption=title,
    )


def _versions(run: Run) -> Table:
    by_name: dict[str, dict[str, None]] = {}
    for session in run.sessions:
        for name, version in (session.get("versions") or {}).items():
            by_name.setdefault(str(name), {})[str(version)] = None
    rows = [
        (name, ", then ".join(versions), len(versions) > 1) for name, versions in by_name.items()
    ]
    return _two("versions", rows)


def _ending(run: Run) -> Section | None:
    rows = [[key, words(value)] for key, value in (run.summary or {}).items()]
    files = [
        [os.path.relpath(path, run.path) if run.path in path.parents else str(path)]
        for path in run.files
    ]
    tables = [
        Table(rows, caption="Final summary"),
        Table(files, caption=f"{counted(len(files), 'file')} read", folded=True),
    ]
    return Section("Summary", (), tables, columns=True) if rows or files else None


def words(value: Any) -> str:
    """Format a JSON value for a table.

    Example:
        >>> words(True), words(0.004), words({"a": 1})
        ('yes', '0.004', '{"a": 1}')
    """
    if value is None or value in ([], {}):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(words, value))
    if isinstance(value, float):
        return figure(value)
    return value if isinstance(value, str) else json.dumps(value)
