"""Largest global batch that fits the devices of a run, for `data.global_batch=auto`."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist import config
from tfdist.config import AUTO
from tfdist.keras_compat import engine_of
from tfdist.run.plan import options, step_memory
from tfdist.run.plan.options import Needs
from tfdist.runtime.formatting import format_bytes
from tfdist.runtime.launch_protocol import LOG_SAYS_WHY

if TYPE_CHECKING:
    import tensorflow as tf

log = logging.getLogger("tfdist")
_MEASURE_S = 300.0  # seconds that a measurement may take
_MEASURED_ROWS = 64  # of the batch from which the memory of others is computed


def resolve(settings: config.Run, strategy: tf.distribute.Strategy, path: Path) -> config.Run:
    """Return settings whose `data.global_batch` is a number.

    The chief finds it, and all tasks take it. A run that was interrupted keeps its own.

    Args:
        settings: Settings of the run.
        strategy: Strategy of the run.
        path: File in which a former process wrote the settings that it trained with, if it exists.

    Raises:
        ValueError: If no batch fits, the model cannot be measured, or the strategy is of a kind
            whose memory is not predicted.
    """
    if settings.data.global_batch != AUTO:
        return settings
    engine = engine_of(strategy)
    if getattr(engine, "placement", None) is None:
        raise ValueError(
            f"data.global_batch: {AUTO!r} needs a synchronous strategy, received "
            f"{type(strategy).__name__}. Set a number."
        )
    batch = 0
    try:
        if engine.placement.is_chief:
            batch = _former(settings, path)
            if batch:
                log.info("data.global_batch: %d, as this run began with (%s)", batch, path)
            else:
                batch = find(settings, strategy.num_replicas_in_sync)
    except Exception:  # the other tasks wait
        engine.broadcast_from_chief([0.0])
        raise
    batch = int(engine.broadcast_from_chief([float(batch)])[0])
    if not batch:
        raise ValueError(f"data.global_batch: the chief found none; {LOG_SAYS_WHY}")
    return _with_batch(settings, batch)


def replaced(settings: config.Run, replicas: int) -> config.Run:
    """Return settings whose `data.global_batch` is a number, for so many replicas; see `find`."""
    if settings.data.global_batch != AUTO:
        return settings
    return _with_batch(settings, find(settings, replicas))


def find(settings: config.Run, replicas: int) -> int:
    """Return the largest global batch of a run that fits the memory of its devices.

    Args:
        settings: Settings of the run.
        replicas: Number of its replicas, each on a device of its own.

    Raises:
        ValueError: If no batch fits, or the model cannot be measured.
    """
    # The other tasks wait for so long.
    timeout = min(_MEASURE_S, settings.strategy.timeout)
    needs = step_memory.measure(_with_batch(settings, _MEASURED_ROWS), replicas, timeout=timeout)
    if needs.examples is not None and needs.examples < replicas:
        raise ValueError(
            f"data.global_batch: {AUTO!r} needs an example for {_each(replicas)}, "
            f"received {needs.examples} from {settings.data.name}. Use fewer devices, or more data."
        )
    if needs.rows != min(_MEASURED_ROWS, needs.examples or _MEASURED_ROWS):
        raise ValueError(
            f"data.global_batch: {AUTO!r} needs data that is batched by this key, and "
            f"{settings.data.name} makes batches of {needs.rows}. Set that number."
        )
    memory = int((settings.strategy.device_memory_gb or 0) * 1e9)
    name = options.name_of(settings.parallel.zero, settings.sync.comm_dtype, replicas)
    found = {
        option.name: (option, batch)
        for option, batch in options.largest_batches(needs, replicas, memory)
    }
    if name not in found:
        raise ValueError(
            f"parallel.zero: {needs.not_sharded}. Set parallel.zero=0, or another optimizer."
        )
    option, batch = found[name]
    if not batch:
        raise ValueError(
            f"data.global_batch: {AUTO!r} found none that fits {format_bytes(memory)} on each "
            f"device (strategy.device_memory_gb): {option.name} needs {format_bytes(option.peak)} "
            f"for one example on {_each(replicas)}. `tfdist plan` compares what needs less."
        )
    log.info(
        "data.global_batch: %d%s, the largest that fits %s on %s%s",
        batch,
        ", all examples" if batch == needs.examples else "",
        format_bytes(memory),
        _each(replicas),
        _about_rate(needs, batch),
    )
    return batch


def _about_rate(needs: Needs, batch: int) -> str:
    """Return what the log says of the learning rate, "" if it follows the batch by itself."""
    base = config.Data().global_batch_size
    rate = options.rate_for(dataclasses.replace(needs, rows=base), batch)
    if rate is None:
        return ""
    return (
        f"; train.learning_rate stays {needs.learning_rate:g}. If it is meant for batches of "
        f"{base}, as by default, `tfdist plan --find-batch` recommends {rate:.3g}. "
        "train.base_global_batch makes it follow in proportion"
    )


def _each(replicas: int) -> str:
    """Return the devices of a run, as a phrase that says that each of them is meant.

    Example:
        >>> _each(1), _each(4)
        ('the one device', 'each of 4 devices')
    """
    return "the one device" if replicas == 1 else f"each of {replicas} devices"


def _former(settings: config.Run, path: Path) -> int:
    """Return the batch of a former process of this run; 0 if there was none."""
    try:
        former = config.Run.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return 0
    batch = former.data.global_batch
    same = _as_json(_with_batch(former, AUTO)) == _as_json(settings)
    return batch if same and isinstance(batch, int) else 0


def _as_json(settings: config.Run) -> str:
    return json.dumps(settings.to_dict(), sort_keys=True)


def _with_batch(settings: config.Run, batch: int | str) -> config.Run:
    return dataclasses.replace(
        settings, data=dataclasses.replace(settings.data, global_batch=batch)
    )
