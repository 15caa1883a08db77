"""Data pipelines that run on data workers: `tf.data` service with deterministic order.

Each data worker is a tf.data service of its own, because only a service with one worker keeps an
order: a service with several workers returns elements as they become ready. In a pass that begins
at step f, data worker k of n makes the steps f + k, f + k + n, ..., and the reader takes one step
from each data worker in turn. So each step is read exactly once, in order.

TensorFlow's client retries forever if a data worker is gone, and it asks for the next element if an
answer was lost. Therefore every element carries its number, and a thread checks that the data
workers answer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from os import _exit
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from tfdist.cluster.addresses import Presence, address_problem, check_addresses, split_address
from tfdist.cluster.spec import DATA_WORKERS, data_workers
from tfdist.data.batch_rows import plain
from tfdist.data.portable import bound_to_process, graph_of
from tfdist.keras_compat import held_bytes, ops_are_deterministic
from tfdist.runtime.formatting import format_bytes

# Steps that a data worker prefetches, and steps that the reader prefetches of each.
PREFETCH_STEPS = 2
# Maximal size of a data pipeline in bytes. It is sent to each data worker when a pass begins.
MAX_BYTES = 128 * 2**20
START_S = 120.0  # timeout in seconds for the start of a data worker
RETURN_S = 10.0  # timeout in seconds for a data worker that no longer answers
CHECK_S = 1.0  # seconds between two checks of the data workers
TICK_US = 50_000  # microseconds between two reads of the verdict; the end of a pass waits so long
# Seconds that a data worker keeps the data pipeline of a pass, which it loads with the first step.
KEEP_S = 300.0
FORGET_MS = 1000  # milliseconds until a data worker deletes a pass that has no reader any more

_WITHOUT = "pass service=None (in a config, data.service=False)"  # remedy of errors
_ABSENT = "?"  # verdict until all data workers have answered once
_STEP = 0
_TICK = 1
_END = 2

_servers: list = []  # objects that live as long as the process

Make = Callable[[tf.Tensor, tf.Tensor, int], tf.data.Dataset]


def addresses_of(service: bool | Sequence[str] | None) -> tuple[str, ...]:
    """Return the addresses of the data workers that `service` names.

    Args:
        service: Data workers to use. None or False: none. True: the ones of `tfdist launch
            --data-workers N`. Else a list of addresses.

    Returns:
        The addresses `host:port`.

    Raises:
        ValueError: If there are no data workers, or an address is wrong.

    Example:
        >>> addresses_of(None), addresses_of(["10.0.0.1:5050"])
        ((), ('10.0.0.1:5050',))
    """
    if service is None or service is False:
        return ()
    if service is True:
        addresses = data_workers()
        if not addresses:
            raise ValueError(
                f"service=True: expected data workers, found none ({DATA_WORKERS} is not set). "
                f"Start them with `tfdist launch --data-workers N`, or {_WITHOUT}."
            )
        return addresses
    if isinstance(service, str):
        raise ValueError(
            f"service: expected True or a list of addresses, received the text {service!r}; write "
            f"[{service!r}]."
        )
    addresses = tuple(service)
    for i, address in enumerate(addresses):
        problem = address_problem(address)
        if not problem and addresses.index(address) != i:
            problem = "is there twice; list each data worker once"
        if problem:
            raise ValueError(f"service: address {address!r} {problem}.")
    if not addresses:
        raise ValueError(
            "service: expected at least one address, received none; pass service=None."
        )
    return addresses


def distribute(
    make: Make, position: tf.data.Dataset, addresses: Sequence[str], *, steps: int | None, name: str
) -> tf.data.Dataset:
    """Return a dataset whose elements are made by data workers.

    Args:
        make: Function from epoch and first step, int64 scalars, and a number n to the dataset of
            every n-th step from there to the epoch's end, one element each. It is called in graphs,
            and once in this function.
        position: One pair of epoch and first step, int64 scalars; read once in each pass.
        addresses: Addresses of the data workers, as `addresses_of` returns them.
        steps: Number of steps of an epoch; None: only reading tells. Then the end of a pass is
            noticed up to two seconds late.
        name: Name of the source, for messages.

    Returns:
        The elements of `make(epoch, first, 1)`, in the same order.

    Raises:
        ValueError: If `make` runs Python code or holds much data, neither of which can be sent to
            other processes; or if TensorFlow's op determinism is enabled.

    Example:
        >>> counted = lambda epoch, first, stride: tf.data.Dataset.range(first, 5, stride)
        >>> epoch, first = tf.constant(0, tf.int64), tf.constant(2, tf.int64)
        >>> position = tf.data.Dataset.from_tensors((epoch, first))
        >>> port = serve("127.0.0.1:0", tempfile.mkdtemp())
        >>> five = distribute(counted, position, [f"127.0.0.1:{port}"], steps=5, name="five")
        >>> [int(n) for n in five]
        [2, 3, 4]
    """
    if ops_are_deterministic():
        # With op determinism, TensorFlow rejects datasets that return elements as they become
        # ready, and breaks datasets that it rewrites for another process.
        raise ValueError(
            f"service: data workers cannot run the data pipeline of {name} after "
            "tf.config.experimental.enable_op_determinism(). The order of its examples is "
            f"deterministic without that call: remove the call, or {_WITHOUT}."
        )
    spec = check_portable(make, name)
    count = len(addresses)
    state = _status_variable(tuple(addresses))

    @plain
    def one_pass(epoch, first):
        def read(_):
            parts = [_remote(make(epoch, first + k, count), addresses[k]) for k in range(count)]
            if count > 1:
                turns = tf.data.Dataset.range(count).repeat()
                parts = [
                    tf.data.Dataset.choose_from_datasets(parts, turns, stop_on_empty_dataset=True)
                ]
            result = tf.data.Dataset.zip((tf.data.Dataset.counter(), parts[0])).map(
                plain(lambda n, part: _check_number(n, part, count))
            )
            return result if steps is None else result.take(tf.maximum(steps - first, 0))

        # Registering and reading block without limit. So both begin only when all data workers have
        # answered, and race with the thread that checks them.
        steps_of_pass = tf.data.Dataset.from_tensors(0).flat_map(plain(read))
        workers_ready = _status_ticks(state).filter(lambda status: status == "").take(1)
        return workers_ready.flat_map(
            plain(lambda _: _fail_when_absent(steps_of_pass, spec, state))
        )

    return position.flat_map(one_pass)


def check_portable(make: Make, name: str) -> Any:
    """Check that another process can run a data pipeline.

    Args:
        make: Function that makes the datasets, see `distribute`.
        name: Name of the source, for messages.

    Returns:
        The spec of the elements.

    Raises:
        ValueError: If a part of the data pipeline works only in this process; the message names it.
    """
    zero = tf.constant(0, tf.int64)
    with tf.device("CPU"):
        dataset = make(zero, zero, 1)
        size = held_bytes(dataset)
        try:
            graph = graph_of(dataset) if size <= MAX_BYTES else b""
        except tf.errors.OpError as error:
            raise ValueError(
                f"service: the data pipeline of {name} cannot be sent to data workers: "
                f"{error.message}. To read without them, {_WITHOUT}."
            ) from error
    size = max(size, len(graph))
    if size > MAX_BYTES:
        raise ValueError(
            f"service: the data pipeline of {name} holds {format_bytes(size, binary=True)} of "
            "data, which would be sent to every data worker in every pass; at most "
            f"{format_bytes(MAX_BYTES, binary=True)} are allowed. Read the examples from files, or "
            f"{_WITHOUT}."
        )
    bound = bound_to_process(graph)
    if bound:
        raise ValueError(
            f"service: the data pipeline of {name} {bound}, which data workers do not have. Write "
            f"it with TensorFlow operations, apply it in the model, or {_WITHOUT}."
        )
    return dataset.element_spec


def serve(address: str, directory: str) -> int:
    """Start a data worker in this process; it serves until the process ends.

    Args:
        address: Address of the data worker, `host:port`; port 0: any free port. TensorFlow listens
            on all interfaces. It sends the elements on a second port, which it tells its clients.
        directory: An empty directory, for the data pipelines of the last minutes.

    Returns:
        The port.

    Raises:
        ValueError: If this machine cannot listen at the address.
    """
    host, port = split_address(address)
    if port:
        check_addresses({"data worker": address}, "data worker", "tfdist.data.service")
    service = tf.data.experimental.service
    # With a directory, the dispatcher keeps no dataset in memory. It deletes none by itself.
    dispatcher = service.DispatchServer(
        service.DispatcherConfig(
            port=port,
            work_dir=directory,
            job_gc_check_interval_ms=FORGET_MS,
            job_gc_timeout_ms=FORGET_MS,
        )
    )
    port = int(dispatcher.target.rpartition(":")[2])
    name = f"[{host}]" if ":" in host else host
    worker = service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=f"{name}:{port}",
            worker_address=f"{name}:%port%",
            heartbeat_interval_ms=FORGET_MS,
        )
    )
    _servers.append((worker, dispatcher))
    return port


def main(argv: Sequence[str]) -> NoReturn:
    """Run `python -m tfdist.data.service HOST:PORT`: a data worker, until a signal ends it.

    Args:
        argv: Command-line arguments after the module's name.

    Raises:
        SystemExit: If the address is wrong: code 78, after a line on standard error.
    """

    def end(number, frame):
        raise KeyboardInterrupt(number)

    try:
        problem = (
            address_problem(argv[0])
            if len(argv) == 1
            else "is missing; write: python -m tfdist.data.service HOST:PORT"
        )
        if problem:
            raise ValueError(f"data worker: address {' '.join(argv)!r} {problem}")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        with tempfile.TemporaryDirectory(
            prefix="tfdist-data-", ignore_cleanup_errors=True
        ) as directory:
            serve(argv[0], directory)
            print(f"data worker: serves at {argv[0]}", flush=True)
            while True:
                time.sleep(KEEP_S / 10)
                _sweep(directory)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(78) from error
    except KeyboardInterrupt as stop:
        # TensorFlow's servers take seconds to end, and have nothing to save.
        _exit(128 + stop.args[0])


def _remote(dataset: tf.data.Dataset, address: str) -> tf.data.Dataset:
    """Return a data worker's elements of a dataset, each with its number."""
    options = tf.data.Options()
    options.deterministic = True
    # A data worker ends its passes one after the other, and the end of each pass would wait for its
    # autotuner thread.
    options.autotune.enabled = False
    numbered = dataset.enumerate().prefetch(PREFETCH_STEPS).with_options(options)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "To make it possible to preserve tf.data options", UserWarning
        )
        return numbered.apply(
            tf.data.experimental.service.distribute(
                tf.data.experimental.service.ShardingPolicy.OFF,
                f"grpc://{address}",
                max_outstanding_requests=PREFETCH_STEPS,
                compression=None,
            )
        )


def _check_number(expected: tf.Tensor, part: tuple[tf.Tensor, Any], count: int) -> Any:
    """Return the element of a part after a check that its number is the expected one."""
    number, element = part
    message = (
        "service: an element from a data worker was lost. Expected element number, received "
        f"number, and index of the data worker, of {count}:"
    )
    valid = tf.debugging.Assert(
        number == expected // count, [message, expected // count, number, expected % count]
    )
    with tf.control_dependencies([valid]):
        return tf.nest.map_structure(tf.identity, element, expand_composites=True)


def _fail_when_absent(data: tf.data.Dataset, spec: Any, state: tf.Tensor) -> tf.data.Dataset:
    """Return a dataset that fails when a data worker is gone, instead of waiting forever."""
    optional = tf.experimental.Optional

    def empty(kind):
        return tf.constant(kind), optional.empty(spec)

    # Dataset.map unpacks a tuple (not a NamedTuple) into arguments.
    whole = type(data.element_spec) is tuple
    steps = data.map(
        plain(lambda *x: (tf.constant(_STEP), optional.from_value(x if whole else x[0])))
    )
    ended = steps.concatenate(tf.data.Dataset.from_tensors(0).map(plain(lambda _: empty(_END))))
    ticks = _status_ticks(state).map(plain(lambda _: empty(_TICK)))
    both = tf.data.Dataset.from_tensors(ended).concatenate(tf.data.Dataset.from_tensors(ticks))
    # Returns whatever is ready first; the steps still keep their order.
    first = both.interleave(
        lambda branch: branch, cycle_length=2, num_parallel_calls=2, deterministic=False
    )
    steps = first.take_while(plain(lambda kind, _: kind != _END)).filter(
        plain(lambda kind, _: kind == _STEP)
    )
    return steps.map(plain(lambda _, step: step.get_value()))


def _status_ticks(state: tf.Tensor) -> tf.data.Dataset:
    """Return a dataset that repeats the verdict on the data workers: "" if all of them answer.

    The dataset raises an error once a data worker is gone.

    It runs no Python code: the deletion of an iterator would wait for the code, and the code for
    the interpreter's lock (the GIL). Nor does it run a function below SleepDataset, which holds its
    own lock while it sleeps: the end of the function would wait for the deletion, and the deletion
    for that lock.
    """
    slow = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.range(tf.int64.max)),
        sleep_microseconds=TICK_US,
        output_types=[tf.int64],
        output_shapes=[[]],
    )

    @plain
    def read_status(_):
        status = tf.raw_ops.ReadVariableOp(resource=state, dtype=tf.string)
        valid = tf.debugging.Assert(tf.reduce_any(status == ["", _ABSENT]), [status])
        with tf.control_dependencies([valid]):
            return tf.identity(status)

    return tf.data.experimental.from_variant(slow, tf.TensorSpec([], tf.int64)).map(read_status)


@functools.cache
def _status_variable(addresses: tuple[str, ...]) -> tf.Tensor:
    """Return a string resource with the verdict on these data workers, updated by a thread.

    See `check_workers` for its values.
    """
    # Not a tf.Variable: a strategy would turn it into one of its own variables.
    with tf.init_scope(), tf.device("CPU"):
        state = tf.raw_ops.VarHandleOp(
            dtype=tf.string, shape=[], shared_name=f"tfdist-data-{uuid.uuid4()}"
        )
        tf.raw_ops.AssignVariableOp(resource=state, value=tf.constant(_ABSENT))
    threading.Thread(target=_keep_checking, args=(addresses, state), daemon=True).start()
    return state


def _keep_checking(addresses: tuple[str, ...], state: tf.Tensor) -> None:
    presences = [Presence(address) for address in addresses]
    previous = _ABSENT
    while True:
        status = check_workers(presences)
        if status != previous:
            if status not in ("", _ABSENT):
                logging.error("%s", status)
            with tf.device("CPU"):
                tf.raw_ops.AssignVariableOp(resource=state, value=tf.constant(status))
            previous = status
        time.sleep(CHECK_S)


def check_workers(presences: Sequence[Presence]) -> str:
    """Return a verdict on data workers after a check of each of them.

    Args:
        presences: A Presence of each data worker.

    Returns:
        "" if all data workers answer, or did so lately; "?" if some have not started yet; else an
        error message.

    Example:
        >>> check_workers([Presence("a:80", probe=lambda address, timeout: True)])
        ''
    """
    status = ""
    for number, presence in enumerate(presences):
        absent_s = presence.absent_seconds()
        if absent_s is None:
            continue
        worker = f"data:{number} at {presence.address}"
        if not presence.seen and absent_s > START_S:
            return (
                f"{worker} never answered, within {START_S:g} s; start it, and let this machine "
                "connect to it"
            )
        if presence.seen and absent_s > RETURN_S:
            return (
                f"{worker} no longer answers, for {RETURN_S:g} s; its log may say why. Training "
                "cannot continue without it"
            )
        if not presence.seen:
            status = _ABSENT
    return status


def _sweep(directory: str) -> None:
    """Delete the data pipelines of passes that began long ago."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.path.getmtime(path) > KEEP_S:
                    os.remove(path)


if __name__ == "__main__":
    main(sys.argv[1:])
