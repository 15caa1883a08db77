"""Test that workers and parameter servers serve as long as there is a job, and no longer."""

import os
import signal
import socket
import threading
import time

import pytest

from tests.processes import PYTHON, ROOT, group
from tfdist.cluster.addresses import answers
from tfdist.cluster.spec import ClusterSpec

TIMEOUT_S = 120  # for a process to come up or to end by itself; it takes five on an idle machine
pytestmark = pytest.mark.timeout(4 * TIMEOUT_S)

SERVE = """
import sys, tensorflow as tf
tf.distribute.Server({"worker": [sys.argv[1]]}, job_name="worker", task_index=0, protocol="grpc").join()
"""  # noqa: E501


def until(condition, seconds=TIMEOUT_S):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def timed(function, *arguments):
    started = time.monotonic()
    return function(*arguments), time.monotonic() - started


# --- answers --------------------------------------------------------------------------------------
def test_a_running_server_answers_and_a_stopped_or_killed_one_does_not(tmp_path):
    address = ClusterSpec.local().jobs["worker"][0]
    assert not answers(address, 1)
    with group(tmp_path) as members:
        server = members.start("server", [PYTHON, "-c", SERVE, address], TF_CPP_MIN_LOG_LEVEL="0")
        until(lambda: answers(address, 1) and "Started server" in members.log("server"))
        time.sleep(1)
        log = members.log("server")
        files = len(os.listdir(f"/proc/{server.pid}/fd"))
        assert all(answers(address, 10) for _ in range(1000))
        time.sleep(1)
        assert members.log("server") == log
        assert (
            len(os.listdir(f"/proc/{server.pid}/fd")) <= files + 2
        )  # some sockets are still being closed
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)  # all its threads
        answer, seconds = timed(answers, address, 0.5)
        assert not answer
        assert 0.4 < seconds < 5
        server.send_signal(signal.SIGCONT)
        assert answers(address, 10)
        server.kill()
        server.wait(10)
        assert not answers(address, 1)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0"])
def test_another_kind_of_server_does_not_answer(greeting):
    def greet():
        with server.accept()[0] as connection:
            connection.sendall(greeting)
            connection.recv(1000)
            closing.wait(TIMEOUT_S)

    closing = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=greet, daemon=True).start()
        answer, seconds = timed(answers, f"127.0.0.1:{server.getsockname()[1]}", 0.3)
        closing.set()
    assert not answer
    assert seconds < 5


def test_a_name_without_an_address_does_not_answer():
    assert not answers("no-such-host.invalid:1", 1)


# --- serve ----------------------------------------------------------------------------------------
class Job:
    """Start the tasks of one cluster by hand."""

    def __init__(self, members):
        self.members = members
        self.spec = ClusterSpec.local(workers=2, ps=1, chief=True)

    def start(self, *tasks, how="finish", timeouts=(), name=None):
        for task in tasks:
            kind, index = task.split(":")
            self.members.start(
                name or task,
                [PYTHON, "-m", "tests.cluster.scripts.serving", how, *map(str, timeouts)],
                TF_CONFIG=self.spec.for_task(kind, int(index)).to_tf_config(),
                PYTHONPATH=str(ROOT),
                # The launcher shares two cores like this; a loop on a worker needs more.
                TF_NUM_INTEROP_THREADS="1",
            )

    def serve(self, **options):
        self.start("worker:0", "worker:1", "ps:0", **options)
        until(
            lambda: all(
                answers(task.address, 1) for task in self.spec.tasks if task.type != "chief"
            )
        )

    def says(self, task, words):
        until(lambda: words in self.members.log(task))

    def alive(self):
        return [name for name, process in self.members.processes.items() if process.poll() is None]


@pytest.fixture
def job(tmp_path):
    with group(tmp_path) as members:
        yield Job(members)


def test_servers_end_with_a_chief_that_finished(job):
    job.serve()
    job.start("chief:0")
    job.members.processes["chief:0"].wait(TIMEOUT_S)
    started = time.monotonic()
    job.members.succeed(TIMEOUT_S)
    assert (
        time.monotonic() - started < 15
    )  # less than a second on an idle machine; without the chief's word, 60
    assert "chief answers: True" in job.members.log("chief:0")
    assert "counted 50" in job.members.log("chief:0")
    for task in ("worker:0", "worker:1", "ps:0"):
        log = job.members.log(task)
        assert f"{task} serves at 127.0.0.1:" in log
        assert f"{task} ends: the chief at {job.spec.jobs['chief'][0]} has finished" in log
        assert "Traceback" not in log
    assert "Connection refused" not in job.members.log("chief:0")  # they stay until it is gone


def test_servers_wait_within_a_bound_for_a_chief_that_was_killed_or_left(job):
    job.serve(timeouts=(TIMEOUT_S, 20))
    job.start("chief:0", how="stay", name="first")
    job.says("first", "counted 50")
    for task in ("worker:0", "worker:1", "ps:0"):  # each looks once a second
        job.says(task, "answers")
    job.members.processes["first"].kill()
    job.says("worker:0", "is gone; waiting 20 s")
    job.start("chief:0", how="leave", name="second")
    job.says("second", "counted 50")
    job.members.processes.pop("first").wait(10)
    job.members.succeed(TIMEOUT_S)
    assert "did not come back within 20 s" in job.members.log("ps:0")


def test_chief_that_never_starts_is_named(job):
    job.start("worker:0", timeouts=(2, 2))
    assert job.members.wait(TIMEOUT_S) == {"worker:0": 75}
    log = job.members.log("worker:0")
    assert f"no chief answered at {job.spec.jobs['chief'][0]} within 2 s" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_server_at_once(job, number):
    job.serve()
    job.start("chief:0", how="stay")
    job.says("chief:0", "counted 50")
    servers = {
        name: process for name, process in job.members.processes.items() if name != "chief:0"
    }
    for process in servers.values():
        process.send_signal(number)
    started = time.monotonic()
    codes = {process.wait(TIMEOUT_S) for process in servers.values()}
    assert time.monotonic() - started < 10  # a second on an idle machine
    assert codes == {130 if number == signal.SIGINT else -signal.SIGTERM}
    assert not any("Traceback" in job.members.log(name) for name in servers)


def test_port_in_use_and_missing_chief_are_named(job):
    host, port = job.spec.jobs["worker"][0].split(":")
    with socket.create_server((host, int(port))):
        job.start("worker:0")
        assert job.members.wait(TIMEOUT_S) == {"worker:0": 1}
    assert "already in use on this machine" in job.members.log("worker:0")
    job.spec = ClusterSpec.local(workers=1, ps=1)
    job.start("ps:0", name="ps:0")
    assert job.members.wait(TIMEOUT_S)["ps:0"] == 1
    assert "parameter_server needs a chief" in job.members.log("ps:0")
