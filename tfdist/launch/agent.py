"""Elastic agent: runs the orders of the rendezvous on this host and reports the outcomes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from tfdist.cluster.addresses import resolve_address
from tfdist.cluster.json_channel import check_token
from tfdist.cluster.spec import ClusterSpec
from tfdist.launch import messages
from tfdist.launch.failure_report import format_verdict, short_path
from tfdist.launch.failures import Kind
from tfdist.launch.messages import Cut, Decision, Finish, Order, Start, Stop, Terms
from tfdist.launch.output import Console
from tfdist.launch.policy import Cause, Failed, Policy
from tfdist.launch.rendezvous import Rendezvous
from tfdist.launch.rendezvous_client import RendezvousClient
from tfdist.launch.supervisor import PEER_S, Supervisor
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime.launch_protocol import PREEMPTED_CODE, TOKEN

POLL_S = 0.1


def read_token(path: str | None, variable: str | None) -> bytes:
    """Read the secret that all launchers of a launch share.

    Args:
        path: Path of a file with the secret; None to use the variable.
        variable: Value of the variable TFDIST_TOKEN, None if it is not set.

    Raises:
        ValueError: If there is no secret, it is too short, or other users may read the file.
    """
    if path is None:
        token = (variable or "").encode()
        source = TOKEN
        if not token:
            raise ValueError(
                "--rendezvous: expected a secret that all hosts share, in a file (--token-file) "
                f"or in {TOKEN}, received none; such as: python -c 'import secrets; "
                "print(secrets.token_hex())' > token; chmod 600 token"
            )
    else:
        source = f"--token-file {path}"
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise ValueError(
                        f"{source}: expected a file that only its owner can read, received one "
                        f"that others can read; run chmod 600 {path}"
                    )
                token = file.read().strip()
        except OSError as error:
            raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    try:
        check_token(token)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return token


def derive_task_secret(token: bytes, launch: str) -> str:
    """Return the secret of the tasks of a launch, from which nobody can derive the token.

    Args:
        token: Secret of the launchers.
        launch: Unique name of the launch.

    Example:
        >>> derive_task_secret(b"0123456789abcdef", "launch")[:16]
        'a366803f2334770e'
    """
    return hmac.digest(token, b"tasks " + launch.encode(), hashlib.sha256).hex()


def own_host(rendezvous: str) -> str:
    """Return the address by which this machine reaches the rendezvous.

    Other hosts reach this machine at the same address.

    Args:
        rendezvous: Address of the rendezvous as "host:port".

    Raises:
        ValueError: If the host has no address, or there is no route to it.

    Example:
        >>> own_host("127.0.0.1:2345")
        '127.0.0.1'
    """
    try:
        family, sockaddr = resolve_address(rendezvous)
        # Connecting a datagram socket sends nothing; it asks the kernel for the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(sockaddr)
            return probe.getsockname()[0]
    except OSError as error:
        raise ValueError(
            f"--rendezvous {rendezvous}: this host has no route to it ({error}); pass this host's "
            "address with --host"
        ) from error


@contextlib.contextmanager
def serve_rendezvous(
    address: str, token: bytes, terms: Terms, policy: Policy, show_line: Callable[[str], None]
) -> Iterator[Rendezvous | None]:
    """Run the rendezvous server if this is the first host; yield it, or None on other hosts.

    Args:
        address: Address of the rendezvous as "host:port".
        token: Secret, as `read_token` returns it.
        terms: Number of workers and the timeouts.
        policy: Restart policy.
        show_line: Function that shows a line to the user.
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
        server = Rendezvous(address, token, terms, decide=decide, show_line=show_line)
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
    """Execute the orders of the rendezvous until the launch ends or a user interrupts it.

    Args:
        supervisor: Supervisor of this host's tasks.
        member: Client of this host at the rendezvous.
        server: Rendezvous server, if it runs on this host.
        plan: Function that returns the tasks of a generation that run on this host.
        console: Console for messages to the user.
        log_dir: Log directory, for the report.

    Returns:
        The exit code, which is the same on all hosts except those that leave.
    """
    started = time.monotonic()
    while True:
        order = member.order(POLL_S)
        if isinstance(order, Finish):
            # On the first host the rendezvous has already shown the reason.
            reason = "over" if server else order.text
            console.notice(
                f"tfdist: {reason} after {time.monotonic() - started:.1f} s; logs in "
                f"{short_path(log_dir)}"
            )
            return order.code
        if supervisor.interrupted:
            return _leave(supervisor, member, server, time.monotonic() - started, {})
        if isinstance(order, Stop):
            member.stopped()
        if isinstance(order, Start):
            codes = _attempt(supervisor, member, plan, order, console, log_dir)
            if codes is not None:
                return _leave(supervisor, member, server, time.monotonic() - started, codes)


def _attempt(
    supervisor: Supervisor,
    member: RendezvousClient,
    plan,
    start: Start,
    console: Console,
    log_dir: str,
) -> dict[str, int | None] | None:
    """Run this host's tasks of one generation.

    Returns:
        The return codes by task if a user here has interrupted the launch, else None.
    """
    received: list[Order] = []

    def ordered() -> bool:
        # Do not read further orders after a Cut or Finish: the next one may be the next Start.
        if not any(isinstance(order, Cut | Finish) for order in received):
            order = member.order(0)
            if order is not None:
                received.append(order)
        return bool(received)

    def peer_grace() -> float:
        if any(isinstance(order, Cut) for order in received):
            return 0.0  # the other hosts continue, and no worker may run here by then
        return (
            math.inf
            if all(isinstance(order, Stop) and order.gently for order in received)
            else PEER_S
        )

    spec = ClusterSpec({"worker": start.addresses})
    attempt_started = time.time()
    outcome, codes = supervisor.attempt(start.generation, plan(start, spec), ordered, peer_grace)
    if supervisor.interrupted:
        return codes
    for order in received:
        reason = order.text if isinstance(order, Finish) else getattr(order, "reason", "")
        console.notice(f"tfdist: ended the tasks here: {reason}")
    if outcome is not None and not any(isinstance(order, Cut) for order in received):
        _report(member, outcome, console, attempt_started, log_dir)
    elif received:
        member.stopped()
    else:
        member.done()
    return None


def _report(
    member: RendezvousClient,
    outcome: Failed,
    console: Console,
    attempt_started: float,
    log_dir: str,
) -> None:
    failure = outcome.verdict.cause
    cause = outcome.cause
    preempted = failure.kind is Kind.PREEMPTED
    if preempted and cause.progressed:
        console.notice("tfdist: the tasks here were preempted, and have saved")
        member.preempted()
        return
    console.notice(format_verdict(outcome.verdict, attempt_started, log_dir))
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
    """End this host's part of the launch after a user here has interrupted it."""
    if PREEMPTED_CODE in codes.values():
        member.preempted(leaving=True)
    code = supervisor.farewell(seconds, codes)
    if server is not None:
        server.close(code, "the first host's launcher was interrupted")
    return code


def digest(command: Sequence[str]) -> str:
    """Return a readable text for a command that differs for different commands.

    Example:
        >>> digest(["train.py", "--lr", "1"])
        'train.py --lr 1 (891e5519)'
    """
    text = " ".join(command)
    return f"{text[:80]} ({hashlib.sha256(repr(list(command)).encode()).hexdigest()[:8]})"
