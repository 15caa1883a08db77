"""Encode images without labels as a few numbers, and draw them again from these.

This is a denoising autoencoder, trained by a loop of one's own.

python examples/unsupervised.py                                       # this machine's devices
python examples/unsupervised.py --devices cpu:0,cpu:1                 # two replicas
tfdist launch --workers 2 -- examples/unsupervised.py                 # two workers
"""

import keras
import tensorflow as tf
from absl import flags

import tfdist
from tfdist import loops

GLOBAL_BATCH = 60
FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 20, "Passes over the images.", lower_bound=1)
flags.DEFINE_integer("code", 12, "Numbers of a code.", lower_bound=1)


def loss(models, batch):
    """Return how far the images drawn again are from those that were hidden in noise."""
    noisy, images = batch
    return tf.reduce_mean(tf.square(models["decoder"](models["encoder"](noisy)) - images))


def hide(image, _, seed):
    image = tf.cast(image, tf.float32) / 255
    return image + tf.random.stateless_normal(image.shape, seed, stddev=0.1), image


def show(image, _):
    image = tf.cast(image, tf.float32) / 255
    return image, image


def main(_):
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(FLAGS.seed)
    train = tfdist.data.pipeline(
        tfdist.data.load("tfdist_digits", "train"), GLOBAL_BATCH, seed=FLAGS.seed, transform=hide
    )
    test = tfdist.data.pipeline(
        tfdist.data.load("tfdist_digits", "test"), GLOBAL_BATCH, shuffle=False, transform=show
    )

    def build():
        encoder = [
            keras.layers.Flatten(),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(FLAGS.code),
        ]
        decoder = [
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(64),
            keras.layers.Reshape([8, 8, 1]),
        ]
        return {
            "encoder": keras.Sequential([keras.Input([8, 8, 1]), *encoder]),
            "decoder": keras.Sequential([keras.Input([FLAGS.code]), *decoder]),
        }

    state = loops.prepare_training(build, train, strategy, lambda: keras.optimizers.Adam(3e-3))

    @state.step
    def step(rows):
        """Run one replica's step; the results are averaged over the global batch."""
        gradients, logs = loops.train_step(loss, state, rows)
        gradients = [
            tf.clip_by_value(g, -0.1, 0.1) for g in gradients
        ]  # whatever one wants between the two
        loops.update(state, gradients)
        return logs

    first = loops.evaluate(loss, state, test)["loss"]
    for epoch in range(FLAGS.epochs):
        losses = [step(batch)["loss"] for batch in state.batches]
        if state.is_chief and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1}: loss {float(sum(losses)) / len(losses):.5f}", flush=True)
    last = loops.evaluate(loss, state, test)["loss"]
    if state.is_chief:
        print(
            f"test error {first:.5f} before, {last:.5f} after, with codes of {FLAGS.code} numbers",
            flush=True,
        )


if __name__ == "__main__":
    tfdist.app.run(main)
