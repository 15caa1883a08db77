"""Stages and micro-batches become the order in which each stage works, and layers what stays until backward; pure, no tensors here.

GPipe (Huang et al. 2019, section 2.3) runs all forward passes, then all backward passes. 1F1B (Narayanan et al. 2019, PipeDream, section
3.2; without its stale weights) lets a stage begin backward passes as soon as it can, so that it holds few micro-batches at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

SCHEDULES = ("gpipe", "1f1b")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a stage does at a time.

    Args:
        backward: Whether it is a backward pass.
        microbatch: Of which micro-batch, from 0.
    """

    backward: bool
    microbatch: int


def tasks(stages: int, microbatches: int, kind: str) -> list[list[Task]]:
    """What each stage does, in its order.

    Args:
        stages: Their number, 1 or more.
        microbatches: Their number, 1 or more.
        kind: One of `SCHEDULES`, or "forward": no backward passes.

    >>> ["".join("FB"[t.backward] + str(t.microbatch) for t in own) for own in tasks(2, 3, "1f1b")]
    ['F0F1B0F2B1B2', 'F0B0F1B1F2B2']
    """
    forward = [Task(False, m) for m in range(microbatches)]
    backward = [Task(True, m) for m in range(microbatches)]
    if kind == "forward":
        return [forward] * stages
    if kind == "gpipe":
        return [forward + backward] * stages
    assert kind == "1f1b", kind
    found = []
    for stage in range(stages):
        early = min(stages - stage - 1, microbatches)  # passes until the first micro-batch is back
        pairs = [
            task
            for m in range(microbatches)
            for task in (*forward[early + m : early + m + 1], backward[m])
        ]
        found.append(forward[:early] + pairs)
    return found


def together(each: Sequence[Sequence[Task]]) -> list[tuple[int, Task]]:
    """One order of all stages' work in which nothing comes before what it needs.

    Args:
        each: As of `tasks`.

    Returns:
        Pairs of a stage and its task.

    Raises:
        ValueError: Stages wait for each other for ever.
    """
    last = len(each) - 1
    order: list[tuple[int, Task]] = []
    done: set[tuple[int, Task]] = set()
    places = [0] * len(each)
    while len(order) < sum(map(len, each)):
        before = len(order)
        for stage, own in enumerate(each):
            if places[stage] == len(own):
                continue
            task = own[places[stage]]
            needs = (
                {(stage - 1, task)}
                if not task.backward
                else {(stage, Task(False, task.microbatch)), (stage + 1, task)}
            )
            if all(need in done for need in needs if 0 <= need[0] <= last):
                done.add((stage, task))
                order.append((stage, task))
                places[stage] += 1
        if len(order) == before:
            raise ValueError(
                f"schedule: stages wait for each other; {before} of {sum(map(len, each))} tasks can run"
            )
    return order


def held(own: Sequence[Task]) -> int:
    """The most micro-batches whose forward pass a stage has done and whose backward pass it has not.

    >>> [held(own) for own in tasks(4, 16, "gpipe")], [held(own) for own in tasks(4, 16, "1f1b")]
    ([16, 16, 16, 16], [4, 3, 2, 1])
    """
    most = now = 0
    for task in own:
        now += -1 if task.backward else 1
        most = max(most, now)
    return most


def duration(each: Sequence[Sequence[Task]], forward: float = 1.0, backward: float = 2.0) -> float:
    """When the last stage is done, if all stages are equal and nothing else takes time.

    Args:
        each: As of `tasks`.
        forward: What a forward pass takes, any unit.
        backward: What a backward pass takes.

    >>> duration(tasks(4, 8, "1f1b")), (8 + 4 - 1) * 3.0
    (33.0, 33.0)
    """
    last = len(each) - 1
    ends: dict[tuple[int, Task], float] = {}
    free = [0.0] * len(each)
    for stage, task in together(each):
        needs = (stage + 1, task) if task.backward else (stage - 1, task)
        begin = max(free[stage], ends[needs]) if 0 <= needs[0] <= last else free[stage]
        free[stage] = ends[stage, task] = begin + (backward if task.backward else forward)
    return max(free)


def bubble(stages: int, microbatches: int) -> float:
    """The part of a step in which a stage waits, if all stages are equal (Narayanan et al. 2021, section 2.2).

    >>> round(bubble(4, 8), 3)
    0.273
    """
    return (stages - 1) / (microbatches + stages - 1)


def kept(sizes: Sequence[int], prefetch: int, room: int) -> int:
    """How many of the last layers keep their gathered weights from forward to backward.

    Args:
        sizes: Bytes of the weights of each layer, in the order of forward.
        prefetch: How many layers ahead weights are gathered: so many, and the one that is computed, are whole at a time anyway.
        room: Bytes that may be taken.

    >>> kept([10, 10, 10, 10], 0, 25), kept([10, 10, 10, 10], 2, 25), kept([10], 2, 0)
    (2, 3, 1)
    """
    return max(
        min(1 + prefetch, len(sizes)),
        sum(total <= room for total in itertools.accumulate(reversed(sizes))),
    )
