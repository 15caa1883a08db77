"""Test that TensorFlow's start-up lines are hidden, and that no other line is."""

import signal
import subprocess
import sys

import pytest

from tests.processes import environment
from tfdist.runtime.startup_lines import is_chatter

NOISE = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795552203.460556   31691 port.cc:153] oneDNN custom operations are on.",
    "E0000 00:00:1795552224.592097   31691 cuda_platform.cc:52] failed call to cuInit: INTERNAL: "
    "CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)",
    "=== Source Location Trace: ===",
    "external/xla/xla/stream_executor/cuda/cuda_status.cc:50",
]
WRITE = f"""
import os, signal, sys
from tfdist.runtime.startup_lines import hidden
def say(*lines):
    for line in lines:
        os.write(2, line.encode())
with hidden():
    say(*[line + chr(10) for line in {NOISE!r}], "E0000 00:00:1.2 3 x.cc:1] real error", chr(10))
    print("from Python", file=sys.stderr)
    say("unfinished")
"""


def stderr_of(code, returns=0, **environ):
    """Run code without the variable with which a user shows the lines; return its errors."""
    variables = {k: v for k, v in environment().items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**variables, **environ},
    )
    assert done.returncode == returns, done.stderr
    return done.stderr


def test_only_the_lines_of_the_start_are_hidden():
    after = "say('after', chr(10))\n"
    expected = "E0000 00:00:1.2 3 x.cc:1] real error\nfrom Python\nunfinishedafter\n"
    assert stderr_of(WRITE + after) == expected
    for environ in ({"TF_CPP_MIN_LOG_LEVEL": "0"}, {"TFDIST_TASK": "worker:0"}):
        assert all(line in stderr_of(WRITE, **environ) for line in NOISE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_crash_loses_no_line(number):
    end = f"    os.kill(os.getpid(), {int(number)})\n"
    assert stderr_of(WRITE + end, -number).endswith("from Python\nunfinished")


def test_an_exception_ends_the_hiding():
    code = (
        "from tfdist.runtime.startup_lines import hidden\n"
        "import os, sys\n"
        "try:\n    with hidden():\n        raise KeyError('x')\n"
        "except KeyError: os.write(2, b'I0000 00:00:1.2 3 x.cc:1] shown')\n"
        "try: os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError: sys.exit(0)\n"  # no process is left
        "sys.exit(1)\n"
    )
    assert stderr_of(code) == "I0000 00:00:1.2 3 x.cc:1] shown"


def test_without_standard_error():
    code = (
        "import os; os.close(2)\nfrom tfdist.runtime.startup_lines import hidden\n"
        "with hidden(): pass\n"
    )
    assert stderr_of(code) == ""


def test_nothing_is_hidden_if_no_process_can_be_started():
    shown = stderr_of("import sys; sys.executable = '/nowhere'\n" + WRITE)
    assert all(line in shown for line in NOISE)


def test_the_log_level_is_that_of_the_user_again():
    code = (
        "import os\nfrom tfdist.runtime.startup_lines import LEVEL, hidden\n"
        "with hidden():\n    assert os.environ[LEVEL] == '1'\n"
        "    with hidden(): pass\n"
        "    assert os.environ[LEVEL] == '1'\n"
        "assert LEVEL not in os.environ\n"
    )
    assert stderr_of(code) == ""


def test_devices_are_found_once_and_without_these_lines():
    code = (
        "import os, types\nfrom tfdist.runtime.startup_lines import find_devices\n"
        "def find(kind):\n"
        f"    os.write(2, {NOISE[2]!r}.encode() + b'\\nthe driver is old\\n')\n"
        "tf = types.ModuleType('tensorflow')\n"
        "tf.config = types.SimpleNamespace(list_physical_devices=find)\n"
        "find_devices(tf)\nfind_devices(tf)\n"
    )
    assert stderr_of(code) == "the driver is old\n"


def test_a_strategy_hides_what_finding_devices_prints_if_tensorflow_is_loaded():
    code = (
        "import os, tensorflow as tf\nimport tfdist\n"
        "os.write(2, b'imported' + bytes([10]))\ntfdist.make_strategy()\n"
    )
    _, _, after = stderr_of(code).partition("imported\n")
    assert [line for line in after.splitlines() if is_chatter(line)] == []


def test_real_tensorflow_starts_without_these_lines():
    code = (
        "from tfdist.runtime.startup_lines import hidden\n"
        "with hidden():\n    import tensorflow as tf; tf.constant(1) + 1\n"
    )
    lines = stderr_of(code).splitlines()
    assert [line for line in lines if is_chatter(line)] == []
