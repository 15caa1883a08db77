"""Train small models with Keras' features; any number of replicas must give the same results.

Each case takes a strategy and returns named numbers; `runner.py` runs them in a process,
`test_parity.py` compares processes.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

CASES = {}
GLOBAL_BATCH = 12  # divides by 1, 2 and 3 replicas
STEPS = 5


def case(function=None, *, tolerance: float = 1e-5):
    """Register a case. `tolerance` is relative; 1e-5 is float32 rounding over a few steps."""
    if function is None:
        return lambda f: case(f, tolerance=tolerance)
    function.tolerance = tolerance
    CASES[function.__name__] = function
    return function


class Steps(keras.callbacks.Callback):
    """Record the logs of every step, as a user's callback would."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append([float(logs[k]) for k in sorted(logs)])


def data(rows=GLOBAL_BATCH * STEPS, features=6, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype("float32")
    return x, (x @ rng.normal(size=(features, classes))).argmax(1).astype("int32")


def dataset(*arrays, batch=GLOBAL_BATCH, **kwargs):
    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0]).batch(
        batch, **kwargs
    )


def mlp(classes=3, **kwargs):
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(classes, **kwargs)]
    )


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def weights(model, prefix="weight"):
    return {f"{prefix}{i}": w for i, w in enumerate(model.get_weights())}


def fitted(model, train, *, watch=True, **kwargs):
    """Train, and return history, weights, and the logs of each step if watched."""
    steps = Steps()
    callbacks = [*kwargs.pop("callbacks", []), *([steps] if watch else [])]
    history = model.fit(
        *train if isinstance(train, tuple) else [train], verbose=0, callbacks=callbacks, **kwargs
    )
    result = {f"history/{k}": v for k, v in history.history.items()}
    result |= weights(model)
    if watch:
        result["steps"] = np.array(steps.rows)
    return result


def simple(strategy, optimizer, train=None, model=mlp, epochs=2, loss=CROSSENTROPY, **kwargs):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        built = model()
        built.compile(
            optimizer=optimizer() if callable(optimizer) else optimizer,
            loss=loss,
            metrics=["accuracy"],
        )
    return fitted(built, dataset(*data()) if train is None else train, epochs=epochs, **kwargs)


# --- Models ---------------------------------------------------------------------------------------
@case
def sequential(strategy):
    return simple(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9))


@case
def unwatched(strategy):
    return simple(strategy, "adam", watch=False, epochs=3)


class Subclassed(keras.Model):
    """Compute what `mlp` does, with shapes known only from data."""

    def __init__(self, activation="relu"):
        super().__init__()
        self.first = keras.layers.Dense(8, activation)
        self.second = keras.layers.Dense(3)

    def call(self, x):
        return self.second(self.first(x))


@case
def subclassed_and_unbuilt(strategy):
    return simple(strategy, "adam", model=Subclassed)


@case
def several_inputs_and_outputs_as_dicts(strategy):
    keras.utils.set_random_seed(1)
    x, y = data()
    with strategy.scope():
        a = keras.Input((6,), name="a")
        b = keras.Input((2,), name="b")
        h = keras.layers.Concatenate()([keras.layers.Dense(5, "tanh")(a), b])
        model = keras.Model(
            {"a": a, "b": b},
            {
                "label": keras.layers.Dense(3, name="label")(h),
                "sum": keras.layers.Dense(1, name="sum")(h),
            },
        )
        model.compile(
            "adam",
            {"label": CROSSENTROPY, "sum": "mse"},
            metrics={"label": ["accuracy"], "sum": ["mae"]},
            loss_weights={"label": 1.0, "sum": 0.3},
        )
    train = dataset({"a": x, "b": x[:, :2]}, {"label": y, "sum": x.sum(1, keepdims=True)})
    result = fitted(model, train, epochs=2)
    predicted = model.predict(train, verbose=0)
    return result | {f"predict/{k}": v for k, v in predicted.items()}


@case
def several_inputs_and_outputs_as_tuples(strategy):
    keras.utils.set_random_seed(1)
    x, y = data()
    with strategy.scope():
        a = keras.Input((6,))
        b = keras.Input((2,))
        h = keras.layers.Concatenate()([keras.layers.Dense(5, "tanh")(a), b])
        model = keras.Model([a, b], [keras.layers.Dense(3)(h), keras.layers.Dense(1)(h)])
        model.compile("sgd", [CROSSENTROPY, "mse"])
    return fitted(model, dataset((x, x[:, :2]), (y, x.sum(1, keepdims=True))), epochs=2)


@case
def model_without_call(strategy):
    """Train a GAN as keras.io writes it: two optimizers, no `call()`, a generator not built."""

    class GAN(keras.Model):
        def __init__(self):
            super().__init__()
            self.discriminator = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
            )
            self.generator = keras.Sequential([keras.layers.Dense(6)])
            self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.loss_fn = loss_fn

        @property
        def metrics(self):
            return [self.accuracy]

        def train_step(self, real):
            ones = tf.ones((tf.shape(real)[0], 1))
            labels = tf.concat([ones, 0.0 * ones], 0)
            with tf.GradientTape() as tape:
                fake = self.generator(real[:, :2])
                logits = self.discriminator(tf.concat([real, fake], 0))
                loss = self.loss_fn(labels, logits)
            self._update(self.d_optimizer, tape, loss, self.discriminator)
            self.accuracy.update_state(labels, logits)
            with tf.GradientTape() as tape:
                loss = self.loss_fn(ones, self.discriminator(self.generator(real[:, :2])))
            self._update(self.g_optimizer, tape, loss, self.generator)
            return {"accuracy": self.accuracy.result()}

        def _update(self, optimizer, tape, loss, part):
            weights = part.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = GAN()
        model.compile(
            keras.optimizers.Adam(0.05),
            keras.optimizers.SGD(0.5, momentum=0.5),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    return fitted(model, dataset(data(GLOBAL_BATCH * 2 + 7)[0]), epochs=2)


@case
def custom_train_step(strategy):
    class Model(keras.Model):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            for metric in self.metrics:
                if metric.name != "loss":
                    metric.update_state(y, self(x))
            return {"norm": tf.linalg.global_norm([v.value for v in self.trainable_variables])}

    def model():
        inputs = keras.Input((6,))
        return Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(8, "tanh")(inputs)))

    return simple(strategy, "sgd", model=model)


@case
def embedding_with_repeated_ids(strategy, optimizer=keras.optimizers.Adam):
    rng = np.random.default_rng(3)
    train = dataset(rng.integers(0, 5, (60, 4)), rng.integers(0, 3, 60))
    return simple(
        strategy,
        lambda: optimizer(0.05),
        train,
        lambda: keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(7, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        ),
    )


@case
def lazy_adam_with_repeated_ids(strategy):
    return embedding_with_repeated_ids(strategy, tfdist.optimizers.LazyAdam)


@case
def embedding_of_other_lengths_unwatched(strategy):
    """Train with a sparse gradient of other rows in each step, while several steps run at once."""
    rng = np.random.default_rng(3)
    lengths = 1 + np.arange(60) % 4
    rows = tf.RaggedTensor.from_row_lengths(
        rng.integers(0, 5, 6 * lengths.sum()), np.repeat(lengths, 6)
    )
    train = (
        tf.data.Dataset.from_tensor_slices((rows, rng.integers(0, 3, 360)))
        .map(lambda x, y: (tf.convert_to_tensor(x), y))
        .padded_batch(6)
    )

    def model():
        return keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(7, 3),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(3),
            ]
        )

    return simple(strategy, "sgd", train, model, watch=False)


@case
def recurrent_with_masking(strategy):
    """Mask rows so that each replica has another divisor.

    The mean must still be that of the whole batch.
    """
    rng = np.random.default_rng(4)
    ids = rng.integers(1, 6, (60, 5)) * (np.arange(5) < rng.integers(1, 6, (60, 1)))
    train = dataset(ids, rng.integers(0, 4, (60, 5)))

    def model():
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(6, 4, mask_zero=True),
                keras.layers.GRU(5, return_sequences=True),
                keras.layers.Dense(4),
            ]
        )

    return simple(strategy, "adam", train, model)


@case
def synchronized_batch_normalization(strategy):
    """Train on batches that do not divide, with a loss that is added before replicas meet."""

    class AddedLoss(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    def model():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activity_regularizer="l2"),
                AddedLoss(),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.ReLU(),
                keras.layers.Dense(3),
            ]
        )

    train = dataset(*data(3 * (GLOBAL_BATCH - 1)), batch=GLOBAL_BATCH - 1)
    return simple(strategy, "sgd", train, model, validation_data=dataset(*data(20, seed=5)))


@case
def convolution_with_regularization(strategy):
    rng = np.random.default_rng(6)
    train = dataset(rng.normal(size=(60, 6, 6, 1)).astype("float32"), rng.integers(0, 3, 60))

    def model():
        return keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer="l2"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.0),
                keras.layers.Dense(3),
            ]
        )

    return simple(strategy, "adam", train, model)


# --- Inputs ---------------------------------------------------------------------------------------
@case
def numpy_arrays(strategy):
    return simple(strategy, "sgd", data(), batch_size=GLOBAL_BATCH, shuffle=True)


@case
def numpy_with_validation_split(strategy):
    return simple(strategy, "sgd", data(), batch_size=GLOBAL_BATCH, validation_split=0.2)


@case
def py_dataset(strategy):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, i):
            x, y = data()
            return x[i * GLOBAL_BATCH : (i + 1) * GLOBAL_BATCH], y[
                i * GLOBAL_BATCH : (i + 1) * GLOBAL_BATCH
            ]

    return simple(strategy, "sgd", Batches())


@case
def generator(strategy):
    def batches():
        x, y = data()
        while True:
            for i in range(0, len(x), GLOBAL_BATCH):
                yield x[i : i + GLOBAL_BATCH], y[i : i + GLOBAL_BATCH]

    return simple(strategy, "sgd", batches(), steps_per_epoch=STEPS)


@case
def sample_weight(strategy):
    w = np.random.default_rng(7).uniform(size=60).astype("float32")
    return simple(strategy, "sgd", dataset(*data(), w))


@case
def class_weight(strategy):
    return simple(
        strategy, "sgd", data(), batch_size=GLOBAL_BATCH, class_weight={0: 0.2, 1: 1.0, 2: 3.0}
    )


@case
def mean_with_sample_weight(strategy):
    w = np.random.default_rng(7).uniform(size=60).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    return simple(strategy, "sgd", dataset(*data(), w), loss=loss)


@case
def sum_reduction(strategy):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return simple(strategy, lambda: keras.optimizers.SGD(0.01), loss=loss)


@case
def losses_over_whole_batches(strategy):
    """Train with Keras' losses in which rows depend on each other, on an uneven last batch."""
    x, y = data(GLOBAL_BATCH * 2 + 1)
    targets = {"dice": np.eye(3)[y], "tversky": np.eye(3)[y], "circle": y}
    w = {name: np.linspace(0.5, 2, len(x)) for name in ("dice", "circle")}
    w["tversky"] = np.ones(len(x))

    def model():
        inputs = keras.Input([6])
        middle = keras.layers.Dense(8, activation="tanh")(inputs)
        outputs = {
            "dice": keras.layers.Dense(3, activation="sigmoid", name="dice")(middle),
            "tversky": keras.layers.Dense(3, activation="sigmoid", name="tversky")(middle),
            "circle": keras.layers.UnitNormalization(name="circle")(keras.layers.Dense(4)(middle)),
        }
        return keras.Model(inputs, outputs)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        built = model()
        built.compile(
            "sgd",
            {
                "dice": "dice",
                "tversky": keras.losses.Tversky(0.3, 0.7),
                "circle": keras.losses.Circle(gamma=2),
            },
            loss_weights={"dice": 1.0, "tversky": 1.0, "circle": 0.1},
        )
    validation = dataset(x[:17], {name: t[:17] for name, t in targets.items()})
    return fitted(built, dataset(x, targets, w), epochs=2, validation_data=validation)


@case
def steps_per_epoch_of_an_endless_data_set(strategy):
    return simple(
        strategy, "sgd", dataset(*data()).repeat(), steps_per_epoch=3, epochs=3, watch=False
    )


def _spe(strategy, watch):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = mlp()
        model.compile("sgd", CROSSENTROPY, metrics=["accuracy"], steps_per_execution=2)
    return fitted(model, dataset(*data()), epochs=2, watch=watch)


@case
def steps_per_execution(strategy):
    return _spe(strategy, True)


@case
def steps_per_execution_unwatched(strategy):
    return _spe(strategy, False)


@case
def distributed_by_the_user(strategy):
    """Train on replica batches, as in TensorFlow's own guides, with an uneven end."""

    def pipeline(context):
        batch = GLOBAL_BATCH // strategy.num_replicas_in_sync
        return dataset(*data(GLOBAL_BATCH * 2 + 7), batch=batch).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )

    return simple(
        strategy, "adam", strategy.distribute_datasets_from_function(pipeline), watch=False
    )


@case
def uneven_last_batch(strategy):
    return simple(
        strategy,
        "adam",
        dataset(*data(GLOBAL_BATCH * 2 + 7)),
        validation_data=dataset(*data(17, seed=5)),
    )


@case
def last_batch_leaves_replicas_empty(strategy):
    """Train with one row for two or three replicas that share batch statistics."""

    def model():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )

    return simple(
        strategy,
        "sgd",
        dataset(*data(GLOBAL_BATCH * 2 + 1)),
        model,
        validation_data=dataset(*data(13, seed=5)),
    )


@case
def last_batch_leaves_convolutions_empty(strategy):
    """Train with one row for two or three replicas, whose convolutions then have none."""

    def model():
        k = keras.layers
        inputs = keras.Input((2, 6, 6, 2))
        images = k.Reshape((6, 6, 4))(inputs)
        return keras.Model(
            inputs,
            k.Dense(3)(
                k.Concatenate()(
                    [
                        k.Flatten()(k.TimeDistributed(k.Conv2D(2, 3))(inputs)),
                        k.Flatten()(k.ConvLSTM2D(2, 3)(inputs)),
                        k.Flatten()(k.AveragePooling3D((1, 2, 2))(k.Conv3D(2, 2)(inputs))),
                        k.Flatten()(k.Conv1D(2, 3)(k.Reshape((36, 4))(inputs))),
                        k.Flatten()(k.AveragePooling2D(2)(k.SeparableConv2D(3, 3)(images))),
                        k.Flatten()(k.Conv2DTranspose(2, 2)(k.MaxPooling2D()(images))),
                    ]
                )
            ),
        )

    rng = np.random.default_rng(6)
    rows = GLOBAL_BATCH + 1
    train = dataset(rng.normal(size=(rows, 2, 6, 6, 2)).astype("float32"), rng.integers(0, 3, rows))
    return simple(strategy, "sgd", train, model, validation_data=train)


# --- Optimizers -----------------------------------------------------------------------------------
@case
def clip_by_norm(strategy):
    return simple(strategy, lambda: keras.optimizers.SGD(0.5, clipnorm=0.05))


@case
def clip_by_global_norm(strategy):
    return simple(strategy, lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.05))


@case
def clip_by_value(strategy):
    return simple(strategy, lambda: keras.optimizers.SGD(0.5, clipvalue=0.01))


@case
def gradient_accumulation(strategy):
    return simple(
        strategy, lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, clipnorm=0.1)
    )


@case
def average_of_weights(strategy):
    return simple(
        strategy,
        lambda: keras.optimizers.AdamW(
            0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
        ),
    )


@case
def learning_rate_schedule(strategy):
    return simple(
        strategy, lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 8))
    )


@case
def loss_scaling(strategy):
    """Scale the loss so far that the first steps overflow, on a batch whose last row alone is huge.

    Every replica must skip these steps.
    """
    x, y = data()
    x[GLOBAL_BATCH - 1] *= 1e30
    return simple(
        strategy,
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**60
        ),
        dataset(x, y),
        epochs=3,
    )


def _mixed(strategy, policy):
    keras.config.set_dtype_policy(policy)
    try:
        return simple(strategy, lambda: keras.optimizers.SGD(0.1), model=mlp)
    finally:
        keras.config.set_dtype_policy("float32")


# Half precision rounds sums over other rows otherwise: 2^-8 for bfloat16, 2^-11 for float16.
@case(tolerance=2e-2)
def mixed_bfloat16(strategy):
    return _mixed(strategy, "mixed_bfloat16")


@case(tolerance=4e-3)
def mixed_float16(strategy):
    return _mixed(strategy, "mixed_float16")


# --- Metrics and callbacks ------------------------------------------------------------------------
@case
def metrics_with_other_than_scalar_state(strategy):
    keras.utils.set_random_seed(1)
    x, y = data(GLOBAL_BATCH * STEPS + 5)
    target = (y == 1).astype("float32")[:, None]
    with strategy.scope():
        model = mlp(1, activation="sigmoid")
        model.compile(
            "adam",
            "binary_crossentropy",
            metrics=[
                "accuracy",
                keras.metrics.AUC(num_thresholds=50),
                keras.metrics.Precision(),
                keras.metrics.Recall(),
                keras.metrics.TruePositives(),
                keras.metrics.BinaryIoU(),
                keras.metrics.F1Score(threshold=0.5),
                keras.metrics.SensitivityAtSpecificity(0.5),
                keras.metrics.RootMeanSquaredError(),
                keras.metrics.R2Score(),
            ],
        )
    result = fitted(
        model,
        dataset(x, target),
        epochs=2,
        watch=False,
        validation_data=dataset(x[:20], target[:20]),
    )
    return result | {"evaluate": model.evaluate(dataset(x, target), verbose=0)[:3]}


@case
def callbacks_that_decide(strategy):
    callbacks = [
        keras.callbacks.EarlyStopping(
            "val_loss", patience=1, min_delta=0.05, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, factor=0.5, min_delta=0.2),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]
    return simple(
        strategy,
        lambda: keras.optimizers.SGD(0.5),
        epochs=12,
        watch=False,
        callbacks=callbacks,
        validation_data=dataset(*data(20, seed=5)),
    )


@case
def evaluate_and_predict(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = mlp()
        model.compile("adam", CROSSENTROPY, metrics=["accuracy"])
    x, y = data(31)
    return {
        "evaluate": model.evaluate(x, y, batch_size=7, verbose=0),
        "predict arrays": model.predict(x, batch_size=7, verbose=0),
        "predict data set": model.predict(dataset(x), verbose=0),
        "predict_on_batch": model.predict_on_batch(x[:5]),
    }


@case
def keras_distribution(strategy):
    """Train, evaluate and predict by `keras.distribution`, on as many devices as the strategy."""
    tfdist.enable()
    devices = keras.distribution.list_devices()[: strategy.num_replicas_in_sync]
    train = dataset(*data(GLOBAL_BATCH * 2 + 7))
    keras.utils.set_random_seed(1)
    with keras.distribution.DataParallel(devices=devices).scope():
        model = mlp()
        model.compile("adam", CROSSENTROPY, metrics=["accuracy"])
        assert model.distribute_strategy.num_replicas_in_sync == len(devices)
        result = fitted(model, train, epochs=2, validation_data=dataset(*data(17, seed=5)))
        x, y = data(31)  # arrays, which are the same in all processes
        result |= {
            "evaluate": model.evaluate(x, y, batch_size=7, verbose=0),
            "predict": model.predict(x, batch_size=7, verbose=0),
        }
    return result


@case
def keras_distribution_of_own_data(strategy):
    """Train on batches of which each of two processes has a part; one has no part of the last."""
    tfdist.enable()
    devices = keras.distribution.list_devices()[: strategy.num_replicas_in_sync]
    placement = strategy.tfdist_engine.placement

    def own(*arrays):
        def part(*columns):
            third = tf.shape(columns[0])[0] // 3
            return tuple(x[:third] if placement.is_chief else x[third:] for x in columns)

        batches = dataset(*arrays)
        if placement.workers == 1:
            return batches
        last = len(batches) - 1
        parts = batches.take(last).map(part)
        return parts if placement.is_chief else parts.concatenate(batches.skip(last))

    keras.utils.set_random_seed(1)
    with keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False).scope():
        model = mlp()
        model.compile("adam", CROSSENTROPY, metrics=["accuracy"])
        train, validation = own(*data(GLOBAL_BATCH * 2 + 7)), own(*data(17, seed=5))
        options = tf.data.Options()  # says on one device nothing, either
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        if placement.workers > 1:
            validation = validation.with_options(options)
        result = fitted(model, train, watch=False, epochs=2, validation_data=validation)
        if placement.workers > 1:
            with pytest.raises(ValueError, match="predict: expected the same data in all pro"):
                model.predict(train, verbose=0)
            with pytest.raises(ValueError, match="train_on_batch: expected the same data"):
                model.train_on_batch(*data(12))
            with pytest.raises(ValueError, match="or arrays, received a generator"):
                model.fit((data(12) for _ in range(2)), verbose=0)
    with keras.distribution.DataParallel(devices=devices).scope():
        result["predict"] = model.predict(data(31)[0], verbose=0)
    return result


def model_parallel(shape=(1, 2), batch="batch", **layouts):
    """Return a distribution over the first devices, with a layout for each name of variables."""
    devices = keras.distribution.list_devices()[: shape[0] * shape[1]]
    mesh = keras.distribution.DeviceMesh(shape, ["batch", "model"], devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    for name, axes in layouts.items():
        layout_map[f".*{name}"] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


def mesh_shape(strategy):
    """Return the shape of a mesh of all devices, with two columns if they are even."""
    tfdist.enable()
    count = strategy.num_replicas_in_sync
    return (count // 2, 2) if count % 2 == 0 else (1, count)


@case
def keras_model_parallel(strategy):
    """Train a small transformer whose layouts split weights along each kind of axis."""
    layouts = {
        "embeddings": ("model", None),
        "(query|key|value)/kernel": (None, "model", None),
        "dense.*/kernel": (None, "model"),
        "dense.*/bias": ("model",),
    }
    random = np.random.default_rng(0)
    tokens = random.integers(0, 17, (GLOBAL_BATCH * 2 + 7, 5)).astype("int32")
    layers = keras.layers
    keras.utils.set_random_seed(1)
    with model_parallel(mesh_shape(strategy), **layouts).scope():
        inputs = keras.Input([5], dtype="int32")
        x = layers.Embedding(17, 8)(inputs)
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, "gelu")(x)))
        model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), CROSSENTROPY)
        train = dataset(tokens, (tokens.sum(1) % 3).astype("int32"))
        result = fitted(model, train, epochs=3, validation_data=train)
        result["predict"] = model.predict(tokens, verbose=0)
    return result


@case
def keras_model_parallel_of_a_cnn(strategy):
    """Train a small CNN whose layouts split the channels that convolutions make."""
    x, labels = data(GLOBAL_BATCH * 2 + 7, features=48)
    images = x.reshape(-1, 4, 4, 3)
    layers = keras.layers
    keras.utils.set_random_seed(1)
    layouts = {"conv.*/kernel": (None, None, None, "model")}
    with model_parallel(mesh_shape(strategy), **layouts).scope():
        model = keras.Sequential(
            [
                keras.Input([4, 4, 3]),
                layers.Conv2D(6, 3, activation="relu"),
                layers.BatchNormalization(synchronized=True),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), CROSSENTROPY, metrics=["accuracy"])
        result = fitted(model, dataset(images, labels), epochs=3)
        result["predict"] = model.predict(images, verbose=0)
    return result


@case
def on_batch(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = mlp()
        model.compile("adam", CROSSENTROPY, metrics=["accuracy"])
    x, y = data(31)
    logs = [model.train_on_batch(x[i : i + 7], y[i : i + 7]) for i in range(0, 31, 7)]
    return weights(model) | {"train_on_batch": logs, "test_on_batch": model.test_on_batch(x, y)}


@case
def run_eagerly(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = mlp()
        model.compile("sgd", CROSSENTROPY, metrics=["accuracy"], run_eagerly=True)
    return fitted(model, dataset(*data(GLOBAL_BATCH * 2)), epochs=1)


@case
def compiled_by_xla(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = mlp()
        model.compile("adam", CROSSENTROPY, metrics=["accuracy"], jit_compile=True)
    x, y = data(31)
    return fitted(model, dataset(x, y), epochs=2) | {
        "evaluate": model.evaluate(x, y, batch_size=12, verbose=0),
        "predict": model.predict(x, batch_size=12, verbose=0),
    }
