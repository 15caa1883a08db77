"""Import hook that makes imports of TensorFlow and Keras quick and quiet.

`import tfdist` installs it, so this module imports others only when TensorFlow is imported.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import importlib.abc
    import types
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec

_LARGE = frozenset({"tensorflow", "keras", "tensorflow_datasets"})


def install() -> None:
    """Install the hook, unless TensorFlow is loaded already."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


@contextlib.contextmanager
def without_collections(freezes: bool) -> Iterator[None]:
    """Stop Python's garbage collector, and perhaps freeze all objects afterwards.

    TensorFlow and Keras make half a million objects that stay. The collector would search them for
    garbage some 900 times during the import, at times during training, and when the process ends.
    That is a third of the time of a process that only imports them.

    Where the collector is stopped already, nothing is changed.

    Args:
        freezes: Whether no object that exists at the end is ever collected, those of the program
            among them. That is for TensorFlow's first import, before which there are no models.
    """
    if not gc.isenabled():
        yield
        return
    if freezes:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if freezes:
            gc.freeze()


class _Finder:
    """Finder that lets other finders find large packages, and imports each within contexts."""

    def __init__(self) -> None:
        self._searched: set[str] = set()
        self._done: set[str] = set()  # this stays in the list, over which other threads may iterate

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in _LARGE or name in self._searched or name in self._done:
            return None
        import importlib.util

        self._searched.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searched.discard(name)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "__dict__"):
            self._wrap(name, spec.loader)
        return spec

    def _wrap(self, name: str, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            if module.__name__ != name:  # a loader may have several modules
                execute(module)
                return
            self._done.add(name)
            first = name == "tensorflow" or "tensorflow" not in sys.modules
            with without_collections(freezes=first), _hidden_lines(name):
                execute(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


def _hidden_lines(package: str) -> contextlib.AbstractContextManager[None]:
    if package != "tensorflow":
        return contextlib.nullcontext()
    from tfdist.runtime.startup_lines import hidden

    return hidden()
