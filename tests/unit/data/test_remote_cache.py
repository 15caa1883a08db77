"""Test the cache of remote files: its bound, its checksums, and processes that share it.

A file of the local disk stands for one in a store.
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.forkserver import Popen
from tests.processes import ROOT, environment
from tfdist.data import remote_cache
from tfdist.data.remote_cache import RemoteCache
from tfdist.storage import files

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def store(tmp_path):
    """Return the paths of ten files of 100 bytes, and a directory for a cache."""
    (tmp_path / "store").mkdir()
    paths = []
    for number in range(10):
        path = tmp_path / "store" / f"{number}"
        path.write_bytes(bytes([number]) * 100)
        paths.append(str(path))
    return paths, str(tmp_path / "cache")


def sizes(directory):
    return [path.stat().st_size for path in pathlib.Path(directory).rglob("*.data")]


def test_a_file_is_fetched_once(store, monkeypatch):
    paths, directory = store
    fetched = []
    download = files.download
    monkeypatch.setattr(
        files, "download", lambda url, *rest: fetched.append(url) or download(url, *rest)
    )
    for _ in range(2):
        cache = RemoteCache(directory, 1000)
        for number in (3, 4, 3):
            assert cache.read(paths[number]) == bytes([number]) * 100
    assert fetched == [paths[3], paths[4]]


@pytest.mark.parametrize("pins", [1, 64])
def test_the_bound_holds_and_the_last_used_stay(store, monkeypatch, pins):
    """With many pins, the process has to give up files that it has opened long ago."""
    paths, directory = store
    monkeypatch.setattr(remote_cache, "PINS", pins)
    cache = RemoteCache(directory, 450)
    for round_ in range(2):
        for number in range(10):
            assert cache.read(paths[number]) == bytes([number]) * 100
            assert sum(sizes(directory)) <= 450
        if not round_:
            cache.read(paths[9])
            time.sleep(0.01)
    assert not list(pathlib.Path(directory).rglob("*.part"))


def test_another_process_keeps_the_files_that_it_opens(store, monkeypatch):
    paths, directory = store
    monkeypatch.setattr(remote_cache, "PINS", 1)
    monkeypatch.setattr(remote_cache, "FULL_S", 0.3)
    code = (
        "import sys\n"
        "from tfdist.data.remote_cache import RemoteCache\n"
        "cache = RemoteCache(sys.argv[1], 250)\n"
        "for path in sys.argv[2:]:\n"
        "    print(cache.path(path), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with Popen(
        [sys.executable, "-c", code, directory, *paths[:2]],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        held = [other.stdout.readline().strip() for _ in range(2)]
        with pytest.raises(ValueError, match=r"full of files that are in use\. Set TFDIST_CACHE"):
            RemoteCache(directory, 250).path(paths[2])
        assert all(map(os.path.exists, held))
        monkeypatch.setattr(remote_cache, "UNUSED_S", 0.0)  # it has opened them long ago
        assert RemoteCache(directory, 250).read(paths[2]) == bytes([2]) * 100
        other.stdin.close()
        other.wait(60)


def test_a_file_beyond_the_bound_is_refused(store):
    paths, directory = store
    with pytest.raises(ValueError, match=r"do not fit into the local cache .*Set TFDIST_CACHE"):
        RemoteCache(directory, 99).path(paths[0])
    with pytest.raises(ValueError, match=r'TFDIST_CACHE_BYTES to more, or pass access="stream"'):
        RemoteCache(directory, 500).check_fits(paths)
    RemoteCache(directory, 1000).check_fits(paths)


@pytest.mark.parametrize(
    "harm", [lambda c: c[:-1], lambda c: b"", lambda c: b"x" + c[1:], lambda c: c + b"x"]
)
def test_a_damaged_file_is_fetched_again(store, caplog, harm):
    paths, directory = store
    path = pathlib.Path(RemoteCache(directory, 1000).path(paths[1]))
    path.write_bytes(harm(path.read_bytes()))
    assert RemoteCache(directory, 1000).read(paths[1]) == bytes([1]) * 100
    assert f"{path}: damaged" in caplog.text
    os.remove(path.with_suffix(".sha256"))
    assert RemoteCache(directory, 1000).read(paths[1]) == bytes([1]) * 100


def test_a_removed_cache_is_made_again(store):
    paths, directory = store
    cache = RemoteCache(directory, 1000)
    os.remove(cache.path(paths[1]))
    assert cache.read(paths[1]) == bytes([1]) * 100
    files.remove_tree(directory)
    assert cache.read(paths[1]) == bytes([1]) * 100


def test_a_failed_fetch_leaves_nothing(store, monkeypatch):
    paths, directory = store

    def cut(url, path, expected):
        pathlib.Path(path).write_bytes(b"half")
        raise OSError(f"{url}: cut")

    with monkeypatch.context() as patched:
        patched.setattr(files, "download", cut)
        with pytest.raises(OSError, match="0: cut"):
            RemoteCache(directory, 100).path(paths[0])
    assert not list(pathlib.Path(directory).rglob("*.part"))
    assert RemoteCache(directory, 100).read(paths[0]) == bytes(100)  # there is room


def test_parts_of_killed_processes_are_removed(store, monkeypatch):
    paths, directory = store
    monkeypatch.setattr(remote_cache, "_YOUNG_S", 0.0)
    first = RemoteCache(directory, 1000)
    first.path(paths[0])
    first.close()
    part = pathlib.Path(directory) / "00" / "abc.300.xyz.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(b"half")
    cache = RemoteCache(directory, 150)
    assert cache.read(paths[1]) == bytes([1]) * 100
    assert not part.exists()
    assert sizes(directory) == [100]


def test_threads_share_a_small_cache(store, monkeypatch):
    paths, directory = store
    monkeypatch.setattr(remote_cache, "PINS", 4)
    cache = RemoteCache(directory, 800)

    def read(index):
        return cache.read(paths[index * 7 % 10]) == bytes([index * 7 % 10]) * 100

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(200)))
    assert sum(sizes(directory)) <= 800
