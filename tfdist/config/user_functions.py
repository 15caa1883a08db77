"""Load user functions that a setting names as `FILE.py:FUNCTION`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import sys
import traceback
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tfdist.config import Run, nearest, reference
from tfdist.config.checks import words_of

# Keys that may name a function of a file, as a text or as words with commas.
KEYS = (
    "data.name",
    "model.name",
    "train.optimizer",
    "train.schedule",
    "train.loss",
    "train.metrics",
    "train.callbacks",
)

_files: dict[str, ModuleType] = {}  # loaded files, by path


def in_file(text: str) -> bool:
    """Return whether a setting names a function of a file.

    Example:
        >>> in_file("models/mine.py:build"), in_file("mnist"), in_file("namespace:mnist")
        (True, False, False)
    """
    return bool(re.fullmatch(r".+\.py:\w*", text))


def check_files(settings: Run) -> None:
    """Raise ValueError if a setting names a function of a file that does not exist.

    This runs no code of a user, so it is quick.

    Args:
        settings: Settings of a run.
    """
    for key in KEYS:
        section, name = key.split(".")
        value = getattr(getattr(settings, section), name)
        for word in words_of(value) if key in reference.WORDS else (value,):
            where = word.rpartition(":")[0]
            if where.endswith(".py") and not os.path.isfile(where):
                raise ValueError(
                    f"{key}: expected FILE.py:FUNCTION of a file that exists, received {word!r}; "
                    f"there is no file {os.path.abspath(where)}. Correct the path."
                )


def load(text: str, key: str) -> Callable[..., Any]:
    """Return the function that a setting names.

    Args:
        text: "FILE.py:FUNCTION" or "package.module:FUNCTION".
        key: Key of the setting, for messages.

    Returns:
        The function. A file is run once in a process, however many of its functions are loaded.

    Raises:
        ValueError: If there is no such file, module or function, or its code fails.

    Example:
        >>> load("os.path:basename", "model.name")("a/b")
        'b'
        >>> load("os.path:basname", "model.name")
        Traceback (most recent call last):
        ValueError: model.name=os.path:basname: os.path defines no function basname. Did you mean basename?
    """  # noqa: E501
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise ValueError(f"{key}: expected FILE.py:FUNCTION, received {text!r}.")
    module = (
        _file(os.path.abspath(where), f"{key}={text}")
        if where.endswith(".py")
        else _module(where, f"{key}={text}")
    )
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            n for n, value in vars(module).items() if callable(value) and not n.startswith("_")
        ]
        raise ValueError(
            (
                f"{key}={text}: {where} defines no function {name}. "
                f"{nearest(name, known) if known else ''}"
            ).rstrip()
        )
    return function


def _module(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{setting}: no module {error.name} can be imported. Name a file, FILE.py:FUNCTION, or "
            "install it."
        ) from error
    except Exception as error:
        raise failed(setting, error) from error


def _file(path: str, setting: str) -> ModuleType:
    if path in _files:
        return _files[path]
    if not os.path.isfile(path):
        raise ValueError(f"{setting}: no such file as {path}.")
    directory, name = os.path.split(path)
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as for a script, so that it can import modules beside it
    name = name.removesuffix(".py")
    if name in sys.modules:
        name += f"_{zlib.crc32(path.encode()):x}"  # another module has the name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise failed(setting, error) from error
    _files[path] = module
    return module


def failed(setting: str, error: Exception) -> ValueError:
    """Return a ValueError for an error in a user's file, which names the line at fault.

    This is the line that was run, or that cannot be parsed.

    Args:
        setting: Setting that names the file, such as "--config=mine.py".
        error: Error that the caller has caught.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return ValueError(
            f"{setting}: {type(error).__name__} in line {error.lineno} of {error.filename}: "
            f"{error.msg}"
        )
    files = (__file__, importlib.__file__, runpy.__file__)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)[1:]
        if f.filename not in files and "<frozen " not in f.filename
    ]  # without the first frame, which is the function that caught it
    # The user's file is the first that runs.
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    where = f" in line {own[-1].lineno} of {own[-1].filename}" if own else ""
    return ValueError(f"{setting}: {type(error).__name__}{where}: {error}")
