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

from tfdist.cluster.handshake import absent
from tfdist.cluster.spec import Task
from tfdist.tools.doctor import exchange
from tfdist.tools.doctor.exchange import Link, Refused
from tfdist.tools.doctor.file_systems import TRIES, token_name
from tfdist.tools.doctor.file_systems import missing as places_missing
from tfdist.tools.doctor.server import Desk, Server

FIRST_S, RETRY_S = 0.05, 0.5  # between two attempts to reach an absent task
PROGRESS_S = 10.0  # between two lines that say whom we wait for
ALL_PAIRS = 5  # hosts; among more, each measures the way to the next one only
LINKS_S = 60.0  # for all links
AGAIN = 2  # times more for a link that is worse than it should be
LEAST_S = 0.5  # for an answer, where the time is almost over
STRANGE_S = 5.0  # for a doctor with another cluster to ask this one


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

    def __init__(
        self,
        desk: Desk,
        members: Sequence[Task],
        timeout: float,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.desk, self.timeout, self._say = desk, timeout, say
        self.own = {str(task) for task in members}
        self.tasks = {str(task): task.address for task in desk.spec.listening_tasks}
        self.peers: dict[str, Peer] = {}
        self.missing: dict[str, str] = {}
        self._reasons: dict[str, str] = {}  # task -> why it did not answer the last time
        self._made: list[str] = []  # directories
        self._begun = time.monotonic()
        self._next_line = self._begun + PROGRESS_S

    @property
    def elapsed(self) -> float:
        """Seconds since this host began to ask."""
        return time.monotonic() - self._begun

    def ask_all(self) -> None:
        """Asks each other task who it is, again and again until all have answered, or the time is over: `peers`, `missing`."""

        def pending() -> dict[str, str]:
            names = [name for name in self.tasks if name not in self.own and name not in self.peers]
            # One that found a fault may be gone before it was asked, and its fault is enough. One that found nothing wrong has only
            # shown that it reaches us: it serves until we have asked it.
            return {
                name: reason
                for name, reason in self._each(self._hello, names).items()
                if reason and not self.desk.done.get(name)
            }

        self.missing = self._wait(pending)

    def wait_until_asked(self, wrong: str) -> dict[str, str]:
        """Waits until all others have asked this host, and are done too.

        Args:
            wrong: What this host told them that it found wrong; who heard of a fault need not ask it any more.

        Returns:
            Those who are not when the time is over, with the reason.
        """
        others = [name for name in self.tasks if name not in self.own and name not in self.missing]
        strangers, end = (
            [name for name in others if self._strange(name)],
            min(time.monotonic() + STRANGE_S, self._begun + self.timeout),
        )

        def pending() -> dict[str, str]:
            late = {
                name: "it has not said that it is done"
                for name in others
                if name not in strangers and name not in self.desk.done
            }
            if not wrong:
                late |= {
                    name: "it has not asked this host"
                    for name in others
                    if name not in late and not self._asked_by(name)
                }
            return late

        late = self._wait(pending)
        # Whoever has another cluster cannot be told; it sees that when it asks, should it ask at all.
        while (
            self.own
            and time.monotonic() < end
            and not all(self.peers[name].process in self.desk.asked for name in strangers)
        ):
            time.sleep(FIRST_S)
        return late

    def tell(self, wrong: str, claims: Sequence[str]) -> None:
        """Tells all others that this host is done.

        Args:
            wrong: What was found wrong; "": nothing.
            claims: Its tasks, also those at whose addresses it cannot answer.
        """
        facts = {"serves": list(claims), "wrong": wrong}
        names = [
            name
            for name in self.tasks
            if name not in self.own and name not in self.missing and not self._strange(name)
        ]
        for _ in range(TRIES):
            names = [
                name
                for name, reason in self._each(
                    lambda name: self._try("done", name, **facts), names
                ).items()
                if reason
            ]
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
            self._made += [
                directory for directory in places_missing(place) if directory not in self._made
            ]
            try:
                _leave(path, content)
                hosts = self.hosts(with_own=False)
                with concurrent.futures.ThreadPoolExecutor(16) as pool:
                    asked = pool.map(
                        lambda name: self._see(name, place, number, token, content), hosts
                    )  # noqa: B023
                    found += asked
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
                self.tidy()
        return found

    def tidy(self) -> None:
        """Removes the directories that `share` made, as far as nobody else has a file there at this moment."""
        for directory in sorted(self._made, key=len, reverse=True):  # the innermost first
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def hosts(self, with_own: bool = True) -> list[str]:
        """One task of each host that answers and has our cluster, in the cluster's order."""
        first: dict[str, str] = {}
        for name in self.tasks:
            if name in self.own and with_own:
                first.setdefault("own", name)
            elif (
                name in self.peers
                and not self._strange(name)
                and self.peers[name].process != self.desk.badge["nonce"]
            ):
                first.setdefault(self.peers[name].process, name)
        return list(first.values())

    def links(self, odd: Callable[[Sequence[Link]], list[Link]]) -> list[Link]:
        """Measures the network, one link after the other: between all hosts where they are few, else from each to the next.

        Args:
            odd: Which links are worse than they should be. They are measured again and the better figures count: a pause of one
                of the hosts is not a slow link.
        """
        found, begun = [], time.monotonic()
        for source, target in pairs(self.hosts()):
            if (elapsed := time.monotonic() - begun) > LINKS_S:
                found.append(
                    Link(source, target, error=f"not measured: the others took {elapsed:.0f} s")
                )
            else:
                found.append(self._measure(source, target))
        for _ in range(AGAIN):
            for link in odd(found):
                if time.monotonic() - begun <= LINKS_S:
                    found[found.index(link)] = link.better(self._measure(link.source, link.target))
        return found

    def _measure(self, source: str, target: str) -> Link:
        if source in self.own:
            return exchange.measure(source, target, self.tasks[target], self.desk.badge)
        try:
            said = exchange.ask(
                self.tasks[source], self.desk.badge, "measure", exchange.MEASURE_S, peer=target
            )
            return Link(
                source,
                target,
                float(said["latency"]),
                float(said["rate"]),
                str(said["error"])[:300],
            )
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            return Link(source, target, error=str(error))

    def _see(self, name: str, place: str, number: int, token: str, content: str) -> Sight:
        try:
            said = exchange.ask(
                self.tasks[name],
                self.desk.badge,
                "token",
                exchange.MEASURE_S,
                place=number,
                token=token,
            )
        except (OSError, ValueError) as error:
            return Sight(place, name, error=str(error))
        other = said.get("place")
        return Sight(
            place, name, None if other is None else str(other)[:300], said.get("content") == content
        )

    def _hello(self, name: str) -> str:
        """Asks a task who it is; why it did not say, or ""."""
        left = self.timeout - self.elapsed
        if (
            left <= 0 and self._reasons
        ):  # the reason of the time before, rather than a wait beyond the bound
            return self._reasons.get(name, "not asked: the others took all the time")
        self._reasons[name] = reason = self._ask_hello(
            name, min(exchange.EXCHANGE_S, max(left, LEAST_S))
        )
        return reason

    def _ask_hello(self, name: str, bound: float) -> str:
        try:
            said = exchange.ask(self.tasks[name], self.desk.badge, "hello", bound)
            received, now = (
                float(said.get("received", said["sent"])),
                float(said.get("now", said["came"])),
            )
        except (Refused, OSError, ValueError, TypeError, OverflowError) as error:
            return str(error)
        offset = ((received - said["sent"]) + (now - said["came"])) / 2
        self.peers[name] = Peer(
            name,
            self.tasks[name],
            said,
            offset,
            max(said["came"] - said["sent"] - (now - received), 0.0) / 2,
        )
        return ""

    def _try(self, question: str, name: str, **facts: Any) -> str:
        try:
            exchange.ask(self.tasks[name], self.desk.badge, question, **facts)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _asked_by(self, name: str) -> bool:
        """Whether the process at a task's address has asked each task of this host; one that was never reached is not waited for."""
        peer = self.peers.get(name)
        return (
            peer is None
            or self._strange(name)
            or self.own <= self.desk.asked.get(peer.process, set())
        )

    def _strange(self, name: str) -> bool:
        """Whether a task answered with another cluster; nothing more is to be had from it."""
        return (
            name in self.peers
            and self.peers[name].badge.get("cluster") != self.desk.badge["cluster"]
        )

    def _each(self, function: Callable[[str], str], names: Iterable[str]) -> dict[str, str]:
        names = list(names)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            return dict(zip(names, pool.map(function, names), strict=True))

    def _wait(self, pending: Callable[[], dict[str, str]]) -> dict[str, str]:
        pause = FIRST_S
        while missing := pending():
            elapsed = self.elapsed
            if elapsed >= self.timeout:
                return missing
            if time.monotonic() >= self._next_line:
                self._next_line += PROGRESS_S
                self._say(
                    f"after {elapsed:.0f} s this host waits for {absent(missing, self.desk.spec)}"
                )
            time.sleep(min(pause, self.timeout - elapsed))
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
