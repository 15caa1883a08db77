"""Cluster resolvers: read a ClusterSpec from TF_CONFIG or a scheduler's environment.

The first source that describes a cluster is used:

1. the argument `cluster`, a ClusterSpec or the path of a cluster file (with `task`, such as
   `worker:1`);
2. `TF_CONFIG`; `TF_CONFIG={}` means "this machine alone" and ends the search;
3. Open MPI (`mpirun`); it comes before Slurm, whose variables mpirun passes on when it runs in an
   allocation;
4. a Slurm step (`srun`);
5. a Kubernetes indexed Job with a headless service;
6. none of these: this machine alone.

The schedulers 3 to 5 start equal processes, so each process is a worker. These variables configure
tfdist:

- `TFDIST_PORT`: the first port. Default: Slurm's reserved ports if there are enough, or a port from
  20000 on that is derived from the Slurm job or the mpirun; 2222 on Kubernetes, where each pod has
  its own address.
- `TFDIST_HOSTS`: the hosts of an mpirun over several machines, in the form of its `-H`: `a:2,b:2`.
- `TFDIST_K8S_SERVICE`, `TFDIST_K8S_REPLICAS`: the headless service of the Job, and its number of
  pods.

Resolvers write nothing and contact no other machine.
"""

import itertools
import logging
import os
import re
import zlib
from collections.abc import Mapping, Sequence

from tfdist.cluster.spec import ClusterSpec, parse_task
from tfdist.runtime.launch_protocol import ATTEMPT, LAUNCH

__all__ = ["from_kubernetes", "from_open_mpi", "from_slurm", "resolve"]

logger = logging.getLogger("tfdist")

_ALONE = "TF_CONFIG={} runs each process alone"
_FIRST_PORT = 20000  # 20000 to 22399: apart from the ports that `addresses.free_ports` chooses
_PORTS_PER_JOB = 32
_PORT_BLOCKS = 75


def resolve(
    cluster: ClusterSpec | str | os.PathLike[str] | None = None,
    task: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ClusterSpec | None:
    """Resolve the cluster of this process.

    One INFO line (logger "tfdist") tells the source of the cluster.

    Args:
        cluster: ClusterSpec or path of a cluster file; default the cluster that the environment
            describes.
        task: Task of this process, such as `worker:1`; default the task that `cluster` or the
            environment names.
        environ: Environment variables, default os.environ.

    Returns:
        The cluster, or None for this machine alone.

    Raises:
        ValueError: If a description is incomplete or contradicts itself, or if there is a `task`
            without a cluster.

    Example:
        >>> resolve(environ={}) is None
        True
        >>> str(resolve(environ={"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
        ...     "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).task)
        'worker:1'
    """
    if isinstance(cluster, ClusterSpec):
        spec: ClusterSpec | None = cluster
    elif cluster is not None:
        spec = ClusterSpec.from_file(cluster)
    elif environ.get("TF_CONFIG"):
        spec = ClusterSpec.from_environ(environ)
    else:
        readers = (from_open_mpi, from_slurm, from_kubernetes)
        spec = next(filter(None, (reader(environ) for reader in readers)), None)
    if task is not None:
        if spec is None:
            raise ValueError(
                f"task {task!r}: expected a cluster that has this task, found no cluster; "
                "describe it in a file or in TF_CONFIG"
            )
        spec = spec.for_task(*parse_task(task))
    logger.info("cluster: %s", _summary(spec))
    return spec


def attempt(environ: Mapping[str, str] = os.environ) -> str:
    """Return the number of the job's start that `tfdist launch` has set, or `0`.

    Example:
        >>> attempt({"TFDIST_ATTEMPT": "2"})
        '2'
    """
    return environ.get(ATTEMPT, "0")


def job_of(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the name of the scheduler's job and the number of its start, from 0.

    The name is equal in all starts of a job, and "" if no scheduler is known. Kubernetes does not
    number the starts of a Job; a JobSet does, and its manifest must pass the number on as
    JOBSET_RESTART_ATTEMPT.

    Args:
        environ: Environment variables of one task.

    Example:
        >>> job_of({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"})
        ('slurm-7.0', 2)
    """
    if environ.get(ATTEMPT):
        return environ.get(LAUNCH, ""), _integer(environ, ATTEMPT)
    if "SLURM_JOB_ID" in environ:
        job = f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
        return job, _integer(environ, "SLURM_RESTART_COUNT", 0)
    if "JOB_COMPLETION_INDEX" in environ:
        pod = environ.get("HOSTNAME", "").partition(".")[0]
        name = pod.removesuffix(f"-{environ['JOB_COMPLETION_INDEX']}")
        # Another job may have the same name later, and begins with start 0.
        job = f"kubernetes-{environ.get('TFDIST_K8S_JOB_UID') or name}"
        return job, _integer(environ, "JOBSET_RESTART_ATTEMPT", 0)
    if "PMIX_NAMESPACE" in environ:
        return f"mpi-{environ['PMIX_NAMESPACE'].replace('/', '-')}", 0
    return "", 0


def from_slurm(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read the environment of a step that `srun` started: rank i is worker i.

    Hosts are Slurm's node names in Slurm's order, so they must resolve. Block, cyclic and plane
    distributions are supported, and arbitrary ones whose SLURM_HOSTFILE this task can read. A step
    over several components of a heterogeneous job (`srun --het-group=0,1`) is one cluster; its
    distribution must be block. Ports start at `TFDIST_PORT`, if it is set; else they are those of
    `srun --resv-ports=N`; else they start at 20000 + 32 * ((7 * job + step) mod 75). Each rank has
    its own port; if fewer are reserved, each task of a node has its own port.

    Args:
        environ: Environment variables of one task of the step.

    Returns:
        The cluster; None outside a step, in the shell of sbatch or salloc, and in a step of one
        task.

    Raises:
        ValueError: If the distribution is unknown, too few ports are reserved, or variables
            contradict each other.

    Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES

    Example:
        >>> spec = from_slurm({"SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
        ...     "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[9-10]",
        ...     "SLURM_STEP_TASKS_PER_NODE": "2,1", "TFDIST_PORT": "2222"})
        >>> spec.jobs["worker"]
        ('n9:2222', 'n9:2223', 'n10:2224')
    """
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    size = _integer(environ, "SLURM_STEP_NUM_TASKS")
    if size < 2:
        return None
    hosts = expand_hostlist(_text(environ, "SLURM_STEP_NODELIST"))
    per_node = _expand_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if len(per_node) != len(hosts) or sum(per_node) != size:
        raise ValueError(
            f"Slurm: {len(hosts)} nodes in SLURM_STEP_NODELIST, {len(per_node)} in "
            f"SLURM_STEP_TASKS_PER_NODE with {sum(per_node)} tasks, {size} in "
            "SLURM_STEP_NUM_TASKS; start the tasks by srun"
        )
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        positions = _hostfile_positions(environ, hosts)
    else:
        components = _nodes_of_components(environ, hosts)
        # srun chooses a distribution for each component, and gives a task now that of its own
        # component, now that of another: all tasks take block, and the check below finds others.
        chunk = _slurm_chunk(environ) if len(components) == 1 else size
        positions = []
        first = 0
        for count in components:
            counts = per_node[first : first + count]
            positions += [(first + node, local) for node, local in _rank_positions(counts, chunk)]
            first += count
    rank, node, local = (
        _integer(environ, f"SLURM_{name}") for name in ("PROCID", "NODEID", "LOCALID")
    )
    if len(positions) < size or rank >= size or positions[rank] != (node, local):
        raise ValueError(
            f"Slurm: SLURM_PROCID {rank} is task {local} of node {node}, but SLURM_DISTRIBUTION "
            f"{environ.get('SLURM_DISTRIBUTION')!r} puts it elsewhere; use srun "
            "--distribution=block"
        )
    if "TFDIST_PORT" not in environ and "SLURM_STEP_RESV_PORTS" in environ:
        ports: Sequence[int] = _expand_ports(environ["SLURM_STEP_RESV_PORTS"])
        if len(ports) < max(per_node):
            raise ValueError(
                f"Slurm: SLURM_STEP_RESV_PORTS has {len(ports)} ports for {max(per_node)} tasks "
                f"on a node; use srun --resv-ports={max(per_node)} or set TFDIST_PORT"
            )
    else:
        step = 7 * _integer(environ, "SLURM_JOB_ID", 0) + _integer(environ, "SLURM_STEP_ID", 0)
        ports = _ports(environ, size, step)
    source = f"Slurm step {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    return _workers(hosts, positions, ports, rank, source)


def from_open_mpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read the environment of a process that Open MPI's `mpirun` started: rank i is worker i.

    Open MPI tells a process its rank but not the other hosts. Over several hosts, pass mpirun's
    `-H` list on: `mpirun -H a:2,b:2 -x TFDIST_HOSTS=a:2,b:2 --map-by slot ...`. On one machine
    nothing is needed.

    Args:
        environ: Environment variables of one process.

    Returns:
        The cluster; None outside mpirun and in an mpirun of one process.

    Raises:
        ValueError: If there are several hosts without TFDIST_HOSTS, too few slots, or ranks that do
            not fill the hosts in order.

    Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html

    Example:
        >>> spec = from_open_mpi({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
        ...     "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        ...     "TFDIST_PORT": "2222", "TFDIST_HOSTS": "a,b"})
        >>> spec.jobs["worker"]
        ('a:2222', 'b:2223')
    """
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local, local_size = (_integer(environ, f"OMPI_COMM_WORLD_{name}") for name in names)
    if size < 2:
        return None
    if "TFDIST_HOSTS" in environ:
        hosts, slots = _expand_slots(environ["TFDIST_HOSTS"])
    elif local_size == size:
        hosts = ["127.0.0.1"]
        slots = [size]
    else:
        raise ValueError(
            f"Open MPI: TFDIST_HOSTS is missing: mpirun does not tell its {size} processes their "
            "hosts; add -x TFDIST_HOSTS=HOST:SLOTS,... with the list of its -H or hostfile "
            f"({_ALONE})"
        )
    positions = _rank_positions(slots, size)[:size]
    if len(positions) < size:
        raise ValueError(
            f"Open MPI: TFDIST_HOSTS has {len(positions)} slots for {size} processes; write "
            "HOST:SLOTS for each"
        )
    if rank >= size or positions[rank][1] != local:
        raise ValueError(
            f"Open MPI: rank {rank} is process {local} of its host, expected another from "
            f"TFDIST_HOSTS={environ.get('TFDIST_HOSTS')}; give mpirun the same hosts in the same "
            "order, and --map-by slot"
        )
    ports = _ports(environ, size, zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode()))
    return _workers(hosts, positions, ports, rank, "Open MPI")


def from_kubernetes(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read the environment of a pod of an indexed Job: completion index i is worker i.

    Such a pod's host name is JOB-INDEX. `spec.template.spec.subdomain: SERVICE` makes
    JOB-INDEX.SERVICE its DNS name, once a headless Service (`clusterIP: None`) selects the Job's
    pods. Give the Service `publishNotReadyAddresses: true`, so that pods find each other before
    they are ready. The container's `env` must set TFDIST_K8S_SERVICE to the Service's name and
    TFDIST_K8S_REPLICAS to the Job's `completions` (equal to its `parallelism`).

    Args:
        environ: Environment variables of one pod.

    Returns:
        The cluster; None outside an indexed Job and in a Job of a single pod.

    Raises:
        ValueError: If a variable is missing, or the host name is not JOB-INDEX.

    Source: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/

    Example:
        >>> spec = from_kubernetes({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "digits-1",
        ...     "TFDIST_K8S_SERVICE": "net", "TFDIST_K8S_REPLICAS": "2"})
        >>> spec.jobs["worker"]
        ('digits-0.net:2222', 'digits-1.net:2222')
    """
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    index = _integer(environ, "JOB_COMPLETION_INDEX")
    remedy = f"set it in the container's env ({_ALONE})"
    replicas = _integer(environ, "TFDIST_K8S_REPLICAS", remedy=remedy)
    if replicas < 2:
        return None
    service = _text(environ, "TFDIST_K8S_SERVICE", remedy)
    # Under setHostnameAsFQDN, HOSTNAME is the whole DNS name.
    pod = _text(environ, "HOSTNAME").partition(".")[0]
    job = pod.removesuffix(f"-{index}")
    if job == pod:
        raise ValueError(
            f"Kubernetes: HOSTNAME {pod!r} does not end in -{index}, the JOB_COMPLETION_INDEX; "
            "use completionMode: Indexed, without hostname or hostNetwork in the pod's spec"
        )
    hosts = [f"{job}-{i}.{service}" for i in range(replicas)]
    port = _integer(environ, "TFDIST_PORT", 2222)
    return _workers(
        hosts, [(i, 0) for i in range(replicas)], [port], index, f"Kubernetes job {job}"
    )


def expand_hostlist(hostlist: str) -> list[str]:
    """Expand Slurm's bracket notation for hosts, in its order.

    Source: https://slurm.schedmd.com/scontrol.html#OPT_hostnames

    Example:
        >>> expand_hostlist("login,n[2,09-10]-ib")
        ['login', 'n2-ib', 'n09-ib', 'n10-ib']
    """
    hosts = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hostlist):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # text, brackets' content, text, ...
        choices = [_expand_ranges(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def _expand_ranges(text: str) -> list[str]:
    """Expand '2,09-10' to ['2', '09', '10']; the first number's zeros set the width."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError(
                f"Slurm: expected numbers and ranges such as 2,09-10, received {text!r}"
            )
        numbers += [
            str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)
        ]
    return numbers


def _expand_ports(text: str) -> list[int]:
    return [int(port) for port in _expand_ranges(text)]


def _expand_counts(text: str) -> list[int]:
    """Expand '2(x3),1' to [2, 2, 2, 1]."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(
                "Slurm: SLURM_STEP_TASKS_PER_NODE: expected counts such as 2(x3),1, received "
                f"{text!r}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_slots(text: str) -> tuple[list[str], list[int]]:
    """Expand 'a:2,b' to (['a', 'b'], [2, 1])."""
    pairs = [re.fullmatch(r"([^:,\s]+)(?::(\d+))?", part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise ValueError(
            f"Open MPI: TFDIST_HOSTS: expected HOST:SLOTS,... such as a:2,b:2, received {text!r}"
        )
    return [pair[1] for pair in pairs if pair], [int(pair[2] or 1) for pair in pairs if pair]


def _slurm_chunk(environ: Mapping[str, str]) -> int:
    """Return the number of consecutive ranks that Slurm assigns to a node at a time.

    This is the plane size for plane, 1 for cyclic and all ranks for block distributions.
    """
    name = environ.get("SLURM_DISTRIBUTION", "block")
    across_nodes = re.split("[:,]", name)[0]  # the rest concerns sockets and cores
    if across_nodes == "plane":
        return max(_integer(environ, "SLURM_DIST_PLANESIZE"), 1)
    if across_nodes in ("block", "cyclic"):
        return 1 if across_nodes == "cyclic" else _integer(environ, "SLURM_STEP_NUM_TASKS")
    raise ValueError(
        f"Slurm: SLURM_DISTRIBUTION {name!r} is not known; use srun --distribution=block, cyclic "
        "or plane=N"
    )


def _nodes_of_components(environ: Mapping[str, str], hosts: Sequence[str]) -> list[int]:
    """Return how many nodes of a step each component of a heterogeneous job has.

    Slurm numbers nodes and ranks of a step component by component.
    """
    counts = []
    for component in range(_integer(environ, "SLURM_HET_SIZE", 0)):
        nodes = expand_hostlist(environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}", ""))
        counts.append(len(set(nodes) & set(hosts)))
    return counts if sum(counts) == len(hosts) else [len(hosts)]


def _hostfile_positions(environ: Mapping[str, str], hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return (node, local index) of each rank of an arbitrary distribution.

    Rank i is on the host of line i of SLURM_HOSTFILE. The environment of a task has no other record
    of it.
    """
    remedy = "set SLURM_HOSTFILE to a file that all nodes can read, or use --distribution=block"
    path = environ.get("SLURM_HOSTFILE")
    if not path:
        raise ValueError(
            f"Slurm: --distribution=arbitrary without SLURM_HOSTFILE does not tell tasks where the "
            f"others run; {remedy}"
        )
    try:
        with open(path, encoding="utf-8") as file:
            lines = [host for line in file for host in expand_hostlist(line.strip())]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Slurm: SLURM_HOSTFILE {path!r} cannot be read here: {error}") from error
    unknown = [host for host in lines if host not in hosts]
    if unknown:
        raise ValueError(
            f"Slurm: SLURM_HOSTFILE {path!r} lists {unknown[0]!r}, which is not a node of the "
            f"step; {remedy}"
        )
    return [(hosts.index(host), lines[:rank].count(host)) for rank, host in enumerate(lines)]


def _rank_positions(per_node: Sequence[int], chunk: int) -> list[tuple[int, int]]:
    """Return (node, local index) of each rank; nodes take `chunk` ranks in turn until full."""
    positions: list[tuple[int, int]] = []
    used = [0] * len(per_node)
    while len(positions) < sum(per_node):
        for node, count in enumerate(per_node):
            taken = min(chunk, count - used[node])
            positions += [(node, used[node] + i) for i in range(taken)]
            used[node] += taken
    return positions


def _ports(environ: Mapping[str, str], count: int, key: int) -> range:
    blocks = max(1, _PORT_BLOCKS - (count - 1) // _PORTS_PER_JOB)  # that leave room for the count
    first = _integer(environ, "TFDIST_PORT", _FIRST_PORT + _PORTS_PER_JOB * (key % blocks))
    return range(first, first + count)


def _workers(
    hosts: Sequence[str],
    positions: Sequence[tuple[int, int]],
    ports: Sequence[int],
    rank: int,
    source: str,
) -> ClusterSpec:
    # With enough ports, use one per rank: then nodes that share one machine (test clusters) do not
    # collide.
    by_rank = len(ports) >= len(positions)
    addresses = [
        f"{hosts[node]}:{ports[i if by_rank else local]}"
        for i, (node, local) in enumerate(positions)
    ]
    return ClusterSpec({"worker": tuple(addresses)}, "worker", rank, source)


def _text(environ: Mapping[str, str], name: str, remedy: str = "set it") -> str:
    if not environ.get(name):
        raise ValueError(f"environment: {name} is missing; {remedy}")
    return environ[name]


def _integer(
    environ: Mapping[str, str], name: str, default: int | None = None, remedy: str = "set it"
) -> int:
    if default is not None and name not in environ:
        return default
    text = _text(environ, name, remedy)
    if not text.isdigit():
        raise ValueError(f"environment: {name}: expected a number from 0, received {text!r}")
    return int(text)


def _summary(spec: ClusterSpec | None) -> str:
    if spec is None:
        return "none; this process runs alone"
    counts = " + ".join(f"{len(addresses)} {job}" for job, addresses in spec.jobs.items())
    this_task = f"{spec.task} at {spec.task.address}" if spec.task else "not a member"
    return f"{counts} from {spec.source}; this process is {this_task}"
