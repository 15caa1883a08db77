"""A cluster's description in a file, TF_CONFIG or code becomes a checked ClusterSpec; no task is contacted.

This is the only reader and writer of TF_CONFIG. Its form:
https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
"""

import dataclasses
import json
import os
import pathlib
import re
import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import yaml

from tfdist.cluster.addresses import Lookup, address_problem, check_addresses, free_ports

JOBS = ("chief", "worker", "ps", "evaluator")
DATA_WORKERS = "TFDIST_DATA_WORKERS"  # the variable with the addresses of input processes, which are in no cluster


class Task(NamedTuple):
    """One process of a cluster, spelled `worker:1`.

    >>> str(Task("worker", 1, "10.0.0.2:2222"))
    'worker:1'
    """

    type: str
    index: int  # type: ignore[assignment]  # tuple.index, which nobody calls on a task
    address: str  # "host:port"; empty for an evaluator that lists none: nobody connects to it

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """The tasks of a cluster and which of them this process is, checked as far as the text alone allows.

    Args:
      jobs: job name (chief, worker, ps, evaluator) -> the address `host:port` of each of its tasks, by index.
      task_type: this process's job; None (default) for a process that is no member, such as a launcher.
      task_index: this process's index in its job, from 0.
      source: where the description came from, for messages; not compared.

    Raises:
      ValueError: an unknown or empty job, a malformed or repeated address, two chiefs or evaluators, a
        cluster in which nobody trains, a task that is not in the cluster.

    >>> spec = ClusterSpec({"worker": ("10.0.0.1:2222", "10.0.0.2:2222")}, "worker", 1)
    >>> str(spec.task), spec.rank, spec.is_chief
    ('worker:1', 1, False)
    """

    jobs: Mapping[str, tuple[str, ...]]
    task_type: str | None = None
    task_index: int | None = None
    source: str = dataclasses.field(default="arguments", compare=False)

    def __post_init__(self):
        object.__setattr__(self, "jobs", _checked_jobs(self.jobs, self.source))
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
        """Describes a cluster on this machine, on ports that are free now.

        Args:
          workers: number of workers, default 1.
          ps: number of parameter servers, default 0.
          chief: whether there is a chief beside the workers, default False.
          evaluator: whether there is an evaluator, default False.
          host: address of this machine, default 127.0.0.1.

        Returns:
          The cluster, without a task: see `for_task`.

        >>> [str(task) for task in ClusterSpec.local(workers=2, ps=1).tasks]
        ['worker:0', 'worker:1', 'ps:0']
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
        """Reads the JSON of TF_CONFIG.

        Args:
          text: `{"cluster": {job: [address, ...]}, "task": {"type": job, "index": i}}`; the evaluator may be
            in "cluster", beside it, or, as is TensorFlow's custom, nowhere.
          source: what to call it in messages.

        Returns:
          The cluster with this task.

        Raises:
          ValueError: no JSON, no cluster, no task, or what `ClusterSpec` refuses.

        >>> text = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
        >>> ClusterSpec.from_tf_config(text).is_chief
        True
        """
        document = _parse(_parse_json, text, source)
        if not document.get("cluster") or not document.get("task"):
            raise ValueError(
                f"{source}: expected 'cluster' with jobs and 'task' with type and index, received {document}"
            )
        return cls._from_document(document, source)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "ClusterSpec | None":
        """Reads the variable TF_CONFIG; None where it is absent, empty or has no cluster (`{}` means: alone).

        >>> ClusterSpec.from_environ({"TF_CONFIG": "{}"}) is None
        True
        """
        text = environ.get("TF_CONFIG", "")
        if not text.strip() or not _parse(_parse_json, text, "TF_CONFIG").get("cluster"):
            return None
        return cls.from_tf_config(text)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], task: str | None = None) -> "ClusterSpec":
        """Reads a YAML or JSON file: jobs with their addresses, plain or below `cluster:` as in TF_CONFIG.

        Args:
          path: the file; `.json` is read as JSON, anything else as YAML.
          task: this process, as `worker:1`; default: the file's `task:`, if it has one.

        Returns:
          The cluster, with a task if one was named.

        Raises:
          ValueError: an unreadable file or what `ClusterSpec` refuses.
        """
        path = pathlib.Path(path)
        source = f"file {path}"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"{source}: cannot be read ({error.strerror}); give the path of a cluster file"
            ) from error
        document = _parse(_parse_json if path.suffix == ".json" else _parse_yaml, text, source)
        if "cluster" not in document:
            document = {"cluster": document}
        spec = cls._from_document(document, source)
        return spec.for_task(*parse_task(task)) if task is not None else spec

    @classmethod
    def _from_document(cls, document: Mapping[str, Any], source: str) -> "ClusterSpec":
        jobs, task = document["cluster"], document.get("task", {})
        if not isinstance(jobs, Mapping) or not isinstance(task, Mapping):
            raise ValueError(
                f"{source}: 'cluster' and 'task' must be mappings, received {jobs!r} and {task!r}"
            )
        if "evaluator" in document:
            jobs = {"evaluator": document["evaluator"], **jobs}
        index = task.get("index")
        if (
            isinstance(index, str) and index.isdigit()
        ):  # TensorFlow reads "1" as 1, so some platforms write it
            index = int(index)
        return cls(jobs, task.get("type"), index, source)

    def for_task(self, task_type: str, task_index: int) -> "ClusterSpec":
        """The same cluster as seen by one of its tasks.

        >>> spec = ClusterSpec({"worker": ("a:2222", "b:2222")}).for_task("worker", 1)
        >>> spec.task.address
        'b:2222'
        """
        return dataclasses.replace(self, task_type=task_type, task_index=task_index)

    def to_tf_config(self) -> str:
        """Writes this task's TF_CONFIG; `from_tf_config` reads back an equal ClusterSpec.

        Raises:
          ValueError: this process is no member: `for_task` first.

        >>> ClusterSpec({"worker": ("a:2222", "b:2222")}, "worker", 1).to_tf_config()
        '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
        """
        if self.task is None:
            raise ValueError(
                f"{self.source}: TF_CONFIG is written for one task; choose it with for_task('worker', 0)"
            )
        # The evaluator goes beside "cluster", where TensorFlow ignores it: ParameterServerStrategy connects
        # to every task in "cluster" (tensorflow/python/eager/remote.py) and would wait for an evaluator,
        # which serves nobody.
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
        """Sets TF_CONFIG for this task in `environ`."""
        environ["TF_CONFIG"] = self.to_tf_config()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks: chief, workers, parameter servers, evaluator."""
        return tuple(
            Task(job, i, address) for job in self.jobs for i, address in enumerate(self.jobs[job])
        )

    @property
    def task(self) -> Task | None:
        """This process; None if it is no member."""
        if self.task_type is None or self.task_index is None:
            return None
        addresses = self.jobs.get(self.task_type)
        return Task(
            self.task_type, self.task_index, addresses[self.task_index] if addresses else ""
        )

    @property
    def training_tasks(self) -> tuple[Task, ...]:
        """Chief, then workers, in rank order: those that train synchronously."""
        return tuple(task for task in self.tasks if task.type in ("chief", "worker"))

    @property
    def listening_tasks(self) -> tuple[Task, ...]:
        """Those that others connect to: all but the evaluator."""
        return tuple(task for task in self.tasks if task.type != "evaluator")

    @property
    def rank(self) -> int:
        """This task's place among `training_tasks`; ValueError for a process that is none of them."""
        if self.task not in self.training_tasks:
            raise ValueError(
                f"{self.source}: {self.task or 'a process outside the cluster'} has no rank: no training task"
            )
        return self.training_tasks.index(self.task)

    @property
    def is_chief(self) -> bool:
        """Whether this task writes checkpoints and logs: the chief, or worker 0 where there is none."""
        return self.task is not None and self.task == self.training_tasks[0]

    def check_host(self, resolve: Lookup = socket.getaddrinfo) -> None:
        """Checks what this machine alone can know: names, own address, own port.

        Args:
          resolve: looks a name up; default `socket.getaddrinfo`.

        Raises:
          ValueError: this task's address is not of this machine or its port is taken; two tasks have one
            address; some addresses are loopback, others are not. Each names the task, the address and the
            remedy.
          UnresolvedAddress: a ValueError that names the tasks whose host has no address (yet).

        >>> spec = ClusterSpec.local(workers=2)
        >>> spec.for_task("worker", 0).check_host()
        """
        listening = {str(task): task.address for task in self.listening_tasks}
        check_addresses(listening, str(self.task) if self.task else None, self.source, resolve)


def parse_task(text: str) -> tuple[str, int]:
    """Reads `worker:1`.

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
    """Reads the variable TFDIST_DATA_WORKERS: `host:port` of each process that reads data for the tasks, with commas between.

    Raises:
      ValueError: a malformed or repeated address.

    >>> data_workers({"TFDIST_DATA_WORKERS": "127.0.0.1:5050,127.0.0.1:5051"}), data_workers({})
    (('127.0.0.1:5050', '127.0.0.1:5051'), ())
    """
    addresses = tuple(
        word.strip() for word in environ.get(DATA_WORKERS, "").split(",") if word.strip()
    )
    for place, address in enumerate(addresses):
        problem = address_problem(address) or (
            "is there twice" if addresses.index(address) < place else None
        )
        if problem:
            raise ValueError(f"{DATA_WORKERS}: data:{place}: address {address!r} {problem}")
    return addresses


def _parse(parser: Callable[[str], Any], text: str, source: str) -> dict[str, Any]:
    try:
        document = parser(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{source}: cannot be parsed: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(
            f"{source}: expected a mapping of jobs to addresses, received {document!r}"
        )
    return document


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, _UniqueKeyLoader)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a repeated job is an error instead of the last one's silent victory."""

    def construct_mapping(self, node, deep=False):
        return _unique(
            [
                (self.construct_object(key), self.construct_object(value, True))
                for key, value in node.value
            ]
        )


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} appears twice; list all its addresses under one")
    return dict(pairs)


def _checked_jobs(jobs: Mapping[str, Any], source: str) -> dict[str, tuple[str, ...]]:
    for job, addresses in jobs.items():
        place = f"{source}: job {job!r}"
        if job == "master":
            raise ValueError(f"{place}: a TensorFlow 1 name; rename it to 'chief'")
        if job not in JOBS:
            raise ValueError(f"{place}: unknown; jobs are {', '.join(JOBS)}")
        if isinstance(addresses, Mapping):
            raise ValueError(
                f"{place}: is sparse (index: address); list the address of every task, by index"
            )
        if not isinstance(addresses, (list, tuple)):
            raise ValueError(f"{place}: expected a list of addresses, received {addresses!r}")
        if not addresses:
            raise ValueError(
                f"{place}: addresses are missing; list one host:port per task or remove the job"
            )
        if job in ("chief", "evaluator") and len(addresses) > 1:
            raise ValueError(
                f"{place}: has {len(addresses)} tasks, at most one is possible; make the others workers"
            )
    owners: dict[str, str] = {}
    for job in jobs:
        for i, address in enumerate(jobs[job]):
            problem = address_problem(address)
            if problem:
                raise ValueError(f"{source}: {job}:{i}: address {address!r} {problem}")
            if address.lower() in owners:
                raise ValueError(
                    f"{source}: {job}:{i} has the duplicate address {address} of {owners[address.lower()]}; "
                    "give each task its own port"
                )
            owners[address.lower()] = f"{job}:{i}"
    if not jobs.keys() & {"chief", "worker"}:
        raise ValueError(
            f"{source}: nobody trains: no chief or worker among the jobs {list(jobs)}; add a worker"
        )
    return {job: tuple(jobs[job]) for job in JOBS if job in jobs}


def _check_task(
    jobs: Mapping[str, tuple[str, ...]], task_type: Any, index: Any, source: str
) -> None:
    if task_type is None and index is None:
        return
    place = f"{source}: task {task_type}:{index}"
    if task_type is None:
        raise ValueError(f"{place}: its type is missing; name one of {', '.join(jobs)}")
    if task_type == "master":
        raise ValueError(f"{place}: 'master' is a TensorFlow 1 name; use 'chief'")
    if task_type not in (*jobs, "evaluator"):
        raise ValueError(f"{place}: unknown task type; the cluster has the jobs {', '.join(jobs)}")
    if not isinstance(index, int) or isinstance(index, bool):
        raise ValueError(f"{place}: its index is missing or no integer; give 0, 1, ...")
    count = len(jobs.get(task_type, [""]))  # an evaluator may be left out of the cluster
    if not 0 <= index < count:
        raise ValueError(
            f"{place}: index out of range; job {task_type!r} has {count} tasks, 0 to {count - 1}"
        )
