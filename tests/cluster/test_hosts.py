"""Test one `tfdist launch` per host with the same rendezvous.

Several launchers run tiny scripts on loopback, without TensorFlow.
"""

import contextlib
import os
import signal
import time

import pytest

from tests.launches import Launch
from tests.networks import listens
from tfdist.cluster.addresses import free_ports

SCRIPT = """
from tfdist.runtime.launch_protocol import Launched, Phase, Progress
count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
progress = Progress(Launched.from_environ().progress_file)
print("world", count, "attempt", os.environ["TFDIST_ATTEMPT"], os.environ["TFDIST_LAUNCH"], flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
step = 0
while not os.path.exists("../finish"):
    step += 1
    progress.beat(Phase.RUNNING, 0, step, step)
    time.sleep(0.05)
"""  # noqa: E501
FLAGS = (
    "--restarts",
    "5",
    "--restart-window",
    "2",
    "--host-timeout",
    "30",
    "--token-file",
    "../token",
    "--grace",
    "5",
)


class Hosts:
    """Start launchers that stand for hosts."""

    def __init__(self, root):
        self.root = root
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        (root / "token").write_text("0123456789abcdef0123")
        (root / "token").chmod(0o600)
        self.launches = {}

    def start(self, name, *flags, script=SCRIPT, **options):
        directory = self.root / name
        directory.mkdir(exist_ok=True)
        launch = Launch(directory)
        self.launches[name] = launch
        launch.process = launch.start(
            "--rendezvous", self.address, *FLAGS, *flags, script=script, **options
        )
        while (
            len(self.launches) == 1
            and launch.process.poll() is None
            and not listens(int(self.address.rpartition(":")[2]))
        ):
            time.sleep(
                0.02
            )  # here all have the address, and the one that binds it is the first host
        return launch

    def says(self, name, words, seconds=60.0):
        """Wait until the log of a host's worker contains this text."""
        end = time.monotonic() + seconds
        while words not in (text := self.logs(name)):
            assert time.monotonic() < end, f"{name} never said {words!r}:\n{text}"
            time.sleep(0.05)

    def logs(self, name):
        return "".join(
            path.read_text() for path in sorted((self.root / name).rglob("worker-*.log"))
        )

    def finish(self):
        (self.root / "finish").touch()


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    for launch in made.launches.values():
        for pid in launch.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launch.finish()


def test_hosts_form_one_cluster_lose_one_and_grow_again(hosts):
    flags = ("--max-workers", "3", "--min-workers", "2")
    first = hosts.start("a", *flags)
    second = hosts.start("b", *flags)
    third = hosts.start("c", *flags)
    for name in "abc":
        hosts.says(name, "world 3 attempt 0")
    third.process.send_signal(signal.SIGKILL)  # as a host that is lost
    for name in "ab":
        hosts.says(name, "world 2 attempt 1")
    assert not third.wait_for_nobody(), "the guardian leaves nothing behind"
    third.finish()
    again = hosts.start("c", *flags)
    for name in "abc":
        hosts.says(name, "world 3 attempt 2")
    hosts.finish()
    for launch in (first, second, again):
        code, _, err = launch.finish()
        assert code == 0, err
    assert (
        len(
            {
                line.split()[-1]
                for name in "abc"
                for line in hosts.logs(name).splitlines()
                if "world" in line
            }
        )
        == 1
    )


def test_a_worker_that_dies_restarts_all_hosts(hosts):
    fault = (
        "\nif me == 'worker:1' and os.environ['TFDIST_ATTEMPT'] == '0':\n    time.sleep(1)\n    "
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = SCRIPT.replace("step = 0\n", fault + "step = 0\n")
    launches = [hosts.start(name, "--max-workers", "2", script=script) for name in "ab"]
    for name in "ab":
        hosts.says(name, "world 2 attempt 1")
    hosts.finish()
    ends = [launch.finish() for launch in launches]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert any("worker:1 was killed by SIGKILL" in err for _, _, err in ends)
    assert any("restart 1 of 5" in err for _, _, err in ends)


def test_task_that_is_stopped_on_another_host_is_the_cause(hosts):
    fault = (
        "\nif os.environ['TFDIST_ATTEMPT'] == '0':\n"
        "    if me == 'worker:1':\n"
        "        open('../stopped', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    while not os.path.exists('../stopped'): time.sleep(0.01)\n"
        "    lose_peers()\n"
    )
    script = SCRIPT.replace("step = 0\n", fault + "step = 0\n")
    launches = [hosts.start(name, "--max-workers", "2", script=script) for name in "ab"]
    for name in "ab":
        hosts.says(name, "world 2 attempt 1")
    hosts.finish()
    ends = [launch.finish() for launch in launches]
    assert [code for code, _, _ in ends] == [0, 0], ends
    # The first host's launcher decides, and shows the cause.
    assert "worker:1 was stopped while its peers needed it" in ends[0][2], ends
    assert "restart 1 of 5" in ends[0][2]


def test_frozen_host_is_given_up_and_ends_its_own_workers(hosts):
    flags = ("--max-workers", "2", "--min-workers", "1", "--host-timeout", "3")
    first = hosts.start("a", *flags)
    hosts.says("a", "world 1 attempt 0")
    second = hosts.start("b", *flags)
    for name in "ab":
        hosts.says(name, "world 2 attempt 1")
    second.process.send_signal(signal.SIGSTOP)
    hosts.says("a", "world 1 attempt 2")
    second.process.send_signal(signal.SIGCONT)
    for name in "ab":  # its old workers are ended, and it joins again
        hosts.says(name, "world 2 attempt 3")
    hosts.finish()
    for launch in (first, second):
        code, _, err = launch.finish()
        assert code == 0, err
    assert "ended the tasks here" in err


def test_leaving_host_saves_and_the_others_continue(hosts):
    flags = ("--max-workers", "2", "--min-workers", "1")
    first = hosts.start("a", *flags)
    second = hosts.start("b", *flags)
    for name in "ab":
        hosts.says(name, "world 2")
    second.process.send_signal(signal.SIGTERM)
    code, _, err = second.finish()
    assert code == 42, err
    hosts.says("a", "world 1")
    hosts.finish()
    code, _, err = first.finish()
    assert code == 0, err


def test_saving_ends_when_a_host_is_lost_meanwhile(hosts):
    flags = ("--max-workers", "3", "--min-workers", "2", "--grace", "60")
    deaf = SCRIPT.replace("lambda *_: sys.exit(42)", "signal.SIG_IGN")  # as who waits for a peer
    hosts.start("a", *flags, script=deaf)
    second = hosts.start("b", *flags, script=deaf)
    for name in "ab":
        hosts.says(name, "world 2")
    hosts.start("c", *flags, script=deaf)  # all stop gently, to go on with three
    time.sleep(1.5)
    second.process.send_signal(signal.SIGKILL)
    for name in "ac":
        hosts.says(name, "world 2 attempt 1", seconds=30)


def test_end_of_the_first_host_ends_all_hosts(hosts):
    first = hosts.start("a", "--max-workers", "2")
    second = hosts.start("b", "--max-workers", "2")
    for name in "ab":
        hosts.says(name, "world 2")
    first.process.send_signal(signal.SIGKILL)
    first.finish()
    code, _, err = second.finish()
    assert code == 75, err
    assert "lost the rendezvous" in err
    assert not second.wait_for_nobody()


def test_hosts_that_never_join_are_named(hosts):
    launch = hosts.start("a", "--max-workers", "2", "--join-timeout", "1")
    code, _, err = launch.finish()
    assert code == 75
    assert "1 of at least 2 workers can run" in err


@pytest.mark.parametrize(
    ("flags", "token", "said"),
    [
        ((), None, "--max-workers"),
        (
            ("--max-workers", "2", "--rendezvous", "nohost"),
            None,
            "--rendezvous: 'nohost' is not host:port; write it as 10.0.0.1:2222",
        ),
        (("--max-workers", "2", "--min-workers", "3"), None, "--min-workers: expected at most"),
        (("--max-workers", "2", "--ps", "1"), None, "--ps: expected without --rendezvous"),
        (("--max-workers", "2", "--host-timeout", "0"), None, "--host-timeout"),
        (("--max-workers", "2"), "short", "16"),
        (("--max-workers", "2", "--token-file", "missing"), None, "missing"),
    ],
)
def test_bad_flags_are_named_before_anything_starts(flags, token, said, hosts):
    if token:
        (hosts.root / "token").write_text(token)
    code, _, err = hosts.start("a", *flags).finish()
    assert code == 2, err
    assert said in err


def test_a_token_that_others_can_read_is_refused(hosts):
    (hosts.root / "token").chmod(0o644)
    code, _, err = hosts.start("a", "--max-workers", "1").finish()
    assert code == 2
    assert "chmod 600" in err


def test_another_token_or_command_is_refused(hosts):
    first = hosts.start("a", "--max-workers", "2")
    code, _, err = hosts.start("b", "--max-workers", "2", command=("task.py", "--lr", "1")).finish()
    assert code == 78, err
    assert "--lr 1" in err
    (hosts.root / "other").write_text("another token of length")
    (hosts.root / "other").chmod(0o600)
    code, _, err = hosts.start("c", "--max-workers", "2", "--token-file", "../other").finish()
    assert code == 78, err
    first.process.send_signal(signal.SIGTERM)
    assert first.finish()[0] in (42, 143)


def test_without_a_rendezvous_its_flags_are_refused(launch):
    code, _, err = launch.run("--min-workers", "1", script="ready()")
    assert code == 2
    assert "--min-workers: expected together with --rendezvous" in err


def test_an_error_with_a_long_message_restarts_all_hosts_once(hosts):
    script = SCRIPT.replace(
        "step = 0\n",
        "if me == 'worker:1': time.sleep(0.5); raise ValueError('no ' * 400)\nstep = 0\n",
    )
    launches = [hosts.start(name, "--max-workers", "2", script=script) for name in "ab"]
    ends = [launch.finish() for launch in launches]
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert any("the same error occurred twice" in err for _, _, err in ends)
