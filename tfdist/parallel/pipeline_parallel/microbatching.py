"""Micro-batching: splits batches and runs the stages on the micro-batches by a schedule.

A whole step is one TensorFlow function of one client. Control dependencies keep the order of a
stage's passes. Without them, TensorFlow would run forward passes as soon as it can, and hold the
activations of all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import mask_of, with_mask
from tfdist.keras_compat.python_arrays import copy_rows
from tfdist.parallel.pipeline_parallel.schedule import Task, execution_order
from tfdist.parallel.pipeline_parallel.stage_passes import Loss, StageInGroup

INDIVISIBLE = "PipelineModel: data * microbatches"
REMEDY = (
    "Choose another batch size, or drop the last batch of an epoch: "
    "Dataset.batch(..., drop_remainder=True)."
)


def run(
    groups: Sequence[Sequence[StageInGroup]],
    tensors: Sequence[Sequence[dict[int, tf.Tensor]]],
    tasks: Sequence[Sequence[Task]],
    losses: Sequence[Loss | None],
    finish: Callable[[int, int], None] = lambda group, microbatch: None,
    training: bool = False,
) -> None:
    """Run all tasks of all groups.

    Args:
        groups: Stages of each group, `[groups][stages]`.
        tensors: Input tensors by number, `[groups][microbatches]`. The stages' outputs are added.
        tasks: Tasks of each stage, in the stage's order.
        losses: Loss of each group's last stage when training, otherwise None.
        finish: Function of group and micro-batch that is called after the last stage's forward
            pass.
        training: Whether backward passes follow.
    """
    previous: dict[tuple[int, int], list] = {}
    gradients: list[list[dict[int, tf.Tensor]]] = [[{} for _ in each] for each in tensors]
    for stage, task in execution_order(tasks):
        m = task.microbatch
        for g, group in enumerate(groups):
            stage_in_group = group[stage]
            with (
                tf.device(stage_in_group.devices[0]),
                tf.control_dependencies(previous.get((g, stage), [])),
            ):
                if task.backward:
                    results = stage_in_group.backward(m, gradients[g][m], losses[g])
                else:
                    results = stage_in_group.forward(m, tensors[g][m], losses[g], training)
                    if stage == len(group) - 1:
                        finish(g, m)
            if not tf.executing_eagerly():
                with tf.device(stage_in_group.devices[0]), tf.control_dependencies(results):
                    previous[g, stage] = [tf.no_op()]


def split_evenly(tree: Any, count: int, model: str) -> list[Any]:
    """Split a batch by rows into equal pieces.

    Args:
        tree: Nest of tensors `[rows, ...]`; None stays None.
        count: Number of pieces.
        model: Name of the model, for messages.

    Returns:
        `count` nests of tensors `[rows / count, ...]`.

    Raises:
        ValueError: If `count` does not divide the number of rows, and the number is known while
            the function is traced.
        tf.errors.InvalidArgumentError: If `count` does not divide the number of rows, and the
            number is known only when the function runs. The message contains `INDIVISIBLE`.
    """

    def cut(x: Any) -> list:
        if x is None:
            return [None] * count
        x = tf.convert_to_tensor(x)
        if count == 1:
            return [x]
        rows = x.shape[0]
        if rows is None:
            actual = tf.shape(x)[0]
            words = [
                (
                    f"{INDIVISIBLE} = {count} must divide every batch that {model} trains on, "
                    "received a batch of"
                ),
                actual,
                f"examples. {REMEDY}",
            ]
            with tf.control_dependencies([tf.debugging.Assert(tf.equal(actual % count, 0), words)]):
                x = tf.identity(x)
        elif rows % count:
            raise ValueError(
                f"{INDIVISIBLE} = {count} must divide every batch that {model} trains on, "
                f"received a batch of {rows} examples. {REMEDY}"
            )
        return tf.split(copy_rows(x), count)

    return _split_leaves(tree, cut, count)


def split_any_size(tree: Any, count: int) -> tuple[list[Any], list[tf.Tensor]]:
    """Split a batch by rows into pieces that differ by at most one row.

    No piece is empty, because some TensorFlow operations have no kernel for empty tensors.

    Args:
        tree: Nest of tensors `[rows, ...]`.
        count: Number of pieces.

    Returns:
        `count` nests of tensors, and the fraction of the batch in each, as float32 scalars. A
        piece that would have no row gets the first row of the batch, and its fraction is 0.
    """
    rows = tf.shape(keras.tree.flatten(tree)[0])[0]
    sizes = tf.stack([rows // count + tf.cast(i < rows % count, tf.int32) for i in range(count)])
    parts = tf.unstack(tf.cast(sizes, tf.float32) / tf.cast(rows, tf.float32))
    extra = tf.maximum(count - rows, 0)

    def cut(x: tf.Tensor) -> list:
        filled = tf.concat([x, tf.repeat(x[:1], extra, axis=0)], 0)
        return tf.split(filled, tf.maximum(sizes, 1))

    return _split_leaves(tree, cut, count), parts


def concatenate(parts: Sequence[tf.Tensor], rows: tf.Tensor) -> tf.Tensor:
    """Concatenate the pieces of a batch, with their masks.

    Args:
        parts: Tensors `[piece rows, ...]` of pieces from `split_any_size`.
        rows: Number of rows of the batch, a scalar.

    Returns:
        Tensor `[rows, ...]`, with a mask if all pieces have one.
    """
    masks = [mask_of(x) for x in parts]
    return with_mask(
        tf.concat(parts, 0)[:rows],
        tf.concat(masks, 0)[:rows] if all(m is not None for m in masks) else None,
    )


def _split_leaves(tree: Any, cut: Callable[[Any], list], count: int) -> list[Any]:
    flat = [cut(x) for x in keras.tree.flatten(tree)]
    return [keras.tree.pack_sequence_as(tree, [each[i] for each in flat]) for i in range(count)]
