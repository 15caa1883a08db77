"""Entry point of `tfdist train`: runs a configured training and writes its summary."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import config
from tfdist.cluster.spec import ClusterSpec
from tfdist.config import packaged, user_functions
from tfdist.run import config_files, sweep, telemetry_callbacks
from tfdist.runtime import startup_lines
from tfdist.runtime.command import INTERRUPTED_CODE, Command, ExitCodes
from tfdist.runtime.formatting import counted, format_bytes
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, PREEMPTED_CODE, TRANSIENT_CODE
from tfdist.storage import files
from tfdist.telemetry.layout import CONFIG, HISTORY, SUMMARY
from tfdist.telemetry.named_scalars import named_scalars

if TYPE_CHECKING:
    import keras
    from ml_collections import ConfigDict

_DESCRIPTION = """\
Trains what a config file describes. FILE.py defines get_config(), which returns
tfdist.config.default() with changes; with FILE.py:TEXT, get_config receives TEXT. FILE.yaml has the
same keys in its sections, and may name another config that it changes: `base: digits`. A name such
as "digits" that is no file is that of a config of the package. --profile is short for
--config.telemetry.profile.

--sweep KEY=VALUE,VALUE trains once with each value, one run after the other; several of these train
once with each combination. Finished runs are not repeated. --sweep-index N trains only the Nth
combination, from 0, where each is a job of its own; N may be the name of an environment variable,
such as SLURM_ARRAY_TASK_ID.

Keys with their defaults, types and allowed values:

"""
_EXIT_CODES: ExitCodes = {
    0: "the training is complete",
    1: "an exception ended the training, or runs of a sweep failed",
    PREEMPTED_CODE: "SIGTERM ended the training after a snapshot; the same command resumes it",
    TRANSIENT_CODE: "another task of the cluster was absent or is lost; another start may help",
    CONFIGURATION_CODE: "the command line or the config is wrong",
    INTERRUPTED_CODE: "you pressed Ctrl-C",
}


def _help() -> str:
    from tfdist.config import reference

    return _DESCRIPTION + reference.text()


def _words() -> list[str]:
    from tfdist.config import reference

    return ["--profile", sweep.FLAG, sweep.INDEX_FLAG, *reference.flags()]


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Set all words but `--help` apart: `parse` reads them."""
    asks_help = [word in ("-h", "--help") for word in argv]
    own = [word for word, asks in zip(argv, asks_help, strict=True) if asks]
    return own, [word for word, asks in zip(argv, asks_help, strict=True) if not asks]


def _train(flags: argparse.Namespace, words: list[str]) -> int:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tfdist").setLevel(logging.INFO)
    request = sweep.split(words)
    if not request.values:
        run(parse(words))
        return 0
    runs = sweep.plan(request, parse)
    if request.index is None:
        sweep.check_alone(runs)
        return sweep.run_all(runs)
    chosen = runs[request.index]
    if chosen.summary() is not None:
        print(f"{chosen.label} in {chosen.directory} is already done", flush=True)
        return 0
    run(chosen.settings)
    return 0


def parse(argv: Sequence[str]) -> config.Run:
    """Parse a config file and its overrides on the command line.

    Args:
        argv: Command-line words after `tfdist train`.

    Returns:
        The run's settings.

    Raises:
        ValueError: If a flag, file, key or value is wrong.
    """
    from absl import flags
    from ml_collections import config_flags

    words = _profile_spelt_out(argv)
    positions = [i for i, word in enumerate(words) if re.match(r"--?config(=|$)", word)]
    if len(positions) != 1:
        raise ValueError(
            "--config: expected one config file, such as --config=configs/digits.py; received "
            f"{len(positions)}."
        )
    [position] = positions
    path = words.pop(position).partition("=")[2] or (
        words.pop(position) if words[position:] else ""
    )
    settings = config_files.load(path)
    for word in words:
        if key := re.match(r"--?(?:no)?config\.([^=]+)", word):
            config.check_key(key[1])
            _check_parts(key[1])
            _make_mappings(settings.values, key[1])
            if key[1] in config.AUTO_KEYS:  # a text, of which Run.from_dict makes a number
                section, name = key[1].split(".")
                settings.values[section][name] = str(settings.values[section][name])
            settings = settings.without(key[1])
    values = flags.FlagValues()
    # Unlocked, so that the file need not list all options of a model. The keys are checked before
    # and after.
    config_flags.DEFINE_config_dict(
        "config",
        settings.values,
        flag_values=values,
        sys_argv=["tfdist train", *words],
        lock_config=False,
        accept_new_attributes=True,
    )
    try:
        left = values(["tfdist train", *words])[1:]
    except flags.Error as error:
        raise ValueError(f"{error}. `tfdist train --help` lists the keys.") from error
    if left:
        raise ValueError(f"{left[0]}: expected --config.KEY=VALUE, received this word.")
    try:
        run_settings = config.Run.from_dict(values.config.to_dict())
        user_functions.check_files(run_settings)
        return run_settings
    except ValueError as error:
        raise settings.locate(error) from error


def _check_parts(key: str) -> None:
    """Raise ValueError if a part of a key is no name, which ml_collections cannot parse."""
    parts = key.split(".")
    for i, part in enumerate(parts):
        if not part.isidentifier():
            entry = part if part.isdecimal() else repr(part)
            raise ValueError(
                f"--config.{key}: expected names between the dots, received {part!r}. Set the "
                f"mapping as a whole: --config.{'.'.join(parts[:i])}='{{{entry}: VALUE}}'"
            )


def _make_mappings(settings: ConfigDict, key: str) -> None:
    """Make the mappings that a key of the command line lies in, such as options of a metric."""
    from ml_collections import ConfigDict

    for name in key.split(".")[:-1]:
        if not isinstance(settings, ConfigDict):
            return
        if name not in settings:
            settings[name] = ConfigDict()
        settings = settings[name]


def run(settings: config.Run) -> dict[str, Any]:
    """Train, evaluate and save a model as a run's settings say.

    Every task of a cluster calls this with the same settings. An interrupted run resumes from its
    last snapshot. In a worker or ps task of a parameter-server job, this function runs the server,
    and then ends the process.

    Args:
        settings: Settings of the run.

    Returns:
        The summary, which is also written to `summary.json`. Its keys are `name`, `metrics` (the
        results of `model.evaluate`, by name), `epochs`, `examples_per_second` (None if nothing was
        left to train), `seconds`, `replicas`, `bytes_per_step` (sent by each replica; None if it is
        unknown), `strategy`, and the paths `backup` and, if they are kept, `logs` (for
        TensorBoard), `history`, `model` and `export`. Under parameter servers, `replicas` is that
        of one worker, and `workers` and `parameter_servers` are added. Each metric is also a key of
        its own, unless its name is one of the others here, such as `seconds`.

    Raises:
        ValueError: If settings are not compatible with each other, the data or this machine.
    """
    started = time.monotonic()
    where = settings.strategy
    packaged.check_data_dir(settings.data)
    telemetry_callbacks.check(settings)
    with startup_lines.hidden():
        import keras

        import tfdist
        from tfdist.run import build, compilation, input_pipeline
        from tfdist.run.fit_callbacks import callbacks, check_optimizer
        from tfdist.run.plan import largest_batch
        from tfdist.strategies.factory import is_chief

        strategy = build.make_strategy(where, settings.sync)
    chief = is_chief(strategy)
    directory = find_directory(settings)
    settings = largest_batch.resolve(settings, strategy, directory / CONFIG)
    own = callbacks(settings.train, directory, chief)
    train = input_pipeline.pipeline(settings, "train")
    test = input_pipeline.pipeline(settings, "eval")
    class_weight = compilation.class_weight(settings, train)
    if settings.parallel.stages > 1:
        model = build.make_staged_model(settings, strategy, train)
        strategy = model.distribute_strategy
    else:
        model = build.make_model(settings, strategy, train)
    check_optimizer(own, model)

    paths = {
        "logs": telemetry_callbacks.shown(settings, directory),
        "history": directory / HISTORY,
        "backup": directory / "backup",
        "model": directory / "model.keras",
        "export": directory / "saved_model",
    }
    backends = settings.telemetry.backend_names()
    for name, kept in (
        ("logs", "tensorboard" in backends),
        ("history", "jsonl" in backends),
        ("model", settings.output.save_model),
        ("export", settings.output.export),
    ):
        if not kept:
            del paths[name]
    if chief:
        files.make_writable(str(directory), "output.dir")
        _write_json(directory / CONFIG, settings.to_dict())
        if "logs" in paths:
            print(f"To see the curves: tensorboard --logdir {paths['logs']}", flush=True)

    def begin_epoch(epoch: int, logs: dict) -> None:
        input_pipeline.begin_epoch(train, epoch)  # keeps the order of examples after a resume

    backup = tfdist.BackupAndRestore(
        str(paths["backup"]), memory_freq=settings.train.memory_freq or None
    )
    log, watching = telemetry_callbacks.callbacks(settings, strategy, directory, backup, test)
    history = model.fit(
        train,
        epochs=settings.train.epochs,
        validation_data=test,
        shuffle=False,  # the data pipeline shuffles
        class_weight=class_weight,
        callbacks=[
            backup,
            *_checkpoints(where, directory),
            *own,  # before those that write logs, to which they may add
            *watching,
            keras.callbacks.LambdaCallback(on_epoch_begin=begin_epoch),
        ],
    )
    metrics = named_scalars(model.evaluate(test, verbose=0, return_dict=True))
    if "model" in paths:
        model.save(paths["model"])
    if "export" in paths:
        model.export(paths["export"], verbose=False)

    summary = {
        **metrics,
        "name": settings.name,
        "metrics": metrics,
        "epochs": max(history.epoch, default=-1) + 1,  # a callback may stop the training
        "examples_per_second": log.rate(
            input_pipeline.examples(train) or _examples_read(model, len(log.seconds))
        ),
        "seconds": time.monotonic() - started,
        "replicas": strategy.num_replicas_in_sync,
        "bytes_per_step": telemetry_callbacks.sent(strategy, model),
        **telemetry_callbacks.trained_by(strategy),
        "strategy": "pipeline" if settings.parallel.stages > 1 else type(strategy).__name__,
        **{name: str(path) for name, path in paths.items()},
    }
    if chief:
        _write_json(directory / SUMMARY, summary)
        print(describe(summary), flush=True)
    return summary


def _checkpoints(where: config.Strategy, directory: Path) -> list[keras.callbacks.Callback]:
    """Return a callback that saves the weights for the evaluator, if the cluster has one.

    The snapshots may change too quickly for the evaluator, and are removed at the end.
    """
    import keras

    # An evaluator is listed in a file or TF_CONFIG. All other descriptions of clusters contain only
    # equal workers.
    spec = ClusterSpec.from_file(where.cluster) if where.cluster else ClusterSpec.from_environ()
    if spec is None or "evaluator" not in (*spec.jobs, spec.task_type):
        return []
    path = directory / "checkpoints" / "epoch-{epoch:03d}.weights.h5"
    return [keras.callbacks.ModelCheckpoint(path, save_weights_only=True)]


def find_directory(settings: config.Run, root: str | os.PathLike = "runs") -> Path:
    """Return the directory of a run.

    It is the configured one, or the first of `ROOT/NAME`, `ROOT/NAME-2` ... that does not contain a
    finished run.

    Args:
        settings: Settings of the run.
        root: Parent of the directories whose names are chosen here; "runs" by default.

    Returns:
        The directory, which need not exist.

    Raises:
        ValueError: If the configured directory contains a finished run, or is not on a disk.
    """
    if settings.output.dir is not None:
        if "://" in settings.output.dir:
            raise ValueError(
                f"output.dir: expected a directory on a local or shared disk, received "
                f"{settings.output.dir!r}. A script of your own can keep its snapshots there: "
                "tfdist.BackupAndRestore(URL)."
            )
        directory = Path(settings.output.dir)
        if (directory / SUMMARY).exists():
            raise ValueError(
                f"output.dir: {directory} holds a finished run; expected a new directory or one "
                "with an interrupted run. "
                "Name another, or remove it."
            )
        return directory
    number = 1
    while True:
        directory = Path(root) / (settings.name if number == 1 else f"{settings.name}-{number}")
        if not (directory / SUMMARY).exists():
            return directory
        number += 1


def describe(summary: dict[str, Any]) -> str:
    """Return a readable summary of a finished run and the paths of its files.

    Args:
        summary: Summary that `run` returned.

    Returns:
        Lines without a final newline.
    """
    speed = summary["examples_per_second"]
    rate = "nothing left to train" if speed is None else f"{speed:,.0f} examples/s"
    backup = summary["backup"] if os.path.isdir(summary["backup"]) else "none: training is complete"
    metrics = dict(
        sorted(
            summary["metrics"].items(), key=lambda item: {"accuracy": 0, "loss": 1}.get(item[0], 2)
        )
    )
    results = [
        f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}"
        for name, value in metrics.items()
    ]
    lines = [
        "",
        f"{summary['name']}: {', '.join(results) or 'no metrics'} on the evaluation split "
        f"after {counted(summary['epochs'], 'epoch')}",
        f"  speed    {rate} on {_trained_on(summary)}, {summary['seconds']:.0f} s in all",
        *(
            [f"  sync     {format_bytes(summary['bytes_per_step'])} a step sent by each replica"]
            if summary.get("bytes_per_step")
            else []
        ),
        f"  model    {summary.get('model', 'not saved')}",
        *([f"  export   {summary['export']}"] if "export" in summary else []),
        f"  history  {summary.get('history', 'not kept')}",
        f"  backup   {backup}",
        (
            "  curves   "
            f"{'tensorboard --logdir ' + summary['logs'] if 'logs' in summary else 'not kept'}"
        ),
    ]
    return "\n".join(lines)


def _trained_on(summary: dict[str, Any]) -> str:
    keys = ("workers", "parameter_servers") if "workers" in summary else ("replicas",)
    return " and ".join(
        f"{summary[k]} {k[: None if summary[k] > 1 else -1].replace('_', ' ')}" for k in keys
    )


def _profile_spelt_out(argv: Sequence[str]) -> list[str]:
    """Return the words with `--profile STEPS` replaced by the key it is short for."""
    words = list(argv)
    for i, word in enumerate(words):
        if re.match(r"--?profile(=|$)", word):
            text = word.partition("=")[2] if "=" in word else " ".join(words[i + 1 : i + 2])
            config.step_range("--profile", text)
            words[i : i + (1 if "=" in word else 2)] = [f"--config.telemetry.profile={text}"]
    return words


def _examples_read(model: keras.Model, epochs: int) -> int | None:
    """Return the number of examples of an epoch, as this process has counted them.

    This serves for data sets that do not know their number of examples.
    """
    stats = getattr(getattr(model, "train_function", None), "stats", None)
    return stats.examples // epochs if stats and epochs else None


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


main = Command(
    name="tfdist train",
    usage="tfdist train --config=FILE [--config.SECTION.KEY=VALUE ...] [--profile steps=10..15]\n"
    "       [--sweep KEY=VALUE,VALUE ... [--sweep-index N]]",
    description=_help,
    exit_codes=_EXIT_CODES,
    run=_train,
    split=_split,
    handles_signals=True,
    more_words=_words,
)
