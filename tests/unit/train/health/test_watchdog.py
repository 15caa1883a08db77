"""Test how long a call waits for others.

Calls run in processes of their own, as what ends one call ends all later ones.
"""

import re
import subprocess
import sys

import pytest

from tests.forkserver import Popen
from tests.processes import ROOT, environment

SCRIPT = """
import sys, time, tensorflow as tf
from tfdist.train.health.watchdog import Watchdog
from tfdist.parallel.placement import Placement
cpu, = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

@tf.function
def total():
    def add(device):
        with tf.device(device):
            return tf.raw_ops.CollectiveReduce(input=[1.0], group_size=2, group_key=1, instance_key=1, merge_op="Add", final_op="Id", subdiv_offsets=[0])
    return add("CPU:0")[0] + 0 * add("CPU:1")[0]

def stuck(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)

watchdog = Watchdog(1.6, Placement(workers=2))
try:
    exec(sys.argv[1])
    print("later:", float(total()))
except TimeoutError as error:
    print("ended:", error)
"""  # noqa: E501
GOOD = """
for _ in range(25):  # short ones
    with watchdog.bound():
        stuck(0.1)
with watchdog.bound():
    stuck(0.3)
stuck(2.5)  # in none
with watchdog.bound(lambda: time.monotonic()):  # one step after the other
    stuck(2.5)
for endless in Watchdog(0.1), Watchdog(0.1, Placement()), Watchdog(float("inf"), Placement(workers=2)):
    with endless.bound():
        stuck(0.5)
"""  # noqa: E501
ENDLESS = """
with watchdog.bound({}):
    for _ in range(200):
        stuck(0.1)
        total()
"""
SIGNS = ["", "lambda: 7", "lambda: time.sleep(60)"]  # the last: as of a device that hangs


@pytest.fixture(scope="module")
def said():
    """Return the output and errors of each process.

    All run at the same time, as they mostly wait.
    """
    started = {
        code: Popen(
            [sys.executable, "-c", SCRIPT, code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
        for code in (GOOD, *map(ENDLESS.format, SIGNS))
    }
    return {code: process.communicate(timeout=120) for code, process in started.items()}


def test_calls_that_make_steps_are_not_ended(said):
    output, errors = said[GOOD]
    assert output == "later: 2.0\n", errors


@pytest.mark.parametrize("sign", SIGNS)
def test_a_call_without_a_step_is_ended(said, sign):
    output, errors = said[ENDLESS.format(sign)]
    assert output.startswith("ended: worker:0 waited too long for worker:1: no step for 1.6 s. "), (
        errors
    )


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (60, "Collective instance 131 expected type 0 and data_type 2 but got type 1"),
        (
            float("inf"),
            "Shape mismatch in the collective instance 134. Op at device /job:worker expected "
            "shape [8] but another member in the group expected shape [8,8].",
        ),
    ],
)
def test_workers_in_different_collectives_are_reported_as_out_of_step(seconds, message):
    """The message is that of two workers; tests/cluster/test_training.py makes them."""
    import tensorflow as tf

    from tfdist.parallel.placement import Placement
    from tfdist.train.health.watchdog import Watchdog

    watchdog = Watchdog(seconds, Placement(workers=2))
    with pytest.raises(RuntimeError, match=f"is out of step with .*variable.*{re.escape(message)}"):
        with watchdog.bound():
            raise tf.errors.InternalError(
                None, None, f"aborted by: {message}\nRestart your program"
            )
    with pytest.raises(tf.errors.InternalError, match="other"), watchdog.bound():
        raise tf.errors.InternalError(None, None, "other")
