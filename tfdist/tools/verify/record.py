"""Recording process of `tfdist verify`: trains some steps with `fit`, and saves each step.

Usage: python -m tfdist.tools.verify.record SETTINGS
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import app, config
from tfdist.backup.shards import is_sharded
from tfdist.data.batch_rows import count_rows
from tfdist.keras_compat import local_component, note_jit_compile
from tfdist.run import build, compilation, input_pipeline, train_command
from tfdist.strategies.base import by_rows
from tfdist.tools.verify import recording
from tfdist.tools.verify.probes import (
    Probe,
    disable_dropout_and_noise,
    first_rows,
    layers_of,
    reverse,
)
from tfdist.tools.verify.settings import EAGER, ROUNDING, Settings, first_device
from tfdist.train.synchronous.replica_step import moving_state, seed_states


def main(argv: Sequence[str]) -> int:
    """Record the steps that the settings describe.

    Args:
        argv: Output of `Settings.to_json()`, as the only argument.

    Returns:
        0.
    """
    settings = Settings.of_json(argv[0])
    app.exit_on_configuration_error(record, settings)
    return 0


def record(settings: Settings) -> None:
    """Train in each execution mode, and write a file for each.

    Every worker of a cluster calls this function.

    Args:
        settings: Settings of this process.
    """
    described = train_command.parse(settings.config)
    where = dataclasses.replace(
        described.strategy,
        name=settings.strategy,
        cluster=None,
        task=None,
        devices=settings.devices,
        communication=settings.communication,
        timeout=settings.timeout,
    )
    strategy = build.make_strategy(where)  # first, because it creates the devices
    whole = not described.parallel.zero
    if settings.alone:
        one = build.make_strategy(
            dataclasses.replace(where, name="one_device", devices=first_device(settings.devices))
        )
        for mode in settings.alone:
            train(
                dataclasses.replace(described, parallel=config.Parallel()),
                one,
                mode,
                settings.steps,
                whole,
            ).write(settings.file(mode, 0, alone=True))
    rank = strategy.tfdist_engine.placement.rank  # type: ignore[attr-defined]
    for mode in settings.modes:
        train(described, strategy, mode, settings.steps, whole).write(settings.file(mode, rank))


def train(
    described: config.Run,
    strategy: tf.distribute.Strategy,
    mode: str,
    steps: int,
    gradients: bool = True,
) -> recording.Recording:
    """Train some steps of a run as `tfdist train` would, but without dropout.

    The last of several steps gets a batch that lacks a row, so that replicas' rows differ.

    Args:
        described: Run to train.
        strategy: Strategy from tfdist.
        mode: Execution mode: "compiled", "eager" or "rounding".
        steps: Number of steps.
        gradients: Whether replicas have complete gradients, so that norms can be computed. Default:
            True.

    Returns:
        The recording of this process.
    """
    # The seed also applies to data that are shuffled without a seed of their own.
    keras.utils.set_random_seed(described.train.seed)
    batches = input_pipeline.pipeline(described, "train")
    model = build.make_model(described, strategy, batches)
    model.steps_per_execution = 1
    model.jit_compile = False  # XLA cannot compile the probe
    note_jit_compile(model, False)
    if mode == EAGER:
        model.run_eagerly = True
    engine: Any = strategy.tfdist_engine  # type: ignore[attr-defined]
    probe = Probe(engine.placement.first_replica)
    model_step = model.train_step

    def train_step(data):
        probe.see_rows(data)
        return model_step(reverse(data) if mode == ROUNDING else data)

    model.train_step = train_step
    engine.watch_gradients = probe.see_gradients if gradients else None
    recorder = _Recorder(strategy, probe, batches)
    uneven = _uneven(batches) if steps > 1 else None
    options = {
        "verbose": 0,
        "shuffle": False,
        "callbacks": [recorder],
        "class_weight": compilation.class_weight(described, batches),
    }
    try:
        # `steps` epochs are enough, because each has at least one step.
        recorder.end = steps if uneven is None else steps - 1
        model.fit(batches, epochs=steps, **options)
        if uneven is not None:
            recorder.end = steps
            model.fit(uneven, **options)
    finally:
        engine.watch_gradients = None
    return recorder.result()


def _uneven(batches: tf.data.Dataset) -> tf.data.Dataset | None:
    """Return a data set of one global batch without its last row, or None.

    The replicas' numbers of rows then differ. None is returned if the batches are not global, or
    have a single row.
    """
    if not by_rows(batches):
        return None
    input_pipeline.begin_epoch(batches, 0)
    batch = next(iter(batches.take(1)))
    rows = int(count_rows(batch))
    return tf.data.Dataset.from_tensors(first_rows(batch, rows - 1)) if rows > 1 else None


class _Recorder(keras.callbacks.Callback):
    """Callback that records the observable values after each step.

    Attributes:
        end: Number of the step after which training ends.
    """

    end = 0

    def __init__(self, strategy: tf.distribute.Strategy, probe: Probe, batches: tf.data.Dataset):
        super().__init__()
        self._strategy = strategy
        self._probe = probe
        self._batches = batches
        self._placement = strategy.tfdist_engine.placement  # type: ignore[attr-defined]
        self._arrays: dict[str, np.ndarray] = {}
        self._changed_layers: list[str] = []
        self._logs: list[str] = []
        self._step = 0

    def on_train_begin(self, logs=None):
        if self._step == 0:
            self._changed_layers = disable_dropout_and_noise(self.model)
            self._take_state()

    def on_epoch_begin(self, epoch, logs=None):
        input_pipeline.begin_epoch(self._batches, epoch)

    def on_train_batch_end(self, batch, logs=None):
        self._step += 1
        logs = logs or {}
        self._arrays[f"{self._step}/logs"] = np.array(
            [np.mean(np.asarray(value, np.float64)) for value in logs.values()], np.float64
        )
        self._logs = list(logs)
        rows, gradients = self._probe.take()
        self._arrays[f"{self._step}/rows"] = rows
        for index, variable in enumerate(self.model.trainable_variables):
            if id(variable) in gradients or index in gradients:
                self._arrays[f"{self._step}/gradient/{index}"] = np.array(
                    gradients.get(id(variable), gradients.get(index))
                )
        self._take_state()
        if self._step == self.end:
            self.model.stop_training = True

    def _take_state(self) -> None:
        copies = []
        with self._strategy.scope():
            for index, (_, variable) in enumerate(self._variables()):
                # All workers read the complete value together; it belongs to no single replica.
                if is_sharded(variable):
                    values = [_sample(variable.value)]
                else:
                    values = [
                        _sample(local_component(variable, i))
                        for i in range(self._placement.local_replicas)
                    ]
                self._arrays[f"{self._step}/state/{index}"] = values[0]
                copies.append(
                    max((recording.relative(values[0], value) for value in values[1:]), default=0.0)
                )
        self._arrays[f"{self._step}/copies"] = np.array(copies)

    def _variables(self) -> list[tuple[str, keras.Variable]]:
        """Return the variables that a step may change, with their kinds.

        Metric variables are left out. The order is that of the model's layers, followed by the
        optimizer's variables.
        """
        model = self.model
        metrics = {id(v) for v in model.metrics_variables}
        kinds = {id(v): recording.STATISTICS for v in moving_state(model)} | {
            id(v): recording.SEEDS for v in seed_states(model)
        }
        variables = [
            (kinds.get(id(v), recording.WEIGHTS), v)
            for v in model.variables
            if id(v) not in metrics
        ]
        optimizer = getattr(model, "optimizer", None)
        return variables + [
            (recording.OPTIMIZER, v) for v in (optimizer.variables if optimizer is not None else [])
        ]

    def result(self) -> recording.Recording:
        """Return the complete recording."""
        outermost_first = sorted(layers_of(self.model), key=lambda layer: -len(layer.weights))
        owners = {id(v): layer for layer in outermost_first for v in layer.weights}
        indices = {id(v): index for index, v in enumerate(self.model.trainable_variables)}
        variables = []
        for kind, v in self._variables():
            layer = owners.get(id(v))
            synchronized = bool(getattr(layer, "synchronized", False))
            variables.append(
                recording.Variable(
                    kind,
                    v.path,
                    type(layer).__name__ if layer else "",
                    synchronized,
                    indices.get(id(v)),
                )
            )
        return recording.Recording(
            tuple(variables),
            tuple(self._logs),
            self._step,
            self._placement.replicas,
            self._placement.local_replicas,
            tuple(self._changed_layers),
            self._arrays,
        )


def _sample(variable: tf.Variable | tf.Tensor) -> np.ndarray:
    """Return the values of a variable, or an evenly spaced sample of a large one."""
    value = tf.reshape(variable, [-1])
    stride = -(-int(value.shape[0] or 1) // recording.SAMPLE)
    return tf.cast(value[::stride], tf.float64).numpy()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
