"""Train on the digits with a loss of one's own, a schedule and a validation.

Functions replace compile and fit.

    python examples/supervised.py                            # this machine's devices
    python examples/supervised.py --devices cpu:0,cpu:1      # two replicas
    tfdist launch --workers 2 -- examples/supervised.py      # two workers
    python examples/supervised.py --nocompiled --epochs 1    # as Python, to be read with a debugger

All print the same, to float32 rounding.
"""

import math

import keras
import tensorflow as tf
from absl import flags

import tfdist
from tfdist import loops

GLOBAL_BATCH = 60
FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 4, "Passes over the data.", lower_bound=1)
flags.DEFINE_boolean("compiled", True, "Whether steps run as graphs.")


def loss(model, images, labels, training):
    """Return smoothed cross-entropy and accuracy: means over the rows that this replica has."""
    logits = model(images, training=training)
    smooth = 0.9 * tf.one_hot(labels, 10) + 0.01
    hits = tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(smooth, logits)), {
        "accuracy": tf.reduce_mean(hits)
    }


def main(_):
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(FLAGS.seed)
    train, test = (
        tfdist.data.pipeline(tfdist.data.load("tfdist_digits", split), GLOBAL_BATCH)
        for split in ("train", "test")
    )
    steps = FLAGS.epochs * len(train)

    def build():
        layers = [
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(10),
        ]
        return keras.Sequential([keras.Input([8, 8, 1]), *layers])

    state = loops.prepare_training(build, train, strategy, "adam", compiled=FLAGS.compiled)
    history = loops.train(
        loss,
        state,
        epochs=FLAGS.epochs,
        validation=test,
        schedule=lambda step: 0.005 * (1 + tf.cos(math.pi * step / steps)),
    )
    if state.is_chief:
        for epoch in range(FLAGS.epochs):
            print(
                f"epoch {epoch + 1}: "
                + ", ".join(f"{name} {values[epoch]:.5f}" for name, values in history.items()),
                flush=True,
            )


if __name__ == "__main__":
    tfdist.app.run(main)
