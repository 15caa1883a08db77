"""Device selection and configuration, before TensorFlow starts."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_compat import runtime_initialized
from tfdist.runtime.determinism import sum_rows_in_order

Devices = int | str | Sequence[str] | None


def configure(devices: Devices, threads: int | None) -> list[str]:
    """Configure the devices and return their names, such as `["/gpu:0", "/gpu:1"]`.

    Args:
        devices: None: all GPUs, or the CPU on a machine without GPUs. A number: that many GPUs, or
            that many logical CPU devices on a machine without GPUs. `"cpu"` or `"gpu"`: all devices
            of that kind. Names, as a sequence or separated by commas: these devices;
            `"cpu:0,cpu:1"` makes two logical CPU devices. GPUs are those of `logical_gpus`.
        threads: Number of threads that an operation may use, and of operations that run at once;
            None leaves TensorFlow's choice.

    Raises:
        ValueError: If a name is no device of this machine, or TensorFlow has started and can no
            longer be configured.
    """
    names = parse(devices, len(logical_gpus()))
    if any(name.startswith("/gpu") for name in names):
        sum_rows_in_order()
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads: expected a positive number, received {threads}")
        _before_start("threads", tf.config.threading.get_intra_op_parallelism_threads() == threads)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
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


def logical_gpus() -> list[Any]:
    """Return the GPU behind each of TensorFlow's names `gpu:0`, `gpu:1` and so on.

    These are the GPUs that `tf.config.set_visible_devices` leaves to this process; a GPU that
    `tf.config.set_logical_device_configuration` splits comes once for each part.
    """
    return [
        gpu
        for gpu in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]
    ]


def parse(devices: Devices, gpus: int) -> list[str]:
    """Return the device names for a user's choice, on a machine with this number of GPUs.

    Args:
        devices: Number of devices, "cpu", "gpu", names of devices, or None for the default: all
            GPUs, or else one CPU device.
        gpus: Number of GPUs of this machine.

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
                f"devices: expected at most this machine's {gpus} GPUs, received {devices}; name "
                'CPU devices, "cpu:0,cpu:1"'
            )
        return [f"/{'gpu' if gpus else 'cpu'}:{i}" for i in range(devices)]
    if isinstance(devices, str):
        kind = devices.strip().lower()
        if kind == "cpu":
            return ["/cpu:0"]
        if kind == "gpu":
            if not gpus:
                raise ValueError(
                    'devices: received "gpu", but TensorFlow sees no GPU on this machine; use '
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
            f"devices: received {device!r}, but TensorFlow sees {gpus} GPUs on this machine"
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
    gpus = logical_gpus()
    named = [gpu for i, gpu in enumerate(gpus) if f"/gpu:{i}" in names]
    for gpu in named:
        if named.count(gpu) < gpus.count(gpu):
            raise ValueError(
                f"devices: expected all or none of the {gpus.count(gpu)} logical devices of "
                f"{gpu.name}, received {', '.join(n.removeprefix('/') for n in names)}"
            )
    if len(named) < len(gpus):
        tf.config.set_visible_devices(list(dict.fromkeys(named)), "GPU")
