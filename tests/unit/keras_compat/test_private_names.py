"""Test that each private name that `keras_compat` imports is where it was.

Keras is about to make its backends plug-ins (keras RFC #23523, #23642), which moves the modules of
its TensorFlow backend. Each test is named after what has moved. This file imports nothing of
tfdist: if a name has moved, tfdist cannot be imported. The other tests here check what the names
do.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
from collections.abc import Iterator

import keras
import pytest

SOURCES = pathlib.Path(__file__).resolve().parents[3] / "tfdist" / "keras_compat"

# Private names of classes that Keras' TensorFlow backend defines, and that `keras_compat` replaces
# or calls. The public class, the name, the module that defines it; that of variables is elsewhere
# since Keras 3.16.
BACKEND = "keras.src.backend.tensorflow"
CORE = f"{BACKEND}.core" if importlib.util.find_spec(f"{BACKEND}.core") else f"{BACKEND}.ops.core"
OF_BACKEND = [
    (keras.Model, "_maybe_symbolic_build", f"{BACKEND}.trainer"),
    (keras.Model, "make_train_function", f"{BACKEND}.trainer"),
    (keras.Model, "make_test_function", f"{BACKEND}.trainer"),
    (keras.Model, "make_predict_function", f"{BACKEND}.trainer"),
    (keras.Variable, "_deferred_initialize", CORE),
    (keras.Variable, "_direct_assign", CORE),
    (keras.optimizers.Optimizer, "_all_reduce_sum_gradients", f"{BACKEND}.optimizer"),
    (keras.optimizers.Optimizer, "_var_key", f"{BACKEND}.optimizer"),
    (
        keras.optimizers.Optimizer,
        "_backend_increment_gradient_accumulators",
        f"{BACKEND}.optimizer",
    ),
]


def private_imports() -> Iterator[tuple[str, ...]]:
    """Yield the private names of each import; those of one `try` are alternatives of each other."""
    for path in sorted(SOURCES.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        attempts = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
        alternatives = {id(node) for attempt in attempts for node in ast.walk(attempt)}
        for attempt in attempts:
            if names := tuple(name for node in ast.walk(attempt) for name in imported_by(node)):
                yield names
        for node in ast.walk(tree):
            if id(node) not in alternatives:
                yield from ((name,) for name in imported_by(node))


def imported_by(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a node of the syntax tree imports, with their modules."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if is_private(each.name))
    elif isinstance(node, ast.ImportFrom) and is_private(node.module or ""):
        yield from (f"{node.module}.{each.name}" for each in node.names)


def is_private(module: str) -> bool:
    return module.startswith(("keras.src", "tensorflow.python"))


@pytest.mark.parametrize("names", sorted(set(private_imports())), ids=" or ".join)
def test_a_private_name_is_where_it_was(names):
    assert any(is_there(name) for name in names), f"{' and '.join(names)} have moved"


def is_there(name: str) -> bool:
    home, _, last = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(home), last) or bool(importlib.import_module(name))
    except ImportError:
        return False


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
