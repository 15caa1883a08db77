"""Test that `tfdist data` describes and copies data, and answers mistakes with one sentence."""

import re

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfdist import cli
from tfdist.data.sources.records import records
from tfdist.data.sources.source import Source, of_arrays
from tfdist.telemetry import contact_sheet
from tfdist.tools import data, examples, show
from tfdist.tools.common import example_text

NAMES = ("cat", "dog", "eel")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Make a directory with a catalog: images in arrays, records with a broken image, numbers."""
    monkeypatch.chdir(tmp_path)
    colours = np.arange(30, dtype=np.uint8)[:, None, None, None] * np.ones([8, 10, 3], np.uint8)
    np.savez("images.npz", x=colours, y=np.arange(30) % 3)
    np.savez("table.npz", x=np.ones([4, 2]))
    for name, compression in (("plain", ""), ("zip", "GZIP")):
        with tf.io.TFRecordWriter(
            f"{name}.tfrecord", tf.io.TFRecordOptions(compression_type=compression)
        ) as file:
            for i in range(6):
                file.write(
                    record(b"no image" if i == 4 else tf.io.encode_png(colours[i]).numpy(), i % 3)
                )
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "datasets.yaml").write_text(
        "images: {kind: arrays, location: ../images.npz, label: y, classes: [cat, dog, eel], "
        "license: CC0}\n"
        "table: {kind: arrays, location: ../table.npz}\n"
        "records:\n  kind: records\n  location: ..\n  features: {image: image, label: int64}\n"
        "  label: label\n"
        "  splits: {plain: plain.tfrecord, zip: zip.tfrecord}\n"
        "gone: {kind: arrays, location: gone.npz}\n"
        "elsewhere: {kind: images, location: '${NOT_SET_HERE}/x'}\n"
    )
    return tmp_path


def record(image, label):
    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


@pytest.fixture
def tfdist(capsys):
    """Run `tfdist data`, and return its exit code, output and errors."""

    def run(*words):
        try:
            code = cli.main(["data", *words])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_list_shows_all_data_sets(workplace, tfdist):
    code, out, _ = tfdist("list")
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    assert code == 0
    assert lines == [
        ["name", "kind", "splits", "location", "license"],
        ["images", "arrays", "train", f"found {workplace}/images.npz", "CC0"],
        ["table", "arrays", "train", f"found {workplace}/table.npz", "not given"],
        [
            "records",
            "records",
            "plain, zip",
            f"found {workplace}/plain.tfrecord, {workplace}/zip.tfrecord",
            "not given",
        ],
        ["gone", "arrays", "train", f"missing {workplace}/configs/gone.npz", "not given"],
        [
            "elsewhere",
            "images",
            "train",
            "the variable NOT_SET_HERE in '${NOT_SET_HERE}/x' is not set",
            "not given",
        ],
    ]


def test_list_marks_prepared_tfds_data_sets(workplace, tfdist, digits_dir, tmp_path):
    (workplace / "tfds.yaml").write_text(
        "digits: {kind: tfds, name: tfdist_digits}\nother: {kind: tfds, name: dgits}\n"
    )
    _, out, _ = tfdist("list", "--catalog", "tfds.yaml", "--data-dir", str(digits_dir))
    assert f"found {digits_dir}/tfdist_digits/1.0.0" in out
    assert "missing: TFDS knows no dgits" in out
    _, out, _ = tfdist("list", "--catalog", "tfds.yaml", "--data-dir", str(tmp_path / "new"))
    assert "not prepared yet; TFDS prepares it at first use" in out
    assert not (tmp_path / "new").exists()


def test_show_prints_features_sizes_and_classes_and_draws_a_sheet(workplace, tfdist):
    code, out, _ = tfdist("show", "images")
    assert code == 0
    assert "license    CC0\nexamples   30\n" in out
    assert "x        uint8 [8, 10, 3]\n" in out
    assert "y        int64 [], 3 classes\n" in out
    assert "248 B each, 7.44 kB in all\n" in out  # 240 bytes of pixels, 8 of the label
    assert "classes    counted in all 30 examples\n" in out
    assert re.findall(r"\d \((\w+)\) +(\d+) +([\d.]+%)", out) == [
        (name, "10", "33.3%") for name in NAMES
    ]
    assert "sheet      runs/data/images_train.png: 24 images\n" in out
    first = (workplace / "runs/data/images_train.png").read_bytes()
    assert Image.open(workplace / "runs/data/images_train.png").size[0] > 8 * 96
    tfdist("show", "images", "--sheet", "again.png")
    assert (workplace / "again.png").read_bytes() == first


def test_show_without_images_or_labels(workplace, tfdist):
    code, out, _ = tfdist("show", "table")
    assert code == 0
    assert "classes" not in out
    assert "sheet      none: no feature is an image\n" in out
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize(
    ("split", "location"), [("plain", "plain.tfrecord, byte "), ("zip", "zip.tfrecord, record 4")]
)
def test_an_example_that_cannot_be_read_is_named(workplace, tfdist, split, location):
    code, out, _ = tfdist("show", "records", "--split", split)
    assert code == 1
    assert "ERRORS     1 of the sampled examples cannot be read. The first:\n4   " in out
    assert "cannot be read: Unknown image file format" in out
    assert f"at       {workplace}/{location}" in out
    assert f"runs/data/records_{split}.png: 5 images" in out
    code, out, _ = tfdist("head", "records", "--split", split, "-n", "6")
    assert code == 1
    assert re.findall(r"^(\d)  ", out, re.MULTILINE) == list("012345")
    code, out, _ = tfdist("head", "records", "--split", split, "--example", "4")
    assert code == 1
    assert "InvalidArgumentError: " in out
    assert tfdist("head", "records", "--split", split, "--example", "3")[0] == 0


def test_head_prints_values(workplace, tfdist):
    code, out, _ = tfdist("head", "images", "-n", "2")
    assert code == 0
    assert out.splitlines() == [
        "0         x        uint8 [8, 10, 3]  0 to 0, mean 0",
        "          y        int64 []  0 (cat)",
        "1         x        uint8 [8, 10, 3]  1 to 1, mean 1",
        "          y        int64 []  1 (dog)",
    ]
    assert len(tfdist("head", "table", "-n", "50")[1].splitlines()) == 4


def test_write_makes_records_and_resumes(workplace, tfdist):
    code, out, _ = tfdist(
        "write",
        "images",
        "--to",
        "copy",
        "--shard-size",
        "1kB",
        "--compression",
        "GZIP",
        "--verify",
    )
    assert code == 0
    assert re.match(
        r"copy: 30 examples in \d+ files, [\d.]+ k?B\ncopy: the checksums of all files are right",
        out,
    )
    (workplace / "copy.yaml").write_text("copy: {kind: records, location: copy}")
    assert "y        int64 [], 3 classes\n" in tfdist("show", "copy", "--catalog", "copy.yaml")[1]
    assert (
        tfdist("write", "images", "--to", "copy", "--shard-size", "1kB", "--compression", "GZIP")[0]
        == 0
    )
    code, _, err = tfdist("write", "table", "--to", "copy")
    assert code == 78
    assert "copy" in err
    code, _, err = tfdist("write", "records", "--to", "bad")
    assert code == 78
    assert f"{workplace}/plain.tfrecord, byte " in err


def test_a_tfds_name_needs_no_catalog(tmp_path, monkeypatch, tfdist, digits_dir):
    monkeypatch.chdir(tmp_path)
    code, out, _ = tfdist(
        "show",
        "tfdist_digits",
        "--split",
        "test",
        "--data-dir",
        str(digits_dir),
        "--sheet",
        "x.png",
    )
    assert code == 0
    assert "examples   297\n" in out
    assert "10 classes" in out
    assert len(re.findall(r"^ +\d +\d+ +[\d.]+%", out, re.MULTILINE)) == 10
    code, _, err = tfdist("show", "tfdist_digts", "--data-dir", str(digits_dir))
    assert code == 78
    assert (
        f"Or name a catalog with --catalog FILE: there is no configs/datasets.yaml in {tmp_path}."
        in err
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            "lsit",
            2,
            (
                "tfdist data: error: expected a command (list, show, head, write, audit), "
                "received 'lsit'. "
                "Did you mean `tfdist data list`?"
            ),
        ),
        ("show", 2, "tfdist data show: error: the following arguments are required: NAME"),
        (
            "show images --splt x",
            2,
            "tfdist data show: error: --splt: no such flag. Did you mean --split?",
        ),
        ("show images table", 2, "expected a flag, received 'table'"),
        ("head images -n 0", 2, "-n: expected a whole number of at least 1, received '0'"),
        ("write images", 2, "the following arguments are required: --to"),
        (
            "write images --to x --shard-size big",
            2,
            "--shard-size: expected a size such as 16GB, 800MiB or 64k, or a number of bytes",
        ),
        ("write images --to x --compression ZIP", 2, "--compression: invalid choice: 'ZIP'"),
        ("show imagse", 78, "datasets.yaml: no data set 'imagse'. Did you mean images?"),
        ("show images --split test", 78, "images has no split 'test'. Expected one of train."),
        ("head gone", 78, "gone.location: there is no file at "),
        ("head elsewhere", 78, "elsewhere.location: the variable NOT_SET_HERE in"),
        (
            "head images --example 30",
            78,
            (
                "--example: expected an example of images[train], whose examples are 0 to 29; "
                "received 30."
            ),
        ),
        ("show images --sheet configs", 78, "--sheet: configs cannot be written: "),
        ("list --catalog none.yaml", 78, "none.yaml: no such catalog"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(workplace, tfdist, words, code, message):
    received, _, err = tfdist(*words.split())
    assert received == code
    assert message in err
    assert "Traceback" not in err


def test_the_help_loads_no_framework(run_python):
    code = (
        "import sys; from tfdist.cli import main\n"
        "for words in (['--help'], ['head', '--help'], ['show', '--nonsense']):\n"
        "    try: main(['data', *words])\n    except SystemExit as end: assert end.code == 0\n"
        "assert not {'tensorflow', 'PIL', 'tensorflow_datasets'} & set(sys.modules)"
    )
    run = run_python(code)
    assert run.returncode == 0, run.stderr
    assert all(name in run.stdout for name in data.COMMANDS)


def numbers(source, count):
    return [example.number for example in examples.draw(source, count)]


def test_examples_are_drawn_evenly_and_never_twice():
    assert numbers(Source.of(np.arange(100)), 4) == [12, 37, 62, 87]
    assert numbers(Source.of(np.arange(3)), 4) == [0, 1, 2]
    assert numbers(Source.of(tf.data.Dataset.range(10)), 4) == [0, 1, 2, 3]
    walked = examples.numbered(Source.of(tf.data.Dataset.range(10, 20)), np.array([2, 7]))
    assert [(x.number, int(x.data)) for x in walked] == [(2, 12), (7, 17)]


def test_ragged_and_nested_examples_are_described():
    nest = (
        {"a": tf.ragged.constant([[1, 2], [3]]), "b": tf.sparse.from_dense([0, 5])},
        tf.constant("x" * 90),
        tf.constant(1.0),
    )
    lines = [
        f"{name}: {example_text.kind(x)}  {example_text.value(x)}"
        for name, x in example_text.parts(nest)
    ]
    assert lines == [
        "x.a: ragged int32 [2, ?]  1, 2, 3",
        "x.b: sparse int32 [2]  5",
        f"y: string []  '{'x' * 57}'... (90 bytes)",
        "sample_weight: float32 []  1",
    ]


def test_many_classes_are_shown_in_part(capsys, tmp_path):
    labels = np.repeat(np.arange(50), np.arange(1, 51))
    source = of_arrays((np.zeros([len(labels), 4, 4, 1], np.float32), labels), classes=52)
    assert show.show(source, None, 10, str(tmp_path / "x.png")) == 0
    out = capsys.readouterr().out
    assert "... 30 more, of 40 to 11 examples" in out
    assert "2 of 52 classes have no example here" in out


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (np.full([2, 2, 1], 7, np.uint8), (7, 7, 7)),
        (np.full([2, 2, 3], 1.0), (255, 255, 255)),
        (np.full([2, 2, 3], 200.0), (200, 200, 200)),
        (np.full([2, 2, 1], 257 * 9, np.uint16), (9, 9, 9)),
        (np.array([[[-1.0], [3.0]]]), (0, 0, 0)),
        (np.zeros([2, 2, 4], np.uint8), (255, 255, 255)),  # transparent, on white
        (np.full([2, 2, 1], np.nan, np.float32), (0, 0, 0)),
        (np.full([2, 2, 1], -5.0), (0, 0, 0)),
    ],
)
def test_numbers_become_colours(pixels, expected):
    assert contact_sheet.to_image(pixels).getpixel((0, 0)) == expected


def test_streams_are_read_from_each_file_and_past_damaged_ones(tmp_path):
    for file in range(3):
        with tf.io.TFRecordWriter(str(tmp_path / f"{file}.tfrecord")) as writer:
            for i in range(4):
                writer.write(f"{file}{i}".encode())
    path = tmp_path / "1.tfrecord"
    source = records(str(tmp_path / "*.tfrecord"), access="stream")
    assert [x.data.numpy() for x in examples.draw(source, 7)] == [
        b"00",
        b"01",
        b"10",
        b"11",
        b"20",
        b"21",
    ]
    assert numbers(source, 12) == list(range(12))
    content = bytearray(path.read_bytes())
    content[18 * 1 + 12] ^= 1  # the second record: a frame of 16 bytes, and 2 of its own
    path.write_bytes(content)
    read = list(examples.draw(source, 12))
    assert [x.number for x in read] == list(range(12))
    assert [x.number for x in read if x.error is not None] == [5]
    numbered = list(examples.numbered(source, np.array([4, 5, 6, 9])))
    assert [(x.number, x.error is None) for x in numbered] == [
        (4, True),
        (5, False),
        (6, True),
        (9, True),
    ]
