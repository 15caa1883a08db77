"""Test that stages on several devices train as the model they were cut from."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.interrupts import Interrupts, Stop
from tests.keras_facts import sums_activities
from tfdist.backup import state
from tfdist.keras_compat.parallel import mask_of
from tfdist.parallel import ShardedMLP, pipeline
from tfdist.parallel.pipeline_parallel.layer_timing import seconds
from tfdist.parallel.pipeline_parallel.schedule import (
    SCHEDULES,
    Task,
    bubble,
    duration,
    execution_order,
    max_in_flight,
    tasks,
)
from tfdist.parallel.pipeline_parallel.split import balanced, graph_of, parameters, split
from tfdist.parallel.pipeline_parallel.stage_passes import is_seed
from tfdist.strategies.stages import of_workers

L = keras.layers
FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:0"]
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(24, 8).astype("float32")
Y = RANDOM.randn(24, 2).astype("float32")


# --- Schedules ------------------------------------------------------------------------------------
SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 16)))


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_a_schedule(kind, stages, microbatches):
    """Every pass runs once, after its inputs, and no schedule of equal stages is quicker."""
    each = tasks(stages, microbatches, kind)
    expected = {Task(backward, m) for backward in (False, True) for m in range(microbatches)}
    assert all(set(own) == expected and len(own) == len(expected) for own in each)
    order = execution_order(each)
    assert [[task for s, task in order if s == stage] for stage in range(stages)] == each
    when = {pair: position for position, pair in enumerate(order)}
    for stage, task in order:
        if task.backward:
            assert when[stage, Task(False, task.microbatch)] < when[stage, task]
        before = stage + 1 if task.backward else stage - 1
        if 0 <= before < stages:
            assert when[before, task] < when[stage, task]
    steps = duration(each, 1.0, 2.0)
    assert steps == (microbatches + stages - 1) * 3.0
    assert 1 - microbatches * 3.0 / steps == pytest.approx(bubble(stages, microbatches))
    most = [
        min(stages - stage, microbatches) if kind == "1f1b" else microbatches
        for stage in range(stages)
    ]
    assert [max_in_flight(own) for own in each] == most


def test_stages_that_wait_for_each_other():
    with pytest.raises(ValueError, match="only 0 of 2 can"):
        execution_order([[Task(True, 0), Task(False, 0)]])


# --- Cuts -----------------------------------------------------------------------------------------
def mlp(units=(8, 8, 8), **options):
    inputs = keras.Input((8,))
    x = inputs
    for i, width in enumerate(units):
        x = L.Dense(width, name=f"dense_{i}", **options)(x)
        x = L.ReLU(name=f"relu_{i}")(x)
    return keras.Model(inputs, L.Dense(2, name="head")(x), name="mlp")


def small(**options):
    return mlp((8,), **options)


def nested():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.Sequential([L.Dense(8, name="inside")], name="block"),
            L.Dense(2, name="head"),
        ],
        name="outer",
    )


def shared(layer):
    inputs = keras.Input((8,))
    x = layer(inputs)
    x = L.Dense(8, name="between")(x)
    return keras.Model(inputs, L.Dense(2, name="head")(layer(x)))


@pytest.mark.parametrize(
    ("units", "stages"), [((8, 8, 8), 4), ((64, 8, 8, 8), 2), ((8, 64, 64, 8, 8, 32), 3)]
)
def test_the_largest_stage_is_as_small_as_can_be(units, stages):
    graph = graph_of(mlp(units))
    costs = parameters(graph)
    assert sum(costs) == graph.model.count_params()

    def largest(ends):
        return max(sum(costs[i:j]) for i, j in itertools.pairwise([0, *ends, len(costs)]))

    weighty = [i for i, cost in enumerate(costs) if cost]
    best = min(largest(ends) for ends in itertools.combinations(weighty[1:], stages - 1))
    balanced_ends = balanced(graph, stages, costs)
    assert largest(balanced_ends) == best
    assert all(
        stage.layers[0].startswith(("dense", "head")) for stage in split(graph, balanced_ends)
    )  # a ReLU stays with its Dense


def test_seconds_of_layers():
    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, L.Dense(2)(L.LSTM(4)(inputs)))
    with pytest.raises(
        ValueError,
        match=r'balance="time": the shape of input .* is unknown. Pass example inputs as sample=',
    ):
        seconds(graph_of(model))
    times = seconds(graph_of(model), np.zeros((4, 20, 4), "float32"))
    assert len(times) == 2
    assert times[0] > times[1] > 0


def busy():
    """Build a model whose first layer has few weights, which it uses at every pixel.

    Its last layer has most.
    """
    inputs = keras.Input((None, None, 4))
    x = L.GlobalAveragePooling2D(name="pool")(L.Conv2D(16, 9, name="busy")(inputs))
    return keras.Model(inputs, L.Dense(256, name="heavy")(L.Dense(64, name="light")(x)))


def test_a_light_layer_that_takes_long_moves_the_cut():
    """The convolution has some 1e9 operations, all other layers 1e6."""
    by_weights = pipeline(busy(), 2, microbatches=2)
    by_time = pipeline(busy(), 2, microbatches=2, balance="time", sample=np.ones((16, 96, 96, 4)))
    assert [stage.layers for stage in by_weights.plan.stages] == [
        ("busy", "pool", "light"),
        ("heavy",),
    ]
    assert [stage.layers for stage in by_time.plan.stages] == [
        ("busy",),
        ("pool", "light", "heavy"),
    ]


def test_a_sample_by_names():
    """A sample has the form that `fit` takes, also with names in another order than the inputs."""
    wide = keras.Input((64,), name="wide")
    narrow = keras.Input((2,), name="narrow")
    model = keras.Model([wide, narrow], L.Dense(2)(L.Concatenate()([L.Dense(8)(wide), narrow])))
    assert len(seconds(graph_of(model), {"narrow": np.ones((4, 2)), "wide": np.ones((4, 64))})) == 3
    with pytest.raises(
        ValueError, match="expected the inputs wide, narrow; received wide, other, without narrow"
    ):
        seconds(graph_of(model), {"wide": np.ones((4, 64)), "other": np.ones((4, 2))})
    with pytest.raises(ValueError, match="expected the inputs a, b; received a, c, without b"):
        seconds(graph_of(several()), {"a": X, "c": X[:, :4]})


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)


class Stepping(keras.Model):
    def train_step(self, data):
        return {}


def stepping():
    inputs = keras.Input((8,))
    return Stepping(inputs, L.Dense(2)(inputs))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            mlp,
            {"cut_at": ["dense_7"]},
            "model 'mlp' has no layer 'dense_7'; its layers are dense_0, relu_0, dense_1",
        ),
        (
            nested,
            {"cut_at": ["inside"]},
            (
                "layer 'inside' is inside the nested model 'block', which cannot be split. "
                "Cut after 'block'"
            ),
        ),
        (
            nested,
            {"stages": 3},
            (
                "can be split into at most 2 stages with weights; its layers with weights are "
                "block, head"
            ),
        ),
        (mlp, {"stages": 5}, "stages=5: the model 'mlp' can be split into at most 4 stages"),
        (
            lambda: shared(L.Dense(8, name="tied")),
            {"cut_at": ["tied"]},
            "expected a layer that is used once; layer 'tied' is used 2 times",
        ),
        (
            lambda: shared(L.BatchNormalization(name="norm")),
            {"cut_at": ["between"]},
            "cut after 'between' lies between two uses of layer 'norm', so both stages",
        ),
        (mlp, {"cut_at": ["dense_1", "relu_1"]}, r"stage 1 \(relu_1\) has no weights"),
        (mlp, {"cut_at": ["head"]}, "'head' is the last layer, so no layer is left"),
        (mlp, {"cut_at": ["relu_1", "relu_1"]}, "cut_at: expected different layers"),
        (
            Own,
            {"stages": 2},
            (
                r"expected a Sequential or Functional model, whose graph can be split; "
                r"Own .* call\(\) of its own"
            ),
        ),
        (stepping, {"stages": 2}, "Stepping overrides train_step"),
        (
            lambda: keras.Sequential([L.Dense(2)], name="late"),
            {"stages": 2},
            "'late' is not built. Begin it with keras.Input",
        ),
        (
            mlp,
            {"stages": 2, "data": 3},
            r"data=3 x 2 stages need 6, received 4 \(.*CPU:0.*\). Use fewer stages, or",
        ),
        (
            mlp,
            {"stages": 2, "data": 2, "tensor": 2},
            "data=2 x 2 stages x tensor=2 need 8, received 4",
        ),
        (
            mlp,
            {"stages": 1, "tensor": 2},
            (
                r"tensor=2: stage 0 \(dense_0, .*head\) has no ShardedMLP of 2 shards, "
                r"so that .*CPU:1 would have nothing to do"
            ),
        ),
        (
            lambda: sharded(2),
            {"stages": 1, "tensor": 3},
            "has no ShardedMLP of 3 shards, so that .*CPU:2 would",
        ),
        (
            mlp,
            {"stages": 2, "devices": ["cpu:0", "gpu:5"]},
            "devices: gpu:5: TensorFlow has no such device; it has .*CPU:0",
        ),
        (
            mlp,
            {"stages": 2, "devices": [0, 1]},
            r'devices: expected a list of names such as "gpu:0", received \[0, 1\]',
        ),
        (
            mlp,
            {"stages": 2, "devices": ["cpu:0"] * 3},
            r"2 stages need 2, received 3 \(.*CPU:0\)\. Use more stages, or name 2 devices\.$",
        ),
        (
            mlp,
            {"stages": 2, "sample": X},
            (
                r"sample: expected only with stages=S .*, received it with stages=2 and "
                r"balance='parameters'"
            ),
        ),
        (
            mlp,
            {"cut_at": ["relu_0"], "balance": "time", "sample": X},
            "sample: expected only .*, received it with stages=None and balance='time'",
        ),
        (
            mlp,
            {"stages": 2, "balance": "time", "sample": [X, X]},
            "mlp: expected 1 inputs, received 2",
        ),
        (mlp, {"cut_at": 1}, "cut_at: expected layers or their names, received 1"),
        (lambda: 5, {"stages": 2}, "model: expected a Sequential or Functional model, received 5"),
        (mlp, {"stages": 2, "cut_at": ["relu_0"]}, "expected either stages or cut_at"),
        (mlp, {}, "expected either stages or cut_at"),
        (
            mlp,
            {"stages": 2, "microbatches": 0},
            "microbatches: expected a positive integer, received 0",
        ),
        (mlp, {"stages": 0}, "stages: expected a positive integer, received 0"),
        (
            mlp,
            {"stages": 2, "schedule": "zigzag"},
            "schedule: expected 'gpipe' or '1f1b', received 'zigzag'",
        ),
        (
            mlp,
            {"stages": 2, "balance": "size"},
            "balance: expected 'parameters' or 'time', received 'size'",
        ),
    ],
)
def test_models_that_cannot_be_pipeline_parallel_are_refused(model, options, message):
    with pytest.raises(ValueError, match=f"^(parallel.pipeline|PipelineModel): .*{message}"):
        pipeline(model(), **{"microbatches": 2, **options})


def test_a_pipeline_in_a_scope(mirrored):
    with mirrored.scope(), pytest.raises(ValueError, match="pass data=N"):
        pipeline(mlp(), 2, microbatches=2)


# --- Training -------------------------------------------------------------------------------------
def cnn():
    """Build a model with skips within a stage, over one cut, and over all of them."""
    inputs = keras.Input((6, 6, 2))
    first = L.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = first
    for _ in range(2):
        x = L.Add()([x, L.Conv2D(4, 3, padding="same", activation="relu")(x)])
    x = L.Concatenate()([first, L.Conv2D(4, 1)(x)])
    return keras.Model(inputs, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


class Logits(L.Layer):
    """Compute logits of tokens by the table of their embeddings."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, inputs):
        return keras.ops.matmul(inputs, keras.ops.transpose(self.embedding.embeddings))


def transformer():
    """Build a transformer with tied embeddings, and without biases in its attention.

    The gradient of a key's bias is 0 but for rounding, of which Adam makes steps of full length.
    """
    inputs = keras.Input((5,), dtype="int32")
    embedding = L.Embedding(11, 8)
    x = embedding(inputs)
    h = L.LayerNormalization()(x)
    x = L.Add()([x, L.MultiHeadAttention(2, 4, use_bias=False)(h, h, use_causal_mask=True)])
    h = L.Dense(16, activation="gelu")(L.LayerNormalization()(x))
    return keras.Model(inputs, Logits(embedding)(L.Add()([x, L.Dense(8)(h)])))


def lstm():
    inputs = keras.Input((3, 4))
    return keras.Model(inputs, L.Dense(3)(L.LSTM(3)(L.Dense(4)(inputs))))


TOKENS = RANDOM.randint(0, 11, (24, 5))
SEQUENCES = RANDOM.randn(24, 3, 4).astype("float32")
IMAGES = RANDOM.randn(24, 6, 6, 2).astype("float32")
LABELS = RANDOM.randint(0, 3, 24)


def classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


class DenseAdam(keras.optimizers.Adam):
    """Apply dense gradients only.

    Keras' own Adam squares each part of an embedding's gradient by itself where a token comes
    several times; sums over micro-batches cannot.
    """

    def apply(self, grads, trainable_variables=None):
        return super().apply([tf.convert_to_tensor(g) for g in grads], trainable_variables)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def trained(build, x, y, compiled, options=None, fit=None):
    """Return the inner model, the trained model and the history, after two batches.

    With options the model is pipeline parallel; without them it runs eagerly, as graphs of few
    steps take longer.
    """
    keras.utils.set_random_seed(7)
    inner = build()
    model = inner if options is None else pipeline(inner, **options)
    model.compile(**compiled(), run_eagerly=options is None)
    history = model.fit(
        x, y, **{"batch_size": 12, "epochs": 1, "shuffle": False, "verbose": 0, **(fit or {})}
    ).history
    return inner, model, history


def same(build, x, y, compiled, fit=None, tolerance=1e-6, evaluates=False, **options):
    """Train a model with and without stages, compare all numbers, and return both.

    With `evaluates`, compare evaluations, too, for which another graph is traced.
    """
    plain, _, expected = trained(build, x, y, compiled, fit=fit)
    inner, staged, history = trained(build, x, y, compiled, options, fit)
    assert list(history) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=tolerance, err_msg=name)
    for a, b in zip(plain.weights, inner.weights, strict=True):
        np.testing.assert_allclose(
            b.numpy(), a.numpy(), rtol=tolerance, atol=tolerance, err_msg=a.path
        )
    if evaluates:
        np.testing.assert_allclose(
            staged.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=tolerance
        )
    return plain, staged


CASES = {
    "mlp, 1f1b, S=3": (mlp, X, Y, adam, "mse", {"stages": 3, "microbatches": 4}),
    "cnn, gpipe, S=4, recompute": (
        cnn,
        IMAGES,
        LABELS,
        adam,
        classes,
        {"stages": 4, "devices": FOUR, "schedule": "gpipe", "recompute": True, "microbatches": 2},
    ),
    "lstm, 1f1b, S=2, recompute": (
        lstm,
        SEQUENCES,
        LABELS,
        momentum,
        classes,
        {"stages": 2, "recompute": True, "microbatches": 2},
    ),
    "transformer, 1f1b, S=2, recompute": (
        transformer,
        TOKENS,
        (TOKENS * 7 + 3) % 11,
        lambda: DenseAdam(0.01),
        classes,
        {"stages": 2, "recompute": True, "microbatches": 2},
    ),
    "transformer, gpipe, S=4": (
        transformer,
        TOKENS,
        (TOKENS * 7 + 3) % 11,
        momentum,
        classes,
        {"stages": 4, "devices": FOUR, "schedule": "gpipe", "microbatches": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_equals_the_model(case):
    build, x, y, optimizer, loss, options = CASES[case]
    metrics = ["mae"] if loss == "mse" else ["accuracy"]

    def compiled():
        return {
            "optimizer": optimizer(),
            "loss": loss if loss == "mse" else loss(),
            "metrics": metrics,
        }

    _, staged = same(build, x, y, compiled, {"epochs": 2}, evaluates=build is mlp, **options)
    for stage in staged.plan.stages:
        homes = {staged.plan.device_of(v) for v in stage.model.variables}
        assert homes == {v.value.device for v in stage.model.variables}
        assert homes - {staged.plan.mesh.device_of(0)} <= {
            staged.plan.mesh.device_of(stage.number)
        }  # embeddings that two stages share lie with the first
    slots = staged.optimizer.variables[2:]
    assert {v.value.device for v in slots} == {
        staged.plan.mesh.device_of(s.number) for s in staged.plan.stages
    }


def test_a_prediction_for_few_rows():
    inner = mlp()
    staged = pipeline(inner, 2, microbatches=3)
    staged.compile("sgd", "mse")
    for rows in (1, 5):  # also fewer than micro-batches
        np.testing.assert_allclose(
            staged.predict_on_batch(X[:rows]), inner(X[:rows]), rtol=1e-5, atol=1e-6
        )


def several():
    a = keras.Input((8,), name="a")
    b = keras.Input((4,), name="b")
    h = L.Dense(8, activation="relu")(a)
    early = L.Dense(1, name="early")(h)
    x = L.Dense(8)(
        L.Dense(
            8,
            kernel_regularizer="l2",
            activity_regularizer=None if sums_activities() else "l2",
        )(L.Concatenate()([h, b]))
    )
    return keras.Model({"a": a, "b": b}, {"early": early, "late": L.Dense(2, name="late")(x)})


def test_arrays_of_python_are_not_overwritten(kept):
    """TensorFlow writes the results of the first layer over the rows of a micro-batch."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return kept[index], kept[index][:, :1]

    inputs = keras.Input((16,))
    model = keras.Model(inputs, L.Dense(1)(L.Dense(4)(L.Lambda(tf.round)(inputs))))
    model = pipeline(model, 2, microbatches=2)
    model.compile("sgd", "mse")
    model.fit(Batches(), epochs=2, verbose=0)
    np.testing.assert_array_equal(kept, np.full_like(kept, 0.3))


def test_several_inputs_and_outputs_and_all_kinds_of_losses():
    x = {"a": X, "b": X[:, :4]}
    y = {"early": Y[:, :1], "late": Y}
    weights = {"early": RANDOM.rand(24), "late": RANDOM.rand(24)}

    def compiled():
        losses = {
            "loss": {"early": "mae", "late": "mse"},
            "loss_weights": {"early": 0.3, "late": 1.0},
        }
        return {
            "optimizer": adam(global_clipnorm=0.1),
            **losses,
            "metrics": {"late": ["mae"]},
            "weighted_metrics": {"early": ["mse"]},
        }

    same(
        several,
        x,
        y,
        compiled,
        {"sample_weight": weights},
        evaluates=True,
        stages=3,
        microbatches=2,
    )


def test_a_model_is_saved_whose_second_stage_has_an_input_of_its_own(tmp_path):
    a, b = keras.Input((8,)), keras.Input((8,))
    hidden = L.Dense(4, name="of_a")(a)
    model = keras.Model([a, b], L.Add()([hidden, L.Dense(4)(b)]))
    staged = tfdist.parallel.pipeline(model, cut_at=["of_a"], microbatches=2)
    staged.save(tmp_path / "m.keras")
    np.testing.assert_allclose(
        keras.models.load_model(tmp_path / "m.keras")([X, X]), staged([X, X]), rtol=1e-5
    )


def tied():
    inputs = keras.Input((8,))
    layer = L.Dense(8, activation="tanh", name="tied")
    frozen = L.Dense(8, name="frozen", trainable=False)
    x = L.Dense(8, name="between")(frozen(layer(inputs)))
    return keras.Model(inputs, L.Dense(2)(frozen(layer(L.Dense(8)(x)))))


def test_layers_of_two_stages():
    def compiled():
        return {"optimizer": adam(), "loss": keras.losses.MeanSquaredError(reduction="sum")}

    _, staged = same(tied, X, Y, compiled, cut_at=["between"], microbatches=2, recompute=True)
    assert all({"tied", "frozen"} <= set(stage.layers) for stage in staged.plan.stages)


def masked():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Dense(8, name="first")(L.Embedding(9, 8, mask_zero=True)(inputs))
    return keras.Model(
        inputs, L.Dense(2)(L.Dense(8)(L.GlobalAveragePooling1D()(x)))
    )  # an average over what is not masked


def test_masks_cross_cuts():
    tokens = np.where(
        np.arange(6) < RANDOM.randint(2, 6, (24, 1)), RANDOM.randint(1, 9, (24, 6)), 0
    )
    _, staged = same(
        masked,
        tokens,
        Y,
        lambda: {"optimizer": momentum(), "loss": "mse"},
        evaluates=True,
        cut_at=["first"],
        microbatches=2,
        recompute=True,
    )
    assert any(name.startswith("global_average") for name in staged.plan.stages[1].layers)


def sharded(shards=2):
    inputs = keras.Input((8,))
    x = ShardedMLP(16, 8, shards, activation="gelu")(L.Dense(8)(inputs))
    return keras.Model(inputs, L.Dense(2)(L.Dense(8)(x)))


def test_groups_of_stages_with_shards():
    def compiled():
        return {
            "optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.1),
            "loss": "mse",
            "metrics": ["mae"],
        }

    devices = ["cpu:0", "cpu:1", "cpu:2", "cpu:2", "cpu:1", "cpu:0", "cpu:1", "cpu:1"]
    _, staged = same(
        sharded,
        X,
        Y,
        compiled,
        evaluates=True,
        stages=2,
        microbatches=2,
        data=2,
        tensor=2,
        devices=devices,
    )
    layer = next(layer for layer in staged.inner.layers if isinstance(layer, ShardedMLP))
    assert [v.value.device[-5:] for v in layer.columns] == ["CPU:0", "CPU:1"]


def test_shards_are_a_pair_of_dense_layers():
    first = L.Dense(16, activation="gelu")
    second = L.Dense(8)
    layer = ShardedMLP(16, 8, 4, activation="gelu")
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        expected = second(first(x))
    slope = tape.gradient(expected, x)
    layer.build(x.shape)
    layer.set_dense(first, second)
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = layer(x)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tape.gradient(outputs, x), slope, rtol=1e-5, atol=1e-6)
    again = ShardedMLP.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    for numbers, message in (
        ((16, 8, 3), "hidden: expected a multiple of shards=3, received 16"),
        ((16, 8, 0), "shards: expected a whole number from 1, received 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardedMLP(*numbers)
    with pytest.raises(
        ValueError,
        match=r"second: expected Dense\(8, use_bias=True\), received Dense\(8, use_bias=False\)",
    ):
        layer.set_dense(first, L.Dense(8, use_bias=False))
    with pytest.raises(ValueError, match="expected layers that have weights"):
        ShardedMLP(16, 8, 2).set_dense(first, second)


def dropping():
    inputs = keras.Input((8,))
    x = L.Dropout(0.5)(L.Dense(8)(inputs))
    x = L.BatchNormalization(momentum=0.5)(L.Dense(8)(x))
    return keras.Model(inputs, L.Dense(2)(L.Dropout(0.5)(x)))


def test_recompute_draws_the_same_dropout():
    """Compare two pipeline-parallel models, as micro-batches draw other masks than a whole batch.

    Their state after the step is equal, too.
    """

    def compiled():
        return {"optimizer": momentum(), "loss": "mse"}

    options = {"stages": 2, "microbatches": 2, "schedule": "gpipe"}
    once, _, expected = trained(dropping, X, Y, compiled, options)
    twice, _, history = trained(dropping, X, Y, compiled, {**options, "recompute": True})
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-6)
    for a, b in zip(once.variables, twice.variables, strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-6, atol=1e-6, err_msg=a.path)
    assert sum(map(is_seed, once.variables)) == 2


class Seen(L.Layer):
    """Keep the inputs, where they are computed eagerly."""

    def __init__(self):
        super().__init__()
        self.values = {"all": []}

    def call(self, inputs):
        if hasattr(inputs, "numpy"):
            self.values["all"].append(inputs.numpy())
        return inputs


def test_groups_drop_other_units():
    seen = Seen()
    layers = [
        keras.Input((64,)),
        L.BatchNormalization(center=False, scale=False),
        L.Dropout(0.5),
        seen,
        L.Dense(2),
        L.Dense(2),
    ]
    staged = pipeline(
        keras.Sequential(layers),
        2,
        microbatches=1,
        data=2,
        devices=["cpu:0"] * 4,
        schedule="gpipe",
        recompute=True,
    )
    staged.compile("sgd", "mse", run_eagerly=True)
    staged.train_on_batch(np.tile(RANDOM.randn(2, 64), (2, 1)), np.zeros((4, 2)))
    first, other, first_again, other_again = (x != 0 for x in seen.values["all"])
    assert (first == first_again).all()
    assert (other == other_again).all()
    assert (first != other).any()


def normalized():
    inputs = keras.Input((6, 6, 2))
    x = L.ReLU()(L.BatchNormalization(momentum=0.5)(L.Conv2D(4, 3, use_bias=False)(inputs)))
    x = L.BatchNormalization(momentum=0.5)(L.Conv2D(3, 3, use_bias=False, name="second")(x))
    return keras.Model(inputs, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


@pytest.fixture(scope="module")
def by_microbatches():
    """Train a model as its pipeline should.

    Normalize each micro-batch by itself, and update once by the mean of their gradients.
    """
    keras.utils.set_random_seed(7)
    model = normalized()
    loss = classes()
    optimizer = momentum()
    for batch in zip(np.split(IMAGES, 2), np.split(LABELS, 2), strict=True):
        pieces = zip(*(np.split(part, 3) for part in batch), strict=True)
        with tf.GradientTape() as tape:
            total = sum(loss(labels, model(images, training=True)) for images, labels in pieces) / 3
        optimizer.apply(tape.gradient(total, model.trainable_variables), model.trainable_variables)
    return model


@pytest.mark.parametrize("recompute", [False, True])
def test_a_cnn_with_batch_normalization(recompute, by_microbatches):
    options = {"cut_at": ["second"], "microbatches": 3, "recompute": recompute}
    inner, _, _ = trained(
        normalized, IMAGES, LABELS, lambda: {"optimizer": momentum(), "loss": classes()}, options
    )
    for a, b in zip(by_microbatches.variables, inner.variables, strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-6, atol=1e-6, err_msg=a.path)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_mixed_precision(kind):
    """Compare to 1e-2: sums over micro-batches round at other places than that over a batch."""

    def compiled():
        optimizer = (
            momentum()
            if kind == "bfloat16"
            else keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=128.0)
        )
        return {"optimizer": optimizer, "loss": "mse"}

    same(
        lambda: small(dtype=f"mixed_{kind}"),
        X,
        Y,
        compiled,
        tolerance=1e-2,
        evaluates=kind == "float16",
        stages=2,
        microbatches=2,
    )


def test_methods_of_keras_models_work(tmp_path):
    inner, staged, _ = trained(
        small,
        X,
        Y,
        lambda: {
            "optimizer": adam(gradient_accumulation_steps=2),
            "loss": "mse",
            "steps_per_execution": 2,
        },
        {"stages": 2, "microbatches": 2},
        {"validation_split": 0.5, "epochs": 2},
    )
    staged.save_weights(tmp_path / "w.weights.h5")
    staged.save(tmp_path / "m.keras")
    other = small()
    other.load_weights(tmp_path / "w.weights.h5")
    expected = inner(X).numpy()
    for model in (other, keras.models.load_model(tmp_path / "m.keras"), staged):
        np.testing.assert_allclose(model(X), expected, rtol=1e-5, atol=1e-6)
    staged.load_weights(tmp_path / "w.weights.h5")
    assert staged.count_params() == inner.count_params()
    assert set(staged.train_on_batch(X, Y, return_dict=True)) == {"loss"}
    assert mask_of(staged(X)) is None


def test_a_resumed_pipeline_equals_an_uninterrupted_one(tmp_path):
    """It is interrupted in the second epoch, whose order of examples is not that of the first."""
    keras.utils.set_random_seed(7)
    model = pipeline(dropping(), 2, microbatches=2)
    model.compile(adam(), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    first = state.of_model(model)

    def train(directory, save_freq, *callbacks):
        state.into_model(first, model, "first")
        backup = tfdist.BackupAndRestore(tmp_path / directory, save_freq=save_freq)
        history = model.fit(
            tfdist.data.pipeline((X, Y), 4, seed=1),
            epochs=3,
            verbose=0,
            callbacks=[backup, *callbacks],
        ).history
        return history, state.of_model(model).arrays

    history, arrays = train("whole", "epoch")
    for save_freq, steps in (("epoch", 8), (4, 11), (6, 7)):
        with pytest.raises(Stop):
            train(f"cut {save_freq}", save_freq, Interrupts(steps))
        resumed_history, resumed_arrays = train(f"cut {save_freq}", save_freq)
        assert resumed_history == history
        for name, array in arrays.items():
            np.testing.assert_array_equal(
                resumed_arrays[name], array, err_msg=f"{save_freq} {name}"
            )


# --- Mistakes in training -------------------------------------------------------------------------
def of_two(**compiled):
    model = pipeline(mlp(), 2, microbatches=2, data=2, devices=["cpu:0", "cpu:1", "cpu:0", "cpu:1"])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


@pytest.mark.parametrize("eager", [False, True])
def test_a_batch_that_cannot_be_divided(eager):
    message = (
        r"^PipelineModel: data \* microbatches = 4 must divide every batch that mlp trains on, "
        r"received a batch of 10 examples. .*drop_remainder=True\)\.$"
    )
    with pytest.raises(ValueError, match=message):
        of_two(run_eagerly=eager).fit(X[:10], Y[:10], batch_size=10, verbose=0)


def test_xla():
    with pytest.raises(ValueError, match="expected jit_compile=False, received True"):
        of_two(jit_compile=True)


def test_losses_that_do_not_add_up():
    with pytest.raises(ValueError, match=r"received None\. With other reductions"):
        of_two(loss=keras.losses.MeanSquaredError(reduction=None))
    model = of_two(loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="received mean_with_sample_weight"):
        model.fit(X, Y, sample_weight=RANDOM.rand(24), batch_size=12, verbose=0)


def test_an_output_with_a_mask():
    inputs = keras.Input((6,), dtype="int32")
    model = pipeline(
        keras.Model(inputs, L.Dense(2, name="out")(L.Embedding(9, 8, mask_zero=True)(inputs))),
        2,
        microbatches=2,
    )
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="output 'out' has a mask"):
        model.fit(np.ones((4, 6)), np.zeros((4, 6, 2)), verbose=0)


def test_no_loss_at_all():
    with pytest.raises(ValueError, match="expected a loss, received none"):
        of_two(loss=None).fit(X, Y, batch_size=12, verbose=0)


# --- Devices of a cluster -------------------------------------------------------------------------
def devices_of(**kinds):
    return [
        f"/job:worker/replica:0/task:{task}/device:{kind}:0"
        for kind, tasks in kinds.items()
        for task in tasks
    ]


def test_each_worker_gives_a_device():
    """TensorFlow lists devices by names, where 10 comes before 2."""
    tasks = [0, 10, *range(1, 10)]
    assert of_workers(devices_of(CPU=tasks)) == devices_of(CPU=range(11))
    assert of_workers(devices_of(CPU=tasks, GPU=tasks)) == devices_of(GPU=range(11))


def test_some_workers_have_no_gpu():
    with pytest.raises(
        ValueError,
        match=(
            r"expected a GPU in each worker or in none, received GPUs of worker:1, "
            r"and none of worker:0, worker:2\. .*CUDA_VISIBLE_DEVICES=-1"
        ),
    ):
        of_workers(devices_of(CPU=range(3), GPU=[1]))


# --- Memory and places ----------------------------------------------------------------------------
PEAKS = """
from benchmarks.common.pipeline_parallel_worker import peak_bytes
for schedule in "gpipe", "1f1b":
    print(max(peak_bytes(schedule, stages=2, microbatches=8, recompute=False, steps=1, layers=2, beyond=True)))
"""  # noqa: E501


def test_1f1b_holds_less_than_gpipe(run_python):
    """Measure in a process of its own, whose memory holds nothing else.

    TensorFlow runs passes in another order where nothing keeps them in the schedule's.
    """
    done = run_python(PEAKS)
    gpipe, alternating = map(int, done.stdout.split())
    assert alternating < 0.6 * gpipe, done.stdout + done.stderr


def taken_apart(graph):
    """Yield the nodes of a graph and of its functions, each with the shapes that it makes."""
    graph_def = graph.as_graph_def(add_shapes=True)
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            yield (
                node,
                [
                    tuple(size.size for size in shape.dim)
                    for shape in node.attr["_output_shapes"].list.shape
                ],
            )


ELSEWHERE = ("Placeholder", "ReadVariableOp")  # which TensorFlow puts where what they stand for is

OPTIMIZERS = {
    "averaged, clipped": lambda: adam(use_ema=True, ema_overwrite_frequency=2, clipnorm=0.1),
    "scaled, accumulated, clipped": lambda: keras.optimizers.LossScaleOptimizer(
        adam(global_clipnorm=0.1, gradient_accumulation_steps=2), 128.0
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_slots_and_updates_stay_on_the_weights_device(name):
    """Find gradients, slots and updates by the shapes of kernels, which nothing else has."""
    keras.utils.set_random_seed(7)
    layers = [keras.Input((8,)), L.Dense(5, activation="relu"), L.Dense(7), L.Dense(2)]
    plain = keras.Sequential(layers)
    inner = keras.models.clone_model(plain)
    inner.set_weights(plain.get_weights())
    model = pipeline(inner, cut_at=[inner.layers[0]], microbatches=2, devices=["cpu:1", "cpu:2"])
    for each in (plain, model):
        each.compile(OPTIMIZERS[name](), "mse", run_eagerly=each is plain)
    x = tf.constant(X)
    y = tf.constant(Y)
    model.optimizer.build(model.trainable_variables)
    step = tf.function(model.train_step, autograph=False).get_concrete_function((x, y))
    for _ in range(2):
        plain.train_on_batch(X, Y)
        step(x, y)
    for a, b in zip(plain.weights, inner.weights, strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-6, atol=1e-6, err_msg=a.path)
    homes = {tuple(v.shape): model.plan.device_of(v) for v in inner.weights if len(v.shape) == 2}
    assert list(homes.values()) == [model.plan.mesh.device_of(i) for i in (0, 1, 1)]
    lying: dict[tuple, set] = {}
    for node, shapes in taken_apart(step.graph):
        assert node.op != "IdentityN" or len(shapes) <= 8, (
            f"{node.name} takes all gradients to one place"
        )  # a Dense has two, and a custom gradient each twice
        for shape in set(shapes) & homes.keys():
            lying.setdefault(shape, set()).add((node.device or "nowhere", node.op))
    assert lying.keys() == homes.keys()
    assert not {
        (shape, *each)
        for shape, locations in lying.items()
        for each in locations
        if each[0] != homes[shape] and each[1] not in ELSEWHERE
    }
