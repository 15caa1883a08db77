"""Test that the launcher replaces stragglers: after a snapshot, and no more often than allowed."""

import json

import pytest

from tests.cluster.scripts.slowed import EPOCHS, STEPS
from tests.launches import OFF, ROOT, Launch
from tfdist.runtime.launch_protocol import read_journal

TIMEOUT_S = 240
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

# Tasks that train for ever and save when they are asked to end. Their chief names worker:1 as soon
# as a standby process is ready for each task. `keras` is a module of the test, to be quick.
SCRIPT = """
import keras
attempt = int(os.environ["TFDIST_ATTEMPT"])
from tfdist.runtime.launch_protocol import Launched, Phase, Progress, note, read_journal
from tfdist.runtime.time_account import time_account
launched = Launched.from_environ()
account = time_account()
progress = Progress(launched.progress_file, account)
def end(number, frame):
    progress.beat(Phase.IDLE, 0, 3, 3)
    sys.exit(42)
signal.signal(signal.SIGTERM, end)
facts = dict(task="worker:1", attempt=attempt, host="h", slower=1.5)
def ready():
    lines = [line for line in read_journal(launched.log_dir) if line["event"] == "standby"]
    return sum(line["what"] == "ready" for line in lines) >= STANDBYS
named = False
for step in range(1, 2000 if attempt < LAST else 20):
    with account.running("training"):
        time.sleep(0.05)
    account.add_steps(1)
    progress.beat(Phase.RUNNING, 0, step, step)
    if me == "worker:0":
        if not named and ready(): named = not note(launched.log_dir, "straggler", **facts)
        if step == 5 and SAVES: note(launched.log_dir, "saved", total=5, path="s", task=me)
print(me, attempt, os.environ["TFDIST_STRAGGLERS"], os.environ["TFDIST_RESTARTS"], os.getpid())
if not SAVES:  # the fit is over: too late to save
    progress.beat(Phase.IDLE, 0, 20, 20)
    note(launched.log_dir, "saved", total=20, path="s", task=me)
    note(launched.log_dir, "straggler", **facts)
    time.sleep(1.5)
"""


def events(launch, name):
    journal = read_journal(str(launch.directory / "runs" / "latest"))
    return [line for line in journal if line["event"] == name]


def script(launch, last, saves=True, standbys=0):
    (launch.directory / "keras.py").touch()
    script = SCRIPT.replace("LAST", str(last)).replace("SAVES", str(saves))
    return script.replace("STANDBYS", str(standbys))


def test_slow_worker_is_replaced_by_a_standby_process_and_no_restart_is_counted(launch):
    code, out, err = launch.run(
        *("--workers", "2", "--replace-stragglers", "1", "--straggler-share", "0.3"),
        script=script(launch, 1, standbys=2),
        environ={OFF: "1"},  # the tests' own server of processes would import the real Keras
    )
    assert code == 0, err
    slow = "tfdist: worker:1 on h is slower than the median of the other workers by 150 %"
    assert f"{slow}: saving, to start it anew (replacement 1 of 1)" in err
    assert "tfdist: worker:1 was slow: restart that does not count" in err
    # Named again in the second attempt.
    assert f"{slow}; it stays, as no replacement is left (--replace-stragglers 1)" in err
    assert "ROOT CAUSE" not in err
    (taken,) = (
        line
        for line in events(launch, "standby")
        if line["what"] == "taken" and line["task"] == "worker:1"
    )
    assert f"worker:1 1 0.3 30 1 {taken['pid']}" in out
    assert [line["attempt"] for line in events(launch, "attempt")] == [0, 1]
    assert not events(launch, "detected")
    first, second = events(launch, "ended")
    assert first["codes"] == {"worker:0": 42, "worker:1": 42}
    assert set(second["accounts"]) == {"worker:0", "worker:1"}
    assert all(fact["training"] > 0.5 for fact in second["accounts"].values())
    assert "tfdist: goodput " in err.splitlines()[-1]


def test_slow_worker_stays_where_it_cannot_save(launch):
    """No snapshot was written within the fit, and after it the tasks end by themselves."""
    code, _, err = launch.run(
        *("--workers", "2", "--replace-stragglers", "2", "--standby", "0"),
        script=script(launch, 0, saves=False),
        environ={OFF: "1"},
    )
    assert code == 0, err
    assert len(events(launch, "attempt")) == 1
    assert "is slower" not in err


def test_worker_with_slow_data_is_named_and_replaced(launch):
    """With TensorFlow, no callback measures the steps, and the launcher asks for it."""
    launch.bound = TIMEOUT_S
    code, out, err = launch.run(
        *("--workers", "2", "--standby", "0", "--replace-stragglers", "1"),
        *("--straggler-window", "2", "--grace", "60"),  # Python's own end may take 10 s here
        command=(str(ROOT / "tests" / "cluster" / "scripts" / "slowed.py"), "."),
    )
    assert code == 0, err
    assert "worker:1 on 127.0.0.1 is a straggler: without waiting for others" in out
    assert "worker:1 was slow: restart that does not count" in err
    (line,) = [line for line in events(launch, "straggler") if line["attempt"] == 0]
    assert (line["task"], line["host"]) == ("worker:1", "127.0.0.1")
    assert line["slower"] > 0.5
    first, second = events(launch, "ended")
    assert set(first["codes"].values()) == {42}, err
    assert (
        sum(ended["accounts"]["worker:0"]["steps"] for ended in (first, second)) == EPOCHS * STEPS
    )
    assert first["accounts"]["worker:0"]["sync"] > first["accounts"]["worker:1"]["sync"]
    # A worker that is named after the end of the training must not make it begin anew.
    assert list((launch.directory / "backup").glob("snapshot-*"))
    for task in ("worker-0", "worker-1"):
        facts = json.loads((launch.directory / f"{task}.json").read_text())
        assert facts == {"epochs": list(range(EPOCHS)), "steps": EPOCHS * STEPS}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers", "2", "--replace-stragglers", "x"), "--replace-stragglers"),
        (("--workers", "2", "--straggler-share", "0"), "--straggler-share"),
        (
            ("--rendezvous", "a:1", "--max-workers", "2", "--replace-stragglers", "1"),
            "--replace-stragglers: expected without --rendezvous, received both",
        ),
        (
            ("--cluster", "c.json", "--replace-stragglers", "1"),
            "--replace-stragglers: expected without --cluster, received both",
        ),
        (
            ("--chief", "--workers", "1", "--ps", "1", "--replace-stragglers", "1"),
            "--replace-stragglers: expected without --ps, received both",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, flags, message):
    code, _, err = Launch(tmp_path).run(*flags, script="")
    assert code == 2
    assert message in err
