"""Trial of a config: read its data, build its model and measure a step of one replica.

The process of the module `probe` runs it.
"""

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

from tfdist.config import AUTO, Parallel, user_functions

if TYPE_CHECKING:
    from tfdist import config

STAGES = ("config", "output", "data", "model", "step", "done")
_OWN = "tfdist_digits"  # data set from a package, prepared within a second; others are downloaded


@dataclasses.dataclass(frozen=True)
class Trial:
    """Progress and findings of the trial of a config.

    Attributes:
        stage: Stage that was being tried, one of `STAGES`; "done" if all of them succeeded.
        error: Reason why the trial stopped, as a sentence; "" if it did not.
        name: Name of the run.
        directory: Directory to which the run will write.
        strategy: Value of `strategy.name`.
        global_batch: Number of examples in a step of all replicas together.
        replicas: Number of replicas of one process.
        data: Description of the data; "" if they were not read.
        unprepared: Name of the data set that would be downloaded first; "" if there is none.
        parameters: Number of parameters of the model.
        rows: Number of examples in the measured step, which is the step of one replica.
        weights: Bytes of the model's variables.
        gradients: Bytes of the gradients.
        optimizer: Bytes of the optimizer's variables.
        grown: Bytes by which the process grew, from before the model to the peak of its steps.
        peak: Bytes of the whole process at that peak.
        gpu_peak: Bytes of a GPU at its peak; None if the step ran on the CPU.
        seconds: Duration of the second step in seconds; the first step compiles.
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
    """Try a config stage by stage, and yield the progress after each stage.

    Args:
        words: Arguments of the config, as `tfdist train` takes them.
        workers: Number of processes that train together.

    Yields:
        The progress so far.
    """
    trial = Trial()
    yield trial
    try:
        for trial in _stages(words, workers):
            yield trial
    except Exception as error:  # any error here would also be an error of the training
        import tensorflow as tf

        text = " ".join(str(getattr(error, "message", error)).split())
        raised_by_tfdist = isinstance(error, ValueError | TimeoutError) and not isinstance(
            error, tf.errors.OpError
        )
        yield dataclasses.replace(
            trial, error=(text if raised_by_tfdist else f"{type(error).__name__}: {text}")[:1000]
        )


def _stages(words: Sequence[str], workers: int) -> Iterator[Trial]:
    from tfdist.run import input_pipeline, train_command
    from tfdist.run.plan import largest_batch

    settings = train_command.parse(words)
    trial = Trial(
        STAGES[1],
        name=settings.name,
        strategy=settings.strategy.name,
        global_batch=0 if settings.data.global_batch == AUTO else settings.data.global_batch_size,
        replicas=_replicas(settings),
        directory=settings.output.dir or "",
    )
    yield trial
    trial = dataclasses.replace(
        trial, stage=STAGES[2], directory=str(train_command.find_directory(settings))
    )
    yield trial
    if name := _unprepared(settings):
        yield dataclasses.replace(trial, unprepared=name)
        return
    settings = largest_batch.replaced(settings, workers * _replicas(settings))
    trial = dataclasses.replace(trial, global_batch=settings.data.global_batch_size)
    train = input_pipeline.pipeline(settings, "train")
    test = input_pipeline.pipeline(settings, "eval")
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
    description = (
        f"{name}: {counts[0]} examples to train and {counts[1]} to evaluate on; "
        f"inputs {_brackets(shape)}"
    )
    trial = dataclasses.replace(
        trial,
        stage=STAGES[3],
        data=description + (f", {classes} classes" if classes is not None else ""),
    )
    yield trial
    yield from _measured(trial, settings, train, batch, workers)


def _measured(
    trial: Trial, settings: config.Run, train: Any, batch: Any, workers: int
) -> Iterator[Trial]:
    """Build the model, and make two steps with the rows of one replica."""
    import tensorflow as tf

    from tfdist.data.batch_rows import count_rows, cut
    from tfdist.run import build

    replicas = trial.replicas * (1 if trial.strategy == "parameter_server" else workers)
    rows = min(math.ceil(trial.global_batch / replicas), int(count_rows(batch)))
    part = cut(batch, tf.constant(0, tf.int64), tf.constant(rows, tf.int64))
    gpus = tf.config.list_logical_devices("GPU")
    before = _reset_peak()
    if settings.parallel.stages > 1:  # the memory of the whole model, on one device
        settings = dataclasses.replace(settings, parallel=Parallel())
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
    """Return the number of replicas of one process."""
    from tfdist.strategies import devices

    names = devices.parse(settings.strategy.devices, len(devices.logical_devices("GPU")))
    return 1 if settings.strategy.name == "one_device" else len(names)


def _unprepared(settings: config.Run) -> str:
    """Return the TFDS data set that training would download first; "" if there is none."""
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
        return ""  # the error of the data pipeline says more
    return (
        ""
        if (builder.data_path / "dataset_info.json").exists()
        else f"{settings.data.name} in {builder.data_path}"
    )


def _brackets(shape: Any) -> str:
    """Format a shape, or a nest of shapes, in brackets.

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
    """Reset the peak memory of this process, and return its memory now in bytes."""
    # If the reset fails, the peak may be the peak of the import.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _status(key: str) -> int:
    """Return the bytes that a line of Linux's /proc/self/status gives.

    On other systems, return the peak memory since the process began.

    Args:
        key: Name of the line, such as "VmRSS".
    """
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
