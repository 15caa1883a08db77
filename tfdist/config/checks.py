"""Validation of configuration fields: types, bounds, choices and key names."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from tfdist.config.keras_names import known

_DIVIDED_WEIGHTS = (
    "parallel.zero=3: it divides the weights over the devices (FSDP), and the computation of large "
    "dense layers where batches are small"
)
# Keys that users of other tools look for, and what comes nearest here.
_KNOWN_AS = {
    "data.batch_size": "data.global_batch, the examples of all devices together",
    "parallel.fsdp": "parallel.zero=3",
    "parallel.model": _DIVIDED_WEIGHTS,
    "parallel.pipeline": "parallel.stages, the number of stages",
    "parallel.tensor": _DIVIDED_WEIGHTS,
    "strategy.backend": "strategy.communication",
    "train.batch_size": "data.global_batch, the examples of all devices together",
    "train.gradient_accumulation_steps": "sync.accumulate",
    "train.gradient_clip_val": "sync.clip_norm",
    "train.lr": "train.learning_rate",
    "train.mixed_precision": "train.precision, such as mixed_bfloat16",
    "train.num_epochs": "train.epochs",
}


def at_least(least: int, default: Any, word: str | None = None) -> Any:
    """Return a dataclass field whose value must be `least` or more; or None, or a word.

    Args:
        least: Smallest number.
        default: Default value.
        word: Word that is allowed instead of a number, in a field of type `int | str`.
    """
    rule = {"at least": least} if word is None else {"at least": least, "word": word}
    return dataclasses.field(default=default, metadata=rule)


def between(least: int, most: int, default: Any) -> Any:
    """Return a dataclass field whose value must be from `least` to `most`."""
    return dataclasses.field(default=default, metadata={"at least": least, "at most": most})


def above(bound: float, default: float | None) -> Any:
    """Return a dataclass field whose value must be above `bound`, unless it is None."""
    return dataclasses.field(default=default, metadata={"above": bound})


def fraction(default: float | None) -> Any:
    """Return a dataclass field whose value must be from 0 to below 1, unless it is None."""
    return dataclasses.field(default=default, metadata={"at least": 0, "below": 1})


def one_of(choices: tuple[str, ...], default: str | None) -> Any:
    """Return a dataclass field whose value must be one of `choices`."""
    return dataclasses.field(default=default, metadata={"one of": choices})


def named(names: tuple[str, ...], default: str, loose: bool = False) -> Any:
    """Return a dataclass field whose value is one of `names`, or names a user's function.

    Args:
        names: Allowed names.
        default: Default value.
        loose: Whether case and underscores do not count, default False.
    """
    return dataclasses.field(default=default, metadata={"named": names, "loose": loose})


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text with commas between them.

    Example:
        >>> words_of("accuracy, auc,")
        ('accuracy', 'auc')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def step_range(name: str, text: str) -> tuple[int, int]:
    """Return the first and last step in a text such as "steps=10..15", counted from 1.

    Args:
        name: Name of the key, flag or argument, for messages.
        text: Text to parse, "steps=FIRST..LAST" or "steps=STEP".

    Raises:
        ValueError: If the text has another form.

    Example:
        >>> step_range("--profile", "steps=10..15"), step_range("--profile", "steps=7")
        ((10, 15), (7, 7))
    """
    match = re.fullmatch(r"steps=(\d+)(?:\.\.(\d+))?", text) if isinstance(text, str) else None
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"{name}: expected steps from 1 on, the first and the last, such as steps=10..15; "
            f"received {text!r}."
        )
    return first, last


def nearest(name: str, names: typing.Iterable[str], prefix: str = "") -> str:
    """Return a suggestion for a misspelt name: the nearest name, or all names.

    Example:
        >>> nearest("epoch", ["epochs", "seed"])
        'Did you mean epochs?'
        >>> nearest("x", ["epochs", "seed"])
        'Expected one of epochs, seed.'
    """
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1)
    return (
        f"Did you mean {prefix}{close[0]}?"
        if close
        else f"Expected one of {', '.join(prefix + n for n in names)}."
    )


def not_one_of(key: str, value: str, names: typing.Collection[str], more: str = "") -> str:
    """Return the error message for a value that is not one of the allowed names.

    Args:
        key: Key of the setting.
        value: Value that was received.
        names: Allowed names.
        more: Remedy besides these names, such as "name a function".

    Example:
        >>> not_one_of("data.tail", "padd", ["partial", "pad", "drop"])
        "data.tail: received 'padd'. Did you mean pad? Allowed: drop, pad, partial."
    """
    suggestion = nearest(value, names)
    if suggestion.startswith("Did"):
        suggestion += f" Allowed: {', '.join(sorted(names))}."
    return f"{key}: received {value!r}. {suggestion}" + (f" Or {more}." if more else "")


def hint(kind: Any, name: str, path: str) -> Any:
    """Return the type of a key.

    Args:
        kind: Dataclass of the section.
        name: Name of the field.
        path: Key of the section; "" at the top level.

    Raises:
        ValueError: If there is no such field.
    """
    hints = typing.get_type_hints(kind)
    if name not in hints:
        prefix = f"{path}." if path else ""
        remedy = _KNOWN_AS.get(prefix + name)
        raise ValueError(
            f"{prefix}{name}: no such key. "
            + (f"Set {remedy}." if remedy else nearest(name, hints, prefix))
        )
    return hints[name]


def check(section: Any, path: str) -> None:
    """Check every field of a section against its type and bounds.

    Integers are converted to floats where floats are expected.

    Args:
        section: Instance of the section's dataclass.
        path: Key of the section; "" at the top level.

    Raises:
        ValueError: If a value has the wrong type or is out of bounds.
    """
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        key = f"{path}.{field.name}" if path else field.name
        value = getattr(section, field.name)
        rule = field.metadata
        if "word" in rule:
            value = _number_or_word(key, value, rule["word"])
        else:
            value = typed(key, value, hints[field.name])
        object.__setattr__(section, field.name, value)
        if value is None or value == rule.get("word"):
            continue
        if "at most" in rule and not rule["at least"] <= value <= rule["at most"]:
            raise ValueError(
                f"{key}: expected a number from {rule['at least']} to {rule['at most']}, received "
                f"{value!r}."
            )
        if "below" in rule and not rule["at least"] <= value < rule["below"]:
            raise ValueError(
                f"{key}: expected a number from {rule['at least']} to below {rule['below']}, "
                f"received {value!r}."
            )
        if "at least" in rule and not value >= rule["at least"]:
            raise ValueError(f"{key}: expected at least {rule['at least']}, received {value!r}.")
        if "above" in rule and not value > rule["above"]:
            raise ValueError(f"{key}: expected a number above {rule['above']}, received {value!r}.")
        if "one of" in rule and value not in rule["one of"]:
            raise ValueError(not_one_of(key, value, rule["one of"]))
        if "named" in rule:
            check_name(key, value, rule["named"], rule["loose"])


def _number_or_word(key: str, value: Any, word: str) -> int | str:
    """Return a whole number, which the command line gives as a text, or the word."""
    if value == word:
        return word
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{key}: expected a whole number or {word!r}, received {value!r}.")
    return number


def check_name(key: str, value: str, names: tuple[str, ...], loose: bool) -> None:
    """Raise ValueError unless a value is one of some names, or names a user's function."""
    if ":" not in value and not (known(value, names) if loose else value in names):
        raise ValueError(
            not_one_of(key, value, names, "name a function of yours, FILE.py:FUNCTION")
        )


@contextlib.contextmanager
def keys_for_arguments(section: str, names: typing.Collection[str]) -> typing.Iterator[None]:
    """Name keys of a section in errors that name the arguments that they are passed as.

    Args:
        section: Key of the section, such as "data".
        names: Names of arguments that are also keys of the section.

    Example:
        >>> with keys_for_arguments("data", ("threads",)):
        ...     raise ValueError("threads: expected a number, 1 or more; received 0.")
        Traceback (most recent call last):
        ValueError: data.threads: expected a number, 1 or more; received 0.
    """
    try:
        yield
    except ValueError as error:
        match = re.match(r"(\w+)[:=]", str(error))
        if type(error) is ValueError and match and match[1] in names:
            raise ValueError(f"{section}.{error}") from error
        raise


def typed(key: str, value: Any, hint: Any) -> Any:
    """Return a value that has the type of its key.

    Integers become floats where floats are expected.

    Args:
        key: Key of the setting.
        value: Value that was received.
        hint: Type of the key, as `hint` returns it.

    Raises:
        ValueError: If the value has another type.
    """
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = typing.get_args(hint)[0]
    kind = typing.get_origin(hint) or hint
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = {
            str: "text",
            int: "a whole number",
            float: "a number",
            bool: "true or false",
        }.get(kind, "a mapping")
        raise ValueError(
            f"{key}: expected {expected}, received {value!r}, which is of type "
            f"{type(value).__name__}."
        )
    return dict(value) if kind is Mapping else value
