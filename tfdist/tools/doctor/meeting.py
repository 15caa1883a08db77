"""Doctors of all hosts ask each other who they are, what they see and how fast their links are; every wait is bounded."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import Task
from tfdist.handshake import absent
from tfdist.tools.doctor import exchange
from tfdist.tools.doctor.exchange import Link, Refused
from tfdist.tools.doctor.places import TRIES, token_name
from tfdist.tools.doctor.server import Desk, Server

FIRST_S, RETRY_S = 0.05, 0.5  # between two attempts to reach an absent task
PROGRESS_S = 10.0  # between two lines that say whom we wait for
ALL_PAIRS = 5  # hosts; among more, each measures the way to the next one only
LINKS_S = 60.0  # for all links


@dataclasses.dataclass(frozen=True)
class Peer:
    """What the doctor at a task's address told.

    Attributes:
        task: The task that was asked for.
        address: Its address.
        badge: What came back: the badge of its process, its tasks and its GPUs.
        offset: Seconds by which its clock is ahead of this host's.
        error: Half of the time that the answer took: how wrong `offset` may be.
    """

    task: str
    address: str
    badge: Mapping[str, Any]
    offset: float = 0.0
    error: float = 0.0

    @property
    def who(self) -> str:
        """How messages name it."""
        return f"{self.task} at {self.address}"

    @property
    def process(self) -> str:
        """Tells it from other doctors: tasks with an equal one are on one host."""
        return str(self.badge.get("nonce"))


@dataclasses.dataclass(frozen=True)
class Sight:
    """What another host sees of a file that this one wrote to a place.

    Attributes:
        place: Of this host.
        peer: A task of the other host.
        other: The place there with the same number; None: there is none.
        seen: Whether the file was there, with what it holds.
        error: Why nobody knows; "": somebody does.
    """

    place: str
    peer: str
    other: str | None = None
    seen: bool = False
    error: str = ""


class Meeting:
    """One doctor's part in asking all others.

    Args:
        desk: What this process answers, and who it is.
        members: Tasks of this host; none, where it is no host of the cluster.
        timeout: Seconds for all others to come.
        say: Takes a line every ten seconds that names those who are missing.
    """

    def __init__(self, desk: Desk, members: Sequence[Task], timeout: float, say: Callable[[str], None] = lambda line: None):
        self.desk, self.timeout, self._say = desk, timeout, say
        self.own = {str(task) for task in members}
        self.tasks = {str(task): task.address for task in desk.spec.listening_tasks}
        self.peers: dict[str, Peer] = {}
        self.missing: dict[str, str] = {}
        self._begun = time.monotonic()
        self._next_line = self._begun + PROGRESS_S

    def ask_all(self) -> None:
        """Asks each other task who it is, again and again until all have answered, or the time is over: `peers`, `missing`."""

        def pending() -> dict[str, str]:
            names = [name for name in self.tasks if name not in self.own and name not in self.peers]
            # One that is done waits for us, unless somebody has found a fault: then it may be gone before it was asked.
            return {name: reason for name, reason in self._each(self._hello, names).items() if reason and name not in self.desk.done}

        self.missing = self._wait(pending)

    def wait_until_asked(self) -> dict[str, str]:
        """Waits until all others are done too; returns those who are not when the time is over, with the reason."""
        others = [name for name in self.tasks if name not in self.own and name not in self.missing and not self._strange(name)]
        return self._wait(lambda: {name: "it has not said that it is done" for name in others if name not in self.desk.done})

    def tell(self, wrong: str, claims: Sequence[str]) -> None:
        """Tells all others that this host is done.

        Args:
            wrong: What was found wrong; "": nothing.
            claims: Its tasks, also those at whose addresses it cannot answer.
        """
        facts = {"serves": list(claims), "wrong": wrong}
        names = [name for name in self.tasks if name not in self.own and name not in self.missing]
        for _ in range(TRIES):
            names = [name for name, reason in self._each(lambda name: self._try("done", name, **facts), names).items() if reason]
            if not names:
                return
            time.sleep(FIRST_S)

    def share(self, places: Sequence[str | None]) -> list[Sight]:
        """Writes a file to each place, and asks each other host whether it sees it; the files are removed.

        Args:
            places: Directories; None for one that cannot be used here.
        """
        found: list[Sight] = []
        for number, place in enumerate(places):
            if place is None:
                continue
            token, content = secrets.token_hex(16), secrets.token_hex(16)
            path = Path(place) / token_name(token)
            made = not os.path.isdir(place)
            try:
                _leave(path, content)
                hosts = self.hosts(with_own=False)
                with concurrent.futures.ThreadPoolExecutor(16) as pool:
                    asked = pool.map(lambda name: self._see(name, place, number, token, content), hosts)  # noqa: B023
                    found += asked
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
                if made:
                    with contextlib.suppress(OSError):  # it was in use meanwhile
                        os.rmdir(place)
        return found

    def hosts(self, with_own: bool = True) -> list[str]:
        """One task of each host that answers and has our cluster, in the cluster's order."""
        first: dict[str, str] = {}
        for name in self.tasks:
            if name in self.own and with_own:
                first.setdefault("own", name)
            elif name in self.peers and not self._strange(name) and self.peers[name].process != self.desk.badge["nonce"]:
                first.setdefault(self.peers[name].process, name)
        return list(first.values())

    def links(self) -> list[Link]:
        """Measures the network, one link after the other: between all hosts where they are few, else from each to the next."""
        found, end = [], time.monotonic() + LINKS_S
        for source, target in pairs(self.hosts()):
            if time.monotonic() > end:
                found.append(Link(source, target, error=f"not measured: the others took {LINKS_S:g} s"))
            elif source in self.own:
                found.append(exchange.measure(source, target, self.tasks[target], self.desk.badge))
            else:
                found.append(self._relayed(source, target))
        return found

    def _relayed(self, source: str, target: str) -> Link:
        try:
            said = exchange.ask(self.tasks[source], self.desk.badge, "measure", exchange.MEASURE_S, peer=target)
            return Link(source, target, float(said["latency"]), float(said["rate"]), str(said["error"])[:300])
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Link(source, target, error=str(error))

    def _see(self, name: str, place: str, number: int, token: str, content: str) -> Sight:
        try:
            said = exchange.ask(self.tasks[name], self.desk.badge, "token", exchange.MEASURE_S, place=number, token=token)
        except (OSError, ValueError) as error:
            return Sight(place, name, error=str(error))
        other = said.get("place")
        return Sight(place, name, None if other is None else str(other)[:300], said.get("content") == content)

    def _hello(self, name: str) -> str:
        """Asks a task who it is; why it did not say, or ""."""
        try:
            said = exchange.ask(self.tasks[name], self.desk.badge, "hello")
            received, now = float(said.get("received", said["sent"])), float(said.get("now", said["came"]))
        except (Refused, OSError, ValueError, TypeError) as error:
            return str(error)
        offset = ((received - said["sent"]) + (now - said["came"])) / 2
        self.peers[name] = Peer(name, self.tasks[name], said, offset, max(said["came"] - said["sent"] - (now - received), 0.0) / 2)
        return ""

    def _try(self, question: str, name: str, **facts: Any) -> str:
        try:
            exchange.ask(self.tasks[name], self.desk.badge, question, **facts)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _strange(self, name: str) -> bool:
        """Whether a task answered with another cluster; nothing more is to be had from it."""
        return name in self.peers and self.peers[name].badge.get("cluster") != self.desk.badge["cluster"]

    def _each(self, function: Callable[[str], str], names: Iterable[str]) -> dict[str, str]:
        names = list(names)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            return dict(zip(names, pool.map(function, names), strict=True))

    def _wait(self, pending: Callable[[], dict[str, str]]) -> dict[str, str]:
        pause = FIRST_S
        while missing := pending():
            elapsed = time.monotonic() - self._begun
            if elapsed >= self.timeout:
                return missing
            if time.monotonic() >= self._next_line:
                self._next_line += PROGRESS_S
                self._say(f"after {elapsed:.0f} s this host waits for {absent(missing, self.desk.spec)}")
            time.sleep(pause)
            pause = min(2 * pause, RETRY_S)
        return {}


def _leave(path: Path, content: str) -> None:
    """Writes a file; where it cannot, the check of the place has said why."""
    for _ in range(TRIES):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="ascii")
            return


def pairs(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Which links are measured.

    Example:
        >>> pairs(["a", "b"]), len(pairs("abcde")), pairs("abcdef")[-1]
        ([('a', 'b'), ('b', 'a')], 20, ('f', 'a'))
    """
    if len(hosts) <= ALL_PAIRS:
        return list(itertools.permutations(hosts, 2))
    return [(host, hosts[(place + 1) % len(hosts)]) for place, host in enumerate(hosts)]


@contextlib.contextmanager
def serving(desk: Desk, members: Sequence[Task]):
    """Answers at the addresses of this host's tasks while the block runs.

    Args:
        desk: Gives the answers.
        members: The tasks; those without an address are left out.

    Yields:
        Task -> the OSError for which its address cannot be listened at.
    """
    failed: dict[str, OSError] = {}
    with contextlib.ExitStack() as stack:
        for task in members:
            if task.type == "evaluator":
                continue
            try:
                stack.enter_context(Server(desk, task))
            except OSError as error:
                failed[str(task)] = error
        yield failed
