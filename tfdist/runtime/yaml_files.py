"""YAML parsing that refuses what YAML would silently drop, with errors of one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

ENDINGS = (".yaml", ".yml")  # of the names of files


def parse_yaml(text: str) -> Any:
    """Parse a YAML document.

    Args:
        text: Content of a YAML file.

    Returns:
        The document: a mapping, a list or a scalar.

    Raises:
        ValueError: If the text is not YAML, a key appears twice or is a list or mapping, or the
            document is nested too deeply.

    Example:
        >>> parse_yaml("worker: [a:1, b:1]")
        {'worker': ['a:1', 'b:1']}
    """
    return _load(text, _UniqueKeyLoader)


def parse_settings(text: str) -> tuple[Any, dict[str, int]]:
    r"""Parse a YAML document of settings, with the scalars of YAML 1.2.

    In YAML 1.1, "1e-3" is a text, "on" a truth value, "12:30:00" a number and "2026-01-01" a date.

    Args:
        text: Content of a YAML file.

    Returns:
        The document, and the line of each key, by its dotted path.

    Raises:
        ValueError: If the text is wrong, as in `parse_yaml`.

    Example:
        >>> document, lines = parse_settings("train:\n  learning_rate: 1e-3\non: yes")
        >>> document
        {'train': {'learning_rate': 0.001}, 'on': 'yes'}
        >>> lines
        {'train': 1, 'train.learning_rate': 2, 'on': 3}
    """
    document = _load(text, _SettingsLoader)
    node = yaml.compose(text, _SettingsLoader)
    return document, dict(_lines(node, ""))


def _lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        yield f"{prefix}{key.value}", key.start_mark.line + 1
        yield from _lines(value, f"{prefix}{key.value}.")


def _load(text: str, loader: type[yaml.SafeLoader]) -> Any:
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise ValueError(problem) from error
    except RecursionError as error:
        raise ValueError("the document is nested too deeply") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that rejects repeated keys, where YAML would keep the last one silently."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} appears twice; give each its own name"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _SettingsLoader(_UniqueKeyLoader):
    """YAML loader that takes scalars as the core schema of YAML 1.2 does."""

    yaml_implicit_resolvers: dict[str, list] = {}


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _SettingsLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), _first
    )
