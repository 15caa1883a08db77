"""The replicas of a strategy become a group that exchanges tensors within a step; what they mean is not known here.

TensorFlow's own `ReplicaContext.all_reduce` sums in the dtype that travels, goes through `merge_call`, which fails inside `tf.cond`
(keras #20582), and has no reduce-scatter. On CPUs `CollectiveReduceScatterV2` does not exist, and asking for it leaves the process's
collectives broken: an all-to-all with a local sum takes its place, which also lets one send 16 bits and sum 32.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.keras_compat import engine_of
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.placement import Placement

_meters = threading.local()
OUTSIDE = "outside of steps: "  # begins the names of calls that no step makes
_KEY = 0x7FFFFFFF  # TensorFlow's keys are positive int32
# What TensorFlow's collectives take; CollectiveGatherV2 no bfloat16, which goes through it as integers.
_DTYPES = (tf.float32, tf.float64, tf.bfloat16, tf.float16, tf.int32, tf.int64)
FLOATS = tuple(dtype.name for dtype in _DTYPES if dtype.is_floating)


class Group:
    """Some replicas that call the same collectives in the same order: in replica context, or in processes with one replica each.

    Every method must be called by all of them with tensors of one dtype and shape, or they wait for each other until the engine's
    watchdog ends it. `name` tells a call from others of the same group; equal on all replicas. ValueError for a dtype that TensorFlow does not send.

    Args:
        name: Tells this group from other groups.
        placement: Numbers of workers and replicas.
        devices: Of this process's replicas, in their order.
        hint: TensorFlow's `communication_hint`: "auto", "ring" or "nccl".
        members: The replicas of the group by number, in their order; None: all. This process's replicas are all among them.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        devices: Sequence[str],
        hint: str = "auto",
        members: Sequence[int] | None = None,
    ):
        self.name, self._devices, self._hint = name, list(devices), hint
        self._placement = placement
        self.members = tuple(range(placement.replicas)) if members is None else tuple(members)
        self.size = len(self.members)
        self._key = zlib.crc32(f"tfdist {name} {self.members}".encode()) & _KEY
        self.bytes: dict[
            str, int
        ] = {}  # what a replica sends in each call that was traced, by its name
        with tf.init_scope():
            # A resource of each device. With it, TensorFlow keeps the order of a device's collectives; without one it would also order
            # those of different devices of this process, which then wait for each other.
            self._tokens = [
                _token(f"tfdist {name} {self.members} {device}", device) for device in self._devices
            ]

    @classmethod
    def of(
        cls, strategy: tf.distribute.Strategy, name: str, members: Sequence[int] | None = None
    ) -> Group:
        """The replicas of a strategy made by tfdist.

        Args:
            strategy: The strategy.
            name: As above.
            members: As above.

        Raises:
            ValueError: It is none whose replicas train in step.
        """
        engine = engine_of(strategy)
        placement = getattr(engine, "placement", None)
        if placement is None:
            raise ValueError(
                f"expected a strategy of tfdist whose replicas train in step (one_device, mirrored, multi_worker_mirrored), received {type(strategy).__name__}; "
                "make it with tfdist.make_strategy()."
            )
        return cls(name, placement, strategy.extended.worker_devices, engine.communication, members)

    @property
    def bytes_in_steps(self) -> dict[str, int]:
        """What a replica sends in each call that was traced, but for those outside of steps."""
        return {name: count for name, count in self.bytes.items() if not name.startswith(OUTSIDE)}

    @property
    def local(self) -> int:
        """Index of the replica in whose context this is among those of this process."""
        if len(self._devices) == 1:
            return 0
        context = tf.distribute.get_replica_context()
        number = None if context is None else tf.get_static_value(context.replica_id_in_sync_group)
        if number is None:
            raise RuntimeError(
                f"{self.name}: {len(self._devices)} replicas of this process exchange tensors, which each of them does in its own context: within strategy.run()."
            )
        return int(number) % len(self._devices)

    @property
    def rank(self) -> int:
        """Index in the group of the replica in whose context this is."""
        return self.members.index(self._placement.first_replica + self.local)

    def all_reduce(
        self, x: tf.Tensor, name: str, op: str = "Add", comm_dtype: str | None = None
    ) -> tf.Tensor:
        """The sum of a tensor over the group.

        Args:
            x: Any shape that is known.
            name: Of this call.
            op: "Add", "Min" or "Max".
            comm_dtype: A dtype to send it in, one of `tfdist.sync.COMM_DTYPES`; the sum is made in the dtype of `x`, and rounded once. None: its own.

        Returns:
            Like `x`; equal bit for bit on all replicas.
        """
        if self.size == 1:
            return x
        if comm_dtype is None or x.dtype.size <= 2:
            self._count(name, x, 2 * (self.size - 1) / self.size)
            return self._on_device(
                tf.raw_ops.CollectiveReduceV2, x, name, merge_op=op, final_op="Id"
            )
        part = self.reduce_scatter(flat_shards.to_rows(x, self.size), f"{name}/parts", comm_dtype)
        full = self.all_gather(tf.cast(part, comm_dtype), f"{name}/whole")
        return flat_shards.from_rows(tf.cast(full, x.dtype), x.shape)

    def reduce_scatter(self, x: tf.Tensor, name: str, comm_dtype: str | None = None) -> tf.Tensor:
        """This replica's row of the sum over the group.

        Args:
            x: `[size, n]`.
            name: Of this call.
            comm_dtype: As for `all_reduce`.

        Returns:
            `[n]`.
        """
        if self.size == 1:
            return x[0]
        sent = x if comm_dtype is None or x.dtype.size <= 2 else tf.cast(x, comm_dtype)
        return tf.add_n(
            [tf.cast(row, x.dtype) for row in tf.unstack(self.all_to_all(sent, name))]
        )  # in half of reduce_sum's time

    def all_gather(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """The tensors of all replicas of the group.

        Args:
            x: `[n]`.
            name: Of this call.

        Returns:
            `[size, n]`, in the group's order.
        """
        if self.size == 1:
            return x[None]
        count, dtype = x.shape[0], x.dtype
        self._count(name, x, self.size - 1)
        if dtype in (tf.bfloat16, tf.uint16, tf.int16):  # travels as pairs
            pairs = tf.reshape(tf.pad(x, [[0, count % 2]]) if count % 2 else x, [-1, 2])
            gathered = tf.bitcast(
                self._on_device(tf.raw_ops.CollectiveGatherV2, tf.bitcast(pairs, tf.int32), name),
                dtype,
            )
            return tf.reshape(gathered, [self.size, count + count % 2])[:, :count]
        return tf.reshape(
            self._on_device(tf.raw_ops.CollectiveGatherV2, x, name), [self.size, count]
        )

    def all_to_all(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Row i of each replica goes to replica i.

        Args:
            x: `[size, ...]`.
            name: Of this call.

        Returns:
            Like `x`: row i came from replica i.
        """
        if self.size == 1:
            return x
        self._count(name, x, (self.size - 1) / self.size)
        return self._on_device(tf.raw_ops.CollectiveAllToAllV2, x, name)

    def _on_device(self, op, x: tf.Tensor, name: str, **attributes) -> tf.Tensor:
        if x.dtype not in _DTYPES:
            raise ValueError(
                f"{self.name}: {name}: TensorFlow's collectives send {', '.join(d.name for d in _DTYPES)}, received {x.dtype.name}; cast it before."
            )
        local = self.local
        if tf.executing_eagerly() and len(self._devices) > 1:
            raise RuntimeError(
                f"{self.name}: run eagerly, the replicas of one process come one after the other, and the first would wait for the others for ever. "
                "Compile without run_eagerly=True, and call strategy.run() in a tf.function."
            )
        call = f"{name} {x.dtype.name} {x.shape}"  # TensorFlow remembers the shape of each instance
        with tf.device(self._devices[local]):
            return op(
                input=x, group_size=self.size, group_key=self._key, instance_key=zlib.crc32(call.encode()) & _KEY,
                ordering_token=[self._tokens[local]], communication_hint=self._hint, **attributes,
            )  # fmt: skip

    def _count(self, name: str, x: tf.Tensor, times: float) -> None:
        self.bytes[name] = count = int(flat_shards.elements(x.shape) * x.dtype.size * times)
        for sent in getattr(_meters, "open", ()):
            sent.append(count)


@contextlib.contextmanager
def metered() -> Iterator[list[int]]:
    """Counts what the groups' collectives send for this replica that are called, or traced, inside: bytes of each call."""
    sent: list[int] = []
    before, _meters.open = getattr(_meters, "open", ()), (*getattr(_meters, "open", ()), sent)
    try:
        yield sent
    finally:
        _meters.open = before


def _token(name: str, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)


def sendable(dtype: tf.DType) -> tf.DType:
    """The dtype in which a tensor of this one can travel: its own, or a wider one."""
    return dtype if dtype in _DTYPES else tf.float32 if dtype.is_floating else tf.int64


def replicas(name: str = "replicas") -> Group:
    """All replicas of the strategy in charge, as a group; to be called in its scope or in replica context.

    Args:
        name: Tells the group's collectives from others.

    Example:
        >>> import tfdist
        >>> with tfdist.make_strategy("one_device", devices="cpu").scope():
        ...     replicas().size
        1
    """
    return Group.of(tf.distribute.get_strategy(), name)
