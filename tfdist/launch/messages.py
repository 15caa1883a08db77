"""What the launchers of several hosts tell each other is written down here as facts; nothing is sent or decided."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

from tfdist.launch.failures import Kind

_VICTIMS = {Kind.LOST_PEERS.value, Kind.TRANSIENT.value, Kind.UNRESPONSIVE.value}


@dataclasses.dataclass(frozen=True)
class Terms:
    """When a generation begins and ends.

    Attributes:
        min_workers: Fewer never run.
        max_workers: More never run; further slots are spare.
        window: Seconds without a change to wait for more hosts, where at least `min_workers` and fewer than
            `max_workers` can run, default 30.
        silence: Seconds without a sign of life after which a host counts as lost, default 5.
        timeout: Seconds for `min_workers` to come together, default 300.
        grace: Seconds for a host to end its workers, after which it counts as lost, default 60.
        command_digest: Of the command that all hosts run; "": that of the first to join.
        launch_id: Names the launch; default a name that no other has.

    Raises:
        ValueError: A bound is no bound.
    """

    min_workers: int
    max_workers: int
    window: float = 30.0
    silence: float = 5.0
    timeout: float = 300.0
    grace: float = 60.0
    command_digest: str = ""
    launch_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self):
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"workers: expected 1 <= MIN <= MAX, received MIN {self.min_workers}, MAX {self.max_workers}"
            )
        for name in ("silence", "timeout", "grace"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}: expected more than 0 seconds, received {getattr(self, name)}"
                )
        if not self.window >= 0:
            raise ValueError(f"window: expected 0 seconds or more, received {self.window}")


@dataclasses.dataclass(frozen=True)
class Start:
    """Start these workers.

    Attributes:
        generation: 0, 1, ...; higher ones supersede lower ones of the same launch.
        launch_id: Names the launch; equal on all hosts.
        addresses: "host:port" of each worker of the cluster, by index.
        first: Index of the first worker that this host runs.
        count: How many it runs from there.
    """

    generation: int
    launch_id: str
    addresses: tuple[str, ...]
    first: int
    count: int


@dataclasses.dataclass(frozen=True)
class Stop:
    """End the workers of a generation, then say `Member.stopped`.

    One that is not gentle may follow a gentle one: a host was lost meanwhile, for which the others may wait in vain.

    Attributes:
        generation: Which.
        reason: Why, for a person.
        gently: Whether they get SIGTERM and time to save, or have nothing to lose.
    """

    generation: int
    reason: str
    gently: bool


@dataclasses.dataclass(frozen=True)
class Cut:
    """End all workers here at once: the others go on without this host."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Finish:
    """The launch is over: end what still runs here, and exit."""

    code: int
    text: str


Order = Start | Stop | Cut | Finish


@dataclasses.dataclass(frozen=True)
class Report:
    """What happened to one host's share of a generation.

    Attributes:
        host: Its name and address.
        what: "failed"; "lost": the host itself went; "preempted".
        kind: Value of `failures.Kind` of what failed.
        text: For a person.
        counted: Whether it uses up a restart.
        signature: Equal for the same error at the same step; "": unknown.
        code: Exit code of the launch should this be its end.
    """

    host: str
    what: str
    kind: str = ""
    text: str = ""
    counted: bool = True
    signature: str = ""
    code: int = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a generation failed.

    Attributes:
        generation: Its number.
        seconds: How long it ran.
        reports: What happened, in the order in which it was heard of; at least one.
    """

    generation: int
    seconds: float
    reports: tuple[Report, ...]

    @property
    def cause(self) -> Report:
        """The first report that is not only of peers that were gone; where all are, the first.

        Example:
            >>> victim, lost = Report("a", "failed", kind="lost peers"), Report("b", "lost")
            >>> Outcome(0, 60.0, (victim, lost)).cause.host
            'b'
        """
        own = (
            report
            for report in self.reports
            if report.what != "preempted" and report.kind not in _VICTIMS
        )
        return next(own, self.reports[0])


@dataclasses.dataclass(frozen=True)
class Decision:
    """What follows a failure.

    Attributes:
        restart: Whether there is another generation.
        delay: Seconds until then, at least.
        text: Why, for a person.
        code: Exit code where there is none; None: that of the cause.
    """

    restart: bool
    delay: float = 0.0
    text: str = ""
    code: int | None = None


Decide = Callable[[Outcome], Decision]
