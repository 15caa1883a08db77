"""Fleet: the agents of a launch, one for each task; and the interface of an engine."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tfdist.cluster.addresses import join_address
from tfdist.launch.engines.agent_connection import (
    CLOSE_S,
    AgentConnection,
    AgentLate,
    AgentLost,
    RemoteTask,
    Transport,
)
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime.launch_protocol import note

CLOSE_ALL_S = 4 * CLOSE_S  # the three waits of one transport, and some time to spare


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place for one task.

    Attributes:
        host: Name of the host, for messages; slots of one host share its cores.
        address: Host name or IP address at which the other tasks reach it.
        key: Text by which the engine tells the slots of a host apart.
        environ: Variables that the engine gives to a task in this slot, such as its GPUs.
    """

    host: str
    address: str
    key: str = ""
    environ: tuple[tuple[str, str], ...] = ()


class NoRoom(TimeoutError):
    """The engine has no place for the tasks within the bound; another start may find one."""


class Interrupted(Exception):
    """The user has ended the launch while it waited for machines."""


class Engine(Protocol):
    """Gives places to the tasks of a launch, and runs agents in them."""

    def allocate(self, count: int, lost: Sequence[Slot]) -> list[Slot]:
        """Return the places of the next attempt.

        Slots that were returned before and are still good keep their agents.

        Args:
            count: Number of tasks.
            lost: Slots whose agents were lost since the last call.

        Raises:
            NoRoom: If there is no place within the bound of the engine.
            ValueError: If the options of the engine are wrong.
        """

    def connect(self, slot: Slot) -> Transport:
        """Start an agent in a slot; return at once."""

    def close(self) -> None:
        """Give all places back."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A slot whose agent is ready to start its task.

    Attributes:
        slot: The slot.
        address: `HOST:PORT` of the task.
        argv: Command that the agent executes.
    """

    slot: Slot
    address: str
    argv: tuple[str, ...]


class Fleet:
    """The agents of a launch.

    Args:
        engine: Engine that has the machines.
        words: COMMAND, as the user wrote it.
        directory: Working directory of the tasks; None for that of the engine.
        log_dir: Log directory of the launch.
        timeout: Seconds for all agents to answer.
        interrupted: Function that returns whether the user has ended the launch.
        signalled: Function that gets the number of a signal that the scheduler has sent to an
            agent, to announce the end of the job.
        snapshot_secret: Secret in hexadecimal digits of the snapshot servers, of which each agent
            runs one; "" (default) for no servers.
    """

    def __init__(
        self,
        engine: Engine,
        words: Sequence[str],
        directory: str | None,
        *,
        log_dir: str,
        timeout: float,
        interrupted: Callable[[], bool] = lambda: False,
        signalled: Callable[[int], None] = lambda number: None,
        snapshot_secret: str = "",
    ):
        self._engine = engine
        self._words = list(words)
        self._directory = directory
        self._log_dir = log_dir
        self._timeout = timeout
        self._interrupted = interrupted
        self._signalled = signalled
        self._snapshot_secret = snapshot_secret
        self._snapshot_servers: list[tuple[str, str]] = []  # host and address, by slot
        self._attempt = 0
        self._allocates = False  # an engine that gives machines back ends the agents there
        self._agents: dict[Slot, AgentConnection] = {}
        self._slots: list[Slot] = []
        self._by_task: dict[str, Slot] = {}
        self._given_up: set[Slot] = set()  # since the last call of `prepare`
        self._versions: dict[str, dict[str, str]] = {}  # of each host

    def prepare(self, names: Sequence[str], attempt: int = 0) -> list[Prepared]:
        """Make an agent ready for each task of the next attempt.

        Args:
            names: Names of the tasks.
            attempt: Number of the attempt.

        Returns:
            One entry per task.

        Raises:
            NoRoom: If the engine has no place for the tasks.
            AgentLost: If an agent cannot be reached in time; the message names its host.
            ValueError: If the command cannot run on a host, or hosts differ in their versions or
                scripts.
            Interrupted: If the user has ended the launch.
        """
        lost = [
            slot
            for slot, agent in self._agents.items()
            if agent.lost is not None or slot in self._given_up
        ]
        self._given_up.clear()
        self._allocates = True
        if lost or not self._slots:
            started = time.monotonic()
            self._slots = self._engine.allocate(len(names), lost)
            note(self._log_dir, "allocated", seconds=time.monotonic() - started)
        gone = [slot for slot in self._agents if slot in lost or slot not in self._slots]
        close_all([self._agents.pop(slot) for slot in gone])
        self._allocates = False
        deadline = time.monotonic() + self._timeout
        new = [slot for slot in self._slots if slot not in self._agents]
        for slot in new:
            transport = self._engine.connect(slot)
            self._agents[slot] = AgentConnection(slot.host, transport, self._log_dir, self._pass_on)
        for slot in new:
            self._versions[slot.host] = self._reply(slot, "hello", deadline)["versions"]
        check_same(
            {slot.host: self._versions[slot.host] for slot in self._slots},
            "have different versions",
            "install the same Python, TensorFlow, Keras and tfdist on all hosts",
        )
        for slot in self._slots:
            self._agents[slot].send(
                "prepare",
                words=self._words,
                directory=self._directory,
                address=slot.address,
                snapshot_secret=self._snapshot_secret,
            )
        replies = {slot: self._reply(slot, "prepared", deadline) for slot in self._slots}
        check_same(
            {slot.host: {"script": reply["script"][:12]} for slot, reply in replies.items()},
            "have different scripts",
            "copy the same script to all hosts",
        )
        self._by_task = dict(zip(names, self._slots, strict=True))
        self._attempt = attempt
        self._snapshot_servers = [
            (slot.host, join_address(slot.address, reply["snapshot_port"]))
            for slot, reply in replies.items()
            if reply.get("snapshot_port")
        ]
        return [
            Prepared(slot, join_address(slot.address, reply["port"]), tuple(reply["argv"]))
            for slot, reply in replies.items()
        ]

    def start(self, plan: TaskPlan) -> RemoteTask:
        """Start a task by its agent; see `task_process.Handle`."""
        slot = self._by_task[plan.name]
        tasks_here = collections.Counter(slot.host for slot in self._slots)[slot.host]
        environ = {**dict(slot.environ), **plan.environ}
        snapshots = None
        if len(self._snapshot_servers) == len(self._slots):
            snapshots = {
                "peers": self._snapshot_servers,
                "own": self._slots.index(slot),
                "generation": self._attempt,
            }
        return self._agents[slot].start(
            dataclasses.replace(plan, environ=environ), tasks_here, snapshots
        )

    def give_up(self, name: str) -> str:
        """Give up the slot of a task from the next attempt on, because it is slow there.

        Engines that can do this have a method `avoid(slot, count)`, which returns whether there is
        room for `count` tasks elsewhere, and then no longer returns the slot's host.

        Returns:
            Why it is impossible, "" if it is not.
        """
        slot = self._by_task[name]
        avoid = getattr(self._engine, "avoid", None)
        if avoid is None:
            return f"this engine cannot move a task away from {slot.host}"
        try:
            if not avoid(slot, len(self._slots)):
                return f"there is no room for the tasks without {slot.host}"
        except (OSError, ValueError) as error:  # the engine does not answer
            return f"there may be no room for the tasks without {slot.host}: {error}"
        self._given_up.add(slot)
        return ""

    def close(self) -> None:
        """End all agents, and give their places back."""
        close_all(self._agents.values())
        self._engine.close()

    def _pass_on(self, number: int) -> None:
        if not self._allocates:
            self._signalled(number)

    def _reply(self, slot: Slot, kind: str, deadline: float) -> dict[str, Any]:
        while True:
            if self._interrupted():
                raise Interrupted
            try:
                return self._agents[slot].wait_for(kind, min(deadline, time.monotonic() + 0.5))
            except AgentLate as error:
                if time.monotonic() >= deadline:
                    raise AgentLost(f"{error} within {self._timeout:g} s") from None


def close_all(agents: Iterable[AgentConnection]) -> None:
    """End agents at the same time: the program of a lost one may take its whole bound.

    Args:
        agents: The agents.
    """
    threads = [threading.Thread(target=agent.close, daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CLOSE_ALL_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def check_same(facts: dict[str, dict[str, str]], problem: str, remedy: str) -> None:
    """Refuse hosts that differ from the first one.

    Args:
        facts: Facts of each host.
        problem: Words between the names of two hosts and what differs.
        remedy: Words about how to make the hosts equal.

    Raises:
        ValueError: If two hosts differ. The message names them, and what differs.

    Example:
        >>> check_same({"a": {"keras": "3.1"}, "b": {"keras": "3.2"}}, "differ", "update b")
        Traceback (most recent call last):
        ValueError: hosts a and b differ: keras 3.1 and 3.2; update b
    """
    hosts = list(facts)
    for host in hosts[1:]:
        first = facts[hosts[0]]
        names = [
            name for name in {**first, **facts[host]} if first.get(name) != facts[host].get(name)
        ]
        if names:
            differences = ", ".join(
                f"{name} {first.get(name) or 'none'} and {facts[host].get(name) or 'none'}"
                for name in names
            )
            raise ValueError(f"hosts {hosts[0]} and {host} {problem}: {differences}; {remedy}")
