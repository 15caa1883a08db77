"""Import recorder: the imports and environment of a task, for standby processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tfdist.runtime.launch_protocol import private

ROOTS = ("tensorflow", "keras", "tensorflow_datasets")  # recorded, as all of tfdist
# Variables that these modules and their libraries may read at import time.
READ_AT_IMPORT = re.compile(
    r"(?!TF_CONFIG$)(TF|TF2|TFDS|TPU|KERAS|XLA|CUDA|NVIDIA|NCCL|OMP|GOMP|KMP|MKL|DNNL"
    r"|ONEDNN|OPENBLAS|GOTO|BLIS|NUMEXPR|NPY|GRPC|GLOG|ABSL|LD|MALLOC|HDF5|LC)_.*"
    r"|PYTHON.*|HOME|LANG|TZ|PATH"
)


@dataclasses.dataclass(frozen=True)
class Imports:
    """Modules that a task imported.

    Attributes:
        modules: Names of the modules in import order; empty for a task without TensorFlow.
        environ: Variables that the task had changed before the first import, with their new values;
            None for a removed one.
    """

    modules: tuple[str, ...] = ()
    environ: Mapping[str, str | None] = dataclasses.field(default_factory=dict)


class ImportRecorder:
    """A meta path finder that records the imports of a task and finds no module itself.

    Args:
        path: Path of the record.
        environ: Variables of this process, which the task may change.
    """

    def __init__(self, path: str, environ: Mapping[str, str]):
        self._path = path
        self._environ = environ
        self._before = dict(environ)
        self._recorded = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Record the module's name, and with the first of `ROOTS` the changed variables.

        See `importlib.abc.MetaPathFinder`.
        """
        if name not in ROOTS and not name.startswith("tfdist."):
            return
        line: dict[str, object] = {"module": name}
        if name in ROOTS and not self._recorded:
            self._recorded = True
            line["environ"] = changed(self._before, self._environ)
        # A full disk must not end the task; only the standby processes need the record.
        with (
            contextlib.suppress(OSError),
            open(self._path, "a", encoding="utf-8", opener=private) as file,
        ):
            file.write(json.dumps(line) + "\n")


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that affect imports and differ, with their new values.

    Example:
        >>> changed({"TF_A": "1", "TF_B": "1"}, {"TF_A": "2", "OTHER": "1"})
        {'TF_A': '2', 'TF_B': None}
    """
    names = sorted(name for name in before.keys() | after.keys() if READ_AT_IMPORT.fullmatch(name))
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def read_imports(path: str) -> Imports:
    """Return a task's record so far; empty before it imports TensorFlow or Keras."""
    modules: dict[str, None] = {}
    environ: Mapping[str, str | None] | None = None
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for text in file:
            # A line that is being written, or is damaged: only the standby processes need it.
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if _is_record(line):
                    modules[line["module"]] = None
                    environ = line.get("environ", environ)
    return Imports() if environ is None else Imports(_importable(modules), environ)


def _is_record(line: Any) -> bool:
    """Return whether a line is one of `ImportRecorder`."""
    if not isinstance(line, dict) or not isinstance(line.get("module"), str):
        return False
    environ = line.get("environ", {})
    return isinstance(environ, dict) and all(isinstance(v, str | None) for v in environ.values())


def _importable(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that are not programs, which would run at a second import."""
    return tuple(name for name in modules if not name.endswith("__main__"))
