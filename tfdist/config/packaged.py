"""Configs that the package carries, for names that are no files."""

from __future__ import annotations

import os
import pathlib

from tfdist.config.checks import nearest
from tfdist.config.sections import Data

_PACKAGE = pathlib.Path(__file__).parent.parent
# Environment variables that hold the default of data.data_dir, by the names of the configs whose
# own function reads that directory.
_DIRECTORY_VARIABLES = {"imagenet_resnet34": "IMAGENET"}


def directory() -> pathlib.Path:
    """Return the directory of the packaged configs: in an installed package, or in a checkout."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def names() -> list[str]:
    """Return the names of the packaged configs.

    Example:
        >>> names()
        ['digits', 'digits_ps', 'imagenet_resnet34']
    """
    return sorted(path.stem for path in directory().glob("*.py") if path.stem != "__init__")


def find(name: str) -> str:
    """Return the path of a config: the file of this name, or the packaged config.

    Args:
        name: Path of a file, or name of a packaged config.

    Raises:
        ValueError: If there is neither.

    Example:
        >>> os.path.basename(find("digits"))
        'digits.py'
    """
    if os.path.isfile(name):
        return name
    if name in names():
        return str(directory() / f"{name}.py")
    packaged = "" if os.path.basename(name) != name else f" Packaged: {nearest(name, names())}"
    raise ValueError(
        f"--config={name}: no such file in {os.getcwd()}. Name a Python file that defines "
        f"get_config(), a YAML file, or a packaged config.{packaged}"
    )


def check_data_dir(section: Data) -> None:
    """Raise ValueError if a packaged config reads a directory that does not exist.

    TFDS makes its directories, and a user's own function may do so too.

    Args:
        section: Section `data` of a run.
    """
    path = section.data_dir
    file = os.path.realpath(section.name.rpartition(":")[0])
    for name, variable in _DIRECTORY_VARIABLES.items():
        of_config = file == os.path.realpath(directory() / f"{name}.py")
        if of_config and path and "://" not in path and not os.path.isdir(path):
            raise ValueError(
                f"data.data_dir: expected the directory of the data, received {path!r}; there is "
                f"no directory {os.path.abspath(path)}. Set the environment variable {variable}, "
                f"from which {name} takes it, or --config.data.data_dir=DIRECTORY."
            )
