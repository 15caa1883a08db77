"""Lose the other one of two workers, and try a way to go on in this process.

python benchmarks/common/survivors_worker.py WAY ROLE RANK DIRECTORY PORTS NEW_PORTS STEPS

ROLE is "survivor", "lost", or "new" for the one that takes the place of the lost one. Only the
survivor notes facts. Weights and momentum are compared with those that NumPy computes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import json
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.parallel.collectives.native.library import ALL_REDUCE
from tfdist.parallel.collectives.native.python_exchange import PythonExchange
from tfdist.runtime.formatting import counted

SIZE = 1000  # weights
BETWEEN_S = 1.0  # from the loss to the next step of a survivor that was between two steps
WAIT_S = 30.0  # for a call that may never end
LIVES_S = 15.0  # TensorFlow's workers wait 10 s for a heartbeat
PACE_S = 0.05  # between steps
TARGETS = np.random.default_rng(0).normal(size=(2, SIZE)).astype(np.float32)
State = tuple[np.ndarray, np.ndarray]  # weights and momentum
Parts = tuple[tf.Variable, tf.Variable, Callable[[], None]]  # weights, momentum and a step
START: State = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)


def expected(steps: int) -> State:
    """Return weights and momentum after some steps of two workers."""
    weights, momentum = START
    for _ in range(steps):
        gradient = (weights - TARGETS[0]) + (weights - TARGETS[1])
        momentum = np.float32(0.5) * momentum + gradient
        weights = weights - np.float32(0.125) * momentum
    return weights, momentum


class Worker:
    """Do the part of one process; see the module for the arguments."""

    def __init__(
        self,
        way: str,
        role: str,
        rank: int,
        directory: pathlib.Path,
        ports: list[int],
        new_ports: list[int],
        steps: int,
    ):
        self.way = way
        self.role = role
        self.rank = rank
        self.directory = directory
        self.ports = ports
        self.new_ports = new_ports
        self.steps = steps
        self.traces = 0
        self.lost = 0.0  # time of the loss
        self.threads = concurrent.futures.ThreadPoolExecutor(8)

    # --- Facts ------------------------------------------------------------------------------------
    def note(self, name: str, outcome: str) -> None:
        """Write a fact, and the seconds since the loss, at once: this process may die later."""
        if self.role == "survivor":
            with (self.directory / "facts.jsonl").open("a") as file:
                file.write(json.dumps([name, outcome, time.monotonic() - self.lost]) + "\n")

    def attempt(self, name: str, function: Callable[[], Any]) -> Any:
        """Note how a call ends, which may never do so; return its result, or None if it failed."""
        future = self.threads.submit(function)
        try:
            result = future.result(WAIT_S)
        except concurrent.futures.TimeoutError:
            self.note(name, f"does not end in {WAIT_S:g} s")
            return None
        except Exception as error:
            self.note(name, first_line(error))
            error.__traceback__ = None  # it holds variables
            return None
        self.note(name, result if isinstance(result, str) else "works")
        return result

    def check(self, name: str, weights: tf.Variable, momentum: tf.Variable, steps: int) -> None:
        """Note whether the state can be read, and is that after some steps."""

        def compare() -> str:
            state = weights.numpy(), momentum.numpy()
            equal = all(map(np.array_equal, state, expected(steps)))
            return f"{'' if equal else 'not '}those after step {steps}"

        self.attempt(name, compare)

    def check_port(self, name: str) -> None:
        """Note whether something listens at the port of the first cluster."""
        with socket.socket() as probe:
            refused = probe.connect_ex(("127.0.0.1", self.ports[self.rank]))
        self.note(name, "nothing listens" if refused else "something listens")

    # --- The other process ------------------------------------------------------------------------
    def die(self) -> None:
        """End as by `kill -9` when the survivor is ready."""
        self.wait_for("ready")
        self.tell("lost", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def begin_to_wait(self, step: Callable[[], None]) -> concurrent.futures.Future:
        """Return a call of the step that the other worker does not survive."""
        if self.way == "between steps":
            self.tell("ready")
            self.wait_for("lost")
            time.sleep(BETWEEN_S)
        call = self.threads.submit(step)
        time.sleep(PACE_S)
        self.tell("ready")
        self.lost = float(self.wait_for("lost"))
        return call

    def tell(self, name: str, text: str = "") -> None:
        """Write a file that others wait for."""
        (self.directory / f"{name}.part").write_text(text)
        (self.directory / f"{name}.part").rename(self.directory / name)

    def wait_for(self, name: str) -> str:
        """Wait for a file, and return its content."""
        path = self.directory / name
        end = time.monotonic() + 3 * WAIT_S
        while not path.exists():
            assert time.monotonic() < end, f"no file {path}"
            time.sleep(0.01)
        return path.read_text()

    # --- TensorFlow's cluster ---------------------------------------------------------------------
    def in_cluster(self) -> None:
        """Train in a cluster until the other worker is lost, and go on in this way."""
        if self.role == "new":
            self.wait_for("reset")
            self.go_on(self.ports if self.way == "same ports" else self.new_ports, START)
            return
        weights, momentum, step = self.model(self.join(self.ports), START)
        for _ in range(self.steps):
            step()
        if self.role == "lost":
            self.die()
        call = self.begin_to_wait(step)
        if not concurrent.futures.wait([call], WAIT_S).done:
            self.note("the next step", f"does not end in {WAIT_S:g} s, and is aborted")
            code = tf.errors.UNAVAILABLE
            context.context().abort_collective_ops(code, "aborted: the other worker is lost")
        self.attempt("the step", call.result)
        del call
        self.check("weights and momentum", weights, momentum, self.steps)
        saved = weights.numpy(), momentum.numpy()
        if self.way == "new group":
            self.attempt("a collective of another group", reduce_alone)
        if self.way in ("wait", "between steps", "first lost", "new group"):
            time.sleep(LIVES_S)
            self.attempt("another step", step)
            return
        if self.way == "reset":
            self.reset()
            self.check("weights and momentum after the reset", weights, momentum, self.steps)
            self.attempt("the traced step after the reset", step)
            return
        del weights, momentum, step  # they might keep the server alive
        self.reset()
        self.go_on(self.ports if self.way == "same ports" else self.new_ports, saved)
        self.check_port("the old port at the end")

    def join(self, ports: list[int]) -> tf.distribute.Strategy:
        """Form a cluster of two workers."""
        tasks = [f"127.0.0.1:{port}" for port in ports]
        task = {"type": "worker", "index": self.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": tasks}, "task": task})
        return tf.distribute.MultiWorkerMirroredStrategy()

    def model(self, strategy: tf.distribute.Strategy, start: State) -> Parts:
        """Return variables and a traced step under a strategy."""
        with strategy.scope():
            weights, momentum = (tf.Variable(value) for value in start)

        @tf.function
        def step() -> None:
            self.traces += 1
            local = strategy.run(lambda: weights - TARGETS[self.rank])
            gradient = strategy.reduce("SUM", local, axis=None)
            update = strategy.extended.update
            update(momentum, lambda v, g: v.assign(0.5 * v + g), args=(gradient,))
            update(weights, lambda v, m: v.assign_sub(0.125 * m), args=(momentum,))

        return weights, momentum, step

    def reset(self) -> None:
        """Reset TensorFlow's context."""
        gc.collect()
        context._reset_context()
        self.tell("reset")
        self.check_port("the old port after the reset")

    def go_on(self, ports: list[int], start: State) -> None:
        """Form a new cluster with the new process, and train there."""
        self.traces = 0
        made = self.attempt("a new cluster", lambda: self.model(self.join(ports), start))
        if made is not None:
            self.train(*made)

    def train(self, weights: tf.Variable, momentum: tf.Variable, step: Callable[[], None]) -> None:
        """Train on with the new process, and note how often the step was traced."""
        if self.attempt("the next step", lambda: step() or "works") is None:
            return
        for _ in range(self.steps - 1):
            step()
        self.check("weights and momentum at the end", weights, momentum, 2 * self.steps)
        self.note("the step was traced again", counted(self.traces, "time"))

        def go() -> str:
            for _ in range(int(LIVES_S / PACE_S)):
                step()
                time.sleep(PACE_S)
            return "work"

        self.attempt(f"the steps of the next {LIVES_S:g} s", go)

    # --- Native collectives -----------------------------------------------------------------------
    def by_native_collectives(self) -> None:
        """Train without a cluster of TensorFlow, and go on with a new process."""
        exchange = self.connect("second" if self.role == "new" else "first")
        weights, momentum = (tf.Variable(value) for value in START)

        @tf.function
        def step() -> None:
            self.traces += 1
            local = weights - TARGETS[self.rank]
            gradient = tf.numpy_function(
                lambda x: exchange.run(ALL_REDUCE, "gradient", [x])[0], [local], tf.float32
            )
            momentum.assign(0.5 * momentum + tf.ensure_shape(gradient, [SIZE]))
            weights.assign_sub(0.125 * momentum)

        if self.role != "new":
            for _ in range(self.steps):
                step()
            if self.role == "lost":
                self.die()
            call = self.begin_to_wait(step)
            self.attempt("the step", call.result)
            self.check("weights and momentum", weights, momentum, self.steps)
            exchange.close()
            exchange = self.connect("second")
        for variable in (weights, momentum):  # the new process takes them over
            own = variable.numpy() if self.role == "survivor" else np.zeros(SIZE, np.float32)
            variable.assign(exchange.run(ALL_REDUCE, "state", [own])[0])
        self.note("a new process", "connects, and takes over weights and momentum")
        self.traces = 0
        self.train(weights, momentum, step)

    def connect(self, name: str) -> PythonExchange:
        """Connect the two workers by a Unix socket."""
        path = str(self.directory / name)
        with contextlib.ExitStack() as stack:
            if self.rank == 0:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.settimeout(3 * WAIT_S)
                listener.bind(path)
                listener.listen(1)
                self.tell(f"{name} listens")
                peer, _ = listener.accept()
            else:
                self.wait_for(f"{name} listens")
                peer = socket.socket(socket.AF_UNIX)
                peer.connect(path)
        sockets = [None, peer] if self.rank == 0 else [peer, None]
        return PythonExchange(self.rank, sockets, ["worker:0", "worker:1"], WAIT_S)


def reduce_alone() -> None:
    """Run a collective of a group that has only this worker."""
    tf.raw_ops.CollectiveReduceV2(
        input=tf.constant([1.0]),
        group_size=1,
        group_key=12345,
        instance_key=12345,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
    )


def first_line(error: BaseException) -> str:
    """Return an error's type, and the first line of its message that is no traceback."""
    lines = [line.strip() for line in str(error).splitlines()]
    tracebacks = ("Graph execution error", "Detected at", "File ")
    text = next((line for line in lines if line and not line.startswith(tracebacks)), "")
    return f"{type(error).__name__}: {text}"


def main(
    way: str, role: str, rank: str, directory: str, ports: str, new_ports: str, steps: str
) -> None:
    """Run one worker."""
    worker = Worker(
        way,
        role,
        int(rank),
        pathlib.Path(directory),
        [int(port) for port in ports.split(",")],
        [int(port) for port in new_ports.split(",")],
        int(steps),
    )
    if way == "native":
        worker.by_native_collectives()
    else:
        worker.in_cluster()
    worker.note("the process", "lives")
    os._exit(0)  # TensorFlow's own end waits for the lost worker


if __name__ == "__main__":
    main(*sys.argv[1:])
