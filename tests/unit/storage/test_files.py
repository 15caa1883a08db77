"""Test file operations on local paths and through TensorFlow, and the places that cannot work."""

import importlib
import importlib.util
import sys

import pytest

from tfdist.storage import files
from tfdist.storage.store_errors import UnusableStore


@pytest.mark.parametrize("place", ["{}/a", "ram://{}/a"])
def test_files_are_written_listed_read_and_removed(tmp_path, place):
    base = place.format(tmp_path)
    assert not files.exists(base)
    with pytest.raises(FileNotFoundError):
        files.list_dir(base)
    files.make_dirs(base)
    files.write_whole(f"{base}/x.txt", b"hello")
    files.write_pieces(f"{base}/y.txt", [b"one", memoryview(b"two")])
    assert files.is_dir(base)
    assert not files.is_dir(f"{base}/x.txt")
    assert files.list_dir(base) == ["x.txt", "y.txt"]
    assert files.glob(f"{base}/y*") == [f"{base}/y.txt"]
    assert files.stat(f"{base}/x.txt").size == 5
    with files.open_read(f"{base}/y.txt") as file:
        file.seek(2)
        assert file.read(2) == b"et"
    files.download(f"{base}/x.txt", str(tmp_path / "copy"))
    files.upload(str(tmp_path / "copy"), f"{base}/z.txt")
    assert files.read(f"{base}/z.txt") == b"hello"
    files.rename(f"{base}/z.txt", f"{base}/y.txt")
    assert files.read(f"{base}/y.txt") == b"hello"
    files.remove(f"{base}/x.txt")
    files.remove(f"{base}/x.txt")
    with pytest.raises(FileNotFoundError):
        files.read(f"{base}/x.txt")
    with pytest.raises(FileNotFoundError):
        files.stat(f"{base}/x.txt")
    with pytest.raises(IsADirectoryError):
        files.stat(base)
    files.remove_tree(base)
    files.remove_tree(base)
    assert not files.exists(base)


@pytest.mark.parametrize("place", ["{}", "ram://{}/w"])
def test_a_failed_write_leaves_the_old_file(tmp_path, place):
    base = place.format(tmp_path)
    files.make_dirs(base)
    files.write_whole(f"{base}/x", b"old")

    def pieces():
        yield b"new"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        files.write_pieces(f"{base}/x", pieces())
    assert files.read(f"{base}/x") == b"old"
    assert files.list_dir(base) == ["x"]


@pytest.mark.parametrize("path", ["file", "file/below/it"])
def test_a_file_in_the_way_is_named(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/file is not a directory"):
        files.make_dirs(str(tmp_path / path))


def test_a_file_that_changed_is_not_taken_for_another(tmp_path):
    path = str(tmp_path / "x")
    files.write_whole(path, b"old")
    before = files.stat(path)
    files.write_whole(path, b"longer")
    with pytest.raises(OSError, match="changed while it was read"):
        files.download(path, str(tmp_path / "copy"), before)


@pytest.mark.parametrize("operation", [files.read, files.exists, files.list_dir, files.make_dirs])
def test_an_unknown_scheme_is_refused(operation):
    with pytest.raises(
        UnusableStore, match=r"^s33://bucket/x: no file system for s33://\. Use a local path.*s3://"
    ):
        operation("s33://bucket/x")


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://b/x", "s3fs", "s3"),
        ("az://b/x", "adlfs", "azure"),
        ("hf://datasets/a/b", "hug", "hf"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, url, package, extra):
    importlib.import_module("fsspec.registry")
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    for name in ("s3fs", "adlfs", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    for operation in (files.read, files.exists, files.make_dirs):
        with pytest.raises(UnusableStore, match=rf"{package}.*pip install 'tfdist\[{extra}\]'"):
            operation(url)


def test_tensorflow_reads_gs_without_gcsfs(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not files.through_fsspec("gs://bucket/x")
    assert files.is_object_store("gs://bucket/x")
    assert not files.can_create("gs://bucket/x")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert files.through_fsspec("gs://bucket/x")
    assert files.can_create("gs://bucket/x")
