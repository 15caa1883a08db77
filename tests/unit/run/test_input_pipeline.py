"""Test that a convolution trains on images of their own sizes, from every kind of data set."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist import config, data
from tfdist.data.sources.catalog import Catalog
from tfdist.run import build, input_pipeline

KINDS = ("images", "manifest", "imagenet", "written")
CATALOG = """\
images: {kind: images, location: images}
manifest: {kind: manifest, location: list.csv, root: images}
imagenet: {kind: imagenet, location: imagenet, splits: {train: train}}
written: {kind: records, location: written}
"""


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    """Write eight pictures as a folder, a manifest, ImageNet, and records of the folder."""
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(2)
    listing = []
    solution = ["ImageId,PredictionString"]
    for number, size in enumerate([(9, 12), (16, 10), (8, 8), (20, 11)] * 2):
        label = ("dark", "light")[number // 4]
        pixels = random.integers(number // 4 * 130, number // 4 * 130 + 120, [*size, 3])
        jpeg = tf.io.encode_jpeg(pixels.astype(np.uint8)).numpy()
        name = f"{label}/{label}_{number}"
        for path in (f"images/{name}.jpg", f"imagenet/ILSVRC/Data/CLS-LOC/train/{name}.JPEG"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(jpeg)
        listing.append(f"{name}.jpg,{label}")
        solution.append(f"{label}_{number},{label} 1 2 3 4")
    (root / "list.csv").write_text("\n".join(listing))
    (root / "imagenet/LOC_train_solution.csv").write_text("\n".join(solution))
    (root / "imagenet/LOC_synset_mapping.txt").write_text("dark a night\nlight a day\n")
    data.write(data.image_folder(str(root / "images")), root / "written")
    (root / "datasets.yaml").write_text(CATALOG)
    return root / "datasets.yaml"


def trained(catalog, kind, strategy, transform=None):
    """Return the loss of each of two epochs, with these settings or a transform of the user's."""
    section = {"name": kind, "catalog": str(catalog), "global_batch": 4}
    if transform is None:
        section |= {"image_size": 8, "augment": True}
    run = config.Run.from_dict(
        {
            "data": section,
            "model": {"name": "cnn", "options": {"filters": (2,), "units": 4}},
            "train": {"learning_rate": 0.01},
        }
    )
    if transform is None:
        batches = input_pipeline.pipeline(run)
    else:
        batches = data.pipeline(
            Catalog.load(catalog).source(kind, "train"), 4, transform=transform, seed=0
        )
    assert input_pipeline.shapes(batches) == ((8, 8, 3), 2)
    model = build.make_model(run, strategy, batches)
    return model.fit(batches, epochs=2, verbose=0).history["loss"]


def test_every_kind_of_images_trains_a_convolution_to_the_same_numbers(catalog, mirrored):
    losses = [trained(catalog, kind, mirrored) for kind in KINDS]
    assert losses == [losses[0]] * 4
    first, second = losses[0]
    assert 0.3 < first < 1.5
    assert second != first


def test_written_images_train_with_brightness_and_hue(catalog, mirrored, one_device):
    transform = data.transforms.images(8, augment=True, brightness=0.2, hue=0.1)
    losses = trained(catalog, "written", mirrored, transform)
    assert losses == pytest.approx(trained(catalog, "images", one_device, transform), rel=1e-5)
