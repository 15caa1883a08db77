"""A record of the modules that a task imports and of its environment, for standby processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping

ROOTS = ("tensorflow", "keras", "tensorflow_datasets")  # and all of tfdist
# Variables that these, and the libraries below them, may read when they are loaded.
READ_AT_IMPORT = re.compile(
    r"(?!TF_CONFIG$)(TF|TF2|TFDS|TPU|KERAS|XLA|CUDA|NVIDIA|NCCL|OMP|GOMP|KMP|MKL|DNNL|ONEDNN|OPENBLAS"
    r"|GOTO|BLIS|NUMEXPR|NPY|GRPC|GLOG|ABSL|LD|MALLOC|HDF5|LC)_.*|PYTHON.*|HOME|LANG|TZ|PATH"
)


@dataclasses.dataclass(frozen=True)
class Imports:
    """Modules that a task imported.

    Attributes:
        modules: Their names, in order; without TensorFlow, none.
        environ: Variables that the task had changed before, with their new values; None: removed.
    """

    modules: tuple[str, ...] = ()
    environ: Mapping[str, str | None] = dataclasses.field(default_factory=dict)


class ImportRecorder:
    """Record on `sys.meta_path` what a task imports; it finds no module itself.

    Args:
        path: Of the file.
        environ: The variables of this process, which the task may change.
    """

    def __init__(self, path: str, environ: Mapping[str, str]):
        self._path = path
        self._environ = environ
        self._before = dict(environ)
        self._recorded = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Note the module's name; with the first one of `ROOTS`, what the task has changed."""
        if name not in ROOTS and not name.startswith("tfdist."):
            return
        line: dict[str, object] = {"module": name}
        if name in ROOTS and not self._recorded:
            self._recorded = True
            line["environ"] = changed(self._before, self._environ)
        # A full disk costs the standby processes, not the task.
        with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that matter to imports and differ, with their values after.

    Example:
        >>> changed({"TF_A": "1", "TF_B": "1"}, {"TF_A": "2", "OTHER": "1"})
        {'TF_A': '2', 'TF_B': None}
    """
    names = sorted(name for name in before.keys() | after.keys() if READ_AT_IMPORT.fullmatch(name))
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def read_imports(path: str) -> Imports:
    """Return what a task has recorded so far; nothing before it imports TensorFlow or Keras."""
    modules: dict[str, None] = {}
    environ: Mapping[str, str | None] | None = None
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        for text in file:
            with contextlib.suppress(ValueError):  # a line that is being written
                line = json.loads(text)
                modules[line["module"]] = None
                environ = line.get("environ", environ)
    return Imports() if environ is None else Imports(_importable(modules), environ)


def _importable(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the modules without programs, which run when they are imported a second time."""
    return tuple(name for name in modules if not name.endswith("__main__"))
