"""Test that Sources read folders, lists and tables of files.

An error names whatever is wrong with them before training.
"""

import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.data import transforms
from tfdist.data.sources import image_files, tables


def picture(height, width, value=0):
    """Return an image whose pixels say which it is."""
    return tf.fill([height, width, 3], tf.constant(value, tf.uint8))


def write(path, content="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write three classes: images of several sizes and kinds, and files that are no images."""
    root = tmp_path_factory.mktemp("images")
    jpeg = tf.io.encode_jpeg(picture(20, 30, 40), quality=100).numpy()
    png = tf.io.encode_png(picture(10, 12, 80)).numpy()
    write(root / "cats" / "b.JPG", jpeg)
    write(root / "cats" / "a.jpeg", jpeg)
    write(root / "cats" / "old" / "2019" / "c.png", png)
    write(root / "cats" / ".hidden.png", png)
    write(root / "cats" / "notes.txt")
    write(root / "dogs" / "1.png", png)
    write(root / "dogs" / ".cache" / "2.png", png)
    write(root / "ants" / "x.jpg", jpeg)
    write(root / ".git" / "y.jpg", jpeg)
    write(root / "loose.png", png)
    return root


def names(source):
    return [
        source.describe(tf.constant(i, tf.int64)).numpy().decode()
        for i in range(source.cardinality)
    ]


def test_classes_are_directories_by_name(folder):
    source = image_files.image_folder(folder)
    assert source.class_names == ("ants", "cats", "dogs")
    assert (source.cardinality, source.classes) == (5, 3)
    assert names(source) == [
        f"file {folder}/{x}"
        for x in ("ants/x.jpg", "cats/a.jpeg", "cats/b.JPG", "cats/old/2019/c.png", "dogs/1.png")
    ]
    examples = list(source.dataset())
    assert [int(y) for _, y in examples] == source.labels().tolist() == [0, 1, 1, 1, 2]
    assert [tuple(x.shape) for x, _ in examples] == [(20, 30, 3)] * 3 + [(10, 12, 3)] * 2
    assert [int(x[0, 0, 0]) for x, _ in examples] == [40, 40, 40, 80, 80]
    assert source.dataset().element_spec == source.element_spec


def test_order_of_classes_can_be_given_and_others_are_skipped(folder):
    source = image_files.image_folder(folder, classes=["dogs", "ants"])
    assert (source.class_names, source.labels().tolist()) == (("dogs", "ants"), [0, 1])
    with pytest.raises(ValueError, match=r"no directory for the class 'cat'. Did you mean cats"):
        image_files.image_folder(folder, classes=["cat"])


def test_without_labels_all_images_below_are_taken(folder):
    source = image_files.image_folder(folder, labels=False, channels=1)
    assert (source.cardinality, source.classes, source.labels) == (6, None, None)
    assert names(source)[-1] == f"file {folder}/loose.png"
    assert [x.shape[-1] for x in source.dataset()] == [1] * 6


def test_undecoded_images_are_the_files_content(folder):
    source = image_files.image_folder(folder, decode=False)
    x, y = source.read(tf.constant(4, tf.int64))
    assert x == source.raw(tf.constant(4, tf.int64)) == (folder / "dogs" / "1.png").read_bytes()
    assert y == 2
    assert source.element_spec == (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64))


def test_images_are_read_in_a_graph_without_python_functions(folder):
    source = image_files.image_folder(folder)
    numbers = tf.data.Dataset.range(source.cardinality)
    definition = (
        tf.function(source.read, input_signature=[tf.TensorSpec([], tf.int64)])
        .get_concrete_function()
        .graph.as_graph_def()
    )
    assert not any(node.op in ("PyFunc", "EagerPyFunc") for node in definition.node)
    assert len(list(numbers.map(source.read))) == 5


@pytest.mark.parametrize("content", [tf.io.encode_jpeg, tf.io.encode_png, "bmp", "gif"])
def test_kinds_of_images(tmp_path, content):
    if content == "bmp":
        head = (
            b"BM"
            + (54 + 12).to_bytes(4, "little")
            + bytes(4)
            + (54).to_bytes(4, "little")
            + (40).to_bytes(4, "little")
        )
        head += (
            (1).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"\x01\x00\x18\x00" + bytes(24)
        )
        stored = head + bytes([7] * 12)
    elif content == "gif":  # two pictures of 1 x 1
        one = b"\x2c\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02\x44\x01\x00"
        stored = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x07\x07\x07\xff\xff\xff" + one + one + b"\x3b"
    else:
        stored = content(picture(4, 6, 7)).numpy()
    write(tmp_path / "a" / ("1.bmp" if content == "bmp" else "1.gif"), stored)
    image, _ = next(iter(image_files.image_folder(tmp_path).dataset()))
    assert image.shape.rank == 3
    assert image[0, 0].numpy().tolist() == [7, 7, 7]


def test_errors_of_an_image_folder_are_named(tmp_path, folder):
    with pytest.raises(ValueError, match="nowhere: no such directory"):
        image_files.image_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"extensions: expected a tuple, such as \('.jpg',\)"):
        image_files.image_folder(folder, extensions=".jpg")
    with pytest.raises(ValueError, match="channels: expected 1, 3 or 4, received 2"):
        image_files.image_folder(folder, channels=2)
    write(tmp_path / "a" / "1.webp")
    write(tmp_path / "a" / "2.webp")
    write(tmp_path / "a" / ".x")
    with pytest.raises(
        ValueError,
        match=(
            r"none in its 1 class directories. Expected .*\.gif; ignored 3 others: 2 \.webp, "
            r"1 hidden"
        ),
    ):
        image_files.image_folder(tmp_path)
    with pytest.raises(ValueError, match="nor in the directories below"):
        image_files.image_folder(tmp_path, labels=False)
    write(tmp_path / "3.png")
    with pytest.raises(ValueError, match=r"1 are in .* itself: pass labels=False"):
        image_files.image_folder(tmp_path)
    write(tmp_path / "b" / "3.png")
    with pytest.raises(ValueError, match="a: a class directory without images"):
        image_files.image_folder(tmp_path)
    assert image_files.image_folder(tmp_path, classes=["b"]).cardinality == 1


def test_a_pipeline_reads_a_folder(folder):
    source = image_files.image_folder(folder, decode=False)
    pipeline = data.pipeline(source, 2, transform=transforms.images(8, augment=True))
    epochs = [[(x.numpy(), y.numpy().tolist()) for x, y in pipeline] for _ in range(2)]
    assert [x.shape for x, _ in epochs[0]] == [(2, 8, 8, 3), (2, 8, 8, 3), (1, 8, 8, 3)]
    assert [sorted(label for _, y in epoch for label in y) for epoch in epochs] == [
        [0, 1, 1, 1, 2]
    ] * 2


LISTING = "name,kind,path\nfirst,cat,cats/a.jpeg\n\nsecond,dog,dogs/1.png\nthird,cat,cats/a.jpeg\n"


def test_a_manifest_names_files_and_labels(folder, tmp_path):
    file = write(tmp_path / "list.csv", LISTING)
    source = image_files.manifest(file, root=folder, path_column="path", label_column="kind")
    assert (source.class_names, source.labels().tolist()) == (("cat", "dog"), [0, 1, 0])
    assert [(x.shape[0], int(y)) for x, y in source.dataset()] == [(20, 0), (10, 1), (20, 0)]
    assert names(source)[1] == f"file {folder}/dogs/1.png"
    alone = image_files.manifest(
        file, root=folder, path_column=2, label_column=None, header=True, decode=False
    )
    assert [len(x.numpy()) for x in alone.dataset()][1] == (
        folder / "dogs" / "1.png"
    ).stat().st_size


@pytest.mark.parametrize("separator", ["\t", ",", ";", "|"])
def test_a_manifest_without_header_beside_its_files(folder, separator):
    file = write(
        folder / "list.txt", f"cats/a.jpeg{separator}1\r\n{folder}/dogs/1.png{separator}0\r\n"
    )
    source = image_files.manifest(file, classes=["dog", "cat"])
    assert (source.class_names, source.labels().tolist()) == (("dog", "cat"), [1, 0])
    assert [x.shape[0] for x, _ in source.dataset()] == [20, 10]
    numbers = image_files.manifest(file)
    assert (numbers.classes, numbers.labels().tolist()) == (None, [1, 0])
    file.unlink()


@pytest.mark.parametrize(
    ("listing", "options", "message"),
    [
        ("path,kind\na.png,\n", {}, r"list.csv, line 2: the label is empty"),
        (
            "path,kind\na.png,3\n",
            {"classes": 3},
            r"expected labels from 0 to 2.*received 3 in line 2",
        ),
        ("path,kind\na.png,-1\n", {"classes": ["x"]}, r"received -1 in line 2"),
        (
            "path,kind\na.png,x\n",
            {"classes": 3},
            r"line 2: expected a label from 0 to 2, received 'x'",
        ),
        (
            "path,kind\n\na.png,dog\na.png,cta\na.png,y\n",
            {"classes": ["cat", "dog"]},
            r"line 4: expected one of the 2 classes, received the label 'cta' and 1 more such. "
            r"Did you mean cat",
        ),
        ("path,kind\na.png,x\n", {"classes": ["x", "x"]}, "'x' twice"),
        (
            "path,type\na.png,x\n",
            {},
            r"no column 'kind' in its first line. Expected one of path, type",
        ),
        (
            "path,kinds\na.png,x\n",
            {},
            r"no column 'kind' in its first line. It has path, kinds. Did you mean kinds",
        ),
        ("path,kind,kind\na.png,x,y\n", {}, "2 columns have the name 'kind'"),
        (
            "path,kind\na.png,x\nb.png,x,1\n",
            {},
            r"line 3: expected 2 columns, as in the first line, received 3",
        ),
        (
            "path,kind\na.png,x\nb.png,x\nc.png,x\n",
            {},
            r"line 3: 'b.png' does not exist, nor do the files of 1 more of 3 lines",
        ),
        ("path,kind\ndeep/b.png,x\n", {}, r"line 2: 'deep/b.png' does not exist of 1 lines"),
        ("path,kind\n", {}, "no rows beside the header"),
        ("", {}, "no rows. Expected one per line"),
        (b"path,kind\na.png,\xff\n", {}, "byte 16: expected text in UTF-8"),
        ('path,kind\na.png,"' + "x" * 200_000, {}, "a quote that is never closed"),
        ("path,kind\na.png,x\n", {"delimiter": ", "}, "expected one character"),
        (
            "path,kind\na.png,x\n",
            {"path_column": 0, "label_column": 1},
            r"line 1: 'path' does not exist.*Is that line a header",
        ),
        (
            "path,kind\na.png,x\n",
            {"path_column": 0, "label_column": 2},
            r"no column 2; expected 0 to 1",
        ),
    ],
)
def test_wrong_manifest_is_named(tmp_path, listing, options, message):
    file = write(tmp_path / "list.csv", listing)
    write(tmp_path / "a.png")
    with pytest.raises(ValueError, match=message):
        image_files.manifest(file, **{"path_column": "path", "label_column": "kind", **options})


def test_a_manifest_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.csv: no such file"):
        image_files.manifest(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="expected a file, received a directory"):
        image_files.manifest(tmp_path)


def test_check_for_missing_files_can_be_skipped(tmp_path):
    file = write(tmp_path / "list.csv", "none.png,0\n")
    source = image_files.manifest(file, check=False)
    with pytest.raises(tf.errors.NotFoundError, match=r"none.png"):
        source.read(tf.constant(0, tf.int64))


@pytest.fixture
def imagenet(tmp_path):
    """Write ImageNet's layout, with three classes."""
    png = tf.io.encode_jpeg(picture(6, 8, 90)).numpy()
    images = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    for name in (
        "train/n02/n02_7",
        "train/n01/n01_10",
        "val/ILSVRC2012_val_00000001",
        "test/ILSVRC2012_test_00000002",
    ):
        write(images / f"{name}.JPEG", png)
    write(tmp_path / "LOC_synset_mapping.txt", "n01 tench, Tinca tinca\nn03 crane\nn02 goldfish\n")
    write(
        tmp_path / "LOC_train_solution.csv",
        "ImageId,PredictionString\nn02_7,n02 115 49 448 294 n02 1 2 3 4 \nn01_10,n01 1 2 3 4 \n",
    )
    write(
        tmp_path / "LOC_val_solution.csv",
        "ImageId,PredictionString\nILSVRC2012_val_00000001,n03 1 2 3 4 \n",
    )
    return tmp_path


def test_imagenet(imagenet):
    train, val, test = (image_files.imagenet(imagenet, split) for split in ("train", "val", "test"))
    assert train.class_names == val.class_names == ("tench, Tinca tinca", "crane", "goldfish")
    assert [(x.shape[1], int(y)) for x, y in train.dataset()] == [(8, 2), (8, 0)]
    assert [(x.shape[1], int(y)) for x, y in val.dataset()] == [(8, 1)]
    assert [x.shape[1] for x in test.dataset()] == [8]
    with pytest.raises(ValueError, match=r"split: received 'valid'. Did you mean val"):
        image_files.imagenet(imagenet, "valid")


def test_wrong_imagenet_directory_is_named(imagenet):
    write(
        imagenet / "LOC_val_solution.csv",
        "ImageId,PredictionString\nILSVRC2012_val_00000001,n04 1 2 3 4 \n",
    )
    with pytest.raises(
        ValueError,
        match=(
            r"line 2: expected one of the 3 classes of .*LOC_synset_mapping.txt, received the "
            r"label 'n04'. Did you mean n03"
        ),
    ):
        image_files.imagenet(imagenet, "val")
    (imagenet / "ILSVRC/Data/CLS-LOC/train/n01/n01_10.JPEG").unlink()
    with pytest.raises(
        ValueError, match=r"LOC_train_solution.csv, line 3: 'n01/n01_10.JPEG' does not exist"
    ):
        image_files.imagenet(imagenet, "train")
    assert image_files.imagenet(imagenet, "train", check=False).cardinality == 2
    write(
        imagenet / "LOC_sample_submission.csv",
        "ImageId,PredictionString\nILSVRC2012_test_00000002,\nILSVRC2012_test_00000003,\n",
    )
    with pytest.raises(
        ValueError, match=r"submission.csv, line 3: 'ILSVRC2012_test_00000003.JPEG' does not exist"
    ):
        image_files.imagenet(imagenet, "test")
    assert image_files.imagenet(imagenet, "test", check=False).cardinality == 1
    write(imagenet / "LOC_synset_mapping.txt", "n01 a\nn01 b\n")
    with pytest.raises(ValueError, match="the class 'n01' appears twice"):
        image_files.imagenet(imagenet, "val")


TABLE = "city,age,rooms,price,zip\nParis,36,2,1.5,07\nRome,,3,2.5,08\nParis,41,1,3.5,09\n"


def test_a_table_is_held_in_memory(tmp_path):
    file = write(tmp_path / "houses.csv", TABLE)
    source = tables.table(file, label="price", types={"zip": "string", "rooms": "float32"})
    assert {name: spec.dtype for name, spec in source.element_spec[0].items()} == {
        "city": tf.string,
        "age": tf.float32,
        "rooms": tf.float32,
        "zip": tf.string,
    }
    x, y = source.gather(tf.constant([2, 1], tf.int64))
    np.testing.assert_array_equal(x["age"], [41, np.nan])
    assert x["zip"].numpy().tolist() == [b"09", b"08"]
    assert y.numpy().tolist() == [3.5, 2.5]
    assert (source.classes, source.labels) == (None, None)
    assert source.describe(tf.constant(1, tf.int64)) == f"{file}, line 3".encode()
    named = tables.table(file, features=["rooms"], label="city", classes=["Rome", "Paris"])
    assert named.labels().tolist() == [1, 0, 1]
    assert named.gather(tf.constant([0], tf.int64))[0]["rooms"].dtype == tf.int64
    one = tables.table(file, features="city", label="rooms", classes=4)
    assert [(x.numpy(), int(y)) for x, y in one.dataset()] == [
        (b"Paris", 2),
        (b"Rome", 3),
        (b"Paris", 1),
    ]
    assert [sorted(x) for x in tables.table(file, features=["age", "zip"]).dataset()] == [
        ["age", "zip"]
    ] * 3


def test_wrong_table_is_named(tmp_path):
    file = write(tmp_path / "houses.csv", TABLE)
    with pytest.raises(ValueError, match=r"line 3: expected int64 in column 'age', received ''"):
        tables.table(file, types={"age": "int64"})
    with pytest.raises(
        ValueError, match=r"line 2: expected float32 in column 'city', received 'Paris'"
    ):
        tables.table(file, types={"city": "float32"})
    with pytest.raises(ValueError, match=r"types\['age'\]: received 'int'. Did you mean int64"):
        tables.table(file, types={"age": "int"})
    with pytest.raises(ValueError, match=r"no column 'prize'.*Did you mean price"):
        tables.table(file, label="prize")
    with pytest.raises(ValueError, match=r"received 3 in line 3"):
        tables.table(file, label="rooms", classes=3)


def test_quotes_and_byte_order_marks(tmp_path):
    file = write(tmp_path / "quoted.csv", '\ufeff"a b",c\n"1,5","two\nlines"\n2,x\n')
    table = tables.read(file)
    assert table.names == ("a b", "c")
    assert table.columns == (["1,5", "2"], ["two\nlines", "x"])
    assert table.lines == [3, 4]
