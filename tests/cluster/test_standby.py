"""Test restarts that hand over to standby processes, on real launches with TensorFlow.

Each process is started by exec.
"""

import json
import os
import signal
import time

import pytest

from tests.launches import OFF
from tfdist.runtime.launch_protocol import read_journal

TIMEOUT_S = 480
FRESH = {OFF: "1"}
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

# Task that reports its steps, and waits until as many standby processes as TASKS are ready in each
# attempt but the last. On a busy machine their imports take minutes.
SCRIPT = """
attempt = int(os.environ["TFDIST_ATTEMPT"])
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import random, warnings
import tensorflow as tf, keras, tfdist
from tfdist.runtime.launch_protocol import Launched, Phase, Progress, read_journal
launched = Launched.from_environ()
strategy = tfdist.make_strategy(devices="cpu")
assert strategy.num_replicas_in_sync == 2
facts = dict(
    argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path, cwd=os.getcwd(), flags=list(sys.flags),
    environ={k: v for k, v in sorted(os.environ.items()) if not k.startswith("TFDIST_") and k != "TF_CONFIG"},
    handlers={int(s): str(signal.getsignal(s)).partition(" at ")[0] for s in signal.valid_signals()},
    affinity=sorted(os.sched_getaffinity(0)), nice=os.getpriority(os.PRIO_PROCESS, 0), parent=os.getppid(),
    main=[__name__, __file__, str(__spec__)], warnings=sorted(map(str, warnings.filters)), hooks=sorted(type(m).__name__ for m in sys.meta_path),
    modules=sorted(m for m in sys.modules if m.split(".")[0] in ("tensorflow", "keras") and m.count(".") < 2),
)
with open(f"{me}-{attempt}.json", "w") as file: json.dump(facts, file)
with open(f"{me}-{attempt}.random", "w") as file: json.dump([random.random(), float(tf.random.uniform([]))], file)
progress = Progress(launched.progress_file)
def ready():
    lines = [line for line in read_journal(launched.log_dir) if line["event"] == "standby"]
    gone = {line["pid"] for line in lines if line["what"] in ("taken", "lost", "refused")}
    return len({line["pid"] for line in lines if line["what"] == "ready"} - gone)
for step in range(1, 4500):
    progress.beat(Phase.RUNNING, 0, step, step)
    if attempt == LAST or ready() >= TASKS: break
    time.sleep(0.1)
if attempt < LAST:
    time.sleep(0.3)
    if me == "worker:1": os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
print("done")
"""  # noqa: E501


def standby(launch, what):
    lines = read_journal(str(launch.directory / "runs" / "latest"))
    return [line for line in lines if line["event"] == "standby" and line["what"] == what]


def test_scripts_run_the_same_in_standby_processes_after_a_restart(launch):
    launch.bound = TIMEOUT_S
    flags = ("--workers", "2", "--restarts", "1", "--standby", "3", "--chaos", "kill standby")
    code, _, err = launch.run(
        *flags, script=SCRIPT.replace("LAST", "1").replace("TASKS", "3"), environ=FRESH
    )
    assert code == 0, f"{err}\n{launch.log('worker-0')}"
    # One is killed at the hand-over: the task goes to the next, and no restart is counted for it.
    assert [line["why"] for line in standby(launch, "lost")] == [
        "no answer at the hand-over to worker:0"
    ]
    assert [line["task"] for line in standby(launch, "taken")] == ["worker:0", "worker:1"]
    for task in ("worker:0", "worker:1"):
        fresh, handed_over = (
            json.loads((launch.directory / f"{task}-{attempt}.json").read_text())
            for attempt in range(2)
        )
        assert fresh == handed_over
    drawn = {tuple(json.loads(path.read_text())) for path in launch.directory.glob("*.random")}
    assert len(drawn) == 2  # one of each attempt, whose workers share the chief's seed


def test_no_standby_processes_without_restarts_unless_asked_for(launch):
    for flags, expected in (
        ((), "False"),
        (("--restarts", "1"), "True"),
        (("--restarts", "1", "--standby", "0"), "False"),
    ):
        code, out, err = launch.run(
            *flags, "--no-prefix", script="print('TFDIST_IMPORTS_FILE' in os.environ)"
        )
        assert (code, out) == (0, f"{expected}\n"), err


def test_standby_processes_end_when_the_launcher_is_killed(launch):
    launch.bound = TIMEOUT_S
    process = launch.start(
        "--workers",
        "2",
        "--restarts",
        "1",
        "--standby",
        "1",
        script=SCRIPT.replace("LAST", "9").replace("TASKS", "9"),
        environ=FRESH,
    )
    end = time.monotonic() + TIMEOUT_S
    while not ((launch.directory / "runs").exists() and standby(launch, "ready")):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(launch.living()) >= 5  # the launcher, its guardian, two tasks, a standby process
    os.kill(process.pid, signal.SIGKILL)
    assert launch.wait_for_nobody() == []


@pytest.mark.parametrize("words", [("--standby", "-1"), ("--standby", "many"), ("--standby", "2")])
def test_wrong_number_of_standby_processes_is_named(words, launch):
    code, _, err = launch.run(*words, script="ready()")
    assert code == 2
    assert f"{words[0]}" in err
    assert words[1] in err
