"""Optimizer, learning-rate schedule, loss, metrics and class weights of a run's settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import keras

from tfdist import config
from tfdist.config import user_functions
from tfdist.config.keras_names import BY_LOSS, SHORT, plain
from tfdist.config.schedules import numbers
from tfdist.config.sections import KEYS_OF_OPTIONS, options_of, short_name
from tfdist.run import input_pipeline
from tfdist.run.warm_up import WarmUp

if TYPE_CHECKING:
    import tensorflow as tf


def optimizer(
    settings: config.Train, train: tf.data.Dataset, accumulate: int = 1
) -> keras.optimizers.Optimizer:
    """Return the optimizer of a run.

    Args:
        settings: Section `train` of the run.
        train: Training batches.
        accumulate: Number of steps for one call of the optimizer. Schedules count these calls.

    Raises:
        ValueError: If the optimizer does not take an option, or a schedule needs a length that the
            data do not have.
    """
    options = {"learning_rate": learning_rate(settings, train, accumulate)}
    if settings.weight_decay is not None:
        options["weight_decay"] = settings.weight_decay
    if settings.ema is not None:
        options |= {"use_ema": True, "ema_momentum": settings.ema}
    options |= settings.optimizer_options
    if ":" in settings.optimizer:
        make = user_functions.load(settings.optimizer, "train.optimizer")
    else:
        make = class_of("train.optimizer", settings.optimizer, keras.optimizers)
    result = call(make, options, f"train.optimizer={settings.optimizer}", "optimizer_options")
    if not isinstance(result, keras.optimizers.Optimizer):
        raise ValueError(
            f"train.optimizer={settings.optimizer}: expected the function to return a "
            f"keras.optimizers.Optimizer, received {type(result).__name__}."
        )
    return result


def learning_rate(
    settings: config.Train, train: tf.data.Dataset, accumulate: int = 1
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """Return the learning rate of a run, or its schedule.

    Args:
        settings: Section `train` of the run.
        train: Training batches.
        accumulate: Number of steps for one call of the optimizer.

    Raises:
        ValueError: If the schedule needs a length that the data do not have.
    """
    rate: Any = settings.learning_rate
    if settings.schedule == "constant" and not settings.warmup_epochs:
        return rate
    steps = int(train.cardinality())
    if steps < 0:
        key = "train.schedule" if settings.schedule != "constant" else "train.warmup_epochs"
        raise ValueError(
            f"{key}: expected a data set of known length, received one of unknown length. Choose "
            'the schedule "constant" without a warm-up.'
        )

    def updates(epochs: float) -> int:
        return int(steps * epochs) // accumulate

    warm_up = updates(settings.warmup_epochs) or (1 if settings.warmup_epochs else 0)
    left = max(1, updates(settings.epochs) - warm_up)
    options = dict(settings.schedule_options)
    schedules = keras.optimizers.schedules
    if ":" in settings.schedule:
        rate = call(
            user_functions.load(settings.schedule, "train.schedule"),
            {"learning_rate": rate, "updates": left, **options},
            f"train.schedule={settings.schedule}",
            "schedule_options",
        )
    elif settings.schedule in ("constant", "cosine"):
        # Keras' own warm-up, so that the model can be loaded without tfdist. With alpha=1, the rate
        # does not decay.
        alpha = options.get("final", 0.0) if settings.schedule == "cosine" else 1.0
        if not warm_up:
            return schedules.CosineDecay(rate, left, alpha=alpha)
        return schedules.CosineDecay(0.0, left, alpha, warmup_target=rate, warmup_steps=warm_up)
    elif settings.schedule == "polynomial":
        rate = schedules.PolynomialDecay(
            rate, left, rate * options.get("final", 0.0), options.get("power", 1.0)
        )
    elif settings.schedule == "steps":
        ends = numbers(options["epochs"])
        factors = numbers(options.get("factor", 0.1))
        rates = [rate]
        for factor in factors * (len(ends) if len(factors) == 1 else 1):
            rates.append(rates[-1] * factor)
        # Keras' schedule keeps a rate up to and with its boundary.
        boundaries = [updates(end) - warm_up - 1 for end in ends]
        rate = schedules.PiecewiseConstantDecay(boundaries, rates)
    return WarmUp(rate, warm_up) if warm_up else rate


def loss(settings: config.Train) -> Callable | keras.losses.Loss:
    """Return the loss of a run.

    Raises:
        ValueError: If the loss does not take an option.
    """
    return _instance(
        "train.loss", settings.loss, settings.loss_options, "loss_options", keras.losses
    )


def metrics(settings: config.Train) -> list[str | Callable | keras.metrics.Metric]:
    """Return the metrics of a run.

    Raises:
        ValueError: If a metric does not take an option.
    """
    return [
        name.lower()
        if name.lower() in BY_LOSS
        else _instance(
            "train.metrics",
            name,
            options_of(settings.metric_options, name),
            f"metric_options.{short_name(name)}",
            keras.metrics,
        )
        for name in settings.metric_names()
    ]


def class_weight(settings: config.Run, train: tf.data.Dataset) -> dict[int, float] | None:
    """Return the argument `class_weight` of `fit`: the weight of each class, or None.

    Args:
        settings: Settings of the run.
        train: Training batches.

    Raises:
        ValueError: If the data have no such class, no single target, or weights of their own.
    """
    weights = settings.train.class_weights()
    if not weights:
        return None
    spec = train.element_spec
    if not isinstance(spec, tuple) or len(spec) != 2 or not hasattr(spec[1], "shape"):
        raise ValueError(
            "train.class_weight: expected data of inputs and one target, without weights of "
            f"examples; received {spec}. Remove train.class_weight, or the weights of the data."
        )
    _, classes = input_pipeline.shapes(train)
    classes = settings.model.options.get("classes", classes)
    if not isinstance(classes, int):
        return weights
    if max(weights) >= classes:
        raise ValueError(
            f"train.class_weight.{max(weights)}: expected a class from 0 to {classes - 1}, as the "
            "data have."
        )
    # Keras fails on a class above the largest one that it gets.
    return {number: weights.get(number, 1.0) for number in range(classes)}


def _instance(
    key: str, name: str, options: Mapping[str, Any], options_key: str, module: ModuleType
) -> Any:
    """Return an object of a class of Keras or of the user, or a user's function with options."""
    if ":" not in name:
        kind: Callable[..., Any] = class_of(key, SHORT.get(name, name), module)
        return call(kind, options, f"{key}={name}", options_key)
    kind = user_functions.load(name, key)
    if isinstance(kind, type):
        return call(kind, options, f"{key}={name}", options_key)
    if not options:
        return kind
    return functools.update_wrapper(functools.partial(kind, **options), kind)


def class_of(key: str, name: str, module: ModuleType) -> Callable[..., Any]:
    """Return the class of Keras that a setting names.

    Args:
        key: Key of the setting, for messages.
        name: Name of the class. Case and underscores do not count.
        module: Module of Keras, such as `keras.losses`.

    Raises:
        ValueError: If this version of Keras has no such class.
    """
    for known, value in vars(module).items():
        if isinstance(value, type) and plain(known) == plain(name):
            return value
    raise ValueError(
        f"{key}: {name!r} is not in this version of Keras, {keras.__version__}. Choose another, or "
        "install a newer Keras."
    )


def call(
    make: Callable[..., Any], options: Mapping[str, Any], setting: str, options_key: str
) -> Any:
    """Call a class or function with the options of a setting.

    Args:
        make: Class of Keras, or a user's class or function.
        options: Arguments by name.
        setting: Setting that names `make`, for messages.
        options_key: Key of the options in the section `train`, for messages.

    Raises:
        ValueError: If an option is unknown, or `make` refuses a value.
    """
    parameters = inspect.signature(make).parameters
    # Classes of Keras pass further arguments on to their base, which refuses unknown ones.
    of_keras = (getattr(make, "__module__", None) or "").partition(".")[0] == "keras"
    open_ended = not of_keras and any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    for name in options:
        if name not in parameters and not open_ended:
            own = ("args", "kwargs", "self")
            elsewhere = KEYS_OF_OPTIONS if options_key == "optimizer_options" else ()
            known = [each for each in parameters if each not in own and each not in elsewhere]
            raise ValueError(
                f"train.{options_key}.{name}: {setting} has no such option. "
                f"{config.nearest(name, known)}"
            )
    try:
        return make(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{setting}, train.{options_key}: {error}") from error
