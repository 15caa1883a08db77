"""The orders of a rendezvous become attempts of this host's launcher, and their endings reports; nothing is decided here."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from tfdist.cluster.addresses import resolve_address
from tfdist.cluster.spec import ClusterSpec
from tfdist.launch import messages
from tfdist.launch.failure_report import format_verdict, short_path
from tfdist.launch.failures import Kind
from tfdist.launch.json_channel import check_token
from tfdist.launch.messages import Cut, Decision, Finish, Order, Start, Stop, Terms
from tfdist.launch.output import Console
from tfdist.launch.policy import Cause, Failed, Policy
from tfdist.launch.rendezvous import Rendezvous
from tfdist.launch.rendezvous_client import RendezvousClient
from tfdist.launch.supervisor import PEER_SECONDS, Supervisor
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime.launch_protocol import PREEMPTED_CODE

POLL_SECONDS = 0.1
TOKEN = "TFDIST_TOKEN"


def read_token(path: str | None) -> bytes:
    """What all launchers of a launch know.

    Args:
        path: Of a file that holds it; None: the variable TFDIST_TOKEN does.

    Raises:
        ValueError: There is none, it is too short, or others may read the file.
    """
    if path is None:
        token, source = os.environ.get(TOKEN, "").encode(), TOKEN
        if not token:
            raise ValueError(
                f"--rendezvous: expected a secret that all hosts share, in a file (--token-file) or in {TOKEN}, received none; such as: "
                "python -c 'import secrets; print(secrets.token_hex())' > token; chmod 600 token"
            )
    else:
        source = f"--token-file {path}"
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise ValueError(
                        f"{source}: expected a file that its owner alone can read, received one open to others; chmod 600 {path}"
                    )
                token = file.read().strip()
        except OSError as error:
            raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    try:
        check_token(token)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return token


def own_host(rendezvous: str) -> str:
    """The address of this machine by which it reaches the rendezvous, and others reach it.

    Args:
        rendezvous: "host:port".

    Raises:
        ValueError: The host has no address, or there is no way to it.

    Example:
        >>> own_host("127.0.0.1:2345")
        '127.0.0.1'
    """
    try:
        family, place = resolve_address(rendezvous)
        with socket.socket(
            family, socket.SOCK_DGRAM
        ) as probe:  # sends nothing: asks the kernel for the way
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError as error:
        raise ValueError(
            f"--rendezvous {rendezvous}: there is no way to it from here ({error}); name this host's address with --host"
        ) from error


@contextlib.contextmanager
def meeting(
    address: str, token: bytes, terms: Terms, policy: Policy, say: Callable[[str], None]
) -> Iterator[Rendezvous | None]:
    """The rendezvous itself where this is the first host, None on all others.

    Args:
        address: "host:port" of the rendezvous.
        token: Of `read_token`.
        terms: How many workers, and the bounds.
        policy: Decides about restarts.
        say: Takes lines for a person.
    """

    def decide(outcome: messages.Outcome) -> Decision:
        cause = outcome.cause
        lost = Cause(Kind.SIGNAL.value, f"{cause.host} {cause.what}")
        decision = policy.decide(Cause.from_text(cause.signature) if cause.signature else lost)
        return Decision(
            decision.restart,
            decision.delay,
            f"{cause.host}: {cause.text}; {decision.text}".removesuffix("; "),
        )

    try:
        server = Rendezvous(address, token, terms, decide=decide, say=say)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
        yield None
        return
    with server:
        yield server


def run(
    supervisor: Supervisor,
    member: RendezvousClient,
    server: Rendezvous | None,
    plan: Callable[[Start, ClusterSpec], Sequence[TaskPlan]],
    console: Console,
    log_dir: str,
) -> int:
    """Does what the rendezvous orders until it orders the end, or somebody here does.

    Args:
        supervisor: Of this host's tasks.
        member: This host's place in the launch.
        server: The rendezvous, if it is here.
        plan: The tasks of a start that run here.
        console: For words to a person.
        log_dir: For the report.

    Returns:
        The exit code, the same on all hosts but those that leave.
    """
    begun = time.monotonic()
    while True:
        order = member.order(POLL_SECONDS)
        if isinstance(order, Finish):
            why = "over" if server else order.text  # the rendezvous has said why where it is
            console.notice(
                f"tfdist: {why} after {time.monotonic() - begun:.1f} s; logs in {short_path(log_dir)}"
            )
            return order.code
        if supervisor.interrupted:
            return _leave(supervisor, member, server, time.monotonic() - begun, {})
        if isinstance(order, Stop):
            member.stopped()
        if isinstance(order, Start):
            left = _attempt(supervisor, member, plan, order, console, log_dir)
            if left is not None:
                return _leave(supervisor, member, server, time.monotonic() - begun, left)


def _attempt(
    supervisor: Supervisor,
    member: RendezvousClient,
    plan,
    start: Start,
    console: Console,
    log_dir: str,
) -> dict[str, int | None] | None:
    """One generation's share of this host; the return codes where somebody here has asked for the end."""
    received: list[Order] = []

    def ordered() -> bool:
        # After a Cut or Finish nothing more is meant for these tasks: what comes may be the next Start.
        if not any(isinstance(order, Cut | Finish) for order in received):
            order = member.order(0)
            if order is not None:
                received.append(order)
        return bool(received)

    def peer_grace() -> float:
        if any(isinstance(order, Cut) for order in received):
            return 0.0  # the others go on, and nobody here may be at work by then
        return (
            math.inf
            if all(isinstance(order, Stop) and order.gently for order in received)
            else PEER_SECONDS
        )

    spec = ClusterSpec({"worker": start.addresses})
    began = time.time()
    outcome, codes = supervisor.attempt(start.generation, plan(start, spec), ordered, peer_grace)
    if supervisor.interrupted:
        return codes
    for order in received:
        reason = order.text if isinstance(order, Finish) else getattr(order, "reason", "")
        console.notice(f"tfdist: ended the tasks here: {reason}")
    if outcome is not None and not any(isinstance(order, Cut) for order in received):
        _report(member, outcome, console, began, log_dir)
    elif received:
        member.stopped()
    else:
        member.done()
    return None


def _report(
    member: RendezvousClient, outcome: Failed, console: Console, began: float, log_dir: str
) -> None:
    failure, cause = outcome.verdict.cause, outcome.cause
    preempted = failure.kind is Kind.PREEMPTED
    if preempted and cause.progressed:
        console.notice("tfdist: the tasks here were preempted, and have saved")
        member.preempted()
        return
    console.notice(format_verdict(outcome.verdict, began, log_dir))
    text = f"{failure.task} {failure.how}" + (f": {failure.message}" if failure.message else "")
    member.failed(
        failure.kind.value,
        text,
        counted=not preempted,
        signature=cause.to_text(),
        code=failure.code,
    )


def _leave(
    supervisor: Supervisor,
    member: RendezvousClient,
    server: Rendezvous | None,
    seconds: float,
    codes: dict[str, int | None],
) -> int:
    """Ends this host's part because somebody here has asked for it."""
    if PREEMPTED_CODE in codes.values():
        member.preempted(leaving=True)
    code = supervisor.farewell(seconds, codes)
    if server is not None:
        server.close(code, "the first host's launcher was asked to end")
    return code


def digest(words: Sequence[str]) -> str:
    """A command in words that tell it, and differ where it differs.

    Example:
        >>> digest(["train.py", "--lr", "1"])
        'train.py --lr 1 (891e5519)'
    """
    text = " ".join(words)
    return f"{text[:80]} ({hashlib.sha256(repr(list(words)).encode()).hexdigest()[:8]})"
