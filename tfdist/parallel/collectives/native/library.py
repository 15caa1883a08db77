"""Compiled library of the native collectives: where it is, and its functions.

`pip install` builds it where there is a C++ compiler, see `setup.py`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import pathlib
import socket
import sys
from collections.abc import Sequence
from types import ModuleType

import numpy as np

# What the library must say of itself. One from an older build of the package is not used.
VERSION = 3
ALL_REDUCE = 0
REDUCE_SCATTER = 1
ALL_GATHER = 2
ALL_TO_ALL = 3
REDUCTIONS = {"Add": 0, "Min": 1, "Max": 2}
# TensorFlow's numbers of the dtypes that can be sent.
DTYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "bfloat16": 14, "float16": 19}
ERROR_BYTES = 4096


class TransportError(ConnectionError):
    """Error for a collective that failed in all workers; the message names a worker."""


def path() -> pathlib.Path | None:
    """Return the path of the library, or None if it was not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        file = pathlib.Path(__file__).with_name(f"_transport{suffix}")
        if file.exists():
            return file
    return None


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None if there is none that fits this version of the package."""
    file = path()
    if file is None:
        return None
    operations()
    try:
        library = ctypes.CDLL(str(file))
        version = library.tfdist_version()
    except (OSError, AttributeError):
        return None
    library.tfdist_shared_bytes.restype = ctypes.c_size_t
    library.tfdist_open.restype = ctypes.c_int64
    library.tfdist_open.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_double,
    ]
    library.tfdist_run.argtypes = [
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_double,
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    library.tfdist_abort.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    library.tfdist_abort.restype = None
    library.tfdist_waiting_for.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
    library.tfdist_close.argtypes = [ctypes.c_int64]
    library.tfdist_close.restype = None
    return library if version == VERSION else None


@functools.cache
def operations() -> ModuleType | None:
    """Return the library's TensorFlow operations, or None.

    TensorFlow finds them only if it is the first to load the library. So there are none if
    TensorFlow was not imported at the first call.
    """
    file = path()
    tensorflow = sys.modules.get("tensorflow")
    if file is None or tensorflow is None:
        return None
    try:
        module = tensorflow.load_op_library(str(file))
    except (OSError, tensorflow.errors.OpError):
        return None
    return module if hasattr(module, "tfdist_collective") else None


def shared_bytes(size: int) -> int:
    """Return the bytes of memory that `size` processes of a host share."""
    library = load()
    assert library is not None
    return library.tfdist_shared_bytes(size)


class CompiledExchange:
    """Collectives of one communicator of the library, on NumPy arrays.

    Args:
        rank: Rank of this process.
        sockets: Connected socket of each rank, which this object takes over; None for its own.
        names: Name of each rank, for messages.
        timeout: Seconds that a call waits without progress.
        memory: Descriptor of memory that the processes of this host share, or None.
        hosts: Ranks of each host; if there is memory, equally many for each. None: one host.

    Attributes:
        number: Number of the communicator in the library.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket.socket | None],
        names: Sequence[str],
        timeout: float,
        memory: int | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
    ):
        library = load()
        assert library is not None
        self._library = library
        self.size = len(names)
        self.rank = rank
        host_of = [0] * self.size
        for host, ranks in enumerate(hosts or ()):
            for each in ranks:
                host_of[each] = host
        numbers = [-1 if s is None else s.detach() for s in sockets]
        self.number = library.tfdist_open(
            rank,
            self.size,
            (ctypes.c_int * self.size)(*numbers),
            (ctypes.c_int * self.size)(*host_of),
            -1 if memory is None else memory,
            (ctypes.c_char_p * self.size)(*(name.encode() for name in names)),
            timeout if timeout < 1e9 else 0.0,
        )
        if self.number < 0:
            raise MemoryError("communication native: the shared memory cannot be mapped")
        self._descriptors = [number for number in numbers if number >= 0]

    def run(
        self,
        collective: int,
        name: str,
        arrays: Sequence[np.ndarray],
        reduction: str = "Add",
        in_place: bool = False,
        factor: float = 1.0,
    ) -> list[np.ndarray]:
        """Run a collective on arrays of one dtype, and return its results.

        Args:
            collective: One of the constants of this module.
            name: Name of the call, equal on all ranks.
            arrays: Arrays of one dtype; one array, unless it is an all-reduce.
            reduction: One of `REDUCTIONS`.
            in_place: Whether an all-reduce overwrites its arrays, which must be contiguous, as it
                does in a step of training.
            factor: Factor of this process's floats in a sum, which needs memory that all share.

        Raises:
            TransportError: If a worker was lost, or the workers are out of step.
        """
        if in_place:
            assert collective == ALL_REDUCE
            results = list(arrays)
        else:
            arrays = [np.asarray(x, order="C") for x in arrays]
            shapes = [output_shape(collective, x.shape, self.size) for x in arrays]
            results = [np.empty(s, x.dtype) for s, x in zip(shapes, arrays, strict=True)]
        count = len(arrays)
        pointers = ctypes.c_void_p * count
        sizes = ctypes.c_size_t * count
        error = ctypes.create_string_buffer(ERROR_BYTES)
        if self._library.tfdist_run(
            self.number,
            collective,
            DTYPES[arrays[0].dtype.name],
            REDUCTIONS[reduction],
            factor,
            name.encode(),
            pointers(*(x.ctypes.data for x in arrays)),
            pointers(*(x.ctypes.data for x in results)),
            sizes(*(x.nbytes for x in arrays)),
            sizes(*(x.nbytes for x in results)),
            count,
            error,
            ERROR_BYTES,
        ):
            raise TransportError(error.value.decode(errors="replace"))
        return results

    def abort(self, message: str) -> None:
        """End the current call and all later ones with this message; any thread may call it."""
        self._library.tfdist_abort(self.number, message.encode())

    def waiting_for(self) -> list[int]:
        """Return the ranks for which the current call waits."""
        ranks = (ctypes.c_int * self.size)()
        return list(ranks[: self._library.tfdist_waiting_for(self.number, ranks, self.size)])

    def close_in_child(self) -> None:
        """Close the connections in a forked child, in which the library must not be called."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def close(self) -> None:
        """Close the connections."""
        self._descriptors = []
        self._library.tfdist_close(self.number)


def output_shape(collective: int, shape: tuple, size: int) -> tuple:
    """Return the shape of a collective's result.

    Example:
        >>> output_shape(ALL_GATHER, (3,), 2), output_shape(REDUCE_SCATTER, (2, 3), 2)
        ((2, 3), (3,))
    """
    if collective == ALL_GATHER:
        return (size, *shape)
    return shape[1:] if collective == REDUCE_SCATTER else shape
