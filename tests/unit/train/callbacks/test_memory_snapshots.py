"""Test whose snapshots in memory a training resumes from."""

import contextlib
import shutil
import socket
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.backup import claim
from tfdist.backup.snapshot import Snapshot
from tfdist.backup.state import keras_seed
from tfdist.backup.store import Store, StoredSnapshot
from tfdist.launch.snapshot_server import SnapshotServer
from tfdist.runtime.launch_protocol import Launched
from tfdist.runtime.snapshot_protocol import address_of, is_supported
from tfdist.train.callbacks.memory_snapshots import IN_MEMORY, MemorySnapshots, SnapshotLost
from tfdist.train.hooks import Hooks, MetricCopies

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
    until_it_listens(server)
    memory.save(keras.Sequential([keras.Input((1,))]), Hooks(), (1, 7), state(1, 7))
    memory.end(drop=False)


def until_it_listens(server):
    deadline = time.monotonic() + 30.0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        while client.connect_ex(address_of(server.name)):
            assert time.monotonic() < deadline
            time.sleep(0.02)


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


class Worker(Hooks):
    """One of some workers, each with one replica."""

    def __init__(self, rank, workers):
        self._rank = rank
        self._workers = workers

    def replicas(self):
        return self._workers, self._rank

    def all_gather(self, numbers):
        return [[float(rank)] for rank in range(self._workers)]


def rows_of(memory, engine):
    return [(offset, list(numbers)) for offset, numbers in memory.pieces(engine)("rows")]


def test_workers_read_their_rows_or_all_if_their_number_changes(tmp_path, server, monkeypatch):
    directory = str(tmp_path / "backup")
    until_it_listens(server)
    claim.claim(directory, "launch", 0)
    monkeypatch.setattr(
        "tfdist.backup.state.rows_of_model", lambda rank: {"rows": np.full([1, 2], float(rank))}
    )
    monkeypatch.setattr("tfdist.backup.state.is_sharded", lambda rank: True)
    monkeypatch.setattr("tfdist.backup.state.unsharded_bytes", lambda rank: 24)
    launched = Launched(launch="launch", snapshot_server=server.name)
    saving = [MemorySnapshots.open(10, directory, launched, rank == 0) for rank in range(2)]
    for rank in range(2):
        saving[rank].save(rank, Worker(rank, 2), (1, 7), None if rank else state(1, 7))
    for memory in saving:
        memory.end(drop=False)

    def restoring():
        memory = MemorySnapshots.open(10, directory, launched, False)
        assert memory.newest(None).number == IN_MEMORY
        return memory

    memory = restoring()
    assert rows_of(memory, Worker(1, 2)) == [(2, [1.0, 1.0])]
    memory.end(drop=False)
    memory = restoring()
    assert rows_of(memory, Worker(0, 1)) == [(0, [0.0, 0.0]), (2, [1.0, 1.0])]
    memory.end(drop=False)
    memory = restoring()
    monkeypatch.setattr("tfdist.backup.snapshot.VERSION", 99)  # as good as damaged
    with pytest.raises(SnapshotLost, match="The next attempt resumes from the disk"):
        memory.pieces(Worker(0, 2))
    monkeypatch.undo()
    memory.end(drop=False)
    memory = MemorySnapshots.open(10, directory, launched, False)
    assert memory.newest(None) is None
    memory.end(drop=False)


def test_metrics_of_each_replica_are_restored_or_add_up_if_their_number_changes(tmp_path, server):
    directory = str(tmp_path / "backup")
    until_it_listens(server)
    claim.claim(directory, "launch", 0)
    launched = Launched(launch="launch", snapshot_server=server.name)
    model = keras.Sequential([keras.Input((1,))])
    saving = [MemorySnapshots.open(10, directory, launched, rank == 0) for rank in range(3)]
    variables = [tf.Variable(0.0), tf.Variable(0.0), tf.Variable([0, 0])]
    copies = [
        MetricCopies(aggregation, [variable])
        for aggregation, variable in zip(("sum", "mean", None), variables, strict=True)
    ]
    for rank, memory in enumerate(saving):
        values = [np.float32(rank + 1), np.float32(rank), np.array([5, 6], np.int32)]
        snapshot = None if rank else state(1, 7)
        memory.save(model, Worker(rank, 3), (1, 7), snapshot, copies, values)
    for memory in saving:
        memory.end(drop=False)

    def restored(engine):
        memory = MemorySnapshots.open(10, directory, launched, False)
        assert memory.newest(None).number == IN_MEMORY
        totals, parts = memory.metrics(engine)
        assert memory.pieces(engine)
        memory.end(drop=False)
        return [total.tolist() for total in totals], [part.tolist() for part in parts]

    totals, parts = restored(Worker(1, 3))
    assert totals[2] == [5, 6]
    assert parts == [[0.0, 2.0, 0.0], [0.0, 1.0, 0.0], []]
    for engine in (Worker(1, 2), Hooks()):  # one without a strategy as well
        totals, parts = restored(engine)
        assert totals == [6.0, 1.0, [5, 6]]
        assert parts == [[1.0, 2.0, 3.0], [0.0, 1.0, 2.0], []]


def test_a_step_that_saves_in_memory_and_on_the_disk_saves_one_snapshot(
    tmp_path, server, monkeypatch
):
    until_it_listens(server)
    monkeypatch.setenv("TFDIST_LAUNCH", "launch")
    monkeypatch.setenv("TFDIST_SNAPSHOT_SERVER", server.name)

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise KeyboardInterrupt

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    keras.random.uniform((1,))  # makes the generator whose state is saved
    directory = str(tmp_path / "backup")
    backup = tfdist.BackupAndRestore(directory, save_freq=4, memory_freq=2)
    with pytest.raises(KeyboardInterrupt):
        model.fit(np.ones([8, 1]), np.ones(8), 1, verbose=0, callbacks=[backup, Interrupt()])
    in_memory = newest(directory, server).snapshot
    on_disk = Store(directory, 2).newest().snapshot
    assert in_memory.facts == on_disk.facts
    assert (on_disk.facts["step"], on_disk.facts["since"]) == (4, [0, 0])
    assert in_memory.arrays.keys() == on_disk.arrays.keys()
    assert on_disk.arrays["random/keras"].tolist() == keras_seed()[0].numpy().tolist()
    for key, array in on_disk.arrays.items():
        np.testing.assert_array_equal(in_memory.arrays[key], array)


def test_missing_server_is_named(tmp_path, caplog):
    assert MemorySnapshots.open(10, str(tmp_path), Launched(), True) is None
    assert "memory_freq: no snapshots in memory" in caplog.text
    assert MemorySnapshots.open(None, str(tmp_path), Launched(), True) is None
