"""Checks of a cluster spec, and of what the doctors of its hosts told each other."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist.cluster.addresses import PortTaken, UnresolvedAddress, bind_problem
from tfdist.cluster.handshake import (
    ConfigurationError,
    absent_too_long,
    another_task,
    claimed_twice,
    compare,
    some,
)
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.runtime.formatting import counted, duration, format_bytes
from tfdist.tools.doctor.check_results import CLUSTER, FAIL, Check, graded, of_error
from tfdist.tools.doctor.exchange import Link
from tfdist.tools.doctor.peers import FileLookup, Peer

# Seconds between the clocks of two hosts: warns above, fails above.
SKEW_S = 1.0
WRONG_S = 60.0
SLOW = 50e6  # bytes per second; half of what Gigabit Ethernet carries
FAR_S = 5e-3  # seconds of a round trip
UNEVEN = 4.0  # factor from the median rate
DISTANT = 10.0  # factor from the median round trip


def check_spec(spec: ClusterSpec, members: Sequence[Task]) -> tuple[list[Check], dict[str, str]]:
    """Check what this host alone can know: host names, its own addresses and its own ports.

    Args:
        spec: Cluster spec.
        members: Tasks of the cluster that run on this host.

    Returns:
        The checks; and a dict from each of these tasks whose port is taken to the error message.
    """
    count = ", ".join(
        f"{len(addresses)} ps" if job == "ps" else counted(len(addresses), job)
        for job, addresses in spec.jobs.items()
    )
    here = f"here {', '.join(map(str, members[:8]))}" if members else "none of them is here"
    checks = [graded(CLUSTER, "file", f"{spec.source}: {count}; {here}")]
    try:
        dataclasses.replace(spec, task_type=None, task_index=None).check_host()
    except UnresolvedAddress as error:
        return [*checks, of_error(CLUSTER, "names", error)], {}
    except ValueError as error:
        return [*checks, of_error(CLUSTER, "addresses", error)], {}
    hosts = len({task.address.rpartition(":")[0] for task in spec.listening_tasks})
    checks.append(
        graded(
            CLUSTER,
            "names",
            f"{counted(hosts, 'name')} of hosts {'resolve' if hosts > 1 else 'resolves'}",
        )
    )
    port_errors: dict[str, str] = {}
    for task in members:
        try:
            spec.for_task(task.type, task.index).check_host()
        except PortTaken as error:
            port_errors[str(task)] = str(error)
        except ValueError as error:
            checks.append(of_error(CLUSTER, "addresses", error))
    return checks, port_errors


def check_ports(
    members: Sequence[Task], port_errors: Mapping[str, str], peers: Mapping[str, Peer]
) -> list[Check]:
    """Check whether the tasks of this host can listen at their ports.

    Args:
        members: Tasks of this host.
        port_errors: Error messages of the tasks whose port is taken, by task.
        peers: Doctors that answer, by the task that they were asked for.
    """
    checks = [
        of_error(CLUSTER, "ports", text) for name, text in port_errors.items() if name not in peers
    ]
    listening = [task for task in members if task.type != "evaluator"]
    if listening and not checks:
        served = [str(task) for task in listening if str(task) in port_errors]
        addresses = f"free on this host: {', '.join(task.address for task in listening[:8])}"
        checks.append(
            graded(
                CLUSTER,
                "ports",
                addresses + (f" ({', '.join(served)}: by a doctor that serves)" if served else ""),
            )
        )
    return checks


def cannot_listen(spec: ClusterSpec, failed: Mapping[str, OSError]) -> Check:
    """Return the failed check of the first task whose address this host cannot listen at.

    Args:
        spec: Cluster spec.
        failed: Errors by task; at least one.
    """
    name, error = next(iter(failed.items()))
    addresses = {str(task): task.address for task in spec.listening_tasks}
    return of_error(CLUSTER, "ports", bind_problem(name, addresses[name], error))


def check_peers(
    spec: ClusterSpec,
    hello: Mapping[str, Any],
    own: set[str],
    peers: Mapping[str, Peer],
    missing: Mapping[str, str],
    seconds: float,
) -> list[Check]:
    """Check whether all tasks are there and fit together.

    Args:
        spec: Cluster spec.
        hello: Hello message of this process, with "tasks" and "gpus".
        own: Names of the tasks of this host.
        peers: Doctors of the tasks that answered, by task.
        missing: Reasons why the other tasks did not answer, by task.
        seconds: Time in seconds for which this host waited for them.
    """
    checks = (
        [of_error(CLUSTER, "reach", absent_too_long(missing, spec, rounded(seconds)))]
        if missing
        else []
    )
    if peers and not missing:
        checks.append(
            graded(
                CLUSTER,
                "reach",
                f"{counted(len(peers), 'task')} on other hosts "
                f"{'answer' if len(peers) > 1 else 'answers'}",
            )
        )
    faults = list(_faults(spec, hello, own, peers))
    checks += faults
    if peers and not faults:
        checks.append(graded(CLUSTER, "versions", f"equal: {hello['versions']}"))
        checks.append(graded(CLUSTER, "spec", f"equal: {hello['cluster']}"))
    if not peers:
        alone = own >= {str(task) for task in spec.listening_tasks}
        return checks or ([graded(CLUSTER, "reach", "all tasks are on this host")] if alone else [])
    return [*checks, _devices(spec, hello, own, peers), _clocks(peers)]


def _faults(
    spec: ClusterSpec, hello: Mapping[str, Any], own: set[str], peers: Mapping[str, Peer]
) -> Iterator[Check]:
    """Yield the first fault of each process, in the words of the preflight."""
    me = str(hello["task"])
    claimed = dict.fromkeys(own, str(hello["nonce"]))
    incompatible = set[str]()
    for name, peer in peers.items():
        claim = str(peer.hello.get("task"))
        if peer.process not in incompatible:
            try:
                compare(peer.hello, peer.who, hello, spec.source)
            except ConfigurationError as error:
                incompatible.add(peer.process)
                spec_differs = peer.hello.get("cluster") != hello["cluster"]
                check = of_error(CLUSTER, "spec" if spec_differs else "versions", error)
                where = (
                    differences(hello.get("tasks"), peer.hello.get("tasks")) if spec_differs else ""
                )
                yield Check(
                    CLUSTER,
                    check.name,
                    FAIL,
                    check.found + (f" ({where})" if where else ""),
                    check.remedy,
                )
                continue
        if peer.process in incompatible:
            continue
        if claim != name:
            yield of_error(CLUSTER, "tasks", another_task(claim[:60], me, peer.who))
        elif claimed.setdefault(claim, peer.process) != peer.process:
            yield of_error(CLUSTER, "tasks", claimed_twice(claim[:60], me, peer.who))


def differences(own: Any, theirs: Any) -> str:
    """Describe how two lists of tasks differ, in a few words.

    Args:
        own: Pairs of a task's name and address.
        theirs: Pairs of the same kind, received from the network.

    Returns:
        The description; "" if the lists are equal or not valid.

    Example:
        >>> differences(
        ...     [["worker:0", "a:1"], ["worker:1", "b:1"]],
        ...     [["worker:0", "b:1"], ["worker:1", "a:1"]],
        ... )
        'another order: worker:0 is a:1 here and b:1 there'
    """
    try:
        here, there = (
            {str(name): str(address)[:100] for name, address in tasks} for tasks in (own, theirs)
        )
    except (TypeError, ValueError):
        return ""
    changed = [
        f"{name} is {here.get(name, 'missing')} here and {there.get(name, 'missing')} there"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    if not changed:
        return ""
    order = "another order: " if sorted(here.values()) == sorted(there.values()) else ""
    size = (
        f"{counted(len(here), 'task')} here, {len(there)} there: "
        if len(here) != len(there)
        else ""
    )
    more = f" and {len(changed) - 2} more" if len(changed) > 2 and not order else ""
    return order + size + "; ".join(changed[: 1 if order else 2]) + more


def _devices(
    spec: ClusterSpec, hello: Mapping[str, Any], own: set[str], peers: Mapping[str, Peer]
) -> Check:
    """Check that all workers have equally many devices.

    Synchronous workers need equally many, so a difference fails. With parameter servers a
    difference only warns. The parameter servers themselves need no devices.
    """
    serving = "ps" in spec.jobs
    names = {
        str(task)
        for task in spec.tasks
        if task.type == "worker" or (task.type == "chief" and not serving)
    }
    reported = {
        name: peers[name].hello.get("gpus") if name in peers else hello.get("gpus")
        for name in sorted(names)
        if name in peers or name in own
    }
    counts = {
        name: count if isinstance(count, int) else -1 for name, count in reported.items()
    }  # the counts come from the network and may have any type
    numbers = set(counts.values())
    listing = ", ".join(f"{name} {counts[name]}" for name in some(counts))
    if len(numbers) > 1:
        return graded(
            CLUSTER,
            "devices",
            f"GPUs differ: {listing}",
            "choose equally many on all hosts with CUDA_VISIBLE_DEVICES, "
            "and see `tfdist doctor` on those with fewer",
            fails=not serving,
            warns=serving,
        )
    return graded(
        CLUSTER,
        "devices",
        f"{counted(numbers.pop(), 'GPU')} on each host" if numbers else "no worker was asked",
    )


def _clocks(peers: Mapping[str, Peer]) -> Check:
    worst = max(peers.values(), key=lambda peer: abs(peer.offset) - peer.error)
    skew = max(abs(worst.offset) - worst.error, 0.0)
    if skew <= SKEW_S:
        return graded(
            CLUSTER,
            "clocks",
            "at most "
            f"{duration(max(abs(peer.offset) + peer.error for peer in peers.values()))} apart",
        )
    way = "ahead of" if worst.offset > 0 else "behind"
    return graded(
        CLUSTER,
        "clocks",
        f"that of {worst.who} is {duration(abs(worst.offset))} {way} this host's",
        "set the clocks: timedatectl set-ntp true",
        fails=skew > WRONG_S,
        warns=True,
    )


def check_lookups(lookups: Sequence[FileLookup]) -> list[Check]:
    """Check whether all hosts see what one of them writes.

    Args:
        lookups: Results of `PeerExchange.share`.
    """
    checks = []
    for directory in dict.fromkeys(lookup.directory for lookup in lookups):
        here = [lookup for lookup in lookups if lookup.directory == directory]
        not_seen = [lookup for lookup in here if not lookup.seen and lookup.other is not None]
        unknown = [lookup for lookup in here if lookup.other is None]
        if not_seen:
            description = (
                f"{directory}: a file written here is not seen by "
                f"{', '.join(f'{lookup.peer} in {lookup.other}' for lookup in not_seen[:4])}"
            )
            remedy = (
                "mount the same file system on all hosts, or name the directory that is shared: "
                "a snapshot is read by all of them"
            )
            checks.append(graded(CLUSTER, "shared directory", description, remedy, fails=True))
        elif unknown:
            why = (
                unknown[0].error
                or "its doctor has no directory with this number, or cannot write there"
            )
            checks.append(
                graded(
                    CLUSTER,
                    "shared directory",
                    f"{directory}: unknown for {', '.join(lookup.peer for lookup in unknown[:4])}: "
                    f"{why}",
                    "give all doctors the same --directory or --config, in the same order",
                    warns=True,
                )
            )
        else:
            checks.append(
                graded(
                    CLUSTER,
                    "shared directory",
                    f"{directory}: seen by {counted(len(here), 'other host')}",
                )
            )
    return checks


def check_links(links: Sequence[Link]) -> list[Check]:
    """Check whether the network between the hosts works and is even.

    Args:
        links: Results of `PeerExchange.links`.
    """
    if not links:
        return []
    broken = [link for link in links if link.error]
    good = [link for link in links if not link.error]
    checks = []
    if broken:
        link = broken[0]
        late = all(link.error.startswith("not measured") for link in broken)
        more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
        checks.append(
            graded(
                CLUSTER,
                "network",
                f"from {link.source} to {link.target}: {link.error}{more}",
                "let these machines connect to each other: firewalls, routes",
                fails=not late,
                warns=late,
            )
        )
    if good:
        rates = [link.rate for link in good]
        ways = [link.latency for link in good]
        slow, far = _limits(good)
        description = (
            f"{counted(len(good), 'link')}: "
            f"{format_bytes(min(rates))}/s to {format_bytes(max(rates))}/s, "
            f"{duration(min(ways))} to {duration(max(ways))} round trip"
        )
        slowest = min(good, key=lambda link: link.rate)
        farthest = max(good, key=lambda link: link.latency)
        if slowest.rate < slow:
            checks.append(
                graded(
                    CLUSTER,
                    "network",
                    f"{description}; the slowest is from {slowest.source} to {slowest.target}",
                    "look at its cable, switch and other traffic: "
                    "all workers wait for the slowest link",
                    warns=True,
                )
            )
        elif farthest.latency > far:
            checks.append(
                graded(
                    CLUSTER,
                    "network",
                    f"{description}; the farthest is from {farthest.source} to {farthest.target}",
                    "put the hosts closer to each other: each step makes several round trips",
                    warns=True,
                )
            )
        else:
            checks.append(graded(CLUSTER, "network", description))
    return checks


def odd_links(links: Sequence[Link]) -> list[Link]:
    """Return the links that are too slow or whose round trip is too long.

    Args:
        links: Results of `PeerExchange.links`; links that failed are ignored.
    """
    good = [link for link in links if not link.error]
    slow, far = _limits(good) if good else (0.0, 0.0)
    return [link for link in good if link.rate < slow or link.latency > far]


def _limits(good: Sequence[Link]) -> tuple[float, float]:
    """Return the lowest acceptable rate and the longest acceptable round trip."""
    slow = max(SLOW, statistics.median(link.rate for link in good) / UNEVEN)
    return slow, max(FAR_S, DISTANT * statistics.median(link.latency for link in good))


def check_ends(
    done: Mapping[str, str], late: Mapping[str, str], spec: ClusterSpec, seconds: float
) -> list[Check]:
    """Check what the doctors of the other hosts concluded.

    Args:
        done: Faults that each task's doctor found, by task; "" for none.
        late: Reasons why the doctors of other tasks did not report, by task.
        spec: Cluster spec.
        seconds: Time in seconds for which this host waited for them.
    """
    checks = (
        [of_error(CLUSTER, "other hosts", absent_too_long(late, spec, rounded(seconds)))]
        if late
        else []
    )
    for text, names in _by_text(done).items():
        if text:
            checks.append(
                graded(
                    CLUSTER,
                    "other hosts",
                    f"the doctor of {', '.join(names[:8])} found: {text}",
                    "see what it printed there",
                    fails=True,
                )
            )
    if done and not checks:
        checks.append(
            graded(
                CLUSTER,
                "other hosts",
                f"the doctors of {', '.join(sorted(done)[:8])} found nothing wrong",
            )
        )
    return checks


def rounded(seconds: float) -> float:
    """Round a measured time for a message.

    Example:
        >>> rounded(30.04), rounded(0.21)
        (30, 0.2)
    """
    return round(seconds) if seconds >= 1 else round(seconds, 1)


def _by_text(done: Mapping[str, str]) -> dict[str, list[str]]:
    by_text: dict[str, list[str]] = {}
    for name in sorted(done):
        by_text.setdefault(done[name], []).append(name)
    return by_text
