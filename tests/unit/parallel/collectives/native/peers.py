"""Run functions in connected processes, which import no TensorFlow."""

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback

import pytest

from tfdist.parallel.collectives.native import connections, library
from tfdist.parallel.collectives.native.python_exchange import PythonExchange

TOKEN = b"0123456789abcdef"
KINDS = ("shared memory", "unix", "tcp", "python", "python tcp")
HOSTS = 2  # of the kind "hosts": processes of even and of odd rank
WAIT_S = 60.0


def require(kind):
    if not kind.startswith("python") and library.load() is None:
        pytest.skip("the compiled library is missing: install a C++ compiler, and tfdist again")


def connect(kind, rank, size, gather, token=TOKEN, timeout=WAIT_S, connect_s=WAIT_S):
    """Return a connected exchange; TCP is used between processes that seem to be on two hosts."""
    if kind.endswith("tcp"):
        connections.host_identity = lambda: bytes([rank]) * 18
    if kind == "hosts":
        connections.host_identity = lambda: bytes([rank % HOSTS]) * 18
    names = [f"worker:{r}" for r in range(size)]
    endpoints = connections.meet(gather)
    sockets = connections.connect(
        rank, endpoints, ["127.0.0.1:1"] * size, names, token, gather, connect_s
    )
    if kind.startswith("python"):
        return PythonExchange(rank, sockets, names, timeout)
    memory = None
    if kind in ("shared memory", "hosts"):
        memory = connections.share_memory(
            rank, endpoints, sockets, library.shared_bytes, gather, WAIT_S
        )
    return library.CompiledExchange(rank, sockets, names, timeout, memory, endpoints.by_host)


class Peers:
    """Processes that each run `function(rank, gather, *args)`, as workers do.

    `gather` goes through this process, which also receives what the processes say and return.
    """

    def __init__(self, size, function, *args):
        context = multiprocessing.get_context("fork")
        self.said = [[] for _ in range(size)]
        self.results = [None] * size
        self._news = threading.Condition()
        self._rows = {}
        self._ends = []
        self.processes = []
        for rank in range(size):
            own, there = context.Pipe()
            process = context.Process(target=_run, args=(there, rank, function, args), daemon=True)
            process.start()
            there.close()
            self._ends.append(own)
            self.processes.append(process)
        for rank in range(size):
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def await_said(self, rank, word):
        with self._news:
            assert self._news.wait_for(lambda: word in self.said[rank], WAIT_S), self.said

    def signal(self, rank, number):
        os.kill(self.processes[rank].pid, number)

    def finish(self, *ranks):
        """Return the results of these processes, or of all."""
        ranks = ranks or range(len(self.processes))
        for rank in ranks:
            self.processes[rank].join(WAIT_S)
            assert self.processes[rank].exitcode is not None, f"{rank} does not end"
        with self._news:
            assert self._news.wait_for(
                lambda: all(self.results[r] is not None for r in ranks), WAIT_S
            ), self.results
        return [self.results[rank] for rank in ranks]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join(WAIT_S)

    def _serve(self, rank):
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, value = self._ends[rank].recv()
                with self._news:
                    if kind == "gather":
                        self._rows[rank] = value
                        if len(self._rows) == len(self._ends):
                            rows = [self._rows[r] for r in range(len(self._ends))]
                            self._rows = {}
                            for end in self._ends:
                                end.send(rows)
                    elif kind == "say":
                        self.said[rank].append(value)
                    else:
                        self.results[rank] = value
                    self._news.notify_all()


def _run(pipe, rank, function, args):
    import numpy as np

    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def gather(row):
        pipe.send(("gather", row))
        return np.stack(pipe.recv())

    gather.say = lambda word: pipe.send(("say", word))
    try:
        result = function(rank, gather, *args)
    except (ConnectionError, TimeoutError, ValueError) as error:
        result = f"{type(error).__name__}: {error}"
    except BaseException:
        result = traceback.format_exc()
    pipe.send(("result", result))
    pipe.close()
    os._exit(0)
