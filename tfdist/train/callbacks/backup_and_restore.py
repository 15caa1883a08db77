"""Fault tolerance: a `BackupAndRestore` callback that saves and restores the exact state.

A snapshot holds the complete training state, so that a resumed `fit` continues as if it had not
been interrupted. The chief writes snapshots in a background thread, and every worker reads them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist.backup import result, state
from tfdist.backup.shards import Piece
from tfdist.backup.snapshot import Snapshot, arrays_of, numbered
from tfdist.backup.store import Store, StoredSnapshot
from tfdist.keras_compat import engine_of, install, pass_counters, set_first_epoch
from tfdist.runtime.launch_protocol import PREEMPTED_CODE, Launched, note
from tfdist.runtime.time_account import time_account
from tfdist.train.callbacks import log_files, sharded_snapshot
from tfdist.train.callbacks.memory_snapshots import (
    IN_MEMORY,
    METRICS_OF_REPLICAS,
    MemorySnapshots,
    SnapshotLost,
)
from tfdist.train.health import preemption
from tfdist.train.hooks import Hooks, MetricCopies, bind
from tfdist.train.without_strategy import FitWithoutStrategy

_METRICS = "metrics/"
_SYNC = "sync/"
NO_SNAPSHOT = -1  # instead of the number of a snapshot
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Directories of the fits that this process has completed, and whose last snapshot was kept.
_completed: set[str] = set()


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Callback that saves the training state and resumes from it when you call `fit` again.

    A snapshot holds the weights, the optimizer, the seeds, the metrics, the history, the state of
    callbacks and the position in the data. If the data set is a `tfdist.data` data pipeline, no
    batch is read twice. Any other `tf.data` data set is read again up to that position, and must
    yield the same batches again. Callbacks are also called for the steps of the epoch that were
    already done, without running those steps. All this holds with a synchronous strategy of tfdist
    and without a strategy.

    Your own callbacks are saved if they define `get_state()`, which returns a JSON-serializable
    value, and `set_state(state)`. This callback runs after all others, wherever you list it, so
    that a snapshot holds the state of all of them. On restore, TensorBoard's files are truncated to
    their sizes at the time of the snapshot.

    Under `tfdist launch --restarts`, the last snapshot stays when training is complete. A process
    that is killed later then finds the result when the launcher starts it again. Another launch
    removes that snapshot and starts from the beginning.

    Args:
        backup_dir: Directory of the snapshots of one `fit`. All workers must be able to reach it.
        save_freq: "epoch" to save at the end of each epoch, a number to save after that many steps,
            or a time such as "30s", "5m" or "1h".
        double_checkpoint: Argument of Keras' callback. `keep=2` is the default in any case.
        delete_checkpoint: Whether to remove the snapshots when training is complete.
        keep: Number of most recent snapshots to keep, 1 or more. A damaged snapshot is skipped, and
            the one before it is used.
        memory_freq: Number of steps after which a snapshot is saved in the memory of this host,
            from where the tasks resume when `tfdist launch --restarts` restarts them; see
            docs/faults.md. It needs no disk. None: no such snapshots.

    Raises:
        ValueError: If an argument is invalid.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike,
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        keep: int = 2,
        memory_freq: int | None = None,
    ):
        self._every_seconds = _seconds_of(save_freq)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep: expected a number of snapshots, 1 or more; received {keep!r}.")
        if memory_freq is not None and (
            isinstance(memory_freq, bool) or not isinstance(memory_freq, int) or memory_freq < 1
        ):
            raise ValueError(
                "memory_freq: expected a number of steps, 1 or more, or None; received "
                f"{memory_freq!r}."
            )
        # An interval in seconds has to be checked after every step.
        super().__init__(
            os.fspath(backup_dir),
            1 if self._every_seconds else save_freq,
            double_checkpoint,
            delete_checkpoint,
        )
        self.store = Store(backup_dir, max(keep, 2) if double_checkpoint else keep)
        self.memory_freq = memory_freq
        self.writes = True
        install()  # of `run_fit`, which Keras calls where no strategy of tfdist was made
        self._engine_of_fit: Hooks | None = None
        self._callbacks: list[keras.callbacks.Callback] = []
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._writing: concurrent.futures.Future | None = None
        self._suspended = log_files.SuspendedFrequencies()
        self._launched = Launched()
        self._is_restarted = False  # by its launcher, if it fails
        self._is_compared = False  # its result, with that of another launch
        self._listening = contextlib.ExitStack()
        self._memory: MemorySnapshots | None = None
        self._newest: StoredSnapshot | None = None
        self._opened = False
        self._save_requested = False
        self._known_of_epoch: dict[str, Any] = {}  # what takes time to find, and stays the same
        self._first_epoch = 0
        self._replay_until = 0
        # Metric totals of the epoch that is being validated, and those of each replica.
        self._train_totals: tuple[list, list] | None = None
        self._restored_metrics: tuple[list, list] = [], []  # totals, and those of each replica
        # Counters of the passes over the validation data, and their values before its next pass.
        self._validation_passes: list = []
        self._next_validation: list[int] = []

    def run_fit(self, model: keras.Model, keras_method: Callable, *args: Any, **kwargs: Any):
        """Run a `fit` of a model that has no engine; the hook on `keras.Model.fit` calls this.

        Args:
            model: Model that is trained.
            keras_method: Keras' own `fit`.
            *args: Positional arguments of `fit`.
            **kwargs: Keyword arguments of `fit`.
        """
        sharded_snapshot.check(model)
        call = bind(keras_method, model, args, kwargs)
        given = call["callbacks"]
        callbacks = in_order(
            given.callbacks
            if isinstance(given, keras.callbacks.CallbackList)
            else keras.tree.flatten(given)
        )
        if isinstance(given, keras.callbacks.CallbackList):
            given.callbacks[:] = callbacks
        else:
            call["kwargs"]["callbacks"] = callbacks
        log_files.check_places(callbacks)
        engine = FitWithoutStrategy(model, call, lambda: self._epoch)
        with contextlib.ExitStack() as after:
            after.callback(log_files.leave, callbacks)
            for callback in callbacks:
                if isinstance(callback, BackupAndRestore):
                    after.callback(callback.release)
                    after.callback(setattr, callback, "_engine_of_fit", None)
                    callback.prepare(
                        callbacks, True, call["initial_epoch"], call["validation_data"], engine
                    )
            with engine.running():
                return keras_method(model, **call["kwargs"])

    def prepare(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        writes: bool,
        first_epoch: int = 0,
        validation_data: Any = None,
        engine: Hooks | None = None,
    ) -> None:
        """Read the snapshots and rewind the logs, before Keras starts a `fit`.

        An engine calls this.

        Args:
            callbacks: All callbacks of the fit. Their state is saved and restored.
            writes: Whether this process writes the snapshots.
            first_epoch: Epoch at which the fit starts if there is no snapshot.
            validation_data: Validation data of the fit. The order of a data pipeline of
                `tfdist.data` continues too.
            engine: Engine of the fit. None: that of the model's strategy.
        """
        is_dataset = isinstance(validation_data, tf.data.Dataset)
        self._validation_passes = pass_counters(validation_data) if is_dataset else []
        self._engine_of_fit = engine
        self._callbacks = list(callbacks)
        self.writes = writes
        self._first_epoch = first_epoch
        self._open()
        if not writes:
            return
        log_files.close(self._callbacks)
        if self._newest is None:
            return
        facts = self._newest.snapshot.facts
        log_files.rewind(facts["logs"], self._callbacks)
        log_files.rewind_tables(facts["tables"], self._callbacks)

    @property
    def every(self) -> float:
        """Return the save frequency as one number, for comparison between workers.

        The number is positive for steps, negative for seconds and 0 for epochs.
        """
        return (
            -self._every_seconds
            if self._every_seconds
            else 0.0
            if self.save_freq == "epoch"
            else float(self.save_freq)
        )

    @property
    def resumed(self) -> tuple[bool, int]:
        """Return whether the last fit resumed, and how many steps of its first epoch were done.

        A fit that found only the snapshot written before its first step did not resume.
        """
        return self._newest is not None and not self._newest.snapshot.facts[
            "first"
        ], self._replay_until

    def request_save(self) -> None:
        """Save a snapshot after the current step, and go on training.

        Call it in `on_train_batch_end` of another callback, at the same step on all workers. It is
        for programs that learn of a preemption by other means than SIGTERM, such as Ray Train.
        """
        self._save_requested = True

    def release(self) -> None:
        """Wait for the snapshot that is being written, and stop listening for signals.

        An engine calls this when the `fit` is over or has failed. If it has failed, an error of the
        snapshot is logged, so that it does not hide the cause.
        """
        try:
            self._finish()
        except Exception as error:
            logging.error("%s: the last snapshot was not written: %s", self.backup_dir, error)
        self._listening.close()
        self._suspended.end()
        self._known_of_epoch.clear()

    def _open(self) -> None:
        """Claim the directory if this process writes, and read the newest snapshot.

        From then on the chief is the directory's only writer.
        """
        self._launched = Launched.from_environ()
        with time_account().during("restore"):
            self._end_memory()
            self._memory = MemorySnapshots.open(
                self.memory_freq, self._directory, self._launched, self.writes
            )
            if self.writes:
                self.store.claim(self._launched.launch, self._launched.attempt)
            newest = self.store.newest()
            if self._memory is not None:
                newest = self._memory.newest(newest)
        self._is_leftover = (
            newest is not None and self.delete_checkpoint and self._is_complete(newest.snapshot)
        )
        self._newest = None if self._is_leftover else newest
        self._opened = True

    def _is_complete(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot is the final one of another, completed training."""
        launch = snapshot.facts["finished"]
        return launch is not None and (
            self._directory in _completed or (bool(launch) and launch != self._launched.launch)
        )

    # --- Keras callback methods -------------------------------------------------------------------
    def on_train_begin(self, logs=None):
        """See `keras.callbacks.Callback`."""
        sharded_snapshot.check(self.model)
        layers = self.model.layers
        # A model without call(), whose own train_step calls its layers, stays unbuilt itself.
        if not self.model.built and not (layers and all(layer.built for layer in layers)):
            raise ValueError(
                "BackupAndRestore: expected a model that is built before fit, because its state is "
                "restored when fit begins. Build it with an Input layer or model.build(shape)."
            )
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            with self.model.distribute_strategy.scope():
                optimizer.build(self.model.trainable_variables)
        if not self._opened:
            self._open()
        self._opened = False
        self._engine.begin(self.model)
        self.release()
        if not preemption.can_listen():
            logging.warning(
                "%s: fit runs outside of the main thread, where Python cannot handle signals: "
                "SIGTERM will end this process without a snapshot. Save often (save_freq), or call "
                "BackupAndRestore.request_save() before the end.",
                self.backup_dir,
            )
        self._listening.enter_context(preemption.listening())
        self.store.on_write = self._engine.moment
        self._agree()  # a collective: afterwards every worker has read its snapshot
        if self.writes and self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "tfdist-backup")
        self._steps_since_save = 0
        self._steps_since_memory = 0
        self._saved_at = time.monotonic()
        self._replay_until = 0
        self._train_totals = None
        self._known_of_epoch.clear()  # the model, or its optimizer, may be another one
        self._epoch = self._first_epoch - 1
        self._step = 0
        if self.writes:
            if self._is_leftover:
                self.store.clear()
                self.store.claim(self._launched.launch, self._launched.attempt)
            self.store.sweep()
        _completed.discard(self._directory)
        set_first_epoch(self.model, 0)  # an earlier fit that failed may have left another value
        self._restored = self._newest.snapshot if self._newest is not None else None
        if self._restored is not None:
            with time_account().during("restore"):
                self._restore(self._restored)
            self._note_validation()
        else:
            self._note_validation()
            self._save(self._first_epoch, 0, state.of_history([], {}), first=True)

    def on_epoch_begin(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        self._epoch = epoch
        self._step = 0
        self._known_of_epoch.clear()
        snapshot = self._restored
        self._restored = None
        if snapshot is not None:
            state.into_history(snapshot.facts["history"], self.model.history)
            if self._replay_until:
                self._engine.set_metric_totals(self.model, *self._restored_metrics)
        if self._every_seconds:
            self._pause(1)
        elif self.save_freq != "epoch":
            self._pause(max(1, self.save_freq - self._steps_since_save))
        if self._memory is not None and self.memory_freq is not None:
            self._pause_for_memory(max(1, self.memory_freq - self._steps_since_memory))

    def on_train_batch_end(self, batch, logs=None):
        """See `keras.callbacks.Callback`."""
        # With steps_per_execution > 1, the last call may count beyond the end of the epoch.
        step = min(batch + 1, self.params.get("steps") or batch + 1)
        before = self._step
        self._step = step
        if before < self._replay_until:
            if step >= self._replay_until:
                self._end_replay()
            return
        self._steps_since_save += step - before
        self._steps_since_memory += step - before
        if self._engine.stopping():
            self._preempt()
        requested = self._save_requested
        self._save_requested = False
        due, ahead = self._due()
        in_memory = self._memory is not None and self._step >= self._next_memory
        within = self._saves_within_epochs()
        on_disk = due or (requested and within)
        if on_disk or (in_memory and within):
            self._save(
                self._epoch, self._step, self._history(), on_disk=on_disk, in_memory=in_memory
            )
        if ahead:
            self._pause(ahead)
        if in_memory:
            assert self.memory_freq is not None
            self._pause_for_memory(self.memory_freq)

    def _due(self) -> tuple[bool, int]:
        """Return whether `save_freq` asks for a save now, and the steps until it is asked again.

        The number is 0 if it was not asked at this step.
        """
        if self.save_freq == "epoch" or self._step < self._next:
            return False, 0
        if not self._every_seconds:
            return True, self.save_freq
        # The chief decides, because clocks differ between workers.
        passed = time.monotonic() - self._saved_at
        left = (self._every_seconds - passed) / max(passed / self._steps_since_save, 1e-6)
        due, ahead = self._engine.broadcast_from_chief(
            [passed >= self._every_seconds, min(max(int(left), 1), 2 * self._steps_since_save)]
        )
        return bool(due), int(ahead)

    def on_test_begin(self, logs=None):
        """See `keras.callbacks.Callback`."""
        if self._step:  # validation of a fit, which resets the metrics of the training epoch
            self._engine.synchronize(self.model)
            self._train_totals = self._engine.metric_totals(self.model)

    def on_test_batch_end(self, batch, logs=None):
        """See `keras.callbacks.Callback`."""
        if self._train_totals is not None and self._engine.stopping():
            self._preempt()

    def on_epoch_end(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        self._replay_until = 0
        self._train_totals = None
        self._note_validation()
        if self.save_freq == "epoch":
            # Keras' History callback runs last, so it does not have this epoch yet.
            history = self.model.history
            values = {name: list(column) for name, column in history.history.items()}
            for name, value in (logs or {}).items():
                values.setdefault(name, []).append(value)
            self._save(epoch + 1, 0, state.of_history([*history.epoch, epoch], values))

    def on_train_end(self, logs=None):
        """See `keras.callbacks.Callback`."""
        self._engine.moment("end")
        snapshot = self._restored
        self._restored = None
        if snapshot is not None:  # no epoch ran: training was already complete
            state.into_history(snapshot.facts["history"], self.model.history)
        keeps = self._is_restarted or not self.delete_checkpoint
        if keeps and (snapshot is None or snapshot.facts["finished"] != self._launched.launch):
            self._save(
                self._epoch + 1 if snapshot is None else snapshot.facts["epoch"],
                0,
                self._history(),
                finished=self._launched.launch,
            )
        self._finish()
        self._end_memory(drop=self.writes)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        with self._engine.gathered(self.model) if self._is_compared else contextlib.nullcontext():
            if self.writes:
                result.write(self._launched, self.model, self._history())
        if keeps:
            _completed.add(self._directory)
        elif self.writes:
            self.store.clear()
        set_first_epoch(self.model, 0)  # or the model's next fit would start where this one did
        # A barrier: no worker looks for snapshots again before the chief has removed them.
        self._engine.broadcast_from_chief([0.0])
        requested = preemption.requested()
        self.release()
        if requested:  # the signal came too late for this fit to act on it
            preemption.resend()

    def _note_validation(self) -> None:
        self._next_validation = [counter.next for counter in self._validation_passes]

    # --- Saving -----------------------------------------------------------------------------------
    def _pause(self, ahead: int) -> None:
        """Tell the engine the next step of this epoch at which it must pause."""
        self._next = max(self._step, self._replay_until) + int(ahead)
        self._engine.pause_at(self._next, f"backup {self.backup_dir}")

    def _end_memory(self, drop: bool = False) -> None:
        memory = self._memory
        self._memory = None
        if memory is not None:
            memory.end(drop)

    def _pause_for_memory(self, ahead: int) -> None:
        """Tell the engine the next step of this epoch at which a snapshot goes to memory."""
        self._next_memory = max(self._step, self._replay_until) + ahead
        self._engine.pause_at(self._next_memory, f"memory {self.backup_dir}")

    @property
    def _engine(self) -> Hooks:
        return engine_of(self.model.distribute_strategy) or self._engine_of_fit or Hooks()

    def _saves_within_epochs(self) -> bool:
        # If a resumed fit restarts the epoch, its steps count twice. You accept that with a
        # save_freq other than "epoch".
        return self._engine.begins_within_epochs() or self.save_freq != "epoch"

    def _preempt(self) -> None:
        """Save the step that all workers have reached, then raise `Preempted`."""
        saves = self._saves_within_epochs()
        action = f"saving step {self._step}" if saves else "restarting later from the beginning"
        logging.warning(
            "%s: SIGTERM asked this process to end: %s of epoch %d, then exiting with code %d.",
            self.backup_dir,
            action,
            self._epoch + 1,
            PREEMPTED_CODE,
        )
        if saves and self._steps_since_save:
            self._save(self._epoch, self._step, self._history())
        self._finish()
        self._engine.broadcast_from_chief([0.0])  # a barrier: no worker exits before that
        raise preemption.Preempted

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with time_account().during("save"):
            self._submit(*args, **kwargs)

    def _submit(
        self,
        epoch: int,
        step: int,
        history: dict[str, Any],
        *,
        first: bool = False,
        finished: str | None = None,
        on_disk: bool = True,
        in_memory: bool = False,
    ) -> None:
        """Save the state at a given step of an epoch.

        Args:
            epoch: Epoch, counted from 0.
            step: Number of steps of that epoch that are done.
            history: History of the epochs before it.
            first: Whether nothing has been trained yet.
            finished: Launch in which training was completed; None while it is not complete.
            on_disk: Whether to save it in the directory.
            in_memory: Whether to save it in the memory of the host.
        """
        if in_memory:
            self._steps_since_memory = 0
        if on_disk:
            self._steps_since_save = 0
            self._saved_at = time.monotonic()
        totals: list = []
        parts: list = []
        own: list = []
        copies: list[MetricCopies] = []
        if step and self._train_totals:
            totals, parts = self._train_totals
        elif step:
            self._engine.synchronize(self.model)
            if not on_disk:
                copies = self._known("copies", self._engine.metric_copies)
            if not copies:
                own = self._known("own metrics", self._engine.own_metrics)
            if not (copies or own):
                totals, parts = self._engine.metric_totals(self.model)
        synced = self._engine.sync_totals(self.model)
        files: list[str] = []
        if on_disk:
            if state.is_sharded(self.model):
                self._finish()  # the next snapshot's number is unknown while one is being written
            files = sharded_snapshot.save(self.model, self._engine, self.store)
        seed = state.keras_seed() if self.writes else []
        metrics = [*own, *(copy for each in copies for copy in each.copies)]
        others: list[Any] = []  # values of the seed and of the metrics

        def values(variables: Sequence[keras.Variable]) -> list[Any]:
            read = self._engine.values(self.model, [*variables, *seed, *metrics])  # in one call
            others[:] = read[len(variables) :]
            return read[: len(variables)]

        snapshot = None
        if self.writes:
            model_state = self._known("variables", state.whole_variables).read(values)
            random_state = state.of_random(*others[: len(seed)])
            if own:
                totals = others[len(seed) :]
            facts = {
                **model_state.facts,
                **random_state.facts,
                "epoch": epoch,
                "step": step,
                "steps": self.params.get("steps"),
                "a_call": self.model.steps_per_execution,
                "data": self._engine.data_position(epoch, step),
                "validation": self._next_validation,
                "history": history,
                "callbacks": state.of_callbacks(self._others()),
                "logs": log_files.sizes(self._callbacks),
                "tables": log_files.table_sizes(self._callbacks),
                "stopped": (
                    self.params.get("epochs") if self.model.stop_training and not step else None
                ),
                "first": first,
                "finished": finished,
                "rows": files,
                # Training that resumes saves at the same steps, as a save may change the rounding.
                "since": [self._steps_since_save, self._steps_since_memory],
            }
            arrays = {
                **model_state.arrays,
                **random_state.arrays,
                **state.best_of_callbacks(self._others()),
                **numbered(_METRICS, totals),
                **numbered(METRICS_OF_REPLICAS, parts),
                **numbered(_SYNC, synced),
            }
            snapshot = Snapshot(arrays, facts)
        elif metrics:
            values([])
        if in_memory:
            assert self._memory is not None
            of_copies = others[len(seed) :] if copies else []
            self._memory.save(self.model, self._engine, (epoch, step), snapshot, copies, of_copies)
        if on_disk and snapshot is not None:
            self._finish()
            assert self._thread is not None
            self._writing = self._thread.submit(self._write, snapshot)

    def _known(self, name: str, function: Callable[[keras.Model], Any]) -> Any:
        """Return the result of a function of the model, which is called once an epoch."""
        if name not in self._known_of_epoch:
            self._known_of_epoch[name] = function(self.model)
        return self._known_of_epoch[name]

    def _write(self, snapshot: Snapshot) -> None:
        started = time.monotonic()
        # The launcher then gives this process time to finish writing.
        note(self._launched.log_dir, "saving", task=self._launched.task)
        self._note("saved", snapshot, self.store.write(snapshot), time.monotonic() - started)

    def _note(self, event: str, snapshot: Snapshot, number: int, seconds: float) -> None:
        """Note a snapshot in the journal; one in memory has no number."""
        epoch, step, steps = (snapshot.facts[name] for name in ("epoch", "step", "steps"))
        position = {
            "epoch": epoch,
            "step": step,
            "total": epoch * (steps or 0) + step,
            "number": None if number == IN_MEMORY else number,
            "path": "memory" if number == IN_MEMORY else self.store.path(number),
        }
        note(
            self._launched.log_dir,
            event,
            task=self._launched.task,
            attempt=self._launched.attempt,
            **position,
            seconds=seconds,
        )

    def _finish(self) -> None:
        """Wait for the snapshot that is being written, and raise the error if it failed."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            with time_account().during("save"):
                writing.result()

    # --- Restoring --------------------------------------------------------------------------------
    def _agree(self) -> None:
        """Take over the launch's settings from the chief, and compare the snapshots found.

        Raises:
            ValueError: If a worker found another snapshot than the chief.
            SnapshotLost: If so, and the snapshot is in memory; it is dropped then.
        """
        newest = self._newest
        own = (
            [float(NO_SNAPSHOT), 0.0, 0.0]
            if newest is None
            else [
                float(x)
                for x in (
                    newest.number,
                    newest.snapshot.facts["epoch"],
                    newest.snapshot.facts["step"],
                )
            ]
        )
        # Another host's launcher may have other flags, such as no --restarts.
        facts = [float(self._launched.restarts > 0), float(result.is_wanted(self._launched))]
        rows = self._engine.all_gather([*own, *facts])
        *chief, restarts, wanted = rows[0]
        self._is_restarted = bool(restarts)
        self._is_compared = bool(wanted)
        for rank, row in enumerate(rows):
            found = row[: len(own)]
            if found == chief:
                continue
            difference = (
                f"{self.backup_dir}: expected the snapshot that the chief restores "
                f"({_describe(chief)}); worker {rank} found {_describe(found)}."
            )
            if IN_MEMORY in (chief[0], found[0]):
                self._end_memory(drop=True)
                raise SnapshotLost(
                    f"{difference} The hosts do not reach each other's snapshots in memory: let "
                    "each connect to all ports of the others, and pass its address with --host. "
                    "The next attempt resumes from the disk."
                )
            raise ValueError(
                f"{difference} All workers must read the same backup_dir: name a directory on a "
                "file system that they share."
            )

    def _restore(self, snapshot: Snapshot) -> None:
        started = time.monotonic()
        self._engine.moment("restoring")
        epoch = snapshot.facts["epoch"]
        step = snapshot.facts["step"]
        steps = snapshot.facts["steps"]
        current_steps = self.params.get("steps")
        if step and steps and current_steps and steps != current_steps:
            raise ValueError(
                f"{self.backup_dir}: the snapshot was saved after step {step} of an epoch of "
                f"{steps} steps, and an epoch now has {current_steps} steps. The global batch or "
                "the data have changed, so fit cannot resume within this epoch. Use the same "
                "global batch and data as before, or another backup_dir."
            )
        steps_per_execution = self.model.steps_per_execution
        if step % steps_per_execution and step != current_steps:
            raise ValueError(
                f"{self.backup_dir}: the snapshot was saved after step {step} of an epoch with "
                f"steps_per_execution={snapshot.facts['a_call']}; steps_per_execution is now "
                f"{steps_per_execution}, so no call ends at that step. Compile with "
                f"{snapshot.facts['a_call']}, or another number that divides {step}."
            )
        self._steps_since_save, self._steps_since_memory = snapshot.facts.get("since", [0, 0])
        replicas, first_replica = self._engine.replicas()
        state.into_model(
            snapshot,
            self.model,
            self.backup_dir,
            pieces=self._pieces(snapshot),
            replicas=replicas,
            first=first_replica,
        )
        state.into_random(snapshot)
        # Before the position in the training data, which may be the same data pipeline.
        numbers = snapshot.facts.get("validation", ())
        for counter, number in zip(self._validation_passes, numbers, strict=False):
            counter.next = number
        if synced := arrays_of(_SYNC, snapshot):
            self._engine.set_sync_totals(self.model, synced)
        stopped = snapshot.facts["stopped"] is not None and snapshot.facts[
            "stopped"
        ] == self.params.get("epochs")
        set_first_epoch(self.model, snapshot.facts["stopped"] if stopped else epoch)
        self.model.stop_training = stopped
        if self._engine.begin_at(self.model, epoch, step, snapshot.facts.get("data", ())):
            self._replay_until = step
        elif step:
            logging.warning(
                "%s: the snapshot was saved after step %d of epoch %d. fit starts this epoch again "
                "with the state of that step, because parameter servers, strategies of TensorFlow "
                "and data sets that TensorFlow distributed cannot resume within an epoch.",
                self.backup_dir,
                step,
                epoch,
            )
        if self._replay_until:  # Keras will call the callbacks for these steps again
            self._suspended = log_files.SuspendedFrequencies(self._others())
            self._replay_snapshot = snapshot
        else:
            self._restore_callbacks(snapshot)
        self._restored_metrics = (
            arrays_of(_METRICS, snapshot),
            arrays_of(METRICS_OF_REPLICAS, snapshot),
        )
        assert self._newest is not None
        if self._memory is not None:
            if self._newest.number == IN_MEMORY:
                totals, parts = self._memory.metrics(self._engine)
                if totals:
                    self._restored_metrics = totals, parts
            self._memory.restored()
        self._note("restored", snapshot, self._newest.number, time.monotonic() - started)

    def _pieces(self, snapshot: Snapshot) -> Callable[[str], list[Piece]]:
        assert self._newest is not None
        if self._newest.number != IN_MEMORY:
            return self.store.pieces(snapshot)
        assert self._memory is not None
        return self._memory.pieces(self._engine)

    def _end_replay(self) -> None:
        self._suspended.end()
        self._restore_callbacks(self._replay_snapshot)

    def _restore_callbacks(self, snapshot: Snapshot) -> None:
        state.into_callbacks(snapshot.facts["callbacks"], self._others())
        state.best_into_callbacks(snapshot.arrays, self._others())

    @property
    def _directory(self) -> str:
        return self.backup_dir if "://" in self.backup_dir else os.path.abspath(self.backup_dir)

    def _others(self) -> list[keras.callbacks.Callback]:
        return [callback for callback in self._callbacks if callback is not self]

    def _history(self) -> dict[str, Any]:
        return state.of_history(self.model.history.epoch, self.model.history.history)


def in_order(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Return callbacks in the order in which they run.

    BackupAndRestore comes after all others of the user, and Keras' own, which read the logs, last.
    """
    keras_own = keras.callbacks.History | keras.callbacks.ProgbarLogger
    return sorted(
        callbacks, key=lambda c: 2 if isinstance(c, keras_own) else isinstance(c, BackupAndRestore)
    )


def _describe(numbers: Sequence[float]) -> str:
    number, epoch, step = (int(x) for x in numbers)
    if number == NO_SNAPSHOT:
        return "none"
    name = "the snapshot in memory" if number == IN_MEMORY else f"snapshot-{number}"
    return f"{name} of epoch {epoch}, step {step}"


def _seconds_of(save_freq: Any) -> float | None:
    """Return the time in seconds that a `save_freq` such as "5m" gives, or None.

    Args:
        save_freq: "epoch", a number of steps, or a time such as "30s", "5m" or "1h".

    Returns:
        The time in seconds; None for "epoch" or a number of steps.

    Raises:
        ValueError: If it is a text of another form.
    """
    if not isinstance(save_freq, str) or save_freq == "epoch":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", save_freq)
    if not match or not float(match[1]):
        raise ValueError(
            'save_freq: expected "epoch", a number of steps, or a time such as "30s", "5m" or '
            f'"1h"; received {save_freq!r}.'
        )
    return float(match[1]) * _UNIT_S[match[2]]
