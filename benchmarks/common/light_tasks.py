"""Many light tasks in few processes: preflights, and members of a rendezvous.

Each function is a target of `processes.Processes`. The messages are those of real tasks, but the
tasks are threads that do not train.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator

from tfdist.cluster import json_channel, meeting, preflight
from tfdist.cluster.spec import ClusterSpec
from tfdist.launch.messages import Decision, Finish, Start, Stop, Terms
from tfdist.launch.rendezvous import Rendezvous
from tfdist.launch.rendezvous_client import RendezvousClient

TOKEN = b"0123456789abcdef"
WATCH_S = 0.05  # seconds between two looks at the number of threads
HOST_TIMEOUT_S = 5.0  # the launcher's default of --host-timeout


@dataclasses.dataclass(frozen=True)
class PreflightJob:
    """Describe a process of light tasks: a cluster, and the ranks of the tasks in it.

    Attributes:
        addresses: Addresses of all tasks.
        ranks: Tasks of this process.
        all_pairs: True if every pair of tasks meets, as in small clusters.
        timeout: Seconds until absent tasks are an error.
    """

    addresses: tuple[str, ...]
    ranks: tuple[int, ...]
    all_pairs: bool
    timeout: float


@dataclasses.dataclass(frozen=True)
class MembersJob:
    """Describe a process of light members: the rendezvous' address, and their numbers."""

    address: str
    numbers: tuple[int, ...]
    timeout: float


def preflights(job: PreflightJob) -> tuple[None, Callable[[], dict[str, float]]]:
    """Return a function that runs the preflights of all tasks of this process at once."""
    if job.all_pairs:
        preflight.ALL_PAIRS = len(job.addresses)
    connections = collections.Counter()
    count = threading.Lock()

    def connect(address: str, timeout: float):
        connection = meeting.connect(address, timeout)
        with count:
            connections["made"] += 1
        return connection

    preflight.connect = connect
    specs = [ClusterSpec({"worker": job.addresses}, "worker", rank) for rank in job.ranks]

    def meet() -> dict[str, float]:
        before = _usage()["cpu_s"]
        errors: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def check(spec: ClusterSpec) -> None:
            try:
                preflight.check(spec, timeout=job.timeout, versions="light")
                errors.put(None)
            except Exception as error:
                errors.put(error)

        with _most_threads() as most:
            for spec in specs:
                threading.Thread(target=check, args=(spec,), daemon=True).start()
            for _ in specs:
                if error := errors.get():
                    raise error
        usage = _usage()
        return {
            "ended": time.time(),
            "first": 0 in job.ranks,
            "messages": 2 * connections["made"],
            "memory_mib": usage["memory_mib"],
            "cpu_s": usage["cpu_s"] - before,
            **most,
        }

    return None, meet


def rendezvous_server(count: int) -> tuple[tuple[str], Callable[[], dict[str, float]]]:
    """Return the address of a rendezvous, and a function that returns its figures so far."""
    messages = collections.Counter()
    send, receive = json_channel.Channel.send, json_channel.Channel.receive

    def counted_send(channel, *args, **kwargs):
        messages["sent"] += 1
        return send(channel, *args, **kwargs)

    def counted_receive(channel, timeout):
        message = receive(channel, timeout)
        messages["received"] += message is not None
        return message

    json_channel.Channel.send = counted_send
    json_channel.Channel.receive = counted_receive
    terms = Terms(count, count, host_timeout=HOST_TIMEOUT_S)
    server = Rendezvous("127.0.0.1:0", TOKEN, terms, decide=lambda _: Decision(True, 0.0, ""))

    def figures() -> dict[str, float]:
        return {
            "time": time.time(),
            "messages": messages.total(),
            "threads": threading.active_count(),
            **_usage(),
        }

    return (server.address,), figures


def rendezvous_members(job: MembersJob) -> tuple[None, Callable[[str, int], dict[str, float]]]:
    """Return a function that waits until all members of this process start a generation.

    Its order is first to join, later that member 0 fails, or nothing.
    """
    members: dict[int, RendezvousClient] = {}
    started: dict[int, int] = {}  # number -> generation
    fault: list[str] = []

    def follow(number: int, member: RendezvousClient) -> None:
        while True:
            order = member.order(60.0)
            if isinstance(order, Start):
                started[number] = order.generation
            elif isinstance(order, Stop):
                member.stopped()
            elif isinstance(order, Finish):
                fault.append(f"member {number}: {order.text}")
                return

    def wait(order: str, generation: int) -> dict[str, float]:
        if order == "join":
            for number in job.numbers:
                members[number] = RendezvousClient(
                    job.address,
                    TOKEN,
                    f"10.{number // 65536}.{number // 256 % 256}.{number % 256}",
                    slots=1,
                    command_digest="light",
                    name=f"host{number}",
                    ports=lambda count: [20001] * count,
                )
                threading.Thread(target=follow, args=(number, members[number]), daemon=True).start()
        elif order == "fail" and 0 in members:
            members[0].failed("exit", "light failure", counted=True, signature="", code=1)
        end = time.monotonic() + job.timeout
        while any(started.get(number, -1) < generation for number in job.numbers):
            if fault or time.monotonic() > end:
                raise RuntimeError(fault[0] if fault else f"not all started: {started}")
            time.sleep(0.01)
        return {"ended": time.time(), "generation": max(started.values())}

    return None, wait


@contextlib.contextmanager
def _most_threads() -> Iterator[dict[str, int]]:
    """Yield {"threads": the largest number of threads of this process while the block runs}."""
    most = {"threads": 0}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            most["threads"] = max(most["threads"], threading.active_count() - 1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def _usage() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "memory_mib": usage.ru_maxrss / 1024}
