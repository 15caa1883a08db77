"""Test that no damage in the records of an audit passes for rows that a worker received."""

import numpy as np
import pytest

from tfdist.tools.audit import row_records


def test_every_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "worker-0.steps"
    with open(path, "wb", buffering=0) as file:
        for step in range(2):
            row_records.append(
                file, row_records.Step(0, step, 8, 1.5, 100, np.arange(3) + 3 * step)
            )
    whole = path.read_bytes()
    assert [step.numbers.tolist() for step in row_records.read(path)] == [[0, 1, 2], [3, 4, 5]]
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"worker-0.steps, byte (0|80): damaged"):
            list(row_records.read(path))
