"""Test that a convolution trains on images of their own sizes, from every kind of data set."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.first_states import repeatable
from tfdist import config, data
from tfdist.config.sections import IMAGE_OPTIONS
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


@pytest.fixture(scope="module")
def model_of():
    """Return a function that returns a strategy's model in its first state: each is traced once."""
    models = {}

    def make(run, strategy, batches):
        if id(strategy) not in models:
            model = build.make_model(run, strategy, batches)
            with strategy.scope():
                models[id(strategy)] = repeatable(model)
        return models[id(strategy)]()

    return make


def trained(catalog, kind, strategy, model_of, transform=None):
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
    model = model_of(run, strategy, batches)
    return model.fit(batches, epochs=2, verbose=0).history["loss"]


def test_every_kind_of_images_trains_a_convolution_to_the_same_numbers(catalog, mirrored, model_of):
    losses = [trained(catalog, kind, mirrored, model_of) for kind in KINDS]
    assert losses == [losses[0]] * 4
    first, second = losses[0]
    assert 0.3 < first < 1.5
    assert second != first


def test_written_images_train_with_brightness_and_hue(catalog, mirrored, one_device, model_of):
    transform = data.transforms.images(8, augment=True, brightness=0.2, hue=0.1)
    losses = trained(catalog, "written", mirrored, model_of, transform)
    expected = trained(catalog, "images", one_device, model_of, transform)
    assert losses == pytest.approx(expected, rel=1e-5)


def one_batch(catalog, split="train", **section):
    """Return the first batch of the folder's pictures, with these settings."""
    run = config.Run.from_dict(
        {"data": {"name": "images", "catalog": str(catalog), "eval_split": "train", **section}}
    )
    return next(iter(input_pipeline.pipeline(run, split)))


def test_options_of_images_serve_training_and_evaluation_or_training_alone(catalog):
    both = {"image_size": 4, "image_options": {"mean": 255.0}, "global_batch": 2}
    alone = {"augment": True, "augment_options": {"crop": "none", "flip": False, "hue": 0.5}}
    train, _ = one_batch(catalog, **both)
    coloured, _ = one_batch(catalog, **both, **alone)
    evaluated, _ = one_batch(catalog, "eval", **both, **alone)
    assert train.shape == (2, 4, 4, 3)
    assert tf.reduce_max(train) < 0
    assert tf.reduce_max(tf.abs(coloured - train)) > 10
    whole, _ = one_batch(catalog, "eval", **{**both, "image_options": {"crop": "none"}})
    plain, _ = one_batch(catalog, "eval", **{**both, "image_options": {}})
    np.testing.assert_allclose(evaluated, plain - 255, atol=1e-3)
    assert tf.reduce_max(tf.abs(whole - plain)) > 1


def test_classes_are_chosen_for_both_splits(catalog):
    for split in ("train", "eval"):
        _, labels = one_batch(catalog, split, classes="light", image_size=4, global_batch=4)
        assert labels.numpy().tolist() == [0] * 4


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"augment": True}, "data.augment: expected data.image_size too, received True"),
        (
            {"image_size": 4, "augment_options": {"hue": 0.1}},
            "data.augment_options: expected data.augment too",
        ),
        (
            {"image_size": 4, "image_options": {"brightnes": 1}},
            "data.image_options: received 'brightnes'. Did you mean brightness",
        ),
        (
            {"image_size": 4, "image_options": {"hue": 3}},
            "data.image_options: hue: expected a number from 0 to 0.5; received 3",
        ),
        ({"image_size": 4, "image_options": {"hue": "a"}}, "data.image_options: "),
        ({"image_size": 0}, "data.image_size: expected at least 1, received 0"),
    ],
)
def test_wrong_options_of_images_are_named(catalog, section, message):
    with pytest.raises(ValueError, match=message):
        one_batch(catalog, **section)


def test_options_of_images_are_those_of_the_transform():
    fields = [field.name for field in dataclasses.fields(data.transforms.Images)]
    assert [*IMAGE_OPTIONS] == fields[1:]


def test_errors_of_the_pipeline_name_keys(catalog, monkeypatch):
    monkeypatch.delenv("TFDIST_DATA_WORKERS", raising=False)
    section = {"name": "images", "catalog": str(catalog), "global_batch": 4, "image_size": 8}
    run = config.Run.from_dict({"data": {**section, "service": True}})
    with pytest.raises(
        ValueError, match=r"^data\.service=True: expected data workers.*data\.service=False"
    ):
        input_pipeline.pipeline(run)
