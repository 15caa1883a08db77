"""Versions of installed packages, read from their metadata."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed.

    It may have been installed under another name, as TensorFlow by `tf-nightly` or
    `tensorflow-cpu`.

    Args:
        package: Name by which Python imports it.

    Example:
        >>> version_of("tfdist") is not None, version_of("no_such_package")
        (True, None)
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    names = importlib.metadata.packages_distributions().get(package, ())
    return importlib.metadata.version(names[0]) if names else None
