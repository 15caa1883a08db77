"""Pipeline parallelism schedules (GPipe and 1F1B) and their memory and time estimates.

GPipe (Huang et al. 2019, section 2.3) runs all forward passes, then all backward passes. 1F1B
(Narayanan et al. 2019, PipeDream, section 3.2; without its stale weights) lets a stage begin
backward passes as soon as it can, so that it holds few micro-batches at a time.

The functions are pure and use no tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

SCHEDULES = ("gpipe", "1f1b")


@dataclasses.dataclass(frozen=True)
class Task:
    """A forward or backward pass of a stage for one micro-batch.

    Args:
        backward: Whether it is a backward pass.
        microbatch: Index of the micro-batch, from 0.
    """

    backward: bool
    microbatch: int


def tasks(stages: int, microbatches: int, kind: str) -> list[list[Task]]:
    """Return the tasks of each stage in the order of a schedule.

    Args:
        stages: Number of stages, 1 or more.
        microbatches: Number of micro-batches, 1 or more.
        kind: One of `SCHEDULES`, or "forward" for a schedule without backward passes.

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
    schedule = []
    for stage in range(stages):
        early = min(stages - stage - 1, microbatches)  # warm-up forward passes
        pairs = [
            task
            for m in range(microbatches)
            for task in (*forward[early + m : early + m + 1], backward[m])
        ]
        schedule.append(forward[:early] + pairs)
    return schedule


def execution_order(schedule: Sequence[Sequence[Task]]) -> list[tuple[int, Task]]:
    """Return one order of all stages' tasks in which each task follows those that it needs.

    Args:
        schedule: Tasks of each stage, as from `tasks`.

    Returns:
        Pairs of a stage and its task.

    Raises:
        ValueError: If the stages would wait for each other forever.
    """
    last = len(schedule) - 1
    order: list[tuple[int, Task]] = []
    done: set[tuple[int, Task]] = set()
    next_index = [0] * len(schedule)
    while len(order) < sum(map(len, schedule)):
        before = len(order)
        for stage, stage_tasks in enumerate(schedule):
            if next_index[stage] == len(stage_tasks):
                continue
            task = stage_tasks[next_index[stage]]
            needs = (
                {(stage - 1, task)}
                if not task.backward
                else {(stage, Task(False, task.microbatch)), (stage + 1, task)}
            )
            if all(need in done for need in needs if 0 <= need[0] <= last):
                done.add((stage, task))
                order.append((stage, task))
                next_index[stage] += 1
        if len(order) == before:
            raise ValueError(
                "schedule: expected tasks that can run in order; only "
                f"{before} of {sum(map(len, schedule))} can, because stages wait for each other"
            )
    return order


def max_in_flight(stage_tasks: Sequence[Task]) -> int:
    """Return the maximum number of micro-batches whose activations a stage holds at a time.

    A stage holds activations from a micro-batch's forward pass until its backward pass.

    Args:
        stage_tasks: Tasks of the stage, in its order.

    >>> [max_in_flight(stage) for stage in tasks(4, 16, "gpipe")]
    [16, 16, 16, 16]
    >>> [max_in_flight(stage) for stage in tasks(4, 16, "1f1b")]
    [4, 3, 2, 1]
    """
    highest = 0
    current = 0
    for task in stage_tasks:
        current += -1 if task.backward else 1
        highest = max(highest, current)
    return highest


def duration(
    schedule: Sequence[Sequence[Task]], forward: float = 1.0, backward: float = 2.0
) -> float:
    """Return the time until all stages are done, if all are equal and nothing else takes time.

    Args:
        schedule: Tasks of each stage, as from `tasks`.
        forward: Time of a forward pass, in any unit.
        backward: Time of a backward pass, in the same unit.

    >>> duration(tasks(4, 8, "1f1b")), (8 + 4 - 1) * 3.0
    (33.0, 33.0)
    """
    last = len(schedule) - 1
    ends: dict[tuple[int, Task], float] = {}
    free = [0.0] * len(schedule)
    for stage, task in execution_order(schedule):
        needs = (stage + 1, task) if task.backward else (stage - 1, task)
        begin = max(free[stage], ends[needs]) if 0 <= needs[0] <= last else free[stage]
        free[stage] = begin + (backward if task.backward else forward)
        ends[stage, task] = free[stage]
    return max(free)


def bubble(stages: int, microbatches: int) -> float:
    """Return the fraction of a step in which a stage waits, if all stages are equal.

    See Narayanan et al. 2021, section 2.2.

    Args:
        stages: Number of stages.
        microbatches: Number of micro-batches.

    >>> round(bubble(4, 8), 3)
    0.273
    """
    return (stages - 1) / (microbatches + stages - 1)


def layers_kept(sizes: Sequence[int], prefetch: int, max_bytes: int) -> int:
    """Return how many of the last layers keep gathered weights from forward to backward pass.

    Args:
        sizes: Size of each layer's weights in bytes, in the order of the forward pass.
        prefetch: Number of layers ahead of the computation whose weights are gathered. These
            layers and the computed one are whole at a time anyway.
        max_bytes: Maximum size of the weights that are kept, in bytes.

    >>> layers_kept([10, 10, 10, 10], 0, 25), layers_kept([10, 10, 10, 10], 2, 25)
    (2, 3)
    >>> layers_kept([10], 2, 0)
    1
    """
    return max(
        min(1 + prefetch, len(sizes)),
        sum(total <= max_bytes for total in itertools.accumulate(reversed(sizes))),
    )
