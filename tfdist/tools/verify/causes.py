"""Likely causes of numerical differences, derived from the pattern of the differences."""

from __future__ import annotations

import statistics

from tfdist.tools.verify.compare import Comparison, Difference, Rows
from tfdist.tools.verify.recording import (
    COPIES,
    EXAMPLES,
    GRADIENTS,
    LOGS,
    OPTIMIZER,
    START,
    STATISTICS,
    WEIGHTS,
)

_MIXED_ROWS = (
    "the rows of a batch depend on each other, in a loss such as a contrastive one or an overlap "
    "over the batch, or in a layer that computes a statistic of the batch. A replica sees only its "
    "own rows: gather those of all replicas there with tfdist.all_gather_rows(x)"
)
_CHANGED_GRADIENTS = (
    "the loss agrees, and gradients do not: most likely, the step changes each replica's gradients "
    "before optimizer.apply(), as by clipping or normalizing them. Pass clipnorm, global_clipnorm "
    "or clipvalue to the optimizer instead, which clips their sum over the replicas"
)
_CLOSE = 0.02  # relative tolerance for a factor that all gradients share


def likely(comparison: Comparison, drawn: list[str]) -> str:
    """Return the likely cause of a difference between several replicas and one.

    Args:
        comparison: Comparison whose `differs` is true.
        drawn: Paths of seeds that advanced in the reference, because random numbers could not be
            switched off.

    Returns:
        One or more sentences.
    """
    first = comparison.first
    if comparison.rows is not None and (first is None or first.step >= comparison.rows.step):
        return _of_rows(comparison.rows)
    assert first is not None
    if first.kind == START:
        return (
            "the initial weights differ from those of one replica: a different seed, or weights "
            "that some process loads or makes differently. Build the model from the run's seed, "
            "inside strategy.scope()."
        )
    if first.kind == EXAMPLES:
        return (
            "the data of the workers end at a different step than those of one replica. Let "
            "tfdist distribute the rows."
        )
    factor = gradient_factor(comparison)
    alone = _normalized_alone(comparison)
    if alone and (first.kind == STATISTICS or (factor is None and first.kind in (LOGS, GRADIENTS))):
        others = f" (and {len(alone) - 1} more like it)" if len(alone) > 1 else ""
        name = _layer(first) if _layer(first) in alone else alone[0]
        return (
            f"{name}{others} normalizes with the statistics of each replica's own rows, not of "
            "the whole batch, and so do all later values. BatchNormalization does this by design; "
            "BatchNormalization(synchronized=True) uses the statistics of the whole batch."
        )
    changed = first.kind == GRADIENTS and not any(
        d.kind == LOGS and d.exceeds and d.step <= first.step for d in comparison.differences
    )
    if factor is not None:
        return _of_factor(factor, comparison.replicas, changed)
    seen = any(difference.kind == GRADIENTS for difference in comparison.differences)
    apart = next((d for d in comparison.differences if d.kind == COPIES and d.exceeds), None)
    if apart is not None and (first.kind == COPIES or not seen):
        return (
            f"the replicas' copies of {apart.name} differ: besides the optimizer, something "
            "assigns to it on each replica from that replica's rows alone. Let the optimizer "
            "do it, with optimizer.apply(gradients, variables), or sum over the "
            "replicas before."
        )
    if drawn:
        return (
            "the model draws random numbers that verify cannot switch off (the seeds "
            f"{', '.join(drawn)} go on): each replica draws its own, by design. Compare without "
            "such layers."
        )
    kinds = {difference.kind for difference in comparison.differences if difference.exceeds}
    if kinds == {LOGS}:
        exceeding = (d.name for d in comparison.differences if d.exceeds)
        names = list(dict.fromkeys(exceeding))
        return (
            "gradients and weights agree, and only what is reported differs: "
            f"{', '.join(names)}. If train_step computes such a value, let a metric of the model "
            "compute it from the rows: update_state() of a keras.metrics.Metric that is an "
            "attribute of the model, with rows or counts of rows (for a count, "
            "keras.metrics.Sum). If it is a metric that declares tfdist_sums_rows or a variable's "
            "aggregation, its states do not add up as declared: leave the declaration out."
        )
    if not seen:
        return (
            "no pattern can be found without whole gradients: with parallel.zero each replica "
            "has only a part of them, and a train_step of your own may update without the "
            "optimizer. Verify with --config.parallel.zero=0, which compares gradients."
        )
    if first.kind in (WEIGHTS, OPTIMIZER) and GRADIENTS not in kinds:
        return (
            f"the summed gradients agree, but the updates differ: something other than the "
            f"optimizer changes {first.name}, or the optimizer takes different steps."
        )
    if changed:
        return f"{_CHANGED_GRADIENTS}. If it does not, {_MIXED_ROWS}."
    if first.kind in (LOGS, GRADIENTS):
        return (
            f"the differences have no common factor: most likely, {_MIXED_ROWS}. If there is no "
            f"such place, look at {_layer(first)}, where the first difference is, and at what "
            "comes before it."
        )
    return (
        f"no known pattern. Look at {_layer(first)}, where the first difference is, and at what "
        "comes before it in the model."
    )


def gradient_factor(comparison: Comparison) -> float | None:
    """Return the common factor of all gradients relative to those of one replica.

    It is taken from the first step in which gradients differ. It is None if no single factor
    explains the differences.
    """
    steps = [d.step for d in comparison.differences if d.kind == GRADIENTS and d.exceeds]
    if not steps:
        return None
    ratios = [
        d.ratio
        for d in comparison.differences
        if d.kind == GRADIENTS and d.step == min(steps) and d.ratio is not None
    ]
    factor = statistics.median(ratios) if ratios else 1.0
    alike = all(abs(ratio / factor - 1.0) < _CLOSE for ratio in ratios) if factor else False
    return factor if alike and abs(factor - 1.0) > _CLOSE else None


def _normalized_alone(comparison: Comparison) -> list[str]:
    """Return the unsynchronized BatchNormalization layers in the order of the model."""
    of_layers = (
        d
        for d in comparison.differences
        if d.kind == STATISTICS and "BatchNormalization" in d.layer and not d.synchronized
    )
    return list(dict.fromkeys(_layer(difference) for difference in of_layers))


def _of_factor(factor: float, replicas: int, changed: bool) -> str:
    if abs(factor / replicas - 1.0) < _CLOSE:
        return (
            f"all gradients are {replicas} times too large: the step sums them over the replicas "
            "itself, or multiplies the loss by the number of replicas. Leave both to "
            "optimizer.apply(), which weighs each replica's gradients by its rows and sums them."
        )
    if abs(factor * replicas - 1.0) < _CLOSE:
        return (
            f"all gradients are {replicas} times too small: the loss is a sum over rows, or it is "
            "divided by the number of replicas. In fit, a loss on a replica must be the mean over "
            'its rows: tf.reduce_mean(...), or a Keras loss, which for sums has reduction="sum". '
            "tf.nn.compute_average_loss and tf.nn.scale_regularization_loss divide by the number "
            "of replicas; they are for loops of strategy.run()."
        )
    times = f"all gradients are {factor:.3g} times those of one replica"
    if changed:
        return f"{times}: {_CHANGED_GRADIENTS}. If it does not, {_MIXED_ROWS}."
    return f"{times}: the loss has another divisor on {replicas} replicas, or {_MIXED_ROWS}."


def _of_rows(rows: Rows) -> str:
    if rows.shared:
        return (
            f"the workers' shards overlap: in step {rows.step}, {rows.shared} rows were taken by "
            "several workers"
            + (
                f", and {rows.missing} of the {rows.expected} rows that one replica takes by none"
                if rows.missing
                else ""
            )
            + (
                ". Let tfdist distribute the rows (a tfdist.data.pipeline, or a data set of global "
                "batches, the same on all workers); or shard() by worker."
            )
        )
    if rows.repeated:
        return (
            f"examples are repeated: in step {rows.step}, {rows.repeated} rows came twice on one "
            "worker."
        )
    if rows.strange:
        return (
            f"the workers read other examples than one replica does: in step {rows.step}, "
            f"{rows.strange} of {rows.received} rows are not among the {rows.expected} of one "
            "replica. Another order (a shuffle without a seed, shards of a data set that is "
            "batched otherwise), or other data."
        )
    return (
        f"in step {rows.step} the workers took {rows.received} rows, and one replica "
        f"{rows.expected}: {rows.missing} were left out."
    )


def _layer(difference: Difference) -> str:
    return difference.name.rpartition("/")[0] or difference.name
