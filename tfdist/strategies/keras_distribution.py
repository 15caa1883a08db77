"""`keras.distribution` on TensorFlow: data parallelism, and weights sharded by layouts."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdist import flags, keras_compat
from tfdist.cluster import resolvers
from tfdist.cluster.spec import ClusterSpec
from tfdist.keras_compat import distribution as hooks
from tfdist.keras_compat import scopes
from tfdist.parallel.sharding import layouts
from tfdist.strategies import devices as device_names
from tfdist.strategies.base import ThreadScope
from tfdist.strategies.factory import make_strategy

PAGE = "See docs/keras_distribution.md."
KNOWN = (keras.distribution.DataParallel, keras.distribution.ModelParallel)

log = logging.getLogger("tfdist")
_lock = threading.Lock()
_enabled: list[Backend] = []  # at most one


def enable(devices: device_names.Devices = None) -> None:
    """Make `keras.distribution` work on TensorFlow as it does on JAX.

    Call it before the first use of `keras.distribution`. Then `keras.distribution.initialize`
    connects processes, and models that are made after `set_distribution(...)`, or in
    `distribution.scope()`, train on all devices of the mesh. Layouts of `ModelParallel` shard the
    weights of a model when it is compiled, see `tfdist.parallel.fsdp`. What TensorFlow cannot do is
    an error. With another backend of Keras, this call does nothing: the script can stay the same.

    Args:
        devices: Devices of this process for `keras.distribution.list_devices`, see `make_strategy`.
            On a machine without GPUs, a number makes so many logical CPU devices. None: all GPUs,
            or else all logical CPU devices.

    Raises:
        ValueError: If this machine lacks a device, TensorFlow has started and cannot make it, or a
            second call has other devices.
    """
    if keras.backend.backend() != "tensorflow":
        log.info("tfdist.enable: keras.distribution is that of %s", keras.backend.backend())
        return
    devices = flags.parsed_options().get("devices") if devices is None else devices
    with _lock:
        if not _enabled:
            backend = Backend(devices)
            keras_compat.install()
            hooks.install(backend)
            _enabled.append(backend)
        elif devices is not None and (own := _enabled[0].list_devices()) != _configure(devices):
            raise ValueError(
                f"tfdist.enable: expected the devices of the first call, {', '.join(own)}, "
                f"received {devices!r}; call it once in a process."
            )


class _Here(threading.local):
    """Distribution of a thread, as in Keras."""

    distribution: hooks.Distribution | None = None


class Backend:
    """Backend of `keras.distribution`, see `tfdist.keras_compat.distribution.Backend`.

    Args:
        devices: Devices of this process, see `enable`.
    """

    def __init__(self, devices: device_names.Devices = None):
        self._devices = None if devices is None else _configure(devices)
        self._here = _Here()
        self._scope = ThreadScope("keras.distribution")
        self._lock = threading.RLock()
        self._initialized = False
        self._cluster: ClusterSpec | None = None
        self._workers: Any = None  # the strategy of several processes
        self._of: Any = weakref.WeakKeyDictionary()  # distribution -> strategy
        self._on: Any = weakref.WeakValueDictionary()  # devices -> strategy of this process

    def list_devices(self, device_type: str | None = None) -> list[str]:
        """See `keras.distribution.list_devices`; this does not start TensorFlow."""
        kind = device_type and device_type.lower()
        if self._devices and (kind is None or self._devices[0].startswith(f"{kind}:")):
            devices = self._devices
        elif kind is None:
            devices = _logical("gpu") or _logical("cpu")
        else:
            devices = _logical(kind)
        if self._workers is None:
            return list(devices)
        return [
            f"{device.partition(':')[0]}:{number}"
            for number, device in enumerate(devices * self.num_processes())
        ]

    def get_device_count(self, device_type: str | None = None) -> int:
        """See `keras.distribution.get_device_count`."""
        return len(self.list_devices(device_type))

    def initialize(
        self,
        job_addresses: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> None:
        """See `keras.distribution.initialize`.

        Without `job_addresses`, the cluster comes from the environment, see
        `tfdist.cluster.resolvers.resolve`.

        Raises:
            ValueError: If the arguments are wrong or incomplete, TensorFlow has started, or a
                former call had another cluster.
            TimeoutError: If processes did not appear; the message names them.
        """
        cluster = _cluster(job_addresses, num_processes, process_id)
        with self._lock:
            if self._initialized:
                if cluster == self._cluster:
                    return
                raise ValueError(
                    "keras.distribution.initialize: expected one call in a process, received a "
                    "second one for another cluster."
                )
            if cluster is not None and len(cluster.training_tasks) > 1:
                if keras_compat.runtime_initialized():
                    raise device_names.too_late("a cluster", "keras.distribution.initialize")
                self._workers = make_strategy("multi_worker_mirrored", cluster, self._devices)
            self._cluster = cluster
            self._initialized = True

    def num_processes(self) -> int:
        """Return the number of processes that `initialize` has connected."""
        return 1 if self._workers is None else self._workers.tfdist_engine.placement.workers

    def process_id(self) -> int:
        """Return the number of this process, from 0."""
        return 0 if self._workers is None else self._workers.tfdist_engine.placement.rank

    def current(self) -> hooks.Distribution | None:
        """Return the distribution of this thread."""
        return self._here.distribution

    def change(self, distribution: hooks.Distribution | None) -> None:
        """Distribute what this thread makes from now on; None ends it.

        Raises:
            ValueError: If TensorFlow cannot honour the distribution, or this thread is in the scope
                of a strategy that was entered in another way.
        """
        strategy = self._strategy_of(distribution) if isinstance(distribution, KNOWN) else None
        if strategy is not None or self._scope.current() is not None:
            self._scope.change(strategy)
        if strategy is not None and strategy is self._workers:
            strategy.own_batches = not hooks.shards_data(distribution)
        self._here.distribution = distribution

    def distribute_tensor(self, tensor: Any, layout: Any) -> Any:
        """See `keras.distribution.distribute_tensor`: the rows of a batch are split already.

        Raises:
            ValueError: If the layout splits another axis.
        """
        batch = getattr(self.current(), "batch_dim_name", None)
        if any(layout.axes[1:]) or layout.axes[:1] not in ((), (None,), (batch,)):
            where = hooks.current_path()
            raise ValueError(
                f"layout of {f'the output of {where!r}' if where else 'a tensor'}: expected one "
                f"that splits at most the first axis, by the mesh's axis {batch!r}, received "
                f"{layout.axes}: on TensorFlow, a tensor is on one device, but for the rows of a "
                f"batch. {PAGE}"
            )
        return tensor

    def check_variable(self, variable: keras.Variable, layout: Any) -> None:
        """Check a variable that this thread has made, with a layout of its own or None.

        A variable that a layout of `ModelParallel` splits is sharded when its model is compiled.

        Raises:
            ValueError: If its layout cannot be honoured.
        """
        current = self.current()
        if current is not None:
            if not isinstance(current, KNOWN):
                raise ValueError(
                    "keras.distribution: expected a DataParallel or ModelParallel, received "
                    f"{current}, whose layout of the variable {variable.path!r} would be ignored. "
                    f"{PAGE}"
                )
            layout = layout or current.get_variable_layout(variable)
        if not any(axes := getattr(layout, "axes", (layout,))):
            return
        if not isinstance(current, keras.distribution.ModelParallel):
            raise ValueError(
                f"layout of the variable {variable.path!r}: expected None for all axes, received "
                f"{axes}: each device holds the whole variable. "
                f"Use ModelParallel. {PAGE}"
            )
        layouts.request(variable, axes)

    def _strategy_of(self, distribution: hooks.Distribution) -> tf.distribute.Strategy:
        with self._lock:
            strategy = self._of.get(distribution)
            if strategy is None:
                devices = hooks.devices_of(distribution)
                if self._workers is None:
                    strategy = self._of_this_process(devices)
                else:
                    self._check_processes(distribution, devices)
                    strategy = self._workers
                self._of[distribution] = strategy
            return strategy

    def _of_this_process(self, devices: list[str]) -> tf.distribute.Strategy:
        cluster = None if self._initialized else resolvers.resolve()
        if cluster is not None and len(cluster.training_tasks) > 1:
            raise ValueError(
                f"keras.distribution: {cluster.source} lists {len(cluster.training_tasks)} "
                "processes, which are not connected: each would train alone. Call "
                "keras.distribution.initialize() first, which needs no arguments here."
            )
        strategy = self._on.get(tuple(devices))
        if strategy is None:
            name = "mirrored" if len(devices) > 1 else "one_device"
            strategy = self._on[tuple(devices)] = make_strategy(name, devices=devices)
            # Where no distribution is set, Keras trains on one device.
            scopes.unwatch(strategy)
        return strategy

    def _check_processes(self, distribution: hooks.Distribution, devices: list[str]) -> None:
        expected = self.list_devices()
        if sorted(devices) != sorted(expected):
            raise ValueError(
                f"keras.distribution: expected a mesh of all devices of {self.num_processes()} "
                f"processes, {', '.join(expected)}, received {', '.join(devices)}. Make it after "
                "keras.distribution.initialize()."
            )
        hooks.leave_data_to_engine(distribution)


def _cluster(
    job_addresses: str | None, num_processes: int | None, process_id: int | None
) -> ClusterSpec | None:
    """Return the cluster for the arguments of `initialize`; None for this process alone."""
    where = "keras.distribution.initialize"
    if job_addresses is None:
        cluster = resolvers.resolve()
        source = "the environment" if cluster is None else cluster.source
        if cluster is not None and ("ps" in cluster.jobs or cluster.task_type == "evaluator"):
            raise ValueError(
                f"{where}: expected a cluster in which all processes train, {source} has a "
                f"{'ps' if 'ps' in cluster.jobs else 'task evaluator'}; use tfdist.init()."
            )
        count = 1 if cluster is None else len(cluster.training_tasks)
        rank = 0 if cluster is None else cluster.rank
        for name, given, found in (
            ("num_processes", num_processes, count),
            ("process_id", process_id, rank),
        ):
            if given not in (None, found):
                raise ValueError(
                    f"{where}: {name}: expected {found}, as {source} says, received {given}. Pass "
                    "job_addresses, the addresses of all processes, or start them with `tfdist "
                    "launch`, which needs no arguments here."
                )
        return cluster
    addresses = [address.strip() for address in job_addresses.split(",")]
    if num_processes not in (None, len(addresses)):
        raise ValueError(
            f"{where}: job_addresses: expected the addresses of all {num_processes} processes, "
            f"separated by commas, received {job_addresses!r}. TensorFlow needs all of them; "
            "`tfdist launch` finds them by itself."
        )
    if process_id is None:
        raise ValueError(
            f"{where}: process_id: expected the number of this process, from 0 to "
            f"{len(addresses) - 1}, received None."
        )
    return ClusterSpec({"worker": tuple(addresses)}, "worker", process_id, source=where)


def _configure(devices: device_names.Devices) -> list[str]:
    """Configure devices and return their names as Keras writes them, such as "gpu:0"."""
    return [name.removeprefix("/") for name in device_names.configure(devices, None)]


def _logical(kind: str) -> list[str]:
    """Return the names of this process's devices of a kind, before or after TensorFlow starts."""
    return [f"{kind}:{i}" for i in range(len(device_names.logical_devices(kind.upper())))]
