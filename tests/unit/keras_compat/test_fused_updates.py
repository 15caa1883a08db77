"""Test that fused updates equal those of Keras, and which updates are left to Keras."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp
from tfdist import keras_compat
from tfdist.keras_compat import parallel
from tfdist.keras_compat.fused_updates import fused

STEPS = 6
SHAPES = ((33, 17), (5,), ())  # a whole number of vector registers, and others


@pytest.fixture(scope="module", autouse=True)
def hooks():
    keras_compat.install()


def of_keras(cls):
    """Return a subclass whose update is that of Keras."""

    class Unfused(cls):
        def update_step(self, *args):
            super().update_step(*args)

    Unfused.__name__ = cls.__name__
    return Unfused


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)


OPTIMIZERS = keras.optimizers
FUSED = {
    "adam": (OPTIMIZERS.Adam, {}, "ResourceApplyAdam"),
    "adam, other betas": (
        OPTIMIZERS.Adam,
        {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3},
        "ResourceApplyAdam",
    ),
    "adamw": (OPTIMIZERS.AdamW, {"weight_decay": 0.1}, "ResourceApplyAdam"),
    "sgd": (OPTIMIZERS.SGD, {}, "ResourceApplyGradientDescent"),
    "momentum": (OPTIMIZERS.SGD, {"momentum": 0.9}, "ResourceApplyKerasMomentum"),
    "nesterov": (
        OPTIMIZERS.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "ResourceApplyKerasMomentum",
    ),
    "rmsprop, momentum": (OPTIMIZERS.RMSprop, {"momentum": 0.9}, "ResourceApplyRMSProp"),
    "adagrad": (OPTIMIZERS.Adagrad, {}, "ResourceApplyAdagradV2"),
}
DECAY = "ResourceApplyGradientDescent"
# Those that update only the rows of a sparse gradient, without kernels where XLA may compile them.
ROWS_ONLY = {"sgd", "adagrad"}
UNFUSED = {
    "amsgrad": (OPTIMIZERS.Adam, {"amsgrad": True}),
    "rmsprop": (OPTIMIZERS.RMSprop, {}),
    "rmsprop, centered": (OPTIMIZERS.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad, small accumulator": (OPTIMIZERS.Adagrad, {"initial_accumulator_value": 1e-3}),
    "lion": (OPTIMIZERS.Lion, {"weight_decay": 0.1}),
    "nadam": (OPTIMIZERS.Nadam, {}),
    "subclass": (of_keras(OPTIMIZERS.Adam), {"weight_decay": 0.1}),
}
OPTIONS = {
    "plain": {},
    "averages": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    "clipnorm": {"clipnorm": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.3},
    "schedule": {"learning_rate": schedule},
    "accumulation": {"gradient_accumulation_steps": 2},
    "loss_scale_factor": {"loss_scale_factor": 4.0},
}


# Schedules and accumulation change what kernels get; the others, only what is around them.
EACH = ("plain", "schedule", "accumulation")
ALL = ("adam", "nesterov")  # those with every option


def made(cls, **options):
    rate = options.pop("learning_rate", 0.02)
    return cls(rate() if callable(rate) else rate, **options)


def variables():
    random = np.random.default_rng(0)
    return [keras.Variable(random.normal(size=s), dtype="float32") for s in SHAPES]


def gradients():
    random = np.random.default_rng(1)
    return [[tf.constant(random.normal(size=s), tf.float32) for s in SHAPES] for _ in range(STEPS)]


def trained(optimizer, change=lambda step, optimizer: None, eager=False):
    """Return the variables and slots after some steps, and the kernels in the graph."""
    weights = variables()
    optimizer.build(weights)

    def step(grads):
        with fused():
            optimizer.apply(grads, weights)

    traced = tf.function(step, autograph=False)
    for number, grads in enumerate(gradients()):
        (step if eager else traced)(grads)
        change(number, optimizer)
    state = [v.numpy() for v in (*weights, *optimizer.variables)]
    return state, set() if eager else kernels(traced.get_concrete_function(gradients()[0]))


def expected_kernels(options, kernel):
    decays = options.get("weight_decay") is not None
    return {kernel, DECAY} if decays else {kernel}


def kernels(function):
    """Return the types of training kernels in a function and the functions that it calls."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return {n.op for n in nodes if n.op.startswith(("ResourceApply", "ResourceSparseApply"))}


def assert_equal(state, expected, moved=0.2):
    """Compare states after updates by which a weight moved no further than `moved`.

    Keras rounds `1 - beta_2` apart from `beta_2`, and the kernel of Adam does not. With the default
    of 0.999 this is 1.3e-5 of the velocity, and half of that of an update.
    """
    assert len(state) == len(expected)
    for value, other in zip(state, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-5, atol=1e-5 * moved)


@functools.cache
def trained_by_keras(name, option="plain"):
    cls, options, _ = FUSED[name]
    return trained(made(of_keras(cls), **options, **OPTIONS[option]))


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in FUSED for option in (OPTIONS if name in ALL else EACH)],
)
def test_a_fused_update_equals_that_of_keras(name, option):
    cls, options, kernel = FUSED[name]
    state, found = trained(made(cls, **options, **OPTIONS[option]))
    expected, unfused = trained_by_keras(name, option)
    assert (found, unfused) == (expected_kernels(options, kernel), set())
    assert_equal(state, expected)


def wandered(optimizer):
    """Return 64 weights after 300 steps along noisy gradients."""
    variable = keras.Variable(np.linspace(1, 2, 64), dtype="float32")
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step(number):
        noise = tf.random.stateless_normal([64], tf.stack([0, number]))
        with fused():
            optimizer.apply([variable + noise], [variable])

    for number in range(300):
        step(tf.constant(number))
    return variable.numpy()


def test_differences_stay_small_after_many_steps():
    fast, slow = (wandered(cls(1e-3)) for cls in (OPTIMIZERS.Adam, of_keras(OPTIMIZERS.Adam)))
    assert_equal([fast], [slow], moved=0.3)


@pytest.mark.parametrize("name", UNFUSED)
def test_other_optimizers_are_left_to_keras(name):
    cls, options = UNFUSED[name]
    state, found = trained(made(cls, **options))
    expected, _ = trained(made(of_keras(cls), **options))
    assert found == set()
    for value, other in zip(state, expected, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("name", FUSED)
def test_eager_updates_are_fused_too(name):
    cls, options, _ = FUSED[name]
    assert_equal(trained(made(cls, **options), eager=True)[0], trained_by_keras(name)[0])


def test_keras_is_unchanged_elsewhere():
    weights = variables()
    optimizer = OPTIMIZERS.Adam()
    optimizer.build(weights)
    traced = tf.function(lambda grads: optimizer.apply(grads, weights), autograph=False)
    assert kernels(traced.get_concrete_function(gradients()[0])) == set()


@pytest.mark.parametrize("eager", [False, True])
def test_a_changed_learning_rate_counts(eager):
    def change(step, optimizer):
        if step == 2:
            optimizer.learning_rate = 0.5

    fast, _ = trained(OPTIMIZERS.Adam(0.01), change, eager)
    slow, _ = trained(of_keras(OPTIMIZERS.Adam)(0.01), change)
    assert_equal(fast, slow, moved=2)


def test_variables_may_have_learning_rates_of_their_own():
    class Slower(OPTIMIZERS.SGD):
        def _backend_update_step(self, grads, variables, learning_rate):
            for number, (g, v) in enumerate(zip(grads, variables, strict=True)):
                self.update_step(g, v.value, learning_rate / 10**number)

    weights = [keras.Variable([1.0]) for _ in range(3)]
    with fused():
        Slower(0.5).apply([tf.constant([1.0])] * 3, weights)
    np.testing.assert_allclose([float(v[0]) for v in weights], [0.5, 0.95, 0.995])


def test_excluded_weights_do_not_decay():
    states = []
    for cls in (OPTIMIZERS.AdamW, of_keras(OPTIMIZERS.AdamW)):
        weights = variables()
        optimizer = cls(0.02, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_list=[weights[0]])
        optimizer.build(weights)
        for grads in gradients():
            with fused():
                optimizer.apply(grads, weights)
        states.append([v.numpy() for v in weights])
    assert_equal(*states)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_variables_of_other_dtypes_are_left_to_keras(dtype):
    weights = [keras.Variable(np.ones(4), dtype=dtype)]
    optimizer = OPTIMIZERS.Adam()
    optimizer.build(weights)

    @tf.function(autograph=False)
    def step():
        with fused():
            optimizer.apply([tf.ones(4, dtype)], weights)

    assert kernels(step.get_concrete_function()) == set()
    step()


def test_gradients_of_other_dtypes_are_cast():
    states = []
    for cls in (OPTIMIZERS.Adam, of_keras(OPTIMIZERS.Adam)):
        weights = variables()
        optimizer = cls(0.02)
        for grads in gradients():
            with fused():
                optimizer.apply([tf.cast(g, tf.bfloat16) for g in grads], weights)
        states.append([v.numpy() for v in weights])
    assert_equal(*states)


def trained_by_rows(optimizer, strategy=None):
    """Return a table and its slots after some steps of rows, and the kernels in the graph."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        table = keras.Variable(np.ones((9, 3)), dtype="float32")
        optimizer.build([table])

    @tf.function(autograph=False)
    def step(values, ids):
        def on_replica():
            with fused():
                gradient = tf.IndexedSlices(values, ids, tf.constant([9, 3]))
                optimizer.apply([gradient], [table])

        strategy.run(on_replica)

    random = np.random.default_rng(1)
    for _ in range(STEPS):
        rows = (
            tf.constant(random.normal(size=(4, 3)), tf.float32),
            tf.constant(random.permutation(9)[:4]),
        )
        step(*rows)
    state = [v.numpy() for v in (table, *optimizer.variables)]
    return state, kernels(step.get_concrete_function(*rows))


@pytest.mark.parametrize("name", FUSED)
def test_a_sparse_gradient_is_a_fused_update(name):
    cls, options, kernel = FUSED[name]
    state, used = trained_by_rows(made(cls, **options))
    expected, _ = trained_by_rows(made(of_keras(cls), **options))
    assert_equal(state, expected)
    assert used == (set() if name in ROWS_ONLY else expected_kernels(options, kernel))


@pytest.mark.parametrize(
    ("first", "used_kernels"), [(0.1, {"ResourceSparseApplyAdagradV2"}), (1e-3, set())]
)
def test_replicas_update_the_rows_of_adagrad_by_its_kernel(mirrored, first, used_kernels):
    """XLA does not compile their updates; the kernel reads and writes each row once."""
    with mirrored.scope():
        optimizers = [
            cls(0.02, first) for cls in (OPTIMIZERS.Adagrad, of_keras(OPTIMIZERS.Adagrad))
        ]
    (state, used), (expected, _) = (trained_by_rows(each, mirrored) for each in optimizers)
    assert_equal(state, expected)
    assert used == used_kernels


def test_sparse_gradients_and_overwritten_variables_equal_those_of_keras():
    states = []
    for cls in (OPTIMIZERS.Adam, of_keras(OPTIMIZERS.Adam)):
        table = keras.Variable(np.ones((4, 2)), dtype="float32")
        scale = keras.Variable(1.0)
        scale.overwrite_with_gradient = True
        kernel = keras.Variable(np.ones((2, 2)), dtype="float32")
        optimizer = cls(0.02)
        rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([4, 2]))
        with fused():
            optimizer.apply([rows, tf.constant(3.0), tf.ones((2, 2))], [table, scale, kernel])
        states.append([v.numpy() for v in (table, scale, kernel)])
        assert float(scale) == 3.0
    assert_equal(*states)


def test_gradients_that_keras_broadcasts_are_left_to_it():
    weights = [keras.Variable(np.ones((2, 2)), dtype="float32")]
    with fused():
        OPTIMIZERS.SGD(0.5, momentum=0.9).apply([tf.constant(1.0)], weights)
    assert weights[0].numpy().tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_pipeline_stages_are_updated_on_their_own_devices():
    with tf.device("/cpu:1"):
        weights = variables()
    optimizer = OPTIMIZERS.Adam()
    with parallel.updating_in_place(optimizer):
        optimizer.build(weights)

    @tf.function(autograph=False)
    def step(grads):
        with parallel.updating_in_place(optimizer):
            optimizer.apply(grads, weights)

    concrete = step.get_concrete_function(gradients()[0])
    assert kernels(concrete) == {"ResourceApplyAdam"}
    before = weights[0].numpy()
    step(gradients()[0])
    assert np.all(weights[0].numpy() != before)


# --- Strategies -----------------------------------------------------------------------------------
STRATEGIES = {
    "one_device": lambda: tfdist.make_strategy("one_device", devices="cpu"),
    "mirrored": lambda: tfdist.make_strategy("mirrored", devices="cpu:0,cpu:1"),
    "central_storage": lambda: tfdist.make_strategy("central_storage", devices="cpu:0,cpu:1"),
    "local_sgd": lambda: tfdist.make_strategy(
        "mirrored", devices="cpu:0,cpu:1", sync=tfdist.sync.LocalSGD(every=2)
    ),
    "accumulating": lambda: tfdist.make_strategy(
        "mirrored", devices="cpu:0,cpu:1", sync=tfdist.sync.Gradients(accumulate=2)
    ),
}


def fitted(strategy, optimizer, wrap=lambda optimizer: optimizer, sharded=False, **compiled):
    """Return the weights after a `fit`, and the kernels of its step."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = mlp()
        if sharded:
            tfdist.parallel.fsdp(model, elementwise=True)
        model.compile(wrap(optimizer()), CROSSENTROPY, **compiled)
    model.fit(dataset(*data()), epochs=2, verbose=0)
    functions = vars(model.train_function)["_graphs"].values()
    traced = [c for f in functions for c in f._list_all_concrete_functions()]
    return model.get_weights(), set().union(*map(kernels, traced))


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_fuse_updates(name):
    strategy = STRATEGIES[name]()
    state, found = fitted(strategy, lambda: OPTIMIZERS.AdamW(0.02))
    expected, unfused = fitted(strategy, lambda: of_keras(OPTIMIZERS.AdamW)(0.02))
    assert (found, unfused) == ({"ResourceApplyAdam", DECAY}, set())
    assert_equal(state, expected)


WAYS = {
    "loss scaling": {"wrap": lambda o: keras.optimizers.LossScaleOptimizer(o, 2.0**100)},
    "zero 1": {"wrap": lambda o: tfdist.parallel.zero(o, 1, elementwise=True)},
    "zero 2": {"wrap": lambda o: tfdist.parallel.zero(o, 2, elementwise=True)},
    "fsdp": {"sharded": True},
    "steps_per_execution": {"steps_per_execution": 2},
}


@pytest.fixture(scope="module")
def plain(one_device):
    """Return the weights after a `fit` with the updates of Keras."""
    weights, unfused = fitted(one_device, lambda: of_keras(OPTIMIZERS.Adam)(0.02))
    assert unfused == set()
    return weights


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train_fuse_updates(mirrored, plain, way):
    state, found = fitted(mirrored, lambda: OPTIMIZERS.Adam(0.02), **WAYS[way])
    assert found == {"ResourceApplyAdam"}
    assert_equal(state, plain)


@pytest.mark.parametrize("compiled", [{"run_eagerly": True}, {"jit_compile": True}])
def test_eager_and_compiled_steps_equal_those_of_keras(one_device, plain, compiled):
    state, _ = fitted(one_device, lambda: OPTIMIZERS.Adam(0.02), **compiled)
    assert_equal(state, plain)


@pytest.mark.parametrize("cls", [OPTIMIZERS.SGD, OPTIMIZERS.Adagrad, OPTIMIZERS.Adam])
def test_compiled_steps_update_rows_as_keras_does(one_device, cls):
    ids = np.arange(24).reshape(8, 3) % 7
    weights = []
    for optimizer, compiled in ((cls, True), (of_keras(cls), False)):
        keras.utils.set_random_seed(0)
        with one_device.scope():
            layers = [keras.layers.Embedding(9, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((3,)), *layers])
            model.compile(optimizer(0.02), "mse", jit_compile=compiled)
        model.fit(ids, np.ones(8), batch_size=3, epochs=2, verbose=0)  # the last batch has 2 rows
        weights.append(model.get_weights())
    assert_equal(*weights)
