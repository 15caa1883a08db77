"""Test that the launcher replaces stragglers: after a snapshot, and no more often than allowed."""

import json

import pytest

from tests.cluster.scripts.slowed import EPOCHS, STEPS
from tests.launches import ROOT, Launch
from tfdist.runtime.launch_protocol import read_journal

TIMEOUT_S = 240
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

# Tasks that train for ever, save when they are asked to end, and whose chief names worker:1.
SCRIPT = """
attempt = int(os.environ["TFDIST_ATTEMPT"])
from tfdist.runtime.launch_protocol import Launched, Phase, Progress, note
from tfdist.runtime.time_account import time_account
launched = Launched.from_environ()
account = time_account()
progress = Progress(launched.progress_file, account)
def end(number, frame):
    progress.beat(Phase.IDLE, 0, 3, 3)
    sys.exit(42)
signal.signal(signal.SIGTERM, end)
facts = dict(task="worker:1", attempt=attempt, host="h", slower=1.5)
for step in range(1, 1000 if attempt < LAST else 20):
    with account.running("training"):
        time.sleep(0.05)
    account.add_steps(1)
    progress.beat(Phase.RUNNING, 0, step, step)
    if me == "worker:0":
        if step == 2: note(launched.log_dir, "straggler", **facts)
        if step == 5 and SAVES: note(launched.log_dir, "saved", total=5, path="s", task=me)
print(me, attempt, os.environ["TFDIST_STRAGGLERS"])
"""


def events(launch, name):
    journal = read_journal(str(launch.directory / "runs" / "latest"))
    return [line for line in journal if line["event"] == name]


def script(last, saves=True):
    return SCRIPT.replace("LAST", str(last)).replace("SAVES", str(saves))


def test_slow_worker_is_replaced_after_a_snapshot_and_no_restart_is_counted(launch):
    code, out, err = launch.run(
        *("--workers", "2", "--replace-stragglers", "1", "--standby", "0"),
        *("--straggler-share", "0.3"),
        script=script(1),
    )
    assert code == 0, err
    slow = "tfdist: worker:1 on h is slower than the median of the other workers by 150 %"
    assert f"{slow}: saving, to start it anew (replacement 1 of 1)" in err
    assert "tfdist: worker:1 was slow: restart that does not count" in err
    # Named again in the second attempt.
    assert f"{slow}; it stays, as no replacement is left (--replace-stragglers 1)" in err
    assert "ROOT CAUSE" not in err
    assert "worker:1 1 0.3 30" in out
    assert [line["attempt"] for line in events(launch, "attempt")] == [0, 1]
    assert not events(launch, "detected")
    first, second = events(launch, "ended")
    assert first["codes"] == {"worker:0": 42, "worker:1": 42}
    assert set(second["accounts"]) == {"worker:0", "worker:1"}
    assert all(fact["training"] > 0.5 for fact in second["accounts"].values())
    assert "tfdist: goodput " in err.splitlines()[-1]


def test_slow_worker_stays_where_a_restart_would_lose_all_steps(launch):
    code, _, err = launch.run(
        "--workers", "2", "--replace-stragglers", "2", "--standby", "0", script=script(0, False)
    )
    assert code == 0, err
    assert len(events(launch, "attempt")) == 1
    assert "is slower" not in err


def test_worker_with_slow_data_is_named_and_replaced(launch):
    """With TensorFlow, no callback measures the steps, and the launcher asks for it."""
    launch.bound = TIMEOUT_S
    code, out, err = launch.run(
        *("--workers", "2", "--standby", "0", "--replace-stragglers", "1"),
        *("--straggler-window", "2"),
        command=(str(ROOT / "tests" / "cluster" / "scripts" / "slowed.py"), "."),
    )
    assert code == 0, err
    assert "worker:1 on 127.0.0.1 is a straggler: without waiting for others" in out
    assert "worker:1 was slow: restart that does not count" in err
    (line,) = [line for line in events(launch, "straggler") if line["attempt"] == 0]
    assert (line["task"], line["host"]) == ("worker:1", "127.0.0.1")
    assert line["slower"] > 0.5
    first, second = events(launch, "ended")
    assert set(first["codes"].values()) == {42}
    assert (
        sum(ended["accounts"]["worker:0"]["steps"] for ended in (first, second)) == EPOCHS * STEPS
    )
    assert first["accounts"]["worker:0"]["sync"] > first["accounts"]["worker:1"]["sync"]
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
            ("--chief", "--workers", "1", "--ps", "1", "--replace-stragglers", "1"),
            "--replace-stragglers: expected without --ps, received both",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, flags, message):
    code, _, err = Launch(tmp_path).run(*flags, script="")
    assert code == 2
    assert message in err
