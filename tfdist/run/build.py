"""The sections of a Run become its strategy and its compiled model; nothing is trained here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist import config, sync

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def make_strategy(where: config.Strategy, how: config.Sync | None = None) -> tf.distribute.Strategy:
    """The strategy of a run; call it before anything that makes a tensor.

    Args:
        where: The Run's section.
        how: Its section on how replicas become one; None: the defaults.
    """
    import tfdist

    return tfdist.make_strategy(
        where.name, cluster=where.cluster, devices=where.devices, task=where.task, communication=where.communication,
        timeout=where.timeout, reading=where.reading, sync=policy(how or config.Sync()),
    )  # fmt: skip


def policy(how: config.Sync) -> sync.Policy:
    """The policy that a section describes.

    Args:
        how: The section.

    Raises:
        ValueError: For a value that no policy takes.
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
    """The model of a run, compiled, with the weights that follow from its seed.

    Args:
        settings: The Run.
        strategy: In whose scope it is made.
        train: The batches to train on, of `inputs.pipeline`.

    Returns:
        The model. One that a function of the user's has compiled is left as it is.

    Raises:
        ValueError: For settings that do not fit each other or the data.
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
                f"parallel.zero: {settings.model.name} returns a model that is compiled, with an optimizer of its own; expected one that is not, or 0 here and "
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
    """The optimizer of a run.

    Args:
        settings: The Run's section.
        train: The batches to train on.
        accumulate: Steps for one call of the optimizer, by which schedules go.
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
            f"train.optimizer: received {settings.optimizer!r}. {config.nearest(settings.optimizer, kinds)}"
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
