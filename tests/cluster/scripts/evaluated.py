"""Train until a callback stops early, beside an evaluator: `evaluated.py DIRECTORY`."""

import pathlib
import pickle
import sys

import keras

import tfdist
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp
from tfdist.cluster.spec import ClusterSpec


class StopEarly(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 2


def main(directory):
    directory = pathlib.Path(directory)
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = mlp()
        model.compile("adam", CROSSENTROPY, metrics=["accuracy"])
    history = model.fit(
        dataset(*data()),
        validation_data=dataset(*data(seed=2)),
        epochs=50,
        callbacks=[
            StopEarly(),
            keras.callbacks.ModelCheckpoint(directory / "{epoch}.keras"),
            tfdist.BackupAndRestore(directory / "backup"),
            tfdist.TensorBoard(str(directory / "logs")),
        ],
    )
    task = ClusterSpec.from_environ().task
    (directory / f"{task}.pickle").write_bytes(pickle.dumps((history.epoch, history.history)))
    model.save(directory / f"{task.type}.keras")


if __name__ == "__main__":
    main(*sys.argv[1:])
