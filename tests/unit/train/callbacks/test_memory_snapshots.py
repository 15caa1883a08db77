"""Test whose snapshots in memory a training resumes from."""

import contextlib
import shutil
import time

import numpy as np
import pytest

from tfdist.backup import claim
from tfdist.backup.snapshot import Snapshot
from tfdist.backup.store import StoredSnapshot
from tfdist.launch.snapshot_server import SnapshotServer
from tfdist.runtime.launch_protocol import Launched
from tfdist.runtime.snapshot_protocol import is_supported
from tfdist.train.callbacks.memory_snapshots import IN_MEMORY, MemorySnapshots

pytestmark = pytest.mark.skipif(not is_supported(), reason="no memfd_create: Linux has it")


@pytest.fixture
def server():
    with contextlib.closing(SnapshotServer()) as server:
        yield server


def state(epoch, step):
    return Snapshot({"x": np.ones(3)}, {"epoch": epoch, "step": step})


def saved(directory, server, launch="launch"):
    """Save step 7 of epoch 1 in memory, as a process that then dies."""
    launched = Launched(launch=launch, snapshot_server=server.name)
    memory = MemorySnapshots.open(10, directory, launched, True)
    claim.claim(directory, launch, 0)
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:  # until the server listens
        memory.save(state(1, 7), (1, 7), 1)
        memory.end(drop=False)
        memory = MemorySnapshots.open(10, directory, launched, True)
        if memory.newest(None) is not None:
            return
        time.sleep(0.05)
    raise AssertionError("nothing was saved")


def newest(directory, server, launch="launch", stored=None, writes=True):
    launched = Launched(launch=launch, attempt=1, snapshot_server=server.name)
    memory = MemorySnapshots.open(10, directory, launched, writes)
    try:
        return memory.newest(stored)
    finally:
        memory.end(drop=False)


def test_newer_one_of_memory_and_disk_is_used(tmp_path, server):
    directory = str(tmp_path / "backup")
    saved(directory, server)
    assert newest(directory, server).number == IN_MEMORY
    for epoch, step, number in ((1, 6, IN_MEMORY), (0, 9, IN_MEMORY), (1, 7, 4), (2, 0, 4)):
        stored = StoredSnapshot(4, state(epoch, step))
        assert newest(directory, server, stored=stored).number == number


def test_snapshot_is_dropped_if_another_launch_has_claimed_the_directory(tmp_path, server):
    directory = str(tmp_path / "backup")
    saved(directory, server)
    claim.claim(directory, "another", 0)
    assert newest(directory, server, writes=False) is None
    assert newest(directory, server) is None
    claim.claim(directory, "launch", 2)
    assert newest(directory, server) is None


def test_snapshot_is_dropped_if_the_directory_was_removed(tmp_path, server):
    directory = str(tmp_path / "backup")
    saved(directory, server)
    shutil.rmtree(directory)
    assert newest(directory, server) is None


def test_missing_server_is_named(tmp_path, caplog):
    assert MemorySnapshots.open(10, str(tmp_path), Launched(), True) is None
    assert "memory_freq: no snapshots in memory" in caplog.text
    assert MemorySnapshots.open(None, str(tmp_path), Launched(), True) is None
