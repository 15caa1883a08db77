"""Test that `tfdist.app.run` hides what TensorFlow prints when absl makes it find its devices."""

import os
import subprocess
import sys

from tests.processes import environment

SCRIPT = """
import os, sys, types
from absl import app

def find(kind=None):
    if not found:
        os.write(2, b"E0000 00:00:1.2 3 cuda.cc:1] failed call to cuInit: (303)" + bytes([10]))
    found.append(1)

found = []
tensorflow = sys.modules["tensorflow"] = types.ModuleType("tensorflow")
tensorflow.config = types.SimpleNamespace(list_physical_devices=find)
app.call_after_init(find)
import tfdist
tfdist.app.run(lambda argv: print("main", len(found)))
"""


def test_finding_devices_after_the_flags_prints_nothing():
    environ = {k: v for k, v in environment().items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "main 2\n", "")
