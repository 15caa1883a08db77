"""Make the mistakes that only a comparison of the workers finds.

The command is `mistakes.py OUT MISTAKE [MISTAKE ...]`.

The error of each goes to the file OUT, but that of the last ends the process.
"""

import contextlib
import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp
from tfdist.strategies.factory import is_chief


def data_of_its_own(strategy, rank):
    train(strategy, dataset(*data(seed=rank)))


def shards(strategy, rank):
    train(strategy, dataset(*data()).shard(2, rank))


def shards_without_length(strategy, rank):
    train(strategy, dataset(*data()).repeat().shard(2, rank), steps_per_epoch=3)


def shuffled_by_itself(strategy, rank):
    x, y = data()
    order = np.random.default_rng().permutation(len(x))  # the operating system's seed
    train(strategy, dataset(x[order], y[order]))


def shorter_data(strategy, rank):
    train(strategy, dataset(*data()).take(5 - rank))


def shorter_generator(strategy, rank):
    """Return a data set of unknown length: one worker waits in a step that the other skips."""
    x, y = data()
    train(strategy, ((x[i : i + 12], y[i : i + 12]) for i in range(0, len(x) - 12 * rank, 12)))


def other_epochs(strategy, rank):
    train(strategy, dataset(*data()), epochs=1 + rank)


def other_weights(strategy, rank):
    def restore(model):
        if rank:
            model.set_weights([w + 0.5 for w in model.get_weights()])

    train(strategy, dataset(*data()), restore)


def other_weights_of_local_steps(strategy, rank):
    strategy.tfdist_engine.use(tfdist.sync.DiLoCo(every=2))
    try:
        other_weights(strategy, rank)
    finally:
        strategy.tfdist_engine.use(tfdist.sync.Gradients())


def other_steps_per_execution(strategy, rank):
    def change(model):
        model.steps_per_execution = 1 + rank

    train(strategy, dataset(*data()), change)


def other_model(strategy, rank):
    """Give each worker another model, which TensorFlow notices when they share initial values."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(3),
                *[keras.layers.Dense(3) for _ in range(rank)],
            ]
        )
        model.compile("sgd", CROSSENTROPY)
    model.fit(dataset(*data()), verbose=0)


def outside_of_the_scope(strategy, rank):
    """Train alone on purpose, in another strategy's scope, and then by mistake."""
    for scope in (tf.distribute.OneDeviceStrategy("/cpu:0").scope(), contextlib.nullcontext()):
        with scope:
            model = mlp()
            model.compile("sgd", CROSSENTROPY)
        model.fit(dataset(*data()), verbose=0)


def train(strategy, batches, change=lambda model: None, **kwargs):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = mlp()
        model.compile("sgd", CROSSENTROPY)
    change(model)
    model.fit(batches, verbose=0, **kwargs)


def main(out: str, *mistakes: str) -> None:
    strategy = tfdist.make_strategy(timeout=15)
    rank = 0 if is_chief(strategy) else 1
    errors = {}
    for mistake in mistakes:
        pathlib.Path(out).write_text(json.dumps(errors))
        try:
            globals()[mistake](strategy, rank)
            errors[mistake] = None
        except Exception as error:
            if mistake == mistakes[-1]:
                raise
            errors[mistake] = f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(*sys.argv[1:])
