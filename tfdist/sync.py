"""Synchronization policies of replicas: gradient all-reduce, local SGD and DiLoCo.

Pass a policy to `tfdist.make_strategy(sync=...)`, or to `tfdist.parallel.zero(optimizer,
sync=...)`. The default sums gradients in their own dtype in each step, so that N replicas train as
one.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

__all__ = ["COMM_DTYPES", "DiLoCo", "Gradients", "LocalSGD", "Policy"]

# Small gradients share one collective. A larger gradient has its own collective: it need not be
# copied, and it is sent while others are still computed.
BUCKET_BYTES = 4 << 20
COMBINE = ("mean", "replicas", "sum")
COMM_DTYPES = ("bfloat16", "float16")
"""Dtypes other than their own in which gradients may travel."""


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Policy that combines the replicas' gradients before each update of the variables.

    The variables stay equal on all replicas. The order is: gradients are added up over `accumulate`
    steps, combined over the replicas, clipped, checked, and passed to the optimizer. The
    optimizer's own `clipnorm`, `global_clipnorm`, `clipvalue`, `use_ema` and loss scaling come
    after that, and see the same values on all replicas.

    Attributes:
        combine: Method that combines gradients, default "mean": the mean of the loss over the
            examples of the global batch, whichever replica has them, so that each replica weighs as
            many examples as it has. "replicas": the mean of the replicas' own means, equally
            weighted. "sum": the sum of these means. Or a function, called in replica context with
            this replica's list of gradients, None where a variable has none; each is this replica's
            part of the mean over the global batch. The function returns the list that the optimizer
            gets, which must be equal on all replicas. `tf.distribute.get_replica_context()` and
            `tfdist.parallel.replicas()` have the collectives.
        comm_dtype: Dtype in which gradients travel, "bfloat16" or "float16"; they are summed in
            their own dtype. None (default): they travel in their own dtype. float16 ends at 65,504:
            larger gradients become infinite. Not allowed with a function as `combine`, which sends
            gradients itself.
        bucket_bytes: Largest bucket in bytes, default 4 MiB. Small gradients travel together in
            buckets; a larger gradient travels by itself.
        clip_norm: Largest global norm of all gradients, without loss scale; gradients with a larger
            norm are scaled down to it. None (default): no limit.
        accumulate: Steps whose gradients are averaged for one update and one exchange, default 1.
            Not with `zero` or `fsdp`, see there.
        skip_nonfinite: Whether all replicas skip an update if a gradient is infinite or NaN,
            default False. The optimizer then gets nothing, and its count of updates stays the same.
            A LossScaleOptimizer skips such updates itself, and lowers its scale.

    Raises:
        ValueError: If a value is wrong.

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
                "sync.comm_dtype: expected None with a combine function, which sends the gradients "
                f"itself; received {self.comm_dtype!r}. Pass comm_dtype={self.comm_dtype!r} in its "
                "collective calls."
            )
        _whole("bucket_bytes", self.bucket_bytes, 1)
        _whole("accumulate", self.accumulate, 1)
        if self.clip_norm is not None:
            _number("clip_norm", self.clip_norm, 0.0, "above 0")

    @property
    def plain(self) -> bool:
        """Return whether gradients are only summed."""
        return self == Gradients(bucket_bytes=self.bucket_bytes)


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Policy in which replicas take local steps and synchronize weights every few steps.

    The gradient of each replica is that of the mean loss over its own examples. Replicas also
    synchronize weights, optimizer slots, moving statistics and metrics where these are read: at the
    end of an epoch, before a validation, and for a snapshot. In between, each replica has its own
    optimizer slots.

    With `outer_learning_rate=1` and `outer_momentum=0`, the defaults, weights are replaced by their
    mean: local SGD (Stich 2018, arXiv:1805.09767, algorithm 1). With other values the distance of
    this mean from the previous weights is an outer gradient for Nesterov momentum: see `DiLoCo`.

    Attributes:
        every: Steps from one synchronization to the next, default 8, or "epoch".
        warmup: Number of first steps that exchange gradients in each step, as `Gradients()` does;
            default 0.
        outer_learning_rate: Learning rate of the outer step, above 0, default 1.
        outer_momentum: Momentum of the outer step, from 0 to below 1, default 0.
        comm_dtype: Dtype in which differences of weights travel, as for `Gradients`.
        bucket_bytes: Largest bucket in bytes, as for `Gradients`.

    Raises:
        ValueError: If a value is wrong.
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
                "sync.outer_momentum: expected a number from 0 to below 1, received "
                f"{self.outer_momentum!r}."
            )
        _comm_dtype(self.comm_dtype)
        _whole("bucket_bytes", self.bucket_bytes, 1)

    @property
    def averages(self) -> bool:
        """Return whether the outer step is a plain mean."""
        return (self.outer_learning_rate, self.outer_momentum) == (1.0, 0.0)


def DiLoCo(
    every: int | str = 8,
    warmup: int = 0,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    **kwargs: Any,
) -> LocalSGD:
    """Return a policy of local steps with an outer optimizer with Nesterov momentum.

    Douillard et al. 2023, arXiv:2311.08105, algorithm 1; the defaults for the outer step are those
    of the paper.

    Args:
        every: Steps from one synchronization to the next, as for `LocalSGD`.
        warmup: Number of first steps that exchange gradients, as for `LocalSGD`.
        outer_learning_rate: Learning rate of the outer step, as for `LocalSGD`; default 0.7.
        outer_momentum: Momentum of the outer step, as for `LocalSGD`; default 0.9.
        **kwargs: Further arguments of `LocalSGD`.

    Example:
        >>> DiLoCo(every=16).averages
        False
    """
    return LocalSGD(every, warmup, outer_learning_rate, outer_momentum, **kwargs)


Policy = Gradients | LocalSGD
"""Type of a synchronization policy."""


def policy(value: Any) -> Policy:
    """Return the policy for a value of `make_strategy(sync=...)`, checked.

    Args:
        value: Policy, a function as for `Gradients.combine`, a name of `COMBINE` or `COMM_DTYPES`,
            or None.

    Raises:
        ValueError: If it is something else.

    Example:
        >>> policy("bfloat16") == Gradients(comm_dtype="bfloat16"), policy(None) == policy("mean")
        (True, True)
    """
    if isinstance(value, Gradients | LocalSGD):
        return value
    if value is None:
        return Gradients()
    if isinstance(value, str) and value in COMM_DTYPES:
        return Gradients(comm_dtype=value)
    if (isinstance(value, str) and value in COMBINE) or callable(value):
        return Gradients(combine=value)
    raise ValueError(
        "sync: expected tfdist.sync.Gradients(...), LocalSGD(...) or DiLoCo(...), a function of "
        f"a list of gradients, or one of {', '.join(COMBINE + COMM_DTYPES)}; "
        f"received {value!r}.{_near(value, COMBINE + COMM_DTYPES)}"
    )


def _one_of(name: str, value: Any, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        raise ValueError(
            f"sync.{name}: expected one of {', '.join(choices)}{f', {more}' if more else ''}; "
            f"received {value!r}.{_near(value, choices)}"
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
