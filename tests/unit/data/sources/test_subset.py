"""Test that a source can be limited to some classes, whose labels are renumbered."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.data.sources.source import Source, of_arrays
from tfdist.data.sources.subset import of_classes

LABELS = np.array([3, 0, 1, 2, 3, 1])


@pytest.fixture
def arrays():
    source = of_arrays((np.arange(6) * 10, LABELS, np.arange(6) / 10), classes=4)
    return dataclasses.replace(source, class_names=("ant", "bee", "cat", "dog"))


@pytest.fixture
def folder(tmp_path):
    """Return a source of two images of each of three classes; their pixels are 10 * class."""
    for number, name in enumerate(("ant", "bee", "cat")):
        (tmp_path / name).mkdir()
        for image in range(2):
            pixels = tf.fill([2, 2, 3], tf.constant(10 * number + image, tf.uint8))
            (tmp_path / name / f"{image}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    return data.image_folder(tmp_path)


@pytest.mark.parametrize(
    ("classes", "expected", "names"),
    [
        ("1:3", [(20, 0), (30, 1), (50, 0)], ("bee", "cat")),
        ("dog, 0", [(0, 1), (10, 0), (40, 1)], ("ant", "dog")),
        (
            "0:4",
            [(0, 3), (10, 0), (20, 1), (30, 2), (40, 3), (50, 1)],
            ("ant", "bee", "cat", "dog"),
        ),
    ],
)
def test_examples_of_the_classes_stay_with_new_labels(arrays, classes, expected, names):
    subset = of_classes(arrays, classes)
    assert [(int(x), int(y)) for x, y, _ in subset.dataset()] == expected
    assert [round(10 * float(w)) for *_, w in subset.dataset()] == [x // 10 for x, _ in expected]
    assert subset.class_names == names
    assert (subset.classes, subset.cardinality) == (len(names), len(expected))
    assert subset.labels().tolist() == [y for _, y in expected]


@pytest.mark.parametrize("cache", [False, True])
def test_images_and_labels_stay_together(folder, cache):
    batches = data.pipeline(
        of_classes(folder, "cat,ant"),
        4,
        seed=1,
        cache=cache,
        transform=data.transforms.images(2, crop="none"),
    )
    for _ in range(2):
        ((images, labels),) = list(batches)
        pixels = images.numpy()[:, 0, 0, 0].tolist()
        assert sorted(pixels) == [0, 1, 20, 21]
        assert labels.numpy().tolist() == [pixel // 20 for pixel in pixels]


def test_place_of_an_example_is_that_of_its_file(folder):
    place = of_classes(folder, "2").describe(tf.constant(1, tf.int64)).numpy().decode()
    assert place.endswith("cat/1.png")


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("2:9", r"expected classes of the 4 from 0 to 3, received '2:9'"),
        ("3:3", r"received '3:3'"),
        ("cow", r"expected numbers such as 7, .* received 'cow'. Did you mean dog|cat"),
        ("1:b", r"received '1:b'"),
        ("", r"expected at least one class, received ''"),
    ],
)
def test_wrong_classes_are_named(arrays, classes, message):
    with pytest.raises(ValueError, match=f"data.classes: .*{message}"):
        of_classes(arrays, classes)


def test_class_without_examples_is_named():
    source = of_arrays((np.arange(6), LABELS), classes=6)
    with pytest.raises(ValueError, match=r"data.classes: .* has none of class 5"):
        of_classes(source, "3,5")


def test_labels_must_be_known():
    source = Source.of(tf.data.Dataset.from_tensor_slices((np.arange(6), LABELS)))
    with pytest.raises(ValueError, match=r"data.classes: .* received tf.data.Dataset"):
        of_classes(source, "1")
