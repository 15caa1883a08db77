"""Ray driver: a process that holds the placement groups and the actors of a launch.

Usage:
    python -m tfdist.launch.engines.ray_driver

The launcher does not use Ray itself, because Ray takes the signals of its process, and ends it when
the cluster is lost. Standard input and output of this process are the connection to the launcher,
with messages in the form of `agent_protocol`. Orders of the launcher, and the answers:

    open: connect to the cluster            -> opened, or refused
    place: give each task a bundle          -> pending, ..., placed, or refused
    avoid: reserve bundles on other nodes   -> avoided
    connect: start an agent in a bundle     -> data, ..., ended
    write: a line to the agent
    close: end the agent                    -> ended

The end of standard input means that the launcher is gone. The agents, actors and placement groups
then end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.cluster.addresses import address_problem, split_address
from tfdist.launch.engines.agent_protocol import bytes_of, decode, encode, text_of

POLL_S = 0.2
REACH_S = 5.0
SHOW_S = 1.0  # Ray needs a moment even where there is room
AVOID_S = 5.0  # for bundles on other nodes; meanwhile the tasks train
END_S = 8.0  # for the agents to end their tasks; afterwards, their actors are killed
REMOVE_S = 10.0
REASON_CHARACTERS = 300
GROUP_NAME = "tfdist"
NODE_LABEL = "ray.io/node-id"  # of each node, set by Ray
MESSAGES = "messages"  # a thread of each actor reads, another one writes
ORDERS = "orders"
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class AgentHost:
    """Actor that runs an agent as its child process, and carries its lines.

    Ray sends this class to the nodes by value. So its code uses nothing but the standard library,
    and a node without tfdist says so in the output of the agent.

    Args:
        python: Python of the agent; None for that of the actor.
    """

    def __init__(self, python: str | None):
        self._problem = ""
        self._popen: Any = None
        libc = ctypes.CDLL(None)

        def prepare():
            libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT

        try:
            # Ray calls this in the main thread, which lives as long as the actor.
            self._popen = subprocess.Popen(
                [python or sys.executable, "-m", "tfdist.launch.engines.agent_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            self._problem = f"{python}: {error.strerror}; name the Python by --remote-python"

    def write(self, line: bytes) -> None:
        """Write a line to the agent."""
        self._popen.stdin.write(line)
        self._popen.stdin.flush()

    def read(self) -> bytes:
        """Wait for output of the agent; b"" after its end."""
        return os.read(self._popen.stdout.fileno(), 1 << 18) if self._popen else b""

    def close(self) -> None:
        """End the agent and its task."""
        if self._popen:
            self._popen.stdin.close()

    def ending(self) -> str:
        """Return how the agent has ended."""
        return self._problem or f"its agent ended with {self._popen.wait(5)}"

    def ping(self) -> None:
        """Answer, to show that the actor can be reached."""


class Driver:
    """The driver of one launch.

    Args:
        ray: The module `ray`.
        send: Function that sends a message to the launcher.
    """

    def __init__(self, ray: Any, send: Callable[..., None]):
        self._ray = ray
        self._send = send
        self._options: Mapping[str, Any] = {}
        self._groups: list[Any] = []
        self._places: list[tuple[int, int]] = []  # of each task: its group, and its bundle there
        self._avoided: set[str] = set()  # nodes on which a task was slow
        self._moves = 0  # groups that were asked for to leave such a node
        self._actors: dict[int, Any] = {}
        self._unsettled: list[Any] = []  # actors of which Ray does not know whether they are dead
        self._tasks: set[asyncio.Task] = set()

    async def serve(self, orders: asyncio.Queue[dict[str, Any] | None]) -> None:
        """Obey the orders until None; then give back everything.

        Args:
            orders: Messages of the launcher.
        """
        while (order := await orders.get()) is not None:
            kind = order["type"]
            if kind == "open":
                self._open(order)
            elif kind == "place":
                self._run(self._place(order["count"]))
            elif kind == "avoid":
                self._run(self._avoid(order["node"]))
            elif kind == "connect":
                self._connect(order["id"], order["bundle"])
            elif order["id"] in self._actors:
                actor = self._actors[order["id"]]
                if kind == "write":
                    method = actor.write.options(concurrency_group=ORDERS)
                    method.remote(bytes_of(order["text"]))
                elif kind == "close":
                    self._run(self._end([order["id"]]))
        await self._give_back()

    def _run(self, coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _open(self, options: Mapping[str, Any]) -> None:
        self._options = options
        address = options["address"]
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS", address)
        try:
            if address_problem(address) is None:  # Ray itself tries for minutes
                socket.create_connection(split_address(address), REACH_S).close()
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            self._send("refused", text=one_line(error))
        else:
            self._send("opened")

    async def _place(self, count: int) -> None:
        """Wait until each task has a bundle on a node that is alive.

        Ray itself moves the bundles of a lost node to other nodes.
        """
        from ray.util.placement_group import placement_group, placement_group_table

        bundle = self._bundle()
        strategy = self._options["strategy"]
        try:
            if self._unsettled:
                self._send("pending", text="Ray has not decided yet whether a lost node is gone")
                await asyncio.gather(*map(self._settle, self._unsettled))
                self._unsettled.clear()
            if not self._groups:
                self._groups = [placement_group([bundle] * count, strategy, name=GROUP_NAME)]
                self._places = [(0, number) for number in range(count)]
            began = time.monotonic()
            while True:
                tables = [placement_group_table(group) for group in self._groups]
                nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
                homes = self._homes(tables)
                # A group of which only a bundle that no task uses is lost may stay incomplete.
                if set(homes) <= nodes.keys() and all(
                    table["state"] in ("CREATED", "RESCHEDULING") for table in tables
                ):
                    break
                if time.monotonic() - began > SHOW_S:
                    free = self._ray.available_resources()
                    text = shortage(bundle, count, strategy, list(nodes.values()), free)
                    self._send("pending", text=text)
                await asyncio.sleep(POLL_S)
        except Exception as error:
            self._send("refused", text=one_line(error))
            return
        self._send(
            "placed",
            bundles=[
                {
                    "node": home,
                    "name": nodes[home]["NodeName"],
                    "address": nodes[home]["NodeManagerAddress"],
                }
                for home in homes
            ],
        )

    async def _avoid(self, node: str) -> None:
        """Reserve bundles on other nodes for the tasks of a node, for the next attempt.

        The former bundles stay reserved, because Ray cannot give back a part of a group.

        Args:
            node: Identifier of the node. Its tasks may have left it already.
        """
        from ray.util.placement_group import (
            placement_group,
            placement_group_table,
            remove_placement_group,
        )

        strategy = self._options["strategy"]
        problem = ""
        group: Any = None
        self._moves += 1
        try:
            homes = self._homes([placement_group_table(each) for each in self._groups])
            moved = [task for task, home in enumerate(homes) if home == node]
            if not moved:
                self._send("avoided", text="")
                return
            avoided = {*self._avoided, node}
            excluded = avoided | (set(homes) if strategy == "STRICT_SPREAD" else set())
            selector = {NODE_LABEL: f"!in({','.join(sorted(excluded))})"}
            group = placement_group(
                [self._bundle()] * len(moved),
                strategy,
                name=f"{GROUP_NAME}-{self._moves}",
                bundle_label_selector=[selector] * len(moved),
            )
            end = time.monotonic() + AVOID_S
            while placement_group_table(group)["state"] != "CREATED" and not problem:
                if time.monotonic() > end:
                    problem = f"Ray gave none within {AVOID_S:g} s"
                await asyncio.sleep(POLL_S)
        except Exception as error:
            problem = one_line(error)
        if problem and group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        elif not problem:
            self._avoided = avoided
            self._groups.append(group)
            for index, task in enumerate(moved):
                self._places[task] = (len(self._groups) - 1, index)
        self._send("avoided", text=problem)

    def _bundle(self) -> dict[str, float]:
        """Return the resources of each task."""
        return {
            name: self._options[option]
            for name, option in (("CPU", "cpus"), ("GPU", "gpus"))
            if self._options[option]
        }

    def _homes(self, tables: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the node of each task's bundle.

        Args:
            tables: Tables of the placement groups.
        """
        return [tables[group]["bundles_to_node_id"][bundle] for group, bundle in self._places]

    async def _settle(self, actor: Any) -> None:
        """Wait until Ray knows whether an actor that it could not reach is dead."""
        while True:
            try:
                await actor.ping.remote()
            except self._ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(POLL_S)
                continue
            except self._ray.exceptions.RayError:
                return
            self._ray.kill(actor)
            return

    def _connect(self, number: int, bundle: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index = self._places[bundle]
        actor_class = self._ray.remote(
            num_cpus=self._options["cpus"],
            num_gpus=self._options["gpus"],
            max_restarts=0,
            concurrency_groups={MESSAGES: 1, ORDERS: 1},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[group], index),
        )(AgentHost)
        self._actors[number] = actor_class.remote(self._options["python"])
        self._run(self._read(number))

    async def _read(self, number: int) -> None:
        """Pass on what an agent writes, and how it ends."""
        actor = self._actors[number]
        try:
            while data := await actor.read.options(concurrency_group=MESSAGES).remote():
                self._send("data", id=number, text=text_of(data))
            reason = await actor.ending.remote()
        except self._ray.exceptions.ActorUnavailableError as error:
            # What the agent has written since may be lost.
            self._unsettled.append(actor)
            reason = one_line(error)
        except Exception as error:
            reason = one_line(error)
        else:
            self._ray.kill(actor)
        self._actors.pop(number, None)
        self._send("ended", id=number, text=reason)

    async def _end(self, numbers: Sequence[int]) -> None:
        """End some agents; kill their actors if they do not end in time."""
        actors = {number: self._actors[number] for number in numbers if number in self._actors}
        for actor in actors.values():
            actor.close.remote()
        end = time.monotonic() + END_S
        while actors.keys() & self._actors.keys() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for number in actors.keys() & self._actors.keys():
            self._ray.kill(self._actors[number])

    async def _give_back(self) -> None:
        from ray.util.placement_group import placement_group_table, remove_placement_group

        await self._end(list(self._actors))
        for group in self._groups:
            remove_placement_group(group)
        end = time.monotonic() + REMOVE_S
        while time.monotonic() < end and any(
            placement_group_table(group).get("state") not in (None, "REMOVED")
            for group in self._groups
        ):
            await asyncio.sleep(0.05)


def one_line(error: BaseException) -> str:
    r"""Return what an error of Ray says in one line.

    Example:
        >>> one_line(RuntimeError("The actor died.\n\tclass_name: A\n\tpid: 7\nIts node has died."))
        'RuntimeError: The actor died. Its node has died.'
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))
    for advice in (" Some common causes include", " The task may or may not have been executed"):
        text = text.partition(advice)[0]
    fact = re.compile(r"\t(class_name|actor_id|pid|name|namespace|ip|repr): ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not fact.match(line)]
    return f"{type(error).__name__}: {' '.join(lines)}"[:REASON_CHARACTERS]


def shortage(
    bundle: Mapping[str, float],
    count: int,
    strategy: str,
    nodes: Sequence[Mapping[str, Any]],
    free: Mapping[str, float],
) -> str:
    """Return what a launch asks for, and what the cluster has.

    Args:
        bundle: Resources of each task.
        count: Number of tasks.
        strategy: Placement strategy.
        nodes: Nodes that are alive, as `ray.nodes()` describes them.
        free: Resources that are free in the cluster.

    Example:
        >>> node = {"Resources": {"CPU": 4.0, "memory": 1e9}}
        >>> shortage({"CPU": 2, "GPU": 1}, 3, "PACK", [node, node], {"CPU": 6.0})
        '3 tasks ask for 2 CPU, 1 GPU each (PACK); the cluster has 8 CPU (6 free), 0 GPU (0 free) \
on 2 nodes'
    """
    asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    has = ", ".join(
        f"{sum(node['Resources'].get(name, 0.0) for node in nodes):g} {name} "
        f"({free.get(name, 0.0):g} free)"
        for name in bundle
    )
    return (
        f"{count} task{'s' * (count > 1)} ask{'s' * (count == 1)} for {asked}"
        f"{' each' * (count > 1)} ({strategy}); the cluster has {has} on {len(nodes)} "
        f"node{'s' * (len(nodes) != 1)}"
    )


async def _serve(output: int) -> None:
    import ray

    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def send(kind: str, **facts: Any) -> None:
        view = memoryview(encode({"type": kind, **facts}))
        with contextlib.suppress(OSError):  # the launcher is gone, and the orders end
            while view:
                view = view[os.write(output, view) :]

    def read() -> None:
        for line in sys.stdin.buffer:
            if order := decode(line):
                loop.call_soon_threadsafe(orders.put_nowait, order)
        loop.call_soon_threadsafe(orders.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    await Driver(ray, send).serve(orders)
    ray.shutdown()


def main() -> None:
    """Serve the launcher at the other end of standard input and output."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the launcher decides when everything ends
        signal.signal(number, signal.SIG_IGN)
    output = os.dup(1)
    os.dup2(2, 1)  # whatever Ray prints is no message
    os.set_inheritable(output, False)
    asyncio.run(_serve(output))


if __name__ == "__main__":
    main()
