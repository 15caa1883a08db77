"""The devices of one process become a strategy: one device, mirrored, or central storage."""

from __future__ import annotations

import tensorflow as tf

from tfdist.strategies.base import Fed, adopt
from tfdist.train.placement import Placement


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


def one_device(device: str) -> OneDeviceStrategy:
    """All on one device, such as `"/cpu:0"`."""
    return adopt(OneDeviceStrategy(device), Placement())


def mirrored(devices: list[str], cross_device: str = "auto") -> MirroredStrategy:
    """A copy of the model on each device of this process.

    Args:
        devices: Device names.
        cross_device: How gradients are summed, one of `CROSS_DEVICE_NAMES`.
    """
    ops = None if cross_device == "auto" else _CROSS_DEVICE[cross_device]()
    return adopt(MirroredStrategy(devices, ops), Placement(local_replicas=len(devices)))


def central_storage(devices: list[str]) -> CentralStorageStrategy:
    """One copy of the variables on the CPU, computed with on each device of this process."""
    strategy = CentralStorageStrategy(compute_devices=devices, parameter_device="/cpu:0")
    return adopt(strategy, Placement(local_replicas=len(devices)), central=True)
