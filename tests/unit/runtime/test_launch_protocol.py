"""Test that damage in the files that launcher and tasks share is never taken for a fact."""

import json

import pytest

from tfdist.runtime import launch_protocol
from tfdist.runtime.launch_protocol import (
    JOURNAL,
    Phase,
    Progress,
    journal_events,
    note,
    read_heartbeat,
    read_journal,
)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-14],
        lambda content: content + content,
        lambda content: content.replace(b"running", b"rulning"),
        lambda content: content.replace(b"137", b"1 7"),
        lambda content: content.replace(b"137", b"1\xff7"),
        lambda content: b"",
    ],
)
def test_a_damaged_heartbeat_is_none(tmp_path, damage):
    path = tmp_path / "worker-0.progress"
    Progress(str(path)).beat(Phase.RUNNING, 1, 37, 137)
    assert read_heartbeat(str(path)).total == 137
    path.write_bytes(damage(path.read_bytes()))
    assert read_heartbeat(str(path)) is None


def test_damaged_lines_of_a_journal_are_left_out(tmp_path):
    note(str(tmp_path), "saved", total=3, path="snapshot-0.tfdist")
    note(str(tmp_path), "anything", total=None)
    whole = read_journal(str(tmp_path))
    saved = json.loads((tmp_path / JOURNAL).read_bytes().splitlines()[0])
    damaged = [
        b"3",
        b"null",
        b"[]",
        b"[" * 10_000,
        b'{"time": 1.5, "event": "\xff"}',
        *(
            json.dumps(line).encode()
            for line in (
                {**saved, "total": "three"},
                {**saved, "total": True},
                {**saved, "time": None},
                {**saved, "time": float("nan")},
                {**saved, "path": 3},
                {**saved, "event": ["saved"]},
                {key: value for key, value in saved.items() if key != "path"},
                {key: value for key, value in saved.items() if key != "time"},
                {"time": 1.5, "event": "fault", "text": "kill chief@end"},
            )
        ),
    ]
    with open(tmp_path / JOURNAL, "ab") as file:
        file.write(b"\n".join(damaged) + b"\n")
    note(str(tmp_path), "over", code=0)
    assert read_journal(str(tmp_path))[:-1] == whole
    assert next(journal_events(str(tmp_path))) == whole[0]
    assert read_journal(str(tmp_path))[-1]["event"] == "over"


def test_a_full_journal_takes_no_more_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_protocol, "JOURNAL_BYTES", 1)
    for event in ("saving", "saving", "over"):
        note(str(tmp_path), event, code=0)
    assert [line["event"] for line in read_journal(str(tmp_path))] == ["saving", "over"]
    assert (tmp_path / launch_protocol.JOURNAL).stat().st_mode & 0o077 == 0
