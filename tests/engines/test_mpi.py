"""Test `tfdist agent` under Open MPI's `mpirun`, with two addresses of this machine as hosts."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.forkserver import environ_of
from tests.launches import Launch
from tests.processes import ROOT, lean

HOSTS = "127.0.1.2:1,127.0.1.3:1"
# Stands for ssh: as on another machine, the command does not get the variables of mpirun.
REMOTE_SHELL = """#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do shift; done
echo "$1" >> {directory}/hosts
shift
exec env -i HOME="$HOME" PATH="$PATH" {mark} bash -c "$*"
"""
HANG = """
import os, time
from tfdist.runtime.launch_protocol import Phase, progress
for step in range(20):
    progress().beat(Phase.RUNNING, 0, step + 1, step + 1)
    time.sleep(0.05)
while os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    progress().beat(Phase.RUNNING, 0, step := step + 1, step)
    time.sleep(0.05)
time.sleep(600)
"""
DIGITS = str(ROOT / "examples" / "digits.py")
BOUND_S = 180


class MpiRun(Launch):
    """An `mpirun` over two hosts, whose processes bear a mark."""

    def start(self, *flags, command, variables=()):
        shell = self.directory / "remote-shell"
        shell.write_text(REMOTE_SHELL.format(directory=self.directory, mark=self.mark))
        shell.chmod(0o755)
        name, _, value = self.mark.partition("=")
        passed = lean({"PYTHONPATH": str(ROOT), "TFDIST_HOSTS": HOSTS, **dict(variables)})
        words = ["mpirun", "--mca", "plm_rsh_agent", str(shell), "--map-by", "slot", "-H", HOSTS]
        for variable, text in passed.items():
            words += ["-x", f"{variable}={text}"]
        with open(self.directory / "out", "w") as out, open(self.directory / "err", "w") as err:
            self._process = subprocess.Popen(
                [*words, sys.executable, "-m", "tfdist", "agent", *flags, "--", *command],
                cwd=self.directory,
                env={
                    "HOME": str(self.directory),
                    "PATH": os.environ["PATH"],
                    name: value,
                    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # root of a container
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    # It shares memory at an address that is sometimes taken (SIGSEGV).
                    "OMPI_MCA_rtc": "^hwloc",
                },
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return self._process

    def finish(self):
        code = self._process.wait(self.bound)
        return code, self.output("out"), self.output("err")

    def output(self, name):
        return (self.directory / name).read_text()

    def wait_for_output(self, words):
        end = time.monotonic() + self.bound
        while words not in self.output("out"):
            logs = self.output("out") + self.output("err")
            assert self._process.poll() is None, logs
            assert time.monotonic() < end, f"waited for {words!r}: {logs}"
            time.sleep(0.1)

    def task(self, rank):
        """Return the process id of a task, which is a child of its agent."""
        return next(
            pid
            for pid in self.living(tasks=True)
            if environ_of(pid).get("OMPI_COMM_WORLD_RANK") == str(rank)
        )


@pytest.fixture
def mpi(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed (apt-get install openmpi-bin)")
    run = MpiRun(tmp_path, bound=BOUND_S)
    yield run
    run.check_nobody_left(15.0)


def test_digits_train_on_two_hosts(mpi, digits_dir):
    code, out, err = mpi.run(
        command=(DIGITS, "--epochs=1"), variables={"TFDS_DATA_DIR": str(digits_dir)}
    )
    assert code == 0, out + err
    assert "val_accuracy: " in out
    hosts = (mpi.directory / "hosts").read_text().split()
    assert sorted(hosts) == ["127.0.1.2", "127.0.1.3"]
    starts = list(pathlib.Path(mpi.directory, "runs", "agents").glob("mpi-*/start-0"))
    assert [sorted(task.name for task in start.iterdir()) for start in starts] == [
        ["task-0", "task-1"]
    ]


def test_killed_task_ends_the_run_and_is_named(mpi, digits_dir):
    mpi.start(command=(DIGITS, "--epochs=999"), variables={"TFDS_DATA_DIR": str(digits_dir)})
    mpi.wait_for_output("Epoch 2/")
    os.kill(mpi.task(1), signal.SIGKILL)
    code, _, err = mpi.finish()
    # mpirun ends with the code of the task whose end it sees first.
    assert code in (75, 128 + signal.SIGKILL), err
    assert re.search(r"ROOT CAUSE: worker:1 was killed by SIGKILL", err), err


def test_hung_task_ends_the_run_within_its_bound(mpi):
    (mpi.directory / "hang.py").write_text(HANG)
    code, _, err = mpi.run("--hang-timeout=3", command=("hang.py",))
    assert code == 75, err
    assert re.search(r"ROOT CAUSE: worker:1 made no step for \d+ s after step 20", err), err
    (log,) = mpi.directory.glob("runs/agents/mpi-*/start-0/task-1/worker-1.log")
    assert re.search(r'File "\S*hang.py", line \d+ in <module>', log.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_stays_behind_when_mpirun_ends(mpi, number):
    (mpi.directory / "hang.py").write_text("print('begun', flush=True)\n" + HANG)
    process = mpi.start(command=("hang.py",))
    mpi.wait_for_output("begun\nbegun\n")
    process.send_signal(number)
    code, _, _ = mpi.finish()
    assert code != 0
    assert not mpi.wait_for_nobody(15.0)


def test_hosts_that_the_tasks_are_not_told_are_refused(mpi):
    (mpi.directory / "hang.py").write_text(HANG)
    code, _, err = mpi.run(command=("hang.py",), variables={"TFDIST_HOSTS": "127.0.1.2:1"})
    assert code == 78, err
    assert "TFDIST_HOSTS has 1 slots for 2 processes" in err
    assert "Traceback" not in err
