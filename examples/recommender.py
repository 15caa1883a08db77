"""Train a DLRM to tell which advertisements people click, from files in Criteo's format.

    python examples/recommender.py --train="day_[0-5]" --test=day_6    # this machine's devices
    tfdist launch --workers 2 -- examples/recommender.py --train=... --test=...
    tfdist launch --chief --workers 2 --ps 2 -- \\
        examples/recommender.py --strategy=parameter_server --train=... --test=...

examples/synthetic_criteo.py writes small files of that format. A line is a label, 13 counts and 26
categories, with tabs between them; counts and categories may be empty. The lines are written to
TFRecord files once, in --records.

All categories share one embedding table, in which each of them has --rows rows. Replicas or
parameter servers hold a part of the table each. The model is that of Naumov et al. 2019, "Deep
Learning Recommendation Model for Personalization and Recommendation Systems", arXiv 1906.00091.
"""

import contextlib
import os

import keras
import tensorflow as tf
from absl import flags

import tfdist

COUNTS = 13
CATEGORIES = 26
TRAIN = flags.DEFINE_string("train", None, "Files to train on, as a pattern.", required=True)
TEST = flags.DEFINE_string("test", None, "Files to evaluate on, as a pattern.", required=True)
RECORDS = flags.DEFINE_string("records", "criteo", "Directory for TFRecord files of the lines.")
ROWS = flags.DEFINE_integer("rows", 1000, "Rows of the table for each category.", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 16, "Numbers in a row of the table.", lower_bound=1)
RATE = flags.DEFINE_float("learning_rate", 0.2, "Learning rate of Adagrad.")
EPOCHS = flags.DEFINE_integer("epochs", 2, "Passes over the training data.", lower_bound=1)
GLOBAL_BATCH = flags.DEFINE_integer("global_batch", 128, "Examples of a step.", lower_bound=1)


def parse(lines):
    """Return counts `[n, 13]` and categories `[n, 26]` of lines `[n]`, and their labels `[n]`."""
    label, *fields = tf.io.decode_csv(
        lines, [[0]] + [[0]] * COUNTS + [[""]] * CATEGORIES, "\t", use_quote_delim=False
    )
    counts, categories = tf.stack(fields[:COUNTS], 1), tf.stack(fields[COUNTS:], 1)
    return {"counts": counts, "categories": categories}, label


def examples(flag):
    """Return the source of the lines of a flag's files, after writing them to records once."""
    files = sorted(tf.io.gfile.glob(flag.value))
    if not files:
        raise ValueError(f"--{flag.name}: expected a pattern of files, found none: {flag.value}.")
    directory = os.path.join(RECORDS.value, flag.name)
    lines = tf.data.TextLineDataset(files)
    try:
        tfdist.data.write(lines.batch(1024).map(parse).unbatch(), directory)
    except ValueError as error:
        raise ValueError(f"--{flag.name}={flag.value}: {error}") from error
    return tfdist.data.records(directory, access="stream")


def table_rows(x, y):
    """Return inputs of the model: logarithms of the counts, and the row of each category."""
    rows = tf.strings.to_hash_bucket_fast(x["categories"], ROWS.value)
    counts = tf.math.log1p(tf.cast(tf.maximum(x["counts"], 0), tf.float32))
    return {"counts": counts, "rows": rows + ROWS.value * tf.range(CATEGORIES, dtype=tf.int64)}, y


def build():
    """Return a DLRM: products of each two vectors, of the categories and of the counts."""
    counts = keras.Input([COUNTS], name="counts")
    rows = keras.Input([CATEGORIES], dtype="int64", name="rows")
    bottom = keras.Sequential(
        [keras.layers.Dense(64, "relu"), keras.layers.Dense(WIDTH.value, "relu")]
    )(counts)
    vectors = tfdist.layers.ShardedEmbedding(CATEGORIES * ROWS.value, WIDTH.value)(rows)
    vectors = keras.layers.Concatenate(1)([keras.layers.Reshape([1, WIDTH.value])(bottom), vectors])
    products = keras.layers.Flatten()(keras.layers.Dot(2)([vectors, vectors]))
    joined = keras.layers.Concatenate()([bottom, products])
    top = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(1, "sigmoid")])
    return keras.Model({"counts": counts, "rows": rows}, top(joined))


def main(_):
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(flags.FLAGS.seed)
    train, test = (
        tfdist.data.pipeline(examples(flag), GLOBAL_BATCH.value, batch_transform=table_rows)
        for flag in (TRAIN, TEST)
    )
    on_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    with strategy.scope():
        with contextlib.nullcontext() if on_servers else tfdist.parallel.deferred():
            model = build()
        if not on_servers:  # servers share the table by themselves
            tfdist.parallel.fsdp(model)
        model.compile(keras.optimizers.Adagrad(RATE.value), "binary_crossentropy", metrics=["auc"])
    callbacks = []
    if flags.FLAGS.backup_dir:
        callbacks.append(tfdist.BackupAndRestore(flags.FLAGS.backup_dir))
    model.fit(train, epochs=EPOCHS.value, callbacks=callbacks, verbose=2)
    results = model.evaluate(test, verbose=0, return_dict=True)
    print(f"test AUC {results['auc']:.4f}", flush=True)


if __name__ == "__main__":
    tfdist.app.run(main)
