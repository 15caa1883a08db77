"""Test that `tfdist.loops` trains by a loss or a custom loop as `fit` does.

Two replicas train as one.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import loops

ROWS = 25
GLOBAL_BATCH = 8  # three full batches, and one of one row, of which a second replica has none
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def arrays(rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.integers(0, 3, rows)


@functools.cache
def made(rows, **kwargs):
    return tfdist.data.pipeline(arrays(rows), GLOBAL_BATCH, seed=3, **kwargs)


def batches(rows=ROWS, **kwargs):
    """Return a data pipeline, which takes long to make, and begins anew each time."""
    dataset = made(rows, **kwargs)
    dataset.epochs.next = 0
    return dataset


def build(out=3):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.Dense(8, "relu"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(out, use_bias=False),
        ]
    )


def small():
    """Return a model whose statistics are those of each replica."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.BatchNormalization(center=False, scale=False),
            keras.layers.Dense(3, use_bias=False),
        ]
    )


def crossentropy(model, x, y, training):
    logits = model(x, training=training)
    hits = tf.cast(tf.equal(tf.argmax(logits, 1), tf.cast(y, tf.int64)), tf.float32)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, logits), {
        "accuracy": tf.reduce_mean(hits)
    }


def test_a_loss_may_draw_without_a_seed(mirrored, one_device):
    """Each step and each replica draws its own numbers, and a run repeats them."""

    def noisy(model, x, y, training):
        noise = keras.random.normal(keras.ops.shape(x))
        return tf.reduce_mean(model(x, training=training)) + tf.reduce_mean(noise)

    def losses(strategy):
        keras.utils.clear_session()
        return trained(strategy, noisy, make=small, optimizer=lambda: keras.optimizers.SGD(0.0))[0][
            "loss"
        ]

    alone = losses(one_device)
    assert alone[0] != alone[1]
    assert losses(one_device) == alone
    assert losses(mirrored) != alone


def dice(model, x, y, training):
    """Return a loss of Keras in which rows depend on each other."""
    return keras.losses.Dice()(y, tf.nn.sigmoid(model(x, training=training))[:, 0])


def sgd():
    return keras.optimizers.SGD(0.5)


def test_losses_over_the_batch_see_all_rows(mirrored, one_device):
    for run in trained, walked:
        alone, weights = run(one_device, dice, optimizer=sgd)
        losses, of_two = run(mirrored, dice, optimizer=sgd)
        one, two = (x["loss"] if run is trained else x for x in (alone, losses))
        np.testing.assert_allclose(two, one, **TOLERANCE)
        same_arrays(weights, of_two)


def fitted(strategy, make=build, optimizer=lambda: keras.optimizers.Adam(0.01), **kwargs):
    with strategy.scope():
        model = make()
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(batches(), epochs=2, verbose=0, **kwargs).history
    return history, model.get_weights()


def trained(
    strategy,
    loss=crossentropy,
    data=batches,
    make=build,
    optimizer=lambda: keras.optimizers.Adam(0.01),
    **kwargs,
):
    state = loops.prepare_training(make, data, strategy, optimizer)
    history = loops.train(loss, state, **{"epochs": 2, **kwargs})
    return history, [v.numpy() for v in state.learner.variables]


def walked(
    strategy,
    loss=crossentropy,
    compiled=True,
    make=build,
    optimizer=lambda: keras.optimizers.Adam(0.01),
):
    """Return the losses of a custom loop's steps, and its final weights."""
    state = loops.prepare_training(make, batches, strategy, optimizer, compiled=compiled)

    @state.step
    def step(rows):
        gradients, logs = loops.train_step(loss, state, rows)
        loops.update(state, gradients)
        return logs

    losses = []
    for _ in range(2):
        losses += [float(step(batch)["loss"]) for batch in state.batches]
        state.sync_replicas()
    return losses, [v.numpy() for v in state.learner.variables]


def same(one, other):
    assert set(one[0]) == set(other[0])
    for name, values in one[0].items():
        np.testing.assert_allclose(other[0][name], values, **TOLERANCE, err_msg=name)
    same_arrays(one[1], other[1])


def same_arrays(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(b, a, **TOLERANCE)


# --- As fit, and N as one -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def plain(one_device):
    """Return history and weights of `fit` on one device."""
    return fitted(one_device, validation_data=batches(9, shuffle=False))


@pytest.mark.parametrize("where", ["one_device", "mirrored"])
def test_train_equals_fit_on_the_same_batches(request, plain, where):
    """A replica without rows, in the last batch of training or validation, changes nothing."""
    result = trained(request.getfixturevalue(where), validation=batches(9, shuffle=False))
    assert all(np.isfinite(v).all() for v in result[1])
    same(plain, result)


def test_custom_loop_equals_fit(one_device, mirrored, plain):
    _, expected = plain
    losses, weights = walked(mirrored)
    assert len(losses) == 8
    same_arrays(expected, weights)
    uncompiled = walked(one_device, compiled=False)
    np.testing.assert_allclose(uncompiled[0], losses, **TOLERANCE)
    same_arrays(expected, uncompiled[1])


def autoencoder():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(2, "tanh"), keras.layers.Dense(4)]
    )


def reconstruction(model, batch):
    return tf.reduce_mean(tf.square(model(batch) - batch))


def teacher_and_student():
    keras.utils.set_random_seed(1)
    teacher, student = (
        keras.Sequential([keras.Input([4]), keras.layers.Dense(3)]) for _ in range(2)
    )
    teacher.trainable = False
    return {"teacher": teacher, "student": student}


def semi_supervised(models, batch, training):
    """Return the loss of rows that have one labelled example and two unlabelled ones."""
    known = models["student"](batch["x"])
    supervised = tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(batch["y"], known, from_logits=True)
    )
    views = [models["student"](batch["others"][:, i]) for i in range(2)]
    taught = models["teacher"](batch["others"][:, 0], training=False)
    consistency = tf.reduce_mean(tf.square(views[0] - views[1])) + tf.reduce_mean(
        tf.square(views[0] - taught)
    )
    return supervised + (0.5 * consistency if training else 0.0), {"supervised": supervised}


def rows_of_three():
    x, y = arrays()
    parts = tf.data.Dataset.zip(
        (
            tf.data.Dataset.from_tensor_slices((x, y)),
            tf.data.Dataset.from_tensor_slices(np.stack([x[::-1], -x], 1)),
        )
    )
    return parts.map(lambda known, others: {"x": known[0], "y": known[1], "others": others}).batch(
        GLOBAL_BATCH
    )


KINDS = {
    "unsupervised": (reconstruction, lambda: batches(labels=False), autoencoder),
    "semi-supervised": (semi_supervised, rows_of_three, teacher_and_student),
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_every_kind_are_the_same_on_two_replicas(one_device, mirrored, kind):
    loss, data, make = KINDS[kind]
    one = trained(one_device, loss, data, make)
    assert one[0]["loss"][-1] < one[0]["loss"][0]
    same(one, trained(mirrored, loss, data, make))


def test_a_masked_loss_of_keras_has_the_divisor_of_the_global_batch(one_device, mirrored):
    def loss(model, x, y):
        weights = tf.cast(x[:, 0] > 0, tf.float32)
        loss_function = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        return loss_function(y, model(x, training=False), sample_weight=weights)

    same(trained(one_device, loss, make=small), trained(mirrored, loss, make=small))


# --- Policies, ZeRO, snapshots --------------------------------------------------------------------
POLICIES = {
    "gradients": (
        tfdist.sync.Gradients(combine="sum", accumulate=2, comm_dtype="bfloat16", clip_norm=1.0),
        None,
    ),
    "local": (tfdist.sync.LocalSGD(every=3, warmup=1), None),
    "zero": (None, lambda: tfdist.parallel.zero(keras.optimizers.Adam(0.01))),
}


@pytest.fixture
def under(mirrored):
    """Put the strategy of two replicas under a policy until the test ends."""
    before = mirrored.tfdist_engine.aggregation.policy

    def use(policy):
        mirrored.tfdist_engine.use(policy or before)
        return mirrored

    yield use
    mirrored.tfdist_engine.use(before)


@pytest.mark.parametrize("name", POLICIES)
def test_both_loops_follow_the_policy_as_fit_does(under, name):
    policy, optimizer = POLICIES[name]
    strategy = under(policy)
    given = {"make": small, **({"optimizer": optimizer} if optimizer else {})}
    expected = fitted(strategy, **given)
    same(expected, trained(strategy, **given))
    same_arrays(expected[1], walked(strategy, **given)[1])


def test_losses_of_local_sgd_see_the_replicas_own_rows_in_both_loops(under):
    strategy = under(tfdist.sync.LocalSGD(every=3))
    same_arrays(trained(strategy, dice, optimizer=sgd)[1], walked(strategy, dice, optimizer=sgd)[1])


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise InterruptedError


def test_training_resumes_from_its_snapshot(one_device, tmp_path):
    def run(*callbacks):
        return trained(
            one_device,
            make=small,
            epochs=3,
            schedule=lambda step: 0.02 / (1.0 + step),
            callbacks=callbacks,
        )

    def backup():
        return tfdist.BackupAndRestore(tmp_path / "backup", save_freq=2)

    with pytest.raises(InterruptedError):
        run(backup(), Stop())
    same(run(), run(backup()))


# --- Schedules, models, data ----------------------------------------------------------------------
def test_a_schedule_is_a_function_of_the_step(one_device):
    state = loops.prepare_training(small, batches, one_device, "sgd")
    rates = []
    record = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: rates.append(float(state.optimizer.learning_rate))
    )
    loops.train(
        crossentropy,
        state,
        epochs=2,
        schedule=lambda step: tf.where(step < 5, 0.1, 0.1 / (1.0 + step)),
        callbacks=[record],
    )
    np.testing.assert_allclose(rates, [0.1, 0.1 / 9], rtol=1e-6)
    before = [v.numpy() for v in state.variables]
    loops.train(crossentropy, state, steps_per_epoch=2, schedule=lambda step: 0.0 * step)
    same_arrays(before, [v.numpy() for v in state.variables])
    assert int(state.optimizer.iterations) == 10


def test_second_call_continues_without_retracing(one_device, plain):
    traces = []

    def loss(model, x, y, training):
        traces.append(training)
        return crossentropy(model, x, y, training)

    state = loops.prepare_training(build, batches, one_device, lambda: keras.optimizers.Adam(0.01))
    loops.train(loss, state)
    seen = len(traces)
    loops.train(loss, state)
    assert len(traces) == seen
    same_arrays(plain[1], [v.numpy() for v in state.learner.variables])


def test_a_model_made_elsewhere_is_copied(mirrored):
    model = build()
    model.layers[0].trainable = False
    before = model.get_weights()
    with mirrored.scope():  # which does not make it one of the strategy's
        state = loops.prepare_training(model, batches, mirrored, keras.optimizers.SGD(0.1))
    same_arrays(before, state.model.get_weights())
    assert len(state.variables) == 3
    loops.train(crossentropy, state)
    same_arrays(before, model.get_weights())
    assert np.abs(state.model.get_weights()[-1] - before[-1]).max() > 1e-3


def test_an_optimizer_made_elsewhere_is_copied(mirrored):
    """The copy includes what it does not decay, which no config of an optimizer has.

    The model may be made elsewhere, too.
    """
    model = build()
    optimizer = keras.optimizers.AdamW(1e-9, weight_decay=1e8)
    optimizer.exclude_from_weight_decay(var_names=["bias"], var_list=[model.layers[0].kernel])
    for v in model.trainable_variables:
        v.assign(tf.ones_like(v))
    state = loops.prepare_training(model, batches, mirrored, optimizer)
    loops.train(crossentropy, state, steps_per_epoch=1)
    decayed = [bool(v.numpy().max() < 0.95) for v in state.variables]
    assert decayed == [False, False, True, True, True]
    model.optimizer = optimizer
    optimizer.build(model.trainable_variables)
    with pytest.raises(
        ValueError,
        match=(
            r"optimizer: .* was made outside of the strategy's scope and has trained another "
            r"model\. Pass a new one"
        ),
    ):
        loops.prepare_training(build, batches, mirrored, optimizer)


def encoder_and_autoencoder():
    encoder = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, "tanh")], name="encoder")
    return {"encoder": encoder, "autoencoder": [keras.Sequential([encoder, keras.layers.Dense(4)])]}


def test_models_that_share_layers_are_made_in_a_function(mirrored):
    def loss(models, batch):
        return tf.reduce_mean(tf.square(models["autoencoder"][0](batch) - batch))

    with pytest.raises(
        ValueError,
        match=(
            r"model\['encoder'\] and model\['autoencoder'\]\[0\] share .*kernel.*Pass the function"
        ),
    ):
        loops.prepare_training(encoder_and_autoencoder(), batches, mirrored, "sgd")
    state = loops.prepare_training(
        encoder_and_autoencoder, lambda: batches(labels=False), mirrored, "sgd"
    )
    before = state.model["encoder"].get_weights()[0]
    loops.train(loss, state, steps_per_epoch=1)
    assert np.abs(state.model["encoder"].get_weights()[0] - before).max() > 1e-5


LONELY = """
import keras, tensorflow as tf, tfdist
from tfdist import loops
from tfdist.parallel.placement import Placement
from tfdist.train.health.watchdog import Watchdog

strategy = tfdist.make_strategy("one_device", devices="cpu")
strategy.tfdist_engine.watchdog = Watchdog(1.6, Placement(workers=2))

def loss(model, x, y):
    other = tf.raw_ops.CollectiveReduce(input=[1.0], group_size=2, group_key=1, instance_key=1, merge_op="Add", final_op="Id", subdiv_offsets=[0])
    return tf.reduce_mean(model(x) - y) + other[0]

def build():
    return keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])

state = loops.prepare_training(build, (tf.ones([4, 1]), tf.ones([4, 1])), strategy, "sgd", global_batch=2, compiled=False)
try:
    loops.train(loss, state)
except TimeoutError as error:
    print("ended:", error)
"""  # noqa: E501


def test_loss_that_waits_for_a_lost_worker_ends(run_python):
    """Run in a process of its own, as what ends one wait ends all later ones."""
    done = run_python(LONELY)
    assert done.stdout.startswith("ended: worker:0 waited too long for worker:1"), done.stderr


def test_evaluate_is_the_mean_over_the_examples(mirrored):
    state = loops.prepare_training(small, batches, mirrored)
    x, y = arrays()
    metrics = loops.evaluate(crossentropy, state, batches())
    expected = crossentropy(state.model, x, y, training=False)
    np.testing.assert_allclose(
        [metrics["loss"], metrics["accuracy"]],
        [float(expected[0]), float(expected[1]["accuracy"])],
        **TOLERANCE,
    )


def test_python_values_are_read_in_eager_mode(one_device):
    seen = []

    def loss(model, batch):
        value = reconstruction(model, batch[0])
        seen.append(float(value))
        return value

    state = loops.prepare_training(autoencoder, batches, one_device, "sgd", compiled=False)
    history = loops.train(loss, state, epochs=1)
    assert len(seen) == 1 + 4  # the first call learns the names of metrics
    np.testing.assert_allclose(
        history["loss"][0], np.average(seen[1:], weights=[8, 8, 8, 1]), rtol=1e-5
    )


# --- Errors ---------------------------------------------------------------------------------------
def uneven():
    return tf.data.Dataset.from_tensors((tf.zeros([4, 4]), tf.zeros([8, 4]))).repeat(2)


PREPARE = {
    "model: expected a keras.Model": {"model": "mlp"},
    "model: expected a built model": {"model": lambda: keras.Sequential([keras.layers.Dense(1)])},
    "all of its variables are frozen": {
        "model": lambda: keras.Sequential([keras.Input([4]), keras.layers.Flatten()])
    },
    "data: expected a tf.data.Dataset of global batches.*ndarray.*global_batch=": {
        "data": np.zeros(3)
    },
    "one is a scalar. Call batch": {"data": tf.data.Dataset.range},
    "optimizer: expected a Keras optimizer.*'adma'": {"optimizer": "adma"},
    "optimizer: .* received None": {"optimizer": None},
    "devices: expected a synchronous strategy of tfdist.*DefaultDistributionStrategy": {
        "devices": tf.distribute.get_strategy
    },
    "sync: expected None with a strategy": {"sync": "bfloat16"},
    "compiled: expected True with 2 replicas": {"compiled": False},
}


@pytest.mark.parametrize("message", PREPARE)
def test_bad_arguments_of_prepare_training(mirrored, message):
    given = dict(PREPARE[message])
    if "devices" in given:
        given["devices"] = given["devices"]()
    if given.get("data") is tf.data.Dataset.range:
        given["data"] = tf.data.Dataset.range(8)
    with pytest.raises(ValueError, match=message):
        loops.prepare_training(
            **{"model": build, "data": batches, "devices": mirrored, "optimizer": "sgd", **given}
        )


TRAIN = {
    "loss: expected a function.*'mse'": {"loss": "mse"},
    "Huber takes no model. For a loss of Keras, pass lambda": {"loss": keras.losses.Huber()},
    "takes no batch beside the model": {"loss": lambda model: 0.0},
    "takes 3 arguments after the model, but a batch has 2 parts": {
        "loss": lambda model, x, y, weight: 0.0
    },
    "returned the loss of shape .*expected a scalar": {
        "loss": lambda model, x, y: tf.square(model(x))
    },
    "expected a scalar of a floating dtype.*int32": {
        "loss": lambda model, x, y: tf.reduce_sum(tf.shape(x))
    },
    "returned None as the loss": {"loss": lambda model, x, y: None},
    'no metric named "loss"': {
        "loss": lambda model, x, y: (tf.reduce_mean(model(x)), {"loss": 0.0})
    },
    "returned the metric rows of shape": {
        "loss": lambda model, x, y: (tf.reduce_mean(model(x)), {"rows": x})
    },
    "depends on the model's 5 trainable variables": {"loss": lambda model, x, y: tf.reduce_mean(x)},
    "epochs: expected a number, 1 or more; received 0": {"epochs": 0},
    "steps_per_epoch: expected": {"steps_per_epoch": -1},
    "schedule: expected a function of the step": {"schedule": 0.1},
    "keras.ops.where instead of if": {"schedule": lambda step: 0.1 if step < 3 else 0.01},
    "validation: expected a tf.data.Dataset": {"validation": (1, 2)},
    "state: expected a State from tfdist.loops.prepare_training": {"state": None},
}


@pytest.fixture(scope="module")
def prepared(mirrored):
    return loops.prepare_training(build, batches, mirrored, "sgd")


@pytest.mark.parametrize("message", TRAIN)
def test_bad_arguments_of_train(prepared, message):
    given = {"loss": crossentropy, "state": prepared, **TRAIN[message]}
    with pytest.raises(ValueError, match=message):
        loops.train(**given)


def test_parts_of_a_batch_have_equally_many_rows(mirrored):
    state = loops.prepare_training(build, uneven, mirrored, "sgd")
    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError),
        match="expected equally many rows in all parts of a batch",
    ):
        loops.train(lambda model, x, y: tf.reduce_mean(model(x)), state)


def test_steps_are_called_in_replicas(prepared):
    state = prepared
    with pytest.raises(ValueError, match="train_step: expected a call in replica context"):
        loops.train_step(crossentropy, state, arrays())
    with pytest.raises(ValueError, match="update: expected a call in replica context"):
        loops.update(state, [])
    with pytest.raises(
        ValueError, match=r"step: expected a batch from state\.batches, received tuple"
    ):
        state.step(lambda rows: None)(arrays())
    with pytest.raises(ValueError, match="expected 5 gradients"):
        state.step(lambda rows: loops.update(state, []))(next(iter(state.batches)))
    with pytest.raises(ValueError, match="return a scalar or a nest of scalars"):
        state.step(lambda rows: rows)(next(iter(state.batches)))
