"""Collectives over sockets in Python, with the results of the compiled library.

Sums are computed in the order of the ranks, each by one process, and 16-bit floats are summed in
32 bits, as in the library. So all processes get the same bits.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from tfdist.parallel.collectives.native.library import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    DTYPES,
    REDUCE_SCATTER,
    REDUCTIONS,
    TransportError,
    output_shape,
)

WHOLE_BYTES = 16 << 10  # up to here, all processes compute the whole sum
SLICE_S = 0.1  # a wait looks this often whether it is to end
LOST_S = 0.2  # after a peer is lost, others are looked at
TRANSFER_BYTES = 1 << 20  # passed to the kernel at once

_HEADER = struct.Struct("<QQiiii80s")
_COLLECTIVES = {
    ALL_REDUCE: "all_reduce",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_GATHER: "all_gather",
    ALL_TO_ALL: "all_to_all",
}
_UFUNCS = {"Add": np.add, "Min": np.minimum, "Max": np.maximum}


class PythonExchange:
    """Collectives between processes that are connected each with each; see `CompiledExchange`.

    Args:
        rank: Rank of this process.
        sockets: Connected socket of each rank, which this object takes over; None for its own.
        names: Name of each rank, for messages.
        timeout: Seconds that a call waits without progress.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket.socket | None],
        names: Sequence[str],
        timeout: float,
    ):
        self.rank = rank
        self.size = len(names)
        self._names = list(names)
        self._timeout = timeout
        self._sockets = {r: s for r, s in enumerate(sockets) if s is not None}
        for connection in self._sockets.values():
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._running = threading.Lock()
        self._calls = 0
        self._broken = ""
        self._abort = ""
        self._waiting: list[int] = []

    def run(
        self, collective: int, name: str, arrays: Sequence[np.ndarray], reduction: str = "Add"
    ) -> list[np.ndarray]:
        """Run a collective; see `CompiledExchange.run`."""
        with self._running:
            if self._broken:
                raise TransportError(self._broken)
            try:
                return self._run(collective, name, arrays, reduction)
            except (TransportError, OSError) as error:
                self._broken = str(error)
                for connection in self._sockets.values():
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)  # what was sent still arrives
                raise TransportError(self._broken) from error
            finally:
                self._waiting = []

    def abort(self, message: str) -> None:
        """End the current call and all later ones with this message; any thread may call it."""
        self._abort = self._abort or message or "aborted"

    def waiting_for(self) -> list[int]:
        """Return the ranks for which the current call waits."""
        return list(self._waiting)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._sockets.values():
            connection.close()

    close_in_child = close

    def _run(self, collective, name, arrays, reduction) -> list[np.ndarray]:
        arrays = [np.asarray(x, order="C") for x in arrays]
        flat = arrays[0].reshape(-1)
        if len(arrays) > 1:
            flat = np.concatenate([x.reshape(-1) for x in arrays])
        self._calls += 1
        header = _HEADER.pack(
            self._calls,
            flat.nbytes,
            collective,
            DTYPES[flat.dtype.name],
            REDUCTIONS[reduction],
            len(arrays),
            name.encode()[:79],
        )
        if self._abort:
            raise TransportError(self._abort)
        headers = {r: bytearray(_HEADER.size) for r in self._sockets}
        self._exchange(dict.fromkeys(self._sockets, memoryview(header)), headers)
        for peer, theirs in headers.items():
            if theirs != header:
                raise TransportError(
                    f"workers are out of step: {self._names[self.rank]} calls {_text(header)}, "
                    f"and {self._names[peer]} calls {_text(bytes(theirs))}. All workers must run "
                    "the same script with tensors of the same shapes"
                )
        if collective == ALL_REDUCE:
            total = self._all_reduce(flat, reduction)
            ends = np.cumsum([x.size for x in arrays])[:-1]
            return [
                part.reshape(x.shape) for part, x in zip(np.split(total, ends), arrays, strict=True)
            ]
        shape = output_shape(collective, arrays[0].shape, self.size)
        if collective == ALL_GATHER:
            result = np.empty((self.size, flat.size), flat.dtype)
            result[self.rank] = flat
            self._send_and_receive(dict.fromkeys(self._sockets, flat), dict(enumerate(result)))
            return [result.reshape(shape)]
        rows = flat.reshape(self.size, -1)
        if collective == REDUCE_SCATTER:
            return [self._reduce(dict(enumerate(rows)), reduction).reshape(shape)]
        result = np.empty_like(rows)
        result[self.rank] = rows[self.rank]
        self._send_and_receive(dict(enumerate(rows)), dict(enumerate(result)))
        return [result.reshape(shape)]

    def _all_reduce(self, x: np.ndarray, reduction: str) -> np.ndarray:
        if x.nbytes <= WHOLE_BYTES:
            return self._reduce(dict.fromkeys(range(self.size), x), reduction)
        result = np.empty_like(x)
        ends = [x.size * r // self.size for r in range(self.size + 1)]
        parts = {r: x[ends[r] : ends[r + 1]] for r in range(self.size)}
        whole = {r: result[ends[r] : ends[r + 1]] for r in range(self.size)}
        whole[self.rank][:] = self._reduce(parts, reduction)
        self._send_and_receive(dict.fromkeys(self._sockets, whole[self.rank]), whole)
        return result

    def _reduce(self, parts: dict[int, np.ndarray], reduction: str) -> np.ndarray:
        """Send each rank its part, and return the reduced own parts of all ranks."""
        own = parts[self.rank]
        inputs = {r: own if r == self.rank else np.empty_like(own) for r in range(self.size)}
        self._send_and_receive(parts, inputs)
        wide = np.float32 if own.dtype.itemsize == 2 else own.dtype
        total = inputs[0].astype(wide)
        for r in range(1, self.size):
            _UFUNCS[reduction](total, inputs[r].astype(wide, copy=False), out=total)
        return total.astype(own.dtype, copy=False)

    def _send_and_receive(
        self, outgoing: dict[int, np.ndarray], incoming: dict[int, np.ndarray]
    ) -> None:
        """Send an array to each peer, and fill an array from each peer."""
        self._exchange(
            {r: _bytes(outgoing[r]) for r in self._sockets},
            {r: _bytes(incoming[r]) for r in self._sockets},
        )

    def _exchange(self, outgoing: dict, incoming: dict) -> None:
        sends = {r: memoryview(x) for r, x in outgoing.items() if len(x)}
        receives = {r: memoryview(x) for r, x in incoming.items() if len(x)}
        waited = 0.0
        last: float | None = None
        while sends or receives:
            progress = False
            for peer in list(sends):
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    try:
                        sent = self._sockets[peer].send(sends[peer][:TRANSFER_BYTES])
                    except ConnectionError:
                        self._lost(peer)
                    sends[peer] = sends[peer][sent:]
                    progress = True
                    if not len(sends[peer]):
                        del sends[peer]
            for peer in list(receives):
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    try:
                        received = self._sockets[peer].recv_into(receives[peer])
                    except ConnectionError:
                        received = 0
                    if not received:
                        self._lost(peer)
                    receives[peer] = receives[peer][received:]
                    progress = True
                    if not len(receives[peer]):
                        del receives[peer]
            if progress:
                waited, last = 0.0, None
                continue
            self._waiting = sorted({*sends, *receives})
            self._sleep(sends, receives)
            if self._abort:
                raise TransportError(self._abort)
            now = time.monotonic()
            # While this process is stopped, the clock goes on: such time does not count.
            waited += 0.0 if last is None else min(now - last, 2 * SLICE_S)
            last = now
            if waited > self._timeout:
                late = ", ".join(self._names[r] for r in self._waiting)
                raise TransportError(
                    f"{self._names[self.rank]} waited too long for {late}: nothing arrived for "
                    f"{self._timeout:g} s"
                )

    def _sleep(self, sends: Iterable[int], receives: Iterable[int]) -> None:
        poll = select.poll()
        events = dict.fromkeys(receives, select.POLLIN)
        for peer in sends:
            events[peer] = events.get(peer, 0) | select.POLLOUT
        for peer, event in events.items():
            poll.register(self._sockets[peer], event)
        poll.poll(SLICE_S * 1000)

    def _lost(self, peer: int) -> None:
        # A process that dies lets others fail, which close their connections too, perhaps sooner
        # than the kernel those of the dead one. So wait a little, and name them all.
        time.sleep(LOST_S)
        closed = [r for r in self._sockets if r != peer and self._is_closed(r)]
        lost = ", ".join(self._names[r] for r in [peer, *closed])
        raise TransportError(
            f"{self._names[self.rank]} lost its connection to {lost}: the process ended, or it "
            "failed; see its log"
        )

    def _is_closed(self, peer: int) -> bool:
        poll = select.poll()
        poll.register(self._sockets[peer], select.POLLRDHUP)
        return bool(poll.poll(0))


def _bytes(x: np.ndarray) -> memoryview:
    return x.view(np.uint8).data


def _text(header: bytes) -> str:
    number, size, collective, dtype, _, buffers, name = _HEADER.unpack(header)
    dtypes = {value: key for key, value in DTYPES.items()}
    return (
        f"{_COLLECTIVES.get(collective, 'an unknown collective')} "
        f"'{name.rstrip(bytes(1)).decode(errors='replace')}' of {size} bytes of "
        f"{dtypes.get(dtype, 'an unknown dtype')} in {buffers} buffers (call {number})"
    )
