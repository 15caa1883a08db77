"""The devices of one process become a strategy: one device, mirrored, or central storage."""

from __future__ import annotations

import tensorflow as tf

from tfdist.keras_compat import separate_collectives
from tfdist.parallel.placement import Placement
from tfdist.strategies.base import Fed, adopt
from tfdist.sync import Policy


class OneDeviceStrategy(Fed, tf.distribute.OneDeviceStrategy):
    """`tf.distribute.OneDeviceStrategy` that trains through tfdist's engine."""


class MirroredStrategy(Fed, tf.distribute.MirroredStrategy):
    """`tf.distribute.MirroredStrategy` that trains through tfdist's engine."""


class CentralStorageStrategy(Fed, tf.distribute.experimental.CentralStorageStrategy):
    """`tf.distribute.experimental.CentralStorageStrategy` that trains through tfdist's engine."""


_CROSS_DEVICE = {
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "one_device": tf.distribute.ReductionToOneDevice,
}
CROSS_DEVICE_NAMES = ("auto", *_CROSS_DEVICE)


def one_device(device: str, sync: Policy | None = None) -> OneDeviceStrategy:
    """All on one device, such as `"/cpu:0"`."""
    return adopt(OneDeviceStrategy(device), Placement(), sync=sync)


def mirrored(
    devices: list[str], cross_device: str = "auto", sync: Policy | None = None
) -> MirroredStrategy:
    """A copy of the model on each device of this process.

    Args:
        devices: Device names.
        cross_device: How gradients are summed, one of `CROSS_DEVICE_NAMES`.
        sync: How replicas become one.
    """
    separate_collectives(MirroredStrategy)
    ops = None if cross_device == "auto" else _CROSS_DEVICE[cross_device]()
    return adopt(MirroredStrategy(devices, ops), Placement(local_replicas=len(devices)), sync=sync)


def central_storage(devices: list[str]) -> CentralStorageStrategy:
    """One copy of the variables on the CPU, computed with on each device of this process."""
    strategy = CentralStorageStrategy(compute_devices=devices, parameter_device="/cpu:0")
    return adopt(strategy, Placement(local_replicas=len(devices)), central=True)
