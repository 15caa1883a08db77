"""Building of models that only their own `train_step` or `test_step` can call.

Under a strategy, Keras builds a model before its first step, by calling the model on shapes. Models
that a step of their own computes, as GANs and diffusion models are written, have no `call()`, or
one that takes something else than the data. Without a strategy, Keras builds them while it traces
the step. Here the step is traced once on shapes, and the graph is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

log = logging.getLogger("tfdist")
_state = threading.local()
_replacing = threading.RLock()  # held while `tf.GradientTape.gradient` is replaced

# For each of Keras' methods, the step that it runs, and where it keeps the function of steps.
_STEPS = {
    "fit": ("train_step", "train_function"),
    "train_on_batch": ("train_step", "train_function"),
    "evaluate": ("test_step", "test_function"),
    "test_on_batch": ("test_step", "test_function"),
}


@contextlib.contextmanager
def running(method: str) -> Iterator[None]:
    """Remember which of Keras' methods runs within the context; its step may build the model."""
    before = getattr(_state, "method", None)
    _state.method = method
    try:
        yield
    finally:
        _state.method = before


def build(model: keras.Model, keras_method: Callable, data: Any) -> None:
    """Build a model by tracing the step that its class overrides, or else as Keras does.

    Args:
        model: The model.
        keras_method: Keras' own method, which calls the model.
        data: Batch as the step gets it: a nest of tensors, arrays or specs; None is allowed.
    """
    step, function = _STEPS.get(getattr(_state, "method", ""), ("", ""))
    if not step or getattr(type(model), step) is getattr(keras.Model, step):
        keras_method(model, data_batch=data)
    elif getattr(model, function) is None:  # not built for this step since it was compiled
        with model.distribute_strategy.scope():
            traced = _build_by_step(model, getattr(model, step), data)
        if type(model).call is keras.Model.call:
            return
        if not traced:
            keras_method(model, data_batch=data)
            return
        # Keras may build more than the step uses, such as the metrics of compile(). It fails where
        # call() does not take the data.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            keras_method(model, data_batch=data)


def note_update(optimizer: keras.optimizers.Optimizer, variables: Any) -> bool:
    """Note the variables of an update if this thread only builds; return whether it does."""
    updates = getattr(_state, "updates", None)
    if updates is None:
        return False
    if variables is not None:
        updates.setdefault(id(optimizer), (optimizer, list(variables)))
    return True


def _build_by_step(model: keras.Model, step: Callable, data: Any) -> bool:
    """Build a model's layers, metrics and optimizers by tracing a step on shapes.

    The step changes no variable. Its gradients are zeros, because variables that the step itself
    has created have no values yet, and `optimizer.apply` only notes its variables.

    Returns:
        Whether the step could be traced. If not, the model is built up to the error, which the step
        raises again where it runs, unless only the trace on shapes is to blame.
    """
    optimizer = model.optimizer
    _state.updates = {}
    try:
        with _zero_gradients(), keras.StatelessScope(), keras.SymbolicScope():
            tf.function(step, autograph=False).get_concrete_function(
                tf.nest.map_structure(_spec, data)
            )
        traced = True
    except Exception as error:
        traced = False
        unbuilt = [layer.name for layer in model.layers if not layer.built]
        if unbuilt:
            log.warning(
                "%s: the layers %s are not built, because %s cannot be traced on shapes: %s. If it "
                "fails, call these layers on a batch in strategy.scope() before training.",
                model.name,
                ", ".join(unbuilt),
                step.__name__,
                error,
            )
        elif optimizer is not None:
            note_update(optimizer, model.trainable_variables)
    finally:
        updates = _state.updates
        _state.updates = None
    for each, variables in updates.values():
        if not each.built:
            # Keras itself builds the model's optimizer for all variables.
            each.build(model.trainable_variables if each is optimizer else variables)
    return traced


@contextlib.contextmanager
def _zero_gradients() -> Iterator[None]:
    """Make `tf.GradientTape.gradient` return zeros in this thread, within the context."""
    thread = threading.get_ident()
    _replacing.acquire()
    original = tf.GradientTape.gradient

    def gradient(self, target, sources, *args, **kwargs):
        if threading.get_ident() != thread:
            return original(self, target, sources, *args, **kwargs)
        return tf.nest.map_structure(lambda x: tf.zeros_like(tf.convert_to_tensor(x)), sources)

    tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = original
        _replacing.release()


def _spec(x: Any) -> Any:
    if x is None or isinstance(x, tf.TypeSpec):
        return x
    return tf.type_spec_from_value(x if tf.is_tensor(x) else tf.convert_to_tensor(x))
