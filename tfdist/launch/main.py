"""Entry point of `tfdist launch`: sets up and runs a supervised group of tasks."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import secrets
import shutil
import signal
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence

from tfdist.cluster.addresses import free_ports, is_here, nobody_here, split_address
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.launch import agent, config_options, doctor_check
from tfdist.launch.engines import launch_on, slurm_launch
from tfdist.launch.engines.fleet import Interrupted
from tfdist.launch.failure_report import short_path
from tfdist.launch.fault_injection import Chaos
from tfdist.launch.flags import DESCRIPTION, USAGE, add_flags, check, hang_timeouts, split
from tfdist.launch.isolation import isolate, warning
from tfdist.launch.messages import Start, Terms
from tfdist.launch.output import Console
from tfdist.launch.policy import Policy
from tfdist.launch.rendezvous_client import RendezvousClient
from tfdist.launch.slow_workers import SlowWorkers
from tfdist.launch.snapshot_server import SnapshotServer
from tfdist.launch.standby import Standbys
from tfdist.launch.supervisor import Supervisor
from tfdist.launch.task_plan import data_names, plan_tasks, resolve_command
from tfdist.launch.terminal_text import wants_colour
from tfdist.runtime.command import COMMON_EXIT_CODES, Command, usage_errors
from tfdist.runtime.fault_plan import Fault
from tfdist.runtime.fault_plan import parse as parse_faults
from tfdist.runtime.goodput import measure
from tfdist.runtime.guardian import Guardian
from tfdist.runtime.launch_protocol import (
    JOURNAL,
    PREEMPTED_CODE,
    RESULT,
    THREAD_VARIABLES,
    TRANSIENT_CODE,
    note,
    read_journal,
    take_token,
)
from tfdist.runtime.resource_limits import cores
from tfdist.runtime.snapshot_protocol import is_supported


def _run(flags: argparse.Namespace, words: list[str]) -> int:
    with usage_errors():
        return _launch(flags, words)


def _launch(flags: argparse.Namespace, words: list[str]) -> int:
    variable = take_token()
    if flags.on:
        launch_on.fill_in(flags)
    if flags.rendezvous:
        names = [f"worker:{index}" for index in range(flags.max_workers)]
        spec: ClusterSpec | None = None
        members: tuple[Task, ...] = ()
        drawer = names[0]
        known = names
        token = agent.read_token(flags.token_file, variable)
    else:
        spec, members = find_tasks(flags)
        names = [*map(str, members), *data_names(flags.data_workers or 0)]
        drawer = next((str(task) for task in members if _is_chief(spec, task)), names[0])
        known = [*map(str, spec.tasks)]
    faults = find_faults(flags.chaos, known)
    # With --on, each host resolves the command.
    command = tuple(words) if flags.on else resolve_command(words)
    task_environ = launch_on.task_environ(flags) if flags.on else os.environ
    if flags.check and (
        code := doctor_check.run(flags, doctor_check.doctor_words(flags, spec, words))
    ):
        return code
    log_dir = make_log_dir(slurm_launch.log_dir(flags) if flags.on == "slurm" else flags.log_dir)
    used = slurm_launch.restarts_used(log_dir) if flags.on == "slurm" else 0
    policy = Policy(flags.restarts, used)
    for name in (JOURNAL, RESULT):  # left by an earlier launch into the same directory
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(log_dir, name))
    note(log_dir, "launch", chaos=flags.chaos, used=used)
    tty = sys.stdout.isatty()
    colour = wants_colour(flags.color, tty, os.environ)
    prefix_width = 0 if flags.no_prefix else max(map(len, names)) + 3
    columns = shutil.get_terminal_size().columns - prefix_width if tty else None
    # A terminal without UTF-8 shows "?" for the blocks of a progress bar.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(
        sys.stdout,
        sys.stderr,
        tasks=names,
        drawer=drawer,
        shown={"all": names, "chief": [drawer], "none": []}[flags.show],
        colour=colour,
        redraw=tty and os.environ.get("TERM") != "dumb",
        prefix=not flags.no_prefix,
        chatter="TF_CPP_MIN_LOG_LEVEL" in os.environ,  # the user has chosen
    )

    if policy.left < 0:  # Slurm itself has queued the job again
        return slurm_launch.final_code(TRANSIENT_CODE, policy, console.notice)
    # Isolate now: before the first child (the guardian), before the first threads (for the task
    # outputs), and before the search for free ports.
    isolated = False
    if spec is not None and not flags.cluster and not flags.allow_remote and not flags.on:
        refusal = isolate()
        isolated = refusal is None
        if refusal:
            console.notice(warning(refusal, colour))

    if flags.rendezvous:
        shared = token
    elif flags.cluster:  # each host has its own launcher, and they know nothing of each other
        shared = b"" if variable is None else agent.read_token(None, variable)
    else:
        shared = secrets.token_bytes(32)

    def plan(
        cluster: ClusterSpec,
        members: Sequence[Task],
        attempt: int,
        launch: str,
        server: SnapshotServer | None,
    ):
        return plan_tasks(
            cluster,
            members,
            command,
            environ=task_environ,
            log_dir=log_dir,
            attempt=attempt,
            launch=launch,
            restarts=flags.restarts + (flags.replace_stragglers or 0),
            threads=flags.threads,
            cores=len(cores()),
            columns=columns,
            data_workers=_data_addresses(flags.data_workers or 0, cluster),
            chaos=flags.chaos,
            standby=standby,
            secret=(
                agent.derive_task_secret(shared, "" if flags.cluster else launch) if shared else ""
            ),
            stragglers=flags.stragglers,
            snapshot_server=None if server is None else server.name,
        )

    restarts = flags.restarts or flags.replace_stragglers
    standby = not flags.on and bool(restarts if flags.standby is None else flags.standby)
    launch = uuid.uuid4().hex
    # With --on the agents do, and with --cluster the launcher knows no other host.
    holds = restarts and not (flags.on or flags.cluster) and is_supported()
    host = (flags.host or agent.own_host(flags.rendezvous)) if flags.rendezvous else ""

    def plan_here(attempt: int):
        if fleet is not None:
            assert spec is not None
            prepared = fleet.prepare(names, attempt)
            cluster = launch_on.cluster_of(spec, prepared)
            kept = {*task_environ, *(THREAD_VARIABLES if flags.threads else ())}
            return launch_on.for_agents(
                plan(cluster, cluster.tasks, attempt, launch, None), prepared, kept
            )
        cluster = spec if spec is not None and flags.cluster else _local(flags)
        tasks = members if flags.cluster else cluster.tasks
        return plan(cluster, tasks, attempt, launch, snapshots)

    with (
        Guardian() as guardian,
        contextlib.closing(
            Standbys(flags.standby if standby else 0, guardian, log_dir, console.notice)
        ) as standbys,
        _snapshot_server(host, shared, console) if holds else contextlib.nullcontext() as snapshots,
        launch_on.open_fleet(
            flags,
            words,
            guardian,
            log_dir,
            lambda: supervisor.interrupted,
            lambda number: interrupt(number),
            console.notice,
            snapshot_secret=_snapshot_secret(shared) if restarts else "",
        ) as fleet,
    ):
        supervisor = Supervisor(
            plan_here,
            guardian,
            console,
            log_dir=log_dir,
            grace=flags.grace,
            evaluator_wait=flags.evaluator_wait,
            policy=policy,
            hang_timeouts=hang_timeouts(flags),
            isolated=isolated,
            colour=colour,
            chaos=None if faults is None else Chaos(faults, log_dir),
            standbys=standbys,
            start=fleet.start if fleet else None,
            slow_workers=SlowWorkers(
                log_dir,
                flags.replace_stragglers,
                console.notice,
                fleet.give_up if fleet else lambda task: "",
            )
            if flags.replace_stragglers
            else None,
        )
        interrupt = supervisor.interrupt
        if flags.on == "slurm":
            interrupt = launch_on.interrupt_once(interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # keep a signal ignored under nohup
                signal.signal(number, interrupt)
        if flags.rendezvous:
            code = _launch_hosts(
                flags, words, token, host, policy, supervisor, plan, snapshots, console, log_dir
            )
        else:
            where = (
                launch_on.describe(flags)
                if flags.on
                else "on this host, cut off from the network (--allow-remote lifts that)"
                if isolated
                else "on this host"
            )
            console.notice(f"tfdist: {_listing(names)} {where}; logs in {short_path(log_dir)}")
            try:
                code = supervisor.run()
            except Interrupted:
                code = supervisor.farewell(0.0, {})
            except TimeoutError as error:
                if not slurm_launch.is_requeued(flags) or policy.left > 0:
                    raise
                console.notice(f"error: {error}")
                code = TRANSIENT_CODE
            if slurm_launch.is_requeued(flags):
                code = slurm_launch.final_code(code, policy, console.notice, supervisor.interrupted)
    note(log_dir, "over", code=code)
    goodput = measure([read_journal(log_dir)])
    if goodput.tasks:
        console.notice(f"tfdist: {goodput.line()}")
    return code


def _snapshot_secret(token: bytes) -> str:
    """Return the secret of the snapshot servers in hexadecimal digits.

    Args:
        token: Secret of the launch.
    """
    return agent.derive_task_secret(token, "snapshot servers")


@contextlib.contextmanager
def _snapshot_server(host: str, token: bytes, console: Console) -> Iterator[SnapshotServer | None]:
    """Run the process that holds snapshots in memory.

    Args:
        host: Address of this host for the others; "" if there are none.
        token: Secret of the launchers.
        console: Console for messages to the user.
    """
    try:
        server = SnapshotServer(host, bytes.fromhex(_snapshot_secret(token)) if host else b"")
    except OSError as error:
        address = f"listen at {host}" if host else "be started"
        remedy = "; expected an address of this host (--host)" if host else ""
        console.notice(
            f"tfdist: no snapshots in memory (memory_freq): the process that would hold them "
            f"cannot {address} ({error.strerror or error}){remedy}"
        )
        yield None
        return
    with contextlib.closing(server):
        yield server


def _launch_hosts(
    flags,
    words,
    token,
    host: str,
    policy: Policy,
    supervisor: Supervisor,
    plan,
    snapshots: SnapshotServer | None,
    console: Console,
    log_dir: str,
) -> int:
    """Run this host's part of a launch over several hosts."""
    slots = flags.workers or 1
    terms = Terms(
        flags.min_workers,
        flags.max_workers,
        window=flags.restart_window,
        host_timeout=flags.host_timeout,
        timeout=flags.join_timeout,
        grace=flags.grace + 20.0,  # includes time to report
    )

    def plan_start(start: Start, spec: ClusterSpec):
        server = snapshots if start.snapshot_servers else None
        if server is not None:
            peers = [(split_address(each)[0], each) for each in start.snapshot_servers]
            server.meet(peers, start.index, start.generation, start.launch_id)
        return plan(
            spec,
            spec.tasks[start.first : start.first + start.count],
            start.generation,
            start.launch_id,
            server,
        )

    count = f"{slots} worker{'s' * (slots > 1)}"
    console.notice(
        f"tfdist: {count} of {host} for {flags.rendezvous}; logs in {short_path(log_dir)}"
    )
    digest = agent.digest(words)
    with (
        agent.serve_rendezvous(flags.rendezvous, token, terms, policy, console.notice) as server,
        RendezvousClient(
            flags.rendezvous,
            token,
            host,
            slots,
            digest,
            snapshot_port=0 if snapshots is None else snapshots.port,
            join_timeout=flags.join_timeout,
            show_line=console.notice,
        ) as member,
    ):
        return agent.run(supervisor, member, server, plan_start, console, log_dir)


def find_faults(plan: str | None, tasks: Sequence[str]) -> tuple[Fault, ...] | None:
    """Return the faults of --chaos, or None without a plan.

    Args:
        plan: Value of --chaos.
        tasks: Names of all tasks of the cluster.

    Raises:
        ValueError: If the plan is malformed, or names a task that does not exist.
    """
    if plan is None:
        return None
    try:
        faults = parse_faults(plan)
    except ValueError as error:
        raise ValueError(f"--chaos: {error}") from error
    for fault in faults:
        if fault.task not in (*tasks, "chief", ""):
            raise ValueError(
                f"--chaos: expected a task of {', '.join(tasks)}, or chief, received {fault.text!r}"
            )
    return faults


def find_tasks(flags: argparse.Namespace) -> tuple[ClusterSpec, tuple[Task, ...]]:
    """Return the cluster and those of its tasks that run on this host.

    Args:
        flags: Checked flags of the launcher.

    Raises:
        ValueError: If the cluster file is wrong, or none of its tasks can run here.
    """
    if flags.cluster is None:
        spec = _local(flags)
        return spec, spec.tasks
    spec = ClusterSpec.from_file(flags.cluster, task=flags.task)
    if "ps" in spec.jobs and "chief" not in spec.jobs:
        raise ValueError(
            f"--cluster {flags.cluster}: expected a chief, which coordinates the workers of "
            f"parameter servers; received the jobs {', '.join(spec.jobs)}; add the job chief with "
            "one address"
        )
    if spec.task is not None:
        members: tuple[Task, ...] = (spec.task,)
    else:
        members = tuple(task for task in spec.tasks if task.address and is_here(task.address))
    if not members:
        raise ValueError(
            nobody_here(flags.cluster, {str(task): task.address for task in spec.tasks})
        )
    for task in members:
        spec.for_task(task.type, task.index).check_host()
    return spec, members


def make_log_dir(requested: str | None) -> str:
    """Create the log directory of this launch.

    Args:
        requested: Value of --log-dir; None for a new directory below `runs`, to which `runs/latest`
            then points.

    Returns:
        The absolute path, because a task may change its working directory.
    """
    flag = "--log-dir"
    parent = requested or "runs"
    try:
        os.makedirs(parent, exist_ok=True)
        if requested:
            return os.path.abspath(requested)
        flag = "--log-dir (default)"
        stamp = datetime.datetime.now().strftime("launch-%Y%m%d-%H%M%S")
        name = stamp
        count = 1
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(parent, name))
                break
            count += 1
            name = f"{stamp}-{count}"
    except OSError as error:
        problem = f"received {parent!r}: {error.strerror}"
        raise ValueError(f"{flag}: expected a directory that can be written, {problem}") from error
    latest = os.path.join(parent, "latest")
    with contextlib.suppress(OSError):  # optional: some file systems have no symbolic links
        os.symlink(name, f"{latest}.{os.getpid()}")
        os.replace(f"{latest}.{os.getpid()}", latest)
    return os.path.abspath(os.path.join(parent, name))


def _local(flags: argparse.Namespace) -> ClusterSpec:
    return ClusterSpec.local(
        workers=1 if flags.workers is None else flags.workers,
        ps=flags.ps or 0,
        chief=bool(flags.chief),
        evaluator=bool(flags.evaluator),
    )


def _data_addresses(count: int, cluster: ClusterSpec) -> list[str]:
    """Return free addresses on this machine that the cluster does not use."""
    used = {task.address for task in cluster.tasks}
    free = [f"127.0.0.1:{port}" for port in free_ports(count + len(used))] if count else []
    return [address for address in free if address not in used][:count]


def _is_chief(spec: ClusterSpec, task: Task) -> bool:
    return spec.for_task(task.type, task.index).is_chief


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    return (
        ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])} and {len(names) - 7} more"
    )


main = Command(
    name="tfdist launch",
    usage=USAGE,
    description=DESCRIPTION,
    exit_codes={
        **COMMON_EXIT_CODES,
        0: "all tasks succeeded",
        1: "--check found a fault; no task was started",
        "else": "the exit code of the task that is the root cause; 128 + signal if a signal ended "
        "it",
        TRANSIENT_CODE: "a task hung, or machines are absent or lost; another start may help",
        PREEMPTED_CODE: "SIGTERM ended the tasks after a snapshot; the same command resumes "
        "training",
    },
    run=_run,
    add_flags=add_flags,
    check=check,
    split=split,
    others="Write COMMAND and its own flags after `--`: tfdist launch [FLAGS] -- COMMAND ...",
    handles_signals=True,
    defaults=config_options.from_section(others=("array", "job_name", "setup")),
)
