"""Test that scalars arrive in every writer, in whole lines only."""

import io

import pytest
import tensorflow as tf

from tfdist.telemetry import step_records
from tfdist.telemetry.layout import append_json, read_json_lines
from tfdist.telemetry.writers import ConsoleWriter, JsonlWriter, Telemetry, TensorBoardWriter


def test_every_writer_gets_every_step(tmp_path):
    stream = io.StringIO()
    journal = JsonlWriter(tmp_path / "new" / "history.jsonl")
    telemetry = Telemetry([ConsoleWriter(stream), journal])
    for step in range(3):
        telemetry.scalars(step, {"loss": 1 / (step + 1)})
    assert stream.getvalue().splitlines()[2] == "epoch 2  loss 0.3333"
    assert [line["step"] for line in read_json_lines(journal.path)] == [0, 1, 2]


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [0, 1]), (3, [0, 1, 2])])
def test_a_resumed_run_writes_its_steps_once(tmp_path, step, kept):
    journal = JsonlWriter(tmp_path / "history.jsonl")
    journal.rewind(step, 0)
    assert not journal.path.exists()
    for number in range(3):
        journal.scalars(number, {"loss": number})
    journal.rewind(step, 0)
    assert [line["step"] for line in read_json_lines(journal.path)] == kept


def test_truncated_line_harms_no_other_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json(path, {"step": 0})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 1, "lo')
    for step in (2, 3):
        append_json(path, {"step": step})
    assert read_json_lines(path) == [{"step": 0}, {"step": 2}, {"step": 3}]
    assert path.read_text().count("\n") == 4


def test_all_writers_are_closed_even_if_one_fails(tmp_path):
    class Fails(ConsoleWriter):
        def close(self):
            raise OSError("no space")

    board = TensorBoardWriter(tmp_path)
    board.scalars(0, {"loss": 0.5})
    with pytest.raises(OSError, match="no space"):
        Telemetry([Fails(), board]).close()
    assert board._writer is None


def test_tensorboard_finds_the_curve(tmp_path):
    with tf.summary.record_if(False):  # others' summaries
        TensorBoardWriter(tmp_path).scalars(7, {"loss": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("loss")
    assert event.step == 7


def test_lines_that_are_no_objects_are_skipped(tmp_path):
    path = tmp_path / "history.jsonl"
    deep = b"[" * 10_000
    path.write_bytes(b'{"step": 0}\n3\nnull\n[1]\n{"name": "\xc3\n' + deep + b'\n{"step": 1}\n')
    assert read_json_lines(path) == [{"step": 0}, {"step": 1}]


def test_damaged_lines_do_not_stop_a_resumed_run(tmp_path, caplog):
    writer = JsonlWriter(tmp_path / "history.jsonl")
    for epoch in range(3):
        writer.scalars(epoch, {"loss": 2.0 - epoch})
    content = writer.path.read_text()
    writer.path.write_text('{"step": "one"}\n{"loss": 3}\n{"step": null}\n' + content)
    writer.rewind(2, 0)
    assert read_json_lines(writer.path) == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.0}]
    assert [f"{writer.path}: the line" in message for message in caplog.messages] == [True] * 3


def test_a_damaged_step_breakdown_is_named(tmp_path):
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "worker-0" / "step_breakdown.jsonl").write_text('{"worker": 0}\n')
    with pytest.raises(ValueError, match=r"worker-0/step_breakdown.jsonl: damaged: .*missing 6"):
        step_records.read(tmp_path)
