"""Elastic membership: a state machine that forms generations of workers from member hosts.

It uses no I/O, threads or clocks. The server passes in each message with the time on its monotonic
clock, and sends the messages in `Membership.outbox`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfdist.cluster.addresses import join_address
from tfdist.launch.messages import Decide, Finish, Outcome, Report, Start, Stop, Terms
from tfdist.launch.terminal_text import printable
from tfdist.runtime.formatting import counted
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, TRANSIENT_CODE

PORTS_S = 10.0  # timeout for a host to find free ports, which takes a millisecond
PORTS_TRIES = 20  # attempts until two launchers of one host choose different ports
BEAT_S = 1.0  # heartbeat interval
MAX_TEXT = 300  # maximum characters of a text from the network


@dataclasses.dataclass
class _Host:
    """A host that has joined."""

    id: str
    host: str
    name: str
    slots: int
    snapshot_port: int  # of its snapshot server; 0 without one
    last_message: float
    leaving: bool = False

    def __str__(self) -> str:
        return self.host if self.name in ("", self.host) else f"{self.name} ({self.host})"


@dataclasses.dataclass
class _Generation:
    """Workers that start and end together.

    `counts` maps host keys to numbers of workers, in the order of the workers.
    """

    number: int
    counts: dict[int, int]
    since: float
    tries: int = 1
    started: bool = False
    ports: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    done: set[int] = dataclasses.field(default_factory=set)
    ended: set[int] = dataclasses.field(default_factory=set)  # ended without being done
    reports: list[Report] = dataclasses.field(default_factory=list)
    stop: Stop | None = None
    stopped: float = 0.0  # time of the stop

    @property
    def busy(self) -> set[int]:
        return self.counts.keys() - self.done - self.ended


class Membership:
    """Decide which hosts are members, and when a generation starts and ends.

    Args:
        terms: Number of workers and the timeouts.
        decide: Restart policy.
        show_line: Function that shows a line to the user.
        now: Time in seconds on a monotonic clock, like every `now` of this class.

    Attributes:
        outbox: List of (key of a host, message to send); the message None closes the connection.
        finish: Outcome of the launch, or None while it runs.
    """

    def __init__(self, terms: Terms, decide: Decide, show_line: Callable[[str], None], now: float):
        self.terms = terms
        self._decide = decide
        self._show_line = show_line
        self.outbox: list[tuple[int, dict[str, Any] | None]] = []
        self.finish: Finish | None = None
        self._digest = terms.command_digest
        self._hosts: dict[int, _Host] = {}
        # (id, host and name), in the order of first joining
        self._order: list[tuple[str, str]] = []
        self._departed: dict[str, str] = {}  # id -> host and reason
        self._generation: _Generation | None = None
        self._number = 0  # of the next generation
        self._changed = now
        self._ticked = now
        self._waiting_since = now
        self._not_before = now

    def joined(self, key: int, hello: Mapping[str, Any], now: float) -> None:
        """Process a host's request to join; the key names its connection."""
        if self.finish:
            self._send(key, "finish", code=self.finish.code, text=self.finish.text)
            return
        host = _host(hello, now)
        digest = str(hello.get("digest", ""))
        if host is None:
            return self._refuse(
                key,
                "a launcher of another version",
                "its messages are unknown; install the same version of tfdist on all hosts",
            )
        if not self._number and not self._hosts:
            self._digest = self.terms.command_digest or digest
        if digest != self._digest:
            return self._refuse(
                key,
                str(host),
                f"its command is {digest[:MAX_TEXT]}, the others run "
                f"{self._digest[:MAX_TEXT]}; start the same command on all hosts",
            )
        for other, known in list(self._hosts.items()):
            if known.id == host.id:
                self.gone(other, "it came back over a new connection", now)
                self.outbox.append((other, None))
        self._assign_order(host)
        self._departed.pop(host.id, None)
        self._hosts[key] = host
        self._changed = now
        terms = self.terms
        self._send(
            key,
            "welcome",
            launch=terms.launch_id,
            host_timeout=terms.host_timeout,
            window=terms.window,
            beat=min(BEAT_S, terms.host_timeout / 4),
        )
        self._show_line(
            f"tfdist: {host} joined with {counted(host.slots, 'slot')}; {self._summary()}"
        )

    def receive(self, key: int, message: Mapping[str, Any], now: float) -> None:
        """Process a message from a member, which is also a heartbeat.

        Messages about an earlier generation count as a heartbeat only.
        """
        host = self._hosts.get(key)
        if host is None or self.finish:
            return
        host.last_message = max(host.last_message, now)
        kind = message.get("do")
        generation = self._generation
        if kind == "beat":
            self._send(key, "ack", number=message.get("number"))
        elif kind == "bye":
            self.gone(key, _text(message, "reason"), now)
        elif (
            generation is None
            or message.get("generation") != generation.number
            or key not in generation.counts
        ):
            return
        elif kind == "ports" and not generation.started:
            self._ports(key, message)
        elif not generation.started or key not in generation.busy:
            return
        elif kind == "done":
            generation.done.add(key)
        elif kind == "stopped":
            generation.ended.add(key)
            if generation.stop is None:  # it was not told to stop
                self._lose(
                    generation,
                    key,
                    Report(str(host), "failed", text="it ended its workers without being asked"),
                    now,
                )
        elif kind == "failed":
            self._lose(generation, key, _report(str(host), message), now)
        elif kind == "preempted":
            generation.ended.add(key)
            if message.get("leaving"):
                host.leaving = True
                self._changed = now
            if generation.stop is None:
                self._stop(f"{host} was preempted", True, now)

    def gone(self, key: int, reason: str, now: float) -> None:
        """Remove a member whose connection ended or that counts as lost."""
        host = self._hosts.pop(key, None)
        if host is None or self.finish:
            return
        self._departed[host.id] = f"{host}, which had {counted(host.slots, 'slot')} ({reason})"
        self._changed = now
        generation = self._generation
        self._show_line(f"tfdist: lost {host}: {reason}; {self._summary()}")
        if generation is None or key not in generation.busy:
            return
        if not generation.started:
            self._generation = None
        else:
            self._lose(
                generation, key, Report(str(host), "lost", text=reason, code=TRANSIENT_CODE), now
            )

    def tick(self, now: float) -> None:
        """Execute the actions that are due.

        Call it after all received messages, and at least several times a second.
        """
        stalled = now - self._ticked
        self._ticked = now
        if self.finish:
            return
        for key, host in list(self._hosts.items()):
            # This process was stopped or starved: do not count the stall as silence of the hosts.
            if stalled > self.terms.host_timeout / 4:
                host.last_message = min(now, host.last_message + stalled)
            if now - host.last_message >= self.terms.host_timeout:
                self._remove_hosts([key], f"it was silent for {self.terms.host_timeout:g} s", now)
        generation = self._generation
        if generation is None:
            self._try_to_form(now)
        elif not generation.started:
            self._collect_ports(generation, now)
        elif generation.done == generation.counts.keys():
            self.end(0, f"all {counted(sum(generation.counts.values()), 'worker')} done")
        elif generation.stop is None:
            self._stop_to_grow(generation, now)
        elif not generation.busy:
            self._finish_generation(generation, now)
        elif now - generation.stopped >= self.terms.grace:
            self._remove_hosts(
                generation.busy, f"its workers did not end within {self.terms.grace:g} s", now
            )

    def end(self, code: int, text: str) -> None:
        """End the launch for all hosts; only the first end takes effect."""
        if self.finish is None:
            self.finish = Finish(code, text)
            self._show_line(f"tfdist: {text}")
            for key in self._hosts:
                self._send(key, "finish", code=code, text=text)

    def _try_to_form(self, now: float) -> None:
        slots = self._slots()
        timed_out = now - self._waiting_since >= self.terms.timeout
        if slots >= self.terms.min_workers and now >= self._not_before:
            if timed_out or self._can_form(now):
                self._form(now)
        elif timed_out:
            present = (
                ", ".join(
                    f"{host} with {counted(host.slots, 'slot')}"
                    for host in self._ordered().values()
                )
                or "no host"
            )
            missing = "; ".join(self._departed.values()) or "hosts that never joined"
            self.end(
                TRANSIENT_CODE,
                f"after {self.terms.timeout:g} s, {slots} of at least {self.terms.min_workers} "
                f"workers can run. Present: {present}. Missing: {missing}. Start the same command "
                "on the missing hosts, or lower the minimum",
            )

    def _can_form(self, now: float) -> bool:
        return self._slots() >= self.terms.max_workers or now - self._changed >= self.terms.window

    def _form(self, now: float, tries: int = 1) -> None:
        """Form a generation and ask its hosts for free ports."""
        left = self.terms.max_workers
        counts = {}
        for key, host in self._ordered().items():
            count = min(host.slots, left)
            left -= count
            if count:
                counts[key] = count
            else:
                self._send(
                    key,
                    "note",
                    text=f"tfdist: {host} is a spare host: {self.terms.max_workers} workers run on "
                    "other hosts",
                )
        self._generation = _Generation(self._number, counts, now, tries)
        self._number += 1
        for key, count in counts.items():
            self._send(key, "ports", generation=self._generation.number, count=count)

    def _ports(self, key: int, message: Mapping[str, Any]) -> None:
        assert self._generation
        ports = message.get("ports")
        count = self._generation.counts[key]
        if (
            isinstance(ports, list)
            and len(ports) == count
            and all(type(port) is int and 0 < port < 65536 for port in ports)
        ):
            self._generation.ports[key] = ports
        else:
            problem = _text(message, "problem") or f"it sent {str(ports)[:MAX_TEXT]}"
            host = self._hosts[key]
            self._send(
                key,
                "finish",
                code=TRANSIENT_CODE,
                text=f"{host} has no {counted(count, 'free port')}: {problem}",
            )
            self.gone(key, f"it has no {counted(count, 'free port')}: {problem}", self._ticked)

    def _collect_ports(self, generation: _Generation, now: float) -> None:
        silent = generation.counts.keys() - generation.ports.keys()
        if silent:
            if now - generation.since >= PORTS_S:
                self._remove_hosts(silent, f"it sent no ports within {PORTS_S:g} s", now)
            return
        hosts = [(self._hosts[key].host, key) for key in generation.counts]
        addresses = [
            join_address(host, port) for host, key in hosts for port in generation.ports[key]
        ]
        if len(set(addresses)) < len(addresses):  # two launchers of one host chose the same port
            if generation.tries < PORTS_TRIES:
                return self._form(now, generation.tries + 1)
            return self.end(
                TRANSIENT_CODE,
                f"{PORTS_TRIES} times two workers chose the same port: "
                f"{', '.join(addresses)[:MAX_TEXT]}",
            )
        generation.started = True
        generation.since = now
        first = 0
        self._show_line(
            f"tfdist: generation {generation.number}: {counted(len(addresses), 'worker')} on "
            + ", ".join(f"{self._hosts[key]} ({count})" for key, count in generation.counts.items())
        )
        members = [self._hosts[key] for key in generation.counts]
        servers = tuple(join_address(each.host, each.snapshot_port) for each in members)
        if not all(each.snapshot_port for each in members):
            servers = ()
        for index, (key, count) in enumerate(generation.counts.items()):
            start = Start(
                generation.number,
                self.terms.launch_id,
                tuple(addresses),
                first,
                count,
                servers,
                index,
            )
            self._send(key, "start", **dataclasses.asdict(start))
            first += count

    def _stop_to_grow(self, generation: _Generation, now: float) -> None:
        """Stop the generation gently if more hosts wait to join.

        A generation with finished workers continues, because all of its workers finish soon.
        """
        running = sum(generation.counts.values())
        if (
            not generation.done
            and min(self._slots(), self.terms.max_workers) > running
            and self._can_form(now)
        ):
            self._stop(f"{self._summary()}, {running} of them running", True, now)

    def _lose(self, generation: _Generation, key: int, report: Report, now: float) -> None:
        generation.ended.add(key)
        # A host that is told to stop gently may fail because of that.
        if generation.stop is None or not generation.stop.gently:
            generation.reports.append(report)
        if generation.stop is None:
            self._changed = now
            self._stop(
                f"{report.host} {'was lost' if report.what == 'lost' else 'failed'}: {report.text}",
                False,
                now,
            )
        elif report.what == "failed":
            self._show_line(f"tfdist: while stopping, {report.host} failed: {report.text}")
        elif generation.stop.gently:  # the others may block on it while they save
            self._stop(
                f"{generation.stop.reason}; then {report.host} was lost: {report.text}", False, now
            )

    def _stop(self, reason: str, gently: bool, now: float) -> None:
        generation = self._generation
        assert generation
        generation.stop = Stop(generation.number, reason, gently)
        generation.stopped = now
        self._show_line(f"tfdist: generation {generation.number} stops: {reason}")
        for key in generation.busy:
            self._send(key, "stop", **dataclasses.asdict(generation.stop))

    def _finish_generation(self, generation: _Generation, now: float) -> None:
        """Start another generation or end the launch after all workers have ended."""
        if generation.reports:
            outcome = Outcome(
                generation.number, generation.stopped - generation.since, tuple(generation.reports)
            )
            decision = self._decide(outcome)
            if not decision.restart:
                code = outcome.cause.code if decision.code is None else decision.code
                return self.end(
                    code, decision.text or f"{outcome.cause.host}: {outcome.cause.text}"
                )
            self._not_before = now + decision.delay
            self._show_line(
                f"tfdist: {decision.text}"
                + (f"; waiting {decision.delay:g} s" if decision.delay else "")
            )
        self._generation = None
        self._waiting_since = max(now, self._not_before)

    def _remove_hosts(self, keys: Iterable[int], reason: str, now: float) -> None:
        for key in list(keys):
            self.gone(key, reason, now)
            self.outbox.append((key, None))

    def _refuse(self, key: int, name: str, reason: str) -> None:
        self._show_line(f"tfdist: refused {name}: {reason}")
        self._send(key, "finish", code=CONFIGURATION_CODE, text=f"refused {name}: {reason}")
        self.outbox.append((key, None))

    def _assign_order(self, host: _Host) -> None:
        """Give a host its place in the order of workers.

        It gets its old position, the position of an earlier launcher on the same host, or the last.
        """
        if any(id == host.id for id, _ in self._order):
            return
        present = {other.id for other in self._hosts.values()}
        for i, (id, name) in enumerate(self._order):
            if name == str(host) and id not in present:
                self._order[i] = (host.id, name)
                self._departed.pop(id, None)
                return
        self._order.append((host.id, str(host)))

    def _ordered(self) -> dict[int, _Host]:
        order = {id: i for i, (id, _) in enumerate(self._order)}
        staying = [item for item in self._hosts.items() if not item[1].leaving]
        return dict(sorted(staying, key=lambda item: order[item[1].id]))

    def _slots(self) -> int:
        return sum(host.slots for host in self._hosts.values() if not host.leaving)

    def _summary(self) -> str:
        slots = self._slots()
        terms = self.terms
        required = (
            terms.max_workers
            if terms.min_workers == terms.max_workers
            else f"{terms.min_workers} to {terms.max_workers}"
        )
        return f"{counted(slots, 'worker')} can run, {required} required"

    def _send(self, key: int, kind: str, **facts: Any) -> None:
        self.outbox.append((key, {"do": kind, **facts}))


def _host(hello: Mapping[str, Any], now: float) -> _Host | None:
    """Parse a request to join; return None if it is malformed."""
    texts = [hello.get(name) for name in ("id", "host", "name")]
    slots = hello.get("slots")
    snapshot_port = hello.get("snapshot_port", 0)
    if (
        hello.get("do") != "join"
        or not all(isinstance(text, str) for text in texts)
        or type(slots) is not int
        or slots < 1
        or type(snapshot_port) is not int
        or not 0 <= snapshot_port < 65536
    ):
        return None
    id, host, name = (_text(hello, key) for key in ("id", "host", "name"))
    return _Host(id, host, name, slots, snapshot_port, now)


def _report(host: str, message: Mapping[str, Any]) -> Report:
    code = message.get("code")
    return Report(
        host,
        "failed",
        kind=_text(message, "kind"),
        text=_text(message, "text", 10 * MAX_TEXT),
        counted=bool(message.get("counted", True)),
        signature=_text(message, "signature"),
        code=code if type(code) is int and 0 < code < 256 else 1,
    )


def _text(message: Mapping[str, Any], name: str, max_length: int = MAX_TEXT) -> str:
    """Return a text from another host, safe to print on a terminal."""
    return printable(str(message.get(name, "")), colour=False)[:max_length]
