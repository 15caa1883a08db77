"""Scalars arrive in every writer, whole lines only."""

import io

import pytest

from tfdist.telemetry.writers import ConsoleWriter, JsonlWriter, Telemetry, TensorBoardWriter, read_jsonl


def test_every_writer_gets_every_step(tmp_path):
    stream, journal = io.StringIO(), JsonlWriter(tmp_path / "new" / "history.jsonl")
    telemetry = Telemetry([ConsoleWriter(stream), journal])
    for step in range(3):
        telemetry.scalars(step, {"loss": 1 / (step + 1)})
    assert stream.getvalue().splitlines()[2] == "epoch 2  loss 0.3333"
    assert [line["step"] for line in read_jsonl(journal.path)] == [0, 1, 2]


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [0, 1]), (3, [0, 1, 2])])
def test_a_resumed_run_writes_its_steps_once(tmp_path, step, kept):
    journal = JsonlWriter(tmp_path / "history.jsonl")
    journal.rewind(step, 0)
    assert not journal.path.exists()
    for number in range(3):
        journal.scalars(number, {"loss": number})
    journal.rewind(step, 0)
    assert [line["step"] for line in read_jsonl(journal.path)] == kept


def test_tensorboard_finds_the_curve(tmp_path):
    TensorBoardWriter(tmp_path).scalars(7, {"loss": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("loss")
    assert event.step == 7
