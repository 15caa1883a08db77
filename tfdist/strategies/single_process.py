"""Strategies for the devices of one process: one device, mirrored, and central storage."""

from __future__ import annotations

import tensorflow as tf

from tfdist.keras_compat import separate_collectives
from tfdist.parallel.placement import Placement
from tfdist.strategies.base import KerasFeedMixin, attach_engine
from tfdist.sync import Policy


class OneDeviceStrategy(KerasFeedMixin, tf.distribute.OneDeviceStrategy):
    """Version of `tf.distribute.OneDeviceStrategy` that trains by tfdist's engine."""


class MirroredStrategy(KerasFeedMixin, tf.distribute.MirroredStrategy):
    """Version of `tf.distribute.MirroredStrategy` that trains by tfdist's engine."""


class CentralStorageStrategy(KerasFeedMixin, tf.distribute.experimental.CentralStorageStrategy):
    """Central-storage strategy that trains by tfdist's engine.

    See `tf.distribute.experimental.CentralStorageStrategy`.
    """


_CROSS_DEVICE = {
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "one_device": tf.distribute.ReductionToOneDevice,
}
CROSS_DEVICE_NAMES = ("auto", *_CROSS_DEVICE)


def one_device(device: str, sync: Policy | None = None) -> OneDeviceStrategy:
    """Return a strategy for one device, such as `"/cpu:0"`."""
    return attach_engine(OneDeviceStrategy(device), Placement(), sync=sync)


def mirrored(
    devices: list[str], cross_device: str = "auto", sync: Policy | None = None
) -> MirroredStrategy:
    """Return a strategy with a copy of the model on each device of this process.

    Args:
        devices: Names of the devices.
        cross_device: Algorithm that sums gradients, one of `CROSS_DEVICE_NAMES`.
        sync: Synchronization policy of the replicas.
    """
    separate_collectives(MirroredStrategy)
    ops = None if cross_device == "auto" else _CROSS_DEVICE[cross_device]()
    return attach_engine(
        MirroredStrategy(devices, ops), Placement(local_replicas=len(devices)), sync=sync
    )


def central_storage(devices: list[str]) -> CentralStorageStrategy:
    """Return a strategy with one copy of the variables on the CPU and all devices computing."""
    strategy = CentralStorageStrategy(compute_devices=devices, parameter_device="/cpu:0")
    return attach_engine(strategy, Placement(local_replicas=len(devices)), central=True)
