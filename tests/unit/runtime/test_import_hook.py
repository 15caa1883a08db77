"""Test that `import tfdist` makes TensorFlow's import quick and quiet, and changes nothing else."""

import pytest

from tests.unit.runtime.test_startup_lines import NOISE, stderr_of

REAL = "E0000 00:00:1.2 3 x.cc:1] real error"
FAKE = f"""
import os
level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
for line in {[*NOISE, REAL]!r}:
    os.write(2, line.encode() + b"\\n")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a package before TensorFlow that prints its lines."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(FAKE)
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"


def test_the_lines_of_the_import_are_hidden(fake):
    code = fake + (
        "import os, tfdist, tensorflow\n"
        "assert tensorflow.level == '1'\n"
        "assert 'TF_CPP_MIN_LOG_LEVEL' not in os.environ\n"
        "assert tensorflow.__spec__.loader.get_source('tensorflow')\n"
    )
    assert stderr_of(code) == f"{REAL}\n"


def test_a_search_for_the_module_is_no_import(fake):
    code = fake + (
        "import importlib.util, tfdist\nassert importlib.util.find_spec('tensorflow').origin\n"
        "import tensorflow\n"
    )
    assert stderr_of(code) == f"{REAL}\n"


def test_a_user_may_see_the_lines(fake):
    shown = stderr_of(fake + "import tfdist, tensorflow\n", TF_CPP_MIN_LOG_LEVEL="0")
    assert shown.splitlines() == [*NOISE, REAL]


def test_an_import_before_tfdist_stays_as_it_is(fake):
    code = fake + "import tensorflow\nbefore = list(sys.meta_path)\nimport tfdist\n"
    code += "assert not any('import_hook' in type(f).__module__ for f in sys.meta_path)\n"
    assert stderr_of(code).splitlines() == [*NOISE, REAL]


def test_an_import_that_fails_says_why(fake, tmp_path):
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise ImportError('no libx.so')")
    code = fake + "import tfdist\ntry:\n    import tensorflow\n"
    code += "except ImportError as error:\n    assert str(error) == 'no libx.so'\n"
    assert stderr_of(code) == ""


def test_an_absent_tensorflow_is_absent():
    code = "import importlib.util, sys, tfdist\nsys.path[:] = []\ntry:\n    import tensorflow\n"
    code += "except ModuleNotFoundError as error:\n    assert error.name == 'tensorflow'\n"
    code += "else:\n    sys.exit(1)\n"
    assert stderr_of(code) == ""


@pytest.mark.parametrize("package", ["tensorflow", "keras", "tensorflow_datasets"])
def test_an_import_is_not_searched_for_garbage(tmp_path, package):
    (tmp_path / f"{package}.py").write_text("import gc\ncollects = gc.isenabled()\nmade = [[]]\n")
    code = f"import gc, sys, tfdist\nsys.path.insert(0, {str(tmp_path)!r})\n"
    code += f"import {package} as p\nassert not p.collects and gc.isenabled()\n"
    code += "assert not any(each is p.made for each in gc.get_objects())  # collections skip it\n"
    assert stderr_of(code) == ""


def test_models_are_collected_after_a_late_import(fake, tmp_path):
    (tmp_path / "keras.py").write_text("import gc\ncollects = gc.isenabled()\n")
    code = fake + (
        "import gc, weakref, tfdist, tensorflow\n"
        "class Model: pass\n"
        "model = Model(); model.itself = model; dropped = weakref.ref(model)\n"
        "import keras\n"
        "assert not keras.collects and gc.isenabled()\n"
        "del model; gc.collect()\n"
        "assert dropped() is None\n"
    )
    assert stderr_of(code) == f"{REAL}\n"


def test_a_collector_that_the_user_stopped_stays_stopped(fake):
    code = fake + "import gc, tfdist\ngc.disable()\nimport tensorflow\n"
    code += "assert not gc.isenabled() and not gc.get_freeze_count()\n"
    assert stderr_of(code) == f"{REAL}\n"


def test_an_import_that_fails_leaves_the_collector_running(fake, tmp_path):
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise ImportError('no libx.so')")
    code = fake + "import gc, tfdist\ntry:\n    import tensorflow\nexcept ImportError:\n    pass\n"
    assert stderr_of(code + "assert gc.isenabled()\n") == ""
