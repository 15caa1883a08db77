"""Test that a snapshot in memory outlives its process, whole or not at all.

Each test has a server process of its own. What cannot be held is named, and no test ends with a
process or with shared memory of its own.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.forkserver import Popen
from tests.processes import ROOT, environment
from tfdist.backup import memory_tier
from tfdist.backup.claim import Superseded
from tfdist.backup.memory_tier import MemoryTier
from tfdist.backup.snapshot import Snapshot
from tfdist.launch.snapshot_server import SnapshotServer
from tfdist.runtime.snapshot_protocol import is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="no memfd_create: Linux has it")
WAIT_S = 30.0


@pytest.fixture
def server():
    server = SnapshotServer()
    yield server
    pid = server.pid
    server.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def tier(server):
    tier = tier_of(server)
    yield tier
    tier.close()


def tier_of(server, attempt=0, directory="/backup", **options):
    tier = MemoryTier(directory, attempt, server.name, **options)
    until(lambda: can_connect(tier))
    return tier


def can_connect(tier):
    try:
        tier._ask({"get": "", "part": 0, "attempt": 0})
        return True
    except OSError:
        return False


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state(step, size=1000):
    return Snapshot({"x": np.full(size, float(step)), "none": np.zeros([0, 3])}, {"step": step})


def check_held(tier, step, size=1000):
    held = tier.get()
    assert held is not None
    assert held.at == (0, step)
    assert held.snapshot.facts == {"step": step}
    np.testing.assert_array_equal(held.snapshot.arrays["x"], np.full(size, float(step)))


def test_newest_snapshot_is_held(tier):
    assert tier.get() is None
    for step in range(7):
        assert tier.put(state(step, 1000 + 200_000 * step), (0, step))
        check_held(tier, step, 1000 + 200_000 * step)
    tier.drop()
    assert tier.get() is None


def test_many_small_arrays_are_written_in_several_calls(tier):
    arrays = {f"a{i}": np.full(i % 3, i) for i in range(3000)}
    assert tier.put(Snapshot(arrays, {}), (0, 1))
    held = tier.get()
    assert list(held.snapshot.arrays) == list(arrays)
    assert all((held.snapshot.arrays[name] == array).all() for name, array in arrays.items())


def test_directories_are_kept_apart(server, tier):
    other = tier_of(server, directory="/other")
    assert tier.put(state(1), (0, 1))
    assert other.put(state(2), (0, 2))
    other.drop()
    check_held(tier, 1)
    assert other.get() is None
    other.close()


def test_snapshot_that_was_read_does_not_change(tier):
    assert tier.put(state(1), (0, 1))
    held = tier.get()
    for step in range(2, 6):
        assert tier.put(state(step), (0, step))
    np.testing.assert_array_equal(held.snapshot.arrays["x"], np.full(1000, 1.0))


def test_snapshot_outlives_a_process_that_is_killed_while_it_saves(server, tier):
    script = (
        "import sys, numpy as np\n"
        "from tfdist.backup.memory_tier import MemoryTier\n"
        "from tfdist.backup.snapshot import Snapshot\n"
        "tier = MemoryTier('/backup', 0, sys.argv[1])\n"
        "for step in range(10**9):\n"
        "    array = np.full(400_000, float(step))\n"
        "    assert tier.put(Snapshot({'x': array, 'none': np.zeros([0, 3])}, {'step': step}),"
        " (0, step))\n"
        "    print(step, flush=True)\n"
    )
    with Popen(
        [sys.executable, "-c", script, server.name],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
    ) as process:
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        told = [int(line) for line in process.stdout.read().split() if line.isdigit()]
    last = max(told, default=4)
    held = tier.get()
    assert held.at[1] >= last
    check_held(tier, held.at[1], 400_000)


def test_former_attempt_is_refused(server, tier):
    assert tier.put(state(1), (0, 1))
    successor = tier_of(server, attempt=1)
    check_held(successor, 1)
    assert successor.put(state(2), (0, 2))
    with pytest.raises(Superseded, match="attempt 0 of the launch may no longer save"):
        tier.put(state(9), (0, 9))
    check_held(successor, 2)
    successor.close()


def test_damage_is_named_and_the_snapshot_is_not_used(tier, caplog):
    assert tier.put(state(1), (0, 1))
    assert tier.put(state(1), (0, 1))
    segment = tier._segments[-1].descriptor
    byte = os.pread(segment, 1, 500)
    os.pwrite(segment, bytes([byte[0] ^ 1]), 500)
    assert tier.get() is None
    assert "/backup (snapshot in memory): damaged" in caplog.text
    assert "Training resumes from /backup" in caplog.text


def test_snapshot_of_another_version_is_named_and_not_used(tier, caplog, monkeypatch):
    monkeypatch.setattr("tfdist.backup.snapshot.VERSION", 99)
    assert tier.put(state(1), (0, 1))
    monkeypatch.undo()
    assert tier.get() is None
    assert "expected a snapshot of version 1, received one of version 99" in caplog.text


def test_parts_of_several_workers_are_complete_together(server):
    tiers = [tier_of(server) for _ in range(3)]
    for step in (1, 2):
        snapshots = [
            state(step),
            *(
                Snapshot({"rows": np.arange(4.0).reshape(1, 4) + 4 * i + step}, {"first": i})
                for i in range(2)
            ),
        ]
        threads = [
            threading.Thread(target=tiers[i].put, args=(snapshots[i], (0, step), i, 3))
            for i in range(3)
        ]
        for thread in threads[:2]:
            thread.start()
        if step == 2:  # two of three parts have come: the one before counts
            time.sleep(0.2)
            check_held(tiers[2], 1)
        threads[2].start()
        for thread in threads:
            thread.join(WAIT_S)
        check_held(tiers[0], step)
        parts = tiers[0].parts(tiers[0].get(), [1, 2])
        assert [part.facts["first"] for part in parts] == [0, 1]
        np.testing.assert_array_equal(
            np.concatenate([part.arrays["rows"][0] for part in parts]), np.arange(8.0) + step
        )
    for tier in tiers:
        tier.close()


def test_missing_part_is_waited_for_within_a_bound(server, caplog, monkeypatch):
    monkeypatch.setattr(memory_tier, "PARTS_S", 0.2)
    tier = tier_of(server)
    assert tier.put(state(1), (0, 1))
    assert not tier.put(state(2), (0, 2), 0, 2)
    assert "or another worker with its part of the snapshot, did not answer in 0.2 s" in caplog.text
    assert tier.put(state(3), (0, 3))  # a worker may be late once
    check_held(tier, 3)
    for step in (4, 5):
        assert not tier.put(state(step), (0, step), 0, 2)
    check_held(tier, 3)
    assert not tier.put(state(6), (0, 6))  # or each save would take that time
    tier.close()


def test_killed_server_is_replaced_and_training_goes_on(server, tier, caplog):
    assert tier.put(state(1), (0, 1))
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.pid != pid)
    assert tier.put(state(2), (0, 2))  # the connection has ended
    assert not caplog.text
    check_held(tier, 2)


def test_a_server_that_is_gone_is_named_at_each_save(server, caplog, monkeypatch):
    monkeypatch.setattr(memory_tier, "SUCCESSOR_S", 0.2)
    tier = MemoryTier("/backup", 0, "tfdist-of-nobody")
    assert not tier.put(state(1), (0, 1))
    assert "each save tries again" in caplog.text
    tier.close()


def test_too_little_memory_is_named_once_and_training_goes_on(server, caplog):
    tier = tier_of(server, available=lambda: 1000)
    assert not tier.put(state(1), (0, 1))
    assert not tier.put(state(2), (0, 2))
    assert caplog.text.count("1 kB of memory is available, and a snapshot needs 16") == 1
    assert "Training goes on with snapshots in /backup only" in caplog.text
    tier.close()


def test_memory_that_the_system_refuses_is_named(server, caplog, monkeypatch):
    tier = tier_of(server)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", refuse)
    assert not tier.put(state(1), (0, 1))
    assert "No space left on device" in caplog.text
    tier.close()


def test_memory_is_bounded_and_freed(server, tier):
    """Two segments, whatever the number of saves; none once the client and the server are done."""
    before = segments(os.getpid())  # of fits of other tests that have failed
    for step in range(20):
        assert tier.put(state(step, 100_000), (0, step))
    assert (segments(server.pid), segments(os.getpid()) - before) == (1, 2)
    tier.drop()
    tier.close()
    assert (segments(server.pid), segments(os.getpid())) == (0, before)


def segments(pid):
    return sum("tfdist-snapshot" in link for link in links(pid))


def links(pid):
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(path))
        except FileNotFoundError:
            continue
    return found


def test_server_ends_with_its_launcher():
    script = (
        "import time\n"
        "from tfdist.launch.snapshot_server import SnapshotServer\n"
        "print(SnapshotServer().pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment(), cwd=ROOT, stdout=subprocess.PIPE
    ) as launcher:
        pid = int(launcher.stdout.readline())
        launcher.kill()
    until(lambda: not Path(f"/proc/{pid}").exists() or zombie(pid))


def zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_messages_of_another_program_are_ignored(server, tier):
    import socket

    from tfdist.runtime.snapshot_protocol import address_of

    assert tier.put(state(1), (0, 1))
    for message in (b"{", b"[]", b"{}", b'{"put": 1}', b'{"get": "/backup"}', b"\xff" * 100):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect(address_of(server.name))
            stranger.send(message)
    check_held(tier, 1)
