"""Test each hook into Keras and each private name of TensorFlow that tfdist relies on.

Each exists and does what tfdist expects. A failure after an upgrade says which name of
`keras_compat` to look after.
"""

import contextlib
import inspect
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp
from tfdist import keras_compat
from tfdist.keras_compat import parallel
from tfdist.train.hooks import Hooks


class Recorder:
    """Record the calls of an engine, and leave the work to Keras."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def ask(first, *args, **kwargs):
            self.asked.append(name)
            if name in keras_compat.MODEL_HOOKS or name == "apply":
                keras_method, *args = args
                return keras_method(first, *args, **kwargs)
            return first(*args, **kwargs)

        return ask


@pytest.fixture(scope="module", autouse=True)
def _installed():
    keras_compat.install()


@pytest.fixture
def recorded():
    """Return a strategy of TensorFlow's own whose engine is a Recorder."""
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    strategy.tfdist_engine = Recorder()
    return strategy


@pytest.fixture
def two():
    """Return TensorFlow's own strategy of two replicas, without an engine.

    Its sums need no collectives, whose keys strategies share.
    """
    return tf.distribute.MirroredStrategy(
        ["/cpu:0", "/cpu:1"], tf.distribute.ReductionToOneDevice()
    )


def compiled(strategy, optimizer=keras.optimizers.SGD):
    with strategy.scope():
        model = mlp()
        model.compile(optimizer(), CROSSENTROPY, metrics=["accuracy"])
    return model


def use(model, directory):
    """Call every hooked method, directly or through Keras."""
    x, y = data(24)
    model.fit(dataset(x, y), verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    model.train_on_batch(x, y)
    model.test_on_batch(x, y)
    model.predict_on_batch(x)
    model.save(directory / "model.keras")
    model.save_weights(directory / "model.weights.h5")
    model.load_weights(directory / "model.weights.h5")
    model.export(directory / "exported", verbose=False)


# --- Public methods of keras.Model ----------------------------------------------------------------
@pytest.mark.parametrize("name", keras_compat.MODEL_HOOKS)
def test_a_public_method_is_wrapped_once(name):
    method = getattr(keras.Model, name)
    assert not name.startswith("_")
    assert method.__code__.co_filename == keras_compat.__file__
    assert method.__wrapped__.__code__.co_filename != keras_compat.__file__
    keras_compat.install()
    assert getattr(keras.Model, name) is method


def test_every_hook_reaches_the_engine(recorded, tmp_path):
    use(compiled(recorded), tmp_path)
    hooks = {
        *keras_compat.MODEL_HOOKS,
        "apply",
        "scale_loss_for_distribution",
        "unscale_loss_for_distribution",
        "reduce_weighted_values",
    }
    assert hooks - set(recorded.tfdist_engine.asked) == set()


def test_keras_is_unchanged_without_an_engine(two, recorded, tmp_path):
    use(compiled(two), tmp_path)
    assert recorded.tfdist_engine.asked == []


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (
            "fit",
            {
                "x",
                "epochs",
                "initial_epoch",
                "steps_per_epoch",
                "batch_size",
                "validation_data",
                "validation_steps",
                "callbacks",
                "verbose",
            },
        ),
        ("evaluate", {"x", "steps", "batch_size", "callbacks", "verbose"}),
        ("predict", {"x", "steps", "batch_size", "callbacks", "verbose"}),
        ("make_train_function", {"force"}),
    ],
)
def test_arguments_that_the_engine_reads_have_their_names(method, names):
    assert names <= set(inspect.signature(inspect.unwrap(getattr(keras.Model, method))).parameters)


def test_fit_asks_eagerly_for_the_metrics_of_an_epoch_after_its_last_step(recorded):
    eager = []
    recorded.tfdist_engine.get_metrics_result = lambda model, keras_method: (
        eager.append(tf.executing_eagerly()) or keras_method(model)
    )
    compiled(recorded).fit(dataset(*data(24)), epochs=2, verbose=0)
    assert sum(eager) == 2


def test_fit_takes_the_validation_of_an_epoch_through_evaluate_with_its_callback_list(recorded):
    given = []

    def evaluate(model, keras_method, *args, **kwargs):
        given.append(kwargs["callbacks"])
        return keras_method(model, *args, **kwargs)

    recorded.tfdist_engine.evaluate = evaluate
    compiled(recorded).fit(dataset(*data(24)), validation_data=dataset(*data(12)), verbose=0)
    assert [isinstance(c, keras.callbacks.CallbackList) for c in given] == [True]


def test_fit_calls_the_train_function_with_the_iterator_of_the_distributed_data(recorded):
    """It does so once a step until the end; Keras learns shapes from the first element."""
    drawn = []

    class Feed:
        def __iter__(self):
            return iter([data(12)] * 4)

    def make_train_function(model, keras_method, force=False):
        def train(iterator):
            drawn.append(len(next(iterator)[0]))
            return {"loss": 1.0}

        model.train_function = train

    recorded.tfdist_engine.make_train_function = make_train_function
    recorded.experimental_distribute_dataset = lambda dataset, options=None: Feed()
    model = compiled(recorded)
    model.fit(dataset(*data(36)), verbose=0)
    assert drawn == [12, 12, 12]


# --- Losses ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    ["scale_loss_for_distribution", "unscale_loss_for_distribution", "reduce_weighted_values"],
)
def test_losses_look_their_functions_up_in_the_module_that_is_hooked(name, recorded):
    compiled(recorded).evaluate(*data(12), verbose=0)
    assert name in recorded.tfdist_engine.asked


def test_keras_divides_losses_by_replicas(two):
    """The engine's weights stand in for that."""
    losses = keras_compat._loss

    def replica():
        values = tf.constant([1.0, 3.0])
        return losses.reduce_weighted_values(values), losses.unscale_loss_for_distribution(
            tf.constant(1.0)
        )

    scaled, unscaled = two.run(replica)
    assert [float(v) for v in two.experimental_local_results(scaled)] == [1.0, 1.0]
    assert [float(v) for v in two.experimental_local_results(unscaled)] == [2.0, 2.0]


def test_a_mask_and_weights_merge_into_one_weight():
    weight = keras_compat.combined_weight(
        tf.constant([2.0, 4.0]), tf.constant([True, False]), "float32", "mean_with_sample_weight"
    )
    assert weight.numpy().tolist() == [2.0, 0.0]


# --- What replicas of a process share -------------------------------------------------------------
def test_what_replicas_call_reaches_the_engine(two):
    two.tfdist_engine = Recorder()
    with two.scope():
        metric = keras.metrics.Mean()
        variable = keras.Variable([1.0])
    two.tfdist_engine.asked.clear()

    def replica():
        context = tf.distribute.get_replica_context()
        context.all_gather(context.all_reduce("SUM", tf.ones([2])), axis=0)
        metric.update_state(1.0)
        assert keras.losses.Dice()(tf.ones([2, 1]), tf.ones([2, 1])) < 1e-6
        tf.function(lambda: tf.zeros([]))()
        with tf.GradientTape() as tape:
            x = tf.Variable(2.0)
            square = x * x
        assert tape.gradient(square, x) == 4.0
        before = two.tfdist_engine.asked.count("assign")
        variable.assign([2.0])
        variable.value.assign_add([1.0])
        variable.value.assign_sub([1.0])
        assert two.tfdist_engine.asked.count("assign") == before + 3

    two.run(replica)
    assert {hook for _, _, hook in keras_compat._replica_hooks()} <= set(two.tfdist_engine.asked)


def test_the_python_of_a_function_is_that_which_it_traces():
    class Layer:
        @tf.function
        def sign(self, x):
            if x > 0:  # AutoGraph
                return 1
            return -1

        @tf.function(jit_compile=True, autograph=False)
        def compiled(self, x):
            return x

    layer = Layer()
    inlined = tf.function(lambda x: keras_compat.python_of(layer.sign)(x), autograph=False)
    graph = inlined.get_concrete_function(tf.TensorSpec([])).graph
    assert [int(inlined(tf.constant(x))) for x in (2.0, -2.0)] == [1, -1]
    assert not [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert keras_compat.python_of(layer.compiled)(3) == 3
    assert keras_compat.is_compiled_by_xla(layer.compiled)
    assert not keras_compat.is_compiled_by_xla(layer.sign)


def test_each_replica_has_its_own_losses_of_layers(two):
    """They are kept in `_losses`, which a call of the outermost layer clears."""

    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(x))
            return x

    with two.scope():
        model = keras.Sequential([keras.Input([1]), Adds()])
    assert "_losses" in vars(model)

    def replica():
        context = tf.distribute.get_replica_context()
        model(tf.fill([1, 1], 1.0 + tf.cast(context.replica_id_in_sync_group, tf.float32)))
        context.all_reduce("SUM", tf.ones([]))  # the other replica goes on
        return sum(model.losses)

    def losses():
        found = tf.function(lambda: two.run(replica))()
        return [float(x) for x in two.experimental_local_results(found)]

    assert losses() == [2.0, 2.0]  # TensorFlow's own strategies are left as they are
    two.tfdist_engine = Hooks()
    assert losses() == [1.0, 2.0]
    model(tf.ones([1, 1]))
    assert [float(x) for x in model.losses] == [1.0]


# --- Optimizers -----------------------------------------------------------------------------------
@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_sum_over_replicas_is_left_out_inside_a_local_update(two, accumulate, scaled):
    """Keras consults `_all_reduce_sum_gradients`.

    With it replaced, each replica applies its own gradient, once.
    """
    keras_compat.allow_local_updates(two)
    with two.scope():
        weight = keras.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=accumulate)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
        optimizer.build([weight])

    def replica():
        local = int(
            tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        )
        with keras_compat.local_update(optimizer, local):
            optimizer.apply([tf.constant([4.0 if scaled else 1.0])], [weight])

    step = tf.function(lambda: two.run(replica))
    for _ in range(2):
        step()
    copies = [float(v.numpy()[0]) for v in two.experimental_local_results(weight.value)]
    assert copies == [-2.0 if accumulate is None else -1.0] * 2
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    assert [int(v.numpy()) for v in two.experimental_local_results(inner._iterations.value)] == [
        2,
        2,
    ]
    assert "_all_reduce_sum_gradients" not in vars(optimizer)
    assert "assign_add" not in vars(optimizer._iterations)


def test_without_the_hook_keras_sums_over_replicas(two):
    with two.scope():
        weight = keras.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])
    tf.function(lambda: two.run(lambda: optimizer.apply([tf.constant([1.0])], [weight])))()
    assert float(weight.numpy()[0]) == -2.0


def test_merge_call_is_off_inside_a_local_update_only(two):
    keras_compat.allow_local_updates(two)
    assert two.extended._use_merge_call()
    with keras_compat.local_update(keras.optimizers.SGD(), None):
        assert not two.extended._use_merge_call()
        others = []
        thread = threading.Thread(target=lambda: others.append(two.extended._use_merge_call()))
        thread.start()
        thread.join()
        assert others == [True]
    assert two.extended._use_merge_call()


# --- Variables ------------------------------------------------------------------------------------
def test_a_replicas_copy_is_not_cast_under_mixed_precision(two):
    seen = []

    class Layer(keras.layers.Dense):
        def call(self, inputs):
            if not tf.distribute.in_cross_replica_context():
                copy = keras_compat.local_component(self.kernel, len(seen))
                seen.append((self.kernel.value.dtype, copy.dtype, copy.device[-5:]))
            return super().call(inputs)

    with two.scope():
        layer = Layer(1, dtype="mixed_bfloat16")
        layer.build((None, 2))
    two.run(lambda: layer(tf.ones((1, 2))))
    assert seen == [(tf.bfloat16, tf.float32, f"CPU:{replica}") for replica in range(2)]


@pytest.mark.parametrize("inside", [False, True])
def test_variables_with_copies_convert_to_numbers_and_arrays(two, inside):
    with two.scope():
        rate = keras.Variable(0.25, name="rate")
        kernel = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
        count = keras.Variable(3, dtype="int64", aggregation="only_first_replica")
        total = keras.metrics.Sum().total
    assert all(len(two.experimental_local_results(v.value)) == 2 for v in (rate, kernel, total))
    with two.scope() if inside else contextlib.nullcontext():
        assert (float(rate), int(count), float(total)) == (0.25, 3, 0.0)
        assert (float(rate.value), int(count.value), complex(rate.value)) == (0.25, 3, 0.25)
        assert f"{rate}" == "<Variable path=rate, shape=(), dtype=float32, value=0.25>"
        assert f"{float(rate):.3f} {rate.numpy():.3f}" == "0.250 0.250"
        assert float(rate * 0.5) == float(0.5 * rate) == 0.125
        assert float(+rate) == -float(-rate) == 0.25
        assert int(count + 1) == 4
        for array in (np.asarray(rate), np.asarray(rate.value)):
            assert (array.shape, array.dtype, array) == ((), np.float32, 0.25)
        np.testing.assert_array_equal(np.asarray(kernel.value, "int32"), [[1, 2], [3, 4]])
        np.testing.assert_array_equal(kernel[0], [1, 2])
        assert float(kernel[1, 0]) == 3.0


@pytest.mark.parametrize("inside", [True, False])
def test_keras_assigns_a_sum_in_parts_and_other_variables_whole(two, inside):
    with two.scope():
        total = keras.metrics.Mean().total
        weight = keras.Variable([1.0, 2.0])
    with two.scope() if inside else contextlib.nullcontext():
        total.assign(6)
        weight.assign([3, 4])
        assert [c.numpy() for c in keras_compat.copies(total)] == [3, 3]
        assert [c.numpy().tolist() for c in keras_compat.copies(weight)] == [[3, 4], [3, 4]]
        total.assign_add(4.0)  # reads the sum first
        assert float(total.value) == 10


def test_a_loop_outside_of_replicas_is_explained(mirrored):
    with mirrored.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([2, 3])))
        with pytest.raises(ValueError, match=r"^.*kernel.*: expected gradients .* use tfdist\.l"):
            tape.gradient(loss, model.trainable_weights)
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        v = tf.Variable(1.0)
        with pytest.raises(ValueError, match="not available outside the replica context"):
            _ = v.handle


def test_central_storage_keeps_a_copy_of_local_state_on_each_replica():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0")
    keras_compat.keep_state_per_replica(strategy)
    with strategy.scope():
        weight = keras.Variable([1.0])
        metric = keras.metrics.Sum()
        optimizer = keras.optimizers.Adam()
        optimizer.build([weight])
        statistics = keras.Variable([1.0], trainable=False)
    counts = [
        len(strategy.experimental_local_results(v.value))
        for v in (weight, metric.total, statistics)
    ]
    assert counts == [1, 2, 2]
    slots = [v for v in optimizer.variables if tuple(v.shape) == (1,)]
    assert slots
    assert all(len(strategy.experimental_local_results(v.value)) == 1 for v in slots)

    def replica():
        metric.update_state(
            [
                1.0
                + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            ]
        )

    tf.function(lambda: strategy.run(replica))()
    assert [float(v) for v in strategy.experimental_local_results(metric.total.value)] == [1.0, 2.0]


# --- TensorFlow's state ---------------------------------------------------------------------------
def test_global_seed_is_detected():
    keras.utils.set_random_seed(3)
    assert keras_compat.global_seed()
    tf.random.set_seed(None)
    assert not keras_compat.global_seed()


def test_start_of_tensorflow_is_detected(run_python):
    code = (
        "from tfdist import keras_compat as k; import tensorflow as tf; "
        "tf.config.list_physical_devices();"
        "print(k.runtime_initialized()); print(k.global_seed()); tf.constant(1); "
        "print(k.runtime_initialized())"
    )
    assert run_python(code).stdout.split() == ["False", "None", "True"]


def test_profiling_is_detected(tmp_path):
    assert keras_compat.profiles(keras.callbacks.TensorBoard(str(tmp_path), profile_batch=2))
    assert not keras_compat.profiles(keras.callbacks.TensorBoard(str(tmp_path)))


def test_state_of_layers_is_distinguished_from_frozen_weights():
    frozen = keras.layers.Dense(2, trainable=False)
    model = keras.Sequential([keras.Input((3,)), frozen, keras.layers.BatchNormalization()])
    state = keras_compat.layer_state(model)
    assert [v.name for v in state] == ["moving_mean", "moving_variance"]
    assert {id(v) for v in frozen.weights} <= {id(v) for v in model.non_trainable_weights}


def test_strategy_of_an_optimizers_scope_is_returned():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        inside = keras.optimizers.SGD()
    assert keras_compat.strategy_of(inside) is strategy
    assert keras_compat.strategy_of(keras.optimizers.SGD()) is not strategy


def test_the_length_of_a_distributed_data_set_can_be_hidden(two):
    dataset = two.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.range(4).batch(1)
    )
    assert dataset.cardinality == 4
    adapter = keras.src.trainers.data_adapters.get_data_adapter(keras_compat.hide_length(dataset))
    assert adapter.num_batches is None
    assert sum(1 for _ in dataset) == 4 // two.num_replicas_in_sync
    assert keras_compat.hide_length(3) == 3


# --- Callbacks ------------------------------------------------------------------------------------
def test_state_of_keras_callbacks_has_the_listed_names(two, tmp_path):
    saves = keras.callbacks.ModelCheckpoint(
        tmp_path / "{batch}.weights.h5", save_weights_only=True, save_freq=5
    )
    board = keras.callbacks.TensorBoard(tmp_path / "logs", update_freq=1)
    x, y = data(24)
    swaps = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    callbacks = [saves, board, swaps]
    compiled(two, lambda: keras.optimizers.SGD(use_ema=True)).fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        validation_data=(x, y),
        validation_batch_size=12,
        verbose=0,
        callbacks=callbacks,
    )
    counters = [
        [getattr(callback, name) for name in names]
        for callback, (_, names) in zip(callbacks, keras_compat.CALLBACK_STATE, strict=True)
    ]
    assert counters == [[1, 2], [6, 4], [True]]


def test_the_writers_of_logs_are_found_and_made_again(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    model = mlp()
    model.compile("sgd", CROSSENTROPY)
    x, y = data(24)
    for _ in range(2):
        model.fit(x, y, validation_data=(x, y), verbose=0, callbacks=[board])
        assert sorted(keras_compat.log_writers(board)) == ["train", "val"]
        for writer in keras_compat.log_writers(board).values():
            writer.flush()
            writer.close()
        keras_compat.log_writers(board).clear()
    assert len(list((tmp_path / "train").iterdir())) == 2


def test_an_error_in_fit_leaves_no_condition_on_summaries(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=7)
    model = mlp()
    model.compile("sgd", CROSSENTROPY)
    x, y = data(24)
    with pytest.raises(ZeroDivisionError):
        model.fit(
            x,
            y,
            verbose=0,
            callbacks=[
                board,
                keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0),
            ],
        )
    other = tf.summary.create_file_writer(str(tmp_path / "other"))
    # Else the function is not needed; the version of Keras decides at which steps it would write
    # nothing.
    assert board._prev_summary_state
    keras_compat.leave_summaries(board)
    with other.as_default(step=0):
        assert tf.summary.should_record_summaries()


def test_a_process_trains_with_one_mirrored_strategy_after_the_other():
    for layers in (1, 2):
        with tfdist.make_strategy("mirrored", devices=2).scope():
            model = keras.Sequential(
                [
                    keras.Input([3]),
                    *[
                        keras.layers.Dense(3, use_bias=False, kernel_initializer="ones")
                        for _ in range(layers)
                    ],
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(np.ones([4, 3]), np.zeros([4, 3]), verbose=0)
    assert model.optimizer.iterations.numpy() == 1


# --- Sharded optimizers ---------------------------------------------------------------------------
def test_clipping_replaces_an_optimizers_clip_function_inside_the_context():
    variable = keras.Variable([1.0, 1.0])
    optimizer = keras.optimizers.SGD(1.0, clipvalue=0.5)
    optimizer.build([variable])
    with parallel.clipping(optimizer, lambda grads: [2 * g for g in grads]):
        optimizer.apply([tf.constant([1.0, 0.0])])
    np.testing.assert_array_equal(variable, [-1.0, 1.0])
    optimizer.apply([tf.constant([1.0, 0.0])])
    np.testing.assert_array_equal(variable, [-1.5, 1.0])
    assert [
        g.numpy().tolist() for g in parallel.clip_elementwise(optimizer, [tf.constant([3.0, -3.0])])
    ] == [[0.5, -0.5]]


@pytest.mark.parametrize("by", ["name", "variable"])
def test_shards_are_excluded_from_weight_decay_with_their_variables(by):
    variables = [keras.Variable([1.0, 1.0], name=name) for name in ("kernel", "bias")]
    shards = [keras.Variable([1.0], name=name) for name in ("kernel", "bias")]
    optimizer = keras.optimizers.SGD(0.1, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(
        **({"var_names": ["bias"]} if by == "name" else {"var_list": variables[1:]})
    )
    parallel.copy_weight_decay_exclusions(optimizer, variables, optimizer, shards)
    optimizer.build(shards)
    optimizer.apply([tf.zeros([1])] * 2)
    np.testing.assert_allclose([v.numpy()[0] for v in shards], [0.9, 1.0])


def test_moving_averages_are_found():
    variable = keras.Variable([2.0])
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer.build([variable])
    for _ in range(2):
        optimizer.apply([tf.ones([1])])
    np.testing.assert_allclose([v.numpy() for v in parallel.moving_averages(optimizer)], [[0.5]])


# --- Scopes of strategies -------------------------------------------------------------------------
def test_a_scope_can_be_left_and_is_entered_again(two):
    with two.scope():
        with keras_compat.leave_scope():
            assert not tf.distribute.has_strategy()
            outside = keras.Variable([1.0])
            metric = keras.metrics.Mean()
        with pytest.raises(ZeroDivisionError), keras_compat.leave_scope():
            raise ZeroDivisionError
        assert tf.distribute.get_strategy() is two
        inside = keras.Variable([1.0])
    assert not tf.distribute.has_strategy()
    with keras_compat.leave_scope():
        assert not tf.distribute.has_strategy()
    counts = [len(two.experimental_local_results(v.value)) for v in (outside, metric.total, inside)]
    assert counts == [1, 1, 2]


def test_keras_makes_variables_when_it_saves_an_optimizer():
    """Else the chief need not leave the scope to save."""
    made = []

    def creator(next_creator, **kwargs):
        made.append(kwargs.get("name"))
        return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        keras.src.saving.saving_lib.get_attr_skipset("Optimizer")
    assert made


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "bfloat16", "float32"])
def test_initial_values_are_broadcast_in_a_type_that_collectives_take(dtype):
    """The workers of tests/cluster/test_training.py broadcast some."""
    sent = []
    contexts = []

    class Extended:
        def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
            def initial_value():
                value = kwargs["initial_value"]
                sent.append(tf.convert_to_tensor(value() if callable(value) else value))
                assert sent[-1].dtype == kwargs["dtype"]
                return sent[-1]

            return initial_value

    class Strategy:
        extended = Extended()

    @contextlib.contextmanager
    def during():
        contexts.append(len(sent))
        yield

    drawn = []

    def draw():
        drawn.append(tf.cast([3, 100], dtype))
        return drawn[-1]

    keras_compat.broadcast_initial_values(Strategy, during, lambda value: None)
    received = Strategy.extended._get_variable_creator_initial_value(
        replica_id=0, device="/cpu:0", primary_var=None, initial_value=draw, dtype=dtype
    )()
    (value,) = drawn  # a second one may be another
    assert received.dtype == dtype
    np.testing.assert_array_equal(received, value)
    assert sent[0].dtype in (tf.int32, tf.int64, tf.float32)
    assert contexts == [0]
    with parallel.without_broadcast():
        own = Strategy.extended._get_variable_creator_initial_value(
            replica_id=0, device="/cpu:0", primary_var=None, initial_value=value, dtype=dtype
        )()
    assert own.dtype == dtype
    np.testing.assert_array_equal(own, value)
    assert len(sent) == 1


# --- Data without a strategy ----------------------------------------------------------------------
def test_keras_asks_the_default_strategy_for_its_data():
    """Keras reads the data sets that a feed gives it, if the model has no strategy."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    rows = dataset(np.ones((6, 2)), np.ones((6, 1)), batch=2)
    assert not keras_compat.has_strategy(model)
    with keras_compat.fed_by(lambda given: given.map(lambda x, y: (x, 2.0 * y))):
        assert model.fit(rows, verbose=0).history["loss"] == [4.0]
    assert model.fit(rows, verbose=0).history["loss"] == [1.0]


def test_a_callback_runs_a_fit_that_has_no_engine(one_device):
    ran = []

    class Runs(keras.callbacks.Callback):
        def run_fit(self, model, keras_fit, *args, **kwargs):
            ran.append(model)
            return keras_fit(model, *args, **kwargs)

    rows = dataset(np.ones((4, 2)), np.ones((4, 1)), batch=2)
    for scope in (one_device.scope(), contextlib.nullcontext()):
        with scope:
            model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
        model.fit(rows, verbose=0, callbacks=[Runs()])
    assert ran == [model]


def test_counters_of_passes_are_found_through_other_data_sets():
    numbers = tfdist.data.pipeline((np.arange(8.0), np.arange(8.0)), 2)
    other = tfdist.data.pipeline((np.arange(8.0), np.arange(8.0)), 2)
    made = tf.data.Dataset.zip(numbers.map(lambda x, y: x).prefetch(1), other.repeat(2))
    counters = keras_compat.pass_counters(made)
    assert {id(counter) for counter in counters} == {id(numbers.epochs), id(other.epochs)}
    assert keras_compat.pass_counters(numbers.cache().prefetch(1)) == []
    assert keras_compat.pass_counters(tf.data.Dataset.range(3)) == []
