"""Build the strategy and the compiled model of a configured run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist import config, sync

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def make_strategy(where: config.Strategy, how: config.Sync | None = None) -> tf.distribute.Strategy:
    """Return the strategy of a run. Call it before any code that creates a tensor.

    Args:
        where: Section `strategy` of the run.
        how: Section `sync` of the run; None: the defaults.
    """
    import tfdist

    return tfdist.make_strategy(
        where.name,
        cluster=where.cluster,
        devices=where.devices,
        task=where.task,
        communication=where.communication,
        timeout=where.timeout,
        reading=where.reading,
        sync=policy(how or config.Sync()),
    )


def policy(how: config.Sync) -> sync.Policy:
    """Return the synchronization policy of a run.

    Args:
        how: Section `sync` of the run.

    Raises:
        ValueError: The policy does not accept a value of the section.
    """
    if how.kind == "gradients":
        return sync.Gradients(
            how.combine,
            how.comm_dtype,
            how.bucket_bytes,
            how.clip_norm,
            how.accumulate,
            how.skip_nonfinite,
        )
    outer = {"outer_learning_rate": how.outer_learning_rate, "outer_momentum": how.outer_momentum}
    given = {name: value for name, value in outer.items() if value is not None}
    make = sync.DiLoCo if how.kind == "diloco" else sync.LocalSGD
    return make(
        every=how.every or "epoch",
        warmup=how.warmup,
        comm_dtype=how.comm_dtype,
        bucket_bytes=how.bucket_bytes,
        **given,
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
        ValueError: Settings are not compatible with each other or with the data.
    """
    import keras

    from tfdist import models, parallel
    from tfdist.run import input_pipeline

    keras.utils.set_random_seed(settings.train.seed)
    keras.config.set_dtype_policy(settings.train.precision)
    if not models.is_own(settings.model.name):
        input_pipeline.check_supervised(train, settings.model.options)
    shape, classes = input_pipeline.shapes(train)
    with strategy.scope():
        model = models.build(
            settings.model.name,
            **{"input_shape": shape, "classes": classes, **settings.model.options},
        )
        if model.compiled and settings.parallel.zero:
            raise ValueError(
                f"parallel.zero: {settings.model.name} returns a model that is compiled, with an "
                "optimizer of its own; expected one that is not, or 0 here and "
                "tfdist.parallel.zero(optimizer) there."
            )
        if not model.compiled:
            optimizer = _optimizer(settings.train, train, settings.sync.accumulate)
            if settings.parallel.zero == 3:
                parallel.fsdp(model)
            elif settings.parallel.zero:
                optimizer = parallel.zero(optimizer, settings.parallel.zero)
            model.compile(
                optimizer=optimizer,
                loss="sparse_categorical_crossentropy",
                metrics=["accuracy"],
                steps_per_execution=settings.train.steps_per_execution,
            )
    return model


def _optimizer(
    settings: config.Train, train: tf.data.Dataset, accumulate: int
) -> keras.optimizers.Optimizer:
    """Return the optimizer of a run.

    Args:
        settings: Section `train` of the run.
        train: Training batches.
        accumulate: Number of steps for one call of the optimizer. Schedules count these calls.
    """
    import keras

    kinds = {
        name.lower(): kind
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type)
        and issubclass(kind, keras.optimizers.Optimizer)
        and name != "Optimizer"
    }
    kind = kinds.get(settings.optimizer.lower())
    if kind is None:
        raise ValueError(
            f"train.optimizer: received {settings.optimizer!r}. "
            f"{config.nearest(settings.optimizer, kinds)}"
        )
    rate: Any = settings.learning_rate
    if settings.schedule == "cosine":
        steps = int(train.cardinality())
        if steps < 0:
            raise ValueError(
                "train.schedule: 'cosine' needs a data set of known length. Choose 'constant'."
            )
        rate = keras.optimizers.schedules.CosineDecay(
            rate, max(1, steps * settings.epochs // accumulate)
        )
    return kind(learning_rate=rate)
