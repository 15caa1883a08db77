"""Test that written data read the same, that a killed call resumes, and that damage is named."""

import importlib
import os
import shutil
import signal
import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import files_io
from tfdist.data.sources import dataset_file
from tfdist.data.sources.records import records
from tfdist.data.sources.source import Source, of_arrays, of_generator
from tfdist.data.writing import record_shards
from tfdist.data.writing.writer import verify, write


def same(a, b):
    """Check that two sources hold equal examples; return how many."""
    tf.nest.assert_same_structure(a.element_spec, b.element_spec)
    assert tf.nest.flatten(a.element_spec) == tf.nest.flatten(b.element_spec)
    count = 0
    for one, other in zip(a.dataset(), b.dataset(), strict=True):
        count += 1
        for x, y in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x.numpy(), y.numpy())
    return count


def shards(directory):
    return sorted(path for path in directory.iterdir() if path.name.endswith(".tfrecord"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write 100 numbers, in one file and in several."""
    root = tmp_path_factory.mktemp("written")
    for name, options in {"one": {}, "several": {"shard_bytes": 1000}}.items():
        write(of_arrays(np.arange(100)), root / name, **options)
    return root


def images(tmp_path, count=6):
    """Return a source of JPEG files with random access, as folders of images are."""
    random = np.random.default_rng(1)
    paths = []
    for number in range(count):
        paths.append(str(tmp_path / f"{number}.jpg"))
        tf.io.write_file(
            paths[-1],
            tf.io.encode_jpeg(random.integers(0, 255, [8 + number, 9, 3]).astype(np.uint8)),
        )
    paths = tf.constant(paths)

    def read(number):
        image = tf.io.decode_image(tf.io.read_file(paths[number]), 3, expand_animations=False)
        return tf.ensure_shape(image, [None, None, 3]), number % 2

    spec = (tf.TensorSpec([None, None, 3], tf.uint8), tf.TensorSpec([], tf.int64))
    raw = lambda number: tf.io.read_file(paths[number])  # noqa: E731
    return Source(
        "photos",
        spec,
        count,
        2,
        ("cat", "dog"),
        read=read,
        raw=raw,
        describe=lambda number: paths[number],
    )


# --- What is written reads the same ---------------------------------------------------------------
def test_every_type_and_shape_is_read_back():
    """Write to memory: "ram://" is TensorFlow's file system for that."""
    random = np.random.default_rng(1)
    x = {
        "image": random.integers(0, 255, [5, 4, 3, 3]).astype(np.uint8),
        "grey": random.integers(0, 255, [5, 4, 3, 1]).astype(np.uint8),
        "alpha": random.integers(0, 255, [5, 2, 2, 4]).astype(np.uint8),
        "two": random.integers(0, 255, [5, 2, 2, 2]).astype(np.uint8),
        "float32": random.normal(size=[5, 3]).astype(np.float32),
        "float64": random.normal(size=[5, 2, 2]),
        "float16": random.normal(size=5).astype(np.float16),
        "bfloat16": tf.cast(random.normal(size=5), tf.bfloat16),
        "complex64": (random.normal(size=5) + 1j).astype(np.complex64),
        "int8": random.integers(-128, 127, [5, 2]).astype(np.int8),
        "uint32": np.array([0, 1, 2**32 - 1, 3, 4], np.uint32),
        "uint64": np.array([0, 1, 2**64 - 1, 3, 4], np.uint64),
        "int64": np.array([-(2**63), -1, 0, 1, 2**63 - 1]),
        "bool": np.array([True, False, True, True, False]),
        "text": np.array([b"", b"\xff\x00", b"a", b"b", b"c"], object),
        "words": np.array([[b"a", b""]] * 5, object),
        "none": np.zeros([5, 0, 3], np.float32),
    }
    source = of_arrays((x, np.arange(5), np.linspace(0, 1, 5, dtype=np.float32)), classes=5)
    write(source, "ram://every")
    back = records("ram://every", access="random")
    assert same(source, back) == 5
    assert back.classes == 5
    assert (
        same(source, records("ram://every")) == 5
    )  # as a stream, which is the rule for what is not local
    verify("ram://every")


def test_sizes_that_differ_come_back(tmp_path):
    def examples():
        for n in range(6):
            yield {
                "row": np.arange(n, dtype=np.float32),
                "grid": np.full([n % 3, n, 2], n, np.int32),
                "wide": np.full([n, 2], 0.1 * n),
                "image": np.full([1 + n, 2, 3], n, np.uint8),
                "words": np.array([b"w"] * n, object),
                "deep": (np.int64(n), {"a": np.float64(n)}),
            }

    spec = {
        "row": tf.TensorSpec([None], tf.float32),
        "grid": tf.TensorSpec([None, None, 2], tf.int32),
        "wide": tf.TensorSpec([None, 2], tf.float64),
        "image": tf.TensorSpec([None, None, 3], tf.uint8),
        "words": tf.TensorSpec([None], tf.string),
        "deep": (tf.TensorSpec([], tf.int64), {"a": tf.TensorSpec([], tf.float64)}),
    }
    source = of_generator(examples, spec)
    manifest = write(source, tmp_path / "out")
    assert (
        manifest["examples"],
        manifest["features"]["grid"],
        manifest["features"]["deep/1/a"],
    ) == (
        6,
        "int32[?,?,2]",
        "bytes of float64",
    )
    assert same(source, records(tmp_path / "out")) == 6


@pytest.mark.parametrize(
    "structure", [lambda x: x, lambda x: {"a": x}, lambda x: (x, x, x, x), lambda x: (x,)]
)
def test_every_structure_is_read_back(tmp_path, structure):
    source = of_arrays(structure(np.arange(3)))
    write(source, tmp_path)
    assert same(source, records(tmp_path)) == 3


def test_image_files_are_kept_as_they_are(tmp_path):
    source = images(tmp_path)
    write(source, tmp_path / "out", shard_bytes=2000)
    back = records(tmp_path / "out")
    assert same(source, back) == 6
    assert (back.classes, back.class_names) == (2, ("cat", "dog"))
    for number in range(6):
        stored = tf.train.Example.FromString(back.raw(tf.constant(number, tf.int64)).numpy())
        assert (
            stored.features.feature["x"].bytes_list.value[0]
            == (tmp_path / f"{number}.jpg").read_bytes()
        )
    # And so when records are written again, from whatever way of reading.
    write(records(tmp_path / "out"), tmp_path / "zipped", compression="GZIP")
    write(records(tmp_path / "zipped"), tmp_path / "again", shard_bytes=2000)
    assert [path.read_bytes() for path in shards(tmp_path / "out")] == [
        path.read_bytes() for path in shards(tmp_path / "again")
    ]


def test_images_that_are_changed_are_not_those_in_the_files(tmp_path):
    source = images(tmp_path)
    raw = source.raw
    changed = Source(
        "changed", source.element_spec, 6, read=lambda n: (255 - source.read(n)[0], n), raw=raw
    )
    write(changed, tmp_path / "out")
    assert same(changed, records(tmp_path / "out")) == 6


def test_tfds_keeps_its_files(digits_dir, tmp_path):
    from tfdist.data.sources import tfds

    source = tfds.load("tfdist_digits", "test[:40]", digits_dir)
    manifest = write(source, tmp_path / "digits", compression="GZIP")
    back = records(tmp_path / "digits")
    assert same(source, back) == 40
    assert (manifest["name"], back.classes, back.class_names) == (
        "tfdist_digits[test[:40]]",
        10,
        tuple("0123456789"),
    )
    stored = tf.train.Example.FromString(
        next(
            iter(tf.data.TFRecordDataset(back.name + "/" + manifest["shards"][0]["file"], "GZIP"))
        ).numpy()
    )
    given = tf.train.Example.FromString(source.raw(tf.constant(0, tf.int64)).numpy())
    assert stored.features.feature["x"] == given.features.feature["image"]


# --- Files ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("compression", [None, "GZIP"])
@pytest.mark.parametrize("walk", [False, True])
def test_files_have_about_the_size_asked_for(tmp_path, compression, walk):
    random = np.random.default_rng(1)
    arrays = random.integers(0, 9, [300, 100]).astype(np.float32)
    source = (
        of_generator(lambda: iter(arrays), tf.TensorSpec([100], tf.float32))
        if walk
        else of_arrays(arrays)
    )
    manifest = write(source, tmp_path / "my numbers", shard_bytes=20_000, compression=compression)
    sizes = [path.stat().st_size for path in shards(tmp_path / "my numbers")]
    assert sizes == [shard["bytes"] for shard in manifest["shards"]]
    assert len(sizes) > 1
    assert all(10_000 < size < 26_000 for size in sizes[:-1])
    assert [path.name for path in shards(tmp_path / "my numbers")] == [
        f"my_numbers-{i:05d}-of-{len(sizes):05d}.tfrecord" for i in range(len(sizes))
    ]
    assert {path.name for path in (tmp_path / "my numbers").iterdir()} == {
        ".write.lock",
        "dataset.json",
    } | {
        path.name + end for path in shards(tmp_path / "my numbers") for end in ("", ".tfdist-index")
    }
    np.testing.assert_array_equal(
        np.stack(list(records(tmp_path / "my numbers").dataset().as_numpy_iterator())), arrays
    )


def test_opening_needs_no_new_index(tmp_path):
    write(of_arrays(np.arange(10)), tmp_path)
    (kept,) = [path for path in tmp_path.iterdir() if path.name.endswith("index")]
    stamp = kept.stat().st_mtime_ns
    records(tmp_path)
    assert kept.stat().st_mtime_ns == stamp


def test_progress_counts_all_examples(tmp_path):
    calls = []
    lock = threading.Lock()

    def progress(done, total):
        with lock:
            calls.append((done, total))

    write(
        of_arrays(np.arange(2500)), tmp_path / "a", workers=2, shard_bytes=20_000, progress=progress
    )
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (2500, 2500)
    assert len(calls) >= 3


def test_a_part_of_the_files_can_be_read(written):
    first = shards(written / "several")[0]
    part = records(first)
    assert [int(x) for x in part.dataset()] == list(range(part.cardinality))
    assert 0 < part.cardinality < 100
    assert records(first, {"x": "int64"}).element_spec.dtype == tf.int64


# --- Going on -------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys
import numpy as np, tensorflow as tf
from tfdist.data.sources.source import of_arrays, of_generator
from tfdist.data.writing import record_shards
from tfdist.data.writing.writer import write
x = np.arange(5000)
source = of_arrays(x) if sys.argv[2] == "arrays" else of_generator(lambda: iter(x), tf.TensorSpec([], tf.int64))
def die(done, total):
    if done >= 3000:
        os.kill(os.getpid(), signal.SIGKILL)
write(source, sys.argv[1], shard_bytes=20_000, workers=2, progress=die)
"""  # noqa: E501


@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_killed_call_resumes(tmp_path, run_python, kind):
    out = tmp_path / "out"
    x = np.arange(5000)
    source = (
        of_arrays(x)
        if kind == "arrays"
        else of_generator(lambda: iter(x), tf.TensorSpec([], tf.int64))
    )
    assert run_python(KILLED, str(out), kind).returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"out holds an unfinished data set. Write it again"):
        records(out)
    whole = {
        path.stem: (out / ".writing" / f"{path.stem}.tfrecord").stat()
        for path in (out / ".writing").glob("0*.json")
    }
    assert 2 <= len(whole) < 9
    damaged = max(whole)
    with open(out / ".writing" / f"{damaged}.tfrecord", "r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff")
    calls = []
    manifest = write(
        source, out, shard_bytes=20_000, workers=2, progress=lambda done, total: calls.append(done)
    )
    assert calls[0] >= sum(manifest["shards"][int(stem)]["examples"] for stem in list(whole)[:1])
    for stem, before in whole.items():
        after = shards(out)[int(stem)].stat()
        kept = (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert kept == (stem != damaged), stem
    assert [int(i) for i in records(out).dataset()] == x.tolist()
    assert not (out / ".writing").exists()
    verify(out)


def test_call_killed_while_renaming_files_resumes(tmp_path):
    source = of_generator(lambda: iter(range(500)), tf.TensorSpec([], tf.int64))
    manifest = write(source, tmp_path / "out", shard_bytes=5000)
    first, *rest = shards(tmp_path / "out")
    writing = tmp_path / "out" / ".writing"
    writing.mkdir()
    for number, shard in enumerate(manifest["shards"]):
        dataset_file.write_checked(
            str(writing / f"{number:05d}.json"),
            {key: shard[key] for key in ("examples", "bytes", "sha256")},
        )
    for number, path in enumerate(rest, 1):
        path.rename(writing / f"{number:05d}.tfrecord")
    plan = {
        **manifest,
        "examples": None,
        "counts": [shard["examples"] for shard in manifest["shards"]],
        "limit": 5000,
    }
    dataset_file.write_checked(str(writing / "plan.json"), plan)
    (tmp_path / "out/dataset.json").unlink()
    stamp = first.stat().st_mtime_ns
    assert write(source, tmp_path / "out", shard_bytes=5000) == manifest
    assert first.stat().st_mtime_ns == stamp
    assert [int(i) for i in records(tmp_path / "out").dataset()] == list(range(500))


def test_finished_files_are_not_written_again(tmp_path):
    source = of_arrays(np.arange(100))
    manifest = write(source, tmp_path)
    stamps = [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())]
    assert write(source, tmp_path) == manifest
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())] == stamps


def test_two_writers_at_the_same_time(tmp_path):
    source = of_arrays(np.arange(3000))
    manifests = []
    both = [
        threading.Thread(
            target=lambda: manifests.append(write(source, tmp_path / "out", shard_bytes=10_000))
        )
        for _ in range(2)
    ]
    for each in both:
        each.start()
    for each in both:
        each.join(120)
    assert manifests[0] == manifests[1] == verify(tmp_path / "out")
    assert records(tmp_path / "out").cardinality == 3000


# --- What is refused ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (np.arange(100) + 1, {}, "its first examples differ"),
        (np.arange(99), {}, "its examples: 100 there, 99 here|its first examples differ"),
        (np.arange(100.0), {}, "its features: .*int64.* there, .*float64"),
        (np.arange(100), {"compression": "GZIP"}, "its compression: '' there, 'GZIP' here"),
        (np.arange(100), {"shard_bytes": 7}, "its shard_bytes: 100000000 there, 7 here"),
        ({"x": np.arange(100)}, {}, "its structure"),
    ],
)
def test_another_data_set_is_never_overwritten(written, other, options, message):
    out = written / "one"
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(
        ValueError,
        match=f"(?s)holds another data set than arrays: ({message}).*Name another directory",
    ):
        write(of_arrays(other), out, **options)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_records_of_others_are_never_overwritten(tmp_path):
    (tmp_path / "old.tfrecord").write_bytes(b"")
    with pytest.raises(ValueError, match=r"already holds records, such as old.tfrecord"):
        write(of_arrays(np.arange(3)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["old.tfrecord"]


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"directory='.*file/out' cannot be written: "):
        write(of_arrays(np.arange(3)), tmp_path / "file" / "out")


def test_another_process_that_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("tfdist.data.writing.writer"), "STALLED_S", 0.2)
    with (
        files_io.locked(tmp_path / ".write.lock", 1.0, "a test"),
        pytest.raises(TimeoutError, match=f"Waited 0.2 s for process {os.getpid()}"),
    ):
        write(of_arrays(np.arange(3)), tmp_path)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (np.zeros([0, 3]), {}, "expected examples to write; it has none"),
        (
            np.zeros(3),
            {"shard_bytes": 0},
            "shard_bytes: expected a whole number, 1 or more; received 0",
        ),
        (
            np.zeros(3),
            {"workers": 1.5},
            "workers: expected a whole number, 1 or more; received 1.5",
        ),
        (np.zeros(3), {"compression": "zip"}, "compression: expected None"),
        ("ragged", {}, "expected dense tensors .*; received RaggedTensorSpec.* for y"),
        ({"a": {"b": np.zeros(3)}, "a/b": np.zeros(3)}, {}, "expected unique names"),
    ],
)
def test_unsupported_examples_are_refused(tmp_path, source, options, message):
    if isinstance(source, str):  # no tensor while this file is imported
        source = (np.zeros([3, 1]), tf.ragged.constant([[1], [], [2]]))
    with pytest.raises(ValueError, match=message):
        write(of_arrays(source), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_empty_generator(tmp_path):
    with pytest.raises(ValueError, match="generator: expected examples to write; it has none"):
        write(of_generator(lambda: iter([]), tf.TensorSpec([], tf.int64)), tmp_path / "out")


def test_an_example_that_cannot_be_read_is_named(tmp_path):
    source = images(tmp_path, count=130)
    (tmp_path / "72.jpg").unlink()
    with pytest.raises(
        ValueError, match=r"photos: example 72 \(.*/72.jpg\) cannot be read: .*No such file"
    ):
        write(source, tmp_path / "out", shard_bytes=5000, workers=2)
    with pytest.raises(ValueError, match="unfinished data set"):
        records(tmp_path / "out")


# --- Damage ---------------------------------------------------------------------------------------
def test_verify_names_the_first_damaged_file(tmp_path, written):
    shutil.copytree(written / "several", tmp_path, dirs_exist_ok=True)
    verify(tmp_path)
    first, second, *_ = shards(tmp_path)
    whole = second.read_bytes()
    second.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    with pytest.raises(ValueError, match=f"{second.name}: damaged: expected SHA-256"):
        verify(tmp_path)
    second.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError,
        match=f"{second.name}: damaged: expected {len(whole)} bytes, received {len(whole) - 1}",
    ):
        verify(tmp_path)
    second.write_bytes(first.read_bytes()[: 16 + 20])
    with pytest.raises(ValueError, match=f"{second.name}"):
        records(tmp_path)
    first.unlink()
    with pytest.raises(ValueError, match=f"{first.name}: missing"):
        verify(tmp_path)


def test_a_file_of_other_records_is_noticed(tmp_path, written):
    shutil.copytree(written / "several", tmp_path, dirs_exist_ok=True)
    second = shards(tmp_path)[1]
    with tf.io.TFRecordWriter(str(second)) as writer:
        writer.write(b"one")
    with pytest.raises(
        ValueError, match=rf"{second.name}: expected \d+ records, as dataset.json says; received 1"
    ):
        records(tmp_path)


def test_a_damaged_manifest(tmp_path):
    write(of_arrays(np.arange(3)), tmp_path)
    path = tmp_path / dataset_file.NAME
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"dataset.json: damaged"):
        records(tmp_path)
    path.write_text('{"name": "mine"}')
    with pytest.raises(
        ValueError, match=r"dataset.json: expected the manifest of a data set that tfdist wrote"
    ):
        records(tmp_path)
    with pytest.raises(
        ValueError, match=r"expected a data set that tfdist wrote; found no dataset.json"
    ):
        verify(tmp_path / "none")


def test_no_flipped_bit_of_a_manifest_changes_the_data(tmp_path):
    write(of_arrays(np.arange(3)), tmp_path)
    path = tmp_path / dataset_file.NAME
    whole = path.read_bytes()
    manifest = dataset_file.read(str(tmp_path))
    for bit in range(0, 8 * len(whole), 3):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            unchanged = dataset_file.read(str(tmp_path)) == manifest  # white space
        except ValueError as error:
            unchanged = "dataset.json: " in str(error)
        assert unchanged, bit


@pytest.mark.parametrize("content", [b"null", b"[]", b"[" * 10_000, b"\xff"])
def test_a_manifest_that_is_no_object_is_damaged(tmp_path, content):
    write(of_arrays(np.arange(3)), tmp_path)
    (tmp_path / dataset_file.NAME).write_bytes(content)
    for read in (records, lambda path: write(of_arrays(np.arange(3)), path)):
        with pytest.raises(ValueError, match=r"dataset.json: damaged"):
            read(tmp_path)


def test_no_flipped_bit_of_an_unfinished_data_set_changes_the_data(tmp_path, monkeypatch):
    numbers = of_arrays(np.arange(60))
    with monkeypatch.context() as patch:
        patch.setattr(record_shards.Shards, "move", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            write(numbers, tmp_path / "whole", shard_bytes=600)
    for name in ("plan.json", "00001.json"):
        content = (tmp_path / "whole" / ".writing" / name).read_bytes()
        for byte in range(0, len(content), len(content) // 3):
            shutil.rmtree(tmp_path / "whole copy", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "whole copy")
            flipped = bytearray(content)
            flipped[byte] ^= 1
            (tmp_path / "whole copy" / ".writing" / name).write_bytes(flipped)
            if name == "plan.json":
                with pytest.raises(ValueError, match=r"plan.json: damaged"):
                    write(numbers, tmp_path / "whole copy", shard_bytes=600)
            else:  # only this file is written again
                write(numbers, tmp_path / "whole copy", shard_bytes=600)
                verify(tmp_path / "whole copy")
                assert same(records(tmp_path / "whole copy"), numbers) == 60


def test_data_that_end_early_are_named_by_the_first_missing_example():
    source = of_arrays(np.arange(9))
    elements = record_shards.name_unreadable(source, iter("ab"), range(5, 9))
    assert [next(elements), next(elements)] == ["a", "b"]
    with pytest.raises(ValueError, match="expected 9 examples; the data ended before example 7"):
        next(elements)
