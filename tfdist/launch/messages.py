"""Messages between the launchers of several hosts: terms, orders, reports and decisions."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

from tfdist.launch.failures import Kind

_VICTIMS = {Kind.LOST_PEERS.value, Kind.TRANSIENT.value, Kind.UNRESPONSIVE.value}


@dataclasses.dataclass(frozen=True)
class Terms:
    """Number of workers and timeouts that decide when a generation starts and ends.

    Attributes:
        min_workers: Minimum number of workers of a generation.
        max_workers: Maximum number of workers of a generation; further slots are spare.
        window: Seconds without a change of membership to wait for more hosts, if at least
            `min_workers` and fewer than `max_workers` can run, default 30.
        host_timeout: Seconds without a heartbeat after which a host counts as lost, default 5.
        timeout: Seconds for `min_workers` to join, default 300.
        grace: Seconds for a host to end its workers, after which it counts as lost, default 60.
        command_digest: Digest of the command that all hosts run; "" (default) for the digest of the
            first host to join.
        launch_id: Unique name of the launch, default a random name.

    Raises:
        ValueError: If a number or a timeout is out of range.
    """

    min_workers: int
    max_workers: int
    window: float = 30.0
    host_timeout: float = 5.0
    timeout: float = 300.0
    grace: float = 60.0
    command_digest: str = ""
    launch_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self):
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"workers: expected 1 <= MIN <= MAX, received MIN {self.min_workers}, MAX "
                f"{self.max_workers}"
            )
        for name in ("host_timeout", "timeout", "grace"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}: expected more than 0 seconds, received {getattr(self, name)}"
                )
        if not self.window >= 0:
            raise ValueError(f"window: expected 0 seconds or more, received {self.window}")


@dataclasses.dataclass(frozen=True)
class Start:
    """Order to start workers.

    Attributes:
        generation: Number of the generation, from 0. Higher generations supersede lower ones of the
            same launch.
        launch_id: Unique name of the launch, equal on all hosts.
        addresses: Address of each worker of the cluster as "host:port", by index.
        first: Index of the first worker that this host runs.
        count: Number of workers that this host runs, from there.
        snapshot_servers: Address of each host's snapshot server as "host:port"; empty if one of the
            hosts has none.
        index: Index of this host's server.
    """

    generation: int
    launch_id: str
    addresses: tuple[str, ...]
    first: int
    count: int
    snapshot_servers: tuple[str, ...] = ()
    index: int = 0


@dataclasses.dataclass(frozen=True)
class Stop:
    """Order to end the workers of a generation and then call `RendezvousClient.stopped`.

    A stop that is not gentle may follow a gentle one, after a host was lost for which the others
    would wait in vain.

    Attributes:
        generation: Number of the generation.
        reason: Reason, for the user.
        gently: Whether the workers get SIGTERM and time to save a snapshot; False if they have
            nothing to lose.
    """

    generation: int
    reason: str
    gently: bool


@dataclasses.dataclass(frozen=True)
class Cut:
    """Order to end all workers here at once: the others continue without this host."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Finish:
    """Order to end all remaining tasks and exit, because the launch is over."""

    code: int
    text: str


Order = Start | Stop | Cut | Finish


@dataclasses.dataclass(frozen=True)
class Report:
    """Report about one host's share of a generation.

    Attributes:
        host: Name and address of the host.
        what: "failed", "lost" (the host itself is gone) or "preempted".
        kind: Value of `failures.Kind` of the failure.
        text: Description for the user.
        counted: Whether the failure uses up a restart, default True.
        signature: Text that is equal for the same error at the same step; "" (default) if unknown.
        code: Exit code of the launch if this report ends it, default 1.
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
    """Outcome of a generation that failed.

    Attributes:
        generation: Number of the generation.
        seconds: Duration of the generation in seconds.
        reports: Reports in the order of arrival; at least one.
    """

    generation: int
    seconds: float
    reports: tuple[Report, ...]

    @property
    def cause(self) -> Report:
        """Return the first report that does not merely name lost peers, else the first report.

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
    """Decision after a failure.

    Attributes:
        restart: Whether to start another generation.
        delay: Minimum seconds until then, default 0.
        text: Reason, for the user.
        code: Exit code if there is no restart; None (default) for the exit code of the cause.
    """

    restart: bool
    delay: float = 0.0
    text: str = ""
    code: int | None = None


Decide = Callable[[Outcome], Decision]
