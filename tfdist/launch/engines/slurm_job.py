"""Job of Slurm: its state, its nodes, and the places that they have for tasks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from tfdist.cluster.resolvers import expand_hostlist
from tfdist.launch.engines import slurm_commands

FINAL_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of a job.

    Attributes:
        name: Name of the node, at which the other nodes reach it.
        slots: Number of tasks that the job may run there.
        cpus: Number of cores that the job has there.
        component: Number of the component of a heterogeneous job that the node belongs to; 0 in
            other jobs.
    """

    name: str
    slots: int
    cpus: int
    component: int = 0


@dataclasses.dataclass(frozen=True)
class Job:
    """A job of Slurm.

    Attributes:
        id: Number of the job.
        state: State, such as "RUNNING".
        reason: Why it is pending; "None" if it is not.
        is_batch: Whether it runs a batch script, which Slurm can start again.
        tasks: Number of tasks that it asked for.
        nodes: Its nodes, in Slurm's order.
        output: File of the batch script's output; "" if there is none.
        quotas: Number of tasks that each component of a heterogeneous job asked for; empty for
            other jobs.
    """

    id: str
    state: str
    reason: str = "None"
    is_batch: bool = False
    tasks: int = 0
    nodes: tuple[Node, ...] = ()
    output: str = ""
    quotas: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """Return the number of tasks for which the job has places."""
        if not self.quotas:
            return sum(node.slots for node in self.nodes)
        return sum(
            min(quota, sum(node.slots for node in self.nodes if node.component == component))
            for component, quota in enumerate(self.quotas)
        )


def find(job: str) -> Job:
    """Return what Slurm knows of a job.

    Args:
        job: Number of the job.

    Raises:
        ValueError: If Slurm does not know the job.
        NoRoom: If Slurm's controller does not answer.
    """
    return select(slurm_commands.run("scontrol", "-o", "-d", "show", "job", job), job)


def select(text: str, job: str) -> Job:
    r"""Return a job from what Slurm prints for its number.

    These are the lines of all components of a heterogeneous job, or of all tasks of an array, whose
    last task has the number of the array.

    Example:
        >>> one = "JobId=7 HetJobId=7 HetJobOffset=0 JobState=RUNNING NodeList=a NumTasks=2"
        >>> two = "JobId=8 HetJobId=7 HetJobOffset=1 JobState=PENDING NodeList=b NumTasks=1"
        >>> job = select(f"{one}\n{two}\n", "7")
        >>> job.id, job.state, job.tasks, job.quotas, [node.component for node in job.nodes]
        ('7', 'PENDING', 3, (2, 1), [0, 1])
        >>> select("JobId=9 ArrayJobId=8 NumTasks=1\nJobId=8 ArrayJobId=8 NumTasks=2\n", "8").tasks
        2
    """
    lines = text.strip().splitlines() or [""]
    if " HetJobId=" not in lines[0]:
        own = (line for line in lines if line.startswith(f"JobId={job} "))
        return parse(next(own, lines[0]))
    components = [
        parse(line, int(offset[1]) if (offset := re.search(r" HetJobOffset=(\d+)", line)) else 0)
        for line in lines
    ]
    first = components[0]
    others = (each for each in components if each.state != "RUNNING")
    return dataclasses.replace(
        first,
        state=next(others, first).state,
        tasks=sum(each.tasks for each in components),
        nodes=tuple(node for each in components for node in each.nodes),
        quotas=tuple(each.tasks for each in components),
    )


def parse(text: str, component: int = 0) -> Job:
    """Parse a line that `scontrol -o -d show job` prints.

    Args:
        text: The line.
        component: Number of the component of a heterogeneous job that it describes.

    Example:
        >>> parse(
        ...     "JobId=5 JobName=x JobState=RUNNING Reason=None BatchFlag=1 NodeList=n[9-10] "
        ...     "NumNodes=2 NumTasks=3 CPUs/Task=2 NtasksPerN:B:S:C=0:0:*:* Nodes=n9 CPU_IDs=0-3 "
        ...     "Mem=0 Nodes=n10 CPU_IDs=2,5 Mem=0 StdOut=/x.out "
        ... ).nodes
        (Node(name='n9', slots=2, cpus=4, component=0), \
Node(name='n10', slots=1, cpus=2, component=0))
    """

    def fact(name: str, default: str = "") -> str:
        found = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", text)
        return found[1] if found else default

    def number(name: str) -> int:
        digits = re.match(r"\d+", fact(name))
        return int(digits[0]) if digits else 0

    cpus = {
        node: len(expand_hostlist(f"[{cores}]"))
        for nodes, cores in re.findall(r"\sNodes=(\S+) CPU_IDs=([\d,-]+)", text)
        for node in expand_hostlist(nodes)
    }
    node_list = fact("NodeList")
    names = expand_hostlist(node_list) if node_list not in ("", "(null)") else []
    per_node = number("NtasksPerN:B:S:C")
    per_task = max(1, number("CPUs/Task"))
    output = re.findall(r"\sStdOut=(.*?)(?=\s[A-Z]\w*=|\s*$)", text)
    return Job(
        id=fact("JobId"),
        state=fact("JobState"),
        reason=fact("Reason", "None"),
        is_batch=fact("BatchFlag") not in ("", "0"),
        tasks=number("NumTasks"),
        nodes=tuple(
            Node(
                name,
                per_node or max(1, cpus.get(name, 1) // per_task),
                cpus.get(name, 1),
                component,
            )
            for name in names
        ),
        output=output[-1] if output else "",
    )


def is_down(states: str) -> frozenset[str]:
    r"""Return the nodes that cannot run a task, from the lines "NODE STATE" of `sinfo`.

    Example:
        >>> sorted(is_down("n1 allocated\nn2 down*\nn3 draining\nn4 idle*\n"))
        ['n2', 'n4']
    """
    lines = [line.split() for line in states.splitlines()]
    return frozenset(
        line[0]
        for line in lines
        if len(line) == 2 and (line[1].startswith(("down", "fail")) or line[1].endswith("*"))
    )


def place(
    nodes: Sequence[Node], count: int, avoided: Collection[str] = ()
) -> list[tuple[Node, int]] | None:
    """Spread tasks over nodes.

    Args:
        nodes: The nodes.
        count: Number of tasks.
        avoided: Names of nodes that get tasks only if the others have no place.

    Returns:
        The node of each task and its number there, node by node; None if there are too few places.

    Example:
        >>> one, two = Node("a", 2, 4), Node("b", 2, 4)
        >>> [(node.name, number) for node, number in place([one, two], 3)]
        [('a', 0), ('a', 1), ('b', 0)]
        >>> [(node.name, number) for node, number in place([one, two], 2, avoided={"a"})]
        [('b', 0), ('b', 1)]
        >>> place([one], 3) is None
        True
    """
    if count > sum(node.slots for node in nodes):
        return None
    taken = dict.fromkeys((node.name for node in nodes), 0)
    good = [node for node in nodes if node.name not in avoided]
    for group in (good, [node for node in nodes if node not in good]):
        while count and (free := [node for node in group if taken[node.name] < node.slots]):
            for node in free[:count]:
                taken[node.name] += 1
            count -= len(free[:count])
    return [(node, number) for node in nodes for number in range(taken[node.name])]


def place_in_components(
    nodes: Sequence[Node], quotas: Sequence[int], count: int, avoided: Collection[str] = ()
) -> list[tuple[Node, int]] | None:
    """Spread tasks over the components of a heterogeneous job, and then over their nodes.

    The first tasks get the first component, as many as it asked for, and so on.

    Args:
        nodes: The nodes.
        quotas: Number of tasks of each component.
        count: Number of tasks.
        avoided: Names of nodes that get tasks only if the others have no place.

    Returns:
        See `place`.

    Example:
        >>> nodes = [Node("a", 2, 2, 0), Node("b", 4, 4, 1)]
        >>> [node.name for node, _ in place_in_components(nodes, [2, 3], 4)]
        ['a', 'a', 'b', 'b']
        >>> place_in_components(nodes, [3, 3], 4) is None  # one of three has no place in "a"
        True
    """
    places: list[tuple[Node, int]] = []
    for component, quota in enumerate(quotas):
        own = [node for node in nodes if node.component == component]
        here = place(own, min(quota, count - len(places)), avoided)
        if here is None:
            return None
        places += here
    return places if len(places) == count else None
