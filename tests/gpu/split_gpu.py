"""Run a script on the first GPU, split into logical GPUs of equal memory, to compare with CPUs.

It computes in full float32, and uses XLA only where the script asks for it: XLA draws other random
numbers.

The command is `python split_gpu.py NUMBER SCRIPT [ARGUMENT ...]`.
"""

import pathlib
import runpy
import sys

import tensorflow as tf

MEMORY_MIB = 4096


def main(number: str, script: str, *arguments: str) -> None:
    gpu = tf.config.list_physical_devices("GPU")[0]
    part = tf.config.LogicalDeviceConfiguration(MEMORY_MIB)
    tf.config.set_visible_devices(gpu, "GPU")
    tf.config.set_logical_device_configuration(gpu, [part] * int(number))
    tf.config.experimental.enable_tensor_float_32_execution(False)  # it rounds to 2^-11
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    from tfdist.train.synchronous import engine

    engine.model_supports_jit = lambda model: False
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
