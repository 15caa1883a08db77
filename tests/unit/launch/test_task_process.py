"""Test that the launcher survives damaged files of a task."""

import json

import pytest

from tfdist.launch.script_runner import write_error
from tfdist.launch.task_process import _read_error


def test_an_error_file_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / "worker-0.error.json")
    assert _read_error(path) is None
    write_error(path, ValueError("bad"))
    record = _read_error(path)
    assert (record["type"], record["message"]) == ("ValueError", "bad")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"3",
        b"[" * 10_000,
        b'{"type": "\xff"}',
        json.dumps({"type": "ValueError", "message": "bad", "time": 1.5}).encode(),
        json.dumps({"type": "A", "message": 3, "traceback": "", "time": 1.5}).encode(),
        json.dumps({"type": "A", "message": "", "traceback": "", "time": "now"}).encode(),
    ],
)
def test_damaged_error_file_is_ignored(tmp_path, content):
    path = tmp_path / "worker-0.error.json"
    path.write_bytes(content)
    assert _read_error(str(path)) is None
