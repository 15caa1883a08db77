"""Teach a network the digits from few labels and many images (FixMatch).

Its sure guesses are labels for the same images, hidden in part.

    python examples/semi_supervised.py                        # this machine's devices
    python examples/semi_supervised.py --weight 0             # what the labels alone teach
    tfdist launch --workers 2 -- examples/semi_supervised.py  # two workers

After Sohn et al. 2020, arXiv:2001.07685, section 2.
"""

import keras
import tensorflow as tf
from absl import flags

import tfdist
from tfdist import loops

GLOBAL_BATCH = 60
FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 40, "Passes over the images.", lower_bound=1)
flags.DEFINE_integer(
    "labels", 50, "How many images have a label.", lower_bound=10, upper_bound=1500
)
flags.DEFINE_float("weight", 1.0, "Of the loss on images without labels.", lower_bound=0)
flags.DEFINE_float(
    "sure", 0.9, "The least probability of a guess that counts.", lower_bound=0, upper_bound=1
)


def shifted(image, seed, hidden):
    """Return an image moved by up to one pixel each way, a part of its pixels hidden."""
    moved = tf.image.stateless_random_crop(
        tf.pad(image, [[1, 1], [1, 1], [0, 0]]), image.shape, seed
    )
    return moved * tf.cast(
        tf.random.stateless_uniform(image.shape, seed + 1) >= hidden, image.dtype
    )


def loss(model, batch, training):
    """Make rows of an image with a label, and an image without one, twice.

    The latter is nearly as it is once, and much hidden once. Rows for tests are an image with its
    label.
    """
    logits = model(batch["known"], training=training)
    hits = tf.cast(tf.equal(tf.argmax(logits, 1), batch["label"]), tf.float32)
    value = tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)
    )
    if training:
        guess = tf.stop_gradient(tf.nn.softmax(model(batch["weak"], training=training)))
        sure = tf.cast(tf.reduce_max(guess, 1) > FLAGS.sure, tf.float32)
        each = keras.losses.sparse_categorical_crossentropy(
            tf.argmax(guess, 1), model(batch["strong"], training=training), from_logits=True
        )
        value += FLAGS.weight * tf.reduce_mean(sure * each)
    return value, {"accuracy": tf.reduce_mean(hits)}


def main(_):
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(FLAGS.seed)
    train = tfdist.data.pipeline(tfdist.data.load("tfdist_digits", "train"), 1500, seed=FLAGS.seed)
    images, labels = (part.numpy() for part in next(iter(train)))
    test = tfdist.data.pipeline(
        tfdist.data.load("tfdist_digits", "test"),
        GLOBAL_BATCH,
        transform=lambda image, label: {"known": tf.cast(image, tf.float32) / 255, "label": label},
    )
    images = (images / 255).astype("float32")
    few_images = tf.constant(images[: FLAGS.labels])
    few_labels = tf.constant(labels[: FLAGS.labels])

    def row(image, seed):
        """Pick the labelled image that goes with an image, by the example and the epoch.

        The choice is the same for any number of workers.
        """
        i = tf.random.stateless_uniform([], seed + 6, 0, FLAGS.labels, tf.int32)
        known, weak, strong = (
            shifted(x, seed + 2 * n, hidden)
            for n, (x, hidden) in enumerate([(few_images[i], 0.1), (image, 0.0), (image, 0.3)])
        )
        return {"known": known, "label": few_labels[i], "weak": weak, "strong": strong}

    def build():
        convolution = [
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
        ]
        return keras.Sequential(
            [
                keras.Input([8, 8, 1]),
                *convolution,
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(10),
            ]
        )

    rows = tfdist.data.pipeline(images, GLOBAL_BATCH, seed=FLAGS.seed, transform=row)
    state = loops.prepare_training(build, rows, strategy, lambda: keras.optimizers.Adam(2e-3))
    history = loops.train(loss, state, epochs=FLAGS.epochs, validation=test)
    if state.is_chief:
        print(
            f"{FLAGS.labels} labels, {len(images)} images: test accuracy "
            f"{history['val_accuracy'][-1]:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    tfdist.app.run(main)
