"""Import hook that hides TensorFlow's start-up lines, whoever imports TensorFlow.

`import tfdist` installs it, so this module imports others only when TensorFlow is imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import importlib.abc
    import types
    from importlib.machinery import ModuleSpec


def install() -> None:
    """Install the hook, unless TensorFlow is loaded already."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finder that lets other finders find TensorFlow, and imports it within `hidden`."""

    def __init__(self) -> None:
        self._searches = False
        self._is_done = False  # it stays in the list, over which other threads may iterate

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "tensorflow" or self._searches or self._is_done:
            return None
        import importlib.util

        self._searches = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searches = False
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "__dict__"):
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: importlib.abc.Loader) -> None:
        from tfdist.runtime.startup_lines import hidden

        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            self._is_done = True
            with hidden():
                execute(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
