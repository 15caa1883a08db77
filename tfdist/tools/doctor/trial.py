"""A config is tried: its data are read, its model is built, and one replica's step is measured; it is the probe's process that does so."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.config import user_functions

if TYPE_CHECKING:
    from tfdist import config

STAGES = ("config", "output", "data", "model", "step", "done")
_OWN = "tfdist_digits"  # prepared from a package within a second; others are downloaded


@dataclasses.dataclass(frozen=True)
class Trial:
    """How far a config came, and what was found until then.

    Attributes:
        stage: What was being tried, of `STAGES`; "done": all of it went well.
        error: Why it went no further, a sentence; "": it did.
        name: Of the run.
        directory: Where it will write.
        strategy: What `strategy.name` says.
        global_batch: Examples of a step, of all replicas together.
        replicas: Of one process.
        data: The data in words; "" where they were not read.
        unprepared: The data set that would be downloaded first; "": none.
        parameters: How many numbers the model has.
        rows: Examples of the step that was measured, those of one replica.
        weights, gradients, optimizer: Bytes of the model's variables, of the gradients, and of the optimizer's variables.
        grown: Bytes by which the process grew, from before the model to the highest point of its steps.
        peak: Bytes of the whole process at that point.
        gpu_peak: Bytes of a GPU at the highest point; None: the step ran on the CPU.
        seconds: Of the second step; the first one compiles.
    """

    stage: str = STAGES[0]
    error: str = ""
    name: str = ""
    directory: str = ""
    strategy: str = "auto"
    global_batch: int = 0
    replicas: int = 1
    data: str = ""
    unprepared: str = ""
    parameters: int = 0
    rows: int = 0
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    grown: int = 0
    peak: int = 0
    gpu_peak: int | None = None
    seconds: float = 0.0


def steps(words: Sequence[str], workers: int) -> Iterator[Trial]:
    """Tries a config, stage by stage, and tells after each how far it came.

    Args:
        words: The config, as `tfdist train` takes it.
        workers: Processes that train together.
    """
    trial = Trial()
    yield trial
    try:
        for trial in _stages(words, workers):
            yield trial
    except Exception as error:  # whatever it is, it would be the training's error too
        import tensorflow as tf

        text = " ".join(str(getattr(error, "message", error)).split())
        ours = isinstance(error, ValueError | TimeoutError) and not isinstance(
            error, tf.errors.OpError
        )
        yield dataclasses.replace(
            trial, error=(text if ours else f"{type(error).__name__}: {text}")[:1000]
        )


def _stages(words: Sequence[str], workers: int) -> Iterator[Trial]:
    from tfdist.run import input_pipeline, train_command

    settings = train_command.parse(words)
    trial = Trial(
        STAGES[1], name=settings.name, strategy=settings.strategy.name, global_batch=settings.data.global_batch, replicas=_replicas(settings),
        directory=settings.output.dir or "",
    )  # fmt: skip
    yield trial
    trial = dataclasses.replace(
        trial, stage=STAGES[2], directory=str(train_command.find_directory(settings))
    )
    yield trial
    if name := _unprepared(settings):
        yield dataclasses.replace(trial, unprepared=name)
        return
    train, test = (
        input_pipeline.pipeline(settings, "train"),
        input_pipeline.pipeline(settings, "eval"),
    )
    batch = next(iter(train))
    next(iter(test))
    counts = [
        f"{count:,}"
        if (count := input_pipeline.examples(batches)) is not None
        else "an unknown number of"
        for batches in (train, test)
    ]
    name = train.batches.source.name if input_pipeline.is_pipeline(train) else settings.data.name
    shape, classes = input_pipeline.shapes(train)
    found = f"{name}: {counts[0]} examples to train and {counts[1]} to evaluate on; inputs {_brackets(shape)}"
    trial = dataclasses.replace(
        trial, stage=STAGES[3], data=found + (f", {classes} classes" if classes is not None else "")
    )
    yield trial
    yield from _measured(trial, settings, train, batch, workers)


def _measured(
    trial: Trial, settings: config.Run, train: Any, batch: Any, workers: int
) -> Iterator[Trial]:
    """Builds the model, and makes two steps with one replica's rows."""
    import tensorflow as tf

    from tfdist.data.batch_rows import count_rows, cut
    from tfdist.run import build

    replicas = trial.replicas * (1 if trial.strategy == "parameter_server" else workers)
    rows = min(math.ceil(trial.global_batch / replicas), int(count_rows(batch)))
    part = cut(batch, tf.constant(0, tf.int64), tf.constant(rows, tf.int64))
    gpus = tf.config.list_logical_devices("GPU")
    before = _reset_peak()
    model = build.make_model(settings, tf.distribute.get_strategy(), train)
    trial = dataclasses.replace(
        trial, stage=STAGES[4], parameters=model.count_params() if model.built else 0, rows=rows
    )
    yield trial
    if gpus:
        tf.config.experimental.reset_memory_stats("GPU:0")
    for _ in range(2):
        begun = time.perf_counter()
        model.train_on_batch(*(part if isinstance(part, tuple) else (part,)))
        seconds = time.perf_counter() - begun
    peak = _status("VmHWM")
    yield dataclasses.replace(
        trial,
        stage=STAGES[5],
        parameters=model.count_params(),
        weights=_bytes(model.variables),
        gradients=_bytes(model.trainable_variables),
        optimizer=_bytes(model.optimizer.variables),
        grown=max(peak - before, 0),
        peak=peak,
        gpu_peak=int(tf.config.experimental.get_memory_info("GPU:0")["peak"]) if gpus else None,
        seconds=seconds,
    )


def _replicas(settings: config.Run) -> int:
    """Replicas of one process."""
    import tensorflow as tf

    from tfdist.strategies import devices

    names = devices.parse(settings.strategy.devices, len(tf.config.list_physical_devices("GPU")))
    return 1 if settings.strategy.name == "one_device" else len(names)


def _unprepared(settings: config.Run) -> str:
    """The TFDS data set that training would download first; "" where nothing is to be downloaded."""
    if (
        settings.data.catalog is not None
        or settings.data.name == _OWN
        or user_functions.in_file(settings.data.name)
    ):
        return ""
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(settings.data.name, data_dir=settings.data.data_dir)
    except tfds.core.DatasetNotFoundError:
        return ""  # the pipeline's own error says more
    return (
        ""
        if (builder.data_path / "dataset_info.json").exists()
        else f"{settings.data.name} in {builder.data_path}"
    )


def _brackets(shape: Any) -> str:
    """A shape, or a nest of them, in brackets.

    Example:
        >>> _brackets((8, 8, 1)), _brackets({"a": (3,)})
        ('[8, 8, 1]', 'a [3]')
    """
    if isinstance(shape, dict):
        return ", ".join(f"{name} {_brackets(part)}" for name, part in shape.items())
    if isinstance(shape, tuple) and any(isinstance(part, tuple | dict) for part in shape):
        return ", ".join(map(_brackets, shape))
    return str(list(shape))


def _bytes(variables: Sequence[Any]) -> int:
    import keras

    return sum(
        math.prod(variable.shape) * _size(keras.backend.standardize_dtype(variable.dtype))
        for variable in variables
    )


def _size(dtype: str) -> int:
    import tensorflow as tf

    return tf.as_dtype(dtype).size if dtype != "string" else 0


def _reset_peak() -> int:
    """Begins to look for the highest point of this process' memory anew; returns its bytes now."""
    with contextlib.suppress(
        OSError
    ):  # then it is that of the import, should that have been higher
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _status(key: str) -> int:
    """Bytes, of a line of Linux' /proc/self/status; elsewhere the highest point since the process began."""
    with contextlib.suppress(OSError):
        if match := re.search(
            rf"^{key}:\s+(\d+) kB",
            Path("/proc/self/status").read_text(encoding="ascii"),
            re.MULTILINE,
        ):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
