"""Entry point of `tfdist doctor`: checks a host, a cluster and a run."""

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
from tfdist.cluster.handshake import hello_message, installed_versions
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.runtime.command import COMMON_EXIT_CODES, Command
from tfdist.runtime.formatting import printable
from tfdist.runtime.launch_protocol import inherited, take_token
from tfdist.tools.doctor import cluster, file_systems, frameworks, host, machine, rendering, runs
from tfdist.tools.doctor.check_results import (
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
from tfdist.tools.doctor.check_server import Responder
from tfdist.tools.doctor.exchange import ATTEMPT
from tfdist.tools.doctor.flags import DESCRIPTION, USAGE, add_flags, check
from tfdist.tools.doctor.peers import PeerExchange, serving

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
    take_token()
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
        checks += _check_peers(flags, spec, members, begun)
    order = [HOST, CLUSTER, RUN]
    # The sort is stable: the checks of a part keep their order.
    checks.sort(key=lambda check: order.index(check.part))
    _show(flags, checks)
    return exit_code(checks)


def find_cluster(
    path: str | None, task: str | None, required: bool
) -> tuple[ClusterSpec | None, tuple[Task, ...], list[Check]]:
    """Read the cluster file, and find the tasks of this host.

    Args:
        path: Path of the cluster file; None if there is none.
        task: Name of this host's task; None for all tasks with an address of this host.
        required: Boolean, whether this host must have a task.

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
    if required and not here:
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
    named = list(dict.fromkeys(flags.directory))
    run_directory = ""
    trial = None
    if words or not flags.quick:
        findings = frameworks.look(
            [path for path in named if file_systems.is_remote(path)], words, trained
        )
        checks += host.check_frameworks(facts, findings.frameworks)
        trial = findings.trial
        remote = {directory.path: directory for directory in findings.directories}
        run_directory = trial.directory if trial else ""
    else:
        remote = {}
        for path in filter(file_systems.is_remote, named):
            checks.append(
                graded(
                    HOST,
                    "directory",
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
        file_systems.check_directory(directory)
        for path in paths
        if (directory := {**remote, **local}.get(path))
    ]
    if trial is not None:
        checks += runs.check_trial(trial, facts, trained, here)
    # A directory that failed may hang, so None replaces it. The others keep their numbers, by which
    # hosts refer to them.
    shared = (
        [None if directory.error else path for path, directory in local.items()]
        if named or run_directory
        else []
    )
    return Diagnosis(checks, facts, shared)


def _make_responder(
    spec: ClusterSpec, members: Sequence[Task], begun: Diagnosis, show_line=lambda line: None
) -> Responder:
    """Create the responder with the hello message of this process and its answers."""
    name = str(members[0]) if members else f"doctor on {socket.gethostname()}"
    who = hello_message(spec, name, installed_versions(), ATTEMPT, uuid.uuid4().hex)
    tasks = [[str(task), task.address] for task in spec.listening_tasks[:LISTED]]
    facts = {"gpus": begun.machine.gpus, "tasks": tasks, "wrong": summarize_failures(begun.checks)}
    return Responder(spec, who, facts, begun.shared, show_line)


def summarize_failures(checks: Sequence[Check]) -> str:
    """Summarize the failed checks for other hosts; "" if none failed.

    Example:
        >>> summarize_failures([Check("host", "Python", "fail", "2.7", "take 3.11")])
        'Python: 2.7'
    """
    return "; ".join(
        f"{check.name}: {check.found[:120]}" for check in checks if check.status == FAIL
    )[:250]


def _serve(
    flags: argparse.Namespace, spec: ClusterSpec, members: Sequence[Task], begun: Diagnosis
) -> int:
    """Answer other doctors until the time is over, or until Ctrl-C."""
    spec_checks, port_errors = cluster.check_spec(spec, members)
    checks = [*begun.checks, *spec_checks, *cluster.check_ports(members, port_errors, {})]
    if exit_code(spec_checks) or port_errors:
        _show(flags, [check for check in checks if check.part == CLUSTER])
        return 1

    def show_line(line: str) -> None:
        print(f"doctor: {printable(line)}", flush=True)

    try:
        with serving(_make_responder(spec, members, begun, show_line), members) as failed:
            if failed:
                print(
                    "\n".join(
                        rendering.lines([cluster.cannot_listen(spec, failed)], TITLES, _width())
                    ),
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


def _check_peers(
    flags: argparse.Namespace, spec: ClusterSpec, members: Sequence[Task], begun: Diagnosis
) -> list[Check]:
    """Ask the other hosts; with --together, wait until they have asked this host too."""
    checks, port_errors = cluster.check_spec(spec, members)
    if members and all(task.type == "evaluator" for task in members):
        return checks  # other tasks do not connect to an evaluator, which reads files
    listening = [task for task in members if task.type != "evaluator"]
    free = [task for task in listening if str(task) not in port_errors]
    timeout = (
        min(flags.timeout, STRAY_S)
        if exit_code(checks) or (port_errors and flags.together)
        else flags.timeout
    )
    responder = _make_responder(spec, members, begun)
    with serving(responder, free) as failed:
        checks += [cluster.cannot_listen(spec, failed)] if failed else []
        peer_exchange = PeerExchange(
            responder,
            free,
            timeout,
            lambda line: print(f"doctor: {printable(line)}", file=sys.stderr, flush=True),
            listening if flags.together else (),
        )
        peer_exchange.ask_all()
        checks += cluster.check_ports(
            members, port_errors, {} if flags.together else peer_exchange.peers
        )
        checks += cluster.check_peers(
            spec,
            {**responder.hello, **responder.facts},
            peer_exchange.own,
            peer_exchange.peers,
            peer_exchange.missing,
            peer_exchange.elapsed,
        )
        if peer_exchange.hosts(with_own=False):
            checks += _shared(begun.shared, peer_exchange)
        # Only one host measures. Otherwise hosts would measure each other's traffic.
        if len(peer_exchange.hosts()) > 1 and (
            not flags.together or str(spec.listening_tasks[0]) in peer_exchange.own
        ):
            checks += cluster.check_links(peer_exchange.links(cluster.odd_links))
        # Another process that claims a task of this host has reported its fault only here, so this
        # host passes the fault on to hosts that come later.
        wrong = summarize_failures([*begun.checks, *checks]) or next(
            (
                report
                for name, report in responder.done.items()
                if report and name in peer_exchange.own
            ),
            "",
        )
        # Remove directories that other hosts still used before. Once told that this host is done,
        # they may begin to train there.
        peer_exchange.remove_directories()
        claims = [str(task) for task in members]
        if not peer_exchange.leads:
            peer_exchange.report_done(wrong, claims)
        if flags.together:
            late = peer_exchange.wait_until_asked(wrong)
            # A report about a task of this host comes only from another process that claims it too.
            checks += cluster.check_ends(
                {
                    name: report
                    for name, report in responder.done.items()
                    if report or name not in peer_exchange.own
                },
                late,
                spec,
                peer_exchange.elapsed,
            )
            if peer_exchange.leads:  # its report has the verdict about all
                wrong = wrong or summarize_failures(checks)
                peer_exchange.report_done(wrong, claims)
        else:
            reports = {
                name: str(peer.hello.get("wrong") or "")[:300]
                for name, peer in peer_exchange.peers.items()
            }
            reports |= {name: report for name, report in responder.done.items() if report}
            checks += cluster.check_ends(reports, {}, spec, peer_exchange.elapsed)
    return checks


def _shared(shared: Sequence[str | None], peer_exchange: PeerExchange) -> list[Check]:
    if not shared:
        return [
            graded(
                CLUSTER,
                "shared directory",
                "not tested, because you named no directory",
                "name the directories of backups and logs with --directory DIR or --config",
                warns=True,
            )
        ]
    return cluster.check_lookups(peer_exchange.share(shared))


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
        "\n".join(
            [*rendering.lines(checks, titles, _width(), colour), rendering.summary(checks, colour)]
        ),
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
