"""Distributed training for Keras 3 on TensorFlow.

Public names are imported on first use, and `import tfdist` does not import TensorFlow. It hides
the lines that TensorFlow prints when it is imported later, unless TF_CPP_MIN_LOG_LEVEL is set, and
leaves what that import makes out of later garbage collections.

Example:
    >>> import tfdist
    >>> tfdist.config.Run().train.epochs
    8
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfdist.runtime import import_hook

__version__ = "1.0.0rc1"

if TYPE_CHECKING:
    from tfdist import app, config, data, flags, layers, loops, models, optimizers, parallel, sync
    from tfdist.cluster.spec import ClusterSpec
    from tfdist.strategies.factory import make_strategy
    from tfdist.strategies.init import init
    from tfdist.strategies.keras_distribution import enable
    from tfdist.strategies.stages import pipeline_devices
    from tfdist.tools.notebook_launcher import notebook_launcher
    from tfdist.train.callbacks.backup_and_restore import BackupAndRestore
    from tfdist.train.callbacks.image_samples import ImageSamples
    from tfdist.train.callbacks.metrics_log import Log
    from tfdist.train.callbacks.tensorboard import TensorBoard
    from tfdist.train.parameter_server.worker_pool import ParameterServerLost
    from tfdist.train.synchronous.gathered_rows import all_gather_rows
    from tfdist.train.timing.step_breakdown import StepBreakdown

# Name -> module that defines it, or that it is.
_HOMES = {
    "StepBreakdown": "tfdist.train.timing.step_breakdown",
    "BackupAndRestore": "tfdist.train.callbacks.backup_and_restore",
    "ClusterSpec": "tfdist.cluster.spec",
    "ImageSamples": "tfdist.train.callbacks.image_samples",
    "Log": "tfdist.train.callbacks.metrics_log",
    "ParameterServerLost": "tfdist.train.parameter_server.worker_pool",
    "TensorBoard": "tfdist.train.callbacks.tensorboard",
    "all_gather_rows": "tfdist.train.synchronous.gathered_rows",
    "app": "tfdist.app",
    "config": "tfdist.config",
    "data": "tfdist.data",
    "enable": "tfdist.strategies.keras_distribution",
    "flags": "tfdist.flags",
    "init": "tfdist.strategies.init",
    "layers": "tfdist.layers",
    "loops": "tfdist.loops",
    "make_strategy": "tfdist.strategies.factory",
    "models": "tfdist.models",
    "notebook_launcher": "tfdist.tools.notebook_launcher",
    "optimizers": "tfdist.optimizers",
    "parallel": "tfdist.parallel",
    "pipeline_devices": "tfdist.strategies.stages",
    "sync": "tfdist.sync",
}

__all__ = [
    "BackupAndRestore",
    "ClusterSpec",
    "ImageSamples",
    "Log",
    "ParameterServerLost",
    "StepBreakdown",
    "TensorBoard",
    "__version__",
    "all_gather_rows",
    "app",
    "config",
    "data",
    "enable",
    "flags",
    "init",
    "layers",
    "loops",
    "make_strategy",
    "models",
    "notebook_launcher",
    "optimizers",
    "parallel",
    "pipeline_devices",
    "sync",
]

import_hook.install()


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(
            f"module 'tfdist' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}"
        )
    module = importlib.import_module(home)
    value = module if home == f"tfdist.{name}" else getattr(module, name)
    globals()[name] = value  # later accesses find it without __getattr__
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES)
