"""Native collectives of workers on CPUs, as TensorFlow operations.

All workers of a strategy share one `Transport`. They must call it in the same order, which
TensorFlow keeps within a function, because the operations are stateful. It does not order them with
those in a branch of a `tf.cond` that uses variables: such a branch needs `tf.control_dependencies`
on the calls before it, or their results. Workers that are out of step get an error that names both
calls.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.parallel.collectives.native import connections, library
from tfdist.parallel.collectives.native.library import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    CompiledExchange,
    output_shape,
)
from tfdist.parallel.collectives.native.python_exchange import PythonExchange
from tfdist.parallel.replica_weight import Weight, weighted

log = logging.getLogger("tfdist")

START_S = 60.0  # for all connections, by default
SHARED_MEMORY = "shared memory"  # kind of a transport within a host
DTYPES = tuple(tf.as_dtype(name) for name in library.DTYPES)

_open: weakref.WeakSet[Transport] = weakref.WeakSet()  # for forked children


class Transport:
    """Collectives of all workers, each with one replica on its CPU.

    Args:
        exchange: Connected exchange of this worker.
        names: Name of each worker, by rank.

    Attributes:
        kind: Way in which tensors travel, for messages.
        shares_memory: Whether they travel through memory that all workers share.
    """

    def __init__(
        self, exchange: CompiledExchange | PythonExchange, names: Sequence[str], kind: str
    ):
        self._exchange = exchange
        self._names = list(names)
        self.kind = kind
        self.shares_memory = kind == SHARED_MEMORY
        self.size = len(names)
        _open.add(self)

    def all_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        name: str,
        reduction: str = "Add",
        factor: Weight = 1.0,
    ) -> list[tf.Tensor]:
        """Return the sum, minimum or maximum of each tensor over the workers.

        Args:
            tensors: Dense tensors of one dtype of `DTYPES`.
            name: Name of this call.
            reduction: "Add", "Min" or "Max".
            factor: Factor of this worker's tensors, as for `weighted`, if they are floats that are
                added. In memory that all workers share, it takes no time.

        Returns:
            Tensors equal bit for bit on all workers. Sums of 16-bit floats are computed in 32 bits,
            and rounded once; products by a factor may be rounded before.
        """
        return self._call(ALL_REDUCE, tensors, name, reduction, factor)

    def reduce_scatter(self, x: tf.Tensor, name: str, factor: Weight = 1.0) -> tf.Tensor:
        """Return this worker's row of the sum of `[size, ...]` over the workers.

        Args:
            x: Tensor with a row for each worker.
            name: Name of this call.
            factor: Factor of this worker's rows, as for `all_reduce`.
        """
        return self._call(REDUCE_SCATTER, [x], name, factor=factor)[0]

    def all_gather(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensors of all workers, `[size, ...]`."""
        return self._call(ALL_GATHER, [x], name)[0]

    def all_to_all(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Return `[size, ...]`, of which row i is this worker's row of the tensor of worker i."""
        return self._call(ALL_TO_ALL, [x], name)[0]

    def abort(self, message: str) -> None:
        """End the current call and all later ones with this message; any thread may call it."""
        self._exchange.abort(message)

    def waiting_for(self) -> list[str]:
        """Return the names of the workers for which the current call waits."""
        return [self._names[rank] for rank in self._exchange.waiting_for()]

    def close(self) -> None:
        """Close the connections; later calls fail."""
        _open.discard(self)
        self._exchange.close()

    def close_in_child(self) -> None:
        """Close what a forked child has inherited, so that it keeps no connection open."""
        self._exchange.close_in_child()

    def _call(
        self,
        collective: int,
        tensors: Sequence[tf.Tensor],
        name: str,
        reduction: str = "Add",
        factor: Weight = 1.0,
    ) -> list[tf.Tensor]:
        tensors = [tf.convert_to_tensor(x) for x in tensors]
        shapes = [
            output_shape(collective, tuple(x.shape), self.size)
            if x.shape.rank is not None
            else None
            for x in tensors
        ]
        exchange = self._exchange
        operations = library.operations()
        factors = [] if isinstance(factor, float) and factor == 1.0 else [factor]
        if not self.shares_memory or operations is None:
            tensors, factors = weighted(tensors, factor), []
        with tf.device("CPU:0"):
            if operations is not None and isinstance(exchange, CompiledExchange):
                results = operations.tfdist_collective(
                    values=tensors,
                    factors=[tf.convert_to_tensor(each, tf.float64) for each in factors],
                    communicator=exchange.number,
                    size=self.size,
                    collective=collective,
                    reduction=library.REDUCTIONS[reduction],
                    call=name,
                )
            else:
                # In eager mode, `tf.numpy_function` does not take a scalar of bfloat16.
                results = tf.numpy_function(
                    functools.partial(self._run, collective, name, reduction),
                    [x[None] if x.shape.rank == 0 else x for x in tensors],
                    [x.dtype for x in tensors],
                )
        results = list(results) if isinstance(results, list | tuple) else [results]
        return [
            x if s is None else (tf.ensure_shape if given.shape.rank else tf.reshape)(x, s)
            for x, s, given in zip(results, shapes, tensors, strict=True)
        ]

    def _run(self, collective: int, name: str, reduction: str, *arrays: np.ndarray):
        try:
            return self._exchange.run(collective, name, arrays, reduction)
        except library.TransportError as error:  # as the compiled operation fails
            raise tf.errors.AbortedError(None, None, str(error)) from error


def open_transport(
    rank: int,
    addresses: Sequence[str],
    names: Sequence[str],
    token: bytes,
    gather: Callable[[np.ndarray], np.ndarray],
    timeout: float,
    start_timeout: float = START_S,
    compiled: bool | None = None,
    shared: bool = True,
) -> Transport:
    """Connect this worker with all others; all workers call it.

    Args:
        rank: Rank of this worker.
        addresses: Address of each worker's task, by rank.
        names: Name of each worker, by rank.
        token: Secret of all workers; see `json_channel.check_token`.
        gather: Function as for `connections.meet`.
        timeout: Seconds that a call waits without progress.
        start_timeout: Seconds for all connections.
        compiled: Whether to use the compiled library. None: if all workers have it.
        shared: Whether workers of a host may share memory. They do if all hosts have equally many
            workers, and more than one.

    Raises:
        ConfigurationError: If a worker does not know the token.
        PeersAbsent: If workers did not connect in time.
    """
    has_library = library.load() is not None if compiled is None else compiled
    endpoints = connections.meet(gather, int(has_library))
    sockets = connections.connect(rank, endpoints, addresses, names, token, gather, start_timeout)
    if not all(endpoints.facts):
        lacking = [n for n, has in zip(names, endpoints.facts, strict=True) if not has]
        log.warning(
            "communication native: runs in Python, which is slower, because %s has no compiled "
            "library; install a C++ compiler there, and tfdist again",
            ", ".join(lacking),
        )
        return Transport(PythonExchange(rank, sockets, names, timeout), names, "sockets, in Python")
    memory = None
    if shared:
        memory = connections.share_memory(
            rank, endpoints, sockets, library.shared_bytes, gather, start_timeout
        )
    hosts = endpoints.by_host
    try:
        exchange = CompiledExchange(rank, sockets, names, timeout, memory, hosts)
    finally:
        if memory is not None:
            os.close(memory)
    kind = "sockets"
    if memory is not None:
        kind = SHARED_MEMORY + " on each host, sockets between hosts" * (len(hosts) > 1)
    return Transport(exchange, names, kind)


@tf.RegisterGradient("TfdistCollective")
def _refuse_gradient(operation: tf.Operation, *_) -> None:
    call = tf.compat.as_str(operation.get_attr("call"))
    raise NotImplementedError(
        f"{call}: collectives of tfdist.parallel.Group have no gradient. For a loss of all "
        "replicas' rows, use tfdist.all_gather_rows; for a sum, "
        "tf.distribute.get_replica_context().all_reduce."
    )


def _close_in_child() -> None:
    for transport in list(_open):
        transport.close_in_child()


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_close_in_child)
