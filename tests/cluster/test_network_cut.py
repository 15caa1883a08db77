"""Test a network that is cut between two hosts in the middle of a training.

Namespaces are real; packets are lost without an error.

Test that the host with the rendezvous goes on, and the other ends its workers and comes back,
whichever of them a cut isolates.
"""

import contextlib
import os
import pickle
import signal
import time

import numpy as np
import pytest

from tests.cluster.scripts.chaotic import EPOCHS, EXAMPLES, STEPS
from tests.cluster.test_hosts import SCRIPT as WAITS
from tests.launches import ROOT, Launch
from tests.networks import network
from tfdist.runtime.launch_protocol import read_journal

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "chaotic.py")
TIMEOUT_S = 240  # for anything here to happen, on a busy machine
PORT = 20001
SILENCE = 3
WINDOW = 2
HOST = (
    f"--workers 1 --max-workers 2 --min-workers 1 --restarts 9 --restart-window {WINDOW} "
    f"--host-timeout {SILENCE} --token-file ../token --grace 20"
).split()
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "CHAOTIC_PACE": "0.5"}
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


class Hosts:
    """Run two hosts that train in one directory, each with a launcher."""

    def __init__(self, root, net):
        self.root = root
        self.net = net
        self.launches = []
        (root / "token").write_text("0123456789abcdef0123")
        (root / "token").chmod(0o600)

    def start(self, host, **what):
        words = ("--rendezvous", f"{self.net.address(1)}:{PORT}", *HOST)
        launch = self.launch(
            f"{len(self.launches)}-of-host{host}",
            *words,
            prefix=self.net.prefix(host),
            **(what or {"command": (SCRIPT, "..")}),
        )
        if host == 1:  # the first to join has the chief
            self.until(lambda: self.net.listens(1, PORT), "the rendezvous")
            time.sleep(0.5)
        return launch

    def launch(self, name, *words, **what):
        (self.root / name).mkdir()
        launch = Launch(self.root / name, TIMEOUT_S)
        self.launches.append(launch)
        launch.process = launch.start(*words, environ=QUIET, **what)
        return launch

    def until(self, condition, what):
        end = time.monotonic() + TIMEOUT_S
        while not (result := condition()):
            ended = [launch for launch in self.launches if launch.process.poll() is not None]
            assert time.monotonic() < end, (
                f"waited for {what}; ended: {[launch.finish() for launch in ended]}\n"
                f"{self.journals()}"
            )
            time.sleep(0.05)
        return result

    def journals(self):
        return {launch.directory.name: journal(launch) for launch in self.launches}


def journal(launch, event=None, attempt=0):
    """Return the events of a launch, from an attempt on: all, or those of a kind."""
    lines = read_journal(str(launch.directory / "runs" / "latest"))
    begun = next(
        (
            index
            for index, line in enumerate(lines)
            if line["event"] == "attempt" and line["attempt"] >= attempt
        ),
        len(lines),
    )
    return [line for line in lines[begun:] if event in (None, line["event"])]


@pytest.fixture
def hosts(tmp_path):
    with network(2) as net:
        made = Hosts(tmp_path, net)
        try:
            yield made
        finally:
            for launch in made.launches:
                for pid in launch.living():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                launch.finish()


def ends(launch):
    """Check that a launch ends with 0 and leaves no process; return its errors."""
    code, _, err = launch.finish()
    assert code == 0, err
    assert not launch.wait_for_nobody()
    return err


def test_host_that_is_cut_off_ends_and_the_others_continue(hosts):
    first = hosts.start(1)
    second = hosts.start(2)
    hosts.until(
        lambda: [line for line in journal(first, "saved") if line["step"]],
        "a snapshot of the first steps",
    )

    hosts.net.cut(2)
    time.sleep(1)
    hosts.net.join(2)
    time.sleep(SILENCE - 1)
    assert len(journal(first, "attempt")) == len(journal(second, "attempt")) == 1, (
        "a short cut is survived"
    )

    cut = hosts.net.cut(2)
    hosts.until(lambda: not second.living(tasks=True), "the end of the workers that are cut off")
    ended = time.time() - cut
    (hosts.root / "whole").mkdir()
    (hosts.root / "whole" / "hurry").touch()
    undisturbed = hosts.launch(
        "undisturbed", "--workers", "1", command=(SCRIPT, "../whole")
    )  # now, as nothing else has work to do
    again = hosts.until(lambda: journal(first, "attempt", 1), "an attempt without the second host")[
        0
    ]
    assert ended < SILENCE, (
        f"its workers ended {ended:.1f} s after the cut: the others give it up after {SILENCE} s"
    )
    assert SILENCE < again["time"] - cut < SILENCE + WINDOW + 5
    assert not journal(second, "saved"), "who is not the chief never writes"

    hosts.until(lambda: journal(first, "restored", 1), "training on one host")
    hosts.net.join(2)
    hosts.until(lambda: journal(second, "restored", 1), "training on both hosts again")
    (hosts.root / "hurry").touch()
    for launch in (first, second, undisturbed):
        ends(launch)
    assert len(journal(first, "attempt")) == 3
    whole = pickle.loads((hosts.root / "whole" / "worker-0.pickle").read_bytes())
    for index in range(2):
        check(pickle.loads((hosts.root / f"worker-{index}.pickle").read_bytes()), whole)
    assert not list(hosts.root.rglob("*.part"))


def check(result, undisturbed):
    assert result["iterations"] == EPOCHS * STEPS
    assert result["epochs"] == list(range(EPOCHS))
    assert (
        result["history"]["seen"] == [EXAMPLES * (EXAMPLES + 1) * (2 * EXAMPLES + 1) / 6] * EPOCHS
    )  # each example once an epoch
    assert result["history"].keys() == undisturbed["history"].keys()
    for name, values in undisturbed["history"].items():
        np.testing.assert_allclose(result["history"][name], values, rtol=1e-5, err_msg=name)
    for a, b in zip(result["weights"], undisturbed["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_host_that_returns_in_time_joins_the_next_attempt(hosts):
    """Test that the first host, which has the rendezvous, continues when it is cut off.

    Run without TensorFlow.
    """
    first = hosts.start(1, script=WAITS)
    second = hosts.start(2, script=WAITS)
    both = (first, second)

    def worlds(launches, attempt, count):
        said = f"world {count} attempt {attempt} "
        hosts.until(lambda: all(said in logs(launch) for launch in launches), said)

    worlds(both, 0, 2)
    hosts.net.cut(2)
    time.sleep(SILENCE + 0.5)  # both have noticed
    hosts.net.join(2)
    worlds(both, 1, 2)
    hosts.net.cut(1)
    worlds([first], 2, 1)
    hosts.net.join(1)
    worlds(both, 3, 2)
    (hosts.root / "finish").touch()
    assert "was silent for 3 s" in ends(first)
    ends(second)


def logs(launch):
    return "".join(path.read_text() for path in sorted(launch.directory.rglob("worker-*.log")))
