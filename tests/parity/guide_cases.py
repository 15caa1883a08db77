"""Train models in the forms of Keras' guides and examples; see `cases.py`.

The guides are "Customizing what happens in fit()", "Making new layers and models", and the examples
of autoencoders, adversarial networks, distillation, transformers and recommenders on keras.io. The
data are made up, and what the originals draw at random comes with the data: replicas draw numbers
of their own. Batches do not divide by the replicas.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.parity.cases import CASES, case, weights

__all__ = ["CASES"]  # these cases too

BATCH = 10
ROWS = 24  # the last batch has 4 rows
EPOCHS = 2


def guide(function=None, *, tolerance: float = 1e-5):
    """Register a case whose weights begin from a seed."""
    if function is None:
        return lambda f: guide(f, tolerance=tolerance)

    @functools.wraps(function)
    def seeded(strategy):
        keras.utils.set_random_seed(1)
        return function(strategy)

    return case(seeded, tolerance=tolerance)


def numbers(rows, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype("float32")


def labels(x, classes):
    return (np.abs(x).sum(1) * 3 % classes).astype("int32")


def fitted(model, *arrays, evaluated=False, **kwargs):
    """Train on arrays and return histories and weights."""
    data = tf.data.Dataset.from_tensor_slices(arrays[0] if len(arrays) == 1 else arrays)
    data = data.batch(BATCH)
    history = model.fit(data, epochs=EPOCHS, verbose=0, **kwargs).history
    figures = {f"history/{name}": np.asarray(values) for name, values in history.items()}
    if evaluated:
        results = model.evaluate(data, verbose=0, return_dict=True)
        # Older versions of Keras nest the compiled metrics of a test_step.
        figures.update({f"test/{n}": np.asarray(keras.tree.flatten(x)) for n, x in results.items()})
    return {**figures, **weights(model)}


def perceptron(cls=keras.Model):
    inputs = keras.Input([6])
    return cls(inputs, layers.Dense(1)(layers.Dense(5, "tanh")(inputs)))


# --- "Customizing what happens in fit()" ----------------------------------------------------------
@guide
def guide_of_fit_with_compiled_metrics(strategy):
    class CustomModel(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    with strategy.scope():
        model = perceptron(CustomModel)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x = numbers(ROWS, 6)
    return fitted(model, x, x[:, :1] ** 2)


@guide
def guide_of_fit_with_its_own_trackers(strategy):
    class CustomModel(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
            self.loss_fn = keras.losses.MeanSquaredError()

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.loss_fn(y, y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.loss_tracker.update_state(loss)
            self.mae_metric.update_state(y, y_pred)
            return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

        @property
        def metrics(self):
            return [self.loss_tracker, self.mae_metric]

    with strategy.scope():
        model = perceptron(CustomModel)
        model.compile(optimizer="adam")
    x = numbers(ROWS, 6)
    return fitted(model, x, x[:, :1] ** 2)


@guide
def guide_of_fit_with_sample_weights_and_a_test_step(strategy):
    class CustomModel(keras.Model):
        def train_step(self, data):
            x, y, sample_weight = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self.updated(loss, y, y_pred, sample_weight)

        def test_step(self, data):
            x, y, sample_weight = data
            y_pred = self(x, training=False)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
            return self.updated(loss, y, y_pred, sample_weight)

        def updated(self, loss, y, y_pred, sample_weight):
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, sample_weight=sample_weight)
            return {m.name: m.result() for m in self.metrics}

    with strategy.scope():
        model = perceptron(CustomModel)
        model.compile("rmsprop", "mse", weighted_metrics=["mae"])
    x = numbers(ROWS, 6)
    return fitted(model, x, x[:, :1] ** 2, np.abs(x[:, 1]), evaluated=True)


# --- "Making new layers and models" ---------------------------------------------------------------
@guide
def endpoint_layer(strategy):
    class LogisticEndpoint(layers.Layer):
        def __init__(self, name=None):
            super().__init__(name=name)
            self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
            self.accuracy_metric = keras.metrics.BinaryAccuracy(name="accuracy")

        def call(self, targets, logits, sample_weights=None):
            self.add_loss(self.loss_fn(targets, logits, sample_weights))
            self.accuracy_metric.update_state(targets, logits, sample_weights)
            return ops.nn.softmax(logits)

    with strategy.scope():
        inputs = keras.Input([6], name="inputs")
        targets = keras.Input([4], name="targets")
        logits = layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1")(inputs)
        predictions = LogisticEndpoint(name="predictions")(targets, logits)
        model = keras.Model({"inputs": inputs, "targets": targets}, predictions)
        model.compile(keras.optimizers.Adam(0.01))
    x = numbers(ROWS, 6)
    return fitted(model, {"inputs": x, "targets": (numbers(ROWS, 4, 1) > 0).astype("float32")})


@guide
def variational_autoencoder(strategy):
    class Sampling(layers.Layer):
        def call(self, inputs):
            mean, log_variance, noise = inputs
            return mean + ops.exp(0.5 * log_variance) * noise

    class Vae(keras.Model):
        def __init__(self, encoder, decoder, **kwargs):
            super().__init__(**kwargs)
            self.encoder = encoder
            self.decoder = decoder
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
            self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
            self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

        @property
        def metrics(self):
            return [
                self.total_loss_tracker,
                self.reconstruction_loss_tracker,
                self.kl_loss_tracker,
            ]

        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                mean, log_variance, z = self.encoder(data)
                reconstruction = self.decoder(z)
                reconstruction_loss = ops.mean(
                    ops.sum(keras.losses.binary_crossentropy(x, reconstruction), axis=(1,))
                )
                kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
                kl_loss = ops.mean(ops.sum(kl, axis=1))
                total_loss = reconstruction_loss + kl_loss
            grads = tape.gradient(total_loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            self.total_loss_tracker.update_state(total_loss)
            self.reconstruction_loss_tracker.update_state(reconstruction_loss)
            self.kl_loss_tracker.update_state(kl_loss)
            return {
                "loss": self.total_loss_tracker.result(),
                "reconstruction_loss": self.reconstruction_loss_tracker.result(),
                "kl_loss": self.kl_loss_tracker.result(),
            }

    with strategy.scope():
        image = keras.Input([4, 4])
        noise = keras.Input([2])
        hidden = layers.Dense(6, "relu")(layers.Flatten()(image))
        mean = layers.Dense(2)(hidden)
        log_variance = layers.Dense(2)(hidden)
        encoder = keras.Model(
            [image, noise], [mean, log_variance, Sampling()([mean, log_variance, noise])]
        )
        z = keras.Input([2])
        decoded = layers.Reshape([4, 4])(layers.Dense(16, "sigmoid")(z))
        model = Vae(encoder, keras.Model(z, decoded))
        model.compile(optimizer=keras.optimizers.Adam(0.01))
    x = (numbers(ROWS, 16) > 0).astype("float32").reshape(ROWS, 4, 4)
    return fitted(model, x, numbers(ROWS, 2, 1))


# --- Adversarial networks -------------------------------------------------------------------------
def dense_networks():
    discriminator = keras.Sequential(
        [keras.Input([6]), layers.Dense(5), layers.LeakyReLU(negative_slope=0.2), layers.Dense(1)],
        name="discriminator",
    )
    generator = keras.Sequential(
        [keras.Input([3]), layers.Dense(5, "relu"), layers.Dense(6)], name="generator"
    )
    return discriminator, generator


@guide
def adversarial_networks(strategy):
    class Gan(keras.Model):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator
            self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
            self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.loss_fn = loss_fn

        @property
        def metrics(self):
            return [self.d_loss_tracker, self.g_loss_tracker]

        def train_step(self, data):
            real, latent = data
            batch_size = ops.shape(real)[0]
            combined = ops.concatenate([self.generator(latent), real], axis=0)
            truth = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(truth, self.discriminator(combined))
            grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
            self.d_optimizer.apply(grads, self.discriminator.trainable_weights)
            with tf.GradientTape() as tape:
                predictions = self.discriminator(self.generator(latent))
                g_loss = self.loss_fn(ops.zeros((batch_size, 1)), predictions)
            grads = tape.gradient(g_loss, self.generator.trainable_weights)
            self.g_optimizer.apply(grads, self.generator.trainable_weights)
            self.d_loss_tracker.update_state(d_loss)
            self.g_loss_tracker.update_state(g_loss)
            return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}

    with strategy.scope():
        model = Gan(*dense_networks())
        model.compile(
            d_optimizer=keras.optimizers.Adam(0.003),
            g_optimizer=keras.optimizers.Adam(0.003),
            loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
        )
    return fitted(model, numbers(ROWS, 6), numbers(ROWS, 3, 1))


@guide(tolerance=1e-4)
def adversarial_networks_with_a_gradient_penalty(strategy):
    class WassersteinGan(keras.Model):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator

        def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.d_loss_fn = d_loss_fn
            self.g_loss_fn = g_loss_fn

        def gradient_penalty(self, real, fake):
            interpolated = real + 0.3 * (fake - real)
            with tf.GradientTape() as tape:
                tape.watch(interpolated)
                prediction = self.discriminator(interpolated, training=True)
            grads = tape.gradient(prediction, [interpolated])[0]
            norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1]))
            return tf.reduce_mean((norm - 1.0) ** 2)

        def train_step(self, data):
            real, latent = data
            for _ in range(2):
                with tf.GradientTape() as tape:
                    fake = self.generator(latent, training=True)
                    cost = self.d_loss_fn(
                        self.discriminator(real, training=True),
                        self.discriminator(fake, training=True),
                    )
                    d_loss = cost + 10.0 * self.gradient_penalty(real, fake)
                grads = tape.gradient(d_loss, self.discriminator.trainable_variables)
                self.d_optimizer.apply_gradients(
                    zip(grads, self.discriminator.trainable_variables, strict=True)
                )
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                g_loss = self.g_loss_fn(self.discriminator(fake, training=True))
            grads = tape.gradient(g_loss, self.generator.trainable_variables)
            self.g_optimizer.apply_gradients(
                zip(grads, self.generator.trainable_variables, strict=True)
            )
            return {"d_loss": d_loss, "g_loss": g_loss}

    with strategy.scope():
        model = WassersteinGan(*dense_networks())
        model.compile(
            d_optimizer=keras.optimizers.SGD(0.01),
            g_optimizer=keras.optimizers.SGD(0.01),
            d_loss_fn=lambda real, fake: tf.reduce_mean(fake) - tf.reduce_mean(real),
            g_loss_fn=lambda fake: -tf.reduce_mean(fake),
        )
    return fitted(model, numbers(ROWS, 6), numbers(ROWS, 3, 1))


# --- Other examples -------------------------------------------------------------------------------
@guide
def distillation(strategy):
    class Distiller(keras.Model):
        def __init__(self, student, teacher):
            super().__init__()
            self.teacher = teacher
            self.student = student

        def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn):
            super().compile(optimizer=optimizer, metrics=metrics)
            self.student_loss_fn = student_loss_fn
            self.distillation_loss_fn = distillation_loss_fn

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            teacher_pred = self.teacher(x, training=False)
            student_loss = self.student_loss_fn(y, y_pred)
            distillation_loss = self.distillation_loss_fn(
                ops.softmax(teacher_pred / 3.0, axis=1), ops.softmax(y_pred / 3.0, axis=1)
            ) * (3.0**2)
            return 0.1 * student_loss + 0.9 * distillation_loss

        def call(self, x):
            return self.student(x)

    def classifier(units):
        return keras.Sequential([keras.Input([6]), layers.Dense(units, "relu"), layers.Dense(3)])

    with strategy.scope():
        model = Distiller(student=classifier(4), teacher=classifier(8))
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
            student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            distillation_loss_fn=keras.losses.KLDivergence(),
        )
    x = numbers(ROWS, 6)
    return fitted(model, x, labels(x, 3), evaluated=True)


@guide
def transformer_for_text(strategy):
    class TransformerBlock(layers.Layer):
        def __init__(self, width, heads):
            super().__init__()
            self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width)
            self.ffn = keras.Sequential([layers.Dense(6, activation="relu"), layers.Dense(width)])
            self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
            self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)

        def call(self, inputs):
            out = self.layernorm1(inputs + self.attention(inputs, inputs))
            return self.layernorm2(out + self.ffn(out))

    class TokenAndPositionEmbedding(layers.Layer):
        def __init__(self, length, vocabulary, width):
            super().__init__()
            self.token = layers.Embedding(vocabulary, width, mask_zero=True)
            self.position = layers.Embedding(length, width)

        def call(self, x):
            return self.token(x) + self.position(ops.arange(0, ops.shape(x)[-1], 1))

    with strategy.scope():
        inputs = keras.Input([5])
        x = TransformerBlock(4, 2)(TokenAndPositionEmbedding(5, 9, 4)(inputs))
        outputs = layers.Dense(2, "softmax")(layers.GlobalAveragePooling1D()(x))
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    tokens = np.random.default_rng(0).integers(0, 9, (ROWS, 5))
    return fitted(model, tokens, (tokens.sum(1) % 2).astype("int32"), evaluated=True)


@guide
def structured_data(strategy):
    features = {
        "age": np.abs(numbers(ROWS, 1)) * 40,
        "sex": (numbers(ROWS, 1, 1) > 0).astype("int64"),
        "kind": np.random.default_rng(2).integers(0, 4, (ROWS, 1)),
    }
    target = (features["age"][:, 0] > 30).astype("float32")
    with strategy.scope():
        inputs = {name: keras.Input([1], name=name, dtype=x.dtype) for name, x in features.items()}
        normalization = layers.Normalization()
        normalization.adapt(features["age"])
        kinds = layers.Flatten()(layers.Embedding(4, 2)(inputs["kind"]))
        sex = layers.CategoryEncoding(2, "one_hot")(inputs["sex"])
        x = layers.Concatenate()([normalization(inputs["age"]), kinds, sex])
        outputs = layers.Dense(1, "sigmoid")(layers.Dense(4, "relu")(x))
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.Adam(0.01),
            "binary_crossentropy",
            metrics=["accuracy", keras.metrics.AUC(name="auc")],
        )
    return fitted(model, features, target, evaluated=True, class_weight={0: 1.0, 1: 2.5})


@guide
def collaborative_filtering(strategy):
    """The example multiplies all users of a batch with all movies of it, not row by row."""

    class Recommender(keras.Model):
        def __init__(self, users, movies, size):
            super().__init__()
            self.user_embedding = layers.Embedding(
                users, size, "he_normal", keras.regularizers.l2(1e-6)
            )
            self.user_bias = layers.Embedding(users, 1)
            self.movie_embedding = layers.Embedding(
                movies, size, "he_normal", keras.regularizers.l2(1e-6)
            )
            self.movie_bias = layers.Embedding(movies, 1)

        def call(self, inputs):
            user_vector = self.user_embedding(inputs[:, 0])
            movie_vector = self.movie_embedding(inputs[:, 1])
            dot = ops.tensordot(
                tfdist.all_gather_rows(user_vector), tfdist.all_gather_rows(movie_vector), 2
            )
            return ops.nn.sigmoid(
                dot + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1])
            )

    with strategy.scope():
        model = Recommender(5, 7, 3)
        model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy())
    random = np.random.default_rng(0)
    pairs = np.stack([random.integers(0, 5, ROWS), random.integers(0, 7, ROWS)], 1)
    return fitted(model, pairs, random.uniform(size=ROWS).astype("float32"))
