"""Keras' BackupAndRestore becomes exact: what training has come to is saved whole, and goes on as if it had never stopped.

The chief writes, in a thread of its own; every worker reads. Nothing here computes a step.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import keras
from absl import logging

from tfdist.backup import result, state
from tfdist.backup.snapshot import Snapshot, arrays_of, numbered
from tfdist.backup.store import Found, Store
from tfdist.keras_compat import engine_of, set_first_epoch
from tfdist.runtime.launch_protocol import PREEMPTED_CODE, Launched, note
from tfdist.train.callbacks import log_files as log_files
from tfdist.train.callbacks import save_frequency, sharded_snapshot
from tfdist.train.health import preemption
from tfdist.train.hooks import Hooks

_METRICS, _SYNC = "metrics/", "sync/"
_completed: set[str] = (
    set()
)  # directories of the fits that this process has completed, and whose last snapshot was kept


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Saves the state of training, and goes on from it when `fit` is called again.

    A snapshot holds weights, optimizer, seeds, metrics, history, what callbacks remember, and the position in the data. Of a
    pipeline of `tfdist.data` nothing is read twice; any other `tf.data` data set is read again up to there, and must give the same
    batches again. Callbacks are called for the steps of the epoch that were done already too, without a step being run.

    Callbacks of your own are remembered if they have `get_state()`, which returns what JSON knows, and `set_state(state)`. Wherever
    it is listed, this callback comes after the others, so that a snapshot holds what all of them know. TensorBoard's files are cut
    to what they were.

    Under `tfdist launch --restarts` the last snapshot stays when training is complete, so that a process that is killed later finds the result
    when the launch starts it again; another launch removes it and begins anew.

    Args:
        backup_dir: Directory of the snapshots of one `fit`, which all workers reach.
        save_freq: "epoch": at the end of each; a number: after so many steps; a time such as "30s", "5m" or "1h".
        double_checkpoint: As for Keras; `keep=2` is the default in any case.
        delete_checkpoint: Whether to remove the snapshots when training is complete.
        keep: How many of the last ones to keep. One that is damaged is passed over for the one before it.

    Raises:
        ValueError: For a bad argument.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike,
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        keep: int = 2,
    ):
        self._every_seconds = save_frequency.seconds(save_freq)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(
                f"keep: expected how many snapshots to keep, 1 or more; received {keep!r}."
            )
        # A time is looked at after every step.
        super().__init__(
            os.fspath(backup_dir),
            1 if self._every_seconds else save_freq,
            double_checkpoint,
            delete_checkpoint,
        )
        self.store = Store(backup_dir, max(keep, 2) if double_checkpoint else keep)
        self.writes = True
        self._peers: list[keras.callbacks.Callback] = []
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._writing: concurrent.futures.Future | None = None
        self._silence, self._launched, self._listening = (
            log_files.Silence(),
            Launched(),
            contextlib.ExitStack(),
        )
        self._found: Found | None = None
        self._opened, self._first_epoch, self._replayed = False, 0, 0
        self._trained: list | None = None  # metrics of the epoch whose validation runs

    def prepare(
        self, callbacks: Sequence[keras.callbacks.Callback], writes: bool, first_epoch: int = 0
    ) -> None:
        """Called by an engine before Keras begins a `fit`.

        Args:
            callbacks: All of the fit, whose memory is saved and restored.
            writes: Whether this process is the one that writes.
            first_epoch: Where the fit begins if there is no snapshot.
        """
        self._peers, self.writes, self._first_epoch = list(callbacks), writes, first_epoch
        self._open()
        if not writes:
            return
        log_files.close(self._peers)
        if self._found is None:
            return
        facts = self._found.snapshot.facts
        log_files.rewind(facts["logs"], self._peers)
        log_files.rewind_tables(facts["tables"], self._peers)

    @property
    def every(self) -> float:
        """When it saves, as a number that differs where that differs: steps, seconds below 0, 0 for epochs."""
        return (
            -self._every_seconds
            if self._every_seconds
            else 0.0
            if self.save_freq == "epoch"
            else float(self.save_freq)
        )

    @property
    def went_on(self) -> tuple[bool, int]:
        """Whether the last fit went on from a training that was interrupted, and the steps of its first epoch that were done."""
        return self._found is not None and not self._found.snapshot.facts["first"], self._replayed

    def release(self) -> None:
        """Called by an engine when the `fit` is over, also by an error: signals are no longer heard."""
        self._listening.close()
        self._silence.end()

    def _open(self) -> None:
        """Reads what there is, as the only one that writes from now on, if at all."""
        self._finish()  # of a fit that an error has ended
        self._launched = Launched.from_environ()
        if self.writes:
            self.store.claim(self._launched.launch, self._launched.attempt)
        found = self.store.newest()
        self._leftover = (
            found is not None and self.delete_checkpoint and self._is_complete(found.snapshot)
        )
        self._found = None if self._leftover else found
        self._opened = True

    def _is_complete(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is the end of another training than this."""
        launch = snapshot.facts["finished"]
        return launch is not None and (
            self._directory in _completed or (bool(launch) and launch != self._launched.launch)
        )

    # --- What Keras calls ---------------------------------------------------------------------------------------------
    def on_train_begin(self, logs=None):
        sharded_snapshot.check(self.model)
        if not self.model.built:
            raise ValueError(
                "BackupAndRestore: expected a model that is built before fit, as its state is restored then; build it with an Input layer or "
                "model.build(shape)."
            )
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if not self._opened:
            self._open()
        self._opened = False
        self.release()
        self._listening.enter_context(preemption.listening())
        self.store.reached = self._engine.moment
        self._agree()  # all have read then
        if self.writes and self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "tfdist-backup")
        self._since, self._saved_at, self._replayed, self._trained = 0, time.monotonic(), 0, None
        self._epoch, self._step = self._first_epoch - 1, 0
        if self.writes:
            if self._leftover:
                self.store.clear()
                self.store.claim(self._launched.launch, self._launched.attempt)
            self.store.sweep()
        _completed.discard(self._directory)
        set_first_epoch(self.model, 0)  # what a fit before, that an error has ended, may have left
        self._restored = self._found.snapshot if self._found is not None else None
        if self._restored is not None:
            self._restore(self._restored)
        else:
            self._save(self._first_epoch, 0, {"epoch": [], "values": {}}, first=True)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._step = epoch, 0
        found, self._restored = self._restored, None
        if found is not None:
            self._set_history(found.facts["history"])
            if self._replayed:
                self._engine.set_metric_totals(self.model, arrays_of(_METRICS, found))
        if self._every_seconds:
            self._pause(1)
        elif self.save_freq != "epoch":
            self._pause(max(1, self.save_freq - self._since))

    def on_train_batch_end(self, batch, logs=None):
        step = min(
            batch + 1, self.params.get("steps") or batch + 1
        )  # of several steps a call, the last may be beyond the end
        before, self._step = self._step, step
        if before < self._replayed:
            if step >= self._replayed:
                self._end_replay()
            return
        self._since += step - before
        if self._engine.stopping():
            self._preempt()
        if self.save_freq == "epoch" or self._step < self._next:
            return
        due, ahead = 1.0, self.save_freq
        if self._every_seconds:  # clocks differ from worker to worker
            passed = time.monotonic() - self._saved_at
            left = (self._every_seconds - passed) / max(passed / self._since, 1e-6)
            due, ahead = self._engine.broadcast_from_chief(
                [passed >= self._every_seconds, min(max(int(left), 1), 2 * self._since)]
            )
        if due:
            self._save(self._epoch, self._step, self._history())
        self._pause(ahead)

    def on_test_begin(self, logs=None):
        if self._step:  # of a fit; the validation forgets the metrics of its epoch
            self._trained = self._engine.metric_totals(self.model)

    def on_test_batch_end(self, batch, logs=None):
        if self._trained is not None and self._engine.stopping():
            self._preempt()

    def on_epoch_end(self, epoch, logs=None):
        self._replayed, self._trained = 0, None
        if self.save_freq == "epoch":
            history = self._history()  # Keras' own is told of this epoch after all other callbacks
            history["epoch"].append(epoch)
            for name, value in (logs or {}).items():
                history["values"].setdefault(name, []).append(float(value))
            self._save(epoch + 1, 0, history)

    def on_train_end(self, logs=None):
        self._engine.moment("end")
        found, self._restored = self._restored, None
        if found is not None:  # there was no epoch left to run
            self._set_history(found.facts["history"])
        keeps = self._launched.restarts > 0 or not self.delete_checkpoint
        if keeps and (found is None or found.facts["finished"] != self._launched.launch):
            self._save(
                self._epoch + 1 if found is None else found.facts["epoch"],
                0,
                self._history(),
                finished=self._launched.launch,
            )
        self._finish()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        with (
            self._engine.gathered(self.model)
            if result.is_wanted(self._launched)
            else contextlib.nullcontext()
        ):
            if self.writes:
                result.write(self._launched, self.model, self._history())
        if keeps:
            _completed.add(self._directory)
        elif self.writes:
            self.store.clear()
        set_first_epoch(self.model, 0)  # or the model's next fit would begin where this one did
        self._engine.broadcast_from_chief([0.0])  # nobody looks for snapshots again before that
        asked = preemption.asked()
        self.release()
        if asked:  # too late to be heard in this fit
            preemption.ask_again()

    # --- Saving --------------------------------------------------------------------------------------------------------
    def _pause(self, ahead: int) -> None:
        """Tells the engine at which step of this epoch it must not be further."""
        self._next = max(self._step, self._replayed) + int(ahead)
        self._engine.pause_at(self._next, f"backup {self.backup_dir}")

    @property
    def _engine(self) -> Hooks:
        return engine_of(self.model.distribute_strategy) or Hooks()

    def _preempt(self) -> None:
        """Saves where all workers are, and ends the process once that is written."""
        # Where an epoch is begun anew, its steps would count twice; who saves by steps has chosen that.
        saves = self._engine.begins_within_epochs() or self.save_freq != "epoch"
        what = f"saving step {self._step}" if saves else "leaving the begin"
        logging.warning(
            "%s: asked to end by SIGTERM: %s of epoch %d, then ending with code %d.",
            self.backup_dir,
            what,
            self._epoch + 1,
            PREEMPTED_CODE,
        )
        if saves and self._since:
            self._save(self._epoch, self._step, self._history())
        self._finish()
        self._engine.broadcast_from_chief([0.0])  # nobody leaves before it is written
        raise preemption.Preempted

    def _save(
        self,
        epoch: int,
        step: int,
        history: dict[str, Any],
        *,
        first: bool = False,
        finished: str | None = None,
    ) -> None:
        """Saves the state before a step of an epoch.

        Args:
            epoch: The epoch, from 0.
            step: Steps of it that are done.
            history: What is known of the epochs before.
            first: Whether nothing was trained yet.
            finished: The launch in which training is complete.
        """
        self._since, self._saved_at = 0, time.monotonic()
        totals = (self._trained or self._engine.metric_totals(self.model)) if step else []
        synced = self._engine.sync_totals(self.model)
        if state.is_sharded(self.model):
            self._finish()  # or its number is not known
        files = sharded_snapshot.save(self.model, self._engine, self.store)
        if not self.writes:
            return
        found, random = (
            state.of_model(self.model, functools.partial(self._engine.values, self.model)),
            state.of_random(),
        )
        facts = {
            **found.facts,
            **random.facts,
            "epoch": epoch,
            "step": step,
            "steps": self.params.get("steps"),
            "a_call": self.model.steps_per_execution,
            "history": history,
            "callbacks": state.of_callbacks(self._others()),
            "logs": log_files.sizes(self._peers),
            "tables": log_files.table_sizes(self._peers),
            "stopped": self.params.get("epochs") if self.model.stop_training and not step else None,
            "first": first,
            "finished": finished,
            "rows": files,
        }
        arrays = {
            **found.arrays,
            **random.arrays,
            **state.best_of_callbacks(self._others()),
            **numbered(_METRICS, totals),
            **numbered(_SYNC, synced),
        }
        self._finish()
        assert self._thread is not None
        self._writing = self._thread.submit(self._write, Snapshot(arrays, facts))

    def _write(self, snapshot: Snapshot) -> None:
        begun = time.monotonic()
        note(
            self._launched.log_dir, "saving", task=self._launched.task
        )  # so that the launcher leaves time for it
        self._note("saved", snapshot, self.store.write(snapshot), time.monotonic() - begun)

    def _note(self, event: str, snapshot: Snapshot, number: int, seconds: float) -> None:
        epoch, step, steps = (snapshot.facts[name] for name in ("epoch", "step", "steps"))
        where = {
            "epoch": epoch,
            "step": step,
            "total": epoch * (steps or 0) + step,
            "number": number,
            "path": self.store.path(number),
        }
        note(
            self._launched.log_dir,
            event,
            task=self._launched.task,
            attempt=self._launched.attempt,
            **where,
            seconds=seconds,
        )

    def _finish(self) -> None:
        """Waits for the snapshot that is being written; raises what became of it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    # --- Restoring -----------------------------------------------------------------------------------------------------
    def _agree(self) -> None:
        """Makes sure that all workers restore the chief's snapshot."""
        found = self._found
        mine = (
            [-1.0, 0.0, 0.0]
            if found is None
            else [
                float(x)
                for x in (found.number, found.snapshot.facts["epoch"], found.snapshot.facts["step"])
            ]
        )
        chief = self._engine.broadcast_from_chief(mine)
        if list(chief) != mine:
            raise ValueError(
                f"{self.backup_dir}: expected what the chief restores, {_described(chief)}; this worker found {_described(mine)}. All workers must reach "
                "backup_dir: name a directory of a file system that they share."
            )

    def _restore(self, found: Snapshot) -> None:
        begun = time.monotonic()
        self._engine.moment("restoring")
        epoch, step, steps, now = (
            found.facts["epoch"],
            found.facts["step"],
            found.facts["steps"],
            self.params.get("steps"),
        )
        if step and steps and now and steps != now:
            raise ValueError(
                f"{self.backup_dir}: saved after step {step} of an epoch of {steps} steps, and an epoch has {now} now: the global batch or the data have "
                "changed, so that the steps left are not those that were. Take both as they were, or name another directory."
            )
        a_call = self.model.steps_per_execution
        if step % a_call and step != now:
            raise ValueError(
                f"{self.backup_dir}: saved after step {step} of an epoch, where steps_per_execution was {found.facts['a_call']}; now it is {a_call}, and no call "
                f"ends there. Compile with {found.facts['a_call']}, or another number that divides {step}."
            )
        replicas, place = self._engine.replicas()
        state.into_model(
            found,
            self.model,
            self.backup_dir,
            pieces=self.store.pieces(found),
            replicas=replicas,
            first=place,
        )
        state.into_random(found)
        if synced := arrays_of(_SYNC, found):
            self._engine.set_sync_totals(self.model, synced)
        stopped = found.facts["stopped"] is not None and found.facts["stopped"] == self.params.get(
            "epochs"
        )
        set_first_epoch(self.model, found.facts["stopped"] if stopped else epoch)
        self.model.stop_training = stopped
        if self._engine.begin_at(self.model, epoch, step):
            self._replayed = step
        elif step:
            logging.warning(
                "%s: saved after step %d of epoch %d, which is begun anew with the state of that moment: only a strategy of tfdist where workers wait for "
                "each other can go on within an epoch.",
                self.backup_dir, step, epoch,
            )  # fmt: skip
        if self._replayed:  # callbacks are told of these steps too
            self._silence, self._memory = log_files.Silence(self._others()), found
        else:
            self._remind(found)
        assert self._found is not None
        self._note("restored", found, self._found.number, time.monotonic() - begun)

    def _end_replay(self) -> None:
        self._silence.end()
        self._remind(self._memory)

    def _remind(self, found: Snapshot) -> None:
        state.into_callbacks(found.facts["callbacks"], self._others())
        state.best_into_callbacks(found.arrays, self._others())

    @property
    def _directory(self) -> str:
        return self.backup_dir if "://" in self.backup_dir else os.path.abspath(self.backup_dir)

    def _others(self) -> list[keras.callbacks.Callback]:
        return [callback for callback in self._peers if callback is not self]

    def _history(self) -> dict[str, Any]:
        known = self.model.history
        return {
            "epoch": list(known.epoch),
            "values": {name: [float(x) for x in values] for name, values in known.history.items()},
        }

    def _set_history(self, history: dict[str, Any]) -> None:
        self.model.history.epoch[:] = history["epoch"]
        self.model.history.history.clear()
        self.model.history.history.update(
            {name: list(values) for name, values in history["values"].items()}
        )


def _described(numbers: Sequence[float]) -> str:
    number, epoch, step = (int(x) for x in numbers)
    return "none" if number < 0 else f"snapshot-{number} of epoch {epoch}, step {step}"
