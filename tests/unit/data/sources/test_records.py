"""Test that the index of records is never wrong, and that features must be as declared.

Others are named with file and byte.
"""

import gzip
import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.sources import record_index
from tfdist.data.sources.records import find, records


def write(path, contents, compression=""):
    """Write a record file of these strings or Examples, and return its path."""
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for content in contents:
            writer.write(content)
    return str(path)


def example(**features):
    """Return a serialized Example of these lists."""
    kinds = {bytes: "bytes_list", float: "float_list", int: "int64_list"}
    made = tf.train.Example()
    for name, values in features.items():
        getattr(made.features.feature[name], kinds[type(values[0])]).value.extend(values)
    return made.SerializeToString()


def words(count, begin=0):
    return [b"record %d" % i + b"." * (i % 7) for i in range(begin, begin + count)]


def read(source):
    return [record.numpy() for record in source.dataset()]


def int64(*values):
    return [tf.constant(value, tf.int64) for value in values]


@pytest.fixture
def three(tmp_path):
    """Write files of 3, 0 and 4 records."""
    for number, (count, begin) in enumerate([(3, 0), (0, 3), (4, 3)]):
        write(tmp_path / f"part-{number}.tfrecord", words(count, begin))
    return tmp_path


def graph(function, *arguments):
    """Call a function as a graph, as a data pipeline does."""
    return next(iter(tf.data.Dataset.from_tensors(arguments).map(function))).numpy()


# --- The index ------------------------------------------------------------------------------------
def test_any_record_at_any_time(three):
    source = records(three)
    assert (source.cardinality, source.read is not None) == (7, True)
    assert read(source) == words(7)
    chosen = tf.data.Dataset.from_tensor_slices(int64(6, 0, 3, 3, 2)).map(source.read)
    assert [record.numpy() for record in chosen] == [words(7)[i] for i in (6, 0, 3, 3, 2)]
    assert graph(source.raw, int64(5)[0]) == words(7)[5]


def test_locations_of_records_are_described(three):
    source = records(three)
    first = 16 + len(words(1)[0])
    assert graph(source.describe, int64(1)[0]).decode() == f"{three}/part-0.tfrecord, byte {first}"
    assert graph(source.describe, int64(3)[0]).decode() == f"{three}/part-2.tfrecord, byte 0"
    zipped = records(write(three / "z.tfrecord", words(3), "GZIP"))
    assert graph(zipped.describe, int64(2)[0]).decode() == f"{three}/z.tfrecord, record 2"


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_streams_begin_anywhere(tmp_path, compression):
    write(tmp_path / "a.tfrecord", words(5), compression)
    write(tmp_path / "b.tfrecord", [])
    write(tmp_path / "c.tfrecord", words(3, 5), compression)
    source = records(tmp_path / "*.tfrecord", access="stream")
    assert source.lengths == (5, 0, 3)
    assert read(source) == words(8)
    parts = [(0, 0, 5), (0, 3, 2), (0, 5, 0), (1, 0, 0), (2, 1, 1), (2, 3, 0), (2, 0, 2)]
    together = tf.data.Dataset.from_tensor_slices(np.array(parts, np.int64)).flat_map(
        lambda part: source.scan(part[0], part[1], part[2])
    )
    assert [record.numpy() for record in together] == words(5) + words(2, 3) + words(1, 6) + words(
        2, 5
    )
    assert [record.numpy() for record in source.scan(*int64(0, 4, 1))] == words(1, 4)


def test_compressed_files_are_known_by_their_content(tmp_path):
    path = write(tmp_path / "a.tfrecord", words(4), "GZIP")
    assert records(path).lengths == (4,)
    with pytest.raises(
        ValueError, match=r'access="random": .*a.tfrecord is compressed and can only'
    ):
        records(path, access="random")
    # A record of 0x88b1f bytes begins like a GZIP file.
    plain = write(tmp_path / "b.tfrecord", [b"x" * 0x88B1F])
    assert pathlib.Path(plain).read_bytes()[:3] == gzip.compress(b"")[:3]
    assert records(plain).cardinality == 1


def test_an_index_is_kept_and_read_again(three):
    before = records(three)
    kept = three / "part-0.tfrecord.tfdist-index"
    stamp = kept.stat().st_mtime_ns
    assert read(records(three)) == read(before)
    assert kept.stat().st_mtime_ns == stamp
    assert {path.name for path in three.iterdir()} == {
        f"part-{i}.tfrecord{end}" for i in range(3) for end in ("", ".tfdist-index")
    }


def test_stale_or_damaged_index_is_rebuilt(three):
    path = three / "part-0.tfrecord"
    kept = three / "part-0.tfrecord.tfdist-index"
    records(three)
    write(path, words(9))
    assert records(path).cardinality == 9
    write(path, [b"a" * 20, b"b"])
    assert read(records(path)) == [b"a" * 20, b"b"]
    whole = kept.read_bytes()
    for damaged in (
        b"",
        b"{}",
        whole[:-1],
        whole[:-1] + bytes([whole[-1] ^ 1]),
        b"\xff\xfe" + whole,
    ):
        kept.write_bytes(damaged)
        assert read(records(path)) == [b"a" * 20, b"b"]
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("key", ["version", "size", "time", "compression", "records", "crc32"])
def test_an_index_whose_header_is_damaged_is_built_anew(three, key):
    """A flipped bit in `records` would repeat or drop examples without an error."""
    path = three / "part-0.tfrecord"
    kept = three / "part-0.tfrecord.tfdist-index"
    stored = read(records(path))
    whole = kept.read_bytes()
    first, _, offsets = whole.partition(b"\n")
    header = json.loads(first)
    for value in (5, "5", None, [], {"a": 1}, True):
        kept.write_bytes(json.dumps({**header, key: value}).encode() + b"\n" + offsets)
        assert read(records(path)) == stored
    assert kept.read_bytes() == whole


def test_no_flipped_bit_of_an_index_changes_the_data(three):
    path = three / "part-0.tfrecord"
    kept = three / "part-0.tfrecord.tfdist-index"
    stored = read(records(path))
    whole = kept.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        kept.write_bytes(flipped)
        [index] = record_index.open_indexes([str(path)])
        assert index.records == len(stored)
    assert kept.read_bytes() == whole


def test_a_file_of_the_same_size_but_another_time_is_read_anew(tmp_path):
    path = write(tmp_path / "a.tfrecord", [b"1234", b"5"])
    records(path)
    stat = os.stat(path)
    write(path, [b"1", b"2345"])
    assert os.stat(path).st_size == stat.st_size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    assert read(records(path)) == [b"1", b"2345"]


def test_an_index_elsewhere(three, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("indexes") / "new"
    other = tmp_path_factory.mktemp("other")
    write(other / "part-0.tfrecord", words(1))
    assert records(three, index_dir=elsewhere).cardinality == 7
    assert records(other, index_dir=elsewhere).cardinality == 1
    assert records(three, index_dir=elsewhere).cardinality == 7
    assert not [path for path in three.iterdir() if "index" in path.name]
    assert len(list(elsewhere.iterdir())) == 4


def test_data_are_read_even_where_no_index_can_be_kept(tmp_path, caplog):
    path = write(tmp_path / "a.tfrecord", words(3))
    (tmp_path / "a.tfrecord.tfdist-index").mkdir()  # which root cannot overwrite either
    assert read(records(path)) == words(3)
    assert {each.name for each in tmp_path.iterdir()} == {"a.tfrecord", "a.tfrecord.tfdist-index"}
    with pytest.raises(ValueError, match=r"index_dir='.*a.tfrecord/x' cannot be made"):
        records(path, index_dir=f"{path}/x")


def test_processes_build_an_index_at_the_same_time(tmp_path, run_python_twice):
    write(tmp_path / "a.tfrecord", [b"x" * 10] * 30_000)
    write(tmp_path / "b.tfrecord", words(10))
    code = (
        "import sys; from tfdist.data.sources.records import records; s = records(sys.argv[1] + "
        "'/*.tfrecord');"
        "print(s.cardinality, s.read(s.cardinality - 1).numpy())"
    )
    for out, err in run_python_twice(code, str(tmp_path)):
        assert out.strip() == f"30010 {words(10)[-1]}", err
    assert len(list(tmp_path.iterdir())) == 4


def test_records_need_no_tfds(three, run_python):
    """To import TFDS takes seconds."""
    code = (
        "import sys; from tfdist.data.sources.records import records; s = records(sys.argv[1]);"
        "print(s.read(s.cardinality - 1).numpy(), 'tensorflow_datasets' in sys.modules)"
    )
    ended = run_python(code, str(three))
    assert ended.stdout.strip() == f"{words(7)[-1]} False", ended.stderr


# --- Damage ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("zipped", [False, True])
def test_truncated_and_corrupt_files_are_named_with_the_byte(tmp_path, zipped):
    path = tmp_path / "a.tfrecord"
    whole = pathlib.Path(write(path, [b"x" * 5, b"", b"y" * 100_000, b"z" * 3])).read_bytes()
    begins = [0, 21, 37, 37 + 16 + 100_000]

    def refused(content):
        path.write_bytes(gzip.compress(bytes(content), 1) if zipped else bytes(content))
        with pytest.raises(ValueError) as error:
            record_index.build(str(path))
        return str(error.value)

    word = "decompressed byte" if zipped else "byte"
    for cut, begin in [
        (22, 21),
        (36, 21),
        (45, 37),
        (60, 37),
        (100_000, 37),
        (len(whole) - 1, begins[3]),
    ]:
        assert f"{path}, {word} {begin}: truncated" in refused(whole[:cut])
    for flipped, begin in [(21, 21), (28, 21), (32, 21), (38, 37), (begins[3] + 9, begins[3])]:
        changed = bytearray(whole)
        changed[flipped] ^= 0x10
        assert f"{path}, {word} {begin}: corrupt" in refused(changed)
    assert "no TFRecord file" in refused(b"image,label\ncat.jpg,1\n")
    for end, count in zip([*begins, len(whole)], range(5), strict=True):
        path.write_bytes(gzip.compress(whole[:end], 1) if zipped else whole[:end])
        assert record_index.build(str(path)).records == count


def test_a_truncated_gzip_file_is_named(tmp_path):
    path = pathlib.Path(write(tmp_path / "a.tfrecord", words(100), "GZIP"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.tfrecord: truncated or corrupt as a GZIP file"):
        records(path)


def test_a_flipped_byte_of_content_fails_when_it_is_read(tmp_path):
    path = pathlib.Path(write(tmp_path / "a.tfrecord", words(4)))
    content = bytearray(path.read_bytes())
    second = 16 + len(words(1)[0])
    content[second + 14] ^= 1
    path.write_bytes(content)
    source = records(path)
    assert graph(source.read, int64(2)[0]) == words(4)[2]
    with pytest.raises(tf.errors.DataLossError, match="corrupted record"):
        graph(source.read, int64(1)[0])
    assert graph(source.describe, int64(1)[0]).decode() == f"{path}, byte {second}"


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_stream_continues_after_an_unreadable_record(tmp_path, compression):
    path = pathlib.Path(write(tmp_path / "a.tfrecord", words(9)))
    content = bytearray(path.read_bytes())
    begins = np.cumsum([0, *(16 + len(word) for word in words(9))])
    for number in (3, 6):
        content[begins[number] + 14] ^= 1
    path.write_bytes(gzip.compress(content) if compression else content)
    source = records(path, access="stream")

    def read_all(scanned):
        tried = scanned.map(
            lambda stored: tf.data.Dataset.from_tensors(stored).map(source.decode).ignore_errors()
        )
        return [[record.numpy() for record in one] for one in tried]

    expected = [[word] for word in words(9)]
    for number in (3, 6) if not compression else range(3, 9):
        expected[number] = []
    assert read_all(source.scan(*int64(0, 0, 9))) == expected
    assert read_all(source.scan(*int64(0, 2, 3))) == expected[2:5]
    with pytest.raises(tf.errors.InvalidArgumentError, match="corrupt record"):
        read(source)


# --- Which files ----------------------------------------------------------------------------------
def test_files_are_taken_in_order(three):
    a, b, c = (str(three / f"part-{i}.tfrecord") for i in range(3))
    assert find(three) == find(f"{three}/part-*") == find([three / "part-?.tfrecord"]) == [a, b, c]
    assert find([c, a]) == [c, a]
    records(three)
    assert find(three) == find(f"{three}/*") == [a, b, c]  # and no index


def test_paths_are_absolute(three, monkeypatch):
    monkeypatch.chdir(three)
    source = records("part-2.tfrecord")
    monkeypatch.chdir("/")
    assert read(source) == words(4, 3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("{}/none-*.tfrecord", "found none at .*/none-"),
        ("{}/none/part-0.tfrecord", "found none at .*/none/part-0.tfrecord"),
        ("{}", "found none at"),
        ([], r"expected TFRecord files; received \[\]"),
        (["{}/x.csv", "{}/x.csv"], "received .*x.csv twice"),
        ("{}/x.csv", "x.csv is no TFRecord file"),
    ],
)
def test_missing_and_wrong_files(tmp_path, files, message):
    (tmp_path / "x.csv").write_text("image,label\n")
    with pytest.raises(ValueError, match=message):
        records(
            files.format(tmp_path)
            if isinstance(files, str)
            else [file.format(tmp_path) for file in files]
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"access": "fast"}, "access: expected one of auto, random, stream; received 'fast'"),
        ({"compression": "zip"}, "compression: expected"),
        ({"classes": 3, "class_names": ["a", "b"]}, "classes=3: expected 2"),
        ({"label": "y"}, "features: expected a mapping"),
    ],
)
def test_wrong_options(three, options, message):
    with pytest.raises(ValueError, match=message):
        records(three, **options)


# --- Features -------------------------------------------------------------------------------------
DECLARED = {
    "image": "image[?,?,1]",
    "box": "float32[?,4]",
    "grid": "uint8[2,2]",
    "mask": "bool[?,?]",
    "wide": "bytes of float64[2]",
    "tags": "string[?]",
    "label": "int64",
}


def full(**changes):
    lists = {
        "image": [tf.io.encode_png(np.full([3, 2, 1], 7, np.uint8)).numpy()],
        "box": [1.0, 2, 3, 4, 5, 6, 7, 8],
        "grid": [1, 2, 3, 4],
        "mask": [1, 0, 1],
        "mask/shape": [1, 3],
        "wide": [np.array([0.1, 0.2]).tobytes()],
        "tags": [b"a", b"b"],
        "label": [3],
    }
    return example(**{name: values for name, values in {**lists, **changes}.items() if values})


def test_declared_features_become_tensors(tmp_path):
    source = records(
        write(tmp_path / "a.tfrecord", [full(), full(tags=None)]),
        DECLARED,
        label="label",
        class_names=list("abcd"),
    )
    assert (source.classes, source.class_names) == (4, ("a", "b", "c", "d"))
    x_spec, y_spec = source.element_spec
    assert {name: spec.shape.as_list() for name, spec in x_spec.items()} == {
        "image": [None, None, 1],
        "box": [None, 4],
        "grid": [2, 2],
        "mask": [None, None],
        "wide": [2],
        "tags": [None],
    }
    assert (y_spec.dtype, y_spec.shape.rank) == (tf.int64, 0)
    (x, y), (other, _) = source.dataset()
    assert int(y) == 3
    np.testing.assert_array_equal(x["image"], np.full([3, 2, 1], 7, np.uint8))
    np.testing.assert_array_equal(x["box"], np.arange(1.0, 9).reshape(2, 4))
    np.testing.assert_array_equal(x["grid"], np.array([[1, 2], [3, 4]], np.uint8))
    np.testing.assert_array_equal(x["mask"], [[True, False, True]])
    np.testing.assert_array_equal(x["wide"], [0.1, 0.2])
    assert (x["tags"].numpy().tolist(), other["tags"].shape) == ([b"a", b"b"], [0])


def test_one_feature_is_no_dict_and_tf_io_features_pass(tmp_path):
    path = write(tmp_path / "a.tfrecord", [example(a=[1], b=[2.0, 3.0])])
    assert [int(x) for x in records(path, {"a": "int64"}).dataset()] == [1]
    (both,) = records(
        path,
        {"a": tf.io.FixedLenFeature([], tf.int64), "c": tf.io.FixedLenFeature([], tf.int64, 9)},
    ).dataset()
    assert {name: int(value) for name, value in both.items()} == {"a": 1, "c": 9}
    ((x, y),) = records(path, {"a": "int64", "b": "float32[2]"}, label="a").dataset()
    assert (x.numpy().tolist(), int(y)) == ([2.0, 3.0], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"label": None},
            (
                r"features\['label'\]: expected this feature in .*a.tfrecord, byte 0, received "
                r"box \(8 values in a float_list\)"
            ),
        ),
        (
            {"label": [1.5]},
            (
                r"features\['label'\]: expected int64, 1 values in a int64_list; received 1 "
                r"values in a float_list in .*byte 0"
            ),
        ),
        ({"label": [1, 2]}, r"features\['label'\]: expected int64, .*received 2 values"),
        (
            {"grid": [1, 2]},
            r"features\['grid'\]: expected uint8\[2,2\], 4 values .*received 2 values",
        ),
        ({"box": [1.0]}, "byte 0: does not hold .* as declared: .*multiple of 4"),
        (
            {"image": [b"no image"]},
            "byte 0: does not hold .* as declared: .*Unknown image file format",
        ),
        ({"wide": [b"12345678"]}, "byte 0: does not hold .* as declared"),
    ],
)
def test_features_are_checked_in_the_first_and_the_last_file(tmp_path, changes, message):
    write(tmp_path / "a.tfrecord", [full(**changes)])
    write(tmp_path / "b.tfrecord", [full()])
    write(tmp_path / "c.tfrecord", [])
    with pytest.raises(ValueError, match=message):
        records([tmp_path / "a.tfrecord", tmp_path / "b.tfrecord"], DECLARED)
    with pytest.raises(ValueError, match=message):
        records(
            [tmp_path / "b.tfrecord", tmp_path / "a.tfrecord", tmp_path / "c.tfrecord"], DECLARED
        )


def test_features_that_change_later_fail_by_name(tmp_path):
    path = write(
        tmp_path / "a.tfrecord",
        [full(), full(label=[2.5]), full(box=[1.0]), full(grid=[1]), full()],
    )
    source = records(path, DECLARED)
    for number, name in [(1, "label"), (2, "feature_box"), (3, "grid")]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=name):
            list(tf.data.Dataset.from_tensors(int64(number)[0]).map(source.read))
    list(tf.data.Dataset.from_tensors(int64(4)[0]).map(source.read))


def test_records_that_hold_no_examples(tmp_path):
    path = write(tmp_path / "a.tfrecord", [b"\x00no example"])
    with pytest.raises(
        ValueError,
        match=r"a.tfrecord, byte 0: expected a serialized tf.train.Example; received b'\\x00no "
        r"example'",
    ):
        records(path, {"a": "int64"})


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            {"a": "int65"},
            r"features\['a'\]: expected a tf.io feature, or words .*; received 'int65'",
        ),
        ({"a": "int64[2"}, "received 'int64"),
        ({"a": 3}, "received 3"),
        ({"a": "image[3]"}, "expected an image of a height, a width"),
        ({"a": "image[?,?,2]"}, "1, 3 or 4 channels"),
        ({"a": "float64"}, 'expected "bytes of float64"'),
        ({"a": "bytes of string"}, "expected bytes of a type of numbers"),
        ({}, "features: expected a mapping"),
        (["a"], "features: expected a mapping"),
    ],
)
def test_wrong_declarations(three, features, message):
    with pytest.raises(ValueError, match=message):
        records(three, features)


@pytest.mark.parametrize(
    ("features", "label"), [({"a": "int64", "b": "int64"}, "c"), ({"a": "int64"}, "a")]
)
def test_the_label_is_one_of_several_features(three, features, label):
    with pytest.raises(
        ValueError, match=f"label='{label}': expected one of several features, which are a"
    ):
        records(three, features, label=label)


def test_a_gzip_file_of_nonsense_is_named(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(gzip.compress(b"\xff" * 200))
    with pytest.raises(ValueError, match=r"a.tfrecord.*byte 0"):
        records(str(tmp_path / "*.tfrecord"), {"y": "int64"})
