"""Text and JSON rendering of the results of `tfdist verify`."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import Any

from tfdist.runtime.formatting import aligned
from tfdist.tools.verify.causes import likely
from tfdist.tools.verify.compare import Comparison, Difference
from tfdist.tools.verify.processes import workers_differ
from tfdist.tools.verify.recording import (
    COPIES,
    EXAMPLES,
    GRADIENTS,
    LOGS,
    OPTIMIZER,
    START,
    STATISTICS,
    WEIGHTS,
    Recording,
)

_COLUMNS = {
    LOGS: "loss, metrics",
    GRADIENTS: "gradients",
    WEIGHTS: "weights",
    STATISTICS: "statistics",
    OPTIMIZER: "optimizer",
}
_WHAT = {
    START: "the initial {}",
    STATISTICS: "the moving statistics {}",
    LOGS: "{}",
    GRADIENTS: "the norm of the gradient of {}",
    WEIGHTS: "the weights {}",
    OPTIMIZER: "the optimizer's {}",
    COPIES: "the replicas' copies of {}",
    EXAMPLES: "{}",
}
_REMEDY = "Compare with a smaller learning rate, fewer --steps, or another seed."


def preamble(reference: Recording, steps: int, per_call: int) -> list[str]:
    """Return lines on what was changed for the comparison, and what it cannot detect.

    Args:
        reference: Recording of one replica.
        steps: Number of steps that were requested.
        per_call: `steps_per_execution` of the run.
    """
    lines = []
    if reference.silenced:
        lines.append(
            "Dropout and noise are off here, as each replica draws its own by design: "
            f"{', '.join(reference.silenced)}."
        )
    if drawn := reference.draws():
        lines.append(
            f"Random numbers are drawn that could not be switched off: {', '.join(drawn)}."
        )
    if per_call > 1:
        lines.append(f"Steps run one by one here, not {per_call} in a call.")
    if not reference.rows(1).size:
        lines.append(
            "The batches have no rows that can be read here: whether the workers take the same "
            "ones is not compared."
        )
    if reference.steps < steps:
        lines.append(f"The data ended after {reference.steps} of {steps} steps.")
    return lines


def failed(replicas: str, reason: str) -> list[str]:
    """Return the lines for several replicas that failed while one replica did not.

    Args:
        replicas: Description of the replicas, such as "2 workers".
        reason: Reason for the failure.
    """
    lines = [
        f"NOT THE SAME: one replica trains, but {replicas} fail.",
        *(f"  {line}" for line in reason.splitlines()),
    ]
    if workers_differ(reason):
        lines.append(
            _cause(
                "the workers do not run the same thing: another seed, other data or another "
                "order of them, in some worker."
            )
        )
    return lines


def table(comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return a table of the largest differences of each execution mode, by kind.

    A `!` marks a difference that rounding does not explain. A `?` marks one that cannot be judged,
    because rounding alone is too large.

    Args:
        comparisons: Comparisons by the name of the execution mode.
    """
    rows = [("", *_COLUMNS.values(), "examples")]
    for mode, comparison in comparisons.items():
        cells = [_cell(comparison.largest(kind)) for kind in _COLUMNS]
        rows.append((mode, *cells, "other !" if comparison.rows else "the same"))
    return aligned(rows)


def lenient(comparison: Comparison) -> list[str]:
    """Return a line on values that are allowed more than the tolerance, if there are any."""
    names = comparison.lenient
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [
        (
            f"Rounding alone changes more than {comparison.tolerance:g}, and more is allowed: "
            f"{', '.join(names[:3])}{more}."
        )
    ]


def first(comparison: Comparison) -> list[str]:
    """Return lines on where a comparison first exceeds what is allowed."""
    lines = []
    if comparison.rows:
        rows = comparison.rows
        reasons = [
            f"{count} {what}"
            for count, what in (
                (rows.shared, "taken by several workers"),
                (rows.strange, "that one replica does not take"),
                (rows.missing, "taken by no worker"),
            )
            if count
        ]
        lines.append(
            f"step {rows.step}: the workers took {rows.received} rows, one replica "
            f"{rows.expected}; {', '.join(reasons) or 'some more often'}"
        )
    if difference := comparison.first:
        layer = (
            f", layer {difference.name.rpartition('/')[0]} ({difference.layer})"
            if difference.layer
            else ""
        )
        lines.append(
            f"{_when(difference)}{layer}: {_what(difference)} by {_number(difference.value)}; "
            f"{_number(difference.allowed)} is allowed"
        )
    return lines


def verdict(comparisons: Mapping[str, Comparison], drawn: list[str], replicas: str) -> list[str]:
    """Return the overall result, with the likely cause of a difference.

    Args:
        comparisons: Comparisons by the name of the execution mode, the mode of training first.
        drawn: Paths of seeds that advanced in the reference.
        replicas: Description of the compared replicas, such as "2 workers".
    """
    wrong = {mode: comparison for mode, comparison in comparisons.items() if comparison.differs}
    if not wrong and (reasons := unproved(comparisons)):
        return [
            f"NOT COMPARED: {reasons[0]}.",
            *(f"  Also: {reason}." for reason in reasons[1:4]),
            _REMEDY,
        ]
    if not wrong and drawn:
        lines = [
            (
                "NOT COMPARED: nothing differs by more than rounding, but random numbers are "
                f"drawn ({', '.join(drawn)}), which hide what differs."
            )
        ]
        return [*lines, "Compare without the layers that draw them."]
    if not wrong:
        return [
            (
                f"The same: {replicas} {'computes' if replicas.startswith('one') else 'compute'} "
                "what one replica computes, step by step."
            )
        ]
    mode, worst = next(iter(wrong.items()))
    lines = [
        f"NOT THE SAME: {', '.join(wrong)}. First differences:",
        *(f"  {line}" for line in first(worst)),
    ]
    if next(iter(comparisons)) != mode:
        return [*lines, _cause(_only(mode))]
    return [*lines, _cause(likely(worst, drawn))]


def unproved(comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return why equality is not proved although no difference exceeds rounding.

    Returns:
        Reasons; empty if equality is proved.
    """
    if not comparisons:
        return ["nothing was recorded"]
    reasons = []
    for comparison in comparisons.values():
        reasons += [
            f"step {step}: {_WHAT[kind].format(name)} of one replica is not finite"
            for step, kind, name in comparison.infinite
        ]
        for difference in comparison.inconclusive:
            what = f"{_when(difference)}: {_what(difference)} by {_number(difference.value)}"
            reasons.append(
                f"{what}, and rounding alone explains {_number(difference.needed)}, so a fault "
                "cannot be distinguished from rounding"
            )
    return list(dict.fromkeys(reasons))


def facts(comparisons: Mapping[str, Comparison], drawn: list[str]) -> dict[str, Any]:
    """Return the results as plain values for JSON.

    Args:
        comparisons: Comparisons by the name of the execution mode.
        drawn: Paths of seeds that advanced in the reference.
    """
    same = (
        bool(comparisons)
        and all(comparison.same for comparison in comparisons.values())
        and not drawn
    )
    result: dict[str, Any] = {
        "same": same,
        "random": drawn,
        "unproved": unproved(comparisons),
        "ways": {},
    }
    for mode, comparison in comparisons.items():
        largest = {kind: difference for kind in _WHAT if (difference := comparison.largest(kind))}
        result["ways"][mode] = {
            "same": comparison.same,
            "steps": comparison.steps,
            "replicas": comparison.replicas,
            "more_allowed": comparison.lenient,
            "largest": {kind: _plain(difference) for kind, difference in largest.items()},
            "first": comparison.first and _plain(comparison.first),
            "examples": comparison.rows and dataclasses.asdict(comparison.rows),
            "likely_cause": likely(comparison, drawn) if comparison.differs else None,
        }
    return result


def _cause(text: str) -> str:
    return textwrap.fill(f"Likely cause: {text}", 120, subsequent_indent="  ")


def _only(mode: str) -> str:
    if "not compiled" in mode:
        return (
            "only steps that are not compiled differ: Python code in the model, loss or "
            "train_step runs in each step there, and once, while it is traced, in compiled ones."
        )
    return (
        "only another way to exchange gradients differs (see strategy.communication): the "
        "network, its drivers, or TensorFlow's collectives."
    )


def _plain(difference: Difference) -> dict[str, Any]:
    values = {
        name: value
        for name, value in dataclasses.asdict(difference).items()
        if name not in ("index", "synchronized")
    }
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _cell(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return (
        f"{_number(difference.value)}"
        f"{' !' if difference.exceeds else ' ?' if difference.needed else ''}"
    )


def _when(difference: Difference) -> str:
    when = f"step {difference.step}" if difference.step else "before the first step"
    return f"{when}, worker {difference.worker}" if difference.worker else when


def _what(difference: Difference) -> str:
    text = _WHAT[difference.kind].format(difference.name)
    return (
        f"{text} differ" if difference.kind in (STATISTICS, WEIGHTS, COPIES) else f"{text} differs"
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
