"""Run steps, as `tfdist train` or in two pipeline stages, and print the bytes of tensors.

For each device, these are the bytes held afterwards, those at the peak of a step, and those that a
step sends.

Arguments: the number of stages, 0 for none; the config, by words.
"""

import gc
import sys
import time

import tensorflow as tf

from tfdist import parallel
from tfdist.run import build, input_pipeline, train_command

stages = int(sys.argv[1])
settings = train_command.parse(sys.argv[2:])
strategy = build.make_strategy(settings.strategy, settings.sync)
if stages:
    strategy = tf.distribute.get_strategy()
train = input_pipeline.pipeline(settings)
next(iter(train))  # the data are in memory from here on


def held() -> int:
    """Return the bytes in use once threads have let go of the last step's tensors."""
    gc.collect()
    readings = []
    for _ in range(10):
        time.sleep(0.1)
        readings.append(tf.config.experimental.get_memory_info("CPU:0")["current"])
    return min(readings)


before = held()
model = build.make_model(settings, strategy, train)
if stages:
    whole = model
    model = parallel.pipeline(whole, stages, microbatches=8)
    model.compile(settings.train.optimizer, whole.loss)
devices = stages or strategy.num_replicas_in_sync
resident = []
# TensorFlow's allocator gives chunks of up to twice what is asked for, other ones after each step.
for _ in range(5):
    model.fit(train, steps_per_epoch=2, verbose=0)
    resident.append(held() - before)
print(f"resident {min(resident) // devices}")
tf.config.experimental.reset_memory_stats("CPU:0")
model.fit(train, steps_per_epoch=2, verbose=0)
print(f"peak {(tf.config.experimental.get_memory_info('CPU:0')['peak'] - before) // devices}")
if not stages:
    print(f"sent {strategy.tfdist_engine.bytes_per_step(model):.0f}")
