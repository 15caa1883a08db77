"""Test the output of `tfdist chaos report` for journals, and for results."""

import json
import types

import keras
import numpy as np
import pytest

from tfdist import cli
from tfdist.backup import result
from tfdist.backup.snapshot import Snapshot, pack
from tfdist.runtime.launch_protocol import JOURNAL, RESULT, Launched
from tfdist.tools import chaos
from tfdist.tools.recovery import Recovery
from tfdist.train.health import heartbeat


class Journal:
    """Build a journal's lines as processes and launcher write them; time passes with each."""

    def __init__(self, plan="none"):
        self.now = 100.0
        self.lines = []
        self.attempt = -1
        self.count = 0
        self.add("launch", chaos=plan)

    def add(self, event, **facts):
        self.now += 1.0
        self.lines.append({"time": self.now, "event": event, **facts})
        return self

    def begin(self, restored=None, number=0, first=None):
        self.attempt += 1
        self.add("attempt", attempt=self.attempt, tasks=["worker:0", "worker:1"])
        if restored is not None:
            self.add(
                "restored",
                epoch=0,
                step=restored,
                total=restored,
                number=number,
                path=f"backup/snapshot-{number}.tfdist",
            )
        if first is not None:
            self.add("stepping", task="worker:0", epoch=0, step=first, total=first)
        return self

    def saved(self, total, number):
        return self.add(
            "saved", total=total, number=number, path=f"backup/snapshot-{number}.tfdist"
        )

    def fault(self, text, total=0, task="worker:1", seconds=None, number=None):
        self.count += 1
        return self.add(
            "fault",
            number=self.count - 1 if number is None else number,
            text=text,
            task=task,
            total=total,
            seconds=seconds,
        )

    def end(self, detected="worker:1", total=0, restart=True, text="restart 1 of 9"):
        self.add("detected", task=detected).add(
            "ended", codes={"worker:0": -15, "worker:1": -9}, total=total
        )
        return self.add("decided", restart=restart, delay=0.0, text=text)

    def over(self, code=0):
        if not code:
            self.add("ended", codes={"worker:0": 0, "worker:1": 0}, total=40)
        return self.add("over", code=code)

    def write(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return str(directory)

    @property
    def fault_reports(self):
        return Recovery(self.lines).fault_reports

    @property
    def text(self):
        return "\n".join(chaos.summary(Recovery(self.lines), self.now + 7.0))


def test_a_fault_costs_an_attempt():
    journal = (
        Journal()
        .begin(first=1)
        .saved(3, 0)
        .saved(6, 1)
        .fault("kill worker:1@step=8", total=8)
        .end(total=9)
        .begin(6, 1, first=7)
        .over()
    )
    (fault_report,) = journal.fault_reports
    assert (
        fault_report.when,
        fault_report.detected,
        fault_report.recovered,
        fault_report.lost,
        fault_report.origin,
    ) == (
        4.0,
        1.0,
        6.0,
        2,
        "snapshot-1",
    )
    assert (
        journal.text
        == "2 attempts in 12.0 s, 2 steps lost, 2 at most by one attempt; a snapshot every 3 steps"
    )


def test_damaged_snapshot_is_skipped():
    journal = (
        Journal()
        .begin(first=1)
        .saved(3, 0)
        .saved(6, 1)
        .fault("kill chief@step=7", total=7)
        .end()
        .fault("corrupt newest")
        .begin(3, 0, first=4)
        .over()
    )
    kill, corrupt = journal.fault_reports
    assert (kill.lost, kill.origin) == (4, "snapshot-0 (snapshot-1 damaged)")
    assert (corrupt.detected, corrupt.recovered, corrupt.lost, corrupt.origin) == (
        None,
        None,
        None,
        "",
    )


def test_an_attempt_that_makes_no_step_loses_none_but_its_own_time():
    journal = (
        Journal()
        .begin(first=1)
        .saved(3, 0)
        .fault("kill worker:1@step=5", total=5)
        .end()
        .begin()
        .fault("kill worker:1@start")
        .end()
        .begin(3, 0, 4)
        .over()
    )
    first, second = journal.fault_reports
    assert (first.lost, second.lost) == (2, 0)
    assert first.recovered > second.recovered == 6.0
    assert "2 steps lost" in journal.text


def test_no_snapshot():
    journal = (
        Journal().begin(first=1).fault("kill chief@saving", total=1).end().begin(first=1).over()
    )
    assert (journal.fault_reports[0].lost, journal.fault_reports[0].origin) == (1, "the beginning")


def test_task_killed_after_its_last_step():
    """No step is left: restoring the state is all there is to do."""
    journal = (
        Journal()
        .begin(first=1)
        .saved(40, 9)
        .fault("kill chief@end", total=40)
        .end()
        .begin(40, 9)
        .over()
    )
    assert (journal.fault_reports[0].lost, journal.fault_reports[0].recovered) == (0, 5.0)


def test_two_faults_at_once_are_counted_once():
    journal = (
        Journal()
        .begin(first=1)
        .saved(3, 0)
        .fault("kill chief@step=5", 5, "worker:0")
        .fault("kill worker:1@step=5", 5)
        .end()
        .begin(3, 0, 4)
        .over()
    )
    assert [fault_report.lost for fault_report in journal.fault_reports] == [2, 2]
    assert "2 steps lost, 2 at most" in journal.text


def test_a_stop_that_ends_costs_nothing():
    journal = Journal().begin(first=1).fault("stop worker:1@step=5 for 0.5s", 5, seconds=0.5)
    journal.add("saved", total=6, number=1, path="backup/snapshot-1.tfdist").fault(
        "kill worker:1@step=8", 8
    ).end().begin(6, 1, 7).over()
    stop, kill = journal.fault_reports
    assert (stop.detected, stop.recovered, stop.lost, stop.origin) == (
        None,
        None,
        None,
        "all continued",
    )
    assert kill.lost == 2


def test_a_task_that_is_replaced():
    journal = (
        Journal()
        .begin(first=1)
        .fault("kill worker:1@step=5", 5)
        .add("replaced", task="worker:1", life=1)
        .over()
    )
    (fault_report,) = journal.fault_reports
    assert (
        fault_report.detected,
        fault_report.recovered,
        fault_report.lost,
        fault_report.origin,
    ) == (
        1.0,
        None,
        None,
        "worker:1 began again, alone",
    )


def test_a_failure_that_no_plan_had():
    journal = Journal().begin(first=1).saved(3, 0).end(total=5).begin(3, 0, 4).over()
    (fault_report,) = journal.fault_reports
    assert (fault_report.text, fault_report.detected, fault_report.lost) == (
        "(worker:1 failed)",
        None,
        2,
    )


def test_how_a_launch_ends():
    journal = Journal("kill chief@end; hang worker:1@step=9").begin(first=1)
    assert journal.text.splitlines()[:2] == [
        "not struck: kill chief@end",
        "not struck: hang worker:1@step=9",
    ]
    assert "NOT ENDED" in journal.text
    assert "is 7 s old" in journal.text
    journal.fault("kill chief@end").end(
        restart=False, text="no restart is left (--restarts 0)"
    ).over(137)
    assert journal.text.endswith(
        "The launch did NOT END WELL: exit code 137: no restart is left (--restarts 0)."
    )
    assert journal.fault_reports[0].recovered is None


# --- The command ----------------------------------------------------------------------------------
def snapshot(weights=(1.0, 2.0), steps=7, loss=(0.5, 0.25), optimizer="Adam"):
    arrays = {"model/0": np.array(weights, np.float32), "optimizer/0": np.array(steps, np.int64)}
    history = {"epoch": list(range(len(loss))), "values": {"loss": list(loss)}}
    return Snapshot(
        arrays,
        {"optimizer": optimizer, "names": ["dense/kernel", "adam/iterations"], "history": history},
    )


@pytest.fixture
def calm(tmp_path):
    directory = tmp_path / "calm"
    Journal().begin(first=1).over().write(directory)
    (directory / RESULT).write_bytes(b"".join(pack(snapshot())))
    return str(directory)


@pytest.fixture
def wild(tmp_path):
    return (
        Journal("kill chief@step=5")
        .begin(first=1)
        .saved(3, 0)
        .fault("kill chief@step=5", 5)
        .end()
        .begin(3, 0, 4)
        .over()
        .write(tmp_path / "wild")
    )


@pytest.mark.parametrize(
    ("mine", "code", "text"),
    [
        (snapshot(), 0, "equal bit for bit to"),
        (
            snapshot((1.0, 2.0 + 1e-6)),
            0,
            (
                "within 1e-06 of CALM: the largest difference is 9.5e-07, in dense/kernel; "
                "1 of 4 arrays differ"
            ),
        ),
        (
            snapshot((1.0, 2.1)),
            1,
            "DIFFERENT from CALM: dense/kernel [1]: 2.1 here, 2.0 there; 1 of 4 arrays differ",
        ),
        (snapshot((1.0, np.nan)), 1, "dense/kernel [1]: nan here, 2.0 there"),
        (snapshot(steps=8), 1, "adam/iterations: 8 here, 7 there"),
        (snapshot(loss=(0.5, 0.3)), 1, "history loss [1]: 0.3 here, 0.25 there"),
        (snapshot(loss=(0.5,)), 1, "history epoch: 1 long here, 2 there"),
        (
            snapshot((1.0, 2.0, 3.0)),
            1,
            (
                "of ANOTHER MODEL than CALM: model variable 0, dense/kernel: float32 [3] here, "
                "float32 [2] there"
            ),
        ),
        (
            snapshot(optimizer="SGD"),
            1,
            "of ANOTHER MODEL than CALM: optimizer SGD here, Adam there",
        ),
    ],
)
def test_results_are_compared(mine, code, text, wild, calm, tmp_path, capsys):
    (tmp_path / "wild" / RESULT).write_bytes(b"".join(pack(mine)))
    assert cli.main(["chaos", "report", wild, "--against", calm]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        "kill",
        "chief@step=5",
        "3.0",
        "s",
        "1.00",
        "s",
        "6.0",
        "s",
        "2",
        "snapshot-0",
    ]
    assert text.replace("CALM", calm) in lines[-1]


def test_the_latest_launch_is_the_default(tmp_path, monkeypatch, capsys):
    Journal().begin(first=1).over().write(tmp_path / "runs" / "latest")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["chaos", "report"]) == 0
    assert capsys.readouterr().out == "No fault has struck.\n1 attempt in 3.0 s, 0 steps lost\n"


def test_launch_that_failed_or_still_runs(tmp_path, calm, capsys):
    going = Journal().begin(first=1).write(tmp_path / "going")
    failed = Journal().begin(first=1).end(restart=False, text="").over(1).write(tmp_path / "failed")
    for directory, text in ((going, "NOT ENDED"), (failed, "did NOT END WELL: exit code 1.")):
        assert cli.main(["chaos", "report", directory]) == 1
        assert cli.main(["chaos", "report", directory, "--against", calm]) == 1
        assert text in capsys.readouterr().out
    assert cli.main(["chaos", "report", calm, "--against", going]) == 2
    assert "expected the logs of a launch that ended well" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["report", "nowhere"],
            "expected the directory of a launch's logs, received nowhere, which is no directory",
        ),
        (["report"], "LOG_DIR (default)"),
        (["report", "."], f"it has no {JOURNAL}"),
        (["report", "CALM", "--against", "."], "--against: expected the directory"),
        (
            ["report", "WILD", "--against", "CALM"],
            "Expected the result of a training with tfdist.BackupAndRestore",
        ),
        (["report", "CALM", "--again", "."], "--again"),
        (["reprot"], "Did you mean `tfdist chaos report`?"),
        (["--wrong"], "error"),
    ],
)
def test_wrong_arguments_are_named(words, text, tmp_path, monkeypatch, capsys, calm, wild):
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(["chaos", *(word.replace("CALM", calm).replace("WILD", wild) for word in words)])
        == 2
    )
    assert text in capsys.readouterr().err


def test_a_damaged_result_is_named(calm, tmp_path, capsys):
    (tmp_path / "calm" / RESULT).write_bytes(b"tfdist snapshot\nand then nothing")
    assert cli.main(["chaos", "report", calm, "--against", calm]) == 2
    assert "its checksum does not match its content" in capsys.readouterr().err


def test_help(capsys):
    assert cli.main(["chaos"]) == 2
    with pytest.raises(SystemExit) as end:
        cli.main(["chaos", "report", "--help"])
    assert end.value.code == 0
    assert "--against" in capsys.readouterr().out


# --- What is written ------------------------------------------------------------------------------
def test_a_result_is_written_for_a_plan_only(tmp_path):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    result.write(Launched(log_dir=str(tmp_path)), model, {})
    assert not list(tmp_path.iterdir())
    history = {"epoch": [0], "values": {"loss": [1.0]}}
    result.write(Launched(log_dir=str(tmp_path), chaos="none"), model, history)
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]
    stored = result.read(str(tmp_path))
    assert stored.facts["history"] == history
    assert result.compare(stored, stored).same


@pytest.mark.parametrize(("plan", "there"), [(None, False), ("none", True)])
def test_fit_writes_its_result(plan, there, tmp_path, monkeypatch):
    import tfdist

    monkeypatch.setenv("TFDIST_LOG_DIR", str(tmp_path))
    if plan:
        monkeypatch.setenv("TFDIST_CHAOS", plan)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    history = model.fit(
        np.ones([8, 2]),
        np.ones([8, 1]),
        epochs=2,
        verbose=0,
        callbacks=[tfdist.BackupAndRestore(tmp_path / "backup")],
    )
    assert (tmp_path / RESULT).exists() == there
    if there:
        stored = result.read(str(tmp_path))
        assert stored.facts["history"] == {
            "epoch": [0, 1],
            "values": history.history,
            "dtypes": {},
        }
        np.testing.assert_array_equal(stored.arrays["model/0"], model.get_weights()[0])


def test_calls_pause_at_faults_of_the_epoch_that_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(
        heartbeat,
        "Launched",
        types.SimpleNamespace(
            from_environ=lambda: Launched(chaos="kill worker:9@step=12; kill worker:9@step=37")
        ),
    )
    own_heartbeat = heartbeat.Heartbeat(True)
    own_heartbeat.begin(0, 24)
    assert own_heartbeat.next_pause(0, 0) == 12
    assert own_heartbeat.next_pause(0, 12) == 37  # beyond the epoch's end
    own_heartbeat.at(0, 24)
    assert own_heartbeat.next_pause(1, 0) == 13
    assert own_heartbeat.next_pause(1, 13) is None
