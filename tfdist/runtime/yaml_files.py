"""YAML parsing that refuses what YAML would silently drop, with errors of one line."""

from __future__ import annotations

from typing import Any

import yaml


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
    try:
        return yaml.load(text, _UniqueKeyLoader)
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
