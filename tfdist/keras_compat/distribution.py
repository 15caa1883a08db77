"""Hooks of `keras.distribution` on TensorFlow, where Keras lacks most of its backend."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import keras
from keras.src.backend.common import global_state as _global_state
from keras.src.backend.common.name_scope import current_path as current_path
from keras.src.backend.tensorflow import distribution_lib as _backend_lib
from keras.src.distribution.distribution_lib import GLOBAL_ATTRIBUTE_NAME as _ATTRIBUTE
from keras.src.distribution.distribution_lib import Distribution
from tensorflow.python.framework import ops as _ops


class Backend(Protocol):
    """Functions that `keras.distribution` asks of its backend, by their names in Keras."""

    def list_devices(self, device_type: str | None = None) -> list[str]:
        """Return the devices of all processes, such as "gpu:0"."""

    def get_device_count(self, device_type: str | None = None) -> int:
        """Return the number of devices of all processes."""

    def initialize(
        self, job_addresses: str | None, num_processes: int | None, process_id: int | None
    ) -> None:
        """Connect this process with the others."""

    def num_processes(self) -> int:
        """Return the number of processes."""

    def process_id(self) -> int:
        """Return the number of this process, from 0."""

    def distribute_tensor(self, tensor: Any, layout: Any) -> Any:
        """Return a value with a layout."""

    # --- Called by the hooks ----------------------------------------------------------------------
    def change(self, distribution: Distribution | None) -> None:
        """Distribute what this thread makes from now on; None ends it."""

    def current(self) -> Distribution | None:
        """Return the distribution of this thread."""

    def check_variable(self, variable: keras.Variable, layout: Any) -> None:
        """Check a variable that this thread has made, with a layout of its own or None."""


# Names in Keras' module of the TensorFlow backend.
FUNCTIONS = (
    "list_devices",
    "get_device_count",
    "initialize",
    "num_processes",
    "process_id",
    "distribute_tensor",
)


def install(backend: Backend) -> None:
    """Make `keras.distribution` use a backend; the current distribution applies at once."""
    backend.change(keras.distribution.distribution())
    for name in FUNCTIONS:
        setattr(_backend_lib, name, getattr(backend, name))
    _backend_lib._to_backend_mesh = _refuse("DeviceMesh.backend_mesh")
    _backend_lib._to_backend_layout = _refuse("TensorLayout.backend_layout")
    _hook_changes(backend)
    _hook_clear_session(backend)
    _hook_variables(backend)


def devices_of(distribution: Distribution) -> list[str]:
    """Return the names of a distribution's devices, such as "cpu:0"."""
    return [str(device) for device in distribution.device_mesh.devices.flatten()]


def shards_data(distribution: Distribution) -> bool:
    """Return whether all processes are given the same data, of which each takes its rows."""
    # The property is newer than Keras 3.10, whose ModelParallel always splits the data.
    asked = getattr(distribution, "_auto_shard_dataset", True)
    return getattr(distribution, "_tfdist_shards_data", asked)


def leave_data_to_engine(distribution: Distribution) -> None:
    """Keep Keras from giving each process its rows of the data, which the engine does."""
    distribution._tfdist_shards_data = shards_data(distribution)
    distribution._is_multi_process = False
    distribution._auto_shard_dataset = False  # Keras after 3.15 reads this alone


def _refuse(name: str) -> Callable[[Any], Any]:
    def refuse(_):
        raise ValueError(
            f"{name}: there is no such object on TensorFlow; expected a script that uses the other "
            "names of keras.distribution alone."
        )

    return refuse


def _hook_changes(backend: Backend) -> None:
    """Tell the backend of a new distribution, before Keras has it.

    A script may hold `set_distribution` itself by a name of its own.
    """
    keras_function = _global_state.set_global_attribute

    @functools.wraps(keras_function)
    def set_global_attribute(name: str, value: Any) -> None:
        if name == _ATTRIBUTE:
            if value is None and _is_called_by(keras.utils.clear_session):
                return  # since Keras 3.16, it does this before all else
            backend.change(value)
        keras_function(name, value)

    _global_state.set_global_attribute = set_global_attribute


def _is_called_by(function: Any) -> bool:
    """Return whether a function is among the callers of this thread's current one."""
    code = inspect.unwrap(function).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _hook_clear_session(backend: Backend) -> None:
    """Keep the distribution in `keras.utils.clear_session`, as `scopes` keeps its scope.

    Tuners call it before each trial. Keras drops its attributes, and then resets the graph.
    """
    graphs = type(_ops._default_graph_stack)
    own_reset = graphs.reset

    @functools.wraps(own_reset)
    def reset(self) -> None:
        own_reset(self)
        if backend.current() is not keras.distribution.distribution():
            _global_state.set_global_attribute(_ATTRIBUTE, backend.current())

    graphs.reset = reset


def _hook_variables(backend: Backend) -> None:
    keras_init = keras.Variable.__init__

    @functools.wraps(keras_init)
    def init(self, *args, **kwargs):
        keras_init(self, *args, **kwargs)
        # Keras 3.10 ignores the argument.
        backend.check_variable(self, kwargs.get("layout") or getattr(self, "_layout", None))

    keras.Variable.__init__ = init
