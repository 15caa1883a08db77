"""Test that two replicas that share an optimizer's state train as with one whole on each.

Also test that they go on from each other's snapshots.
"""

import functools
import shutil
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.interrupts import Interrupts, Stop
from tfdist import sync
from tfdist.backup.store import Store
from tfdist.keras_compat import local_component
from tfdist.parallel import fsdp, zero
from tfdist.parallel.sharding import global_norm

EXAMPLES = 52
BATCH = 9
EPOCHS = 2
X = np.random.default_rng(0).normal(size=(EXAMPLES, 5)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True) + 1
OPTIMIZERS = keras.optimizers


def trained(strategy, optimizer, **kwargs):
    """Return a model after a fit; check that all copies of its weights are equal."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [
            keras.layers.Dense(7, "tanh", kernel_constraint="max_norm"),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input([5]), *layers])
        model.compile(optimizer(), "mse")
    model.fit(
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH), epochs=EPOCHS, verbose=0, **kwargs
    )
    for v in model.weights:
        first, *others = [copy.numpy() for copy in strategy.experimental_local_results(v.value)]
        assert all(np.array_equal(first, other) for other in others), v.path
    return model


def compare(model, expected, tolerance=2e-6):
    for mine, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(
            mine, other, rtol=tolerance, atol=tolerance * np.abs(other).max()
        )


def decayed():
    optimizer = OPTIMIZERS.AdamW(1e-2, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


CASES = {  # more of them, each by itself: tests/parity/sharded_cases.py
    "adamw": decayed,
    "clipped each, averaged, scheduled": lambda: OPTIMIZERS.RMSprop(
        OPTIMIZERS.schedules.CosineDecay(1e-2, 10),
        clipnorm=0.1,
        use_ema=True,
        ema_overwrite_frequency=5,
    ),
    "clipped by value, accumulated": lambda: OPTIMIZERS.Lion(
        1e-3, clipvalue=0.01, gradient_accumulation_steps=3
    ),
    "clipped together, scaled": lambda: OPTIMIZERS.LossScaleOptimizer(
        OPTIMIZERS.SGD(1e-2, momentum=0.9, global_clipnorm=0.1), dynamic_growth_steps=3
    ),
}


def sharded(make, stage, **kwargs):
    """Return a function that makes the same optimizer, sharded."""

    def optimizer():
        whole = make()
        if isinstance(whole, OPTIMIZERS.LossScaleOptimizer):
            return OPTIMIZERS.LossScaleOptimizer(
                zero(whole.inner_optimizer, stage, **kwargs), dynamic_growth_steps=3
            )
        return zero(whole, stage, **kwargs)

    return optimizer


@pytest.fixture(scope="module")
def undisturbed(mirrored):
    """Return a case's model, trained once with a whole (stage 0) or sharded optimizer."""

    @functools.cache
    def model(name, stage):
        return trained(mirrored, sharded(CASES[name], stage) if stage else CASES[name])

    return model


@pytest.mark.parametrize(
    ("name", "stage"), [("adamw", 1), ("adamw", 2), *zip([*CASES][1:], [1, 2, 1], strict=True)]
)
def test_sharded_optimizer_equals_an_unsharded_one(undisturbed, name, stage):
    model = undisturbed(name, stage)
    compare(model, undisturbed(name, 0))
    slots = [v for v in model.optimizer.variables if hasattr(v, "tfdist_shape")]
    assert slots
    assert all(
        local_component(v, 0).shape == (-(-int(np.prod(v.tfdist_shape)) // 2),) for v in slots
    )


@pytest.mark.parametrize(
    ("policy", "make", "tolerance"),
    [
        (
            sync.Gradients(comm_dtype="bfloat16", bucket_bytes=64),
            lambda: OPTIMIZERS.SGD(1e-2),
            1e-2,
        ),
        (sync.Gradients(clip_norm=0.1, bucket_bytes=64), lambda: OPTIMIZERS.Adam(1e-2), 2e-6),
        (sync.Gradients(combine="sum", skip_nonfinite=True), lambda: OPTIMIZERS.SGD(1e-3), 2e-6),
    ],
    ids=["comm_dtype", "clipped", "sum"],
)
def test_sync_policy_has_the_same_result_with_and_without_shards(mirrored, policy, make, tolerance):
    model = trained(mirrored, sharded(make, 2, sync=policy))
    mirrored.tfdist_engine.use(policy)
    try:
        compare(model, trained(mirrored, make), tolerance)
    finally:
        mirrored.tfdist_engine.use(sync.Gradients())


def test_nonfinite_update_is_skipped_on_all_replicas(mirrored, monkeypatch):
    x = X.copy()
    x[1, 0] = np.inf  # of the first replica's rows in the first step
    monkeypatch.setitem(globals(), "X", x)
    model = trained(
        mirrored, lambda: zero(OPTIMIZERS.SGD(1e-3), sync=sync.Gradients(skip_nonfinite=True))
    )
    assert all(np.isfinite(v.numpy()).all() for v in model.trainable_variables)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == EPOCHS * 5


def scaled(mirrored, policy, factor, scale, learning_rate):
    """Return a LossScaleOptimizer and the weights after a step.

    The step's gradient is `factor` on each replica.
    """
    with mirrored.scope():
        model = keras.Sequential(
            [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        optimizer = OPTIMIZERS.LossScaleOptimizer(
            zero(OPTIMIZERS.SGD(learning_rate), sync=policy), initial_scale=scale
        )
        model.compile(optimizer, lambda y, x: y * x, jit_compile=False)
    model.fit(np.ones([2, 1]), np.full([2, 1], 2 * factor, np.float32), batch_size=2, verbose=0)
    return optimizer, model.get_weights()[0][0, 0]


def test_small_gradients_travel_with_the_scale_of_the_loss(mirrored):
    _, weight = scaled(mirrored, "float16", 1e-9, 2.0**20, 1e6)
    np.testing.assert_allclose(weight, -2e-3, rtol=1e-2)


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_a_scale_is_lowered_where_the_sum_is_not_finite(mirrored, skip_nonfinite):
    optimizer, weight = scaled(
        mirrored, sync.Gradients(skip_nonfinite=skip_nonfinite), 1e38, 2.0, 1e-38
    )
    assert (
        float(optimizer.dynamic_scale.numpy()),
        int(optimizer.step_counter.numpy()),
        weight,
    ) == (1.0, 0, 0.0)


class Headed(keras.Model):
    """Build a model with a head that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (keras.layers.Dense(units, use_bias=False) for units in (1, 2))

    def build(self, shape):
        self.used.build(shape)
        self.unused.build(shape)
        self.built = True

    def call(self, x):
        self.unused(x)
        return self.used(x)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ema_overwrite_frequency": 2},
        {"ema_overwrite_frequency": 1, "gradient_accumulation_steps": 3},
    ],
    ids=str,
)
def test_weights_without_gradients_keep_their_values_where_averages_are_published(mirrored, more):
    def fit(make):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = Headed()
            model.build((None, 5))
            model.compile(make(OPTIMIZERS.SGD(0.1, use_ema=True, ema_momentum=0.5, **more)), "mse")
        before = model.unused.get_weights()
        model.fit(X, Y, batch_size=9, verbose=0)
        for actual, expected in zip(model.unused.get_weights(), before, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-6)
        return model

    compare(fit(zero), fit(lambda optimizer: optimizer))


# --- Snapshots ------------------------------------------------------------------------------------
def kept(parts):
    """Return the snapshots of which there are rows."""
    return {file.name.partition(".")[0] for file in parts.glob("*.rows")}


@pytest.fixture(scope="module")
def interrupted(request, tmp_path_factory):
    """Return the files of a sharded fit with a save every four steps, interrupted in the ninth."""

    @functools.cache
    def parts(strategy):
        directory = tmp_path_factory.mktemp("interrupted")
        backup = tfdist.BackupAndRestore(directory, save_freq=4)
        make = sharded(CASES["adamw"], 2)
        with pytest.raises(Stop):
            trained(request.getfixturevalue(strategy), make, callbacks=[backup, Interrupts(9)])
        return directory

    return parts


# From two shards to two: below, where rows are missing.
@pytest.mark.parametrize(
    ("before", "after"),
    [("mirrored", "one_device"), ("one_device", "mirrored"), ("mirrored", "whole")],
)
def test_interrupted_fit_resumes_with_any_number_of_shards(
    request, undisturbed, interrupted, tmp_path, before, after
):
    parts = tmp_path / "parts"
    shutil.copytree(interrupted(before), parts)
    snapshot = Store(parts).newest().snapshot
    assert [(parts / name).exists() for name in snapshot.facts["rows"]] == [True]
    assert snapshot.facts["step"] == 2
    assert snapshot.facts["optimizer"] == "AdamW"
    assert len(kept(parts)) == 2
    make = CASES["adamw"] if after == "whole" else sharded(CASES["adamw"], 2)
    strategy = request.getfixturevalue("mirrored" if after == "whole" else after)
    model = trained(strategy, make, callbacks=[tfdist.BackupAndRestore(parts, save_freq=4)])
    compare(model, undisturbed("adamw", 2), 1e-5)
    assert not parts.exists()


def test_snapshot_with_missing_or_damaged_rows_is_skipped(mirrored, undisturbed, tmp_path, caplog):
    def run(*callbacks):
        return trained(mirrored, sharded(CASES["adamw"], 2), callbacks=callbacks)

    with pytest.raises(Stop):
        run(tfdist.BackupAndRestore(tmp_path / "backup", save_freq=1, keep=4), Interrupts(9))
    store = Store(tmp_path / "backup")
    assert len(kept(tmp_path / "backup")) == 4
    assert store.newest().snapshot.facts["step"] == 2
    newest = store.newest().number
    rows = [
        tmp_path / "backup" / store.read(store.path(number)).facts["rows"][0]
        for number in store.numbers()
    ]
    rows[-1].unlink()
    assert store.newest().number == newest - 1
    content = rows[-2].read_bytes()
    rows[-2].write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    assert store.newest().number == newest - 2
    rows[-3].write_bytes(content[:-100])
    stored = store.newest()
    assert (stored.number, stored.snapshot.facts["epoch"], stored.snapshot.facts["step"]) == (
        newest - 3,
        0,
        5,
    )
    assert all(str(path) in caplog.text for path in rows[1:])
    compare(run(tfdist.BackupAndRestore(tmp_path / "backup")), undisturbed("adamw", 2))
    assert not (tmp_path / "backup").exists()


# --- Averages and files ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("epochs", "scaled"),
    [({"swap_on_epoch": True}, False), ({}, True)],
    ids=["epochs", "evaluation"],
)
def test_averages_are_swapped_as_without_shards(mirrored, epochs, scaled):
    def numbers(wrap, shard):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
            shard(model)
            optimizer = wrap(OPTIMIZERS.SGD(0.1, use_ema=True, ema_momentum=0.5))
            model.compile(
                keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse"
            )
        x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
        seen = []
        see = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.extend(model.get_weights())
        )
        fit = model.fit(
            x,
            x,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=None if epochs else (x, x),
            callbacks=[keras.callbacks.SwapEMAWeights(**epochs), see],
        )
        return [*seen, *model.get_weights(), *fit.history.values()]

    plain = numbers(lambda optimizer: optimizer, lambda model: None)
    for sharded in (numbers(zero, lambda model: None), numbers(lambda optimizer: optimizer, fsdp)):
        for found, expected in zip(sharded, plain, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_checkpoint_of_tensorflow_restores_model_and_optimizer(mirrored, tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def made(wrap, shard):
        with mirrored.scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
            shard(model)
            model.compile(wrap(OPTIMIZERS.Adam(0.1)), "mse")
            model.optimizer.build(model.trainable_variables)
        return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def trained(model):
        model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    def same(given):
        return given

    for name, wrap, shard, others in (
        ("zero", zero, same, (zero, same)),
        ("fsdp", same, fsdp, (same, same)),
        ("plain", same, same, (same, fsdp)),
    ):
        first, checkpoint = made(wrap, shard)
        trained(first)
        path = checkpoint.save(tmp_path / name)
        second, checkpoint = made(*others)
        checkpoint.restore(path).assert_existing_objects_matched()
        for found, expected in zip(trained(second), trained(first), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)
        if name == "zero":  # another optimizer takes the model and the rate, and begins again
            plain, checkpoint = made(same, same)
            checkpoint.restore(path)
            assert plain.optimizer.learning_rate == first.optimizer.learning_rate
            assert plain.optimizer.iterations == 0


def test_averages_of_an_optimizer_that_is_not_built_cannot_be_swapped(mirrored):
    with mirrored.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
        model.compile(zero(OPTIMIZERS.SGD(0.1, use_ema=True)), "mse")
    with pytest.raises(ValueError, match="SwapEMAWeights must be used when"):
        model.predict(np.ones([2, 3]), verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])


def test_a_model_in_json_can_be_read(mirrored):
    with mirrored.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
        model.compile(zero(OPTIMIZERS.Adam(0.25)), "mse")
        again = keras.models.model_from_json(model.to_json())
    assert type(again.optimizer) is type(model.optimizer)
    assert again.optimizer.learning_rate == 0.25
    alone = keras.models.model_from_json(model.to_json())
    assert type(alone.optimizer) is OPTIMIZERS.Adam  # a process without replicas


def test_weights_of_a_file_come_with_the_state_of_the_optimizer(mirrored, tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    path = tmp_path / "a.weights.h5"

    def trained(wrap, before):
        with mirrored.scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
            optimizer = wrap(OPTIMIZERS.Adam(0.1))
            model.compile(optimizer, "mse")
            model.optimizer.build(model.trainable_variables)
        before(model)
        model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
        assert model.optimizer is optimizer
        return model

    def plain(optimizer):
        return optimizer

    for first, second in ((zero, zero), (plain, zero), (zero, plain)):
        model = trained(first, lambda model: None)
        model.save_weights(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Skipping variable loading")
            resumed = trained(second, lambda model: model.load_weights(path))
        model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
        for found, expected in zip(resumed.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)


# --- Errors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: zero("adafactor"),
            (
                "zero: the optimizer Adafactor cannot be sharded: it uses more than one "
                "element of a variable"
            ),
        ),
        (lambda: zero(OPTIMIZERS.Lamb(1e-3)), "zero: the optimizer Lamb cannot be sharded"),
        (lambda: zero(OPTIMIZERS.Muon(1e-3)), "zero: the optimizer Muon cannot be sharded"),
        (
            lambda: zero(OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam())),
            "expected an optimizer inside the LossScaleOptimizer",
        ),
        (
            lambda: zero("adam", stage=3),
            (
                "stage: expected 1 or 2, received 3; tfdist.parallel.fsdp() shards the model's "
                "weights too"
            ),
        ),
        (lambda: zero("adam", sync=sync.LocalSGD()), "zero: sync: expected tfdist.sync.Gradients"),
        (
            lambda: zero("adam", sync=sync.Gradients(combine="replicas")),
            "zero: sync: expected tfdist.sync.Gradients",
        ),
        (
            lambda: zero("adam", sync=sync.Gradients(accumulate=2)),
            "zero: sync.accumulate: expected 1, received 2, which would keep whole gradients",
        ),
        (
            lambda: zero(OPTIMIZERS.Adam(clipnorm=1.0), sync=sync.Gradients(clip_norm=1.0)),
            "expected either sync.clip_norm or the optimizer",
        ),
    ],
)
def test_unsupported_optimizers_are_named(mirrored, make, text):
    with mirrored.scope(), pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)


class Adversaries(keras.Model):
    """Update two models, each by an optimizer of its own, and the first of them again."""

    def __init__(self, wrap):
        super().__init__()
        self.models = [
            keras.Sequential([keras.Input([2]), keras.layers.Dense(2, "tanh")]) for _ in range(2)
        ]
        self.optimizers = [wrap(keras.optimizers.Adam(0.1)) for _ in range(2)]

    def train_step(self, x):
        for i, sign in ((0, 1), (1, -1), (0, 1)):
            weights = self.models[i].trainable_weights
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(self.models[1](self.models[0](x)) ** 2)
            self.optimizers[i].apply(tape.gradient(loss, weights), weights)
        return {}


def test_a_step_applies_several_optimizers(mirrored):
    def weights(wrap):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = Adversaries(wrap)
            model.compile()
        x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
        model.fit(x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    for found, expected in zip(weights(zero), weights(lambda plain: plain), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_variables_and_gradients_that_do_not_fit_are_named(mirrored):
    with mirrored.scope():
        v = keras.Variable(np.ones(3, np.float32), name="v")
        counts = keras.Variable(np.ones(3, np.int32), dtype="int32", name="counts")
        with pytest.raises(
            ValueError,
            match=r"zero: counts: expected one of the dtypes float32, float64, bfloat16, "
            r"float16, .* received int32",
        ):
            zero("sgd").build([v, counts])
        optimizer = zero("sgd")
        optimizer.build([v])
    for more in ([], [[v]]):
        with pytest.raises(
            ValueError,
            match="zero: expected 1 gradients, one or None for each variable, received 2",
        ):
            tf.function(
                functools.partial(
                    mirrored.run,
                    functools.partial(optimizer.apply, [np.ones(3, np.float32)] * 2, *more),
                ),
                autograph=False,
            )()


def test_without_a_scope_a_process_has_one_replica(mirrored):
    with pytest.raises(
        ValueError,
        match=r"strategy: expected one replica in each process outside of the strategy's scope, "
        r"received 2\.",
    ):
        zero("sgd", strategy=mirrored)


def test_without_a_scope_a_deferred_model_needs_its_weights_too(one_device):
    with tfdist.parallel.deferred():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(zero("adam", strategy=one_device), "mse", jit_compile=False)
    with pytest.raises(ValueError, match=r"Call tfdist\.parallel\.fsdp\(model\)"):
        model.fit(np.ones([4, 3]), np.ones([4, 2]), verbose=0)


def test_scope_of_a_tfdist_strategy_is_required(mirrored):
    with pytest.raises(
        ValueError,
        match="zero: expected a strategy of tfdist, received none",
    ):
        zero("adam")
    with pytest.raises(ValueError, match="expected a synchronous strategy of tfdist"):
        tfdist.parallel.Group.of(tf.distribute.get_strategy(), "mine")


def test_norms_of_float64_gradients_are_computed_in_float64():
    group = types.SimpleNamespace(all_reduce=lambda x, name: x)
    for limit in ({"global_clipnorm": 1.0}, {"clipnorm": 1.0}):
        grads = [tf.constant([3e100, 4e100], tf.float64)]
        clipped = global_norm.clip(group, keras.optimizers.SGD(0.1, **limit), grads)
        np.testing.assert_allclose(clipped[0], [0.6, 0.8], rtol=1e-12)
