"""Test that a cell of a Jupyter kernel runs a function in workers, and learns how they ended."""

import os

import pytest
from jupyter_client.manager import start_new_kernel

from tests.cluster.test_notebooks import living
from tests.processes import ROOT, environment

TIMEOUT_S = 60

IMPORTS = "import os, threading, time, tfdist"
SCALED = """
RATE = 2
class Result:
    def __init__(self, value):
        self.value = value
def scaled(x):
    print("task", os.environ["TFDIST_TASK"])
    return Result(RATE * x)
result = tfdist.notebook_launcher(scaled, (3,), workers=2)
print(isinstance(result, Result), result.value)
"""
FAILURE = """
def check():
    if os.environ["TFDIST_TASK"] == "worker:1":
        raise ValueError("the rate is bad")
    time.sleep(60)
tfdist.notebook_launcher(check)
"""
ENDLESS = """
def wait():
    print("waits")
    time.sleep(60)
tfdist.notebook_launcher(wait, workers=1)
"""
LOCKED = "lock = threading.Lock()\ntfdist.notebook_launcher(lambda: lock)"
LOCK_RETURNED = "tfdist.notebook_launcher(threading.Lock, workers=1)"
WRONG_FLAG = "tfdist.notebook_launcher(print, launch_flags=['--restarts=often'])"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kernel")
    environ = environment(
        PYTHONPATH=str(ROOT),
        IPYTHONDIR=str(directory),
        NOTEBOOK_TEST_MARK=str(directory),
        PATH=os.environ["PATH"],
    )
    manager, client = start_new_kernel(cwd=str(directory), env=environ)
    client.mark = str(directory)
    try:
        client.execute_interactive(IMPORTS, timeout=TIMEOUT_S)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(kernel, code, interrupt_at=None):
    """Run a cell, and return its output and, after a failure, the class and message of the error.

    Interrupt the kernel when the output has `interrupt_at`.
    """
    manager, client = kernel
    output = []

    def keep(message):
        if message["header"]["msg_type"] == "stream":
            output.append(message["content"]["text"])
            if interrupt_at and interrupt_at in message["content"]["text"]:
                manager.interrupt_kernel()

    reply = client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=keep)["content"]
    return "".join(output), (reply.get("ename"), reply.get("evalue"))


def test_function_runs_in_each_worker_and_the_chief_returns(kernel):
    output, error = run(kernel, SCALED)
    assert error == (None, None), output
    assert "[worker:0] task worker:0\n" in output
    assert "[worker:1] task worker:1\n" in output
    assert output.endswith("True 6\n")


def test_failure_names_the_root_cause_and_the_line_of_the_cell(kernel):
    output, error = run(kernel, FAILURE)
    assert error == (
        "RuntimeError",
        "worker:1 failed with exit code 1: ValueError: the rate is bad",
    )
    assert "line 3, in check\n" in output


def test_interrupt_ends_the_workers(kernel):
    output, error = run(kernel, ENDLESS, interrupt_at="waits")
    assert error[0] == "KeyboardInterrupt", output
    manager, client = kernel
    assert living(client.mark) == [str(manager.provisioner.pid)]


@pytest.mark.parametrize(
    ("code", "kind", "part"),
    [
        (LOCKED, "ValueError", "the function and its arguments can be pickled"),
        (LOCK_RETURNED, "RuntimeError", "the value that the function returns can be pickled"),
        (WRONG_FLAG, "RuntimeError", "tfdist launch ended with code 2"),
    ],
)
def test_mistakes_are_named(kernel, code, kind, part):
    output, error = run(kernel, code)
    assert error[0] == kind, output
    assert part in error[1]
