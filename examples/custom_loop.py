"""Train by a custom loop under any strategy, with the sums over replicas spelled out.

    python examples/custom_loop.py                                        # this machine's devices
    python examples/custom_loop.py --devices cpu:0,cpu:1                  # two replicas
    tfdist launch --workers 2 -- examples/custom_loop.py                  # two workers

It prints what `model.fit` prints for the same batches, to float32 rounding (`--check`).
"""

import keras
import tensorflow as tf
from absl import flags

import tfdist

GLOBAL_BATCH = 96
FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 2, "Passes over the data.", lower_bound=1)
flags.DEFINE_boolean("check", False, "Train a second time, with fit, and compare.")


def build():
    keras.utils.set_random_seed(FLAGS.seed)
    model = tfdist.models.build("mlp", input_shape=(8, 8, 1), classes=10)
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy())
    return model


def main(_):
    strategy = tfdist.make_strategy()
    dataset = tfdist.data.pipeline(
        tfdist.data.load("tfdist_digits", "train"), global_batch=GLOBAL_BATCH, tail="drop"
    )
    with strategy.scope():
        model = build()
        model.optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def step(batch):
        """Compute one replica's share of the mean loss, and its gradient.

        The optimizer sums the gradient over replicas.
        """
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(labels, model(images, training=True))) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    batches = strategy.experimental_distribute_dataset(dataset)
    for epoch in range(FLAGS.epochs):
        losses = [float(train_step(batch)) for batch in batches]
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.6f}", flush=True)
    if FLAGS.check:
        check(strategy, model, sum(losses) / len(losses))


def check(strategy, trained, loss):
    """Train the same model on the same batches with `fit`; raise an error where the two differ."""
    dataset = tfdist.data.pipeline(
        tfdist.data.load("tfdist_digits", "train"), global_batch=GLOBAL_BATCH, tail="drop"
    )
    with strategy.scope():
        model = build()
    history = model.fit(dataset, epochs=FLAGS.epochs, verbose=0).history
    pairs = [
        (loss, history["loss"][-1]),
        *zip(trained.get_weights(), model.get_weights(), strict=True),
    ]
    worst = max(float(tf.reduce_max(tf.abs(a - b))) for a, b in pairs)
    if worst > 1e-4:
        raise SystemExit(f"the loop and fit differ by {worst:g}")
    print(f"fit agrees: largest difference {worst:.1g}", flush=True)


if __name__ == "__main__":
    tfdist.app.run(main)
