"""Graph loop that runs several training steps in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.train.synchronous.feed import Batch
from tfdist.train.synchronous.gradient_sum import in_loop
from tfdist.train.timing.graph_timestamps import GraphTimestamps, clock, measuring


def run_steps(
    step: Callable[[Batch], list], count_rows: Callable[[Batch], Any],
    timestamps: Callable[[], GraphTimestamps] | None, readings: int,
    iterator, following, steps, before,
) -> tuple:  # fmt: skip
    """Run up to `steps` steps; fewer where the data ends.

    The batch of a step is fetched while the step before it runs. (A `tf.cond` around the step
    instead of a batch in advance costs a tenth of its time.)

    Args:
        step: Function that runs a step and returns tensors that are available when the step is
            done.
        count_rows: Function that returns the number of rows of a global batch.
        timestamps: Function that creates the clock readings of a step; None to make no readings.
        readings: Number of readings per step.
        iterator: Iterator that gives batches.
        following: Next batch, a `tf.experimental.Optional`, empty where the data has ended.
        steps: Maximum number of steps, int64 scalar.
        before: Number of steps of this epoch that have run, int64 scalar.

    Returns:
        Number of steps run, number of rows of their global batches, seconds waited for batches,
        checksum of the batches, the next batch. With `timestamps` the seconds are 0, and two more
        values follow: the time when the loop began, and the readings `[steps, readings]`. The first
        reading of a step is the time when the batch after it was available.
    """

    def body(done, examples, waited, checksum, following, *written: Any):
        batch = following.get_value()
        measured = timestamps() if timestamps else None
        with in_loop(), measuring(measured):
            finished = step(batch)
        if batch.checksum is not None:
            checksum += batch.checksum * tf.cast(1 + (before + done) % 127, tf.float64)
        following = iterator.get_next_as_optional()
        fetched = clock([following.has_value()])
        if measured is None:
            waited += tf.maximum(fetched - clock(finished), 0.0)
        else:
            written = (written[0].write(tf.cast(done, tf.int32), measured.row(fetched)),)
        return done + 1, examples + count_rows(batch), waited, checksum, following, *written

    started = clock([]) if timestamps else None
    # Without this dependency, the clock may be read after the loop.
    with tf.control_dependencies([started] if timestamps else None):
        zero = tf.identity(tf.constant(0.0, tf.float64))
        no_steps = tf.identity(tf.constant(0, tf.int64))
    values = [no_steps, no_steps, zero, zero, following]
    if timestamps:
        values.append(
            tf.TensorArray(tf.float64, tf.cast(steps, tf.int32), element_shape=[readings])
        )
    run = tf.while_loop(
        lambda done, *rest: (done < steps) & rest[3].has_value(),
        body,
        values,
        parallel_iterations=1,
    )
    return (*run[:5], started, run[5].stack()) if timestamps else tuple(run)
