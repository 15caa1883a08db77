"""Test that a resumed training's log files equal those of an undisturbed one.

Resuming undoes what callbacks wrote to files after the last snapshot.
"""

import collections
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.unit.train.callbacks.test_backup_and_restore import STEPS, Interrupts, train
from tfdist.keras_compat import log_writers
from tfdist.train.callbacks import log_files

X = np.random.default_rng(1).normal(size=(16, 5)).astype(np.float32)
KERAS = keras.callbacks.TensorBoard
VALIDATION = {"validation_data": (X, X.sum(axis=1, keepdims=True)), "validation_batch_size": 8}


@pytest.fixture(params=["one_device", "mirrored"])
def strategy(request):
    return request.getfixturevalue(request.param)


def points(directory):
    """Return tags and steps of all values in the event files, and the values."""
    values = collections.defaultdict(list)
    for path in sorted(directory.glob("*/events*")):
        for event in map(
            tf.compat.v1.Event.FromString, tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
        ):
            for value in event.summary.value:
                if not value.tag.startswith(("keras", "speed/", "goodput/")):
                    values[path.parent.name, value.tag, event.step].append(
                        tf.make_ndarray(value.tensor)
                    )
    return values


def speeds(directory, tag):
    events = (
        map(tf.compat.v1.Event.FromString, tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
        for path in directory.glob("*/*.speed*")
    )
    return sorted(
        event.step
        for each in events
        for event in each
        for value in event.summary.value
        if value.tag == tag
    )


@pytest.mark.parametrize(
    ("board", "update_freq", "interrupt"),
    [(KERAS, "epoch", (1, 4)), (KERAS, 1, (1, 5)), (tfdist.TensorBoard, 3, (2, 0))],
)
def test_curves_have_each_point_once(one_device, tmp_path, board, update_freq, interrupt):
    boards = []

    def fit(name, **options):
        def callbacks(saves):
            boards.append(board(log_dir=str(tmp_path / name), update_freq=update_freq))
            return [saves, boards[-1]]

        return train(
            one_device,
            tmp_path / "backup",
            callbacks=callbacks,
            vectors=board is not KERAS,
            **VALIDATION,
            **options,
        )

    assert fit("whole")["ended"]
    assert not fit("cut", interrupt=interrupt)["ended"]
    for writer in [*log_writers(boards[-1]).values(), *getattr(boards[-1], "own_writers", ())]:
        writer.close()  # what was written since the snapshot is in the files
    assert fit("cut")["ended"]
    assert boards[-1].update_freq == update_freq
    whole = points(tmp_path / "whole")
    cut = points(tmp_path / "cut")
    assert any(tag.startswith("batch_") for _, tag, _ in whole) == (update_freq != "epoch")
    assert {key: len(values) for key, values in cut.items()} == dict.fromkeys(whole, 1)
    for key, (value,) in whole.items():
        np.testing.assert_allclose(cut[key][0], value, rtol=1e-5, err_msg=str(key))
    if board is tfdist.TensorBoard:
        # The second of two that were stopped after the last step of epoch 1 has run no step of it.
        for tag in ("speed/input_wait", "goodput/losses"):
            assert speeds(tmp_path / "cut", tag) == [0, 2]


def test_checkpoints_are_those_of_an_undisturbed_training(one_device, tmp_path):
    def fit(name, **options):
        (tmp_path / name).mkdir(exist_ok=True)
        saves = keras.callbacks.ModelCheckpoint(
            tmp_path / name / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=4
        )
        ended = train(
            one_device, tmp_path / "backup", callbacks=lambda backup: [backup, saves], **options
        )["ended"]
        assert saves.save_freq == 4
        return ended

    assert fit("whole")
    assert not fit("cut", interrupt=(1, 5))
    written = (tmp_path / "cut" / "2-1.weights.h5").read_bytes()
    assert fit("cut", seed=5)
    assert (
        sorted(os.listdir(tmp_path / "cut"))
        == sorted(os.listdir(tmp_path / "whole"))
        == [f"{e}-{b}.weights.h5" for e, b in [(1, 4), (2, 1), (2, 5), (3, 2), (3, 6)]]
    )
    assert (
        tmp_path / "cut" / "2-1.weights.h5"
    ).read_bytes() == written  # not once more, with what the weights are later


def test_an_error_while_steps_are_only_counted_leaves_no_silence(one_device, tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path / "logs", update_freq=3)
    options = {"callbacks": lambda saves: [saves, board], "save_freq": 4, "vectors": False}
    assert not train(one_device, tmp_path / "backup", interrupt=(1, STEPS), **options)["ended"]
    assert not train(one_device, tmp_path / "backup", interrupt=(1, 1), **options)["ended"]
    assert board.update_freq == 3


@pytest.mark.parametrize("log_dir", ["{}/logs", "ram://{}/logs"])
def test_files_are_truncated_to_the_recorded_length(tmp_path, log_dir):
    board = keras.callbacks.TensorBoard(log_dir.format(tmp_path))
    other = keras.callbacks.TensorBoard(log_dir.format(tmp_path / "other"))

    def write(name, content, into=board):
        path = os.path.join(into.log_dir, "train", name)
        tf.io.gfile.makedirs(os.path.dirname(path))
        with tf.io.gfile.GFile(path, "ab") as file:
            file.write(content)

    def read(into=board):
        directory = os.path.join(into.log_dir, "train")
        return {
            name: tf.io.gfile.GFile(os.path.join(directory, name), "rb").read()
            for name in tf.io.gfile.listdir(directory)
        }

    write("events.out.tfevents.1", b"abc")
    write("notes.txt", b"mine")
    recorded = log_files.sizes([board])
    write("events.out.tfevents.1", b"def")
    write("events.out.tfevents.2", b"new")
    write("notes.txt", b"more")
    write("events.out.tfevents.3", b"theirs", other)
    log_files.rewind(recorded, [board, other, Interrupts()])
    assert read() == {"events.out.tfevents.1": b"abc", "notes.txt": b"minemore"}
    assert read(other) == {"events.out.tfevents.3": b"theirs"}


def test_tables_are_truncated_to_the_recorded_length_and_continued(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n0,1\n1,2\n")  # of an earlier training, to which this one appends
    table = keras.callbacks.CSVLogger(path, append=True)
    recorded = log_files.table_sizes([table])
    path.write_text(path.read_text() + "0,5\n1,")
    again = keras.callbacks.CSVLogger(path)
    log_files.rewind_tables(recorded, [again, Interrupts()])
    assert path.read_text() == "epoch,loss\n0,1\n1,2\n"
    assert again.append
    stranger = keras.callbacks.CSVLogger(tmp_path / "other.csv")
    log_files.rewind_tables(recorded, [stranger])
    assert not stranger.append
