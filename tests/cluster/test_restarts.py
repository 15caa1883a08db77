"""Test `tfdist launch --restarts` with real processes.

Scripts are tiny and without TensorFlow, and nothing is left behind.
"""

import json
import os
import re
import signal
import sys
import time

import pytest

from tests.launches import ROOT
from tfdist.runtime.launch_protocol import read_journal

ATTEMPT = 'attempt = int(os.environ["TFDIST_ATTEMPT"])\n'
# A task that tells of its steps as training does.
STEPS = (
    ATTEMPT
    + """\
from tfdist.runtime.launch_protocol import Launched, Phase, Progress
progress = Progress(Launched.from_environ().progress_file)
def steps(first, last):
    for step in range(first, last + 1):
        progress.beat(Phase.RUNNING, 0, step)
        time.sleep(0.02)
"""
)


def events(launch, name):
    return [
        line
        for line in read_journal(str(launch.directory / "runs" / "latest"))
        if line["event"] == name
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "worker:1 was killed by SIGKILL"),
        ("raise KeyError('a flake')", "KeyError: 'a flake'"),
        ("os._exit(75)", "exit code 75"),
    ],
)
def test_a_failure_is_followed_by_another_attempt_on_fresh_ports(fault, said, launch):
    script = ATTEMPT + (
        "print(os.environ['TF_CONFIG'])\nif me == 'worker:1' and attempt == 0:\n    "
        f"time.sleep(0.5)\n    {fault}\ntime.sleep(1)\n"
    )
    code, _, err = launch.run("--workers", "2", "--restarts", "3", script=script)
    assert code == 0, err
    assert said in err
    assert "restart 1 of 3" in err
    assert len(events(launch, "attempt")) == 2
    clusters = [
        json.loads(launch.log(name).splitlines()[0])["cluster"]
        for name in ("worker-0", "attempt-1/worker-0")
    ]
    assert not set(clusters[0]["worker"]) & set(clusters[1]["worker"])


def test_the_last_failure_is_the_exit_code_once_restarts_are_used_up(launch):
    script = STEPS + "steps(1, 3 + attempt)\nif me == 'worker:0': sys.exit(9)\ntime.sleep(60)\n"
    code, _, err = launch.run("--workers", "2", "--restarts", "2", script=script)
    assert code == 9
    assert len(events(launch, "attempt")) == 3
    assert "no restart is left (--restarts 2)" in err


def test_error_that_repeats_at_the_same_step_ends_the_launch(launch):
    script = (
        STEPS + "steps(1, 5)\nif me == 'worker:1': raise ValueError('a mistake')\ntime.sleep(60)\n"
    )
    code, _, err = launch.run("--workers", "2", "--restarts", "5", script=script)
    assert code == 1
    assert len(events(launch, "attempt")) == 2
    assert "the same error occurred twice after step 5 of epoch 1" in err


def test_configuration_error_is_not_retried(launch):
    code, _, err = launch.run("--restarts", "5", script="sys.exit(78)")
    assert code == 78
    assert len(events(launch, "attempt")) == 1
    assert "would not fix a configuration error" in err


def test_preemption_is_not_counted(launch):
    script = ATTEMPT + "time.sleep(0.3)\nif attempt < 3: sys.exit(42)\n"
    code, _, err = launch.run("--workers", "2", "--restarts", "1", script=script)
    assert code == 0, err
    assert len(events(launch, "attempt")) == 4
    assert "restart that does not count" in err


HANGS = {
    "in the user's code": ("time.sleep(600)", "in <module>"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "it is stopped"),
}


@pytest.mark.parametrize("hang", HANGS)
def test_task_without_steps_is_ended_as_hung(hang, launch):
    how, said = HANGS[hang]
    waits = "\ndef all_reduce(): time.sleep(600)\n"
    script = (
        STEPS
        + waits
        + (
            f"steps(1, 5)\nif attempt == 0:\n    all_reduce() if me == 'worker:0' else {how}\n"
            "steps(6, 8)"
        )
    )
    code, _, err = launch.run(
        "--workers", "2", "--restarts", "1", "--hang-timeout", "2", script=script
    )
    assert code == 0, err
    assert "after step 5 of epoch 1, and was killed as hung" in err
    assert said in err
    if hang == "stopped":
        assert "ROOT CAUSE: worker:1" in err
    assert len(events(launch, "attempt")) == 2


def test_a_task_that_makes_a_step_after_all_is_not_hung(launch):
    """It goes on when the launcher has asked it for its stacks."""
    script = STEPS + (
        "import pathlib\nlog = pathlib.Path('runs/latest/worker-0.log')\nsteps(1, 5)\n"
        "while 'most recent call first' not in log.read_text(): time.sleep(0.01)\nsteps(6, 8)\n"
    )
    code, _, err = launch.run("--restarts", "1", "--hang-timeout", "1", script=script)
    assert code == 0, err
    assert "hung" not in err
    assert len(events(launch, "attempt")) == 1


def test_hung_worker_is_blamed_not_its_waiting_peers(launch):
    script = STEPS + "\ndef all_reduce(): time.sleep(600)\n"
    script += (
        "steps(1, 5)\nif attempt == 0:\n    if me == 'worker:0': all_reduce()\n    time.sleep(1)\n"
        "    steps(5, 5)\n    os.kill(os.getpid(), signal.SIGSTOP)"
    )
    code, _, err = launch.run(
        "--workers", "2", "--restarts", "1", "--hang-timeout", "4", script=script
    )
    assert code == 0, err
    assert "ROOT CAUSE: worker:1" in err
    assert "it is stopped" in err


@pytest.mark.parametrize("stopped", ["worker:0", "worker:1"])
def test_stopped_task_is_blamed_not_the_peer_that_lost_it(stopped, launch):
    """A shell runs the program, so the launcher's child itself is not stopped."""
    script = (
        f"if me == '{stopped}':\n    ready()\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        f"while not os.path.exists('{stopped}.ready'): time.sleep(0.01)\nlose_peers()"
    )
    code, _, err = launch.run(
        "--workers",
        "2",
        script=script,
        command=("bash", "-c", f"{sys.executable} task.py; exit $?"),
    )
    victim = "worker:1" if stopped == "worker:0" else "worker:0"
    assert code == 75
    assert f"ROOT CAUSE: {stopped} was stopped while its peers needed it" in err
    assert f"  {victim} failed with exit code 1" in err


# Python reads this before anything else, in the launcher and in all tasks.
JUMPING_CLOCK = """
import itertools, time
true, jumps = time.time, itertools.cycle([0, 3e7, -3e7])  # a year forth, a year back
time.time = lambda: true() + next(jumps)
"""


def test_a_clock_that_jumps_by_a_year_neither_makes_nor_hides_a_hang(launch):
    (launch.directory / "sitecustomize.py").write_text(JUMPING_CLOCK)
    path = os.pathsep.join([str(launch.directory), str(ROOT)])
    script = STEPS + (
        "assert abs(time.time() - time.time()) > 1e7\nsteps(1, 120)\nif attempt == 0: "
        "steps(121, 900) if me == 'worker:0' else time.sleep(600)\n"
    )
    begun = time.monotonic()
    code, _, err = launch.run(
        "--workers",
        "2",
        "--restarts",
        "1",
        "--hang-timeout",
        "2",
        script=script,
        environ={"PYTHONPATH": path},
    )
    assert code == 0, err
    assert re.search(
        r"ROOT CAUSE: worker:1 made no step for \d s after step 120 of epoch 1, and was killed as "
        r"hung",
        err,
    ), err
    assert len(events(launch, "attempt")) == 2
    assert float(re.search(r"all tasks done after ([\d.]+) s", err)[1]) < time.monotonic() - begun


def test_silence_outside_of_training_and_while_compiling_is_allowed(launch):
    script = STEPS + (
        "progress.beat(Phase.TRACING, 0, 0)\ntime.sleep(3)\nsteps(1, 3)\n"
        "progress.beat(Phase.IDLE, 0, 3)\ntime.sleep(3)\n"
    )
    code, _, err = launch.run("--hang-timeout", "1", "--start-timeout", "60", script=script)
    assert code == 0, err


def test_workers_of_a_coordinator_are_replaced_alone(launch):
    script = """
life = os.environ["TFDIST_ERROR_FILE"]
if me == "worker:0" and not os.path.exists("died"):
    open("died", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if me == "worker:0": ready()
if me == "chief:0":
    while not os.path.exists("worker:0.ready"): time.sleep(0.05)
else:
    time.sleep(600)
"""
    code, _, err = launch.run(
        "--chief", "--workers", "2", "--ps", "1", "--restarts", "1", script=script
    )
    assert code == 0, err
    assert (
        "worker:0 was killed by SIGKILL; the launcher restarts it, the other tasks continue" in err
    )
    assert len(events(launch, "attempt")) == 1


def test_an_evaluator_that_fails_is_started_again_alone_but_not_for_the_same_error_again(launch):
    script = (
        STEPS
        + """
if me == "evaluator:0":
    names = [name for name in os.listdir(".") if name.startswith("life-")]
    open(f"life-{len(names)}", "w").close()
    import atexit
    atexit.register(time.sleep, 0.5)  # as TensorFlow, which takes its time to end
    raise ValueError(f"error {min(len(names), 1)}")
steps(1, 300)
"""
    )
    code, _, err = launch.run("--workers", "1", "--evaluator", "--restarts", "5", script=script)
    assert code == 1
    assert len(events(launch, "replaced")) >= 2  # the two errors differ
    assert (
        "evaluator:0 failed with exit code 1: ValueError: error 0; the launcher restarts it" in err
    )
    assert "ROOT CAUSE: evaluator:0 failed with exit code 1: ValueError: error 1" in err
    assert len(list(launch.directory.glob("life-*"))) < 10


def test_servers_outlive_tasks_that_save(launch):
    script = """
if me == "chief:0":
    def save(*_):
        time.sleep(1)
        print("servers told:", os.path.exists("told"), flush=True)
        sys.exit(42)
    signal.signal(signal.SIGTERM, save)
else:
    signal.signal(signal.SIGTERM, lambda *_: (open("told", "w").close(), sys.exit(0)))
ready()
while True: time.sleep(0.05)
"""
    process = launch.start("--chief", "--workers", "1", "--ps", "1", script=script)
    launch.wait_for("chief:0.ready", "worker:0.ready", "ps:0.ready")
    process.send_signal(signal.SIGTERM)
    code, _, err = launch.finish()
    assert code == 42, err
    assert launch.log("chief-0") == "servers told: False\n"


def test_lost_parameter_server_ends_the_attempt(launch):
    script = ATTEMPT + (
        "time.sleep(0.3)\nif me == 'ps:0' and not attempt: sys.exit(5)\nif me != 'chief:0': "
        "time.sleep(600)\ntime.sleep(1)\n"
    )
    code, _, err = launch.run(
        "--chief", "--workers", "1", "--ps", "1", "--restarts", "1", script=script
    )
    assert code == 0, err
    assert len(events(launch, "attempt")) == 2


def test_interruption_that_let_tasks_save_is_reported(launch):
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\nready()\ntime.sleep(600)\n"
    process = launch.start("--workers", "2", "--restarts", "5", script=script)
    launch.wait_for("worker:0.ready", "worker:1.ready")
    process.send_signal(signal.SIGTERM)
    code, _, err = launch.finish()
    assert code == 42
    assert "the same command resumes it" in err
    assert len(events(launch, "attempt")) == 1


def test_no_restart_after_an_interruption_in_the_delay(launch):
    process = launch.start("--restarts", "50", script="os._exit(75)")
    end = time.monotonic() + launch.bound
    while (
        len(events(launch, "decided") if (launch.directory / "runs").exists() else []) < 3
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    code, _, err = launch.finish()
    assert code == 128 + signal.SIGTERM, err


@pytest.mark.parametrize(
    "flags",
    [
        ("--restarts", "-1"),
        ("--restarts", "two"),
        ("--hang-timeout", "soon"),
        ("--start-timeout", "-3"),
    ],
)
def test_bad_flags_are_named(flags, launch):
    code, _, err = launch.run(*flags, script="pass")
    assert code == 2
    assert flags[0] in err
    assert flags[1] in err


@pytest.mark.parametrize("plan", ["kill worker:9@step=3", "explode", "", "kill worker:0"])
def test_a_wrong_chaos_plan_is_named_before_anything_starts(plan, launch):
    code, _, err = launch.run("--workers", "2", "--chaos", plan, script="ready()")
    assert code == 2
    assert "--chaos: " in err
    assert not (launch.directory / "worker:0.ready").exists()


def test_chaos_kills_servers_at_the_chiefs_step(launch):
    script = STEPS + (
        "if me == 'chief:0':\n    for step in range(1, 12 if attempt else 600):\n        "
        "progress.beat(Phase.RUNNING, 0, step, step); time.sleep(0.1)\nelse: time.sleep(600)\n"
    )
    code, _, err = launch.run(
        "--chief",
        "--workers",
        "2",
        "--ps",
        "1",
        "--restarts",
        "2",
        "--chaos",
        "kill worker:1@step=3; kill ps:0@step=9",
        script=script,
    )
    assert code == 0, err
    assert [line["text"] for line in events(launch, "fault")] == [
        "kill worker:1@step=3",
        "kill ps:0@step=9",
    ]
    assert "worker:1 was killed by SIGKILL; the launcher restarts it" in err
    assert "ROOT CAUSE: ps:0 was killed by SIGKILL" in err
    assert len(events(launch, "attempt")) == 2


@pytest.mark.parametrize("saves", [False, True])
def test_peers_of_a_killed_task_end_soon_unless_they_write_a_snapshot(saves, launch):
    script = STEPS + (
        "from tfdist.runtime.launch_protocol import note\nsignal.signal(15, signal.SIG_IGN)\n"
        "steps(1, 1)\nready()\n"
    )
    script += (
        "if me == 'worker:1':\n    while not os.path.exists('worker:0.ready'): time.sleep(0.01)\n"
        "    time.sleep(0.3)\n    os.kill(os.getpid(), 9)\n"
    )
    if saves:
        log_dir = "os.environ['TFDIST_LOG_DIR']"
        script += (
            f"note({log_dir}, 'saving', task=me); time.sleep(2); note({log_dir}, 'saved', "
            "task=me, total=1, path='none')\n"
        )
    code, _, err = launch.run("--workers", "2", script=script + "time.sleep(300)")
    assert code == 137
    assert "ROOT CAUSE: worker:1 was killed by SIGKILL" in err
    assert len(events(launch, "saved")) == saves


# --- Workers that do not find each other ----------------------------------------------------------
def test_late_worker_is_named_and_waited_for_within_the_bound(launch):
    script = (
        ATTEMPT
        + """
if me == "worker:0":
    open(f"begun-{attempt}", "w").close()
else:
    while attempt == 0 or not os.path.exists("begun-1"): time.sleep(0.05)
    time.sleep(3)
from tfdist.cluster import preflight, resolvers
preflight.check(resolvers.resolve(), timeout=60 if attempt else 1, attempt=resolvers.attempt())
print("met")
"""
    )
    code, _, err = launch.run("--workers", "2", "--restarts", "1", script=script)
    assert code == 0, err
    assert re.search(r"ROOT CAUSE: worker:0 failed with exit code 75", err), err
    assert re.search(r"after 1 s, 1 of 2 tasks are absent: worker:1 at 127.0.0.1:\d+", err)
    assert "restart 1 of 1" in err
    assert [launch.log(f"attempt-1/worker-{index}") for index in range(2)] == ["met\n", "met\n"]


def test_port_taken_meanwhile_is_named_and_the_next_attempt_uses_another(launch):
    script = (
        ATTEMPT
        + """
if me == "worker:0" and attempt == 0:
    port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].rpartition(":")[2]
    print("mine was", port, flush=True)
    thief = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(flush=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", thief], stdout=subprocess.PIPE).stdout.readline()
import tfdist
strategy = tfdist.make_strategy("multi_worker_mirrored", devices="cpu")
print("met", strategy.num_replicas_in_sync)
"""  # noqa: E501
    )
    code, _, err = launch.run(
        "--workers",
        "2",
        "--restarts",
        "1",
        script=script,
        environ={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert code == 0, err
    port = re.search(r"mine was (\d+)", launch.log("worker-0"))[1]
    assert re.search(rf"ROOT CAUSE: worker:0 failed with exit code 75.*{port}", err, re.DOTALL), err
    assert "restart 1 of 1" in err
    assert [launch.log(f"attempt-1/worker-{index}").splitlines()[-1] for index in range(2)] == [
        "met 2",
        "met 2",
    ]
