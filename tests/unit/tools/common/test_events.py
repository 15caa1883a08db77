"""Test that a damaged file of events is named, and a line that is being written is not damage."""

import pytest

from tfdist.tools.common import events


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "worker-0.events"
    with events.Writer(path) as write:
        write("epoch", epoch=0)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "ep')
    assert events.read(path) == [{"event": "epoch", "epoch": 0}]
    for line in (b"3", b"{}", b"[" * 10_000, b'{"event": 3}', b'{"event": "\xff"}'):
        path.write_bytes(whole + line + b"\n")
        with pytest.raises(ValueError, match=r"worker-0.events, line 2: damaged: "):
            events.read(path)
