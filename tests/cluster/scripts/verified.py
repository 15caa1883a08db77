"""Define configs for test_verify.py, `verified.py:NAME`, with right and faulty models and data."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.cluster.spec import ClusterSpec
from tfdist.data.sources.source import Source

CLASSES = 4


def get_config(name):
    config = tfdist.config.default()
    config.name = name
    config.data.name = f"{__file__}:images"
    config.data.global_batch = 16
    config.model.options.classes = CLASSES
    config.train.learning_rate = 0.01
    globals()[f"_{name}"](config)
    return config


# --- Right ones -----------------------------------------------------------------------------------
def _mlp(config):
    config.model.name = "mlp"
    config.model.options.widths = (16,)
    config.model.options.dropout = 0.5


def _sharded(config):
    _mlp(config)
    config.parallel.zero = 3


def _transformer(config):
    config.model.name = "transformer"
    config.model.options.update(width=8, heads=2, depth=1, dropout=0.1)


def images(data, split):
    rng = np.random.default_rng(0)
    x = rng.integers(
        0, 255, (40, 8, 8, 1), np.uint8
    )  # with global_batch=16, the third step of an epoch has 8 rows
    return Source.of((x, (x.mean((1, 2, 3)) // 2 % CLASSES).astype(np.int32)))


# --- Faults ---------------------------------------------------------------------------------------
def _resnet(config):
    """Use a ResNet, whose BatchNormalization is not synchronized."""
    config.model.name = "resnet"
    config.model.options.filters = (4, 8)


def _summed(config):
    config.model.name = f"{__file__}:summing"


class Summing(keras.Model):
    def train_step(self, batch):
        """Apply the sum over each replica's rows, of which replicas take a weighted mean."""
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                keras.losses.sparse_categorical_crossentropy(y, self(x, training=True))
            )
        self.optimizer.apply(
            tape.gradient(loss, [v.value for v in self.trainable_variables]),
            self.trainable_variables,
        )
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.shape(x)[0])
            else:
                metric.update_state(y, self(x))
        return self.get_metrics_result()


def summing(input_shape, classes, cls=Summing):
    inputs = keras.Input(input_shape)
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Dense(8, "tanh", name="hidden")(keras.layers.Flatten()(x))
    return cls(inputs, keras.layers.Dense(classes, "softmax")(x))


def _overlap(config):
    """Use a loss that is a quotient of sums over the rows."""
    config.model.name = f"{__file__}:overlap"


def overlap(input_shape, classes):
    model = summing(input_shape, classes, keras.Model)

    def loss(y, prediction):
        y = tf.one_hot(tf.cast(y, tf.int32), classes)
        both = tf.reduce_sum(y * prediction)
        return 1.0 - both / (tf.reduce_sum(y + prediction) - both)

    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def _reported(config):
    """Report what does not add up: a metric, and a mean whose replicas' rows are not counted."""
    config.model.name = f"{__file__}:reporting"


class Largest(keras.metrics.Metric):
    tfdist_sums_rows = True  # which is wrong

    def __init__(self):
        super().__init__(name="largest")
        self.state = self.add_variable((), "zeros")

    def update_state(self, y, prediction, sample_weight=None):
        self.state.assign(tf.maximum(self.state, tf.reduce_max(prediction)))

    def result(self):
        return tf.identity(self.state)


class Reporting(keras.Model):
    def train_step(self, batch):
        logs = super().train_step(batch)
        mean = tf.reduce_mean(tf.cast(batch[1], tf.float32))
        context = tf.distribute.get_replica_context()
        return {**logs, "averaged": context.all_reduce("MEAN", mean)}


def reporting(input_shape, classes):
    model = summing(input_shape, classes, Reporting)
    model.compile(
        keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", metrics=[Largest()]
    )
    return model


def _seed(config):
    _mlp(config)
    spec = ClusterSpec.from_environ()
    config.train.seed = spec.rank if spec else 0


def _overlapping(config):
    _mlp(config)
    config.data.name = f"{__file__}:unsharded"


def unsharded(data, split):
    """Return global batches that are not sharded: all workers take the same rows."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return images(data, split).dataset().repeat().batch(data.global_batch).with_options(options)
