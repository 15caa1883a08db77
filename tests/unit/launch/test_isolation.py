"""Test that a refused isolation is named and changes nothing, and that it explains each cut-off."""

import errno
import json
import os

import pytest

from tfdist.launch import isolation
from tfdist.launch.failures import Ending, judge


def raising(error):
    def unshare(flags):
        raise error

    return unshare


def killed(flags):
    os.kill(os.getpid(), 31)  # SIGSYS, as of a strict seccomp filter


def half_way(flags):
    raise OSError(errno.EINVAL, "Invalid argument", "elsewhere")


@pytest.mark.parametrize(
    ("unshare", "platform", "refusal"),
    [
        (
            raising(PermissionError(errno.EPERM, "Operation not permitted")),
            "linux",
            "NEWNET): Operation not permitted",
        ),
        (
            raising(OSError(errno.ENOSYS, "Function not implemented")),
            "linux",
            "NEWNET): Function not implemented",
        ),
        (half_way, "linux", "NEWNET): Invalid argument"),
        (raising(ImportError("no ctypes")), "linux", "a child that tried it ended with code 1"),
        (killed, "linux", "a child that tried it ended with code -31"),
        (
            raising(AssertionError("called")),
            "darwin",
            "only Linux has network namespaces, this is darwin",
        ),
    ],
)
def test_a_refusal_is_named_and_changes_nothing(unshare, platform, refusal):
    before = os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/user")
    reason = isolation.isolate(unshare, platform)
    assert reason.endswith(refusal)
    assert (os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/user")) == before
    text = isolation.warning(reason, colour=True)
    assert text.startswith("\x1b[1;31mWARNING: other hosts may reach these tasks.\x1b[0m\n")
    assert all(
        part in text for part in (reason, "without authentication", "firewall", "--allow-remote")
    )


THREADS = """
import os, threading
from tfdist.launch.isolation import isolate
before = os.readlink("/proc/self/ns/net")
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(isolate())
assert os.readlink("/proc/self/ns/net") == before
"""


def test_process_with_several_threads_is_not_isolated(run_python):
    run = run_python(THREADS)
    assert run.returncode == 0, run.stderr
    if run.stdout != "this process has several threads, of which only one would move\n":
        pytest.skip(f"the kernel refuses a private network: {run.stdout}")


# Root takes this way only here; a user is whoever runs the tests.
AS_A_USER = """
import json, os, socket, sys
from tfdist.launch import isolation
def enter():
    isolation.enter(isolation.CLONE_NEWUSER | isolation.CLONE_NEWNET, isolation._unshare)
refusal = isolation._try_in_child(enter)
if refusal is None:
    enter()
    open(sys.argv[1], "w").close()
print(json.dumps([refusal, os.geteuid(), os.getegid(), [name for _, name in socket.if_nameindex()]]))
"""  # noqa: E501


def test_user_namespace_keeps_the_user_id(run_python, tmp_path):
    run = run_python(AS_A_USER, str(tmp_path / "made"))
    assert run.returncode == 0, run.stderr
    refusal, user, group, interfaces = json.loads(run.stdout)
    if refusal:
        pytest.skip(f"the kernel refuses a private network: {refusal}")
    assert (user, group) == (os.geteuid(), os.getegid())
    made = (tmp_path / "made").stat()
    assert (made.st_uid, made.st_gid) == (os.geteuid(), (tmp_path).stat().st_gid)
    assert "lo" in interfaces
    assert not any(name.startswith(("e", "w")) for name in interfaces)  # eth0, enp1s0, wlan0


WORDS = [
    "gaierror: [Errno -3] Temporary failure in name resolution",
    "gaierror: [Errno -2] Name or service not known",
    "OSError: [Errno 101] Network is unreachable",
    "Exception: URL fetch failure on https://x/mnist.npz: None -- [Errno 111] Connection refused",
    "ConnectionError: HTTPSConnectionPool(host='x', port=443): Max retries exceeded with url: /",
    (
        "UnavailableError: Error executing an HTTP request: libcurl code 6 meaning 'Couldn't "
        "resolve host name'"
    ),
    "curl: (6) Could not resolve host: x",
]


@pytest.mark.parametrize("words", WORDS)
def test_failure_caused_by_missing_network_is_explained(words):
    endings = [
        Ending("worker:0", 1, 5.0, log=f"epoch 1\n{words}\n"),
        Ending("worker:1", -15, 9.0, signalled=8.0),
    ]
    assert "--allow-remote" in judge(endings, isolated=True).cause.hint
    assert "--allow-remote" not in judge(endings, isolated=False).cause.hint


def test_another_failure_does_not_speak_of_the_network():
    lost = (
        "UnavailableError: failed to connect to all addresses; ipv4:127.0.0.1:2: Connection refused"
    )
    endings = [Ending("worker:0", 1, 5.0, log=lost), Ending("worker:1", -9, 6.0)]
    verdict = judge(endings, isolated=True)
    assert verdict.cause.task == "worker:1"
    assert [other.task for other in verdict.others] == ["worker:0"]
    assert "--allow-remote" not in verdict.cause.hint
