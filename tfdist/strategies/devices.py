"""Device selection and configuration, before TensorFlow starts."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_compat import runtime_initialized
from tfdist.runtime import startup_lines
from tfdist.runtime.cpu_settings import keep_memory, operations_at_once
from tfdist.runtime.determinism import enable_deterministic_segment_reductions

Devices = int | str | Sequence[str] | None


def configure(devices: Devices, threads: int | None) -> list[str]:
    """Configure the devices and return their names, such as `["/gpu:0", "/gpu:1"]`.

    Args:
        devices: None: all GPUs, or the CPU on a machine without GPUs. A number: that many GPUs, or
            that many logical CPU devices on a machine without GPUs. `"cpu"` or `"gpu"`: all devices
            of that kind. Names, as a sequence or separated by commas: these devices;
            `"cpu:0,cpu:1"` makes two logical CPU devices. See `logical_devices` for the numbers of
            GPUs.
        threads: Number of threads that an operation may use, and of operations that run at once;
            None leaves TensorFlow's choice. One operation more than there are devices may always
            run at once, unless the only device is a CPU.

    Raises:
        ValueError: If a name is no device of this machine, or TensorFlow has started and can no
            longer be configured.
    """
    startup_lines.find_devices(tf)
    names = parse(devices, len(logical_devices("GPU")))
    if any(name.startswith("/gpu") for name in names):
        enable_deterministic_segment_reductions()
    else:
        keep_memory()
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads: expected a positive number, received {threads}")
        _before_start("threads", tf.config.threading.get_intra_op_parallelism_threads() == threads)
    if not runtime_initialized():
        _set_threads(names, threads)
    cpus = 1 + max((int(n.rpartition(":")[2]) for n in names if n.startswith("/cpu")), default=0)
    if cpus > 1:
        if runtime_initialized():
            _before_start(f"{cpus} CPU devices", len(tf.config.list_logical_devices("CPU")) >= cpus)
        else:
            cpu = tf.config.list_physical_devices("CPU")[0]
            if len(tf.config.get_logical_device_configuration(cpu) or ()) < cpus:
                tf.config.set_logical_device_configuration(
                    cpu, [tf.config.LogicalDeviceConfiguration()] * cpus
                )
    return names


def _set_threads(names: list[str], threads: int | None) -> None:
    """Set the numbers of threads, with one beside those that devices may hold.

    An iterator that a `tf.function` makes over distributed data has a part for each device, unless
    the only one is a CPU. When the function ends, each part holds a thread until another one has
    run an operation that frees it: without another one, the function would never end.
    """
    threading = tf.config.threading
    if threads is not None:
        threading.set_intra_op_parallelism_threads(threads)
    at_once = threads or threading.get_inter_op_parallelism_threads() or operations_at_once()
    only_cpu = len(names) == 1 and names[0].startswith("/cpu")
    held = 0 if only_cpu else len(names)
    if threads is not None or at_once <= held:
        threading.set_inter_op_parallelism_threads(max(at_once, held + 1))


def logical_devices(kind: str) -> list[Any]:
    """Return the physical device behind each name, such as `gpu:0` and `gpu:1`.

    A device that `tf.config.set_logical_device_configuration` splits comes once for each part.
    This does not start TensorFlow.

    Args:
        kind: "CPU" or "GPU".
    """
    visible = tf.config.get_visible_devices(kind)
    return [
        device
        for device in tf.config.list_physical_devices(kind)  # the order of TensorFlow's numbers
        if device in visible
        for _ in tf.config.get_logical_device_configuration(device) or [None]
    ]


def parse(devices: Devices, gpus: int) -> list[str]:
    """Return the device names for a user's choice, where a process has this number of GPUs.

    Args:
        devices: Number of devices, "cpu", "gpu", names of devices, or None for the default: all
            GPUs, or else one CPU device.
        gpus: Number of GPUs that this process may use.

    Returns:
        Names such as "/gpu:0".

    Raises:
        ValueError: If the machine lacks a device, or a name is malformed or appears twice.

    Example:
        >>> parse(None, 0), parse(2, 0), parse(2, 4), parse("gpu", 2)
        (['/cpu:0'], ['/cpu:0', '/cpu:1'], ['/gpu:0', '/gpu:1'], ['/gpu:0', '/gpu:1'])
        >>> parse("cpu:0, cpu:1", 0)
        ['/cpu:0', '/cpu:1']
    """
    if isinstance(devices, str) and devices.strip().isdigit():
        devices = int(devices)
    if devices is None:
        devices = "gpu" if gpus else "cpu"
    if isinstance(devices, int):
        if devices < 1:
            raise ValueError(f"devices: expected at least 1, received {devices}")
        if 0 < gpus < devices:
            raise ValueError(
                f"devices: expected at most the {gpus} GPUs of this process, received {devices}; "
                'name CPU devices, "cpu:0,cpu:1"'
            )
        return [f"/{'gpu' if gpus else 'cpu'}:{i}" for i in range(devices)]
    if isinstance(devices, str):
        kind = devices.strip().lower()
        if kind == "cpu":
            return ["/cpu:0"]
        if kind == "gpu":
            if not gpus:
                raise ValueError(
                    'devices: received "gpu", but TensorFlow sees no GPU in this process; use '
                    '"cpu" or a number'
                )
            return [f"/gpu:{i}" for i in range(gpus)]
        devices = devices.split(",")
    names = [_name(d, gpus) for d in devices]
    if len(set(names)) < len(names) or not names:
        raise ValueError(f"devices: expected distinct names, received {list(devices)}")
    return names


def _name(device: str, gpus: int) -> str:
    match = re.fullmatch(r"/?(?:device:)?(cpu|gpu):(\d+)", device.strip().lower())
    if not match:
        raise ValueError(
            'devices: expected a number, "cpu", "gpu" or names such as "gpu:0,gpu:1", received '
            f"{device!r}"
        )
    if match[1] == "gpu" and int(match[2]) >= gpus:
        raise ValueError(
            f"devices: received {device!r}, but TensorFlow sees {gpus} GPUs in this process"
        )
    return f"/{match[1]}:{match[2]}"


def _before_start(what: str, satisfied: bool) -> None:
    if runtime_initialized() and not satisfied:
        raise too_late(what)


def too_late(what: str, function: str = "make_strategy") -> ValueError:
    """Return the error for a strategy that is made after TensorFlow started."""
    return ValueError(
        f"{function} was called too late: {what} cannot be set up once TensorFlow has started. "
        "Call it before anything that makes a tensor, a data set or a model, and once in a "
        "process."
    )


def quiet_tensorflow() -> None:
    """Suppress TensorFlow's INFO lines, one per collective, unless its log level is set."""
    if tf.get_logger().level == logging.NOTSET:
        tf.get_logger().setLevel(logging.WARNING)


def restrict(names: list[str]) -> None:
    """Hide the GPUs that are not named, for a strategy that would take all of them.

    Raises:
        ValueError: If a GPU is split, and only some of its parts are named.
    """
    gpus = logical_devices("GPU")
    named = _named(gpus, names)
    for gpu in named:
        if named.count(gpu) < gpus.count(gpu):
            raise ValueError(
                f"devices: expected all or none of the {gpus.count(gpu)} logical devices of "
                f"{gpu.name}, received {', '.join(n.removeprefix('/') for n in names)}. Name all "
                "of them, or use mirrored."
            )
    _set_visible_gpus(named)


def restrict_to_one(names: list[str], index: int) -> None:
    """Hide all GPUs but one of those that are named, for the worker with this index.

    Workers of one machine take one GPU each.
    """
    named = list(dict.fromkeys(_named(logical_devices("GPU"), names)))
    _set_visible_gpus([named[index % len(named)]] if named else [])


def _named(gpus: list[Any], names: list[str]) -> list[Any]:
    return [gpu for i, gpu in enumerate(gpus) if f"/gpu:{i}" in names]


def _set_visible_gpus(gpus: list[Any]) -> None:
    """Leave only these GPUs visible to TensorFlow."""
    shown = list(dict.fromkeys(gpus))
    if set(shown) != set(tf.config.get_visible_devices("GPU")):
        tf.config.set_visible_devices(shown, "GPU")
