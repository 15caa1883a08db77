"""Sweeps: the runs of all combinations of some keys' values, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist import config
from tfdist.cluster import resolvers
from tfdist.runtime.cli_arguments import number_or_variable
from tfdist.runtime.command import INTERRUPTED_CODE
from tfdist.runtime.formatting import aligned, counted
from tfdist.runtime.guardian import Guardian, kill_group
from tfdist.runtime.launch_protocol import PREEMPTED_CODE, Launched, environment
from tfdist.runtime.termination import deferred_signals, ending
from tfdist.telemetry.layout import CONFIG, SUMMARY

FLAG = "--sweep"
INDEX_FLAG = "--sweep-index"
FAILED_CODE = 1
SAVE_S = 60.0  # for a run to save a snapshot and end, after a signal
LABEL_LENGTH = 150  # of the name of a directory
_NOT_SWEPT = ("name", "output.dir")  # they choose the directories
_COMPARED = ("name", "data", "model", "train", "sync", "parallel")  # sections that decide results


@dataclasses.dataclass(frozen=True)
class Request:
    """A sweep as the command line describes it.

    Attributes:
        values: Values of each key, as texts. Empty: there is no sweep.
        index: Number of the one combination to run, from 0; None: all of them.
        words: The other words of the command line.
    """

    values: Mapping[str, Sequence[str]]
    index: int | None
    words: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run of a sweep.

    Attributes:
        values: Value of each key, as text.
        settings: Settings of the run, with its directory.
        words: Words for `tfdist train`.
    """

    values: Mapping[str, str]
    settings: config.Run
    words: Sequence[str]

    @property
    def directory(self) -> Path:
        """Return the directory of the run."""
        return Path(self.settings.output.dir or "")

    @property
    def label(self) -> str:
        """Return the values as one text, such as "learning_rate=0.1,seed=2"."""
        names = short_keys(self.values)
        return ",".join(f"{names[key]}={value}" for key, value in self.values.items())

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of the finished run; None if it is not finished.

        Raises:
            ValueError: If the directory has a run with other settings, which is finished or would
                resume.
        """
        summary = _read_json(self.directory / SUMMARY)
        if summary is None and not (self.directory / "backup").is_dir():
            return None
        state = "interrupted" if summary is None else "finished"
        there = _read_json(self.directory / CONFIG) or {}
        here = json.loads(json.dumps(self.settings.to_dict()))
        for section in _COMPARED:
            if found := _difference(section, there.get(section, here[section]), here[section]):
                raise ValueError(
                    f"{FLAG}: {self.directory} holds a run that is {state}, with {found}. Remove "
                    "that directory, or name another one for the sweep, --config.output.dir=DIR."
                )
        return summary


def split(words: Sequence[str]) -> Request:
    """Set the flags of a sweep apart from the other words of a command line.

    Args:
        words: Words after `tfdist train`.

    Raises:
        ValueError: If a flag, a key or a value is wrong.

    Example:
        >>> request = split(["--config=a.py", "--sweep", "train.seed=1,2", "--sweep-index=1"])
        >>> request.values, request.index, request.words
        ({'train.seed': ['1', '2']}, 1, ['--config=a.py'])
    """
    values: dict[str, Sequence[str]] = {}
    index = None
    left = []
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if flag not in (FLAG, INDEX_FLAG):
            left.append(word)
            continue
        text = text if equals else next(rest, "")
        if flag == INDEX_FLAG:
            index = number_or_variable(INDEX_FLAG, text)
            continue
        key, equals, listed = text.partition("=")
        key = key.removeprefix("--").removeprefix("config.")
        if not equals or not key:
            raise ValueError(
                f"{FLAG}: expected a key and its values, such as train.learning_rate=0.01,0.1; "
                f"received {text!r}."
            )
        if key in values:
            raise ValueError(f"{FLAG} {text}: expected each key once, received {key} twice.")
        values[key] = _values(key, listed)
    if index is not None and not values:
        raise ValueError(f"{INDEX_FLAG}={index}: expected together with {FLAG}, received alone.")
    for key in values:
        config.check_key(key)
        if key in _NOT_SWEPT:
            raise ValueError(
                f"{FLAG} {key}: expected another key; the values of a sweep name the directories "
                "of its runs."
            )
        given = [
            word for word in left if re.match(rf"--?(no)?config\.{re.escape(key)}([.=]|$)", word)
        ]
        if given:
            raise ValueError(f"{given[0]}: {FLAG} sets this key too. Remove one of them.")
    return Request(values, index, left)


def plan(request: Request, parse: Callable[[Sequence[str]], config.Run]) -> list[Planned]:
    """Return the runs of a sweep; the values of its last key vary fastest.

    Args:
        request: Sweep as the command line describes it.
        parse: Function that returns the settings of a command line.

    Raises:
        ValueError: If settings are wrong, or two runs have the same settings or directory.
    """
    runs: list[Planned] = []
    for combination in itertools.product(*request.values.values()):
        values = dict(zip(request.values, combination, strict=True))
        words = [
            *request.words,
            *(f"--config.{key}={value}" for key, value in values.items()),
        ]
        try:
            settings = parse(words)
        except ValueError as error:
            chosen = " ".join(f"{key}={value}" for key, value in values.items())
            raise ValueError(f"{FLAG} {chosen}: {error}") from error
        root = Path(settings.output.dir or f"runs/{settings.name}-sweep")
        directory = root / directory_name(values)
        output = dataclasses.replace(settings.output, dir=str(directory))
        run = Planned(
            values,
            dataclasses.replace(settings, output=output),
            [*words, f"--config.output.dir={directory}"],
        )
        for other in runs:
            same = dataclasses.replace(other.settings, output=output) == run.settings
            if same or other.directory == directory:
                raise ValueError(
                    f"{FLAG}: expected runs that differ, received {other.label} and {run.label}, "
                    f"which have the same {'settings' if same else 'directory'}."
                )
        runs.append(run)
    if request.index is not None and request.index >= len(runs):
        raise ValueError(
            f"{INDEX_FLAG}={request.index}: expected a number from 0 to {len(runs) - 1}, because "
            f"the sweep has {counted(len(runs), 'run')}."
        )
    return runs


def short_keys(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return a short name of each key: its last part, unless another key has the same.

    Example:
        >>> short_keys({"train.seed": 1, "sync.every": 2, "model.options.every": 3})
        {'train.seed': 'seed', 'sync.every': 'sync.every', 'model.options.every': 'model.options.every'}
    """  # noqa: E501
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }


def directory_name(values: Mapping[str, str]) -> str:
    """Return the name of the directory of a run.

    Example:
        >>> directory_name({"train.learning_rate": "0.1", "model.options.widths": "(8, 8)"})
        'learning_rate=0.1,widths=8-8'
    """
    names = short_keys(values)
    name = ",".join(
        f"{names[key]}={re.sub(r'[^A-Za-z0-9_.+-]+', '-', value).strip('-')}"
        for key, value in values.items()
    )
    if len(name) <= LABEL_LENGTH:
        return name
    return f"{name[:LABEL_LENGTH]}-{zlib.crc32(name.encode()):08x}"


def check_alone(runs: Sequence[Planned]) -> None:
    """Raise ValueError if this process is one of several tasks, which cannot sweep together."""
    where = runs[0].settings.strategy
    spec = resolvers.resolve(where.cluster, where.task)
    task = Launched.from_environ().task or (
        f"{spec.task_type}:{spec.task_index}" if spec is not None else ""
    )
    if task:
        raise ValueError(
            f"{FLAG}: expected a process that trains alone, received the task {task} of a cluster. "
            f"Give each combination a launch of its own, with {INDEX_FLAG} 0 to {len(runs) - 1}."
        )


def run_all(runs: Sequence[Planned]) -> int:
    """Train all runs that are not finished, each in a process of its own, and print a table.

    A run that fails does not end the sweep. A signal does, after the current run has saved a
    snapshot.

    Args:
        runs: Runs that `plan` returned.

    Returns:
        The exit code.

    Raises:
        ValueError: If a directory has a finished run with other settings.
    """
    for run in runs:  # before any of them takes its time
        run.summary()
    states: dict[int, str] = {}
    code = 0
    for number, run in enumerate(runs):
        done = run.summary() is not None
        print(
            f"{'' if done else chr(10)}sweep, run {number + 1} of {len(runs)}: {run.label} in "
            f"{run.directory}{' is already done' if done else ''}",
            flush=True,
        )
        if done:
            continue
        ended, stopped = _train(run)
        if stopped or ended in (PREEMPTED_CODE, INTERRUPTED_CODE):
            code = INTERRUPTED_CODE if stopped == signal.SIGINT else ended
            if stopped and code not in (PREEMPTED_CODE, INTERRUPTED_CODE):
                code = 128 + stopped
            states[number] = "interrupted"
            break
        if ended or run.summary() is None:
            states[number] = f"failed, {_reason(ended)}"
    print("\n".join(["", *table(runs, states)]), flush=True)
    failed = [runs[i].label for i, state in states.items() if state.startswith("failed")]
    if failed:
        print(
            f"\n{counted(len(failed), 'run')} of {len(runs)} failed: {'; '.join(failed)}. The same "
            "command runs them again.",
            file=sys.stderr,
            flush=True,
        )
    if code:
        print("\ninterrupted; the same command goes on", file=sys.stderr, flush=True)
    return code or (FAILED_CODE if failed else 0)


def table(runs: Sequence[Planned], states: Mapping[int, str]) -> list[str]:
    """Return the lines of a table: values, metrics, state and directory of each run.

    Args:
        runs: Runs of the sweep.
        states: States of the runs that this sweep did not finish, by number.
    """
    summaries = [run.summary() for run in runs]
    metrics: dict[str, None] = {}
    for summary in summaries:
        metrics |= dict.fromkeys((summary or {}).get("metrics", {}))
    names = sorted(metrics, key=lambda name: {"accuracy": 0, "loss": 1}.get(name, 2))
    rows = [[*short_keys(runs[0].values).values(), *names, "state", "directory"]]
    for number, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        results = (summary or {}).get("metrics", {})
        rows.append(
            [
                *run.values.values(),
                *(f"{results[name]:.4f}" if name in results else "-" for name in names),
                "done" if summary is not None else states.get(number, "not run"),
                str(run.directory),
            ]
        )
    left = {*range(len(runs[0].values)), len(rows[0]) - 2, len(rows[0]) - 1}
    return aligned(rows, left)


def _train(run: Planned) -> tuple[int, int]:
    """Train one run in a process of its own.

    The process has a session of its own, so that Ctrl-C reaches only this one, which then sends
    SIGTERM: the run saves a snapshot.

    Returns:
        The exit code of the process, and the signal that this command received, or 0.
    """
    stopped = 0
    with Guardian() as guardian, ending():
        with deferred_signals():
            process = subprocess.Popen(
                [sys.executable, "-m", "tfdist", "train", *run.words],
                env=environment(),
                start_new_session=True,
            )
            guardian.add(process.pid)
        try:
            try:
                process.wait()
            except (KeyboardInterrupt, SystemExit) as error:
                stopped = error.code - 128 if isinstance(error, SystemExit) else signal.SIGINT  # type: ignore[operator]
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SAVE_S)
        except (KeyboardInterrupt, SystemExit):  # a second signal
            pass
        finally:
            kill_group(process.pid)
            process.wait()
            guardian.remove(process.pid)
    return process.returncode, stopped


def _values(key: str, text: str) -> list[str]:
    """Return the values of a key, with commas between them, except in brackets and quotes."""
    values = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    values = [
        value[1:-1] if re.fullmatch(r"'[^']*'|\"[^\"]*\"", value) else value for value in values
    ]
    if "" in values:
        raise ValueError(
            f"{FLAG} {key}={text}: expected values with commas between them, received an empty one."
        )
    return values


def _difference(key: str, there: Any, here: Any) -> str:
    """Return the first difference of two settings, or "". A key that one lacks does not count."""
    if isinstance(there, dict) and isinstance(here, dict) and not key.endswith("options"):
        names = [name for name in here if name in there]
        return next(filter(None, (_difference(f"{key}.{n}", there[n], here[n]) for n in names)), "")
    return f"{key}={there!r}; expected {here!r}" if there != here else ""


def _read_json(path: Path) -> Any:
    """Return the content of a file, or None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON of a run, received {error}.") from error


def _reason(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"code {code}" if code else f"no {SUMMARY}"
