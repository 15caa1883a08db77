"""Test that curves are read from event files as they were written, or damage is reported."""

import pytest
import tensorflow as tf

from tfdist.tools.report import tensorboard_events
from tfdist.tools.report.run_files import Reader


def test_no_flipped_bit_changes_a_curve(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        for step in range(3):
            tf.summary.scalar("epoch_loss", 1 / (1 + step), step)
            tf.summary.text("goodput/losses", "| a | table |", step)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    curves = tensorboard_events.scalars([tmp_path], Reader())
    assert list(curves) == ["epoch_loss"]
    written = curves["epoch_loss"]
    assert [scalar.value for scalar in written] == pytest.approx([1, 1 / 2, 1 / 3])
    for bit in range(0, 8 * len(whole), 5):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        reader = Reader()
        left = tensorboard_events.scalars([tmp_path], reader).get("epoch_loss", [])
        assert left == written[: len(left)]
        assert f"{path} is cut off or damaged after" in reader.problems[0]
