"""Test TensorBoard's additional data beside curves: traces of single steps, and images.

Also test what other writers get.
"""

import logging
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfdist
from tests.first_states import repeatable
from tests.unit.train.callbacks.test_backup_and_restore import train
from tfdist import config
from tfdist.run import train_command
from tfdist.telemetry.layout import read_json_lines
from tfdist.telemetry.writers import JsonlWriter, TensorBoardWriter
from tfdist.train.callbacks.image_samples import caption, probabilities
from tfdist.train.callbacks.saving import same_on_workers

STEPS = 5


def images(classes=3):
    random = np.random.default_rng(1)
    x = random.random((STEPS * 4, 6, 6, 1), np.float32)
    y = random.integers(0, classes, STEPS * 4)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


CANNOT_WRITE = r"\(log_dir=\.\.\.\): expected a directory that can be written, received "
MODELS = {}  # what takes most of the time is to trace a model's steps


def model_of(strategy, outputs, compiled):
    """Return a model in its first state."""
    key = id(strategy), outputs, repr(compiled)
    keras.utils.set_random_seed(1)
    if key not in MODELS:
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6, 6, 1)),
                    keras.layers.Flatten(),
                    keras.layers.Dense(outputs, "softmax"),
                ]
            )
            model.compile(
                **{"optimizer": "adam", "loss": "sparse_categorical_crossentropy", **compiled}
            )
            MODELS[key] = strategy, repeatable(model)
    _, fresh = MODELS[key]
    return fresh()


def fit(strategy, *callbacks, epochs=2, outputs=3, validated=False, **compiled):
    model = model_of(strategy, outputs, compiled)
    model.fit(
        images(),
        validation_data=images() if validated else None,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model


def traced(directory):
    """Return the numbers of the steps in the traces of a directory, in order."""
    steps = []
    for path in directory.glob("plugins/profile/*/*.xplane.pb"):
        for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
            names = {key: value.name for key, value in plane.stat_metadata.items()}
            steps += [
                stat.int64_value
                for line in plane.lines
                for event in line.events
                if plane.event_metadata[event.metadata_id].name == "train"
                for stat in event.stats
                if names[stat.metadata_id] == "step_num"
            ]
    return sorted(steps)


def test_a_profile_has_the_steps_it_was_asked_for(mirrored, tmp_path):
    """The steps lie in two epochs, and each call would run several of an epoch's steps."""
    board = tfdist.TensorBoard(tmp_path, "try", profile="steps=4..7", profile_workers="all")
    assert (
        int(fit(mirrored, board, validated=True, metrics=["accuracy"]).optimizer.iterations.numpy())
        == 2 * STEPS
    )
    assert traced(tmp_path / "try" / "train") == [4, 5, 6, 7]


def test_a_profile_that_training_does_not_reach_is_named(one_device, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tfdist"):
        model = fit(one_device, tfdist.TensorBoard(tmp_path, profile="steps=11..12", graph=False))
    assert "steps 11 to 12 did not run in this fit" in caplog.text
    assert traced(tmp_path / "train") == []
    caplog.clear()
    with caplog.at_level(
        logging.WARNING, "tfdist"
    ):  # as after a resume: what was beyond the window is no miss
        model.fit(
            images(),
            epochs=1,
            verbose=0,
            callbacks=[tfdist.TensorBoard(tmp_path, profile="steps=2..3", graph=False)],
        )
    assert "profile" not in caplog.text


def test_a_profile_has_whole_executions(mirrored, tmp_path):
    """Executions have 2, 2 and 1 steps in each epoch; the trace names the first of each."""
    fit(
        mirrored,
        tfdist.TensorBoard(tmp_path, profile="steps=4..7", graph=False),
        validated=True,
        steps_per_execution=2,
    )
    assert traced(tmp_path / "train") == [3, 5, 6]


def test_two_profiles_have_each_their_steps(mirrored, tmp_path):
    boards = [
        tfdist.TensorBoard(tmp_path, name, profile=steps, graph=False)
        for name, steps in (("a", "steps=7..7"), ("b", "steps=9..9"))
    ]
    pauses = []

    class Looks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            pauses.append(sorted(self.model.train_function.pauses.values()))

    fit(mirrored, *boards, Looks())
    assert [traced(tmp_path / name / "train") for name in "ab"] == [[7], [9]]
    assert pauses == [
        [6, 8],
        [1, 3],
    ]  # neither takes the place of the other's, in steps of the epoch


def test_the_profiler_ends_with_a_fit_that_fails(mirrored, tmp_path):
    def fail(batch, logs):
        if batch == 3:
            raise RuntimeError("for the test")

    board = tfdist.TensorBoard(tmp_path, profile="steps=3..5", graph=False)
    with pytest.raises(RuntimeError, match="for the test"):
        fit(mirrored, board, keras.callbacks.LambdaCallback(on_train_batch_begin=fail))
    assert traced(tmp_path / "train") == [3, 4]
    tf.profiler.experimental.start(str(tmp_path))  # another one may
    tf.profiler.experimental.stop(save=False)


def test_a_trace_that_cannot_be_written_is_a_warning(one_device, tmp_path, caplog):
    board = tfdist.TensorBoard(tmp_path, profile="steps=3..3", graph=False)
    (tmp_path / "train" / "plugins").mkdir(parents=True)
    (tmp_path / "train" / "plugins" / "profile").write_text("a file")
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert int(fit(one_device, board).optimizer.iterations.numpy()) == 2 * STEPS
    assert "profile: could not trace steps 3 to 3 to" in caplog.text


def test_a_model_without_an_optimizer_has_a_profile(one_device, tmp_path):
    class Counts(keras.Model):
        def train_step(self, data):
            return {"loss": keras.ops.sum(data[1]) * 0}

    with one_device.scope():
        inputs = keras.Input((6, 6, 1))
        model = Counts(inputs, keras.layers.Flatten()(inputs))
        model.compile(optimizer=None)
    model.fit(
        images(),
        epochs=2,
        verbose=0,
        callbacks=[tfdist.TensorBoard(tmp_path, profile="steps=5..6", graph=False)],
    )
    assert traced(tmp_path / "train") == [5, 6]


def test_a_worker_has_a_directory_in_a_bucket_too():
    board = tfdist.TensorBoard("gs://bucket/logs", "try")
    placement = types.SimpleNamespace(rank=1, workers=2)
    model = types.SimpleNamespace(
        distribute_strategy=types.SimpleNamespace(
            tfdist_engine=types.SimpleNamespace(placement=placement)
        )
    )
    keras.callbacks.Callback.set_model(board, model)  # the board's own would write
    assert board._worker_directory() == "gs://bucket/logs/try/worker-1"


def test_a_graph_that_cannot_be_written_is_a_warning(one_device, tmp_path, caplog, monkeypatch):
    def fail(graph):
        raise OSError("no space")

    monkeypatch.setattr(tf.summary, "graph", fail)
    with caplog.at_level(logging.WARNING, "tfdist"):
        fit(one_device, tfdist.TensorBoard(tmp_path), epochs=1)
    assert "TensorBoard gets no graph" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "steps=", "steps=5..2", "steps=0..2", "10..15", "steps=1-2", "steps=1..2..3"]
)
def test_a_bad_profile_is_an_error(text, tmp_path):
    for name, call in (
        ("profile", lambda: tfdist.TensorBoard(tmp_path, profile=text)),
        ("telemetry.profile", lambda: config.Telemetry(profile=text)),
        ("--profile", lambda: train_command.parse(["--config=any.py", "--profile", text])),
        ("--profile", lambda: train_command.parse(["--config=any.py", f"--profile={text}"])),
    ):
        with pytest.raises(
            ValueError,
            match=(
                rf"^{name}: expected steps from 1 on, the first and the last, "
                r"such as steps=10\.\.15; received"
            ),
        ):
            call()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("{}/file", "{}/file is not a directory"),
        ("{}/file/below", "{}/file is not a directory"),
        ("/proc/tfdist", "No such file or directory"),
    ],
)
def test_a_directory_that_cannot_be_written_is_named(place, reason, tmp_path):
    (tmp_path / "file").touch()
    place, reason = place.format(tmp_path), reason.format(tmp_path)
    with pytest.raises(ValueError, match=f"{CANNOT_WRITE}{place}: {reason}"):
        TensorBoardWriter(place).scalars(0, {"loss": 1.0})


def test_all_that_write_name_a_directory_that_cannot_be_written(one_device, tmp_path):
    place = f"{tmp_path}/file"
    (tmp_path / "file").touch()
    reason = f"{place} is not a directory"
    for write in (
        lambda: fit(one_device, keras.callbacks.TensorBoard(place)),
        lambda: fit(one_device, tfdist.TensorBoard(place)),
        lambda: fit(tf.distribute.get_strategy(), tfdist.TensorBoard(place, "try", graph=False)),
        lambda: fit(one_device, tfdist.ImageSamples(place, images(), run="try")),
    ):
        with pytest.raises(ValueError, match=f"{CANNOT_WRITE}{place}.*: {reason}"):
            write()
    path = tmp_path / "settings.py"
    path.write_text("import tfdist\n\ndef get_config():\n    return tfdist.config.default()\n")
    with pytest.raises(ValueError, match=f"^output.dir: expected .*{place}: {reason}"):
        train_command.run(
            train_command.parse(
                [f"--config={path}", f"--config.output.dir={place}", "--config.name=try"]
            )
        )


def test_the_flag_is_short_for_the_key(tmp_path):
    path = tmp_path / "settings.py"
    path.write_text("import tfdist\n\ndef get_config():\n    return tfdist.config.default()\n")
    for words in (
        ["--profile", "steps=3"],
        ["--profile=steps=3"],
        ["--config.telemetry.profile=steps=3"],
    ):
        assert train_command.parse([f"--config={path}", *words]).telemetry.profile == "steps=3"
    with pytest.raises(ValueError, match=r"expected tensorboard in telemetry\.backends"):
        train_command.run(
            train_command.parse(
                [f"--config={path}", "--profile=steps=3", "--config.telemetry.backends=jsonl"]
            )
        )
    with pytest.raises(ValueError, match=r"received 'tensorbord'\. Did you mean tensorboard"):
        train_command.parse([f"--config={path}", "--config.telemetry.backends=tensorbord"])


def test_images_show_predictions_of_the_model(mirrored, tmp_path):
    samples = tfdist.ImageSamples(
        tmp_path, images(), 6, run="try", classes=["ant", "bee", "cat"], every=2
    )
    fit(mirrored, samples, epochs=4, validated=True)
    (path,) = (tmp_path / "try" / "validation").iterdir()
    events = map(
        tf.compat.v1.Event.FromString, tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    )
    image_of_step = {event.step: value for event in events for value in event.summary.value}
    assert sorted(image_of_step) == [1, 3]
    width, height, picture = tf.make_ndarray(image_of_step[3].tensor)
    assert tf.io.decode_png(picture).shape == (int(height), int(width), 3)
    assert len(samples.images) == len(samples.labels) == 6


def test_data_that_are_not_images_are_named(tmp_path):
    vectors = tf.data.Dataset.from_tensors((np.zeros([2, 3], np.float32), np.zeros([2])))
    with pytest.raises(
        ValueError,
        match=(
            r"data: expected images \[batch, height, width, 1, 3 or 4\] with labels \[batch\]; "
            r"received \[2, 3\] with \[2\]"
        ),
    ):
        tfdist.ImageSamples(tmp_path, vectors)
    with pytest.raises(ValueError, match="count: expected a number, 1 or more; received 0"):
        tfdist.ImageSamples(tmp_path, images(), 0)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (
            [0, 3],
            ["a", "b", "c"],
            "classes: expected a name for each label; received 3 names, and labels from 0 to 3",
        ),
        ([0, -1], ["a", "b", "c"], "received 3 names, and labels from -1 to 0"),
        (
            ["a", "b"],
            None,
            "data: expected labels that are integer class numbers; received",
        ),
        ([0.0, 0.5], None, "class numbers; received float32"),
    ],
)
def test_labels_without_a_class_are_named_when_it_is_made(tmp_path, labels, classes, message):
    data = tf.data.Dataset.from_tensors((np.zeros([2, 6, 6, 1], np.float32), tf.constant(labels)))
    with pytest.raises(ValueError, match=message):
        tfdist.ImageSamples(tmp_path, data, classes=classes)


def test_a_model_with_other_outputs_is_named_on_all_workers(one_device, tmp_path):
    samples = tfdist.ImageSamples(tmp_path, images(), 4, classes=["ant", "bee", "cat"])
    with pytest.raises(
        ValueError,
        match="classes: expected a name for each of the model's 4 outputs; received 3 names",
    ):
        fit(one_device, samples, outputs=4)
    samples._writer = None  # as on a worker that does not write
    with pytest.raises(ValueError, match="the model's 4 outputs"):
        samples.on_epoch_end(0)
    with pytest.raises(ValueError, match=r"of 2 classes or more; received shape \[4, 1\]"):
        fit(one_device, tfdist.ImageSamples(tmp_path, images(), 4), outputs=1, loss="mse")


def test_logits_are_shown_as_probabilities():
    logits = np.array([[12.34, 12.34 + np.log(3)], [-1e4, 1e4]], np.float32)
    assert [caption(row, 1) for row in probabilities(logits)] == ["1 75 %", "1 100 %"]
    said = np.array([[0.1, 0.9], [0.3, 0.7]])
    assert (probabilities(said) == said).all()


@pytest.mark.parametrize("other", [{}, {"every": 2}])
def test_image_samples_of_one_worker_alone_are_noticed(tmp_path, other):
    samples = tfdist.ImageSamples(tmp_path, images(), 4)
    assert same_on_workers([samples]) != same_on_workers(
        [tfdist.ImageSamples(tmp_path, images(), 4, **other)] if other else []
    )


def test_a_log_has_each_epoch_and_step_once_after_a_resume(one_device, tmp_path):
    def attempt(name, **options):
        log = tfdist.Log([JsonlWriter(tmp_path / f"{name}.jsonl")], every=2)
        return train(
            one_device,
            tmp_path / "backup",
            callbacks=lambda saves: [saves, log],
            save_freq=3,
            **options,
        )

    assert attempt("whole")["ended"]
    assert not attempt("cut", interrupt=(1, 5))["ended"]
    assert attempt("cut", seed=5)["ended"]
    whole = read_json_lines(tmp_path / "whole.jsonl")
    cut = read_json_lines(tmp_path / "cut.jsonl")
    assert [line["batch"] for line in whole if "batch" in line][:3] == [2, 4, 6]
    assert [line["step"] for line in whole if "step" in line] == [0, 1, 2]
    assert len(cut) == len(whole)
    for a, b in zip(whole, cut, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"time", "seconds"}:
            assert b[name] == pytest.approx(a[name], rel=1e-5), name


def test_a_bad_number_of_steps_is_an_error():
    with pytest.raises(ValueError, match="every: expected a number of steps"):
        tfdist.Log([], every=0)
