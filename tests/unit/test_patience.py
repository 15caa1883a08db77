"""How long a call waits for others: in processes of their own, as what ends one call ends all later ones."""

import pytest

SCRIPT = """
import sys, time, tensorflow as tf
from tfdist.train.patience import Patience
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

patience = Patience(1.6, Placement(workers=2))
try:
    exec(sys.argv[1])
    print("later:", float(total()))
except TimeoutError as error:
    print("ended:", error)
"""
GOOD = """
for _ in range(30):  # short ones
    with patience.bound():
        stuck(0.1)
with patience.bound():
    stuck(0.3)
stuck(3)  # in none
with patience.bound(lambda: time.monotonic()):  # one step after the other
    stuck(3)
for endless in Patience(0.1), Patience(0.1, Placement()), Patience(float("inf"), Placement(workers=2)):
    with endless.bound():
        stuck(0.5)
"""


def test_calls_that_make_steps_are_left_alone(run_python):
    done = run_python(SCRIPT, GOOD)
    assert done.stdout == "later: 2.0\n", done.stderr


@pytest.mark.parametrize("sign", ["", "lambda: 7", "lambda: time.sleep(60)"])  # the last: as of a device that hangs
def test_a_call_without_a_step_is_ended(run_python, sign):
    done = run_python(SCRIPT, f"with patience.bound({sign}): stuck(4); total()")
    assert done.stdout.startswith("ended: worker:0 waited too long for worker:1, 1.6 s without a step: "), done.stderr
