"""Train with every callback that writes files: `files.py DIRECTORY crash|finish`.

All but the backup goes to a directory of this worker's own, so that whatever a worker other than
the chief writes is found there.
"""

import atexit
import os
import pathlib
import pickle
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp
from tfdist.strategies.factory import is_chief

CRASH_EPOCH = 2
EPOCHS = 4
WRITE_TIMEOUT_S = 30
SLOW_STEPS = 150
LONG_TIMEOUT_S = 16  # of which an eighth lies between two looks at a call
LONG_STEPS = 200  # of 0.02 s, in one call


def build(strategy, seed=1):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = mlp()
        model.compile("adam", CROSSENTROPY, metrics=["accuracy"])
    return model


@keras.saving.register_keras_serializable()
class SlowToSave(keras.layers.Dense):
    """Layer that takes a second to write."""

    def get_config(self):
        time.sleep(1)
        return super().get_config()


def saved_and_loaded(strategy, path: pathlib.Path) -> bool:
    """Save a model on all workers, and load it at once; return whether it is the same."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), SlowToSave(2)])
        model.save(path)
        loaded = keras.models.load_model(path)
    return np.array_equal(loaded.get_weights()[0], model.get_weights()[0])


def slowly(x, y):
    """Delay a batch of the slow worker."""

    def wait():
        time.sleep(0.02)
        return True

    with tf.control_dependencies([tf.py_function(wait, [], tf.bool)]):
        return tf.identity(x), y


def read_variables(model) -> list:
    """Read variables as callbacks do, and change the learning rate."""
    rate, kernel = model.optimizer.learning_rate, model.layers[-1].kernel
    values = [float(rate), int(model.optimizer.iterations), f"{float(rate * 0.5):.4f} {rate}"]
    values += [np.asarray(kernel).sum(), np.asarray(kernel[0]).tolist(), kernel.value.numpy()[0, 1]]
    model.optimizer.learning_rate = 0.5 * rate
    return values


def inside_scope(strategy, own: pathlib.Path) -> list:
    """Save, quantize and load a model in the scope, where each new variable is a collective."""
    with strategy.scope():
        model = build(strategy)
        read = []
        model.fit(
            dataset(*data()),
            verbose=0,
            callbacks=[
                keras.callbacks.ModelCheckpoint(own / "scoped-{epoch}.keras"),
                keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs: read.append(read_variables(model))
                ),
            ],
        )
        read.append(read_variables(model))
        weights = model.get_weights()
        model.save(own / "scoped.keras")
        model.save(own / "scoped.h5")  # Keras changes the model that it writes
        model.save_weights(own / "scoped.weights.h5")
        clone = keras.models.clone_model(model)
        state = model.to_json(), clone.compiled, clone.name
        model.quantize("int8")
        model.save(own / "quantized.keras")
        predictions = model.predict(data()[0], verbose=0)
        narrow = keras.Variable([200 if own.name == "rank-0" else 0], dtype="bfloat16")
        return [weights, predictions, model.get_weights(), narrow.numpy(), state, read]


def wait_for_snapshot(store, epoch: int) -> None:
    """Wait for the snapshot of the beginning of an epoch, which is written in the background."""
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while (found := store.newest()) is None or found.snapshot.facts["epoch"] != epoch:
        assert time.monotonic() < deadline, f"no snapshot of epoch {epoch}: {found}"
        time.sleep(0.02)


def main(directory: str, stage: str) -> None:
    shared = pathlib.Path(directory)
    atexit.register(
        lambda: (shared / f"end-{rank}").write_text(str(len(list(shared.glob("result-*")))))
    )  # it runs after what the strategy registers
    strategy = tfdist.make_strategy(timeout=LONG_TIMEOUT_S)
    rank = 0 if is_chief(strategy) else 1
    own = shared / f"rank-{rank}"
    epochs = []
    backup = tfdist.BackupAndRestore(str(shared / "backup"))

    def begin(epoch, logs):
        if stage == "crash" and epoch == CRASH_EPOCH:
            wait_for_snapshot(backup.store, epoch)
            os.kill(os.getpid(), signal.SIGKILL)
        epochs.append(epoch)

    model = build(strategy)
    history = model.fit(
        dataset(*data()),
        epochs=EPOCHS,
        validation_data=dataset(*data(20, seed=5)),
        callbacks=[
            keras.callbacks.ModelCheckpoint(own / "epoch-{epoch}.keras"),
            keras.callbacks.ModelCheckpoint(
                own / "step-{batch}.weights.h5", save_weights_only=True, save_freq=2
            ),
            keras.callbacks.CSVLogger(own / "log.csv" if rank == 0 else own.with_suffix(".csv")),
            keras.callbacks.TensorBoard(own / "keras", write_images=False),
            tfdist.TensorBoard(str(own / "chief")),
            tfdist.TensorBoard(str(shared / "each"), per_worker=True),
            backup,
            keras.callbacks.LambdaCallback(on_epoch_begin=begin),
        ],
    )
    model.save(own / "model.keras")
    model.save_weights(own / "model.weights.h5")
    model.export(own / "exported", verbose=False)

    steps = dataset(*data(SLOW_STEPS), batch=1).map(slowly if rank else lambda x, y: (x, y))
    slow = build(strategy)
    before = len(os.listdir("/proc/self/task"))
    slow.fit(steps, verbose=0)
    long = build(strategy)
    long.steps_per_execution = LONG_STEPS
    long.fit(steps.repeat().take(LONG_STEPS), verbose=0)
    scoped = inside_scope(strategy, own) if stage == "finish" else None
    result = {
        "saved and loaded": saved_and_loaded(strategy, shared / f"{stage}.keras"),
        "scoped": scoped,
        "epochs": epochs,
        "history": history.history,
        "weights": model.get_weights(),
        "slow steps": int(slow.optimizer.iterations.numpy()),
        "slow threads": len(os.listdir("/proc/self/task")) - before,
        "long steps": int(long.optimizer.iterations.numpy()),
        "slow weights": slow.get_weights(),
    }
    time.sleep(0.5 * rank)
    (shared / f"result-{rank}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
