"""Train a network on handwritten digits by a script of one's own, on one device or many workers.

On this machine alone, on two of its CPU devices, and as two workers:

    python examples/digits.py
    python examples/digits.py --strategy mirrored --devices cpu:0,cpu:1
    tfdist launch --workers 2 -- examples/digits.py --epochs 2

The same two workers by hand, each command in a terminal of its own:

    python examples/digits.py --cluster configs/clusters/local-two.yaml \\
        --task_type worker --task_index 0
    python examples/digits.py --cluster configs/clusters/local-two.yaml \\
        --task_type worker --task_index 1

A TF_CONFIG in the environment serves as well as --cluster and --task_*.
"""

import keras
from absl import flags

import tfdist

EPOCHS = flags.DEFINE_integer("epochs", 8, "Passes over the data.")
GLOBAL_BATCH = flags.DEFINE_integer(
    "global_batch", 64, "Examples per step, of all workers together."
)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Step size.")


def main(argv):
    args = flags.FLAGS
    strategy = tfdist.make_strategy()  # takes --strategy, --cluster, --devices ... or finds out
    keras.utils.set_random_seed(args.seed)

    train = tfdist.data.pipeline(
        tfdist.data.load("tfdist_digits", "train"), GLOBAL_BATCH.value, seed=args.seed
    )
    test = tfdist.data.pipeline(
        tfdist.data.load("tfdist_digits", "test"), GLOBAL_BATCH.value, shuffle=False
    )

    with strategy.scope():
        model = tfdist.models.build("cnn", input_shape=(8, 8, 1), classes=10)
        model.compile(
            optimizer=keras.optimizers.Adam(LEARNING_RATE.value),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )

    callbacks = [tfdist.TensorBoard(args.log_dir)] if args.log_dir else []
    if args.backup_dir:
        callbacks.append(tfdist.BackupAndRestore(args.backup_dir))
    model.fit(train, epochs=EPOCHS.value, validation_data=test, shuffle=False, callbacks=callbacks)


if __name__ == "__main__":
    tfdist.app.run(main)
