"""Parser for a run's directory; missing files are reported with a remedy."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.runtime.goodput import Goodput, Line, measure, with_open_attempt
from tfdist.runtime.launch_protocol import JOURNAL
from tfdist.telemetry import layout
from tfdist.telemetry.step_records import Window
from tfdist.tools.bench.results import FILE
from tfdist.tools.recovery import Recovery, read_recovery
from tfdist.tools.report import tensorboard_events
from tfdist.tools.report.run_files import Reader, number, section

TRAINING = "training"
VALIDATION = "validation"
_OLD_LOGS = "logs"  # older versions and many scripts keep train/ and validation/ in here
_NO_METRICS = {"step", "seconds", "time"}  # keys of history.jsonl that are not metrics
RATE = "speed/examples_per_second"  # a curve of tfdist.TensorBoard
_SKIPPED = (
    "speed/",
    "goodput/",
    "step_breakdown/",
    "evaluation_",
    "batch_",
)  # curves of each batch, and curves that have figures of their own


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values of one quantity, in order.

    Attributes:
        x: Number of epochs or steps done at each value.
        y: Values, all finite.
        times: Time of each value in seconds since 1970; empty if unknown.
        unit: Unit of x, "epoch" or "step".
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    times: tuple[float, ...] = ()
    unit: str = "epoch"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch, as recorded in the launcher's journal.

    Attributes:
        path: Directory of the launcher.
        recovery: Costs of its faults.
        journal: Lines of the journal, with an end of an attempt that has none.
    """

    path: Path
    recovery: Recovery
    journal: Sequence[Line] = ()

    @property
    def restarts(self) -> int:
        """Return the number of times that the launcher restarted all tasks."""
        return max(0, len(self.recovery.attempts) - 1)

    @property
    def lost(self) -> int:
        """Return the number of steps that had to be repeated."""
        return sum(self.recovery.lost_steps)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, as recorded in its files.

    Attributes:
        path: Directory of the run.
        summary: Final results; None if the run has not finished, or if it was a script's.
        config: Settings of the run; None if there are none.
        sessions: Starts of training.
        epochs: Lines of history.jsonl, in order.
        metrics: Curves of training and validation, by metric.
        rates: Examples per second of each epoch, by worker.
        step_breakdown: Windows of steps, by rank.
        launches: Launches that started the run, in order.
        problems: Sentences about damage in its files.
        absent: Sentences about missing parts, and how to get them.
        files: Files that were read.
    """

    path: Path
    summary: dict[str, Any] | None
    config: dict[str, Any] | None
    sessions: tuple[dict[str, Any], ...]
    epochs: tuple[dict[str, Any], ...]
    metrics: dict[str, dict[str, Curve]]
    rates: dict[str, Curve]
    step_breakdown: dict[int, list[Window]]
    launches: tuple[Launch, ...]
    problems: tuple[str, ...]
    absent: tuple[str, ...]
    files: tuple[Path, ...]

    @functools.cached_property
    def name(self) -> str:
        """Return the name of the run.

        This is the name from its settings, followed by the directory's name if that does not begin
        with it. A run without settings has the name of its directory.
        """
        own = self.path.resolve().name
        named = (self.config or {}).get("name") or (self.summary or {}).get("name")
        return own if not named or own.startswith(str(named)) else f"{named} ({own})"

    @property
    def restarts(self) -> int | None:
        """Return the number of restarts, by launchers or by hand; None if no file contains it."""
        by_launchers = sum(launch.restarts for launch in self.launches)
        known = bool(self.sessions or self.launches)
        return (
            max(by_launchers + max(0, len(self.launches) - 1), len(self.sessions) - 1, 0)
            if known
            else None
        )

    @property
    def lost(self) -> int | None:
        """Return the number of steps that had to be repeated; None without a journal."""
        return sum(launch.lost for launch in self.launches) if self.launches else None

    @functools.cached_property
    def goodput(self) -> Goodput | None:
        """Return where the time of its launches went; None if their journals do not tell."""
        goodput = measure([launch.journal for launch in self.launches])
        return goodput if goodput.tasks else None

    @functools.cached_property
    def begun(self) -> float | None:
        """Return the time when the run began, in seconds since 1970; None if it is not known."""
        times = [session["time"] for session in self.sessions[:1]]
        times += [launch.recovery.begun for launch in self.launches[:1]]
        times += [
            curve.times[0]
            for curves in self.metrics.values()
            for curve in curves.values()
            if curve.times
        ]
        return min(times, default=None)


def is_run(directory: Path) -> bool:
    """Return whether a directory has files of a run."""
    if any(
        (directory / name).is_file()
        for name in (layout.CONFIG, layout.SESSIONS, layout.HISTORY, layout.SUMMARY)
    ):
        return True
    return any(
        next(files.glob(tensorboard_events.PATTERN), None)
        for directories in _event_directories(directory).values()
        for files in directories
    )


def is_benchmark(directory: Path) -> bool:
    """Return whether a directory has the file of a benchmark."""
    return (directory / FILE).is_file()


def read_run(directory: Path, launches: Sequence[Path] = ()) -> Run:
    """Read a run.

    Args:
        directory: Directory of the run.
        launches: Directories of launchers, in addition to those that the run's sessions name.
    """
    reader = Reader()
    absent = []
    sessions = sorted(
        reader.lines(directory / layout.SESSIONS, _session), key=lambda line: line["time"]
    )
    epochs = {
        line["step"]: line for line in reader.lines(directory / layout.HISTORY, _epoch)
    }  # if an epoch was written twice, the later line counts
    history = [epochs[step] for step in sorted(epochs)]
    written = {
        split: tensorboard_events.scalars(directories, reader)
        for split, directories in _event_directories(directory).items()
    }
    metrics = _of_history(history) or _of_events(written)
    rates = _rates(directory, written, reader)
    step_breakdown = {
        rank: windows
        for rank, worker_directory in layout.worker_directories(directory).items()
        if (windows := reader.lines(worker_directory / layout.STEP_BREAKDOWN, _window))
    }
    if not metrics:
        absent.append(
            f"no curves: no epoch is done, or neither {layout.HISTORY} nor event files of "
            "tfdist.TensorBoard are here"
        )
    if not rates and not step_breakdown:
        absent.append("no throughput: train with tfdist.TensorBoard, which `tfdist train` does")
    config = reader.object(directory / layout.CONFIG)
    if not step_breakdown:
        why = (
            "no worker has written one yet"
            if section(config, "telemetry").get("step_breakdown")
            else "train with --config.telemetry.step_breakdown=true"
        )
        absent.append(f"no step breakdown: {why}")
    run_launches = _launches(directory, sessions, launches, reader, absent)
    if config is None:
        absent.append(f"no configuration: there is no {layout.CONFIG}, which `tfdist train` writes")
    summary = reader.object(directory / layout.SUMMARY)
    if summary is None:
        absent.append(
            f"no final summary: there is no {layout.SUMMARY}, which `tfdist train` writes "
            "at its end"
        )
    bad = [
        f"{name} of {split} is not finite after {unit} {x:g}"
        for name, split, unit, x in _infinite(history)
    ]
    return Run(
        path=directory,
        summary=summary,
        config=config,
        sessions=tuple(sessions),
        epochs=tuple(history),
        metrics=metrics,
        rates=rates,
        step_breakdown=step_breakdown,
        launches=tuple(run_launches),
        problems=(*reader.problems, *bad),
        absent=tuple(absent),
        files=tuple(reader.paths),
    )


def _event_directories(directory: Path) -> dict[str, list[Path]]:
    """Return the directories that may hold event files of training and of validation."""
    roots = (directory, directory / _OLD_LOGS)
    return {
        TRAINING: [*(root / "train" for root in roots), *roots],
        VALIDATION: [root / "validation" for root in roots],
    }


def _session(line: dict[str, Any]) -> dict[str, Any]:
    versions = line.get("versions") or {}
    launch = line.get("launch")
    if not isinstance(versions, dict) or not isinstance(launch, str | None):
        raise ValueError("expected versions and a launch")
    if not math.isfinite(number(line["time"])):
        raise ValueError("expected a time")
    return {
        **line,
        "time": number(line["time"]),
        "epoch": int(number(line.get("epoch", 0))),
        "step": int(number(line.get("step", 0))),
    }


def _epoch(line: dict[str, Any]) -> dict[str, Any]:
    return {
        key: number(value)
        for key, value in line.items()
        if key == "step" or isinstance(value, int | float)
    } | {"step": int(line["step"])}


def _window(line: dict[str, Any]) -> Window:
    window = Window.from_json(line)
    numbers = (
        window.time,
        window.step,
        window.steps,
        window.examples,
        window.seconds,
        window.bytes,
        *window.parts.values(),
    )
    if (
        not all(math.isfinite(number(value)) for value in numbers)
        or window.steps < 1
        or window.seconds <= 0
    ):
        raise ValueError("expected steps and seconds")
    return window


def _of_history(history: Sequence[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Return the curves of history.jsonl."""
    names = list(
        dict.fromkeys(name for line in history for name in line if name not in _NO_METRICS)
    )
    metrics: dict[str, dict[str, Curve]] = {}
    for name in names:
        finite = [line for line in history if math.isfinite(line.get(name, math.nan))]
        timed = finite and all(line.get("time") for line in finite)
        split = VALIDATION if name.startswith("val_") else TRAINING
        curve = Curve(
            x=tuple(line["step"] + 1 for line in finite),
            y=tuple(line[name] for line in finite),
            times=tuple(line["time"] for line in finite) if timed else (),
        )
        metrics.setdefault(name.removeprefix("val_"), {})[split] = curve
    return dict(sorted(metrics.items(), key=lambda item: _rank(item[0])))


def _of_events(
    written: dict[str, dict[str, list[tensorboard_events.Scalar]]],
) -> dict[str, dict[str, Curve]]:
    """Return the curves of event files: Keras' epoch curves and a script's own curves."""
    metrics: dict[str, dict[str, Curve]] = {}
    for split, curves in written.items():
        for tag, scalars in curves.items():
            if not tag.startswith(_SKIPPED):
                name = tag.removeprefix("epoch_")
                metrics.setdefault(name, {})[split] = _curve(
                    scalars, by_epoch=tag.startswith("epoch_")
                )
    return dict(sorted(metrics.items(), key=lambda item: _rank(item[0])))


def _curve(scalars: Sequence[tensorboard_events.Scalar], by_epoch: bool) -> Curve:
    finite = [scalar for scalar in scalars if math.isfinite(scalar.value)]
    return Curve(
        x=tuple(scalar.step + by_epoch for scalar in finite),
        y=tuple(scalar.value for scalar in finite),
        times=tuple(scalar.time for scalar in finite),
        unit="epoch" if by_epoch else "step",
    )


def _rates(
    directory: Path, written: dict[str, dict[str, list[tensorboard_events.Scalar]]], reader: Reader
) -> dict[str, Curve]:
    """Return the examples per second by worker.

    Where the workers have no curves of their own, the result holds the chief's curve only.
    """
    rates = {}
    roots = (directory, directory / _OLD_LOGS)
    for rank, worker_directory in [
        item for root in roots for item in layout.worker_directories(root).items()
    ]:
        curves = tensorboard_events.scalars((worker_directory, worker_directory / "train"), reader)
        if RATE in curves:
            rates[f"worker {rank}"] = _curve(curves[RATE], by_epoch=True)
    if not rates and RATE in written[TRAINING]:
        rates["chief"] = _curve(written[TRAINING][RATE], by_epoch=True)
    return rates


def _launches(
    directory: Path,
    sessions: Sequence[dict[str, Any]],
    directories: Sequence[Path],
    reader: Reader,
    absent: list[str],
) -> list[Launch]:
    """Return the launches that have a journal, in chronological order."""
    named = dict.fromkeys(session["launch"] for session in sessions if session.get("launch"))
    by_path = {path.resolve(): path for path in directories}
    for name in named:
        path = find_launch(directory, Path(name))
        if path is None:
            absent.append(
                f"no restarts of the launch in {name}: it was moved or removed; "
                "name it with --launch DIR"
            )
        else:
            by_path.setdefault(path.resolve(), path)
    if not named and not directories:
        absent.append(
            "no restarts on the time axis: not started by `tfdist launch`, according to "
            "its files; if it was, name its logs with --launch DIR"
        )
    launches = [launch for path in by_path.values() if (launch := _launch(path, reader))]
    return sorted(launches, key=lambda launch: launch.recovery.begun)


def find_launch(directory: Path, launch: Path) -> Path | None:
    """Find a launcher's directory that a session names, or return None.

    A relative name is resolved against the current directory, and then against the two directories
    above the run. The last place is a directory of the same name beside the run.
    """
    above = directory.resolve()
    candidates = [
        launch,
        *(parent / launch for parent in (above.parent.parent, above.parent)),
        above.parent / launch.name,
    ]
    return next((candidate for candidate in candidates if (candidate / JOURNAL).is_file()), None)


def _launch(directory: Path, reader: Reader) -> Launch | None:
    recovery = read_recovery(directory, reader)
    if recovery is None:
        return None
    return Launch(directory, recovery, with_open_attempt(recovery.journal, str(directory)))


def _infinite(history: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, float]]:
    """Return the first epoch at which each metric of history.jsonl is infinite or NaN.

    Each entry holds the metric, the split, the unit and the epoch.
    """
    first_infinite: dict[str, tuple[str, str, str, float]] = {}
    for line in history:
        for name, value in line.items():
            if not math.isfinite(value):
                split = VALIDATION if name.startswith("val_") else TRAINING
                first_infinite.setdefault(
                    name, (name.removeprefix("val_"), split, "epoch", line["step"] + 1)
                )
    return list(first_infinite.values())


def _rank(name: str) -> tuple[int, str]:
    """Return a sort key: the loss first, then other metrics, the learning rate last."""
    return ({"loss": 0, "learning_rate": 2}.get(name, 1), name)
