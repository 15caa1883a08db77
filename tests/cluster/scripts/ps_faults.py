"""Run a task of a parameter-server job that tests disturb.

The command is `ps_faults.py DIRECTORY EPOCHS [TIMEOUT]`.

The chief writes a line for each event to its output: "epoch 0 begins", "step 10", "epoch 0: {...}",
"lost: ...".
"""

import logging
import sys

import tfdist

EXAMPLES = 1200
BATCH = 4


def main(directory: str, epochs: str, timeout: str = "60") -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    logging.getLogger("absl").setLevel(logging.WARNING)
    while True:
        strategy = tfdist.make_strategy(timeout=float(timeout), start_timeout=60)
        try:
            train(strategy, directory, int(epochs))
            return
        except tfdist.ParameterServerLost as error:
            print(f"lost: {error}", flush=True)


def train(strategy, directory: str, epochs: int) -> None:
    import keras
    import tensorflow as tf

    class Once(keras.metrics.Metric):
        """Count the examples that were seen exactly once."""

        def __init__(self):
            super().__init__(name="once")
            self.seen = self.add_variable(shape=(EXAMPLES,), initializer="zeros", name="seen")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen.assign_add(
                tf.math.bincount(
                    tf.cast(tf.reshape(y_true, [-1]), tf.int32),
                    minlength=EXAMPLES,
                    dtype=tf.float32,
                )
            )

        def result(self):
            return tf.reduce_sum(tf.cast(tf.equal(self.seen, 1.0), tf.float32))

    class Slow(keras.layers.Layer):
        def call(self, x):
            # Waits for rows that never come: time without computation.
            waited, _, _ = tf.raw_ops.Batch(
                in_tensors=[tf.stop_gradient(x)],
                num_batch_threads=1,
                max_batch_size=1000,
                batch_timeout_micros=10_000,
                grad_timeout_micros=0,
            )
            return x + 0.0 * tf.reduce_sum(waited[0])

    class Events(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            print(f"epoch {epoch} begins", flush=True)

        def on_train_batch_end(self, batch, logs=None):
            if batch % 10 == 0:
                print(f"step {batch}", flush=True)

        def on_epoch_end(self, epoch, logs=None):
            iterations = int(self.model.optimizer.iterations.numpy())
            print(f"epoch {epoch}: once {int(logs['once'])} iterations {iterations}", flush=True)

    ids = tf.range(EXAMPLES, dtype=tf.float32)[:, None]
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Slow(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=[Once()])
    data = tf.data.Dataset.from_tensor_slices((ids, ids)).shuffle(EXAMPLES).batch(BATCH)
    model.fit(
        data, epochs=epochs, verbose=0, callbacks=[tfdist.BackupAndRestore(directory), Events()]
    )
    print(
        f"done, evaluation {model.evaluate(data, verbose=0, return_dict=True)['once']}", flush=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
