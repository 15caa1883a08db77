"""Test `tfdist launch --on slurm` and `tfdist submit` on a real Slurm, without TensorFlow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster.test_memory_snapshots import (
    QUIET,
    SCRIPT,
    check_equal,
    check_resumed,
    has_stopped,
    servers,
    train,
    wait,
)
from tests.engines import slurm_cluster, task_scripts
from tests.engines.slurm_cluster import NODES
from tests.engines.task_scripts import SAVE, SLOW
from tests.launches import PRELUDE, Launch
from tests.processes import ROOT
from tfdist.runtime.launch_protocol import read_journal

BEAT = task_scripts.BEAT + 'restart = os.environ.get("SLURM_RESTART_COUNT", "0")\n'
BOUND_S = 90
TRAINING_S = 400  # of the training that is disturbed
TASKS = ("worker:0", "ps:0")


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster.running() as started:
        yield started


@pytest.fixture
def slurm(cluster):
    """Yield an idle Slurm; check afterwards that no job is left."""
    cluster.wait_until_idle()
    yield cluster
    left = [job for job in cluster.jobs() if "COMPLETING" not in job]
    for job in left:
        cluster.run("scancel", job.split()[0])
    cluster.wait_until_idle()
    assert not left, f"jobs left behind: {left}"


class SlurmLaunch(Launch):
    """Launches and jobs of a test."""

    def __init__(self, directory, slurm):
        super().__init__(directory, bound=BOUND_S)
        name, _, value = self.mark.partition("=")
        self.environ = {**slurm.environ, name: value}
        self.slurm = slurm

    def start(self, *flags, **options):
        options.setdefault("environ", self.environ)
        return super().start("--on", "slurm", *flags, **options)

    def tfdist(self, *words, timeout=BOUND_S):
        """Run another command of tfdist; return exit code, output and errors."""
        result = subprocess.run(
            [sys.executable, "-m", "tfdist", *words],
            cwd=self.directory,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return result.returncode, result.stdout, result.stderr

    def submit(self, *flags, script, command=("task.py",)):
        """Submit a job; return its number."""
        (self.directory / "task.py").write_text(PRELUDE + script)
        code, out, err = self.tfdist("submit", *flags, "--", *command)
        assert code == 0, err
        return out.strip()

    def finish_job(self, job, seconds=BOUND_S):
        """Wait for the end of a job; return its final state, its exit code and its output."""
        waits = time.monotonic()
        end = waits + seconds
        while True:
            text = self.slurm.run("scontrol", "-o", "show", "job", job).partition("\n")[0]
            state = re.search(r"JobState=(\w+)", text)[1]
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING"):
                code = re.search(r"ExitCode=(\d+):", text)[1]
                return state, int(code), self.output(job)
            # Slurm waits two minutes with a job that is requeued. Within seconds, a node would
            # refuse it, because it has revoked the credential of the former start.
            waits = waits if "Reason=BeginTime" in text else time.monotonic()
            if time.monotonic() - waits > 4:
                self.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            assert time.monotonic() < end, f"{text}\n{self.output(job)}\n{self.slurm.log()}"
            time.sleep(0.3)

    def wait_for_requeues(self, job, count):
        """Wait until a job was queued again some times; let it start without Slurm's wait."""
        end = time.monotonic() + BOUND_S
        while self.output(job).count(f"queue job {job} again") < count or "BeginTime" not in (
            self.slurm.run("scontrol", "-o", "show", "job", job)
        ):
            assert time.monotonic() < end, f"{self.output(job)}\n{self.slurm.log()}"
            time.sleep(0.3)
        time.sleep(4)  # see `finish_job`
        self.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def output(self, job):
        path = self.directory / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for_output(self, job, words, seconds=BOUND_S, after=""):
        """Wait until a job has written some words; those before the last `after` do not count."""
        end = time.monotonic() + seconds
        while words not in self.output(job).rpartition(after or "\0")[2]:
            assert time.monotonic() < end, f"{self.output(job)}\n{self.slurm.log()}"
            time.sleep(0.1)


@pytest.fixture
def launch(slurm, tmp_path):
    launch = SlurmLaunch(tmp_path, slurm)
    yield launch
    launch.check_nobody_left(15.0)


def test_tasks_get_nodes_cores_and_gpus_of_an_allocation(launch, slurm):
    script = (
        BEAT
        + """
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
print("on", os.environ["SLURMD_NODENAME"], [host.rpartition(":")[0] for host in cluster])
print("threads", os.environ["OMP_NUM_THREADS"], "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
print("env", os.environ["WORD"], os.getcwd())
"""
    )
    gpus = ("--gpus-per-task=1",) if slurm.has_gpus else ()
    code, out, err = launch.run(
        "--workers=3", "--nodes=2", "--env=WORD=a b=c", *gpus, script=script
    )
    assert code == 0, err
    hosts = re.findall(r"on (\S+) \[(.*)\]", out)
    assert sorted(host for host, _ in hosts) == sorted([NODES[0], NODES[0], NODES[1]])
    assert {hosts for _, hosts in hosts} == {f"'{NODES[0]}', '{NODES[0]}', '{NODES[1]}'"}
    assert out.count(f"env a b=c {launch.directory}\n") == 3
    if slurm.has_gpus:
        visible = dict(re.findall(r"\[(worker:\d)\] threads 1 gpus (\S+)", out))
        assert {visible["worker:0"], visible["worker:1"]} == {"0", "1"}


def test_failed_and_hung_workers_are_named_and_restarted(launch):
    script = (
        BEAT
        + """
train(0.5)
if me == "worker:1" and attempt == "0": raise ValueError("a mistake of the script")
if me == "worker:1" and attempt == "1": time.sleep(60)
if me == "worker:0" and attempt < "2": train(60)
"""
    )
    code, _out, err = launch.run(
        "--workers=2", "--nodes=2", "--hang-timeout=3", "--restarts=3", script=script
    )
    assert code == 0, err
    causes = re.findall(r"ROOT CAUSE: (.*)", err)
    assert causes[0] == "worker:1 failed with exit code 1: ValueError: a mistake of the script"
    assert re.fullmatch(
        r"worker:1 made no step for \d+ s after step 10 .* killed as hung", causes[1]
    )
    assert 'File "task.py"' in err or "time.sleep(60)" in err  # the stack of the hung task


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_stays_behind_when_the_launcher_ends(launch, slurm, number):
    process = launch.start("--workers=2", script=BEAT + SAVE + "ready()\ntrain(60)\n")
    launch.wait_for("worker:0.ready", "worker:1.ready")
    os.kill(process.pid, number)
    code, _, _ = launch.finish()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 42, signal.SIGKILL: -9}[number]
    assert not launch.wait_for_nobody(15.0)
    slurm.wait_until_idle()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_pending_request_is_withdrawn_when_the_launcher_ends(launch, slurm, number):
    blocker = slurm.run("sbatch", "--parsable", "-N3", "--exclusive", "--wrap", "sleep 60")
    process = launch.start("--workers=1", script="pass")
    slurm.wait_for("tfdist PENDING", "squeue", "-h", "-o", "%j %T")
    os.kill(process.pid, number)
    code, _, _ = launch.finish()
    assert code == (130 if number == signal.SIGINT else -9)
    assert not launch.wait_for_nobody(15.0)
    end = time.monotonic() + 15
    while any("tfdist" in job for job in slurm.jobs()) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any("tfdist" in job for job in slurm.jobs())
    slurm.run("scancel", blocker)


def test_wait_in_the_queue_is_explained_and_bounded(launch, slurm):
    blocker = slurm.run("sbatch", "--parsable", "-N3", "--exclusive", "--wrap", "sleep 60")
    code, _, err = launch.run("--workers=1", "--queue-timeout=4", script="pass")
    assert code == 75
    assert re.search(r"job \d+ of Slurm is pending: (Resources|Priority)", err), err
    assert "error: Slurm gave no nodes within 4 s (" in err
    slurm.run("scancel", blocker)


def test_node_that_is_lost_is_replaced(launch, slurm):
    """The lost node's place is taken by a node of a new allocation."""
    script = (
        BEAT
        + """
print("on", os.environ["SLURMD_NODENAME"], flush=True)
open(f"{me}.{attempt}", "w").close()
if attempt == "0": train(60)
"""
    )
    launch.start("--workers=2", "--nodes=2", "--restarts=1", script=script)
    launch.wait_for("worker:0.0", "worker:1.0")
    slurm.lose_node(NODES[1])
    try:
        code, out, err = launch.finish()
    finally:
        slurm.return_node(NODES[1])
    assert code == 0, err
    assert re.search(rf"worker:1 was (lost with its host {NODES[1]}|killed)", err), err
    assert "asking for another" in err
    assert f"[worker:1] on {NODES[2]}" in out


def test_straggler_leaves_its_node_while_the_job_has_room_on_others(launch):
    """The second straggler would get the node of the first one, and stays."""
    code, out, err = launch.run(
        *("--workers=2", "--nodes=3", "--slurm-options=--ntasks=3 --ntasks-per-node=1"),
        "--replace-stragglers=2",
        script=SLOW,
    )
    assert code == 0, err
    slow = "is slower than the median of the other workers by 150 %"
    assert f"worker:1 on {NODES[1]} {slow}: saving, to start it anew (replacement 1 of 2)" in err
    assert "worker:1 was slow: restart that does not count" in err
    assert f"[worker:1] attempt 0 at {NODES[1]}" in out
    assert f"[worker:0] attempt 1 at {NODES[0]}" in out
    assert f"[worker:1] attempt 1 at {NODES[2]}" in out
    room = f"there is no room for the tasks without {NODES[2]}"
    assert f"worker:1 on {NODES[2]} {slow}; it stays, as {room}" in err
    (journal,) = (launch.directory / "runs").glob("launch-*")
    named = [line for line in read_journal(str(journal)) if line["event"] == "straggler"]
    assert [line["host"] for line in named] == [NODES[1], NODES[2]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the directory of a training on this machine without faults."""
    whole = Launch(tmp_path_factory.mktemp("undisturbed"))
    train(whole, "zero")
    return whole.directory


@pytest.mark.timeout(600)  # three starts of TensorFlow in two processes each
@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ("launch", 0),  # the chief is on the node that is lost
        ("submit", 1),  # the launcher is on the other one
    ],
)
def test_training_resumes_from_the_memory_of_its_nodes(launch, slurm, undisturbed, how, lost):
    """A killed worker resumes from memory, and then a lost node's rows come from the other one."""
    launch.bound = TRAINING_S
    flags = (
        *("--workers=2", "--nodes=3", "--slurm-options=--ntasks=3 --ntasks-per-node=1"),
        *("--restarts=2", "--hang-timeout=120", "--log-dir=launches"),
        f"--chaos=kill worker:{1 - lost}@step=7; stop worker:{lost}@step=14",
        *(f"--env={name}={value}" for name, value in QUIET.items()),
    )
    command = (SCRIPT, str(launch.directory), "100000", "zero")
    if how == "launch":
        logs = launch.directory / "launches"
        launch.start(*flags, command=command)
    else:
        logs = launch.directory / "launches" / "start-0"
        code, job, err = launch.tfdist("submit", *flags, "--", *command)
        assert code == 0, err
    wait(lambda: has_stopped(str(logs)))
    assert len(servers(launch)) == 2
    slurm.lose_node(NODES[lost])
    try:
        if how == "launch":
            code, out, err = launch.finish()
        else:
            _, code, out = launch.finish_job(job.strip(), TRAINING_S)
    finally:
        slurm.return_node(NODES[lost])
    assert code == 0, out + err
    check_equal(launch.directory, undisturbed)
    check_resumed(read_journal(str(logs)), attempts=(1, 2))
    assert not launch.wait_for_nobody(30.0)


def test_spare_node_of_a_job_takes_the_place_of_a_lost_one(launch, slurm):
    script = (
        BEAT
        + """
print("on", os.environ["SLURMD_NODENAME"], "attempt", attempt, flush=True)
open(f"{me}.{attempt}", "w").close()
if attempt == "0": train(60)
"""
    )
    job = launch.submit(
        "--workers=2",
        "--nodes=3",
        "--slurm-options=--ntasks=3 --ntasks-per-node=1",
        "--restarts=1",
        script=script,
    )
    launch.wait_for("worker:0.0", "worker:1.0")
    slurm.lose_node(NODES[1])
    try:
        state, code, text = launch.finish_job(job)
    finally:
        slurm.return_node(NODES[1])
    assert (state, code) == ("COMPLETED", 0), text
    assert "queue job" not in text
    assert f"[worker:0] on {NODES[0]} attempt 1" in text
    assert f"[worker:1] on {NODES[2]} attempt 1" in text


def test_job_of_a_lost_node_is_queued_again(launch, slurm):
    script = (
        BEAT
        + """
print("on", os.environ["SLURMD_NODENAME"], "restart", restart, flush=True)
if restart == "0": open(f"{me}.running", "w").close(); train(60)
"""
    )
    job = launch.submit("--workers=2", "--nodes=2", "--restarts=2", script=script)
    launch.wait_for("worker:0.running", "worker:1.running")
    slurm.lose_node(NODES[1])
    try:
        state, code, text = launch.finish_job(job)
    finally:
        slurm.return_node(NODES[1])
    assert (state, code) == ("COMPLETED", 0), text
    assert "has room for 1 of 2 tasks, as nodes are lost; queue it again" in text
    assert f"exit code 75: queue job {job} again" in text
    assert f"[worker:1] on {NODES[2]} restart 1" in text
    journals = sorted(path.name for path in (launch.directory / "runs" / f"slurm-{job}").iterdir())
    assert journals == ["start-0", "start-1"]


def test_preempted_job_saves_and_resumes_without_counting(launch, slurm):
    """A job of a partition with priority takes the nodes: save within its grace, and 42."""
    script = (
        BEAT
        + SAVE
        + """
print("restart", restart, flush=True)
if restart == "0": open(f"{me}.running", "w").close(); train(60)
"""
    )
    job = launch.submit("--workers=2", "--nodes=2", "--restarts=0", script=script)
    launch.wait_for("worker:0.running", "worker:1.running")
    urgent = slurm.run("sbatch", "--parsable", "-purgent", "-N3", "--wrap", "true")
    state, code, text = launch.finish_job(job)
    assert (state, code) == ("COMPLETED", 0), text
    assert "saved worker:0" in text
    assert "saved worker:1" in text
    assert f"exit code 42: queue job {job} again" in text
    assert "[worker:0] restart 1" in text
    assert launch.finish_job(urgent)[0] == "COMPLETED"


def test_preemption_before_the_tasks_can_save_counts_as_a_restart(launch, slurm):
    script = BEAT + "if restart == '0': ready(); train(60)\n"
    job = launch.submit("--workers=2", "--nodes=2", "--restarts=1", script=script)
    launch.wait_for("worker:0.ready", "worker:1.ready")
    urgent = slurm.run("sbatch", "--parsable", "-purgent", "-N3", "--wrap", "true")
    state, code, text = launch.finish_job(job)
    assert (state, code) == ("COMPLETED", 0), text
    assert "no task has saved before it ended; this counts as a restart" in text
    assert f"exit code 75: queue job {job} again" in text
    assert launch.finish_job(urgent)[0] == "COMPLETED"


def test_preemption_before_the_agents_run_ends_after_the_grace(launch, slurm):
    """Slurm signals only steps that run; it ends the job after the grace, and queues it again."""
    script = BEAT + "print('restart', restart, flush=True)\nif restart == '0': train(60)\n"
    job = launch.submit("--workers=2", "--nodes=2", "--restarts=1", script=script)
    slurm.wait_for("RUNNING", "scontrol", "-o", "show", "job", job)
    urgent = slurm.run("sbatch", "--parsable", "-purgent", "-N3", "--wrap", "true")
    state, code, text = launch.finish_job(job)
    assert (state, code) == ("COMPLETED", 0), text
    assert "[worker:0] restart 1" in text
    assert launch.finish_job(urgent)[0] == "COMPLETED"


@pytest.mark.parametrize("options", ["--signal=TERM", "--signal=TERM --batch"])
def test_sigterm_to_steps_or_to_the_script_saves(launch, slurm, options):
    script = BEAT + SAVE + "if restart == '0': ready(); train(60)\n"
    job = launch.submit("--workers=1", "--job-name=saves", script=script)
    launch.wait_for("worker:0.ready")
    slurm.run("scancel", *options.split(), job)
    state, code, text = launch.finish_job(job)
    assert (state, code) == ("COMPLETED", 0), text
    assert text.count("saved worker:0") == 1
    assert "queue job" in text


def test_configuration_error_ends_the_job(launch):
    job = launch.submit("--workers=1", script="sys.exit(78)")
    state, code, text = launch.finish_job(job)
    assert (state, code) == ("FAILED", 78), text
    assert "queue job" not in text


def test_options_of_a_job_come_from_its_config_file(launch, slurm):
    options = {"on": "slurm", "partition": "urgent", "nodes": 2, "workers": 3, "job_name": "filed"}
    config = launch.directory / "cluster.py"
    config.write_text(f"def get_config(): return {{'launch': {options}}}\n")
    script = "print('in', os.environ['SLURM_JOB_PARTITION'], os.environ['SLURM_JOB_NAME'])"
    job = launch.submit("--config=cluster.py", script=script)
    config.write_text("def get_config(): return {'launch': {'on': 'ssh'}}\n")
    state, _, text = launch.finish_job(job)
    assert state == "COMPLETED", text
    assert text.count("in urgent filed") == 3


def test_restarts_count_over_all_starts_of_a_job(launch, slurm):
    """One restart in the allocation leaves none for a requeue: exit code 1 ends the job."""
    script = BEAT + "ready()\ntrain(0.5)\nsys.exit(75)\n"
    job = launch.submit("--workers=1", "--restarts=1", script=script)
    state, code, text = launch.finish_job(job)
    assert (state, code) == ("FAILED", 1), text
    assert text.count("ROOT CAUSE") == 2
    assert "exit code is 1 instead of 75" in text


def test_jobs_are_listed_followed_and_cancelled(launch, slurm):
    script = BEAT + SAVE + "print('hello from', me, flush=True)\nready()\ntrain(60)\n"
    job = launch.submit("--workers=2", "--job-name=listed", script=script)
    launch.wait_for("worker:0.ready", "worker:1.ready")
    code, out, err = launch.tfdist("jobs")
    assert code == 0, err
    assert re.search(rf"^{job} +RUNNING +listed ", out, re.MULTILINE), out
    code, out, _ = launch.tfdist("logs", job)
    assert code == 0
    assert "[worker:1] hello from worker:1" in out
    follower = subprocess.Popen(
        [sys.executable, "-m", "tfdist", "logs", job, "--follow"],
        cwd=launch.directory,
        env=launch.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    code, _, err = launch.tfdist("cancel", job)
    assert code == 0, err
    out, _ = follower.communicate(timeout=BOUND_S)
    assert follower.returncode == 0
    assert "hello from worker:0" in out
    state, _, text = launch.finish_job(job)
    assert state == "CANCELLED"
    assert "queue job" not in text
    assert job not in launch.tfdist("jobs")[1]
    code, _, err = launch.tfdist("cancel", job)
    assert code == 2
    assert f"job {job} is over already: CANCELLED" in err


def test_array_makes_a_job_for_each_number(launch, slurm):
    """All jobs of the array run at once, each on its own node."""
    script = (
        BEAT
        + """
number = os.environ["SLURM_ARRAY_TASK_ID"]
print("number", number, "on", os.environ["SLURMD_NODENAME"], flush=True)
open(f"{number}.ready", "w").close()
while not os.path.exists("go"): train(0.1)
"""
    )
    whole_nodes = "--slurm-options=--cpus-per-task=2"
    job = launch.submit("--workers=1", "--array=1-3", whole_nodes, script=script)
    launch.wait_for("1.ready", "2.ready", "3.ready")
    (launch.directory / "go").touch()
    end = time.monotonic() + BOUND_S
    while slurm.jobs() and time.monotonic() < end:
        time.sleep(0.2)
    nodes = set()
    for number in (1, 2, 3):
        code, out, err = launch.tfdist("logs", f"{job}_{number}")
        assert code == 0, err
        assert f"number {number} on " in out
        nodes |= set(re.findall(r"number \d on (\S+)", out))
        assert "exit code" not in out
    assert nodes == set(NODES)


@pytest.mark.timeout(600)  # two starts of TensorFlow in two processes each
def test_array_of_a_sweep_trains_each_combination(launch, slurm, digits_dir):
    """Run the commands of docs/slurm.md. The second one finds nothing left to train."""
    launch.environ["TFDS_DATA_DIR"] = str(digits_dir)
    sweep = [
        *("tfdist", "train", "--config=digits", "--config.train.epochs=1"),
        *("--sweep", "train.learning_rate=0.001,0.01"),
    ]
    array = ["--array", "0-1", "--workers", "2", "--time", "10"]
    code, out, err = launch.tfdist(
        "submit", *array, "--", *sweep, "--sweep-index", "SLURM_ARRAY_TASK_ID"
    )
    assert code == 0, err
    end = time.monotonic() + 300
    while slurm.jobs() and time.monotonic() < end:
        time.sleep(0.5)
    for number in (0, 1):
        code, log, err = launch.tfdist("logs", f"{out.strip()}_{number}")
        assert code == 0, err
        assert "on 2 replicas" in log, log
    summaries = sorted((launch.directory / "runs").glob("digits-sweep/*/summary.json"))
    assert [path.parent.name for path in summaries] == ["learning_rate=0.001", "learning_rate=0.01"]
    code, table, err = launch.tfdist(*sweep[1:], timeout=300)
    assert code == 0, err
    assert "Epoch 1/1" not in table
    assert re.search(r"0\.001 .*\n.*0\.01 ", table), table


def test_heterogeneous_job_gives_each_component_its_tasks(launch, slurm):
    """Chief and worker get the first component, the parameter server the second, in both starts."""
    script = (
        BEAT
        + SAVE
        + """
print("on", os.environ["SLURMD_NODENAME"], "restart", restart, flush=True)
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES", "none"), flush=True)
ready()
if restart == "0" or me == "ps:0": train(60)
"""
    )
    gpus = "--gpus-per-task=1 " if slurm.has_gpus else ""
    components = f"--slurm-options={gpus}: --ntasks=1 --nodes=1"
    job = launch.submit("--chief", "--workers=1", "--ps=1", components, script=script)
    launch.wait_for("chief:0.ready", "worker:0.ready", "ps:0.ready")
    assert re.search(rf"^{job} +RUNNING ", launch.tfdist("jobs")[1], re.MULTILINE)
    slurm.run("scancel", "--signal=TERM", job)
    state, code, text = launch.finish_job(job)
    assert (state, code) == ("COMPLETED", 0), text
    assert f"exit code 42: queue job {job} again" in text
    for restart in (0, 1):
        nodes = [re.search(rf"\[{task}\] on (\S+) restart {restart}", text)[1] for task in TASKS]
        assert len(set(nodes)) == 2, text
    if slurm.has_gpus:
        assert {"0", "1"} == set(re.findall(r"\[(?:chief|worker):0\] gpus (\d)", text))
        assert "[ps:0] gpus none" in text


def test_lost_component_of_an_allocation_is_replaced(launch, slurm):
    script = (
        BEAT
        + """
print("on", os.environ["SLURMD_NODENAME"], flush=True)
open(f"{me}.{attempt}", "w").close()
if attempt == "0": train(60)
"""
    )
    components = "--slurm-options=: --ntasks=1 --nodes=1"
    launch.start("--workers=2", components, "--restarts=1", script=script)
    launch.wait_for("worker:0.0", "worker:1.0")
    slurm.lose_node(NODES[1])
    try:
        code, out, err = launch.finish()
    finally:
        slurm.return_node(NODES[1])
    assert code == 0, err
    assert "asking for another" in err
    assert out.count(f" on {NODES[1]}\n") == 1
    assert out.count(f" on {NODES[2]}\n") == 1


def test_allocation_of_the_user_is_used_and_kept(launch, slurm):
    slurm.run("salloc", "--no-shell", "-N2", "--ntasks-per-node=1", "--job-name=mine")
    job = next(line.split()[0] for line in slurm.jobs() if "mine" in line)
    environ = {**launch.environ, "SLURM_JOB_ID": job}
    script = BEAT + "print('in job', os.environ['SLURM_JOB_ID'])"
    code, out, err = launch.run(script=script, environ=environ)
    assert code == 0, err
    assert out.count(f"in job {job}") == 2  # --workers is the number of the job's tasks
    refused = launch.run("--nodes=2", script=script, environ=environ)
    assert refused[0] == 2
    assert f"--nodes: expected outside of a Slurm job; received within job {job}" in refused[2]
    too_many = launch.run("--workers=3", script=script, environ=environ)
    assert too_many[0] == 2
    assert f"--workers: expected at most 2 tasks, for which job {job} has room" in too_many[2]
    assert any(line.startswith(f"{job} ") for line in slurm.jobs())
    slurm.run("scancel", job)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--partition=nowhere", 2, "invalid partition specified: nowhere; `sinfo` lists"),
        ("--slurm-options=--bogus", 2, "unrecognized option '--bogus'; see --slurm-options"),
        ("--time=2h", 2, "--time: expected MINUTES, HH:MM:SS or DAYS-HH:MM:SS, received '2h'"),
        ("--nodes=9", 2, "the job would never start: Partition"),
        ("--time=90", 2, "the job would never start: Partition"),
        ("--hosts=a", 2, "--hosts: expected together with --on ssh, received --on slurm"),
    ],
)
def test_wrong_options_are_refused_in_one_line(launch, words, code, message):
    found = launch.run(*words.split(), script="pass")
    assert found[0] == code, found[2]
    assert message in found[2]


def test_unknown_jobs_and_partitions_are_named(launch):
    assert (
        "invalid partition specified: nowhere"
        in launch.tfdist("submit", "--partition=nowhere", "--", "true")[2]
    )
    code, _, err = launch.tfdist("logs", "99999")
    assert code == 2
    assert "Invalid job id specified; `tfdist jobs` lists your jobs" in err
    assert launch.tfdist("cancel", "99999")[0] == 2
    assert "expected the number of a job" in launch.tfdist("cancel", "all")[2]


def test_controller_that_does_not_answer_is_named(launch, tmp_path):
    conf = tmp_path / "slurm.conf"
    text = (launch.slurm.home / "slurm.conf").read_text()
    conf.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1\nMessageTimeout=2", text))
    launch.environ["SLURM_CONF"] = str(conf)
    code, _, err = launch.tfdist("jobs")
    assert code == 75, err
    assert "look at `scontrol ping`" in err


@pytest.mark.timeout(1200)  # seven starts of TensorFlow in two processes each
def test_digits_equal_an_undisturbed_launch_after_five_preemptions(launch, slurm, digits_dir):
    """A job with priority takes the nodes five times, in different epochs and steps."""
    launch.environ["TFDS_DATA_DIR"] = str(digits_dir)

    def words(name):
        return (
            "--workers=2", "--chaos=none", f"--log-dir={name}", "--grace=60", "--",
            str(ROOT / "examples" / "digits.py"), "--epochs=10",
            f"--backup_dir={launch.directory / name}-backup",
        )  # fmt: skip

    # One restart is spare, for a preemption before the training has begun to listen.
    code, out, err = launch.tfdist("submit", "--nodes=2", "--restarts=1", *words("job"))
    assert code == 0, err
    job = out.strip()
    for number, delay in enumerate([0.0, 0.5, 1.0, 0.2, 1.5]):
        launch.wait_for_output(job, "Epoch ", 300, after=f"queue job {job} again" if number else "")
        time.sleep(delay)  # for another step within the epoch
        urgent = slurm.run("sbatch", "--parsable", "-purgent", "-N3", "--wrap", "true")
        launch.wait_for_requeues(job, number + 1)
        assert launch.finish_job(urgent)[0] == "COMPLETED"
    state, code, text = launch.finish_job(job, 300)
    assert (state, code) == ("COMPLETED", 0), text
    assert text.count(f"exit code 42: queue job {job} again") == 5, text
    code, out, err = launch.tfdist("launch", *words("here"), timeout=300)
    assert code == 0, out + err
    code, out, err = launch.tfdist("chaos", "report", "job/start-5", "--against", "here")
    assert code == 0, out + err
