"""Test `keras.random` without a seed in layers: replicas, sharding, stages and snapshots."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.interrupts import Interrupts, Stop
from tfdist import BackupAndRestore
from tfdist.keras_compat import global_generator
from tfdist.parallel import fsdp, pipeline

X = np.zeros((8, 3), "float32")
DRAWN: list[np.ndarray] = []


class Noise(keras.layers.Layer):
    """Add numbers drawn without a seed, as Keras' guide to new layers does, and note them."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3), initializer="zeros")

    def call(self, x):
        drawn = keras.random.normal(keras.ops.shape(x))
        if not isinstance(x, keras.KerasTensor):
            tf.py_function(lambda value: DRAWN.append(value.numpy()), [drawn], [])
        return x + drawn @ self.kernel + drawn


class Subclassed(keras.Model):
    """Model whose layers are first called in `fit`."""

    def __init__(self):
        super().__init__()
        self.noise = Noise()

    def call(self, x):
        return self.noise(x)


def functional():
    return keras.Sequential([keras.Input((3,)), Noise(), keras.layers.Dense(3), Noise()])


def fitted(strategy, build, shard=None, seed=1, **more):
    """Return history and weights of two epochs, the generator's state, and what was drawn."""
    DRAWN.clear()
    keras.utils.clear_session()  # before Keras 3.13, set_random_seed keeps the generator
    with strategy.scope():
        keras.utils.set_random_seed(seed)
        model = build()
        if shard is not None:
            shard(model)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        history = model.fit(X, X + 1, batch_size=4, epochs=2, shuffle=False, verbose=0, **more)
        state = global_generator.current().state.numpy()
        return history.history, model.get_weights(), state, list(DRAWN)


def assert_equal(results, others):
    for result, other in zip(results[:2], others[:2], strict=True):
        for a, b in zip(keras.tree.flatten(result), keras.tree.flatten(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(results[2], others[2])


@pytest.fixture(scope="module")
def of_two(mirrored):
    """Return what two replicas give."""
    return fitted(mirrored, functional)


@pytest.mark.parametrize("build", [functional, Subclassed])
def test_one_device_gives_the_numbers_of_keras_and_replicas_draw_others(
    one_device, mirrored, build, of_two
):
    keras_alone = fitted(tf.distribute.get_strategy(), build)
    assert_equal(fitted(one_device, build), keras_alone)
    two = of_two if build is functional else fitted(mirrored, build)
    np.testing.assert_array_equal(two[2], keras_alone[2])  # as many draws
    assert len({array.tobytes() for array in two[3]}) == len(two[3]) > 4


def test_replicas_draw_the_same_again_with_the_same_seed_only(mirrored, of_two):
    assert_equal(fitted(mirrored, functional), of_two)
    assert not np.array_equal(fitted(mirrored, functional, seed=2)[2], of_two[2])


def test_a_generator_made_outside_of_the_scope_is_shared(mirrored):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    keras.random.normal((1,))  # makes it
    before = global_generator.current()
    DRAWN.clear()
    with mirrored.scope():
        model = functional()
        model.compile("sgd", "mse")
    model.fit(X, X, batch_size=4, verbose=0)
    with mirrored.scope():
        shared = global_generator.current()
    assert shared is not before is global_generator.current()  # Keras' own keeps no strategy
    copies = mirrored.experimental_local_results(shared.state.value)
    np.testing.assert_array_equal(*(copy.numpy() for copy in copies))
    assert not np.array_equal(copies[0].numpy(), before.state.numpy())
    assert len({array.tobytes() for array in DRAWN}) == len(DRAWN) == 8
    keras.random.normal((1,))  # still draws outside of training


@pytest.mark.parametrize("keep", [False, True])
def test_fsdp_computes_a_layer_again_with_the_same_numbers(mirrored, keep, of_two):
    sharded = fitted(
        mirrored, functional, lambda model: fsdp(model, reshard_after_forward=not keep)
    )
    assert_equal(sharded, of_two)


def test_stages_and_microbatches_draw_other_numbers():
    def trained(recompute):
        return fitted(
            tf.distribute.get_strategy(),
            lambda: pipeline(functional(), stages=2, microbatches=2, recompute=recompute),
        )

    once, twice = trained(False), trained(True)
    assert_equal(twice, once)
    # 4 steps of 2 micro-batches, 2 layers.
    assert len({array.tobytes() for array in once[3]}) == 16
    assert {array.tobytes() for array in once[3]} == {array.tobytes() for array in twice[3]}


def test_a_resumed_fit_draws_what_an_uninterrupted_one_does(mirrored, tmp_path, of_two):
    def run(*callbacks):
        backup = BackupAndRestore(tmp_path, save_freq=1)
        return fitted(mirrored, functional, callbacks=[backup, *callbacks])

    with pytest.raises(Stop):
        run(Interrupts(3))
    assert_equal(run(), of_two)


@pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 13),
    reason="before Keras 3.13, set_random_seed keeps the generator",
)
def test_a_seed_that_is_set_before_fit_counts(mirrored):
    def states(seed):
        with mirrored.scope():
            keras.utils.set_random_seed(0)
            model = functional()
            model.compile("sgd", "mse")
            keras.utils.set_random_seed(seed)
            model.fit(X, X, batch_size=4, verbose=0)
            return global_generator.current().state.numpy().tolist()

    assert states(1) == states(1) != states(2)


class OwnStep(keras.Model):
    """Model whose step draws numbers, as those of adversarial networks do."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        return super().train_step((x + keras.random.normal(keras.ops.shape(x)), y))


def test_a_step_of_a_model_may_draw(one_device, mirrored):
    keras_alone = fitted(tf.distribute.get_strategy(), OwnStep)
    assert_equal(fitted(one_device, OwnStep), keras_alone)
    two = fitted(mirrored, OwnStep)
    np.testing.assert_array_equal(two[2], keras_alone[2])
    assert two[0]["loss"] != keras_alone[0]["loss"]


def test_a_loop_of_the_users_may_draw_after_a_first_number():
    strategy = tfdist.make_strategy("mirrored", devices="cpu:0,cpu:1")
    keras.utils.clear_session()
    with strategy.scope():
        keras.utils.set_random_seed(1)
        draw = tf.function(lambda: strategy.run(lambda: keras.random.normal([1])))
        with pytest.raises(ValueError, match=r"expected a seed in what is called first in a step"):
            draw()
        keras.random.normal([1])
        first, second = (strategy.experimental_local_results(draw()) for _ in range(2))
    assert len({float(x[0]) for x in (*first, *second)}) == 4
    other = tfdist.make_strategy("mirrored", devices="cpu:0,cpu:1")
    with other.scope():
        keras.random.normal([1])  # Keras' generator belongs to the former strategy
        other.experimental_local_results(tf.function(lambda: other.run(draw_one))())


def draw_one():
    return keras.random.normal([1])
