"""Train two workers with native collectives: one is killed, and after the restart they compare.

The command is `native.py DIRECTORY`. Each worker writes `result-INDEX.pickle`: for each case, the
history and weights with TensorFlow's collectives and with each kind of native ones.
"""

import functools
import os
import pathlib
import pickle
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.cluster.handshake import PeersAbsent
from tfdist.parallel import fsdp, zero
from tfdist.parallel.collectives.native.transport import Transport, open_transport
from tfdist.runtime import launch_protocol
from tfdist.strategies import multi_worker
from tfdist.train.synchronous.replica_state import all_gather

ROWS = 52
BATCH = 12  # the last batch has 4 rows
KILLED_AT = (1, 2)  # epoch, step


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 6)).astype(np.float32)
    return x, (x @ random.normal(size=(6, 3))).argmax(1).astype(np.int32)


def dense():
    return keras.Sequential(
        [keras.Input([6]), keras.layers.Dense(301, "tanh"), keras.layers.Dense(3)]
    )


def embedded():
    """Return a model with sparse gradients, which travel by TensorFlow's collectives."""
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Lambda(lambda x: keras.ops.cast(abs(x), "int32")),
            keras.layers.Embedding(9, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def padded():
    """Return a model whose padding and convolution oneDNN fuses."""
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Reshape([2, 3, 1]),
            keras.layers.ZeroPadding2D(1),
            keras.layers.Conv2D(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


class Wide(keras.Model):
    """Use large kernels in every way: once, twice, read by another layer, and in a penalty."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(516, "tanh")
        self.shared = keras.layers.Dense(516, "tanh")
        self.read = keras.layers.Dense(516, use_bias=False)
        self.last = keras.layers.Dense(3)

    def build(self, shape):
        self.first.build(shape)
        for layer in (self.shared, self.read, self.last):
            layer.build((*shape[:-1], 516))
        self.built = True

    def call(self, x):
        x = self.shared(self.shared(self.first(x)))
        x = self.read(x) + keras.ops.matmul(x, keras.ops.transpose(self.read.kernel))
        return self.last(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(self(x))
        return loss + 0.01 * tf.reduce_mean(tape.gradient(total, x) ** 2)


class Span(keras.metrics.Metric):
    """Return the span of all logits, for which replicas gather their rows."""

    def __init__(self):
        super().__init__(name="span")
        self.least = self.add_weight(shape=(), initializer="zeros", name="least")
        self.most = self.add_weight(shape=(), initializer="zeros", name="most")

    def update_state(self, y, logits, sample_weight=None):
        self.least.assign(tf.minimum(self.least, tf.reduce_min(logits)))
        self.most.assign(tf.maximum(self.most, tf.reduce_max(logits)))

    def result(self):
        return self.most - self.least


class Synchronize(keras.callbacks.Callback):
    """Synchronize the replicas after each step, as a save does."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.distribute_strategy.tfdist_engine.synchronize(self.model)


def fitted(
    strategy,
    model=dense,
    shard=None,
    sync=None,
    callbacks=(),
    epochs=2,
    rows=ROWS,
    predicts=False,
    **compiled,
):
    keras.utils.set_random_seed(1)
    strategy.tfdist_engine.use(tfdist.sync.policy(sync))
    with strategy.scope():
        built = model()
        optimizer = keras.optimizers.Adam(0.01)
        if shard is fsdp:
            fsdp(built)
        if shard in (1, 2):
            optimizer = zero(optimizer, stage=shard)
        built.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", Span()],
            **compiled,
        )
    x, y = data()
    history = built.fit(
        x[:rows],
        y[:rows],
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    predictions = [built.predict(x, batch_size=BATCH, verbose=0)] if predicts else []
    return history.history, [*built.get_weights(), *predictions]


CASES = {
    "single steps": {},
    "steps together": {"steps_per_execution": 3},
    "bfloat16": {"sync": "bfloat16"},
    "sparse": {"model": embedded},
    "even batches": {"rows": ROWS // BATCH * BATCH},
    "local SGD": {"sync": tfdist.sync.LocalSGD(1), "epochs": 8, "callbacks": [Synchronize()]},
    "few rows": {"model": Wide, "steps_per_execution": 3},
    "few rows, zero 1": {"model": Wide, "shard": 1},
    "few rows, zero 2": {"model": Wide, "shard": 2, "steps_per_execution": 2},
    "zero": {"shard": 1},
    "fsdp": {"shard": fsdp, "steps_per_execution": 2},
    "fsdp of a padded convolution": {"shard": fsdp, "model": padded, "predicts": True},
}
# ZeRO gives the numbers of the same training without it.
EQUAL = {"few rows, zero 1": "few rows", "few rows, zero 2": "few rows"}
KINDS = {
    "tensorflow": CASES.keys() - EQUAL,
    "native": CASES,
    "sockets": ("steps together", "few rows", "fsdp"),
    "python": ("steps together", "fsdp"),
}


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def transports(strategy):
    """Return the kinds of collectives by name; None is TensorFlow's."""
    engine = strategy.tfdist_engine
    workers = engine.placement.tasks
    more = functools.partial(
        open_transport,
        engine.placement.rank,
        ["127.0.0.1:1"] * len(workers),
        workers,
        launch_protocol.task_secret(),
        functools.partial(all_gather, strategy, engine.placement),
        60.0,
    )
    return {
        "tensorflow": None,
        "native": engine.transport,
        "sockets": more(shared=False),
        "python": more(compiled=False),
    }


def initial_values(strategy):
    """Return own initial values of many kinds, and those that variables then have."""
    random = np.random.default_rng(strategy.tfdist_engine.placement.rank)
    drawn = [
        random.uniform(-99, 99, shape).astype(dtype)
        for dtype in ("float64", "float32", "float16", "int64", "int32", "int8", "uint16", "bool")
        for shape in ((), (0, 3), (7,))
    ]
    with strategy.scope():
        variables = [tf.Variable(value) for value in drawn]
        narrow = [tf.Variable(tf.cast(value, tf.bfloat16)) for value in drawn[:3]]
    return drawn, [v.numpy() for v in variables], [tf.cast(v, tf.float32).numpy() for v in narrow]


def attempt(strategy, refused):
    """Return whether "auto" is native where the connections of one worker, if any, are refused."""
    placement = strategy.tfdist_engine.placement

    class Connections:
        def close(self):
            pass

    def connect(seconds):
        if placement.rank == refused:
            raise PeersAbsent("worker:1 did not connect to worker:0 in time")
        return Connections()

    found = multi_worker._try_native(strategy, placement, ["/cpu:0"], connect)
    return isinstance(found, Connections)


def main(directory):
    directory = pathlib.Path(directory)
    strategy = tfdist.make_strategy(communication="native", timeout=100)
    engine = strategy.tfdist_engine
    first = launch_protocol.Launched.from_environ().attempt == 0
    resumed = fitted(
        strategy,
        epochs=3,
        callbacks=[
            tfdist.BackupAndRestore(directory / "backup", save_freq=2),
            *([Kill()] if first and engine.placement.rank == 1 else []),
        ],
    )
    traced = []
    call = Transport._call

    def noted(self, collective, tensors, name, *more, **options):
        traced.append((self.kind, name))
        return call(self, collective, tensors, name, *more, **options)

    Transport._call = noted
    results = {("resumed", "native"): resumed, ("whole", "native"): fitted(strategy, epochs=3)}
    kinds = transports(strategy)
    for kind, transport in kinds.items():
        engine.use_transport(transport)
        for case in sorted(KINDS[kind]):
            results[case, kind] = fitted(strategy, **CASES[case])
        results["first", kind] = initial_values(strategy)
    results["attempts"] = [attempt(strategy, refused) for refused in (None, 0, 1)]
    results["traced"] = traced
    results["kinds"] = {kind: t.kind for kind, t in kinds.items() if t}
    (directory / f"result-{engine.placement.rank}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
