"""Each worker's rows of sharded variables become files of a snapshot, before the chief writes the snapshot itself."""

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
    """Writes this worker's rows, and waits until all have written theirs; called by all workers at the same step.

    Args:
        model: The model.
        engine: Of its strategy.
        store: Where; no snapshot is being written there.

    Returns:
        The names of all workers' files, for the snapshot that the chief writes next; none where nothing is sharded.

    Raises:
        OSError: This worker or another cannot write there.
    """
    rows = state.rows_of_model(model)
    if not rows:
        return []
    number, token = (
        int(x)
        for x in engine.broadcast_from_chief([float(store.next()), float(secrets.randbits(48))])
    )
    _, first = engine.replicas()
    everyone = engine.all_gather([float(first)])
    paths = [
        store.rows_path(number, f"{token:x}", rank, len(everyone)) for rank in range(len(everyone))
    ]
    failure = None
    try:
        store.write_rows(paths[everyone.index([float(first)])], Snapshot(rows, {"first": first}))
    except OSError as error:
        failure = error
    failed = [
        rank for rank, said in enumerate(engine.all_gather([float(failure is not None)])) if said[0]
    ]
    if failure is not None:
        raise failure
    if failed:
        raise OSError(
            f"{store.directory}: worker {failed[0]} could not write its part of snapshot-{number}; its log has the cause. The snapshots that are there stay."
        )
    return [os.path.basename(path) for path in paths]


def check(model: Any) -> None:
    """Makes sure that an engine knows which rows of what is sharded this process holds.

    Args:
        model: Any.

    Raises:
        ValueError: It is sharded over processes that train without a scope, each of which would take its rows for all.
    """
    held = holder_of(model.optimizer, model.trainable_weights)
    if held is not None and held.group.size > 1 and engine_of(model.distribute_strategy) is None:
        raise ValueError(
            f"BackupAndRestore: expected a model and an optimizer that were made in their strategy's scope, received some that are sharded over {held.group.size} processes "
            "without one, of which none knows the others' part. Make model and optimizer, and call compile(), inside `with strategy.scope():`."
        )
