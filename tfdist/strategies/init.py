"""Strategy of a whole script or notebook: made once, its scope entered until the end."""

from __future__ import annotations

import inspect
import os
import threading
from typing import TYPE_CHECKING, Any

from tfdist.cluster.spec import ClusterSpec
from tfdist.strategies import devices as device_names
from tfdist.strategies.base import ThreadScope
from tfdist.strategies.factory import make_strategy

if TYPE_CHECKING:
    import tensorflow as tf

_scope = ThreadScope("tfdist.init")
_lock = threading.Lock()
# The arguments of the last call that made a strategy, and the strategy.
_made: tuple[dict[str, Any], tf.distribute.Strategy] | None = None


def init(
    name: str | None = None,
    cluster: ClusterSpec | str | os.PathLike | None = None,
    devices: device_names.Devices = None,
    **options: Any,
) -> tf.distribute.Strategy:
    """Make the strategy of this script, and enter its scope until the end of the script.

    Call it first. All models, optimizers and metrics that this thread makes afterwards are
    distributed, also after `keras.utils.clear_session`. A thread that makes models calls it, too.

    A further call with the same arguments, as of a notebook's cell, returns the same strategy. With
    other arguments it makes a strategy that takes the place of the former one in this thread:
    models of the former one must be made again. A process has one strategy of several workers, and
    this call is an error there.

    Args:
        name: See `make_strategy`, as for all arguments.
        cluster: Cluster with this task, or the path of a file.
        devices: Devices of this process.
        options: The other arguments of `make_strategy`, such as `communication`.

    Returns:
        The strategy. Under `parameter_server`, this call returns in the chief only.

    Raises:
        ValueError: If an argument or the cluster is wrong, TensorFlow has already started, or this
            thread is in the scope of another strategy. The former strategy then stays in place.
        TimeoutError: If workers of the cluster did not appear; the message names them.
    """
    global _made
    bound = inspect.signature(make_strategy).bind(name, cluster, devices, **options)
    bound.apply_defaults()
    with _lock:
        if _made is None or _made[0] != bound.arguments:
            with _scope.left():
                _made = bound.arguments, make_strategy(*bound.args, **bound.kwargs)
        strategy = _made[1]
    _scope.change(strategy)
    return strategy
