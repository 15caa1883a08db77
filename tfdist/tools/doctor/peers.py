"""Exchange of the doctors on all hosts: identity, shared directories and network speed.

If all hosts check together, each asks all others in a cluster of up to 32 tasks. In a larger one,
the hosts ask as the tasks of a preflight do: the host of the first task asks all others, and each
of them asks the first task and those before its own in TensorFlow's ring. The first host then waits
for the reports of all, and its own report has the verdict. Every wait has a time limit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import preflight
from tfdist.cluster.handshake import absent, short, some
from tfdist.cluster.meeting import AT_ONCE, Wait, for_each
from tfdist.cluster.spec import Task
from tfdist.tools.doctor import exchange
from tfdist.tools.doctor.check_server import Responder, Server
from tfdist.tools.doctor.exchange import Link, Refused
from tfdist.tools.doctor.file_systems import TRIES, token_name
from tfdist.tools.doctor.file_systems import missing as missing_directories

# Seconds between two attempts to reach an absent task: the first two, and later ones.
FIRST_S = 0.05
RETRY_S = 0.5
PROGRESS_S = 10.0  # seconds between two lines that name the missing tasks
ALL_PAIRS = 5  # hosts; with more hosts, each measures only the link to the next one
LINKS_S = 60.0  # seconds for all links
AGAIN = 2  # repeated measurements of a link that is worse than it should be
LEAST_S = 0.5  # seconds for an answer if the time is almost over
OTHER_SPEC_S = 5.0  # seconds for a doctor with another cluster spec to ask this one


@dataclasses.dataclass(frozen=True)
class Peer:
    """Answer of the doctor at a task's address.

    Attributes:
        task: Task that was asked for.
        address: Address of the task.
        hello: Content of the answer: the hello message of the process, its tasks and its GPUs.
        offset: Seconds by which the peer's clock is ahead of this host's.
        error: Maximum error of `offset` in seconds: half of the time that the answer took.
    """

    task: str
    address: str
    hello: Mapping[str, Any]
    offset: float = 0.0
    error: float = 0.0

    @property
    def who(self) -> str:
        """Return the name of the peer for messages."""
        return f"{self.task} at {self.address}"

    @property
    def process(self) -> str:
        """Return the identifier of the peer's process.

        Tasks with the same identifier are on one host.
        """
        return str(self.hello.get("nonce"))


@dataclasses.dataclass(frozen=True)
class FileLookup:
    """Result of looking on another host for a file that this host wrote.

    Attributes:
        directory: Directory on this host.
        peer: Task of the other host.
        other: Directory with the same number on the other host; None if there is none.
        seen: Boolean, whether the file was there with the right content.
        error: Reason why the result is unknown; "" if it is known.
    """

    directory: str
    peer: str
    other: str | None = None
    seen: bool = False
    error: str = ""


class PeerExchange:
    """One doctor's part in the exchange with all others.

    Args:
        responder: Hello message and answers of this process.
        members: Tasks of this host; empty if it is not a host of the cluster.
        timeout: Seconds to wait for all others to come.
        show_line: Function that receives a line every 10 seconds that names the missing tasks.
        together: Tasks of this host, if all hosts check together, including those at whose
            addresses it cannot answer; default none.

    Attributes:
        leads: Whether this host waits for the reports of all others before it reports itself.
    """

    def __init__(
        self,
        responder: Responder,
        members: Sequence[Task],
        timeout: float,
        show_line: Callable[[str], None] = lambda line: None,
        together: Sequence[Task] = (),
    ):
        self.responder = responder
        self.wait = Wait(
            responder.spec, "this host", timeout, show_line, (FIRST_S, RETRY_S), PROGRESS_S
        )
        self.own = {str(task) for task in members}
        self.tasks = {str(task): task.address for task in responder.spec.listening_tasks}
        tasks = responder.spec.listening_tasks
        self._leader = str(tasks[0])
        is_large = bool(together) and len(tasks) > preflight.ALL_PAIRS
        self.leads = is_large and self._leader in self.own
        self._follows = is_large and not self.leads
        self._at_once = preflight.LEADER_AT_ONCE if is_large else AT_ONCE
        self._to_be_asked = {self._leader} if self.leads else self.own  # by each other process
        self._asked = [name for name in self.tasks if name not in self.own]
        self._told = self._asked
        if self._follows:
            asked, behind = _neighbours(tasks, {str(task) for task in together})
            self._asked = [name for name in self._asked if name in asked]
            self._told = [name for name in self._told if name in asked | behind]
        self.peers: dict[str, Peer] = {}
        self.missing: dict[str, str] = {}
        self._reasons: dict[str, str] = {}  # task -> reason of its last failure to answer
        self._made: list[str] = []  # directories

    @property
    def elapsed(self) -> float:
        """Return the seconds since this host began to ask."""
        return self.wait.elapsed

    def ask_all(self) -> None:
        """Ask every other task who it is, until all have answered or the time is over.

        The results are in `peers` and `missing`.
        """

        def pending() -> dict[str, str]:
            names = [name for name in self._asked if name not in self.peers]
            # A doctor that found a fault may be gone before this host asks it, and its fault is
            # enough. A doctor that found nothing wrong has only shown that it reaches this host: it
            # serves until this host has asked it.
            self.responder.waits_for = {
                name: reason
                for name, reason in for_each(self._hello, names, self._at_once).items()
                if reason and not self.responder.done.get(name)
            }
            return self.responder.waits_for

        self.missing = self.wait.until_none(pending)

    def wait_until_asked(self, wrong: str) -> dict[str, str]:
        """Wait until all other tasks have asked this host, and are done too.

        Args:
            wrong: Fault that this host reported to them. Hosts that heard of a fault need not ask
                this host any more.

        Returns:
            Reasons why tasks are late when the time is over, by task.
        """
        end = min(time.monotonic() + OTHER_SPEC_S, self.wait.started + self.wait.timeout)
        late = self._wait_for_leader() if self._follows else self._wait_for_others(wrong)
        # A doctor with another cluster spec cannot be told. It notices when it asks, if it asks at
        # all. Of the tasks of a large cluster, only the first one is sure to ask.
        asking = [self._leader] if self._follows else list(self.tasks)
        with_other_spec = [name for name in asking if self._has_other_spec(name)]
        while (
            self.own
            and time.monotonic() < end
            and not all(
                self.peers[name].process in self.responder.askers for name in with_other_spec
            )
        ):
            time.sleep(FIRST_S)
        return late

    def _wait_for_others(self, wrong: str) -> dict[str, str]:
        """Wait until all other tasks are done, and have asked this host if nothing is wrong."""
        others = [name for name in self.tasks if name not in self.own and name not in self.missing]
        with_other_spec = [name for name in others if self._has_other_spec(name)]

        def pending() -> dict[str, str]:
            late = {
                name: "it has not said that it is done"
                for name in others
                if name not in with_other_spec and name not in self.responder.done
            }
            if not wrong:
                late |= {
                    name: "it has not asked this host"
                    for name in others
                    if name not in late and not self._asked_by(name)
                }
            self.responder.waits_for = {**self.missing, **late}
            return late

        late = self.wait.until_none(pending)
        if self.leads:
            for name, missing in for_each(self._missing_at, some(late), self._at_once).items():
                if missing:
                    late[name] += f": it waits for {absent(missing, self.responder.spec)}"
        return late

    def _wait_for_leader(self) -> dict[str, str]:
        """Wait until the first task is done; return for whom it waits when the time is over."""
        leader = self._leader
        if leader in self.missing or self._has_other_spec(leader):
            return {}

        def pending() -> dict[str, str]:
            return {} if leader in self.responder.done else {leader: "it has not said how all are"}

        late = self.wait.until_none(pending)
        reasons = self._missing_at(leader) if late else {}
        return {name: f"{leader}: {reason}" for name, reason in reasons.items()} or late

    def _missing_at(self, name: str) -> dict[str, str]:
        """Ask a task for whom it waits; return the reasons by task."""
        try:
            answer = exchange.ask(self.tasks[name], self.responder.hello, "hello")
        except (OSError, ValueError):
            return {}
        missing = answer.get("missing")
        if not isinstance(missing, Mapping):
            return {}
        return {name: short(missing[name]) for name in missing if name in self.tasks}

    def report_done(self, wrong: str, claims: Sequence[str]) -> None:
        """Tell all other tasks that this host is done.

        Args:
            wrong: Description of the fault that was found; "" if there is none.
            claims: Tasks of this host, including those at whose addresses it cannot answer.
        """
        facts = {"serves": list(claims), "wrong": wrong}
        names = [
            name
            for name in self._told
            if name not in self.missing and not self._has_other_spec(name)
        ]
        for _ in range(TRIES):
            names = [
                name
                for name, reason in for_each(
                    lambda name: self._try("done", name, **facts), names, self._at_once
                ).items()
                if reason
            ]
            if not names:
                return
            time.sleep(FIRST_S)

    def share(self, directories: Sequence[str | None]) -> list[FileLookup]:
        """Write a file to each directory, and ask each other host whether it sees the file.

        The files are removed afterwards.

        Args:
            directories: Directories; None for one that cannot be used here.

        Returns:
            Results of each host for each directory.
        """
        lookups: list[FileLookup] = []
        for number, directory in enumerate(directories):
            if directory is None:
                continue
            token = secrets.token_hex(16)
            content = secrets.token_hex(16)
            path = Path(directory) / token_name(token)
            self._made += [
                directory_made
                for directory_made in missing_directories(directory)
                if directory_made not in self._made
            ]
            try:
                _write_token(path, content)
                hosts = self.hosts(with_own=False)
                with concurrent.futures.ThreadPoolExecutor(16) as pool:
                    answers = pool.map(
                        lambda name: self._look_up(name, directory, number, token, content),  # noqa: B023
                        hosts,
                    )
                    lookups += answers
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
                self.remove_directories()
        return lookups

    def remove_directories(self) -> None:
        """Remove the directories that `share` created.

        A directory stays if another process has a file in it at this moment.
        """
        for directory in sorted(self._made, key=len, reverse=True):  # the innermost first
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def hosts(self, with_own: bool = True) -> list[str]:
        """Return one task of each host that answers and has the same cluster spec.

        Args:
            with_own: Boolean, whether to include this host, default True.

        Returns:
            Names of tasks, in the order of the cluster.
        """
        first: dict[str, str] = {}
        for name in self.tasks:
            if name in self.own and with_own:
                first.setdefault("own", name)
            elif (
                name in self.peers
                and not self._has_other_spec(name)
                and self.peers[name].process != self.responder.hello["nonce"]
            ):
                first.setdefault(self.peers[name].process, name)
        return list(first.values())

    def links(self, odd: Callable[[Sequence[Link]], list[Link]]) -> list[Link]:
        """Measure the network links one after the other.

        All pairs of hosts are measured if there are few hosts. Otherwise each host measures the
        link to the next one.

        Args:
            odd: Function that returns the links that are worse than they should be. They are
                measured again, and the better figures count, because a pause of one of the hosts is
                not a slow link.

        Returns:
            Measurements of the links.
        """
        links = []
        begun = time.monotonic()
        for source, target in pairs(self.hosts()):
            if (elapsed := time.monotonic() - begun) > LINKS_S:
                links.append(
                    Link(source, target, error=f"not measured: the others took {elapsed:.0f} s")
                )
            else:
                links.append(self._measure(source, target))
        for _ in range(AGAIN):
            for link in odd(links):
                if time.monotonic() - begun <= LINKS_S:
                    links[links.index(link)] = link.better(self._measure(link.source, link.target))
        return links

    def _measure(self, source: str, target: str) -> Link:
        if source in self.own:
            return exchange.measure(source, target, self.tasks[target], self.responder.hello)
        try:
            answer = exchange.ask(
                self.tasks[source], self.responder.hello, "measure", exchange.MEASURE_S, peer=target
            )
            return Link(
                source,
                target,
                float(answer["latency"]),
                float(answer["rate"]),
                str(answer["error"])[:300],
            )
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            return Link(source, target, error=str(error))

    def _look_up(
        self, name: str, directory: str, number: int, token: str, content: str
    ) -> FileLookup:
        try:
            answer = exchange.ask(
                self.tasks[name],
                self.responder.hello,
                "token",
                exchange.MEASURE_S,
                directory=number,
                token=token,
            )
        except (OSError, ValueError) as error:
            return FileLookup(directory, name, error=str(error))
        other = answer.get("directory")
        return FileLookup(
            directory,
            name,
            None if other is None else str(other)[:300],
            answer.get("content") == content,
        )

    def _hello(self, name: str) -> str:
        """Ask a task who it is, and return the reason if it does not answer, else ""."""
        left = self.wait.timeout - self.elapsed
        # Return the reason of the last attempt, rather than wait beyond the time limit.
        if left <= 0 and self._reasons:
            return self._reasons.get(name, "not asked: the others took all the time")
        reason = self._ask_hello(name, min(exchange.EXCHANGE_S, max(left, LEAST_S)))
        self._reasons[name] = reason
        return reason

    def _ask_hello(self, name: str, bound: float) -> str:
        try:
            answer = exchange.ask(self.tasks[name], self.responder.hello, "hello", bound)
            received = float(answer.get("received", answer["sent"]))
            now = float(answer.get("now", answer["came"]))
        except (Refused, OSError, ValueError, TypeError, OverflowError) as error:
            return str(error)
        offset = ((received - answer["sent"]) + (now - answer["came"])) / 2
        self.peers[name] = Peer(
            name,
            self.tasks[name],
            answer,
            offset,
            max(answer["came"] - answer["sent"] - (now - received), 0.0) / 2,
        )
        return ""

    def _try(self, question: str, name: str, **facts: Any) -> str:
        try:
            exchange.ask(self.tasks[name], self.responder.hello, question, **facts)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _asked_by(self, name: str) -> bool:
        """Return whether the process at a task's address has asked all that it should ask.

        The result is also True for a task that was never reached, because nobody waits for it.
        """
        peer = self.peers.get(name)
        return (
            peer is None
            or self._has_other_spec(name)
            or self._to_be_asked <= self.responder.askers.get(peer.process, set())
        )

    def _has_other_spec(self, name: str) -> bool:
        """Return whether a task answered with another cluster spec.

        Such a task answers no other questions.
        """
        return (
            name in self.peers
            and self.peers[name].hello.get("cluster") != self.responder.hello["cluster"]
        )


def _neighbours(tasks: Sequence[Task], own: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the tasks that those of a host ask, and the ones behind them in the ring.

    A task at whose address another process answers is asked too.
    """
    ring = sorted(map(str, tasks))
    behind = {ring[(ring.index(name) + 1) % len(ring)] for name in own}
    return set(own).union(
        *(preflight.peers_of(tasks, task) for task in tasks if str(task) in own)
    ), behind


def _write_token(path: Path, content: str) -> None:
    """Write a file, and ignore errors.

    If the file cannot be written, the check of the directory has already reported the reason.
    """
    for _ in range(TRIES):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="ascii")
            return


def pairs(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of hosts whose links are measured.

    Example:
        >>> pairs(["a", "b"]), len(pairs("abcde")), pairs("abcdef")[-1]
        ([('a', 'b'), ('b', 'a')], 20, ('f', 'a'))
    """
    if len(hosts) <= ALL_PAIRS:
        return list(itertools.permutations(hosts, 2))
    return [(host, hosts[(index + 1) % len(hosts)]) for index, host in enumerate(hosts)]


@contextlib.contextmanager
def serving(responder: Responder, members: Sequence[Task]):
    """Answer at the addresses of this host's tasks while the block runs.

    Args:
        responder: Source of the answers.
        members: Tasks of this host; evaluators are left out, because they do not listen.

    Yields:
        Errors of the tasks whose addresses cannot be listened at: a dict from task to OSError.
    """
    failed: dict[str, OSError] = {}
    with contextlib.ExitStack() as stack:
        for task in members:
            if task.type == "evaluator":
                continue
            try:
                stack.enter_context(Server(responder, task))
            except OSError as error:
                failed[str(task)] = error
        yield failed
