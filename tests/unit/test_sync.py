"""Test that two replicas with a policy train as the same policy in a few lines of NumPy."""

import contextlib
import functools
import math

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.interrupts import Interrupts, Stop
from tfdist import sync
from tfdist.data.order import rows_of_replicas
from tfdist.run import telemetry_callbacks
from tfdist.sync import DiLoCo, Gradients, LocalSGD

EXAMPLES = 50
BATCH = 9  # nine rows are five for one replica, and four for the other
EPOCHS = 3
RATE = 0.02
MOMENTUM = 0.8
X = np.random.default_rng(0).normal(size=(EXAMPLES, 5)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True) + 1
START = np.linspace(-1, 1, 6).astype(np.float32)  # five weights and a bias


# --- The same in NumPy ----------------------------------------------------------------------------
def gradient(weights, rows):
    """Return the gradient of the mean squared error over some rows."""
    x = np.concatenate([X[rows], np.ones([len(rows), 1], np.float32)], 1)
    return 2 * x.T @ (x @ weights - Y[rows, 0]) / len(rows)


class Momentum:
    """Apply stochastic gradient descent with momentum, as Keras does."""

    def __init__(self):
        self.velocity = np.zeros_like(START)

    def __call__(self, weights, gradient):
        self.velocity = MOMENTUM * self.velocity - RATE * gradient
        return weights + self.velocity


def batches():
    """Yield the rows of each replica at each step of an epoch."""
    for begin in range(0, EXAMPLES, BATCH):
        rows = np.arange(begin, min(begin + BATCH, EXAMPLES))
        parts = [rows_of_replicas(len(rows), r, 1, 2) for r in range(2)]
        yield [rows[first : first + count] for first, count in parts]


def together(policy, own, combine):
    """Train both replicas in step.

    `combine` makes one gradient of both, of their `own` means, or of their parts of the batch's
    mean.
    """
    weights = START
    step = Momentum()
    added = []
    for _ in range(EPOCHS):
        for parts in batches():
            shares = [1 if own else len(rows) / sum(map(len, parts)) for rows in parts]
            added.append(
                [gradient(weights, rows) * s for rows, s in zip(parts, shares, strict=True)]
            )
            if len(added) < policy.accumulate:
                continue
            both = [
                np.mean([each[r] for each in added], axis=0, dtype=np.float32) for r in range(2)
            ]
            added = []
            total = combine(*both)
            if policy.clip_norm:
                total = total * min(1, policy.clip_norm / np.linalg.norm(total))
            if not policy.skip_nonfinite or np.isfinite(total).all():
                weights = step(weights, total)
    return weights


def apart(policy):
    """Train each replica by itself, until they meet.

    Return the weights, and the bytes that a replica sends, relative to six weights of float32.
    """
    copies = [START] * 2
    steps = [Momentum(), Momentum()]
    anchor = START
    velocity = np.zeros_like(START)
    count = 0
    since = 0
    sent = 0
    size = 12 if policy.comm_dtype else 24

    def meet():
        nonlocal anchor, velocity, copies, since, sent
        difference = anchor - np.mean(copies, axis=0)
        velocity = policy.outer_momentum * velocity + difference
        anchor = anchor - policy.outer_learning_rate * (
            difference + policy.outer_momentum * velocity
        )
        copies = [anchor] * 2
        since = 0
        sent += size

    for _ in range(EPOCHS):
        for parts in batches():
            count += 1
            own = [gradient(w, rows) for w, rows in zip(copies, parts, strict=True)]
            if count <= policy.warmup:
                shares = [len(rows) / sum(map(len, parts)) for rows in parts]
                own = [sum(g * s for g, s in zip(own, shares, strict=True))] * 2
            copies = [step(w, g) for step, w, g in zip(steps, copies, own, strict=True)]
            since += 1
            if count <= policy.warmup:
                anchor = copies[0]
                since = 0
                sent += size
            elif policy.every != "epoch" and (count - policy.warmup) % policy.every == 0:
                meet()
        if since:  # somebody looks
            meet()
        own = np.mean([step.velocity for step in steps], axis=0)
        for step in steps:
            step.velocity = own
        sent += 24
    return copies[0], sent


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def total(one, other):
    return one + other


def total_in_bfloat16(one, other):
    return rounded(rounded(one) + rounded(other))


# --- What tfdist makes of it ----------------------------------------------------------------------
@contextlib.contextmanager
def following(strategy, policy):
    """Put a strategy under a policy within the context."""
    strategy.tfdist_engine.use(sync.policy(policy))
    try:
        yield
    finally:
        strategy.tfdist_engine.use(Gradients())


def fitted(strategy, x=X, epochs=EPOCHS, optimizer=None, **kwargs):
    """Return a model after a fit, and its bytes; check that all its copies are equal."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1)])
        model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse")
    model.set_weights([START[:5, None], START[5:]])
    model.fit(
        tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH),
        epochs=epochs,
        verbose=0,
        **kwargs,
    )
    for v in (*model.weights, *model.optimizer.variables):
        first, *others = [copy.numpy() for copy in strategy.experimental_local_results(v.value)]
        assert all(np.array_equal(first, other) for other in others), v.path
    return model, strategy.tfdist_engine.bytes_per_step(model)


def trained(strategy, policy, **kwargs):
    """Return the same after a fit by a policy."""
    with following(strategy, policy):
        return fitted(strategy, **kwargs)


def check_convergence(model):
    """Go on with the fit of a plane through points."""
    first = model.history.history["loss"][0]
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    last = model.fit(batches, epochs=13, verbose=0).history["loss"][-1]
    assert last < 0.05 * first


def flat(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


def signs(gradients):
    """Return the sign of each element by a vote of the replicas, as a user's function."""
    group = tfdist.parallel.replicas()
    return [tf.sign(group.all_reduce(g, f"votes {index}")) for index, g in enumerate(gradients)]


TOGETHER = {
    "mean": (Gradients(), False, total),
    "sum": ("sum", True, total),
    "replicas": ("replicas", True, lambda one, other: (one + other) / 2),
    "bfloat16": ("bfloat16", False, total_in_bfloat16),
    "small buckets": (Gradients(comm_dtype="bfloat16", bucket_bytes=1), False, total_in_bfloat16),
    "clipped": (Gradients(clip_norm=0.5), False, total),
    "accumulated": (Gradients(accumulate=4), False, total),
    "sum, accumulated": (
        Gradients(combine="sum", accumulate=4),
        True,
        total,
    ),  # the last batch of an epoch is short
    "replicas, accumulated": (
        Gradients(combine="replicas", accumulate=4),
        True,
        lambda one, other: (one + other) / 2,
    ),
    "accumulated in float16": (
        Gradients(accumulate=2, comm_dtype="float16", skip_nonfinite=True),
        False,
        total,
    ),
    "function": (signs, False, lambda one, other: np.sign(one + other)),
}
APART = {
    "each step": LocalSGD(every=1),
    "each fourth": LocalSGD(every=4),
    "each epoch": LocalSGD("epoch"),
    "warm": LocalSGD(every=3, warmup=8),
    "warm to the end": LocalSGD(every=3, warmup=100),
    "bfloat16": LocalSGD(every=4, comm_dtype="bfloat16"),
    "outer": DiLoCo(every=4, warmup=2),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_gradient_policy_equals_numpy_and_converges(mirrored, name):
    policy, own, combine = TOGETHER[name]
    policy = sync.policy(policy)
    with following(mirrored, policy):
        model, sent = fitted(mirrored)
        weights = flat(model)
        steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        check_convergence(model)
    expected = together(policy, own, combine)
    tolerance = 2e-3 if "16" in name or name == "small buckets" else 1e-5
    np.testing.assert_allclose(weights, expected, rtol=tolerance, atol=tolerance)
    elements = 8 if name == "small buckets" else 6  # by itself each is padded to an even number
    assert sent == elements * (2 if policy.comm_dtype else 4) / policy.accumulate
    assert steps == EPOCHS * math.ceil(EXAMPLES / BATCH) // policy.accumulate


@pytest.mark.parametrize("name", APART)
def test_a_weight_policy_equals_numpy_and_converges(mirrored, name):
    policy = APART[name]
    with following(mirrored, policy):
        model, sent = fitted(mirrored)
        weights = flat(model)
        if name != "outer":  # two momenta, one on the other, move too far
            check_convergence(model)
    tolerance = 5e-3 if policy.comm_dtype else 1e-5
    expected, bytes_of_all = apart(policy)
    np.testing.assert_allclose(weights, expected, rtol=tolerance, atol=tolerance)
    assert sent == bytes_of_all / (EPOCHS * math.ceil(EXAMPLES / BATCH))


def test_an_outer_optimizer_converges(mirrored):
    with mirrored.scope():
        optimizer = keras.optimizers.SGD(0.05)
    with following(mirrored, APART["outer"]):
        check_convergence(fitted(mirrored, epochs=7, optimizer=optimizer)[0])


def test_nonfinite_update_is_skipped_on_all_replicas(mirrored):
    x = X.copy()
    x[1, 0] = np.inf  # of the first replica's rows in the first step
    model, _ = trained(mirrored, Gradients(skip_nonfinite=True), x=x)
    assert np.isfinite(flat(model)).all()
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == EPOCHS * (
        math.ceil(EXAMPLES / BATCH) - 1
    )


def test_one_replica_takes_policies_too(one_device):
    model, sent = trained(one_device, Gradients(accumulate=2, clip_norm=0.5, comm_dtype="bfloat16"))
    assert sent == 0
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == EPOCHS * 6 // 2
    model, _ = trained(one_device, DiLoCo(every=2))
    plain, _ = trained(one_device, None)
    np.testing.assert_array_equal(flat(model), flat(plain))  # nobody to meet


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Gradients(combine="median"),
            (
                "sync.combine: expected one of mean, replicas, sum, or a function of a list of "
                "gradients; received 'median'."
            ),
        ),
        (
            lambda: Gradients(comm_dtype="bfloat"),
            (
                "sync.comm_dtype: expected one of bfloat16, float16, or None; received 'bfloat'. "
                "Did you mean 'bfloat16'?"
            ),
        ),
        (
            lambda: Gradients(accumulate=0),
            "sync.accumulate: expected a number, 1 or more; received 0.",
        ),
        (
            lambda: Gradients(clip_norm=-1.0),
            "sync.clip_norm: expected a number above 0, received -1.0.",
        ),
        (
            lambda: LocalSGD(every="epochs"),
            "sync.every: expected steps, or \"epoch\", 1 or more; received 'epochs'.",
        ),
        (lambda: LocalSGD(warmup=-1), "sync.warmup: expected a number, 0 or more; received -1."),
        (
            lambda: DiLoCo(outer_momentum=1.0),
            "sync.outer_momentum: expected a number from 0 to below 1, received 1.0.",
        ),
        (
            lambda: Gradients(combine=sum, comm_dtype="float16"),
            (
                "sync.comm_dtype: expected None with a combine function, which sends the gradients "
                "itself; received "
                "'float16'."
            ),
        ),
        (
            lambda: sync.policy("meen"),
            (
                "a function of a list of gradients, or one of mean, replicas, sum, bfloat16, "
                "float16; received 'meen'. Did you mean 'mean'?"
            ),
        ),
    ],
)
def test_a_bad_policy_is_named(make, text):
    with pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)


def test_unsupported_combinations_of_a_policy_are_named(mirrored):
    with pytest.raises(
        ValueError,
        match=r"expected the combine function to return a list of gradients of "
        r"shapes \[\(5, 1\), \(1,\)\], received \[\(5, 1\)\]",
    ):
        trained(mirrored, lambda gradients: gradients[:1])
    with mirrored.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"do not support a LossScaleOptimizer"):
        trained(mirrored, LocalSGD(), optimizer=optimizer)
    with pytest.raises(
        ValueError,
        match="sync: the strategy central_storage does not support synchronization policies, "
        "received 'sum'",
    ):
        tfdist.make_strategy("central_storage", devices="cpu:0,cpu:1", sync="sum")


# --- Loss scales, shapes, scalars -----------------------------------------------------------------
def scaled(scale):
    """Return a function that makes an optimizer with this fixed scale of the loss.

    The scale is fixed while gradients are finite.
    """
    return lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(RATE, momentum=MOMENTUM),
        initial_scale=scale,
        dynamic_growth_steps=1000,
    )


def made(strategy, optimizer):
    with strategy.scope():
        return optimizer()


@pytest.mark.parametrize("name", ["scaled", "constant"])
def test_norms_are_those_without_the_scale_of_the_loss(mirrored, name):
    make = {
        "scaled": scaled(2.0**15),
        "constant": lambda: keras.optimizers.SGD(
            RATE, momentum=MOMENTUM, loss_scale_factor=2.0**15
        ),
    }[name]
    model, _ = trained(mirrored, Gradients(clip_norm=0.5), optimizer=made(mirrored, make))
    np.testing.assert_allclose(
        flat(model), together(Gradients(clip_norm=0.5), False, total), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("how", ["merged", "zero", "fsdp"])
def test_a_scale_falls_where_gradients_are_not_finite(mirrored, how):
    policy = Gradients(skip_nonfinite=True)

    def build():
        with mirrored.scope():
            model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.01)
            if how == "fsdp":
                tfdist.parallel.fsdp(model, sync=policy)
            if how == "zero":
                optimizer = tfdist.parallel.zero(optimizer, sync=policy)
            model.compile(
                keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**127),
                "mse",
                jit_compile=False,
            )
        return model

    mirrored.tfdist_engine.use(policy if how == "merged" else Gradients())
    try:
        model = build()
        model.fit(X, Y, batch_size=BATCH, epochs=4, shuffle=False, verbose=0)
    finally:
        mirrored.tfdist_engine.use(Gradients())
    assert float(model.optimizer.dynamic_scale.numpy()) < 2.0**126
    assert (
        0
        < int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        < 4 * math.ceil(EXAMPLES / BATCH)
    )
    assert np.isfinite(flat(model)).all()


@tf.custom_gradient
def forgetful(x):
    """Apply the same function; its gradient's shape is unknown until it is there.

    Some sums of sparse and dense gradients are like that.
    """
    return tf.identity(x), lambda dy: tf.reshape(dy, tf.shape(dy) + tf.cast(0 * dy[0, 0], tf.int32))


class Tied(keras.layers.Layer):
    """Compute scores of words by the embedding that read them."""

    def build(self, shape):
        self.table = self.add_weight(shape=(7, 3), name="table")

    def call(self, x):
        table = forgetful(tf.convert_to_tensor(self.table))
        return tf.matmul(tf.reduce_sum(tf.gather(table, x), 1), table, transpose_b=True)


@functools.cache
def fitted_tied(strategy, policy):
    """Return the weights of a model with tied weights after a fit, and its bytes."""
    with following(strategy, policy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input([2], dtype="int32"), Tied()])
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        words = np.arange(36).reshape(18, 2) % 7
        model.fit(words, words[:, 0], batch_size=6, epochs=1, shuffle=False, verbose=0)
        return flat(model), strategy.tfdist_engine.bytes_per_step(model)


@pytest.mark.parametrize(
    "policy",
    [Gradients(comm_dtype="bfloat16"), LocalSGD(every=2, warmup=4)],
    ids=["bfloat16", "warm"],
)
def test_gradients_of_tied_weights_become_one(mirrored, policy):
    weights, sent = fitted_tied(mirrored, policy)
    expected, _ = fitted_tied(mirrored, Gradients())
    np.testing.assert_allclose(weights, expected, rtol=1e-2, atol=1e-3)
    assert sent == (
        22 * 2 if policy.comm_dtype else 21 * 4
    )  # 21 elements, padded where they travel in parts


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


def test_slots_of_scalars_become_one_too(mirrored):
    mirrored.tfdist_engine.use(LocalSGD(every=4))
    try:
        with mirrored.scope():
            model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1), Scale()])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(X, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    finally:
        mirrored.tfdist_engine.use(Gradients())
    slots = [v for v in model.optimizer.variables if v.path.endswith("momentum")]
    assert () in [tuple(v.shape) for v in slots]
    for v in slots:
        one, other = (copy.numpy() for copy in mirrored.experimental_local_results(v.value))
        np.testing.assert_array_equal(one, other, err_msg=v.path)


# --- Several models, models with policies of their own --------------------------------------------
def built(
    strategy,
    width=1,
    how=lambda model: None,
    optimizer=lambda: keras.optimizers.SGD(0.01, momentum=0.9),
):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input([5]), keras.layers.Dense(width), keras.layers.Dense(1)]
        )
        how(model)
        model.compile(optimizer(), "mse", jit_compile=False)
    return model


@pytest.fixture
def under(mirrored):
    """Put the strategy of two replicas under a policy until the test ends."""

    def use(policy):
        mirrored.tfdist_engine.use(sync.policy(policy))
        return mirrored

    yield use
    mirrored.tfdist_engine.use(Gradients())


@pytest.mark.parametrize("policy", ["bfloat16", LocalSGD(every=1)], ids=["bfloat16", "local"])
def test_each_model_sends_its_own_bytes(under, policy):
    strategy = under(policy)
    small = built(strategy, 2)
    large = built(strategy, 30)
    for model in (large, small):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    # Of local steps the optimizer's slots too, where somebody looks.
    size = 2 if policy == "bfloat16" else 8
    assert strategy.tfdist_engine.bytes_per_step(small) == size * (
        small.count_params() + (policy == "bfloat16")
    )
    assert strategy.tfdist_engine.bytes_per_step(large) == size * (
        large.count_params() + (policy == "bfloat16")
    )


@pytest.mark.parametrize("rows", [4, 5])
def test_bytes_of_sparse_gradients_are_known_if_all_batches_are_of_one_size(under, rows):
    strategy = under("mean")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([2], dtype="int32"),
                keras.layers.Embedding(7, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    model.fit(np.ones([rows, 2], np.int32), np.ones([rows, 1]), batch_size=4, verbose=0)
    found = strategy.tfdist_engine.bytes_per_step(model)
    if rows == 4:
        # A replica's two rows of two ids, with their indices, and the gradients of the dense layer.
        assert found == 4 * (3 * 4 + 4) + 7 * 4
    else:
        assert math.isnan(found)
        assert telemetry_callbacks.sent(strategy, model) is None


def test_bytes_that_a_user_function_sends_by_itself_are_unknown(under):
    def sums(gradients):
        return tf.distribute.get_replica_context().all_reduce("SUM", gradients)

    model = built(under(sums))
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert math.isnan(model.distribute_strategy.tfdist_engine.bytes_per_step(model))


OWN_POLICY = {
    "zero": {
        "optimizer": lambda: tfdist.parallel.zero(
            keras.optimizers.SGD(0.01, momentum=0.9), sync="mean"
        )
    },
    "fsdp": {"how": lambda model: tfdist.parallel.fsdp(model, sync=Gradients())},
}


@pytest.mark.parametrize("name", OWN_POLICY)
def test_a_sharded_model_has_a_policy_of_its_own(under, name):
    def run(policy):
        strategy = under(policy)
        model = built(strategy, 3, **OWN_POLICY[name])
        model.fit(X, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        assert strategy.tfdist_engine.aggregation.variables(model.optimizer) == []
        return flat(model)

    expected = run(Gradients())
    for policy in (Gradients(accumulate=4), DiLoCo(every=2)):
        np.testing.assert_array_equal(run(policy), expected)


def test_each_model_averages_its_weights_by_itself(under):
    """Test that another model that still exists stays as it is.

    Which models exist differs from process to process.
    """
    strategy = under(LocalSGD(every=100))
    other = built(strategy, 2)
    model = built(strategy, 3)
    for batch in range(2):
        other.train_on_batch(X[batch::2], Y[batch::2])
    apart = [copy.numpy() for copy in strategy.experimental_local_results(other.weights[0].value)]
    assert not np.array_equal(*apart)
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    for before, after in zip(
        apart, strategy.experimental_local_results(other.weights[0].value), strict=True
    ):
        np.testing.assert_array_equal(before, after.numpy())


# --- Steps by hand, files -------------------------------------------------------------------------
@pytest.mark.parametrize("policy", [LocalSGD(every=4), DiLoCo(every=4)], ids=["local", "outer"])
def test_train_on_batch_follows_the_policy(under, policy):
    model, neighbour, fitted = (built(under(policy), 2) for _ in range(3))
    fitted.fit(X[:40], Y[:40], batch_size=8, epochs=1, shuffle=False, verbose=0)
    for begin in range(0, 40, 8):
        neighbour.train_on_batch(X[:8], Y[:8])
        model.train_on_batch(X[begin : begin + 8], Y[begin : begin + 8])
        one, other = (
            copy.numpy()
            for copy in model.distribute_strategy.experimental_local_results(model.weights[0].value)
        )
        assert np.array_equal(one, other) == (begin == 24)
    expected = np.mean((np.asarray(fitted(X[:8])) - Y[:8]) ** 2)
    # Replicas meet before.
    assert model.test_on_batch(X[:8], Y[:8]) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(flat(model), flat(fitted), rtol=1e-5, atol=1e-6)


def test_saved_file_has_the_average_of_all_replicas(under, tmp_path):
    strategy = under(LocalSGD(every=100))
    model = built(strategy, 2)
    for begin in range(0, 40, 8):
        model.train_on_batch(X[begin : begin + 8], Y[begin : begin + 8])
    copies = [
        np.mean([copy.numpy() for copy in strategy.experimental_local_results(v.value)], 0)
        for v in model.weights
    ]
    slots = [
        np.mean([copy.numpy() for copy in strategy.experimental_local_results(v.value)], 0)
        for v in model.optimizer.variables[2:]
    ]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for saved, expected in zip(
        (*loaded.weights, *loaded.optimizer.variables[2:]), (*copies, *slots), strict=True
    ):
        np.testing.assert_allclose(saved.numpy(), expected, rtol=1e-5, atol=1e-6)


SKIPS = Gradients(skip_nonfinite=True)


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        (Gradients(accumulate=3), lambda model: None),
        (SKIPS, lambda model: None),
        (Gradients(), lambda model: tfdist.parallel.fsdp(model, sync=SKIPS)),
    ],
    ids=["accumulated", "left out", "left out of shards"],
)
def test_a_failure_is_at_the_step_where_it_was(under, policy, how):
    """It is named also where an update comes every third step, or was left out."""
    strategy = under(policy)
    model = built(strategy, how=how)
    model.compile(
        model.optimizer,
        lambda y, prediction: keras.ops.square(
            prediction - tf.debugging.check_numerics(y, "labels")
        ),
    )
    x = X[:48].copy()
    y = Y[:48].copy()
    x[1] = np.inf
    y[41] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match="labels"):
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0)
    assert strategy.tfdist_engine.heartbeat.step == 5


# --- Resuming -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "steps"),
    [(Gradients(accumulate=4), 5), (DiLoCo(every=4, warmup=2), 8)],
    ids=["accumulated", "outer"],
)
def test_interrupted_fit_resumes_exactly(mirrored, tmp_path, policy, steps):
    def backup(name="backup"):
        return tfdist.BackupAndRestore(tmp_path / name, save_freq=1)

    uninterrupted, _ = trained(mirrored, policy, callbacks=[backup("whole")])
    with pytest.raises(Stop):
        trained(mirrored, policy, callbacks=[backup(), Interrupts(steps)])
    resumed, _ = trained(mirrored, policy, callbacks=[backup()])
    np.testing.assert_array_equal(flat(resumed), flat(uninterrupted))


def test_another_policy_refuses_accumulated_gradients_of_a_snapshot(mirrored, tmp_path):
    def backup():
        return tfdist.BackupAndRestore(tmp_path, save_freq=1)

    with pytest.raises(Stop):
        trained(mirrored, Gradients(accumulate=4), callbacks=[backup(), Interrupts(3)])
    for other, text in (
        (
            Gradients(),
            r"sync: the snapshot holds 3 arrays of another policy, expected the 0 of "
            r"Gradients.* Use the policy",
        ),
        (
            Gradients(accumulate=2),
            r"sync.accumulate: the snapshot holds accumulated gradients of 2 steps, expected "
            r"fewer than 2",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            trained(mirrored, other, callbacks=[backup()])
