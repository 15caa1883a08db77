"""Keras callbacks that a config can name, and checks of their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tfdist.config.checks import nearest, not_one_of
from tfdist.config.keras_names import plain


class Kind(NamedTuple):
    """Values that an option takes.

    Attributes:
        expected: Description of the values.
        fits: Function that returns whether a value is one of them.
    """

    expected: str
    fits: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


TEXT = Kind("text", lambda value: isinstance(value, str) and value != "")
NUMBER = Kind("a number", _number)
NUMBER_OR_NONE = Kind("a number, or None", lambda value: value is None or _number(value))
NON_NEGATIVE = Kind("a number of at least 0", lambda value: _number(value) and value >= 0)
SHARE = Kind("a number between 0 and 1", lambda value: _number(value) and 0 < value < 1)
COUNT = Kind("a whole number of at least 0", lambda value: _whole(value) and value >= 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
VERBOSITY = Kind("0 or 1", lambda value: value in (0, 1))
MODE = Kind("auto, min or max", lambda value: value in ("auto", "min", "max"))
FREQUENCY = Kind(
    'a number of steps, or "epoch"', lambda value: value == "epoch" or (_whole(value) and value > 0)
)
TEXTS = Kind(
    "a mapping of texts",
    lambda value: isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()),
)

# Options of each callback. The file that a callback writes is its first option.
CALLBACKS: dict[str, dict[str, Kind]] = {
    "csv_logger": {"filename": TEXT, "separator": TEXT, "append": FLAG},
    "early_stopping": {
        "monitor": TEXT,
        "min_delta": NUMBER,
        "patience": COUNT,
        "verbose": VERBOSITY,
        "mode": MODE,
        "baseline": NUMBER_OR_NONE,
        "restore_best_weights": FLAG,
        "start_from_epoch": COUNT,
    },
    "model_checkpoint": {
        "filepath": TEXT,
        "monitor": TEXT,
        "verbose": VERBOSITY,
        "save_best_only": FLAG,
        "save_weights_only": FLAG,
        "mode": MODE,
        "save_freq": FREQUENCY,
        "initial_value_threshold": NUMBER_OR_NONE,
    },
    "reduce_lr_on_plateau": {
        "monitor": TEXT,
        "factor": SHARE,
        "patience": COUNT,
        "verbose": VERBOSITY,
        "mode": MODE,
        "min_delta": NUMBER,
        "cooldown": COUNT,
        "min_lr": NON_NEGATIVE,
    },
    "remote_monitor": {
        "root": TEXT,
        "path": TEXT,
        "field": TEXT,
        "headers": TEXTS,
        "send_as_json": FLAG,
    },
    "swap_ema_weights": {"swap_on_epoch": FLAG},
    "terminate_on_nan": {"raise_error": FLAG},
}
# Options that name a file, which Keras requires.
FILES = {"csv_logger": "filename", "model_checkpoint": "filepath"}
# Callbacks of Keras for which a run has something else.
INSTEAD = {
    "backup_and_restore": "Every run has one; see train.memory_freq",
    "callback": "Name a class of your own, FILE.py:CLASS",
    "callback_list": "Name each callback, with commas between them",
    "history": "Every run has one, and writes history.jsonl",
    "lambda_callback": "Name a class of your own, FILE.py:CLASS",
    "learning_rate_scheduler": "Name a schedule of your own, train.schedule=FILE.py:FUNCTION",
    "orbax_checkpoint": "Name model_checkpoint",
    "progbar_logger": "Every run has one",
    "tensor_board": "Add tensorboard to telemetry.backends",
}


def name_of(word: str) -> str | None:
    """Return the name of a Keras callback as `CALLBACKS` has it; None for a user's own.

    Args:
        word: Name as the user wrote it. Case and underscores do not count.

    Raises:
        ValueError: If Keras has no such callback, or a run does without it.

    Example:
        >>> name_of("EarlyStopping"), name_of("mine.py:Stop")
        ('early_stopping', None)
    """
    if ":" in word:
        return None
    for name in CALLBACKS:
        if plain(name) == plain(word):
            return name
    for name, remedy in INSTEAD.items():
        if plain(name) == plain(word):
            raise ValueError(f"train.callbacks: received {word!r}. {remedy}.")
    more = "name a class of yours, FILE.py:CLASS"
    raise ValueError(not_one_of("train.callbacks", word, tuple(CALLBACKS), more))


def check_options(word: str, options: Mapping[str, Any]) -> None:
    """Check the options of a callback. A user's own callback checks its own.

    Args:
        word: Name of the callback, as the user wrote it.
        options: Its options.

    Raises:
        ValueError: If an option is unknown, missing or wrong. The message names its key.

    Example:
        >>> check_options("early_stopping", {"patience": 3})
        >>> check_options("early_stopping", {"patient": 3})
        Traceback (most recent call last):
        ValueError: train.callback_options.early_stopping.patient: no such option. Did you mean patience?
    """  # noqa: E501
    name = name_of(word)
    if name is None:
        return
    key = f"train.callback_options.{word}"
    allowed = CALLBACKS[name]
    for option, value in options.items():
        if option not in allowed:
            raise ValueError(f"{key}.{option}: no such option. {nearest(str(option), allowed)}")
        if not allowed[option].fits(value):
            raise ValueError(
                f"{key}.{option}: expected {allowed[option].expected}, received {value!r}."
            )
    file = FILES.get(name)
    if file is not None and file not in options:
        raise ValueError(
            f"{key}.{file}: expected the file that it writes, in the directory of the run, such as "
            f"{'log.csv' if name == 'csv_logger' else 'best.keras'}; received none."
        )
    if name == "model_checkpoint":
        weights_only = options.get("save_weights_only", False)
        ends = (".weights.h5",) if weights_only else (".keras", ".h5")
        if not options["filepath"].endswith(ends):
            raise ValueError(
                f"{key}.filepath: expected a file that ends in {' or '.join(ends)} if "
                f"save_weights_only is {str(weights_only).lower()}; received "
                f"{options['filepath']!r}."
            )
