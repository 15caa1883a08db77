"""Callbacks that a run's settings name, and checks of what they need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from tfdist import config
from tfdist.config import user_functions
from tfdist.config.keras_callbacks import FILES, name_of
from tfdist.config.sections import options_of, short_name
from tfdist.keras_compat.parallel import innermost
from tfdist.run.compilation import call, class_of

KEY = "train.callbacks"


def callbacks(
    settings: config.Train, directory: Path, chief: bool
) -> list[keras.callbacks.Callback]:
    """Return the callbacks of a run, in the order in which its settings name them.

    Args:
        settings: Section `train` of the run.
        directory: Directory of the run, in which files with relative paths are.
        chief: Whether this process is the chief, which makes the directories of these files.

    Raises:
        ValueError: If a callback does not take an option, or a user's function returns something
            else.
    """
    result: list[keras.callbacks.Callback] = []
    for word in settings.callback_names():
        options = dict(options_of(settings.callback_options, word))
        setting = f"{KEY}={word}"
        options_key = f"callback_options.{short_name(word)}"
        name = name_of(word)
        if name is None:
            made = call(user_functions.load(word, KEY), options, setting, options_key)
        else:
            _place(name, options, directory, chief)
            made = call(class_of(KEY, name, keras.callbacks), options, setting, options_key)
        if not isinstance(made, keras.callbacks.Callback):
            raise ValueError(
                f"{setting}: expected a keras.callbacks.Callback, or a function that returns one; "
                f"received {type(made).__name__}."
            )
        if _uses_monitor(made):
            result.append(CheckMonitor(f"train.{options_key}.monitor", made))
        result.append(made)
    return result


def check_optimizer(callbacks: list[keras.callbacks.Callback], model: keras.Model) -> None:
    """Raise ValueError if a callback needs an optimizer of another kind.

    Args:
        callbacks: Callbacks of the run.
        model: Compiled model of the run.

    Raises:
        ValueError: If the optimizer has no average of the weights to swap, or a schedule that
            ReduceLROnPlateau cannot change.
    """
    optimizer = innermost(model.optimizer)
    if optimizer is None or hasattr(optimizer, "optimizers"):
        return
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights) and not optimizer.use_ema:
            raise ValueError(
                f"{KEY}: swap_ema_weights needs an average of the weights, and the optimizer has "
                "none. Set train.ema, such as train.ema=0.999."
            )
        rate = optimizer.get_config().get("learning_rate")
        if isinstance(callback, keras.callbacks.ReduceLROnPlateau) and isinstance(rate, Mapping):
            raise ValueError(
                f"{KEY}: reduce_lr_on_plateau needs a constant learning rate, and this one has the "
                f'schedule {rate["class_name"]}. Set train.schedule="constant" and '
                "train.warmup_epochs=0, or remove the callback."
            )


class CheckMonitor(keras.callbacks.Callback):
    """Callback that raises ValueError if the next one monitors something that does not exist.

    Keras raises an error that does not name the key, or only warns, and the callback has no effect.

    Args:
        key: Key of what is monitored, for messages.
        callback: Callback that monitors it.
    """

    def __init__(self, key: str, callback: Any):
        super().__init__()
        self._key = key
        self._callback = callback

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """See `keras.callbacks.Callback`."""
        monitor = self._callback.monitor
        if monitor not in (logs or {}):
            raise ValueError(
                f"{self._key}: expected a loss or metric of this training, received {monitor!r}. "
                f"{config.nearest(monitor, logs or {})}"
            )


def _uses_monitor(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback of Keras compares a metric at the end of each epoch."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return callback.save_best_only and callback.save_freq == "epoch"
    kinds = keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau
    return isinstance(callback, kinds)


def _place(name: str, options: dict[str, Any], directory: Path, chief: bool) -> None:
    """Put the file that a callback writes into the directory of the run."""
    option = FILES.get(name)
    if option is None or "://" in options[option]:
        return
    path = directory / options[option]
    options[option] = str(path)
    if chief and "{" not in str(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
