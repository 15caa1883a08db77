"""Check that each example and each step counts once, with data of every kind."""

import keras
import numpy as np
import tensorflow as tf

from tests.cluster.scripts.ps.base import (
    BATCH,
    ROWS,
    STEPS,
    Once,
    batches,
    compiled,
    counter,
    counts,
    feature,
    local,
    mean_output,
    numbered,
    same,
    sgd,
    weight,
)
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp


def shuffled(**kwargs):
    return tf.data.Dataset.from_tensor_slices(numbered()).shuffle(ROWS, **kwargs).batch(BATCH)


@feature
def data_set(strategy):
    counts(strategy, batches())


@feature
def data_set_that_the_strategy_distributed(strategy):
    """Train on what `experimental_distribute_dataset` returned, as under other strategies."""
    model = counts(
        strategy,
        strategy.experimental_distribute_dataset(batches()),
        validation_data=strategy.experimental_distribute_dataset(batches()),
    )
    for method in (model.evaluate, model.predict):
        same(
            method(strategy.experimental_distribute_dataset(batches()), verbose=0),
            method(batches(), verbose=0),
        )


@feature
def data_set_from_a_range(strategy):
    """Train on a data set that the workers read themselves."""
    counts(
        strategy,
        tf.data.Dataset.range(ROWS)
        .map(lambda i: (tf.ones([1]), tf.cast(i, tf.float32)[None]))
        .batch(BATCH),
    )


@feature
def shuffled_with_a_seed(strategy):
    counts(strategy, shuffled(seed=3))


@feature
def shuffled_without_a_seed(strategy):
    counts(strategy, shuffled())


@feature
def data_set_without_end(strategy):
    model = counter(strategy)
    history = model.fit(batches().repeat(), steps_per_epoch=STEPS, epochs=3, verbose=0).history
    assert history["once"] == [ROWS] * 3, history
    assert weight(model) == -3 * STEPS
    history = model.fit(batches().repeat(), steps_per_epoch=5, epochs=3, verbose=0).history
    assert history["once"] == [20, 20, 18], history  # an epoch goes on where the last one stopped
    assert weight(model) == -3 * STEPS - 15


@feature
def data_set_of_unknown_length(strategy):
    counts(strategy, batches().filter(lambda x, y: True), epochs=3)


@feature
def data_set_of_unknown_length_with_steps(strategy):
    model = counter(strategy)
    history = model.fit(
        batches().filter(lambda x, y: True).repeat(), steps_per_epoch=STEPS, epochs=2, verbose=0
    ).history
    assert (history["once"], weight(model)) == ([ROWS] * 2, -2 * STEPS), history


@feature
def data_that_ends_before_its_steps(strategy):
    model = counter(strategy)
    history = model.fit(batches(), steps_per_epoch=10, epochs=3, verbose=0).history
    assert (history["once"], weight(model), int(model.optimizer.iterations.numpy())) == (
        [40, 10, 40],
        -23,
        23,
    ), (history, weight(model))  # as Keras does: an epoch begins anew after the end


@feature
def arrays(strategy):
    counts(strategy, *numbered(), batch_size=BATCH)


@feature
def py_dataset(strategy):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, i):
            return tuple(a[i * BATCH : (i + 1) * BATCH] for a in numbered())

    counts(strategy, Batches())
    counts(strategy, Batches(workers=2, use_multiprocessing=False), shuffle=True)

    class Endless(Batches):
        num_batches = None

        def __getitem__(self, i):
            return super().__getitem__(i % STEPS)

    counts(strategy, Endless(workers=2), steps_per_epoch=STEPS)


@feature
def generator(strategy):
    def forever():
        while True:
            yield from batches().as_numpy_iterator()

    counts(strategy, forever(), steps_per_epoch=STEPS)
    counts(strategy, (b for b in batches().as_numpy_iterator()), epochs=1)


@feature
def data_set_of_a_generator(strategy):
    signature = tuple(tf.TensorSpec([None, 1]) for _ in range(2))
    counts(
        strategy,
        tf.data.Dataset.from_generator(
            lambda: batches().as_numpy_iterator(), output_signature=signature
        ),
    )


@feature
def steps_per_execution(strategy):
    for steps in (4, 10):  # of 13
        counts(strategy, batches(), model=counter(strategy, steps_per_execution=steps))
    counts(strategy, *numbered(), batch_size=BATCH, model=counter(strategy, steps_per_execution=4))
    model = counter(strategy, steps_per_execution=4)
    history = model.fit(batches().repeat(), steps_per_epoch=STEPS, epochs=2, verbose=0).history
    assert (history["once"], weight(model)) == ([ROWS] * 2, -2 * STEPS), history
    counts(
        strategy,
        batches().filter(lambda x, y: True),
        epochs=3,
        model=counter(strategy, steps_per_execution=4),
    )


@feature
def six_hundred_steps(strategy):
    rows = 600 * BATCH
    model = counter(strategy, rows=rows)
    for done in (1, 2):
        history = model.fit(batches(rows), verbose=0).history
        assert (int(model.optimizer.iterations.numpy()), weight(model), history["once"]) == (
            600 * done,
            -600 * done,
            [rows],
        )
    model = counter(strategy, "adam", rows=rows, steps_per_execution=10)
    history = model.fit(*numbered(rows), batch_size=BATCH, epochs=2, verbose=0).history
    assert (int(model.optimizer.iterations.numpy()), history["once"]) == (1200, [rows] * 2), history


@feature
def evaluation_sees_each_example_once(strategy):
    model = counter(strategy)
    for given in ((batches(),), numbered(), (shuffled(),), (batches().filter(lambda x, y: True),)):
        assert model.evaluate(*given, verbose=0, return_dict=True)["once"] == ROWS
    assert (
        model.evaluate(batches().repeat(), steps=5, verbose=0, return_dict=True)["once"]
        == 5 * BATCH
    )
    history = model.fit(batches(), epochs=2, verbose=0, validation_data=shuffled()).history
    assert history["once"] == history["val_once"] == [ROWS] * 2, history
    history = model.fit(
        batches(), epochs=2, verbose=0, validation_data=batches().repeat(), validation_steps=6
    ).history
    assert history["val_once"] == [6 * BATCH] * 2, history


# --- Inputs ---------------------------------------------------------------------------------------
@feature
def validation(strategy):
    x, y = data()
    for given, begin in (
        ({"validation_data": dataset(x, y, batch=7)}, 0),
        ({"validation_split": 0.2}, 48),
    ):
        model = compiled(strategy, optimizer="sgd")
        history = model.fit(x, y, batch_size=12, epochs=2, verbose=0, **given).history
        expected = local(model, mlp, loss=CROSSENTROPY, metrics=["accuracy"]).evaluate(
            x[begin:], y[begin:], verbose=0
        )
        same([history["val_loss"][-1], history["val_accuracy"][-1]], expected)
    assert int(model.optimizer.iterations.numpy()) == 8


@feature
def class_weight(strategy):
    x, y = numbered()
    weights = {0: 0.5, 1: 2.0, 2: 4.0}
    model = counter(strategy)
    model.fit(x, y % 3, batch_size=BATCH, shuffle=False, class_weight=weights, epochs=2, verbose=0)
    given = np.array([weights[int(i % 3)] for i in range(ROWS)])
    same(
        weight(model), -2 * sum(np.mean(given[i : i + BATCH]) for i in range(0, ROWS, BATCH)), 1e-5
    )


@feature
def sample_weight(strategy):
    x, y = numbered()
    given = np.linspace(0, 1, ROWS).astype("float32")
    expected = -sum(np.mean(given[i : i + BATCH]) for i in range(0, ROWS, BATCH))
    for train in (
        {"x": x, "y": y, "sample_weight": given, "batch_size": BATCH, "shuffle": False},
        {"x": dataset(x, y, given, batch=BATCH)},
    ):
        model = counter(strategy)
        model.fit(**train, verbose=0)
        same(weight(model), expected, 1e-5)


@feature
def weighted_metrics(strategy):
    x, y = data()
    given = np.linspace(0, 1, len(x)).astype("float32")
    model = compiled(strategy, weighted_metrics=["accuracy"])
    copy = local(model, mlp, loss=CROSSENTROPY, metrics=["accuracy"], weighted_metrics=["accuracy"])
    same(
        model.evaluate(x, y, sample_weight=given, batch_size=7, verbose=0),
        copy.evaluate(x, y, sample_weight=given, batch_size=7, verbose=0),
    )


@feature
def dicts(strategy):
    x, y = data()

    def build():
        a = keras.Input((6,), name="a")
        b = keras.Input((2,), name="b")
        h = keras.layers.Concatenate()([keras.layers.Dense(5, "tanh")(a), b])
        return keras.Model(
            {"a": a, "b": b},
            {
                "label": keras.layers.Dense(3, name="label")(h),
                "sum": keras.layers.Dense(1, name="sum")(h),
            },
        )

    given = {"a": x, "b": x[:, :2]}, {"label": y, "sum": x.sum(1, keepdims=True)}
    names = {
        "loss": {"label": CROSSENTROPY, "sum": "mse"},
        "metrics": {"label": ["accuracy"], "sum": ["mae"]},
    }
    with strategy.scope():
        model = build()
        model.compile("adam", **names)
    model.fit(dataset(*given), verbose=0)
    history = model.fit(*given, verbose=0, validation_data=given).history
    assert {"label_accuracy", "sum_mae", "val_sum_mae"} <= set(history), history
    copy = build()
    copy.set_weights(model.get_weights())
    copy.compile("sgd", **names)
    same(
        model.evaluate(*given, batch_size=7, verbose=0, return_dict=True),
        copy.evaluate(*given, batch_size=7, verbose=0, return_dict=True),
    )
    same(
        model.predict(given[0], batch_size=7, verbose=0),
        copy.predict(given[0], batch_size=7, verbose=0),
    )


@feature
def sparse_inputs(strategy):
    x, y = numbered()

    def build():
        return keras.Sequential(
            [
                keras.Input((1,), sparse=True),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )

    model = compiled(strategy, build, sgd(), mean_output, [Once()])
    counts(strategy, dataset(tf.sparse.from_dense(x), y, batch=BATCH), model=model)
