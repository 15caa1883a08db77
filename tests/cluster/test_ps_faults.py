"""Test that every example counts once while tasks of a parameter-server job are killed.

Tasks are stopped, too.
"""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.cluster.scripts.ps_faults import BATCH, EXAMPLES
from tests.processes import PYTHON, ROOT, group
from tfdist import ClusterSpec

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "ps_faults.py")
TIMEOUT_S = 90  # for one event; a few on an idle machine
STEPS = EXAMPLES // BATCH


class Job:
    """Start and end the tasks of a job: a chief, two workers and a parameter server."""

    def __init__(self, members, directory):
        self.members = members
        self.directory = directory
        self.spec = ClusterSpec.local(workers=2, ps=1, chief=True)
        self.begins = 0

    def start(self, name, epochs=100, timeout=60):
        kind, index = name.split("-")
        config = self.spec.for_task(kind, int(index)).to_tf_config()
        command = [PYTHON, SCRIPT, str(self.directory / "backup"), str(epochs), str(timeout)]
        if name in self.members.processes:
            (self.directory / f"{name}.log").rename(self.directory / f"{name}.{self.begins}.log")
        self.members.start(name, command, TF_CONFIG=config)

    def kill(self, name):
        self.members.processes[name].kill()
        self.members.processes[name].wait(10)

    def signal(self, name, number):
        os.kill(self.members.processes[name].pid, number)

    def says(self, pattern):
        return self.members.says("chief-0", pattern, TIMEOUT_S)

    def in_the_middle_of_an_epoch(self):
        """Wait for the next epoch to begin, and then for some of its steps."""
        self.begins = len(re.findall("begins", self.members.log("chief-0")))
        self.says("begins.*" * self.begins + r"begins.*?step 100\b")

    def epoch_ends(self):
        """Wait for the end of the epoch that has begun."""
        epochs = len(re.findall("begins", self.members.log("chief-0")))
        return self.says(r"epoch \d+: .*" * epochs)

    def log(self):
        return self.members.log("chief-0")


@pytest.fixture
def job(tmp_path):
    with group(tmp_path) as members:
        yield Job(members, tmp_path)


def epochs(log):
    """Return the chief's lines on epochs: number, examples seen once, optimizer iterations."""
    return [
        tuple(map(int, groups))
        for groups in re.findall(r"epoch (\d+): once (\d+) iterations (\d+)", log)
    ]


@pytest.mark.timeout(600)
def test_workers_come_and_go_and_every_example_counts_once(job):
    for name in ("ps-0", "worker-0", "worker-1"):
        job.start(name)
    job.start("chief-0", epochs=7)

    job.in_the_middle_of_an_epoch()  # one worker is killed and comes back
    job.kill("worker-1")
    job.says("worker:1 at .* was lost; other workers take over its work")
    job.start("worker-1")
    job.says("worker:1 at .* is back")

    job.in_the_middle_of_an_epoch()  # one is stopped until the epoch is over
    job.signal("worker-0", signal.SIGSTOP)
    job.epoch_ends()
    assert re.search("worker:0 at .* does not answer; other workers take over its work", job.log())
    job.signal("worker-0", signal.SIGCONT)
    job.says("worker:0 at .* is back")

    job.in_the_middle_of_an_epoch()  # both are killed
    job.kill("worker-0")
    job.kill("worker-1")
    job.says("no worker is left; waiting for worker:0 at .*, worker:1 at ")
    job.start("worker-0")
    job.start("worker-1")
    job.says("no worker is left.*is back.*is back")

    job.says("done")
    done = epochs(job.log())
    assert done == [(epoch, EXAMPLES, (epoch + 1) * STEPS) for epoch in range(7)]
    assert re.search(rf"done, evaluation {EXAMPLES}\.0", job.log())
    assert set(job.members.wait(TIMEOUT_S).values()) == {0}  # the servers end with the chief


@pytest.mark.timeout(600)
def test_a_lost_parameter_server_and_a_lost_chief_cost_one_epoch_at_most(job):
    for name in ("ps-0", "worker-0", "worker-1"):
        job.start(name)
    job.start("chief-0", epochs=6)

    job.in_the_middle_of_an_epoch()
    job.in_the_middle_of_an_epoch()  # the first one has been backed up
    job.kill("ps-0")
    job.says("lost: ps:0 at .* was lost .*Start it again")
    job.start("ps-0")
    job.in_the_middle_of_an_epoch()  # in the same process, with the same workers

    job.signal("ps-0", signal.SIGSTOP)
    job.says("lost: ps:0 at .* was lost .it does not answer")
    job.kill("ps-0")
    job.start("ps-0")
    job.in_the_middle_of_an_epoch()

    job.kill("chief-0")
    log = job.log()
    assert job.members.processes["worker-0"].poll() is None
    job.start("chief-0", epochs=6)
    job.says("done")
    numbers = epochs(log) + epochs(job.log())
    assert (
        [n for n, _, _ in numbers] == sorted({n for n, _, _ in numbers}) == list(range(6))
    )  # each epoch ends once
    assert all(
        once == EXAMPLES and iterations == (n + 1) * STEPS for n, once, iterations in numbers
    )
    assert set(job.members.wait(TIMEOUT_S).values()) == {0}


@pytest.mark.timeout(300)
def test_workers_that_do_not_return_are_named(job):
    for name in ("ps-0", "worker-0", "worker-1"):
        job.start(name)
    job.start("chief-0", epochs=100, timeout=8)
    job.in_the_middle_of_an_epoch()
    job.kill("worker-0")
    job.kill("worker-1")
    job.says(
        r"TimeoutError: No worker is left: worker:0 at .*, worker:1 at .* did not come back "
        r"within 8 s"
    )
    assert job.members.processes["chief-0"].wait(TIMEOUT_S) != 0


@pytest.mark.timeout(120)
def test_tasks_that_never_start_are_named(tmp_path):
    config = ClusterSpec.local(workers=1, ps=1, chief=True).for_task("chief", 0).to_tf_config()
    with group(tmp_path) as members:
        members.start(
            "chief-0",
            [PYTHON, "-c", "import tfdist; tfdist.make_strategy(start_timeout=2)"],
            TF_CONFIG=config,
        )
        assert members.wait(60)["chief-0"] != 0
        assert re.search(
            r"PeersAbsent: ps:0 at \S+, worker:0 at \S+ did not answer within 2 s",
            members.log("chief-0"),
        )
