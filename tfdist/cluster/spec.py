"""Cluster specification: the validated tasks of a cluster, from a file, TF_CONFIG or code.

This module is the only reader and writer of TF_CONFIG, whose format is documented at
https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
"""

import dataclasses
import json
import os
import pathlib
import re
import socket
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

from tfdist.cluster.addresses import Lookup, address_problem, check_addresses, free_ports
from tfdist.runtime.yaml_files import parse_yaml

JOBS = ("chief", "worker", "ps", "evaluator")
# Variable with the addresses of data workers, which are not part of the cluster.
DATA_WORKERS = "TFDIST_DATA_WORKERS"


class Task(NamedTuple):
    """One process of a cluster, written as `worker:1`.

    Example:
        >>> str(Task("worker", 1, "10.0.0.2:2222"))
        'worker:1'
    """

    type: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which no code calls
    address: str  # "host:port"; "" for an evaluator without one: no task connects to it

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """The tasks of a cluster and the task of this process, validated without network access.

    Args:
        jobs: Mapping from job name (chief, worker, ps, evaluator) to the addresses `host:port` of
            its tasks, by index.
        task_type: Job of this process; None (default) for a process that is not a member, such as a
            launcher.
        task_index: Index of this process in its job, from 0.
        source: Origin of the description, for messages; ignored in comparisons.

    Raises:
        ValueError: If a job is unknown or empty, an address is malformed or repeated, there are two
            chiefs or evaluators, no task trains, or the task is not in the cluster.

    Example:
        >>> spec = ClusterSpec({"worker": ("10.0.0.1:2222", "10.0.0.2:2222")}, "worker", 1)
        >>> str(spec.task), spec.rank, spec.is_chief
        ('worker:1', 1, False)
    """

    jobs: Mapping[str, tuple[str, ...]]
    task_type: str | None = None
    task_index: int | None = None
    source: str = dataclasses.field(default="arguments", compare=False)

    def __post_init__(self):
        object.__setattr__(self, "jobs", _check_jobs(self.jobs, self.source))
        _check_task(self.jobs, self.task_type, self.task_index, self.source)

    @classmethod
    def local(
        cls,
        workers: int = 1,
        ps: int = 0,
        chief: bool = False,
        evaluator: bool = False,
        host: str = "127.0.0.1",
    ) -> "ClusterSpec":
        """Create a cluster on this machine, on ports that are free now.

        Args:
            workers: Number of workers, default 1.
            ps: Number of parameter servers, default 0.
            chief: Whether to add a chief, default False.
            evaluator: Whether to add an evaluator, default False.
            host: Address of this machine, default 127.0.0.1.

        Returns:
            The cluster, without a task: see `for_task`.

        Example:
            >>> [str(task) for task in ClusterSpec.local(workers=1, ps=1, chief=True).tasks]
            ['chief:0', 'worker:0', 'ps:0']
        """
        counts = {"chief": int(chief), "worker": workers, "ps": ps, "evaluator": int(evaluator)}
        name = f"[{host}]" if ":" in host else host
        addresses = iter([f"{name}:{port}" for port in free_ports(sum(counts.values()), host)])
        return cls(
            {
                job: tuple(next(addresses) for _ in range(count))
                for job, count in counts.items()
                if count
            },
            source="local cluster",
        )

    @classmethod
    def from_tf_config(cls, text: str, source: str = "TF_CONFIG") -> "ClusterSpec":
        """Parse the JSON of TF_CONFIG.

        Args:
            text: `{"cluster": {job: [address, ...]}, "task": {"type": job, "index": i}}`. The
                evaluator may be in "cluster", beside it or, as is usual in TensorFlow, absent.
            source: Name of the text in messages, default "TF_CONFIG".

        Returns:
            The cluster with this task.

        Raises:
            ValueError: If the text is not JSON, has no cluster or no task, or if `ClusterSpec`
                refuses it.

        Example:
            >>> text = (
            ...     '{"cluster": {"worker": ["a:2222", "b:2222"]}, '
            ...     '"task": {"type": "worker", "index": 0}}'
            ... )
            >>> ClusterSpec.from_tf_config(text).is_chief
            True
        """
        document = _parse(_parse_json, text, source)
        if not document.get("cluster") or not document.get("task"):
            raise ValueError(
                f"{source}: expected 'cluster' with jobs and 'task' with type and index, received "
                f"{document}"
            )
        return cls._from_document(document, source)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "ClusterSpec | None":
        """Read the variable TF_CONFIG.

        Returns:
            The cluster with this task; None if the variable is absent, empty or has no cluster
            (`{}` means: this machine alone).

        Example:
            >>> ClusterSpec.from_environ({"TF_CONFIG": "{}"}) is None
            True
        """
        text = environ.get("TF_CONFIG", "")
        if not text.strip() or not _parse(_parse_json, text, "TF_CONFIG").get("cluster"):
            return None
        return cls.from_tf_config(text)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], task: str | None = None) -> "ClusterSpec":
        """Read a YAML or JSON file: jobs with their addresses, plain or below `cluster:`.

        The form with `cluster:` is the one of TF_CONFIG.

        Args:
            path: Path of the file; `.json` is read as JSON, any other suffix as YAML.
            task: Task of this process, such as `worker:1`; default the file's `task:`, if it has
                one.

        Returns:
            The cluster, with a task if one was named.

        Raises:
            ValueError: If the file cannot be read, or if `ClusterSpec` refuses its content.
        """
        path = pathlib.Path(path)
        source = f"file {path}"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{source}: cannot be read ({getattr(error, 'strerror', None) or error}); give the "
                "path of a cluster file"
            ) from error
        document = _parse(_parse_json if path.suffix == ".json" else parse_yaml, text, source)
        if "cluster" not in document:
            document = {"cluster": document}
        spec = cls._from_document(document, source)
        return spec.for_task(*parse_task(task)) if task is not None else spec

    @classmethod
    def _from_document(cls, document: Mapping[str, Any], source: str) -> "ClusterSpec":
        jobs = document["cluster"]
        task = document.get("task", {})
        if not isinstance(jobs, Mapping) or not isinstance(task, Mapping):
            raise ValueError(
                f"{source}: 'cluster' and 'task' must be mappings, received {jobs!r} and {task!r}"
            )
        if "evaluator" in document:
            jobs = {"evaluator": document["evaluator"], **jobs}
        index = task.get("index")
        # Some platforms write "1", because TensorFlow reads it as 1.
        if isinstance(index, str) and index.isdigit():
            index = int(index)
        return cls(jobs, task.get("type"), index, source)

    def for_task(self, task_type: str, task_index: int) -> "ClusterSpec":
        """Return the same cluster with this process's task set.

        Example:
            >>> spec = ClusterSpec({"worker": ("a:2222", "b:2222")}).for_task("worker", 1)
            >>> spec.task.address
            'b:2222'
        """
        return dataclasses.replace(self, task_type=task_type, task_index=task_index)

    def to_tf_config(self) -> str:
        """Return this task's TF_CONFIG, which `from_tf_config` parses to an equal ClusterSpec.

        Raises:
            ValueError: If this process is not a member of the cluster. Call `for_task` first.

        Example:
            >>> ClusterSpec({"worker": ("a:2222", "b:2222")}, "worker", 1).to_tf_config()
            '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
        """
        if self.task is None:
            raise ValueError(
                f"{self.source}: TF_CONFIG needs the task of this process; choose it with "
                "for_task('worker', 0)"
            )
        # The evaluator goes beside "cluster", where TensorFlow ignores it: ParameterServerStrategy
        # connects to every task in "cluster" (tensorflow/python/eager/remote.py) and would wait for
        # an evaluator, which runs no server.
        document: dict[str, Any] = {
            "cluster": {
                job: list(addresses) for job, addresses in self.jobs.items() if job != "evaluator"
            },
            "task": {"type": self.task_type, "index": self.task_index},
        }
        if "evaluator" in self.jobs:
            document["evaluator"] = list(self.jobs["evaluator"])
        return json.dumps(document)

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set TF_CONFIG for this task in `environ`."""
        environ["TF_CONFIG"] = self.to_tf_config()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks: chief, workers, parameter servers, evaluator."""
        return tuple(
            Task(job, i, address) for job in self.jobs for i, address in enumerate(self.jobs[job])
        )

    @property
    def task(self) -> Task | None:
        """Return the task of this process, or None if it is not a member."""
        if self.task_type is None or self.task_index is None:
            return None
        addresses = self.jobs.get(self.task_type)
        return Task(
            self.task_type, self.task_index, addresses[self.task_index] if addresses else ""
        )

    @property
    def training_tasks(self) -> tuple[Task, ...]:
        """Return the tasks that train synchronously: the chief, then the workers, by rank."""
        return tuple(task for task in self.tasks if task.type in ("chief", "worker"))

    @property
    def listening_tasks(self) -> tuple[Task, ...]:
        """Return the tasks to which others connect: all but the evaluator."""
        return tuple(task for task in self.tasks if task.type != "evaluator")

    @property
    def rank(self) -> int:
        """Return this task's position among `training_tasks`.

        Raises:
            ValueError: If this process is not a training task.
        """
        if self.task not in self.training_tasks:
            raise ValueError(
                f"{self.source}: {self.task or 'a process outside the cluster'} has no rank, "
                "because it is not a training task"
            )
        return self.training_tasks.index(self.task)

    @property
    def is_chief(self) -> bool:
        """Return whether this task writes checkpoints and logs.

        This is the chief, or worker 0 in a cluster without a chief.
        """
        return self.task is not None and self.task == self.training_tasks[0]

    def check_host(
        self, resolve: Lookup = socket.getaddrinfo, tasks: Iterable[Task] | None = None
    ) -> None:
        """Check the names, the own address and the own port as far as this machine alone can.

        Args:
            resolve: Function that resolves a name, default `socket.getaddrinfo`.
            tasks: Tasks whose addresses are looked up, default all that listen.

        Raises:
            ValueError: If this task's address is not of this machine or its port is taken, if two
                tasks have one address, or if some addresses are loopback and others are not. The
                message names the task, the address and the remedy.
            UnresolvedAddress: If hosts have no address (yet). It is a ValueError that names their
                tasks.

        Example:
            >>> spec = ClusterSpec.local(workers=2)
            >>> spec.for_task("worker", 0).check_host()
        """
        checked = self.listening_tasks if tasks is None else tasks
        listening = {str(task): task.address for task in checked}
        check_addresses(listening, str(self.task) if self.task else None, self.source, resolve)


def parse_task(text: str) -> tuple[str, int]:
    """Parse a task name such as `worker:1`.

    Args:
        text: Name of a task: its type and its index, with a colon between them.

    Returns:
        The type and the index.

    Raises:
        ValueError: If the text has another form. The message names the types.

    Example:
        >>> parse_task("worker:1")
        ('worker', 1)
    """
    match = re.fullmatch(r"([a-z]+):(\d+)", text)
    if not match:
        raise ValueError(
            f"task {text!r}: expected TYPE:INDEX with a type of {', '.join(JOBS)}, such as worker:1"
        )
    return match[1], int(match[2])


def data_workers(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Read the addresses of the data workers from the variable TFDIST_DATA_WORKERS.

    It has the `host:port` of each process that reads data for the tasks, with commas between them.

    Raises:
        ValueError: If an address is malformed or repeated.

    Example:
        >>> data_workers({"TFDIST_DATA_WORKERS": "127.0.0.1:5050,127.0.0.1:5051"}), data_workers({})
        (('127.0.0.1:5050', '127.0.0.1:5051'), ())
    """
    addresses = tuple(
        word.strip() for word in environ.get(DATA_WORKERS, "").split(",") if word.strip()
    )
    for i, address in enumerate(addresses):
        problem = address_problem(address) or (
            "is there twice" if addresses.index(address) < i else None
        )
        if problem:
            raise ValueError(f"{DATA_WORKERS}: data:{i}: address {address!r} {problem}")
    return addresses


def _parse(parser: Callable[[str], Any], text: str, source: str) -> dict[str, Any]:
    try:
        document = parser(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: cannot be parsed: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(
            f"{source}: expected a mapping of jobs to addresses, received {document!r}"
        )
    return document


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} appears twice; list all its addresses under one")
    return dict(pairs)


def _check_jobs(jobs: Mapping[str, Any], source: str) -> dict[str, tuple[str, ...]]:
    for job, addresses in jobs.items():
        location = f"{source}: job {job!r}"
        if job == "master":
            raise ValueError(f"{location}: a TensorFlow 1 name; rename it to 'chief'")
        if job not in JOBS:
            raise ValueError(f"{location}: unknown; jobs are {', '.join(JOBS)}")
        if isinstance(addresses, Mapping):
            raise ValueError(
                f"{location}: is sparse (index: address); list the address of every task, by index"
            )
        if not isinstance(addresses, (list, tuple)):
            raise ValueError(f"{location}: expected a list of addresses, received {addresses!r}")
        if not addresses:
            raise ValueError(
                f"{location}: addresses are missing; list one host:port per task or remove the job"
            )
        if job in ("chief", "evaluator") and len(addresses) > 1:
            raise ValueError(
                f"{location}: has {len(addresses)} tasks, at most one is possible; make the others "
                "workers"
            )
    owners: dict[str, str] = {}
    for job in jobs:
        for i, address in enumerate(jobs[job]):
            problem = address_problem(address)
            if problem:
                raise ValueError(f"{source}: {job}:{i}: address {address!r} {problem}")
            if address.lower() in owners:
                raise ValueError(
                    f"{source}: {job}:{i} has the duplicate address {address} of "
                    f"{owners[address.lower()]}; give each task its own port"
                )
            owners[address.lower()] = f"{job}:{i}"
    if not jobs.keys() & {"chief", "worker"}:
        raise ValueError(
            f"{source}: expected a chief or worker among the jobs, received {list(jobs)}; add a "
            "worker"
        )
    return {job: tuple(jobs[job]) for job in JOBS if job in jobs}


def _check_task(
    jobs: Mapping[str, tuple[str, ...]], task_type: Any, index: Any, source: str
) -> None:
    if task_type is None and index is None:
        return
    location = f"{source}: task {task_type}:{index}"
    if task_type is None:
        raise ValueError(f"{location}: its type is missing; name one of {', '.join(jobs)}")
    if task_type == "master":
        raise ValueError(f"{location}: 'master' is a TensorFlow 1 name; use 'chief'")
    if task_type not in (*jobs, "evaluator"):
        raise ValueError(
            f"{location}: unknown task type; the cluster has the jobs {', '.join(jobs)}"
        )
    if not isinstance(index, int) or isinstance(index, bool):
        raise ValueError(f"{location}: its index is missing or not an integer; set 0, 1, ...")
    count = len(jobs.get(task_type, [""]))  # an evaluator may be left out of the cluster
    if not 0 <= index < count:
        raise ValueError(
            f"{location}: index out of range; job {task_type!r} has {count} tasks, 0 to {count - 1}"
        )
