"""Test that each private name that `keras_compat` imports is where it was.

Keras is about to make its backends plug-ins (keras RFC #23523, #23642), which moves the modules of
its TensorFlow backend. Each test is named after what has moved. This file imports nothing of
tfdist: if a name has moved, tfdist cannot be imported. The other tests here check what the names
do.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
from collections.abc import Iterator

import keras
import pytest

SOURCES = pathlib.Path(__file__).resolve().parents[3] / "tfdist" / "keras_compat"

# Private names of classes that Keras' TensorFlow backend defines, and that `keras_compat` replaces
# or calls. The public class, the name, the module that defines it.
BACKEND = "keras.src.backend.tensorflow"
OF_BACKEND = [
    (keras.Model, "_maybe_symbolic_build", f"{BACKEND}.trainer"),
    (keras.Model, "make_train_function", f"{BACKEND}.trainer"),
    (keras.Model, "make_test_function", f"{BACKEND}.trainer"),
    (keras.Model, "make_predict_function", f"{BACKEND}.trainer"),
    (keras.Variable, "_deferred_initialize", f"{BACKEND}.core"),
    (keras.Variable, "_direct_assign", f"{BACKEND}.core"),
    (keras.optimizers.Optimizer, "_all_reduce_sum_gradients", f"{BACKEND}.optimizer"),
    (keras.optimizers.Optimizer, "_var_key", f"{BACKEND}.optimizer"),
    (
        keras.optimizers.Optimizer,
        "_backend_increment_gradient_accumulators",
        f"{BACKEND}.optimizer",
    ),
]


def private_imports() -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each import of a private module; "" for the module itself."""
    for path in sorted(SOURCES.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((x.name, "") for x in node.names if is_private(x.name))
            elif isinstance(node, ast.ImportFrom) and is_private(node.module or ""):
                yield from ((node.module, x.name) for x in node.names)


def is_private(module: str) -> bool:
    return module.startswith(("keras.src", "tensorflow.python"))


@pytest.mark.parametrize(("module", "name"), sorted(set(private_imports())))
def test_a_private_name_is_where_it_was(module, name):
    home = importlib.import_module(module)
    assert not name or hasattr(home, name) or importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize(
    ("cls", "name", "module"),
    OF_BACKEND,
    ids=[f"{cls.__name__}.{name}" for cls, name, _ in OF_BACKEND],
)
def test_a_method_of_the_backend_is_where_it_was(cls, name, module):
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    assert owner is not None, f"{cls.__name__}.{name} is gone"
    method = vars(owner)[name]
    original = getattr(method, "__wrapped__", method)  # tfdist's hooks may be installed
    assert original.__module__ == module
