"""Chapters that compare several runs, or the setups of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.runtime.formatting import (
    NOTHING,
    TIMES,
    counted,
    duration,
    figure,
    format_bytes,
    moment,
)
from tfdist.tools.bench.results import Setup
from tfdist.tools.report import bench, curves, scaling, step_figures
from tfdist.tools.report.bench import ALLREDUCE, PREDICT, SCALING, Benchmark, label
from tfdist.tools.report.outline import done, fact, final, percent, rate, words
from tfdist.tools.report.page import Chapter, Section, Table, Tile, drawn
from tfdist.tools.report.read import TRAINING, VALIDATION, Run

_METRICS = 4  # most metrics that are compared in figures


def of_runs(directory: Path, runs: Sequence[Run], others: Sequence[Path]) -> Chapter:
    """Create a chapter that compares the runs of a directory.

    Args:
        directory: Directory of the runs.
        runs: One or more runs.
        others: Benchmarks in the directory, which have reports of their own.
    """
    names = list(
        dict.fromkeys(name for run in runs for name in run.metrics if name != "learning_rate")
    )
    figures = []
    for name in names[:_METRICS]:
        of = [(run, run.metrics.get(name, {})) for run in runs]
        split = VALIDATION if all(VALIDATION in metric for _, metric in of if metric) else TRAINING
        figures.append(
            curves.compared(
                name, [(run.name, metric[split]) for run, metric in of if split in metric], split
            )
        )
    speeds = [(run.name, speed) for run in runs if (speed := rate(run)) is not None]
    if len(speeds) > 1:
        figures.append(curves.bars("compared-throughput", "Throughput", speeds, "examples/s"))
    finished = sum(run.summary is not None for run in runs)
    return Chapter(
        name="overview",
        title=f"{counted(len(runs), 'run')} in {directory.resolve().name}",
        subtitle=str(directory),
        badge=None,
        tiles=[
            Tile.count(len(runs), "run"),
            Tile(str(finished), "finished"),
            *_best(runs),
        ],
        sections=[
            Section("Comparison", drawn(*figures), [_table(runs, names[:_METRICS])]),
        ],
        absent=[
            f"the benchmark {path}: it has a page of its own, tfdist report {path}"
            for path in others
        ],
    )


def of_benchmark(benchmark: Benchmark) -> Chapter:
    """Create the chapter of a benchmark."""
    setups = benchmark.setups
    if benchmark.kind == ALLREDUCE:
        sections = [
            Section(
                "Sums over the replicas",
                drawn(scaling.bandwidth(setups), scaling.latency(setups)),
                [_sums(setups)],
            )
        ]
    elif benchmark.kind == PREDICT:
        sections = [Section("Inference", drawn(scaling.inference(setups)), [_setups(setups)])]
    else:
        modes = [scaling.scaling(setups, mode) for mode in ("strong", "weak")]
        sections = [
            Section("Scaling", drawn(*modes, scaling.efficiency(setups)), [_setups(setups)])
        ]
    rows = [
        (label(setup), summed)
        for setup in setups
        if sum((summed := bench.parts(setup)).values()) > 0
    ]
    if rows:
        bars = step_figures.stacked("step_breakdown-by-setup", "A mean step of each setup", rows)
        sections.append(Section("Where the time of a step goes", [bars]))
    tables = []
    for title in ("options", "machine", "versions"):
        facts = benchmark.section(title)
        if title == "machine" and isinstance(facts.get("memory"), int):
            facts = {**facts, "memory": format_bytes(facts["memory"])}
        tables.append(Table([[key, words(value)] for key, value in facts.items()], caption=title))
    for title, part in benchmark.section("config").items():
        if isinstance(part, dict):
            tables.append(
                Table(
                    [[key, words(value)] for key, value in part.items()], caption=f"config.{title}"
                )
            )
    sections.append(Section("Configuration, machine and versions", (), tables, columns=True))
    if benchmark.notes:
        sections.insert(1, Section("Notes", text=benchmark.notes))
    failed = [f"{label(setup)}: {setup.error}" for setup in setups if setup.error]
    absent = (
        []
        if rows or benchmark.kind == ALLREDUCE
        else ["no step breakdown: this benchmark has measured none"]
    )
    when = benchmark.facts.get("time")
    parts = [
        str(benchmark.facts.get("command") or ""),
        moment(when) if isinstance(when, int | float) else "",
        str(benchmark.path),
    ]
    return Chapter(
        name="benchmark",
        title=(
            f"{benchmark.facts.get('name') or benchmark.path.resolve().name}: "
            f"{_KINDS[benchmark.kind]}"
        ),
        subtitle=" · ".join(filter(None, parts)),
        badge=(f"{counted(len(failed), 'setup')} failed", False) if failed else None,
        tiles=_tiles(benchmark),
        sections=[
            section
            for section in sections
            if section.figures or section.text or any(table.rows for table in section.tables)
        ],
        problems=[*benchmark.problems, *failed],
        absent=absent,
    )


_KINDS = {SCALING: "scaling", PREDICT: "inference", ALLREDUCE: "all-reduce"}


def _best(runs: Sequence[Run]) -> list[Tile]:
    tiles = []
    scores = [
        (percent("accuracy", final(run)[0]["accuracy"]), final(run)[0]["accuracy"], run.name)
        for run in runs
        if "accuracy" in final(run)[0]
    ]
    if scores:
        text, _, name = max(scores, key=lambda score: score[1])
        tiles.append(Tile(text, f"best accuracy: {name}"))
    speeds = [(speed, run.name) for run in runs if (speed := rate(run)) is not None]
    if speeds:
        tiles.append(Tile(f"{max(speeds)[0]:,.0f}", f"most examples/s: {max(speeds)[1]}"))
    return tiles


def _table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    head = ["run", "", *names, "examples/s", "epochs", "replicas", "restarts", "lost steps", "time"]
    head.append("strategy")
    rows = []
    for run in runs:
        scores = final(run)[0]
        speed = rate(run)
        seconds = (run.summary or {}).get("seconds")
        facts = [done(run), fact(run, "replicas"), run.restarts, run.lost]
        rows.append(
            [
                run.name,
                "finished" if run.summary is not None else "not finished",
                *(percent(name, scores[name]) if name in scores else NOTHING for name in names),
                NOTHING if speed is None else f"{speed:,.0f}",
                *(NOTHING if value is None else str(value) for value in facts),
                duration(seconds) if isinstance(seconds, int | float) else NOTHING,
                str(fact(run, "strategy") or NOTHING),
            ]
        )
    return Table(rows, head, right=range(2, len(head) - 1))


def _tiles(benchmark: Benchmark) -> list[Tile]:
    setups = [setup for setup in benchmark.setups if not setup.error]
    machine = benchmark.section("machine")
    tiles = []
    fastest = max((setup for setup in setups if setup.rates), key=bench.rate, default=None)
    if fastest:
        batch = f", batch {fastest.global_batch:,}" if fastest.global_batch else ""
        tiles.append(Tile(f"{fastest.rate:,.0f}", f"examples/s at most: {label(fastest)}{batch}"))
    scaled = [
        setup
        for setup in setups
        if setup.speedup and setup.efficiency is not None and setup.replicas > 1
    ]
    if scaled:
        most = max(scaled, key=lambda setup: setup.speedup or 0.0)
        tiles.append(Tile(f"{most.speedup:.2f}{TIMES}", f"largest speed-up: {label(most)}"))
        best = max(scaled, key=lambda setup: setup.efficiency or 0.0)
        tiles.append(
            Tile(f"{100 * (best.efficiency or 0.0):.0f} %", f"best efficiency: {label(best)}")
        )
    summed = [setup for setup in setups if setup.seconds] if benchmark.kind == ALLREDUCE else []
    if summed:
        wide = max(summed, key=lambda setup: setup.bus_bandwidth)
        tiles.append(
            Tile(f"{format_bytes(wide.bus_bandwidth)}/s", f"bandwidth at most: {label(wide)}")
        )
        quick = min(summed, key=lambda setup: setup.step)
        tiles.append(Tile(duration(quick.step), f"shortest sum: {label(quick)}"))
    tiles.append(Tile.count(len(benchmark.setups), "setup"))
    if machine.get("cores"):
        tiles.append(Tile(str(machine["cores"]), "cores"))
    if machine.get("gpus"):
        tiles.append(Tile(str(len(machine["gpus"])), "GPUs"))
    return tiles


def _setups(setups: Sequence[Setup]) -> Table:
    rows = []
    for setup in setups:
        spread = (
            f"{setup.rate:,.0f} ({min(setup.rates):,.0f} to {max(setup.rates):,.0f})"
            if setup.rates
            else NOTHING
        )
        efficiency = NOTHING if setup.efficiency is None else f"{100 * setup.efficiency:.0f} %"
        row = {
            "setup": label(setup),
            "workers": str(setup.workers),
            "global batch": f"{setup.global_batch:,}",
            "examples/s (spread)": spread,
            "step": f"{1e3 * setup.step:.3g} ms" if setup.seconds else NOTHING,
            "speed-up": NOTHING if setup.speedup is None else f"{setup.speedup:.2f}",
            "efficiency": efficiency,
        }
        if any(one.error or one.reason for one in setups):
            row["reason"] = setup.error or setup.reason or NOTHING
        rows.append(row)
    return Table.of(
        rows,
        right=range(1, 7),
        long=(7,),
        caption="Medians of the rounds; the spread is from the slowest to the fastest",
    )


def _sums(setups: Sequence[Setup]) -> Table:
    rows = []
    for setup in setups:
        times = NOTHING
        wide = NOTHING
        if setup.seconds:
            least = duration(min(setup.seconds))
            most = duration(max(setup.seconds))
            times = f"{duration(setup.step)} ({least} to {most})"
            wide = f"{figure(setup.bus_bandwidth / 1e9)} GB/s"
        rows.append(
            {
                "setup": label(setup),
                "workers": str(setup.workers),
                "bytes": f"{setup.bytes:,}",
                "time (spread)": times,
                "bus bandwidth": wide,
                "": setup.error or setup.reason,
            }
        )
    return Table.of(
        rows,
        right=range(1, 5),
        long=(5,),
        caption="Medians of the rounds; the spread is from the fastest to the slowest",
    )
