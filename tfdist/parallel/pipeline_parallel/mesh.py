"""Device mesh of pipeline parallelism: devices by data-parallel group, stage and shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices by group, stage and shard.

    Args:
        devices: Full device names, `[groups][stages][shards]`.
    """

    devices: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def groups(self) -> int:
        """Return the number of device groups that each take a part of a batch."""
        return len(self.devices)

    def device_of(self, stage: int, shard: int = 0) -> str:
        """Return the device that holds the variables of a stage: one of the first group."""
        own = self.devices[0][stage]
        return own[shard % len(own)]


def mesh_of(names: Sequence[str] | None, groups: int, stages: int, shards: int) -> Mesh:
    """Arrange devices by group, stage and shard.

    Args:
        names: Device names by group, then stage, then shard; a name may occur several times.
            None: GPUs, or CPUs where there are none.
        groups: Number of data-parallel groups.
        stages: Number of stages of a group.
        shards: Number of devices of a stage.

    Raises:
        ValueError: If there are too few or too many names, or if one of them is unknown.
    """
    known = [_full(d.name) for d in tf.config.list_logical_devices()]
    if names is None:
        by_kind = {
            kind: [_full(d.name) for d in tf.config.list_logical_devices(kind)]
            for kind in ("GPU", "CPU")
        }
        devices = by_kind["GPU"] or by_kind["CPU"]
    else:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                'parallel.pipeline: devices: expected a list of names such as "gpu:0", received '
                f"{names!r}."
            )
        unknown = [name for name in names if _full(name) not in known]
        if unknown:
            raise ValueError(
                f"parallel.pipeline: devices: {', '.join(unknown)}: TensorFlow has no such device; "
                f"it has {', '.join(known)}."
            )
        devices = [_full(name) for name in names]
    needed = groups * stages * shards
    if len(devices) < needed or (names is not None and len(devices) > needed):
        product = " x ".join(
            [
                *([f"data={groups}"] if groups > 1 else []),
                f"{stages} stages",
                *([f"tensor={shards}"] if shards > 1 else []),
            ]
        )
        remedy = f"Use more stages, or name {needed} devices."
        if len(devices) < needed:
            remedy = (
                "Use fewer stages, or list a device several times so that stages share it. For "
                "logical CPU devices, call "
                f'tfdist.make_strategy("mirrored", devices={needed}) or '
                "tf.config.set_logical_device_configuration before TensorFlow starts."
            )
        raise ValueError(
            f"parallel.pipeline: devices: {product} need {needed}, received {len(devices)} "
            f"({', '.join(devices)}). {remedy}"
        )
    cells = iter(devices[:needed])
    return Mesh(
        tuple(
            tuple(tuple(next(cells) for _ in range(shards)) for _ in range(stages))
            for _ in range(groups)
        )
    )


def _full(name: str) -> str:
    """Return the full name of a device; a name without a job is a device of this process."""
    try:
        spec = tf.DeviceSpec.from_string(
            name
            if name.startswith("/")
            else f"/device:{name}"
            if name.count(":") == 1
            else f"/{name}"
        )
    except ValueError:
        return name
    local = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
    spec = spec.replace(
        device_type=(spec.device_type or "CPU").upper(), device_index=spec.device_index or 0
    )
    if spec.job is None:
        spec = spec.replace(job=local.job or "localhost", replica=local.replica, task=local.task)
    return spec.replace(replica=spec.replica or 0, task=spec.task or 0).to_string()
