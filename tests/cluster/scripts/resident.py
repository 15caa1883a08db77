"""Run steps, as `tfdist train` or in two pipeline stages, and print the bytes of tensors.

For each device, these are the bytes held afterwards, those at the peak of a step, and those that a
step sends.

Arguments: the number of stages, 0 for none; the config, by words.
"""

import gc
import statistics
import sys
import time

import keras
import tensorflow as tf

from tfdist import parallel
from tfdist.run import build, input_pipeline, train_command
from tfdist.run.plan.step_memory import take_free_chunks

stages = int(sys.argv[1])
settings = train_command.parse(sys.argv[2:])
strategy = build.make_strategy(settings.strategy, settings.sync)
if stages:
    strategy = tf.distribute.get_strategy()
train = input_pipeline.pipeline(settings)
next(iter(train))  # the data are in memory from here on
# The allocator takes one region, as on a GPU. Otherwise its regions are powers of two, and a tensor
# that fills more than half of one counts as the whole.
tf.raw_ops.Empty(shape=(2, 1 << 30), dtype=tf.uint8)


def held() -> int:
    """Return the bytes in use once threads have let go of the last step's tensors."""
    gc.collect()
    readings = []
    for _ in range(10):
        time.sleep(0.1)
        readings.append(tf.config.experimental.get_memory_info("CPU:0")["current"])
    return min(readings)


devices = stages or len(strategy.extended.worker_devices)
resident, peak = [], []
# A variable keeps the chunk that it got: each model gets other ones, and the smallest of several is
# nearest to what was asked for. What a step holds at a time depends on the order of its operations:
# hence the median there.
for _ in range(3):
    before = held()
    model = build.make_model(settings, strategy, train)
    if stages:
        whole = model
        model = parallel.pipeline(whole, stages, microbatches=8)
        model.compile(settings.train.optimizer, whole.loss)
    model.fit(train, steps_per_epoch=2, verbose=0)
    trained = held()
    resident.append(trained - before)
    taken = take_free_chunks()
    unused = tf.config.experimental.get_memory_info("CPU:0")["current"] - trained
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.fit(train, steps_per_epoch=2, verbose=0)
    peak.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before - unused)
    del taken
    sent = None if stages else strategy.tfdist_engine.bytes_per_step(model)
    model = whole = None
    keras.backend.clear_session()
print(f"resident {min(resident) // devices}")
print(f"peak {statistics.median_low(peak) // devices}")
if sent is not None:
    print(f"sent {sent:.0f}")
