"""Sharded snapshots: each worker writes its own rows of sharded variables.

The workers write their rows before the chief writes the snapshot that names those files.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from tfdist.backup import state
from tfdist.backup.snapshot import Snapshot
from tfdist.backup.store import Store
from tfdist.keras_compat import engine_of, holder_of
from tfdist.train.hooks import Hooks


def save(model: Any, engine: Hooks, store: Store) -> list[str]:
    """Write this worker's rows, and wait until all workers have written theirs.

    All workers call this at the same step.

    Args:
        model: Model whose sharded variables are saved.
        engine: Engine of the model's strategy.
        store: Store to write to. No other snapshot may be in the process of being written there.

    Returns:
        The file names of all workers, for the snapshot that the chief writes next. The list is
        empty if nothing is sharded.

    Raises:
        OSError: If this worker or another one cannot write there.
    """
    rows = state.rows_of_model(model)
    if not rows:
        return []
    number, token = (
        int(x)
        for x in engine.broadcast_from_chief([float(store.next()), float(secrets.randbits(48))])
    )
    _, first = engine.replicas()
    first_replicas = engine.all_gather([float(first)])
    paths = [
        store.rows_path(number, f"{token:x}", rank, len(first_replicas))
        for rank in range(len(first_replicas))
    ]
    failure = None
    try:
        store.write_rows(
            paths[first_replicas.index([float(first)])], Snapshot(rows, {"first": first})
        )
    except OSError as error:
        failure = error
    failed = [
        rank
        for rank, flags in enumerate(engine.all_gather([float(failure is not None)]))
        if flags[0]
    ]
    if failure is not None:
        raise failure
    if failed:
        raise OSError(
            f"{store.directory}: worker {failed[0]} could not write its part of snapshot-{number}; "
            "its log has the cause. Earlier snapshots are kept."
        )
    return [os.path.basename(path) for path in paths]


def check(model: Any) -> None:
    """Raise ValueError unless an engine knows which rows this process holds.

    Args:
        model: Any model, sharded or not.

    Raises:
        ValueError: If the model is sharded over several processes that train without a strategy
            scope. Each of them would save its own rows as if they were all rows.
    """
    holder = holder_of(model.optimizer, model.trainable_weights)
    if (
        holder is not None
        and holder.group.size > 1
        and engine_of(model.distribute_strategy) is None
    ):
        raise ValueError(
            "BackupAndRestore: expected a model and an optimizer that were made in their "
            "strategy's scope, received variables that are sharded over "
            f"{holder.group.size} processes without a strategy. Make model and optimizer, and call "
            "compile(), inside `with strategy.scope():`."
        )
