"""Groups of replicas: all-reduce, reduce-scatter, all-gather and all-to-all within a step.

TensorFlow has its own `ReplicaContext.all_reduce`. It sums in the dtype that is sent, and it has no
reduce-scatter. It also goes through `merge_call`, which fails inside `tf.cond` (keras #20582).

`CollectiveReduceScatterV2` does not exist on CPUs, and a call of it leaves the collectives of the
process broken. An all-to-all with a local sum replaces it. This also allows tensors to be sent in
16 bits and summed in 32.

Under `communication="native"`, tensors of `native.transport.DTYPES` travel through a `Transport`.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.keras_compat import engine_of, in_loop_of_replica, order_by_replica
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.native.transport import Transport
from tfdist.parallel.placement import Placement
from tfdist.parallel.replica_weight import Weight, weighted

_meters = threading.local()
OUTSIDE = "outside of steps: "  # prefix of the names of calls that are not part of a step
_KEY = 0x7FFFFFFF  # TensorFlow's keys are positive int32
# Dtypes that TensorFlow's collectives take. CollectiveGatherV2 does not take bfloat16, which
# `all_gather` therefore sends as integers.
_DTYPES = (tf.float32, tf.float64, tf.bfloat16, tf.float16, tf.int32, tf.int64)
FLOATS = tuple(dtype.name for dtype in _DTYPES if dtype.is_floating)


class Group:
    """A group of replicas that call the same collectives in the same order.

    Replicas call the methods in replica context; a process with one replica may call them anywhere.
    All replicas of the group must call a method with tensors of one dtype and shape. Otherwise they
    wait for each other until the engine's watchdog ends the wait. The `name` of a call
    distinguishes it from other calls of the group, and is equal on all replicas. The collectives
    raise ValueError for a dtype that TensorFlow does not send, and RuntimeError in a loop of one of
    several replicas of a process. They have no gradient; in a loss, use `tfdist.all_gather_rows` or
    `tf.distribute.ReplicaContext.all_reduce`.

    Args:
        name: Name that distinguishes this group from other groups.
        placement: Numbers of workers and replicas.
        devices: Devices of this process's replicas, in their order.
        hint: TensorFlow's `communication_hint`: "auto", "ring" or "nccl".
        members: Indices of the group's replicas, in the group's order. They include all replicas
            of this process. None: all replicas of the strategy.
        transport: Native collectives of all workers, used by a group of all replicas; None to use
            TensorFlow's.

    Attributes:
        bytes: Bytes that a replica sends in each traced call, by the name of the call.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        devices: Sequence[str],
        hint: str = "auto",
        members: Sequence[int] | None = None,
        transport: Transport | None = None,
    ):
        self.name = name
        self._devices = list(devices)
        self._hint = hint
        self._placement = placement
        self.members = tuple(range(placement.replicas)) if members is None else tuple(members)
        self.size = len(self.members)
        all_replicas = tuple(range(placement.replicas))
        self._transport = transport if self.members == all_replicas else None
        self._key = zlib.crc32(f"tfdist {name} {self.members}".encode()) & _KEY
        self.bytes: dict[str, int] = {}
        with tf.init_scope():
            # One resource for each device, with which TensorFlow keeps the order of the device's
            # collectives. Without it, TensorFlow would also order the collectives of different
            # devices of this process, and they would wait for each other.
            self._tokens = [
                _token(f"tfdist {name} {self.members} {device}", device) for device in self._devices
            ]

    @classmethod
    def of(
        cls, strategy: tf.distribute.Strategy, name: str, members: Sequence[int] | None = None
    ) -> Group:
        """Return a group of the replicas of a strategy made by tfdist.

        Args:
            strategy: Strategy whose replicas train in step.
            name: Name of the group, as for `Group`.
            members: Indices of the group's replicas, as for `Group`.

        Raises:
            ValueError: If the strategy is not a tfdist strategy whose replicas train in step.
        """
        engine = engine_of(strategy)
        placement = getattr(engine, "placement", None)
        if placement is None:
            raise ValueError(
                "expected a synchronous strategy of tfdist (one_device, mirrored or "
                f"multi_worker_mirrored), received {type(strategy).__name__}. Make it with "
                "tfdist.make_strategy()."
            )
        native = engine.communication == "native"
        return cls(
            name,
            placement,
            strategy.extended.worker_devices,
            "auto" if native else engine.communication,
            members,
            engine.transport,
        )

    @property
    def bytes_in_steps(self) -> dict[str, int]:
        """Return the bytes that a replica sends in each traced call that is part of a step."""
        return {name: count for name, count in self.bytes.items() if not name.startswith(OUTSIDE)}

    @property
    def local(self) -> int:
        """Return the current replica's index among the replicas of this process."""
        if len(self._devices) == 1:
            return 0
        context = tf.distribute.get_replica_context()
        number = None if context is None else tf.get_static_value(context.replica_id_in_sync_group)
        if number is None:
            raise RuntimeError(
                f"{self.name}: this process has {len(self._devices)} replicas, and each must "
                "exchange tensors in its own replica context. Call this inside strategy.run()."
            )
        return int(number) % len(self._devices)

    @property
    def rank(self) -> int:
        """Return the current replica's index in the group."""
        return self.members.index(self._placement.first_replica + self.local)

    def all_reduce(
        self,
        x: tf.Tensor,
        name: str,
        op: str = "Add",
        comm_dtype: str | None = None,
        factor: Weight = 1.0,
    ) -> tf.Tensor:
        """Return the sum, minimum or maximum of a tensor over the group.

        Args:
            x: Tensor of any known shape.
            name: Name of this call.
            op: Reduction: "Add", "Min" or "Max".
            comm_dtype: Dtype in which a sum's tensors are sent, one of `tfdist.sync.COMM_DTYPES`.
                The sum is computed in the dtype of `x`, and rounded once. None: the dtype of `x`.
            factor: Factor of this replica's tensor in a sum of floats, as for `weighted`.

        Returns:
            Tensor of the shape and dtype of `x`, equal bit for bit on all replicas.
        """
        transport = self._native(x)
        whole = comm_dtype is None or op != "Add" or x.dtype.size <= 2
        if self.size > 1 and whole and transport is not None:
            self._count(name, x, 2 * (self.size - 1) / self.size)
            return transport.all_reduce([x], self._call_name(name), op, factor)[0]
        (x,) = weighted([x], factor)
        if self.size == 1:
            return x
        if whole:
            self._count(name, x, 2 * (self.size - 1) / self.size)
            return self._on_device(
                tf.raw_ops.CollectiveReduceV2, x, name, merge_op=op, final_op="Id"
            )
        part = self.reduce_scatter(flat_shards.to_rows(x, self.size), f"{name}/parts", comm_dtype)
        full = self.all_gather(tf.cast(part, comm_dtype), f"{name}/whole")
        return flat_shards.from_rows(tf.cast(full, x.dtype), x.shape)

    def reduce_scatter(
        self, x: tf.Tensor, name: str, comm_dtype: str | None = None, factor: Weight = 1.0
    ) -> tf.Tensor:
        """Return this replica's row of the sum over the group.

        Args:
            x: Tensor `[size, n]`. n may be unknown when the call is traced, as for `all_to_all`.
            name: Name of this call.
            comm_dtype: Dtype in which the tensor is sent, as for `all_reduce`.
            factor: Factor of this replica's tensor, as for `all_reduce`.

        Returns:
            Row `[n]` of the sum, in the dtype of `x`.
        """
        transport = self._native(x) if comm_dtype is None or x.dtype.size <= 2 else None
        if self.size > 1 and transport is not None:
            self._count(name, x, (self.size - 1) / self.size)
            return transport.reduce_scatter(x, self._call_name(name), factor)
        (x,) = weighted([x], factor)
        if self.size == 1:
            return x[0]
        sent = x if comm_dtype is None or x.dtype.size <= 2 else tf.cast(x, comm_dtype)
        # add_n takes half the time of reduce_sum.
        return tf.add_n([tf.cast(row, x.dtype) for row in tf.unstack(self.all_to_all(sent, name))])

    def all_gather(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensors of all replicas of the group.

        Args:
            x: Tensor `[n]`. n may be unknown when the call is traced, as for `all_to_all`.
            name: Name of this call.

        Returns:
            Tensor `[size, n]`, with a row for each replica in the group's order.
        """
        if self.size == 1:
            return x[None]
        count = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
        dtype = x.dtype
        self._count(name, x, self.size - 1)
        if (transport := self._native(x)) is not None:
            return transport.all_gather(x, self._call_name(name))
        if dtype in (tf.bfloat16, tf.uint16, tf.int16):  # sent as pairs in int32
            odd = count % 2
            pairs = tf.reshape(x if x.shape[0] and not odd else tf.pad(x, [[0, odd]]), [-1, 2])
            gathered = tf.bitcast(
                self._on_device(tf.raw_ops.CollectiveGatherV2, tf.bitcast(pairs, tf.int32), name),
                dtype,
            )
            return tf.reshape(gathered, [self.size, count + odd])[:, :count]
        return tf.reshape(
            self._on_device(tf.raw_ops.CollectiveGatherV2, x, name), [self.size, count]
        )

    def all_to_all(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Send row i of each replica to replica i.

        Args:
            x: Tensor `[size, ...]`. Other dimensions may be unknown when the call is traced; in the
                step, they must be equal on all replicas and greater than 0. The bytes of such a
                call are not counted.
            name: Name of this call.

        Returns:
            Tensor of the shape and dtype of `x`; row i came from replica i.
        """
        if self.size == 1 or x.shape.num_elements() == 0:  # TensorFlow's kernel divides by 0
            return x
        self._count(name, x, (self.size - 1) / self.size)
        if (transport := self._native(x)) is not None:
            return transport.all_to_all(x, self._call_name(name))
        return self._on_device(tf.raw_ops.CollectiveAllToAllV2, x, name)

    def _native(self, x: tf.Tensor) -> Transport | None:
        """Return the native collectives if they send such a tensor."""
        return self._transport if is_native([x]) else None

    def _call_name(self, name: str) -> str:
        return f"{self.name}: {name}"

    def _on_device(self, op, x: tf.Tensor, name: str, **attributes) -> tf.Tensor:
        if x.dtype not in _DTYPES:
            raise ValueError(
                f"{self.name}: {name}: expected one of the dtypes of TensorFlow's collectives, "
                f"{', '.join(d.name for d in _DTYPES)}; received {x.dtype.name}. Cast the tensor."
            )
        local = self.local
        if tf.executing_eagerly() and len(self._devices) > 1:
            raise RuntimeError(
                f"{self.name}: in eager mode, the replicas of one process run one after the other, "
                "so the first would wait for the others forever. Compile without "
                "run_eagerly=True, and call strategy.run() in a tf.function."
            )
        if len(self._devices) > 1:
            if in_loop_of_replica():
                raise RuntimeError(
                    f"{self.name}: {name}: expected a call outside of tf.while_loop, tf.map_fn and "
                    "other loops of TensorFlow, which run apart for each of the "
                    f"{len(self._devices)} replicas of this process and would wait for each other "
                    "forever. Write the loop in Python, or start a worker for each device."
                )
            order_by_replica()
        with tf.device(self._devices[local]):
            return op(
                input=x,
                group_size=self.size,
                group_key=self._key,
                instance_key=_instance_key(f"{name} {x.dtype.name} {x.shape}", x),
                ordering_token=[_captured(self._tokens[local])],
                communication_hint=self._hint,
                **attributes,
            )

    def _count(self, name: str, x: tf.Tensor, times: float) -> None:
        if not x.shape.is_fully_defined():
            return
        count = int(flat_shards.elements(x.shape) * x.dtype.size * times)
        self.bytes[name] = count
        for sent in getattr(_meters, "open", ()):
            sent.append(count)


@contextlib.contextmanager
def metered() -> Iterator[list[int]]:
    """Count the bytes that this replica sends by collectives within the context.

    Yields:
        Bytes of each collective of any group that is called, or traced, within the context.
    """
    sent: list[int] = []
    outer = getattr(_meters, "open", ())
    _meters.open = (*getattr(_meters, "open", ()), sent)
    try:
        yield sent
    finally:
        _meters.open = outer


def _instance_key(call: str, x: tf.Tensor) -> int | tf.Tensor:
    """Return the key of a call for a tensor; TensorFlow remembers the shape for each key."""
    key = zlib.crc32(call.encode()) & _KEY
    if x.shape.is_fully_defined():
        return key
    factors = [zlib.crc32(f"axis {axis}".encode()) | 1 for axis in range(x.shape.rank)]
    size = tf.reduce_sum(tf.shape(x, tf.int64) * factors)
    return tf.cast(tf.bitwise.bitwise_xor(size, key) & _KEY, tf.int32)


def _token(name: str, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)


def _captured(x: tf.Tensor) -> tf.Tensor:
    """Return an eager tensor as the graph around the current one holds it.

    The gradient of a `tf.cond` takes tensors from there, but none that are eager.
    """
    graph = tf.compat.v1.get_default_graph()
    around = []
    while hasattr(graph := getattr(graph, "outer_graph", None), "capture"):
        around.append(graph)
    for graph in reversed(around):
        x = graph.capture(x)
    return x


def native_transport(strategy: tf.distribute.Strategy) -> Transport | None:
    """Return the native collectives of a strategy's workers, or None if it has none."""
    return getattr(engine_of(strategy), "transport", None)


def is_native(tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> bool:
    """Return whether native collectives can send these tensors: dense ones of some dtypes."""
    return all(isinstance(x, tf.Tensor) and x.dtype in _DTYPES for x in tensors)


def sendable(dtype: tf.DType) -> tf.DType:
    """Return a dtype in which a tensor of `dtype` can be sent: its own, or a wider one."""
    return dtype if dtype in _DTYPES else tf.float32 if dtype.is_floating else tf.int64


def replicas(name: str = "replicas") -> Group:
    """Return a group of all replicas of the current strategy.

    Call it in the strategy's scope or in replica context.

    Args:
        name: Name that distinguishes the group's collectives from others.

    Example:
        >>> import tfdist
        >>> with tfdist.make_strategy("one_device", devices="cpu").scope():
        ...     replicas().size
        1
    """
    return Group.of(tf.distribute.get_strategy(), name)
