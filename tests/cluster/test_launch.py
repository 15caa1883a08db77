"""Test `tfdist launch` with real processes: tiny scripts without TensorFlow, no process left."""

import json
import os
import re
import signal
import time

import pytest

from tests.forkserver import environ_of
from tests.launches import TIMEOUT_S
from tfdist.cluster.spec import ClusterSpec


def test_environment_prefixes_and_logs(launch):
    script = (
        "print(json.dumps(dict(os.environ)), sys.argv, flush=True); print('to stderr', "
        "file=sys.stderr)"
    )
    code, out, err = launch.run(
        "--workers", "2", "--chief", script=script, command=("task.py", "--lr", "1")
    )
    assert code == 0
    assert "all tasks done" in err
    secrets = set()
    for task in ("chief:0", "worker:0", "worker:1"):
        lines = launch.log(task.replace(":", "-")).splitlines()
        shown = [line for line in out.splitlines() if line.startswith(f"[{task}]")]
        assert shown == [f"[{task}] {line}" for line in lines]
        assert lines[1] == "to stderr"
        environ, end = json.JSONDecoder().raw_decode(lines[0])
        assert lines[0][end:] == " ['task.py', '--lr', '1']"
        spec = ClusterSpec.from_tf_config(environ["TF_CONFIG"])
        assert (str(spec.task), len(spec.tasks)) == (task, 3)
        assert environ["TFDIST_TASK"] == task
        assert environ["TFDIST_ATTEMPT"] == "0"
        assert environ["TFDIST_LOG_DIR"] == str((launch.directory / "runs" / "latest").resolve())
        assert environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        secrets.add(environ["TFDIST_TASK_SECRET"])
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64


def test_only_the_launcher_has_its_secret(launch):
    process = launch.start(
        *("--restarts", "1", "--standby", "1"),
        script="ready()\nwhile not os.path.exists('finish'): time.sleep(0.02)",
        environ={"TFDIST_TOKEN": "0123456789abcdef0123"},
    )
    launch.wait_for("worker:0.ready")
    children = [pid for pid in launch.living() if pid != process.pid]
    assert len(children) >= 3  # the guardian, the snapshot server and the task
    assert not [pid for pid in children if "TFDIST_TOKEN" in environ_of(pid)]
    (launch.directory / "finish").touch()
    assert launch.finish()[0] == 0


def test_log_dir_and_colour(launch):
    code, out, _ = launch.run("--log-dir", "logs", "--color", "always", script="print('hello')")
    assert code == 0
    assert out == "\x1b[36m[worker:0] \x1b[0mhello\n"
    assert (launch.directory / "logs" / "worker-0.log").read_text() == "hello\n"
    assert not (launch.directory / "runs").exists()


STRANGERS = "worker:0, worker:1 ended without having met the other tasks of the cluster"


@pytest.mark.parametrize(
    ("workers", "script", "warned"),
    [
        (2, "", True),
        # A program that meets, without TensorFlow.
        (2, "from tfdist.cluster import preflight, resolvers\n"
            "preflight.check(resolvers.resolve())", False),
        (1, "", False),
    ],
)  # fmt: skip
def test_tasks_that_end_before_preflight_are_named(workers, script, warned, launch):
    code, _, err = launch.run("--workers", str(workers), script=script)
    assert code == 0
    assert "all tasks done" in err
    assert (STRANGERS in err) == warned
    assert ("without having met" in err) == warned


def test_only_the_chief_is_shown(launch):
    code, out, _ = launch.run(
        "--workers", "2", "--show", "chief", "--no-prefix", script="print(me)"
    )
    assert (code, out) == (0, "worker:0\n")
    assert launch.log("worker-1") == "worker:1\n"


FAULTS = {
    "raises": ("raise KeyError('x')", 1, "worker:1 failed with exit code 1: KeyError: 'x'"),
    "is killed": ("os.kill(os.getpid(), 9)", 137, "worker:1 was killed by SIGKILL"),
    "crashes": ("os.abort()", 134, "worker:1 was killed by SIGABRT"),
    "exits with a code": ("sys.exit(3)", 3, "worker:1 failed with exit code 3"),
    "ends early": (
        "sys.exit(0)",
        1,
        "worker:1 ended with code 0 while worker:0 and worker:2 still needed it",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_worker_is_named_as_the_root_cause(fault, launch):
    action, expected, cause = FAULTS[fault]
    code, _, err = launch.run(
        "--workers", "3", script=f"if me == 'worker:1': {action}\nlose_peers()"
    )
    assert code == expected
    report = err[err.index("ROOT CAUSE: ") :]
    assert report.splitlines()[0] == f"ROOT CAUSE: {cause}"
    assert "worker-1.log" in report
    lost = "failed with exit code 1: UnavailableError: Collective ops is aborted by: Socket closed"
    assert f"  worker:0 {lost} (" in report
    assert f"  worker:2 {lost} (" in report
    assert report.count("Traceback") == (fault == "raises")


def test_a_traceback_shows_the_users_frames_only(launch):
    code, _, err = launch.run(script="def f():\n    1 / 0\nf()")
    assert code == 1
    report = err[err.index("ROOT CAUSE: ") :]
    assert "in f\n" in report
    assert "script_runner" not in report
    assert "runpy" not in report


def test_a_task_that_hangs_after_its_error_does_not_hang_the_launch(launch):
    # TensorFlow's shutdown does the same when the peers are gone; the others wait in a collective
    # for ever.
    fault = "import atexit\n    atexit.register(time.sleep, 300)\n    1 / 0"
    script = f"if me == 'worker:1':\n    {fault}\ntime.sleep(300)"
    code, _, err = launch.run("--workers", "2", script=script)
    assert code == 1
    assert "ROOT CAUSE: worker:1 failed with exit code 1: ZeroDivisionError" in err
    assert "  worker:0: ended by the launcher" in err


def test_survivors_that_ignore_sigterm_are_killed(launch):
    script = "signal.signal(15, signal.SIG_IGN)\nif me == 'worker:0': sys.exit(5)\ntime.sleep(300)"
    code, _, err = launch.run("--workers", "2", "--grace", "0.2", script=script)
    assert code == 5
    assert "  worker:1: ended by the launcher" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_tasks_quietly(number, launch):
    process = launch.start("--workers", "2", script="ready(); time.sleep(300)")
    launch.wait_for("worker:0.ready", "worker:1.ready")
    process.send_signal(number)
    ended, out, err = launch.finish()
    assert ended == 128 + number
    assert f"ended by {number.name}" in err
    assert "Traceback" not in out


DEAF = (
    "signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); ready(); time.sleep(300)"
)


def test_tasks_that_ignore_a_signal_are_killed_after_the_grace(launch):
    process = launch.start("--workers", "2", "--grace", "1", script=DEAF)
    launch.wait_for("worker:0.ready", "worker:1.ready")
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert launch.finish()[0] == 130
    assert 0.9 < time.monotonic() - started < 10


def test_a_second_signal_kills_at_once(launch):
    process = launch.start("--workers", "2", "--grace", "300", script=DEAF)
    launch.wait_for("worker:0.ready", "worker:1.ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert launch.finish()[0] == 130


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["alone", "with its process group"])
def test_no_orphan_when_the_launcher_is_killed(kill, launch):
    shell = "sleep 300 & touch $TFDIST_TASK.ready; sleep 300; true"
    process = launch.start("--workers", "2", command=("bash", "-c", shell))
    launch.wait_for("worker:0.ready", "worker:1.ready")
    deadline = time.monotonic() + launch.bound
    # The launcher, its guardian, two shells, at least three of their children.
    while (count := len(launch.living())) < 7:
        assert time.monotonic() < deadline, f"{count} processes"
        time.sleep(0.05)
    kill(process.pid, signal.SIGKILL)
    assert launch.wait_for_nobody() == []


def test_background_processes_end_with_their_task(launch):
    code, out, _ = launch.run(command=("bash", "-c", "sleep 300 & echo done"))
    assert (code, out) == (0, "[worker:0] done\n")


def test_parameter_servers_end_with_chief_and_workers(launch):
    script = "if me.startswith('ps'): time.sleep(300)\ntime.sleep(0.3)"
    code, _, err = launch.run("--workers", "2", "--ps", "1", "--chief", script=script)
    assert code == 0
    assert "all tasks done" in err


def test_a_cluster_file_with_parameter_servers_and_no_chief_is_refused(launch):
    file = launch.directory / "cluster.yaml"
    file.write_text("worker: ['127.0.0.1:4001']\nps: ['127.0.0.1:4002']\n")
    code, _, err = launch.run("--cluster", str(file), script="pass")
    assert code == 2
    assert f"--cluster {file}: expected a chief, which coordinates the workers" in err


def test_workers_serve_under_a_coordinator(launch):
    script = "if me != 'chief:0': time.sleep(300)\ntime.sleep(0.3)"
    code, _, _ = launch.run("--workers", "2", "--ps", "1", "--chief", script=script)
    assert code == 0


def test_launch_waits_for_the_evaluator_to_finish(launch):
    script = "if me == 'evaluator:0':\n    time.sleep(1)\n    print('evaluated')"
    code, out, _ = launch.run("--evaluator", script=script)
    assert code == 0
    assert "[evaluator:0] evaluated" in out


def test_wait_for_the_evaluator_is_bounded(launch):
    script = "if me == 'evaluator:0': time.sleep(300)"
    code, _, err = launch.run("--evaluator", "--evaluator-wait", "0.5", script=script)
    assert code == 0
    assert "training is done; ending evaluator:0, still busy 0.5 s later" in err


def test_modules_and_exit_codes_pass_through_the_script_runner(launch):
    (launch.directory / "package").mkdir()
    (launch.directory / "package" / "__main__.py").write_text(
        "import sys; print(sys.argv[1:]); sys.exit(7)"
    )
    code, out, _ = launch.run(command=("-m", "package", "a"))
    assert code == 7
    assert out == "[worker:0] ['a']\n"


def test_an_exception_may_say_its_exit_code(launch):
    script = "class Absent(TimeoutError): exit_code = 75\nraise Absent('worker:1 is absent')"
    code, _, err = launch.run(script=script)
    assert code == 75
    assert "ROOT CAUSE: worker:0 failed with exit code 75: Absent: worker:1 is absent" in err
    assert "its peers were absent" in err


def test_a_file_that_cannot_be_executed(launch):
    (launch.directory / "tool").write_text("no program\n")
    (launch.directory / "tool").chmod(0o755)
    code, _, err = launch.run("--workers", "2", command=("./tool",))
    assert code == 2
    assert "COMMAND: cannot execute './tool': Exec format error" in err


def test_sigusr1_writes_stacks_to_the_log(launch):
    process = launch.start(script="def stuck():\n    ready()\n    time.sleep(300)\nstuck()")
    launch.wait_for("worker:0.ready")
    os.kill(launch.pid_of("worker:0"), signal.SIGUSR1)  # what it prints may not be in the log yet
    deadline = time.monotonic() + TIMEOUT_S
    while "in stuck" not in launch.log("worker-0"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert launch.finish()[0] == 143


@pytest.fixture
def cluster_file(launch):
    spec = ClusterSpec.local(workers=2)
    elsewhere = "198.51.100.1:2222"  # reserved for documentation: nobody's address

    def write(name, addresses):
        (launch.directory / name).write_text(json.dumps({"worker": addresses}))
        return name

    return {
        "here": write("here.json", list(spec.jobs["worker"])),
        "elsewhere": write("elsewhere.json", [elsewhere, "198.51.100.2:2222"]),
        "both": write("both.json", [spec.jobs["worker"][0], spec.jobs["worker"][0]]),
    }


def test_one_task_of_a_cluster_file(launch, cluster_file):
    flags = ("--cluster", cluster_file["here"], "--task", "worker:1")
    code, out, _ = launch.run(*flags, script="print(me, os.environ['TF_CONFIG'])")
    assert code == 0
    task, _, config = out.removeprefix("[worker:1] ").partition(" ")
    assert task == "worker:1"
    assert json.loads(config)["cluster"] == json.loads((launch.directory / "here.json").read_text())


def test_without_a_task_flag_all_tasks_of_this_host_start(launch, cluster_file):
    code, out, _ = launch.run("--cluster", cluster_file["here"], script="print(me)")
    assert code == 0
    assert sorted(out.split("\n")) == ["", "[worker:0] worker:0", "[worker:1] worker:1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--cluster", "elsewhere.json"],
            "expected a task with an address of this host, received worker:0",
        ),
        (
            ["--cluster", "elsewhere.json", "--task", "worker:0"],
            "is not an address of this machine",
        ),
        (["--cluster", "both.json"], "worker:0"),
        (["--cluster", "here.json", "--task", "worker:2"], "index out of range"),
        (["--cluster", "here.json", "--task", "worker"], "expected TYPE:INDEX"),
    ],
)
def test_a_wrong_cluster_file_is_named_before_anything_starts(flags, message, launch, cluster_file):
    code, _, err = launch.run(*flags, script="print(me)")
    assert code == 2
    assert re.match(r"tfdist launch: error: .*", err)
    assert message in err
    assert not (launch.directory / "runs").exists()
