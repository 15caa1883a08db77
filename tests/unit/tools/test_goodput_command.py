"""Test the output of `tfdist goodput`, and its errors for what is no launch."""

import json

import pytest

from tests.unit.runtime.test_goodput import EVENTS, attempt, journal
from tfdist import cli
from tfdist.runtime.launch_protocol import JOURNAL
from tfdist.tools.report.outline import chapter
from tfdist.tools.report.read import read_run


def write(directory, lines, tail=""):
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / JOURNAL).write_text(text + tail)
    return str(directory)


def test_figure_table_and_remedies(tmp_path, capsys):
    assert cli.main(["goodput", write(tmp_path, journal(*EVENTS))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "goodput 39.6 % of 2 min 0 s: 1 launch, 2 attempts, 10 steps lost"
    assert lines[2].split() == ["category", "time", "share", "what", "it", "is"]
    assert lines[3].split()[:5] == ["training", "47.5", "s", "39.6", "%"]
    assert "validation" not in "".join(lines)
    assert lines[-4] == "largest losses"
    assert lines[-3].startswith("1. restart, 22 s: --standby")


def test_json(tmp_path, capsys):
    assert cli.main(["goodput", write(tmp_path, journal(*EVENTS)), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["goodput"] == 0.3958
    assert sum(facts["seconds"].values()) == pytest.approx(facts["wall_seconds"]) == 120
    assert [loss["category"] for loss in facts["largest_losses"]] == ["restart", "startup", "lost"]
    assert all(loss["remedy"] for loss in facts["largest_losses"])


def test_half_a_line_at_the_end(tmp_path, capsys):
    directory = write(tmp_path, journal(*EVENTS), '{"time": 221.0, "event": "att')
    assert cli.main(["goodput", directory]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("goodput 39.6 % of 2 min 0 s")
    assert "last line, 10, is cut off or damaged" in captured.err


def test_starts_of_a_batch_job_are_one_job(tmp_path, capsys):
    write(tmp_path / "start-0", journal(*EVENTS))
    write(tmp_path / "start-1", journal(*EVENTS, first=300.0))
    assert cli.main(["goodput", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["launches"], facts["wall_seconds"]) == (2, 320)


def test_run_names_its_launches(tmp_path, capsys):
    run = tmp_path / "digits"
    run.mkdir()
    session = {"time": 101.0, "epoch": 0, "step": 0, "launch": write(tmp_path / "l", [])}
    (run / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    write(tmp_path / "l", journal(*EVENTS))
    assert cli.main(["goodput", str(run)]) == 0
    assert "39.6 %" in capsys.readouterr().out
    page = chapter(read_run(run), "digits")
    assert ("39.6 %", "goodput") in [(tile.value, tile.label) for tile in page.tiles]
    section = next(section for section in page.sections if section.title == "Goodput")
    assert "39.6 %" in section.text[0]
    assert section.tables[1].rows[0][:2] == ["restart", "22 s"]


def _older(directory):
    return write(directory, journal(*attempt(0, 0, 10)))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda d: str(d / "none"), "there is no such directory"),
        (str, "it has no events.jsonl, and no sessions.jsonl that names a launch"),
        (lambda d: write(d, []), "expected a launch with an attempt"),
        (lambda d: write(d, [], "\x00\xff{"), "expected a launch with an attempt"),
        (_older, "ran no `fit` under a strategy of tfdist, or an older version of tfdist wrote it"),
    ],
)
def test_what_is_no_launch_is_refused(tmp_path, capsys, make, expected):
    assert cli.main(["goodput", make(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert str(tmp_path) in error


def test_launches_that_were_moved_are_named(tmp_path, capsys):
    session = {"time": 1.0, "epoch": 0, "step": 0, "launch": "/nowhere/launch"}
    (tmp_path / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    assert cli.main(["goodput", str(tmp_path)]) == 2
    assert "its launches in /nowhere/launch were moved or removed" in capsys.readouterr().err
