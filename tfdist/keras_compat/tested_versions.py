"""Tested versions of TensorFlow and Keras, and a warning for others."""

from __future__ import annotations

import logging
import re

log = logging.getLogger("tfdist")

# (TensorFlow, Keras) that passed; `make test-matrix` writes this and the table of docs/versions.md.
TESTED: tuple[tuple[str, str], ...] = (
    ("2.19", "3.10"),
    ("2.19", "3.11"),
    ("2.19", "3.12"),
    ("2.19", "3.13"),
    ("2.19", "3.14"),
    ("2.19", "3.15"),
    ("2.20", "3.10"),
    ("2.20", "3.11"),
    ("2.20", "3.12"),
    ("2.20", "3.13"),
    ("2.20", "3.15"),
    ("2.21", "3.12"),
    ("2.21", "3.13"),
    ("2.21", "3.14"),
    ("2.21", "3.15"),
)


def warn_if_untested(tensorflow: str, keras: str) -> None:
    """Log one warning if the hooks were never tested with these versions.

    Args:
        tensorflow: Version of TensorFlow, such as "2.21.0".
        keras: Version of Keras.
    """
    text = warning(tensorflow, keras)
    if text:
        log.warning(text)


def warning(tensorflow: str, keras: str) -> str:
    """Return the warning for these versions, in one line; "" if each of the two was tested.

    Patch versions do not matter, nor does it whether the two were tested together.

    Example:
        >>> warning("2.21.0", "3.15.1")
        ''
        >>> warning("2.99.0", "3.15.1")  # doctest: +ELLIPSIS
        'tfdist was not tested with TensorFlow 2.99.0 (it was with 2.19, ...
    """
    untested = [
        f"{name} {version} (it was with {', '.join(tested)})"
        for name, version, tested in (
            ("TensorFlow", tensorflow, _minors(0)),
            ("Keras", keras, _minors(1)),
        )
        if _minor(version) not in tested
    ]
    if not untested:
        return ""
    return (
        f"tfdist was not tested with {' or '.join(untested)}. `tfdist verify` compares its numbers "
        "with those of one replica; an ImportError or AttributeError below may come from a private "
        "name that has moved."
    )


def _minors(which: int) -> list[str]:
    """Return the tested minor versions of TensorFlow (0) or Keras (1), in order."""
    versions = {combination[which] for combination in TESTED}
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


def _minor(version: str) -> str:
    """Return the major and minor part of a version: "3.16" for "3.16.0.dev1"."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version
