"""Test the warning for a TensorFlow or Keras that the hooks were not tested with."""

import re

import pytest

from tfdist.keras_compat.tested_versions import TESTED, warning


@pytest.mark.parametrize(
    ("tensorflow", "keras", "named"),
    [
        (f"{TESTED[0][0]}.7", f"{TESTED[0][1]}.9", ()),
        (f"{TESTED[0][0]}.0", f"{TESTED[-1][1]}.0-dev", ()),  # not together, but each
        (f"{TESTED[0][0]}.0", "3.99.0.dev2", ("Keras 3.99.0.dev2",)),
        ("2.99.0-rc1", "4.0.0", ("TensorFlow 2.99.0-rc1", "Keras 4.0.0")),
        ("nightly", f"{TESTED[0][1]}.0", ("TensorFlow nightly",)),
    ],
)
def test_untested_versions_are_named(tensorflow, keras, named):
    text = warning(tensorflow, keras)
    assert bool(text) == bool(named)
    assert "\n" not in text
    assert re.findall(r"(\w+ \S+) \(it was with", text) == list(named)


def test_a_process_with_an_untested_keras_says_so_once(run_python):
    done = run_python(
        "import sys, keras\n"
        "for name in [name for name in sys.modules if name.startswith('tfdist')]:\n"
        "    del sys.modules[name]  # a process of the tests may have imported it\n"
        "keras.__version__ = '3.99.0'\n"
        "import tfdist\n"
        "tfdist.make_strategy('one_device', devices='cpu')\n"
        "tfdist.make_strategy('one_device', devices='cpu')\n"
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "not tested" in line]
    assert len(lines) == 1
    assert "Keras 3.99.0" in lines[0]
    assert "tfdist verify" in lines[0]
