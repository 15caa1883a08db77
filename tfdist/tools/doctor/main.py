"""Command-line interface of `tfdist doctor`, which checks a host, a cluster and a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Sequence

import tfdist
from tfdist.cluster.addresses import is_here, nobody_here
from tfdist.cluster.handshake import badge, installed_versions
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.runtime.command import COMMON_EXIT_CODES, Command
from tfdist.runtime.formatting import printable
from tfdist.runtime.launch_protocol import inherited
from tfdist.tools.doctor import cluster, file_systems, frameworks, host, machine, runs, table
from tfdist.tools.doctor.checks import (
    CLUSTER,
    FAIL,
    HOST,
    RUN,
    Check,
    document,
    exit_code,
    graded,
    of_error,
)
from tfdist.tools.doctor.exchange import ATTEMPT
from tfdist.tools.doctor.flags import DESCRIPTION, USAGE, add_flags, check
from tfdist.tools.doctor.peers import Meeting, serving
from tfdist.tools.doctor.server import Desk

DEFAULT_DIRECTORY = "runs"  # directory that `tfdist train` and `tfdist launch` write to
TITLES = {HOST: "this host", CLUSTER: "the cluster", RUN: "the run"}
LISTED = 500  # maximum number of tasks that a host reports
STRAY_S = 5.0  # seconds to wait for others if this host's own part of the cluster is wrong


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Results of the checks on this host.

    Attributes:
        checks: Checks of the host and of the run.
        machine: Facts about the host.
        shared: Directories that all hosts should share, None for one that cannot be used; empty if
            you named none.
    """

    checks: list[Check]
    machine: machine.Machine
    shared: list[str | None]


def _diagnose(flags: argparse.Namespace, words: list[str]) -> int:
    spec, members, wrong = find_cluster(flags.cluster, flags.task, flags.serve or flags.together)
    here = flags.workers or max(len(members), 1)
    trained = here if spec is None else max(len(spec.training_tasks), 1)
    begun = _look(flags, words, here, trained)
    checks = [*begun.checks, *wrong]
    if flags.serve:
        _show(flags, checks)
        return (
            _serve(flags, spec, members, begun)
            if spec is not None and not exit_code(wrong)
            else exit_code(checks)
        )
    if spec is not None and not wrong:
        checks += _meet(flags, spec, members, begun)
    order = [HOST, CLUSTER, RUN]
    # The sort is stable: the checks of a part keep their order.
    checks.sort(key=lambda check: order.index(check.part))
    _show(flags, checks)
    return exit_code(checks)


def find_cluster(
    path: str | None, task: str | None, must: bool
) -> tuple[ClusterSpec | None, tuple[Task, ...], list[Check]]:
    """Read the cluster file, and find the tasks of this host.

    Args:
        path: Path of the cluster file; None if there is none.
        task: Name of this host's task; None for all tasks with an address of this host.
        must: Boolean, whether this host must have a task.

    Returns:
        The cluster spec, its tasks on this host, and the failed checks.
    """
    if path is None:
        return None, (), []
    try:
        spec = ClusterSpec.from_file(path, task=task)
    except ValueError as error:
        return None, (), [of_error(CLUSTER, "file", error, "correct the file")]
    here = (
        (spec.task,)
        if spec.task
        else tuple(task for task in spec.tasks if task.address and is_here(task.address))
    )
    if must and not here:
        return (
            spec,
            (),
            [
                of_error(
                    CLUSTER,
                    "file",
                    nobody_here(path, {str(task): task.address for task in spec.tasks}),
                )
            ],
        )
    return spec, here, []


def _look(flags: argparse.Namespace, words: Sequence[str], here: int, trained: int) -> Diagnosis:
    """Check this host and the run."""
    facts = machine.look()
    checks = host.check_machine(facts, here)
    named = list(dict.fromkeys(flags.place))
    run_directory = ""
    tried = None
    if words or not flags.quick:
        findings = frameworks.look(
            [path for path in named if file_systems.is_remote(path)], words, trained
        )
        checks += host.check_frameworks(facts, findings.frameworks)
        tried = findings.trial
        remote = {directory.path: directory for directory in findings.places}
        run_directory = tried.directory if tried else ""
    else:
        remote = {}
        for path in filter(file_systems.is_remote, named):
            checks.append(
                graded(
                    HOST,
                    "place",
                    f"{path}: not tested, because only TensorFlow can write there",
                    "leave out --quick",
                    warns=True,
                )
            )
    paths = list(dict.fromkeys([*named, *filter(None, [run_directory])])) or [DEFAULT_DIRECTORY]
    local = {
        directory.path: directory
        for directory in file_systems.look(
            [path for path in paths if not file_systems.is_remote(path)]
        )
    }
    checks += [
        file_systems.check_place(directory)
        for path in paths
        if (directory := {**remote, **local}.get(path))
    ]
    if tried is not None:
        checks += runs.check_trial(tried, facts, trained, here)
    # A directory that failed may hang, so None replaces it. The others keep their numbers, by which
    # hosts refer to them.
    shared = (
        [None if directory.error else path for path, directory in local.items()]
        if named or run_directory
        else []
    )
    return Diagnosis(checks, facts, shared)


def _desk(
    spec: ClusterSpec, members: Sequence[Task], begun: Diagnosis, heard=lambda line: None
) -> Desk:
    """Create the desk with the badge of this process and its answers."""
    name = str(members[0]) if members else f"doctor on {socket.gethostname()}"
    who = badge(spec, name, installed_versions(), ATTEMPT, uuid.uuid4().hex)
    tasks = [[str(task), task.address] for task in spec.listening_tasks[:LISTED]]
    facts = {"gpus": begun.machine.gpus, "tasks": tasks, "wrong": wrong_in(begun.checks)}
    return Desk(spec, who, facts, begun.shared, heard)


def wrong_in(checks: Sequence[Check]) -> str:
    """Summarize the failed checks for other hosts; "" if none failed.

    Example:
        >>> wrong_in([Check("host", "Python", "fail", "2.7", "take 3.11")])
        'Python: 2.7'
    """
    return "; ".join(
        f"{check.name}: {check.found[:120]}" for check in checks if check.status == FAIL
    )[:250]


def _serve(
    flags: argparse.Namespace, spec: ClusterSpec, members: Sequence[Task], begun: Diagnosis
) -> int:
    """Answer other doctors until the time is over, or until Ctrl-C."""
    spec_checks, taken = cluster.check_spec(spec, members)
    checks = [*begun.checks, *spec_checks, *cluster.check_ports(members, taken, {})]
    if exit_code(spec_checks) or taken:
        _show(flags, [check for check in checks if check.part == CLUSTER])
        return 1

    def heard(line: str) -> None:
        print(f"doctor: {printable(line)}", flush=True)

    try:
        with serving(_desk(spec, members, begun, heard), members) as failed:
            if failed:
                print(
                    "\n".join(table.lines([cluster.cannot_listen(spec, failed)], TITLES, _width())),
                    flush=True,
                )
                return 1
            names = ", ".join(f"{task} at {task.address}" for task in members)
            print(
                f"doctor: serves {names} for {flags.timeout:g} s; press Ctrl-C to stop", flush=True
            )
            time.sleep(flags.timeout)
    except KeyboardInterrupt:
        print("doctor: stopped serving", flush=True)
    return exit_code(checks)


def _meet(
    flags: argparse.Namespace, spec: ClusterSpec, members: Sequence[Task], begun: Diagnosis
) -> list[Check]:
    """Ask the other hosts; with --together, wait until they have asked this host too."""
    checks, taken = cluster.check_spec(spec, members)
    if members and all(task.type == "evaluator" for task in members):
        return checks  # other tasks do not connect to an evaluator, which reads files
    free = [task for task in members if str(task) not in taken and task.type != "evaluator"]
    timeout = (
        min(flags.timeout, STRAY_S)
        if exit_code(checks) or (taken and flags.together)
        else flags.timeout
    )
    desk = _desk(spec, members, begun)
    with serving(desk, free) as failed:
        checks += [cluster.cannot_listen(spec, failed)] if failed else []
        meeting = Meeting(
            desk, free, timeout, lambda line: print(f"doctor: {line}", file=sys.stderr, flush=True)
        )
        meeting.ask_all()
        checks += cluster.check_ports(members, taken, {} if flags.together else meeting.peers)
        checks += cluster.check_peers(
            spec,
            {**desk.badge, **desk.facts},
            meeting.own,
            meeting.peers,
            meeting.missing,
            meeting.elapsed,
        )
        if meeting.hosts(with_own=False):
            checks += _shared(begun.shared, meeting)
        # Only one host measures. Otherwise hosts would measure each other's traffic.
        if len(meeting.hosts()) > 1 and (
            not flags.together or str(spec.listening_tasks[0]) in meeting.own
        ):
            checks += cluster.check_links(meeting.links(cluster.odd_links))
        # Another process that claims a task of this host has reported its fault only here, so this
        # host passes the fault on to hosts that come later.
        wrong = wrong_in([*begun.checks, *checks]) or next(
            (report for name, report in desk.done.items() if report and name in meeting.own), ""
        )
        # Remove directories that other hosts still used before. Once told that this host is done,
        # they may begin to train there.
        meeting.tidy()
        meeting.tell(wrong, [str(task) for task in members])
        if flags.together:
            late = meeting.wait_until_asked(wrong)
            # A report about a task of this host comes only from another process that claims it too.
            checks += cluster.check_ends(
                {
                    name: report
                    for name, report in desk.done.items()
                    if report or name not in meeting.own
                },
                late,
                spec,
                meeting.elapsed,
            )
        else:
            reports = {
                name: str(peer.badge.get("wrong") or "")[:300]
                for name, peer in meeting.peers.items()
            }
            reports |= {name: report for name, report in desk.done.items() if report}
            checks += cluster.check_ends(reports, {}, spec, meeting.elapsed)
    return checks


def _shared(shared: Sequence[str | None], meeting: Meeting) -> list[Check]:
    if not shared:
        return [
            graded(
                CLUSTER,
                "shared place",
                "not tested, because you named no directory",
                "name the directories of backups and logs with --place DIR or --config",
                warns=True,
            )
        ]
    return cluster.check_sights(meeting.share(shared))


def _show(flags: argparse.Namespace, checks: Sequence[Check]) -> None:
    if flags.json:
        print(
            json.dumps(document(checks, socket.gethostname(), tfdist.__version__), indent=2),
            flush=True,
        )
        return
    colour = sys.stdout.isatty() and not inherited("NO_COLOR").get("NO_COLOR")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    titles = {**TITLES, HOST: f"this host, {socket.gethostname()}"}
    print(
        "\n".join([*table.lines(checks, titles, _width(), colour), table.summary(checks, colour)]),
        flush=True,
    )


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


main = Command(
    name="tfdist doctor",
    usage=USAGE,
    description=DESCRIPTION,
    exit_codes={**COMMON_EXIT_CODES, 0: "no check fails", 1: "a check fails"},
    run=_diagnose,
    add_flags=add_flags,
    check=check,
    takes_config=True,
)
