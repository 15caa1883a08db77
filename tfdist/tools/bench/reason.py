"""Diagnosis of lost scaling efficiency from step breakdowns, with a remedy."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from tfdist.runtime.formatting import counted, format_bytes, milliseconds, percent
from tfdist.telemetry.step_records import PARTS
from tfdist.tools.bench.results import Setup

GOOD = 0.95  # efficiency at or above which no cause is reported
NARROWED = 1e6  # bytes of gradients from which fewer bytes make a sum notably faster
LARGE = 20e6  # bytes of gradients from which a division of the weights is worth a trial
UNEVEN = 1.1  # ratio to the other workers' mean work from which a worker is a straggler
DATA_WORKERS = "data workers (tfdist launch --data-workers N with data.service=true)"
SHORT = {
    "input": "waiting for input",
    "forward_backward": "forward and backward",
    "gradient_sync": "gradient synchronization",
    "update": "the update",
    "wait": "waiting for the slowest replica",
    "host": "host overhead",
}
assert SHORT.keys() == PARTS.keys()


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about the machine and the config that a remedy depends on.

    Attributes:
        cores: Number of cores of this machine.
        on_cpu: Whether replicas compute on CPUs. Default: True.
        threads: Threads of each replica. None: TensorFlow's choice, which is all cores for a single
            process.
        cache: Whether the config keeps the examples in memory. Default: False.
        steps_per_execution: Steps in each call of Keras' train function. Default: 1.
        communication: Collectives between workers, as in `make_strategy`. Default: "auto".
        comm_dtype: Data type of the tensors that are sent; None: that of the gradients.
        sync: Kind of synchronization policy, as in the config. Default: "gradients".
        zero: Stage of ZeRO, as in the config. Default: 0.
        onednn: Whether TensorFlow uses oneDNN on this CPU. Default: True.
    """

    cores: int
    on_cpu: bool = True
    threads: int | None = None
    cache: bool = False
    steps_per_execution: int = 1
    communication: str = "auto"
    comm_dtype: str | None = None
    sync: str = "gradients"
    zero: int = 0
    onednn: bool = True


def reason(setup: Setup, alone: Setup | None, facts: Facts) -> str:
    """Return one sentence on where a setup loses the time that more replicas should save.

    Args:
        setup: Setup that was compared with the baseline.
        alone: Baseline, one replica; None if there is none.
        facts: Facts about the machine and the config.

    Returns:
        A sentence with numbers and a remedy. For one replica, the sentence names the largest part
        of its step. Empty if there is no step breakdown.

    Example:
        >>> quick = dict.fromkeys(PARTS, 0.0) | {"forward_backward": 0.008}
        >>> slow = dict.fromkeys(PARTS, 0.0) | {"forward_backward": 0.004, "gradient_sync": 0.003}
        >>> alone = Setup(
        ...     "one_device", 1, 1, ("strong",), 64, rates=(8000.0,), step_breakdown={0: quick}
        ... )
        >>> both = Setup(
        ...     "mirrored", 2, 1, ("strong",), 64, 2_700_000, rates=(9142.0,),
        ...     step_breakdown={0: slow}, efficiency=0.57,
        ... )
        >>> print(reason(both, alone, Facts(cores=2)))  # doctest: +NORMALIZE_WHITESPACE
        43 % of the step is gradient synchronization: 2.7 MB a step at 900 MB/s; a larger batch
        would help, as the sum stays as large (so would sync="bfloat16" or local SGD, see
        docs/sync.md).
    """
    parts = mean_parts(setup)
    whole = sum(parts.values())
    if not whole:
        return ""
    if setup.replicas == 1 and (alone is None or alone.strategy == setup.strategy):
        most = max(PARTS, key=parts.__getitem__)
        return (
            f"{percent(parts[most] / whole)} of the step of one replica is "
            f"{SHORT[most]}{_alone(most, parts[most] / whole, facts)}."
        )
    if alone is None or not alone.step_breakdown or setup.efficiency is None:
        most = max(PARTS, key=parts.__getitem__)
        return (
            f"{percent(parts[most] / whole)} of the step is {SHORT[most]}; one replica was not "
            "measured, so the lost time is unknown."
        )
    if setup.efficiency >= GOOD:
        times = (
            f"{setup.replicas} times the work of one"
            if setup.replicas > 1
            else f"the work of {alone.strategy}"
        )
        return (
            f"{counted(setup.replicas, 'replica')}: {percent(setup.efficiency)} of {times}, "
            "no significant loss."
        )
    if _within_spread(setup, alone):
        return (
            "The lost time is within the spread of the rounds: measure more rounds on an idle "
            "machine."
        )
    lost = losses(setup, alone)
    most = max(PARTS, key=lost.__getitem__)  # the first of equal ones
    if lost[most] <= 0:
        return (
            "No part of the step is slower than one replica's times predict: the time is lost "
            "between steps, or one of the two measurements was disturbed."
        )
    return (
        f"{percent(parts[most] / whole)} of the step is "
        f"{SHORT[most]}{_why(most, setup, alone, facts)}."
    )


def mean_parts(setup: Setup) -> dict[str, float]:
    """Return the seconds of each part of a mean step, averaged over all workers."""
    workers = list(setup.step_breakdown.values())
    return {
        part: sum(parts.get(part, 0.0) for parts in workers) / max(1, len(workers))
        for part in PARTS
    }


def losses(setup: Setup, alone: Setup) -> dict[str, float]:
    """Return the seconds that each part of a step takes beyond its expected time.

    The expected time is the baseline's, scaled to the batch of one replica.

    Example:
        >>> before, after = {"update": 0.003, "input": 0.001}, {"update": 0.003, "input": 0.0005}
        >>> alone = Setup("one_device", 1, 1, (), 64, step_breakdown={0: before})
        >>> both = Setup("mirrored", 2, 1, (), 64, step_breakdown={0: after})
        >>> lost = losses(both, alone)
        >>> lost["update"], lost["input"]
        (0.0015, 0.0)
    """
    share = _share(setup, alone)
    mine = mean_parts(setup)
    before = mean_parts(alone)
    return {part: mine[part] - before[part] * float(share) for part in PARTS}


def slowest(setup: Setup) -> int | None:
    """Return the rank of the straggler, or None if there is none.

    The straggler is a worker whose own work takes notably longer than the mean work of the other
    workers. The other workers wait for it.

    Example:
        >>> parts = {0: {"host": 0.004, "wait": 0.003}, 1: {"host": 0.007, "wait": 0.0}}
        >>> slowest(Setup("m", 2, 2, step_breakdown=parts))
        1
    """
    work = {
        rank: sum(
            seconds for part, seconds in parts.items() if part not in ("wait", "gradient_sync")
        )
        for rank, parts in setup.step_breakdown.items()
    }
    if len(work) < 2:
        return None
    last = max(work, key=work.__getitem__)
    others = [seconds for rank, seconds in work.items() if rank != last]
    return last if work[last] > UNEVEN * sum(others) / len(others) else None


def _within_spread(setup: Setup, alone: Setup) -> bool:
    """Return whether some rounds lose nothing, so that the loss may be a disturbance.

    The rounds without a loss must be at least two, and at least a quarter of all, because a single
    round may be disturbed itself. Each round is compared with the same round of the baseline, which
    ran next to it.
    """
    ratios = [
        mine / (setup.replicas * before)
        for mine, before in zip(setup.rates, alone.rates, strict=False)
    ]
    return sum(ratio >= 1.0 for ratio in ratios) >= max(2, len(ratios) / 4)


def _share(setup: Setup, alone: Setup) -> Fraction:
    """Return the batch of one replica as a fraction of the baseline's batch."""
    return Fraction(setup.global_batch or 1, setup.replicas) / (alone.global_batch or 1)


def _why(part: str, setup: Setup, alone: Setup, facts: Facts) -> str:
    """Return the numbers and the remedy that follow the share and the name of a part."""
    measured = mean_parts(setup)[part]
    baseline = mean_parts(alone)[part]
    share = _share(setup, alone)
    times = (
        f"{milliseconds(measured)} where {'' if share == 1 else f'{share} of '}one replica's is "
        f"{milliseconds(baseline * float(share))}"
    )
    if part == "input":
        if _shares_cores(setup, facts):
            return (
                f": {times}, as pipelines and steps of {_sharing(setup, facts)}; "
                f"{'' if facts.cache else 'data.cache=true, '}more cores or hosts, or "
                f"{DATA_WORKERS} on another host would help"
            )
        return f": {times}; {_input_remedy(facts)} would help"
    if part == "gradient_sync":
        sent = setup.bytes // 2 if facts.comm_dtype else setup.bytes
        speed = sent / measured
        speed_text = (
            f"at {format_bytes(speed)}/s"
            if speed >= 10e6
            else f"in {milliseconds(measured)}, which is latency"
        )
        return f": {format_bytes(sent)} a step {speed_text}; {_sync_remedy(setup, facts)}"
    if part == "update":
        if not _may_shard(setup, facts):
            return f": {times}; a larger batch would help, as it comes once a step"
        return (
            f", which each replica does in full: {times}; a larger batch would help, as it comes "
            "once a step (so may parallel.zero=1, with which each replica updates a part)"
        )
    if part == "host":
        return f": {times}; {_host_remedy(facts)} would help"
    if part == "wait":
        return _wait(setup)
    return _compute(setup, facts, times, float(share))


def _sync_remedy(setup: Setup, facts: Facts) -> str:
    if setup.strategy == "central_storage":
        return (
            "mirrored would help, which neither gathers gradients at one device nor copies "
            "variables out of it"
        )
    others = []
    if facts.comm_dtype is None and setup.bytes >= NARROWED:
        others.append('sync="bfloat16"')
    if facts.sync == "gradients":
        others.append("local SGD")
    also = f" (so would {' or '.join(others)}, see docs/sync.md)" if others else ""
    larger = f"a larger batch would help, as the sum stays as large{also}"
    if setup.bytes >= LARGE and _may_shard(setup, facts):
        larger += (
            "; if most weights are in Dense or EinsumDense layers, try parallel.zero=3, which "
            "sends rows of small batches instead (docs/sharding.md)"
        )
    if setup.workers > 1 and facts.on_cpu and facts.communication == "ring":
        return (
            f'strategy.communication="native" would help, whose sums are faster on CPUs; {larger}'
        )
    return larger


def _may_shard(setup: Setup, facts: Facts) -> bool:
    """Return whether ZeRO could divide the state of this setup, which is whole now."""
    divided = facts.zero or facts.sync != "gradients"
    return setup.replicas > 1 and setup.strategy != "central_storage" and not divided


def _input_remedy(facts: Facts) -> str:
    return DATA_WORKERS if facts.cache else f"data.cache=true or {DATA_WORKERS}"


def _shares_cores(setup: Setup, facts: Facts) -> bool:
    """Return whether replicas on CPUs have fewer cores than a replica alone would use."""
    return (
        facts.on_cpu
        and setup.replicas > 1
        and (facts.threads is None or setup.replicas * facts.threads > facts.cores)
    )


def _sharing(setup: Setup, facts: Facts) -> str:
    """Return who shares how many cores, for a sentence."""
    who = (
        counted(setup.workers, "worker")
        if setup.workers > 1
        else counted(setup.replicas, "replica")
    )
    return f"{who} share {counted(facts.cores, 'core')}"


def _host_remedy(facts: Facts) -> str:
    more = (
        "train.steps_per_execution above 1"
        if facts.steps_per_execution == 1
        else "a larger train.steps_per_execution"
    )
    return f"{more}, and no callbacks that watch batches,"


def _wait(setup: Setup) -> str:
    waits = {rank: parts.get("wait", 0.0) for rank, parts in setup.step_breakdown.items()}
    longest = max(waits.values())
    last = slowest(setup)
    if last is not None:
        return (
            f": up to {milliseconds(longest)} a step for worker {last}; look at what else runs on "
            "its host, or give all workers equal hardware"
        )
    if setup.workers == 1:
        return (
            f": {milliseconds(longest)} a step within one process; equal devices, or cores for "
            "each replica, would help"
        )
    return (
        f": up to {milliseconds(longest)} a step, for another worker each time; dedicated cores "
        "would help"
    )


def _compute(setup: Setup, facts: Facts, times: str, share: float) -> str:
    """Return why forward and backward are slower than with one replica."""
    if _shares_cores(setup, facts):
        return (
            f": {times}, as {_sharing(setup, facts)} that one replica alone can use; more cores or "
            "hosts would help"
        )
    if setup.strategy == "central_storage":
        return (
            f": {times}, as variables are copied out of one device in each step; mirrored would "
            "help"
        )
    if setup.replicas == 1:
        return f": {times}; the strategy costs that, or something else ran on the machine"
    rows = setup.global_batch // setup.replicas
    if share < 1:
        return (
            f": {times}, as {rows} rows do not keep a replica as busy as {round(rows / share)} "
            "do; a larger batch would help"
        )
    return (
        f": {times}, as replicas on one machine share its memory and caches; one replica a host "
        "would help"
    )


def _alone(part: str, share: float, facts: Facts) -> str:
    """Return a remedy for one replica by the largest part of its step, if there is one."""
    if part == "input" and share > 0.2:
        return f"; {_input_remedy(facts)} would help"
    if part == "host" and share > 0.2:
        return f"; {_host_remedy(facts)} would help"
    if part == "forward_backward" and facts.on_cpu and not facts.onednn:
        return (
            "; TensorFlow does not use oneDNN on this CPU, and TF_ENABLE_ONEDNN_OPTS=1 may be "
            "faster (docs/performance.md)"
        )
    return ""
