"""Reference of all configuration keys: meaning, type, default and allowed values."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.config.keras_callbacks import CALLBACKS
from tfdist.config.keras_names import METRICS
from tfdist.config.sections import BACKENDS, Run

FUNCTION = "FILE.py:FUNCTION"
WORDS = {
    "train.metrics": (*METRICS, FUNCTION),
    "train.callbacks": (*CALLBACKS, "FILE.py:CLASS"),
    "telemetry.backends": BACKENDS,
}
TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a run's configuration.

    Attributes:
        name: Dotted name, such as "train.epochs".
        meaning: Description.
        type: Type in words.
        default: Default as one writes it on the command line; "none" and "{}" for keys that are not
            set.
        allowed: Allowed values in words; "" if there is no limit but the type.
    """

    name: str
    meaning: str
    type: str
    default: str
    allowed: str


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """Return name, description and keys of each section; first those outside of all sections.

    Example:
        >>> [name for name, _, _ in sections()][:3]
        ['', 'strategy', 'data']
        >>> next(keys for name, _, keys in sections() if name == "parallel")[0].default
        '0'
    """
    kinds = {
        name: kind
        for name, kind in typing.get_type_hints(Run).items()
        if dataclasses.is_dataclass(kind)
    }
    yield "", _summary(Run), [key for key in _keys(Run, "") if key.name not in kinds]
    for name, kind in kinds.items():
        yield name, _summary(kind), _keys(kind, f"{name}.")


def flags() -> list[str]:
    """Return the flags that set keys on the command line, and `--config` itself."""
    return ["--config", *(f"--config.{key.name}" for _, _, keys in sections() for key in keys)]


def text() -> str:
    """Return the reference as text for a terminal."""
    blocks = []
    for section, summary, keys in sections():
        lines = [f"{section or 'The whole run'}: {summary}"]
        for key in keys:
            facts = "; ".join(filter(None, (key.type, key.allowed)))
            value = {"none": "", "{}": ".NAME"}.get(key.default, f"={key.default}")
            lines += textwrap.wrap(
                f"--config.{key.name}{value}  ({facts})",
                94,
                initial_indent="  ",
                subsequent_indent="      ",
                break_on_hyphens=False,
            )
            lines += textwrap.wrap(
                key.meaning, 94, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def markdown() -> str:
    """Return the reference as tables of Markdown."""
    blocks = []
    for section, summary, keys in sections():
        title = f"### `{section}`" if section else "### Outside of all sections"
        rows = [
            "| "
            + " | ".join(
                cell.replace("|", "\\|")
                for cell in (
                    f"`{key.name}`",
                    key.type,
                    f"`{key.default}`",
                    key.allowed,
                    key.meaning,
                )
            )
            + " |"
            for key in keys
        ]
        head = ["| key | type | default | allowed values | meaning |", "|---|---|---|---|---|"]
        blocks.append("\n".join([title, "", summary, "", *head, *rows]))
    return "\n\n".join(blocks) + "\n"


def _keys(kind: Any, prefix: str) -> list[Key]:
    hints = typing.get_type_hints(kind)
    meanings = _meanings(kind)
    return [
        Key(
            prefix + field.name,
            meanings.get(field.name, ""),
            _type(hints[field.name]),
            _default(field),
            _allowed(prefix + field.name, field.metadata),
        )
        for field in dataclasses.fields(kind)
    ]


def _type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        kind, other = typing.get_args(hint)
        return f"{_type(kind)}, or {'a word' if other is str else 'none'}"
    return TYPES.get(hint, "mapping")


def _default(field: dataclasses.Field) -> str:
    value = {} if field.default is dataclasses.MISSING else field.default
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _allowed(name: str, rule: Mapping[str, Any]) -> str:
    choices = WORDS.get(name) or rule.get("one of")
    if "named" in rule:
        choices = (*sorted(rule["named"]), FUNCTION)
    if choices:
        return ("words with commas: " if name in WORDS else "") + ", ".join(choices)
    if "at most" in rule:
        return f"from {rule['at least']} to {rule['at most']}"
    if "below" in rule:
        return f"from {rule['at least']} to below {rule['below']}"
    if "at least" in rule:
        word = f", or {rule['word']}" if "word" in rule else ""
        return f"at least {rule['at least']}{word}"
    return f"above {rule['above']:g}" if "above" in rule else ""


def _summary(kind: Any) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _meanings(kind: Any) -> dict[str, str]:
    """Return the entries in the section "Attributes" of a docstring, each as one line."""
    _, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    attributes = re.split(r"\n\s*\n", attributes)[0]
    entries = re.split(r"^    (\w+): ", attributes, flags=re.MULTILINE)[1:]
    return {
        name: " ".join(meaning.split())
        for name, meaning in zip(entries[::2], entries[1::2], strict=True)
    }
