"""How the replicas of a training become one, as facts: when they exchange what, in which precision; nothing is computed here.

Given to `tfdist.make_strategy(sync=...)`, or to `tfdist.parallel.zero(optimizer, sync=...)`. Without one, gradients are summed in their
own precision in each step, so that N replicas train as one.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

# Small gradients travel in one collective; a large one by itself, which saves copying it, and starts while others are computed.
BUCKET_BYTES = 4 << 20
COMM_DTYPES = ("bfloat16", "float16")
COMBINE = ("mean", "replicas", "sum")


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The replicas exchange gradients before each update of the variables, which stay equal on all of them.

    In order: gradients are added up over `accumulate` steps, combined over the replicas, clipped, checked, and given to the optimizer.
    The optimizer's own `clipnorm`, `global_clipnorm`, `clipvalue`, `use_ema` and loss scaling come after, and see the same on all.

    Attributes:
        combine: "mean": of the loss over the examples of the global batch, of whichever replica: each replica weighs as many examples as
            it has. "replicas": the mean of the replicas' own means, each alike. "sum": the sum of these. Or a function, called in replica
            context with this replica's list of gradients, None where a variable has none, each its part of the mean over the global batch;
            it returns the list that the optimizer gets, which must be equal on all replicas. `tf.distribute.get_replica_context()` and
            `tfdist.parallel.replicas()` have the collectives.
        comm_dtype: "bfloat16" or "float16", in which gradients travel; they are summed in their own dtype. None: they travel in that too. float16
            ends at 65,504: gradients beyond become infinite. Not with a function as `combine`, which sends them itself.
        bucket_bytes: Small gradients travel together, in buckets of at most so many bytes; a larger gradient travels by itself.
        clip_norm: Longest norm of all gradients together, without a scale of the loss; longer ones are scaled to it. None: any.
        accumulate: Steps whose gradients are averaged for one update, and one exchange. Not with `zero` or `fsdp`, see there.
        skip_nonfinite: Whether an update is left out, on all replicas, if a gradient is infinite or not a number. Nothing of it then reaches the
            optimizer, whose count of updates stays as well. A LossScaleOptimizer does so itself, and lowers its scale.

    Raises:
        ValueError: For a bad value.

    Example:
        >>> Gradients(comm_dtype="bfloat16", clip_norm=1.0).comm_dtype
        'bfloat16'
    """

    combine: str | Callable[[list], list] = "mean"
    comm_dtype: str | None = None
    bucket_bytes: int = BUCKET_BYTES
    clip_norm: float | None = None
    accumulate: int = 1
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        if not callable(self.combine):
            _one_of("combine", self.combine, COMBINE, "or a function of a list of gradients")
        _comm_dtype(self.comm_dtype)
        if callable(self.combine) and self.comm_dtype is not None:
            raise ValueError(
                f"sync.comm_dtype: a function that combines gradients sends them itself; received {self.comm_dtype!r}. Give its own calls comm_dtype={self.comm_dtype!r}."
            )
        _whole("bucket_bytes", self.bucket_bytes, 1)
        _whole("accumulate", self.accumulate, 1)
        if self.clip_norm is not None:
            _number("clip_norm", self.clip_norm, 0.0, "above 0")

    @property
    def plain(self) -> bool:
        """Whether gradients are just summed."""
        return self == Gradients(bucket_bytes=self.bucket_bytes)


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Each replica trains by itself for some steps; then their weights become one.

    Each replica's gradient is that of the mean loss over its own examples. Weights, and with them the optimizer's slots, moving statistics and
    metrics, also become one wherever somebody looks: at an epoch's end, before a validation, and where a snapshot is made. Between, the slots of
    each replica are its own.

    With `outer_learning_rate=1` and `outer_momentum=0`, the defaults, weights become their mean: local SGD (Stich 2018, arXiv:1805.09767,
    algorithm 1). Otherwise their mean is a proposal, whose distance from the weights before is an outer gradient for Nesterov's momentum: see
    `DiLoCo`.

    Attributes:
        every: Steps from one exchange to the next, or "epoch".
        warmup: So many first steps exchange gradients each, as `Gradients()` does.
        outer_learning_rate: Of the outer step, above 0.
        outer_momentum: Of the outer step, from 0 to below 1.
        comm_dtype: As for `Gradients`: in which weights' differences travel.
        bucket_bytes: As for `Gradients`.

    Raises:
        ValueError: For a bad value.
    """

    every: int | str = 8
    warmup: int = 0
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    comm_dtype: str | None = None
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.every != "epoch":
            _whole("every", self.every, 1, 'steps, or "epoch"')
        _whole("warmup", self.warmup, 0)
        _number("outer_learning_rate", self.outer_learning_rate, 0.0, "above 0")
        if not 0 <= _number("outer_momentum", self.outer_momentum, -1.0, "from 0 to below 1") < 1:
            raise ValueError(
                f"sync.outer_momentum: expected a number from 0 to below 1, received {self.outer_momentum!r}."
            )
        _comm_dtype(self.comm_dtype)
        _whole("bucket_bytes", self.bucket_bytes, 1)

    @property
    def averages(self) -> bool:
        """Whether the outer step is a plain mean."""
        return (self.outer_learning_rate, self.outer_momentum) == (1.0, 0.0)


def DiLoCo(
    every: int | str = 8,
    warmup: int = 0,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    **kwargs: Any,
) -> LocalSGD:
    """Local steps, and an outer optimizer with Nesterov's momentum on what they come to.

    Douillard et al. 2023, arXiv:2311.08105, algorithm 1, whose defaults for the outer step these are.

    Args:
        every: As for `LocalSGD`.
        warmup: As for `LocalSGD`.
        outer_learning_rate: As for `LocalSGD`.
        outer_momentum: As for `LocalSGD`.
        **kwargs: As for `LocalSGD`.

    >>> DiLoCo(every=16).averages
    False
    """
    return LocalSGD(every, warmup, outer_learning_rate, outer_momentum, **kwargs)


Policy = Gradients | LocalSGD


def policy(given: Any) -> Policy:
    """What `make_strategy` takes, checked: a policy, a function as for `Gradients.combine`, a name of `COMBINE` or `COMM_DTYPES`, or None.

    Args:
        given: That.

    Raises:
        ValueError: It is something else.

    >>> policy("bfloat16") == Gradients(comm_dtype="bfloat16"), policy(None) == policy("mean")
    (True, True)
    """
    if isinstance(given, Gradients | LocalSGD):
        return given
    if given is None:
        return Gradients()
    if isinstance(given, str) and given in COMM_DTYPES:
        return Gradients(comm_dtype=given)
    if (isinstance(given, str) and given in COMBINE) or callable(given):
        return Gradients(combine=given)
    raise ValueError(
        f"sync: expected tfdist.sync.Gradients(...), LocalSGD(...) or DiLoCo(...), a function of a list of gradients, or one of {', '.join(COMBINE + COMM_DTYPES)}; "
        f"received {given!r}.{_near(given, COMBINE + COMM_DTYPES)}"
    )


def _one_of(name: str, value: Any, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        raise ValueError(
            f"sync.{name}: expected one of {', '.join(choices)}{f', {more}' if more else ''}; received {value!r}.{_near(value, choices)}"
        )


def _comm_dtype(value: Any) -> None:
    if value is not None:
        _one_of("comm_dtype", value, COMM_DTYPES, "or None")


def _near(value: Any, choices: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(value, choices, 1) if isinstance(value, str) else []
    return f" Did you mean {near[0]!r}?" if near else ""


def _whole(name: str, value: Any, least: int, what: str = "a number") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"sync.{name}: expected {what}, {least} or more; received {value!r}.")


def _number(name: str, value: Any, bound: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > bound:
        raise ValueError(f"sync.{name}: expected a number {what}, received {value!r}.")
    return float(value)
