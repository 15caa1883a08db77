"""Build the strategy and the compiled model of a configured run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdist import config, sync
from tfdist.config.checks import keys_for_arguments

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def make_strategy(
    section: config.Strategy, sync_section: config.Sync | None = None
) -> tf.distribute.Strategy:
    """Return the strategy of a run. Call it before any code that creates a tensor.

    Args:
        section: Section `strategy` of the run.
        sync_section: Section `sync` of the run; None: the defaults.
    """
    import tfdist

    options = {
        key: getattr(section, key)
        for key in ("cluster", "devices", "task", "communication", "timeout", "reading")
    }
    with keys_for_arguments("strategy", options):
        return tfdist.make_strategy(
            section.name, sync=policy(sync_section or config.Sync()), **options
        )


def policy(sync_section: config.Sync) -> sync.Policy:
    """Return the synchronization policy of a run.

    Args:
        sync_section: Section `sync` of the run.

    Raises:
        ValueError: If the policy does not accept a value of the section.
    """
    if sync_section.kind == "gradients":
        return sync.Gradients(
            sync_section.combine,
            sync_section.comm_dtype,
            sync_section.bucket_bytes,
            sync_section.clip_norm,
            sync_section.accumulate,
            sync_section.skip_nonfinite,
        )
    outer = {
        "outer_learning_rate": sync_section.outer_learning_rate,
        "outer_momentum": sync_section.outer_momentum,
    }
    outer_options = {name: value for name, value in outer.items() if value is not None}
    make = sync.DiLoCo if sync_section.kind == "diloco" else sync.LocalSGD
    return make(
        every=sync_section.every or "epoch",
        warmup=sync_section.warmup,
        comm_dtype=sync_section.comm_dtype,
        bucket_bytes=sync_section.bucket_bytes,
        **outer_options,
    )


def make_model(
    settings: config.Run, strategy: tf.distribute.Strategy, train: tf.data.Dataset
) -> keras.Model:
    """Return the compiled model of a run, with weights initialized from its seed.

    Args:
        settings: Run to build for.
        strategy: Strategy in whose scope the model is built.
        train: Training batches that `input_pipeline.pipeline` returned.

    Returns:
        The model. A model that a user's function has compiled is not compiled again.

    Raises:
        ValueError: If settings are not compatible with each other or with the data.
    """
    from tfdist import parallel
    from tfdist.run import compilation

    if settings.parallel.stages > 1:
        raise ValueError(
            "parallel.stages: expected 1, received "
            f"{settings.parallel.stages}; only `tfdist train` trains in stages. "
            "Pass --config.parallel.stages=1."
        )
    with strategy.scope():
        model = _build(settings, train)
        if not model.compiled:
            optimizer = compilation.optimizer(_scaled(settings), train, settings.sync.accumulate)
            if settings.parallel.zero == 3:
                parallel.fsdp(
                    model,
                    settings.parallel.prefetch,
                    settings.parallel.gather_dtype,
                    reshard_after_forward=settings.parallel.reshard_after_forward,
                )
            elif settings.parallel.zero:
                optimizer = parallel.zero(optimizer, settings.parallel.zero)
            _compile(model, optimizer, settings)
    return model


def make_staged_model(
    settings: config.Run, strategy: tf.distribute.Strategy, train: tf.data.Dataset
) -> keras.Model:
    """Return the compiled pipeline-parallel model of a run, which no strategy distributes.

    Args:
        settings: Run to build for, whose `parallel.stages` are several.
        strategy: Strategy on whose devices the stages are.
        train: Training batches that `input_pipeline.pipeline` returned.

    Raises:
        ValueError: If there are more or fewer devices than stages, settings are not compatible with
            each other or with the data, or the model cannot be cut.
    """
    from tfdist import parallel
    from tfdist.run import compilation

    section = settings.parallel
    devices = strategy.extended.worker_devices
    if len(devices) != section.stages or strategy.num_replicas_in_sync != section.stages:
        raise ValueError(
            "parallel.stages: expected as many stages as devices of one process, received "
            f"{section.stages} stages for {strategy.num_replicas_in_sync} devices, of which "
            f"{len(devices)} are in this process. Set strategy.devices, and start no other worker."
        )
    model = parallel.pipeline(
        _build(settings, train),
        section.stages,
        microbatches=section.microbatches,
        schedule=section.schedule,
        recompute=section.recompute,
        devices=devices,
    )
    _compile(model, compilation.optimizer(_scaled(settings), train, 1), settings)
    return model


def _build(settings: config.Run, train: tf.data.Dataset) -> keras.Model:
    """Return the model of a run, compiled only if a user's function does so."""
    import keras

    from tfdist import models
    from tfdist.run import input_pipeline

    keras.utils.set_random_seed(settings.train.seed)
    keras.config.set_dtype_policy(settings.train.precision)
    if not models.is_own(settings.model.name):
        input_pipeline.check_supervised(train, settings.model.options)
    shape, classes = input_pipeline.shapes(train)
    model = models.build(
        settings.model.name,
        **{"input_shape": shape, "classes": classes, **settings.model.options},
    )
    if model.compiled:
        for key, value, default, remedy in (
            ("zero", settings.parallel.zero, 0, "tfdist.parallel.zero(optimizer)"),
            ("stages", settings.parallel.stages, 1, "tfdist.parallel.pipeline(model)"),
        ):
            if value != default:
                raise ValueError(
                    f"parallel.{key}: expected a model that is not compiled, received a compiled "
                    f"one from {settings.model.name}. Set parallel.{key}={default}, and use "
                    f"{remedy} where you compile it."
                )
    return model


def _compile(model: keras.Model, optimizer: Any, settings: config.Run) -> None:
    from tfdist.run import compilation

    jit_compile = settings.train.jit_compile
    model.compile(
        jit_compile="auto" if jit_compile is None else jit_compile,
        optimizer=optimizer,
        loss=compilation.loss(settings.train),
        metrics=compilation.metrics(settings.train),
        steps_per_execution=settings.train.steps_per_execution,
    )


def _scaled(settings: config.Run) -> config.Train:
    """Return the section `train` with the learning rate for the examples of an update."""
    section = settings.train
    if section.base_global_batch is None:
        return section
    examples = settings.data.global_batch_size * settings.sync.accumulate
    rate = section.learning_rate * examples / section.base_global_batch
    return dataclasses.replace(section, learning_rate=rate)
