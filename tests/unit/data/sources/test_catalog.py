"""Test that errors in a catalog name file, entry and key, and that correct entries are read.

Data may lie anywhere.
"""

import re

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.sources import catalog, source
from tfdist.data.sources.catalog import Catalog


@pytest.fixture
def write(tmp_path):
    """Write a catalog, and read it."""

    def load(text):
        path = tmp_path / "datasets.yaml"
        path.write_text(text)
        return Catalog.load(path)

    return load


@pytest.fixture
def points(tmp_path):
    """Write an .npz file of two splits."""
    path = tmp_path / "points.npz"
    np.savez(
        path,
        x=np.arange(10.0).reshape(5, 2),
        y=np.arange(5) % 2,
        few=np.zeros([3, 2]),
        of_few=np.ones(3, int),
    )
    return path


def labels(source):
    return [int(y) for _, y in source.dataset()]


def test_splits_have_their_own_settings(write, points):
    names = write(
        "points:\n  kind: arrays\n  location: points.npz\n  classes: [cat, dog]\n  license: none\n"
        "  splits:\n"
        "    train: {features: x, label: y}\n    test: {features: few, label: of_few}\n"
    )
    train, test = (names.source("points", split) for split in ("train", "test"))
    assert (train.name, train.cardinality, train.classes, train.class_names) == (
        "points[train]",
        5,
        2,
        ("cat", "dog"),
    )
    assert (labels(train), labels(test)) == ([0, 1, 0, 1, 0], [1, 1, 1])
    assert names.entries["points"].license == "none"


def test_without_splits_there_is_one(write, points):
    source = write(
        "points: {kind: arrays, location: points.npz, features: [x, few, y], label: of_few}"
    )
    assert list(source.entries["points"].splits) == ["train"]
    with pytest.raises(ValueError, match="equal length, received 3, 5, 5, 3 rows"):
        source.source("points", "train")


def test_a_file_of_one_array_and_a_directory_of_them(write, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6))
    np.save(tmp_path / "y.npy", np.arange(6) % 3)
    names = write(
        "one: {kind: arrays, location: x.npy}\nboth: {kind: arrays, location: ., label: y, "
        "classes: 3}"
    )
    assert [int(x) for x in names.source("one", "train").dataset()] == list(range(6))
    assert labels(names.source("both", "train")) == [0, 1, 2, 0, 1, 2]


def test_locations_are_relative_to_the_file_and_to_the_entry(write, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_DATA", "/data")
    names = write(
        "here: {kind: images, location: a/../b}\n"
        "there: {kind: images, location: $SOME_DATA/x, splits: {one: one, two: {location: ../two}, "
        "three: '${SOME_DATA}3'}}\n"
        "cloud: {kind: images, location: gs://bucket/x, splits: {one: one, two: s3://other/two}}\n"
        "digits: {kind: tfds, name: tfdist_digits, splits: {half: 'train[:50%]'}}\n"
    )
    places = {
        f"{e.name} {s}": e.split(s).location() for e in names.entries.values() for s in e.splits
    }
    assert places == {
        "here train": str(tmp_path / "b"),
        "there one": "/data/x/one",
        "there two": "/data/two",
        "there three": "/data3",
        "cloud one": "gs://bucket/x/one",
        "cloud two": "s3://other/two",
        "digits half": None,
    }


def test_a_catalog_may_be_empty(write):
    assert write("# nothing yet\n").entries == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a, b]", "expected a mapping of names of data sets, received ['a', 'b']"),
        ("a: 3", "a: expected a mapping of settings such as kind and location, received 3"),
        ("1: {kind: images}", "expected text as a name, received 1. Put it in quotes."),
        ("a: {location: x}", "a.kind: it is missing. Expected one of arrays, "),
        ("a: {kind: image, location: x}", "a.kind: received 'image'. Did you mean images?"),
        ("a: {kind: [images], location: x}", "a.kind: received ['images']. Did you mean images?"),
        ("a: {kind: images, loaction: x}", "a.loaction: no such key. Did you mean location?"),
        ("a: {kind: images, location: x, split: {}}", "a.split: no such key. Did you mean splits?"),
        ("a: {kind: images, location: 3}", "a.location: expected text, received 3. Put names"),
        (
            "a: {kind: images, location: x, channels: two}",
            "a.channels: expected a whole number, received 'two'.",
        ),
        (
            "a: {kind: images, location: x, channels: yes}",
            "a.channels: expected a whole number, received True.",
        ),
        (
            "a: {kind: images, location: x, classes: [0, 1]}",
            "a.classes: expected a list of names, received [0, 1]. Put",
        ),
        (
            "a: {kind: images, location: x, labels: 3}",
            "a.labels: expected true or false, received 3.",
        ),
        (
            "a: {kind: arrays, location: x, classes: cat}",
            "expected a whole number or a list of names, received 'cat'.",
        ),
        (
            "a: {kind: records, location: x, features: {x: 3}}",
            "a.features: expected a mapping of names to text, received",
        ),
        ("a: {kind: images}", "a.location: missing for the split 'train'"),
        (
            "a: {kind: images, splits: {one: x, two: {channels: 1}}}",
            "a.location: missing for the split 'two'",
        ),
        (
            "a: {kind: images, location: x, splits: {}}",
            "a.splits: expected names of splits, received none",
        ),
        (
            "a: {kind: images, location: x, splits: [one]}",
            "a.splits: expected a mapping of names of splits, received ['one']",
        ),
        (
            "a: {kind: images, location: x, splits: {one: 1}}",
            "a.splits.one: expected a mapping of a location or settings",
        ),
        (
            "a: {kind: images, location: x, splits: {one: {chanels: 1}}}",
            "a.splits.one.chanels: no such key. Did you mean chan",
        ),
        (
            "a: {kind: images, location: x, splits: {one: {license: x}}}",
            "a.splits.one.license: no such key.",
        ),
        (
            "a: {kind: tfds}\na: {kind: tfds}",
            "the key 'a' appears twice; give each its own name in line 2",
        ),
        ("a: {kind: tfds, name: x, name: y}", "the key 'name' appears twice"),
        ("a: {kind: tfds", "cannot be read as YAML: while parsing a flow mapping"),
        ("a: {[x]: 3}", "cannot be read as YAML: "),
    ],
)
def test_a_mistake_is_named(write, text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        write(text)
    assert "datasets.yaml: " in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_catalog(tmp_path):
    with pytest.raises(
        ValueError, match=r"none.yaml: no such catalog in /.*\. Name a YAML file of data sets\."
    ):
        Catalog.load("none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    for path in (tmp_path, tmp_path / "bytes.yaml"):
        with pytest.raises(ValueError, match="cannot be read as YAML"):
            Catalog.load(path)


def test_unknown_names(write):
    names = write("points: {kind: arrays, location: x, splits: {train: a, test: b}}")
    with pytest.raises(
        ValueError, match=r"datasets.yaml: no data set 'pionts'. Did you mean points\?"
    ):
        names.source("pionts", "train")
    with pytest.raises(
        ValueError, match=r"datasets.yaml: points has no split 'tset'. Did you mean test\?"
    ):
        names.source("points", "tset")


def test_missing_location_names_its_entry_and_file(write, tmp_path, monkeypatch):
    names = write(
        "points: {kind: arrays, location: '${NOT_SET}/x'}\n"
        "far: {kind: arrays, location: nowhere://x}"
    )
    with pytest.raises(
        ValueError,
        match=(
            r"datasets.yaml: points.location: the variable NOT_SET in '\$\{NOT_SET\}/x' is not set"
        ),
    ):
        names.source("points", "train")
    monkeypatch.setenv("NOT_SET", str(tmp_path / "set"))
    missing = re.escape(
        f"datasets.yaml: points.location: there is no file at {tmp_path}/set/x "
        "('${NOT_SET}/x' in the file)"
    )
    with pytest.raises(ValueError, match=missing):
        names.source("points", "train")
    with pytest.raises(
        ValueError, match=r"datasets.yaml: far.location: nowhere://x cannot be read"
    ):
        names.source("far", "train")


def test_damaged_arrays_are_named_with_their_entry(write, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"PK no archive")
    (tmp_path / "bad.npy").write_bytes(b"")
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "empty").mkdir()
    names = write(
        "\n".join(
            f"{x}: {{kind: arrays, location: {x}}}"
            for x in ("bad.npz", "bad.npy", "pickled.npy", "empty")
        )
    )
    for name in names.entries:
        with pytest.raises(ValueError, match=f"datasets.yaml: {name}: {tmp_path}/{name}"):
            names.source(name, "train")


def test_error_for_a_missing_array_suggests_the_nearest_name(write, points):
    names = write("points: {kind: arrays, location: points.npz, features: x, label: of_fwe}")
    with pytest.raises(ValueError, match=r"no array 'of_fwe'. Did you mean of_few\?"):
        names.source("points", "train")


PNG = {"cat": 1, "dog": 2}


@pytest.fixture
def pictures(tmp_path):
    """Write two classes of images, lists of them, and the layout of ImageNet."""
    for name, colour in PNG.items():
        (tmp_path / "pets" / name).mkdir(parents=True)
        content = tf.io.encode_png(np.full([4, 6, 3], colour, np.uint8)).numpy()
        (tmp_path / "pets" / name / "1.png").write_bytes(content)
    (tmp_path / "pets.tsv").write_text(
        "file\tkind\ndog/1.png\tdog\ncat/1.png\tcat\ndog/1.png\tdog\n"
    )
    (tmp_path / "kinds.txt").write_text("dog a dog\ncat a cat\n")
    images = tmp_path / "imagenet" / "ILSVRC" / "Data" / "CLS-LOC" / "val"
    images.mkdir(parents=True)
    (images / "a.JPEG").write_bytes(tf.io.encode_jpeg(np.zeros([4, 6, 3], np.uint8)).numpy())
    (tmp_path / "imagenet" / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\na,n2 1 2 3 4\n"
    )
    (tmp_path / "imagenet" / "LOC_synset_mapping.txt").write_text("n1 tench\nn2 goldfish\n")
    (tmp_path / "people.csv").write_text("name,age,paid\nAda,36,1\nAlan,,0\n")
    with tf.io.TFRecordWriter(str(tmp_path / "some.tfrecord")) as file:
        for number in (1, 0):
            feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
            features = tf.train.Features(feature={"x": feature, "y": feature})
            file.write(tf.train.Example(features=features).SerializeToString())


def test_every_kind_is_read(write, pictures):
    names = write(
        "folder: {kind: images, location: pets, classes: [dog, cat], channels: 1}\n"
        "all: {kind: images, location: pets, labels: false}\n"
        "list: {kind: manifest, location: pets.tsv, root: pets, path_column: file, label_column: "
        "kind, classes: kinds.txt}\n"
        "files: {kind: manifest, location: pets.tsv, root: pets, header: true, label_column: null, "
        "decode: false}\n"
        "imagenet: {kind: imagenet, location: imagenet, splits: {validation: val}}\n"
        "table: {kind: table, location: people.csv, label: paid, features: [age], classes: ['no', "
        "'yes'], types: {age: string}}\n"
        "records: {kind: records, location: 'some*', features: {x: int64, y: int64}, label: y, "
        "classes: 2}\n"
    )
    sources_ = {
        entry.name: names.source(entry.name, next(iter(entry.splits)))
        for entry in names.entries.values()
    }
    names_of = {name: source.class_names for name, source in sources_.items() if source.class_names}
    assert names_of == {
        "folder": ("dog", "cat"),
        "list": ("a dog", "a cat"),
        "imagenet": ("tench", "goldfish"),
        "table": ("no", "yes"),
    }
    assert sources_["records"].classes == 2
    labelled = [name for name, source in sources_.items() if isinstance(source.element_spec, tuple)]
    assert {name: labels(sources_[name]) for name in labelled} == {
        "folder": [0, 1],
        "list": [0, 1, 0],
        "imagenet": [1],
        "table": [1, 0],
        "records": [1, 0],
    }
    assert [image.shape for image, _ in sources_["folder"].dataset()] == [(4, 6, 1)] * 2
    assert [int(image[0, 0, 0]) for image in sources_["all"].dataset()] == [1, 2]
    assert [file.numpy()[:4] for file in sources_["files"].dataset()] == [b"\x89PNG"] * 3
    assert [x["age"].numpy() for x, _ in sources_["table"].dataset()] == [b"36", b""]


def test_errors_of_data_name_their_entry(write, pictures):
    names = write("pets: {kind: images, location: pets, classes: [cat, dgo]}")
    with pytest.raises(
        ValueError,
        match=r"datasets.yaml: pets: /.*/pets: no directory for the class 'dgo'.*mean dog\?",
    ):
        names.source("pets", "train")


def test_names_are_looked_up_in_the_catalog_then_in_tfds(write, points, digits_dir):
    names = write(
        "tfdist_digits: {kind: arrays, location: points.npz, features: x, label: y}\n"
        "mine: {kind: tfds, name: tfdist_digits}"
    )
    assert catalog.resolve("tfdist_digits", "train", digits_dir, names).cardinality == 5
    assert catalog.resolve("tfdist_digits", "train", digits_dir).cardinality == 1500
    assert catalog.resolve("mine", "train[:10%]", digits_dir, names.file).cardinality == 150
    assert isinstance(catalog.resolve("mine", "test", digits_dir, names), source.Source)
    with pytest.raises(
        ValueError,
        match=r"datasets.yaml: no data set 'mnie'. Did you mean mine\? Nor has TFDS one: ",
    ):
        catalog.resolve("mnie", "train", digits_dir, names)
    with pytest.raises(ValueError, match=r"^'mnie': no such data set"):
        catalog.resolve("mnie", "train", digits_dir)
