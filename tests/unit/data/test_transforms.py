"""Test random resizing: the same seed gives the same image, whatever is around it."""

import pickle

import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.data import order, transforms
from tfdist.data.sources.source import of_arrays

AUGMENT = {"augment": True, "brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.1}


def gradient(height, width):
    """Return an image whose pixels say where they are: red by row, green by column."""
    y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    return tf.constant(np.stack([y, x, np.full_like(x, 50)], -1) % 256, tf.uint8)


def many(transform, image, count):
    """Return the results of a transform for `count` seeds."""
    dataset = tf.data.Dataset.range(count).map(
        lambda i: transform(image, seed=tf.stack([tf.cast(i, tf.int32), 7]))
    )
    return np.array(list(dataset))


@pytest.fixture(scope="module")
def jpegs():
    """Return twelve encoded images: two sizes, most JPEG and some PNG."""
    shapes = [(50, 70), (64, 48)] * 6
    return [
        (tf.io.encode_png if i % 5 == 4 else tf.io.encode_jpeg)(
            tf.roll(gradient(*shape), i * 9, 1)
        ).numpy()
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
@pytest.mark.parametrize("crop", ["random", "center", "none"])
def test_images_get_their_size_and_type(crop, dtype):
    transform = transforms.Images((20, 30), crop=crop, dtype=dtype)
    for shape in ((50, 70), (1, 1), (3, 400), (20, 30)):
        image, label = transform(gradient(*shape), 3, seed=[1, 2])
        assert (image.shape, image.dtype, label) == ((20, 30, 3), dtype, 3)


def test_static_shape_is_set():
    dataset = tf.data.Dataset.from_tensors(b"").map(
        lambda x: transforms.images((20, 30), augment=True)(x, seed=[1, 2])
    )
    assert dataset.element_spec == tf.TensorSpec([20, 30, 3], tf.float32)


@pytest.mark.parametrize("crop", ["random", "center", "none"])
@pytest.mark.parametrize("known", [3, None])
def test_static_channels_of_pixels_are_set(known, crop):
    """A convolution fails on images of unknown channels, whatever their pixels are."""
    transform = transforms.images(8, crop=crop, brightness=0.1, hue=0.1)
    dataset = tf.data.Dataset.from_generator(
        lambda: [gradient(20, 30)], output_signature=tf.TensorSpec([None, None, known], tf.uint8)
    ).map(lambda x: transform(x, seed=[1, 2]))
    assert dataset.element_spec == tf.TensorSpec([8, 8, 3], tf.float32)
    assert len(list(dataset)) == 1


def test_pixels_of_other_channels_than_declared_are_refused():
    dataset = tf.data.Dataset.from_generator(
        lambda: [gradient(20, 30)[..., :1]],
        output_signature=tf.TensorSpec([None, None, None], tf.uint8),
    ).map(transforms.images(8))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[\?,\?,3\]"):
        list(dataset)


@pytest.mark.parametrize("options", [{}, {"crop": "none"}, AUGMENT])
@pytest.mark.parametrize("quality", [60, 100])
def test_a_crop_decoded_alone_is_the_crop_of_the_whole(options, quality):
    file = tf.io.encode_jpeg(gradient(150, 200), quality=quality, chroma_downsampling=quality < 100)
    transform = transforms.images(32, shrink=False, **options)
    for seed in range(5):
        alone = transform(file, seed=[seed, 1])
        whole = transform(tf.io.decode_image(file, expand_animations=False), seed=[seed, 1])
        np.testing.assert_allclose(alone[:, 1:-1], whole[:, 1:-1], atol=1)


def test_shrinking_changes_pixels_little():
    file = tf.io.encode_jpeg(
        tf.cast(tf.image.resize(gradient(30, 40) * 3, (480, 640)), tf.uint8), quality=100
    )
    for size in (220, 100, 50, 20):  # decoded at 1/1, 1/2, 1/4, 1/8
        small, exact = (transforms.Images(size, shrink=shrink)(file) for shrink in (True, False))
        assert (size < 220) == bool(np.any(small != exact))
        assert np.abs(small - exact).mean() < 4


def test_other_files_than_jpeg_are_decoded():
    image = gradient(40, 60)
    np.testing.assert_array_equal(
        transforms.Images(20)(tf.io.encode_png(image)), transforms.Images(20)(image)
    )
    alpha = tf.io.encode_png(tf.concat([image, image[..., :1]], -1))
    assert transforms.Images(20, channels=4)(alpha).shape == (20, 20, 4)
    assert transforms.Images(20, channels=1)(alpha).shape == (20, 20, 1)


def test_the_centre_is_cut_out_in_the_shape_of_the_result():
    image = transforms.Images((10, 20), fraction=0.5, method="nearest")(gradient(100, 160))
    # The largest part of shape 1:2 is 80 x 160, half of it 40 x 80, around (50, 80).
    assert (image[..., 0] >= 30).numpy().all()
    assert (image[..., 0] < 70).numpy().all()
    assert (image[..., 1] >= 40).numpy().all()
    assert (image[..., 1] < 120).numpy().all()
    assert image[-1, -1, 0] - image[0, 0, 0] == 36
    assert image[-1, -1, 1] - image[0, 0, 1] == 76


def test_random_crops_have_the_areas_and_aspects_asked_for():
    crop = transforms.Images(8, crop="random", area=(0.2, 0.5), aspect=(0.5, 2.0))
    windows = many(
        lambda shape, seed: tf.concat(crop._window(shape, seed), 0), tf.constant([200, 240, 3]), 300
    )
    top, left, _, height, width, _ = windows.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 200).all()
    assert (left + width <= 240).all()
    area = height * width / (200 * 240)
    aspect = width / height
    assert 0.19 < area.min() < 0.23
    assert 0.46 < area.max() < 0.51
    assert 0.49 < aspect.min() < 0.7
    assert 1.6 < aspect.max() < 2.02
    assert len(np.unique(windows, axis=0)) == 300


def test_every_other_image_is_flipped():
    image = gradient(8, 8)
    results = many(transforms.Images(8, crop="none", flip=True), image, 100)
    mirrored = (results == image.numpy()[:, ::-1]).all((1, 2, 3))
    assert (mirrored | (results == image.numpy()).all((1, 2, 3))).all()
    assert 35 < mirrored.sum() < 65


def test_crop_and_flip_are_drawn_independently():
    columns = many(
        transforms.Images(8, crop="random", flip=True, area=(0.1, 0.9)), gradient(100, 100), 200
    )[..., 1]
    mirrored = columns[:, 0, 0] > columns[:, 0, -1]
    left = columns.mean((1, 2)) < 50
    assert np.unique(2 * mirrored + left, return_counts=True)[1].min() > 25


def test_option_leaves_the_random_draws_of_others_unchanged():
    file = gradient(40, 60) // 2 + 60
    crops = transforms.Images(16, crop="random")(file, seed=[1, 2])
    flips = transforms.Images(16, crop="random", flip=True)(file, seed=[1, 2])
    assert np.array_equal(crops, flips) or np.array_equal(crops, flips[:, ::-1])
    bright = transforms.Images(16, crop="random", flip=True, brightness=0.1)(file, seed=[1, 2])
    assert np.ptp(bright - flips) < 1e-3


def test_colours():
    image = tf.concat([tf.fill([8, 4, 3], 100.0), tf.ones([8, 4, 1]) * [140.0, 100.0, 60.0]], 1)

    def drawn(**options):
        return many(transforms.Images(8, crop="none", **options), image, 40)

    brightness = drawn(brightness=0.1) - image.numpy()
    assert np.ptp(brightness, axis=(1, 2, 3)).max() < 1e-3
    assert -25.6 < brightness.min() < -15 < 15 < brightness.max() < 25.6
    contrast = drawn(contrast=0.5)
    np.testing.assert_allclose(
        contrast.mean((1, 2)), np.broadcast_to(np.mean(image, (0, 1)), [40, 3]), atol=1e-2
    )
    spread = np.ptp(contrast[..., 0], axis=(1, 2)) / 40
    assert 0.5 < spread.min() < 0.7 < 1.3 < spread.max() < 1.5
    grey = np.array([0.299, 0.587, 0.114])
    for options in ({"saturation": 0.5}, {"hue": 0.25}):
        changed = drawn(**options)
        np.testing.assert_allclose(changed[:, :, :4], 100, atol=1e-2)  # grey stays grey
        np.testing.assert_allclose(
            changed @ grey, np.broadcast_to(image.numpy() @ grey, [40, 8, 8]), atol=1e-2
        )
        assert np.std(changed[:, 0, -1, 0]) > 5


def test_mean_and_deviation_are_those_of_each_channel():
    image = gradient(10, 10)
    scaled = transforms.Images(10, crop="none", **transforms.IMAGENET)(image)
    np.testing.assert_allclose(
        scaled,
        (image.numpy() - transforms.IMAGENET["mean"]) / transforms.IMAGENET["std"],
        atol=1e-5,
    )
    np.testing.assert_allclose(
        transforms.Images(10, crop="none", std=255)(image[..., :1]),
        image.numpy()[..., :1] / 255,
        atol=1e-6,
    )


def test_bytes_are_rounded_and_never_wrap_around():
    sharp = tf.cast(
        tf.image.resize(tf.constant([[[0.0], [255.0]], [[255.0], [0.0]]]), [40, 40], "nearest"),
        tf.uint8,
    )
    result = transforms.Images(64, crop="none", method="bicubic", dtype="uint8")(sharp).numpy()
    assert result[0, 0, 0] < 5
    assert result[0, -1, 0] > 250
    exact = transforms.Images(64, crop="none")(sharp)
    np.testing.assert_array_equal(
        transforms.Images(64, crop="none", dtype="uint8")(sharp), np.floor(exact + 0.5)
    )


def test_the_same_seed_epoch_and_number_give_the_same_bits(jpegs):
    """Neither the batch, nor the order, nor a graph changes them."""
    transform = transforms.images(24, **AUGMENT)
    source = of_arrays((np.array(jpegs, object), np.arange(12)))

    def seen(pipeline, epoch):
        pipeline.epochs.next = epoch
        return {
            int(number): image.numpy()
            for x, y in pipeline
            for image, number in zip(x, y, strict=True)
        }

    pipeline = data.pipeline(source, 5, seed=7, transform=transform)
    reference = seen(pipeline, 2)
    assert sorted(reference) == list(range(12))
    again = seen(data.pipeline(source, 12, seed=7, shuffle=False, transform=transform), 2)
    for number, image in reference.items():
        np.testing.assert_array_equal(again[number], image)
        np.testing.assert_array_equal(
            transform(jpegs[number], seed=order.example_seeds(7, 2, number)), image
        )
    for other in (
        seen(pipeline, 3),
        seen(data.pipeline(source, 5, seed=8, transform=transform), 2),
    ):
        assert all(np.any(other[number] != image) for number, image in reference.items())


def test_a_transform_is_a_value():
    transform = transforms.images(24, **AUGMENT)
    assert pickle.loads(pickle.dumps(transform)) == transform
    assert (transform.random, transforms.images(24).random) == (True, False)
    assert transforms.images(24, augment=True, flip=False) == transforms.Images(24, crop="random")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (3, 0)}, "size: expected height and width"),
        ({"crop": "centre"}, "crop: received 'centre'. Did you mean center"),
        ({"method": "linear"}, "method: received 'linear'. Did you mean bilinear"),
        ({"area": (0.5, 0.1)}, "area: expected two fractions"),
        ({"aspect": (0, 1)}, "aspect: expected two ratios"),
        ({"fraction": 1.5}, "fraction: expected a fraction"),
        ({"hue": 0.7}, "hue: expected a number from 0 to 0.5"),
        ({"brightness": -1}, "brightness: expected a number from 0 to 1"),
        ({"channels": 2}, "channels: expected 1, 3 or 4"),
        ({"dtype": "int32"}, 'dtype: expected "uint8" or a floating type'),
        ({"dtype": "uint8", "std": 255}, "received mean or std"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        transforms.images(**{"size": 8, **options})


def test_bad_images_are_refused():
    with pytest.raises(ValueError, match="a random transform needs a seed"):
        transforms.images(8, augment=True)(gradient(9, 9))
    with pytest.raises(ValueError, match="received features image, label"):
        transforms.images(8)({"image": gradient(9, 9), "label": 3})
    with pytest.raises(ValueError, match=r"received uint8 of shape \(9, 9\)"):
        transforms.images(8)(gradient(9, 9)[..., 0])
    with pytest.raises(
        ValueError, match="mean: expected one number, or one for each of 1 channels"
    ):
        transforms.images(8, **transforms.IMAGENET)(gradient(9, 9)[..., :1])
    with pytest.raises(
        ValueError, match="expected images of 3 channels, or 1 for the first two; received 1"
    ):
        transforms.images(8, hue=0.1)(gradient(9, 9)[..., :1], seed=[1, 2])


@pytest.mark.parametrize(
    "damage", [lambda file: file[: len(file) // 2], lambda file: b"", lambda file: b"text" + file]
)
def test_damaged_files_are_errors(jpegs, damage):
    with pytest.raises(tf.errors.InvalidArgumentError):
        transforms.images(8, crop="none")(damage(jpegs[0]))


def test_truncated_file_is_an_error_for_any_crop():
    file = tf.io.encode_jpeg(gradient(200, 200)).numpy()
    top = transforms.Images(8, crop="random", area=(0.08, 0.1))
    assert (
        many(lambda x, seed: top._window(tf.constant([200, 200, 3]), seed)[0], 0, 20)[:, 0].min()
        < 40
    )
    for seed in range(20):
        with pytest.raises(tf.errors.InvalidArgumentError):
            top(file[:-500], seed=[seed, 7])
        assert top(file + b"trailing", seed=[seed, 7]).shape == (8, 8, 3)


def test_seeds_from_one_differ_and_follow_from_it():
    rows = tf.constant([[1, 2], [3, 4], [1, 3]])
    together = transforms.seeds_for(rows, 4)
    assert [x.shape for x in together] == [(3, 2)] * 4
    one_by_one = [
        tf.stack(parts)
        for parts in zip(*(transforms.seeds_for(row, 4) for row in rows), strict=True)
    ]
    np.testing.assert_array_equal(together, one_by_one)
    assert len({tuple(seed) for seed in np.reshape(together, [-1, 2]).tolist()}) == 12
    # A known value: SplitMix64's first three from the state 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(tf.bitcast(x, tf.uint64)) for x in transforms.seeds_for([1234567, 0], 3)] == known


def test_a_chain_gives_each_its_own_seed():
    seeds = []

    def note(x, y, seed):
        seeds.append(seed.numpy().tolist())
        return x, y

    chained = transforms.chain(note, lambda x, y: (x * 2, y), note, transforms.chain(note, note))
    assert chained(3, 4, seed=tf.constant([1, 2])) == (6, 4)
    assert len({tuple(seed) for seed in seeds}) == 4
    first = list(seeds)
    chained(3, 4, seed=tf.constant([1, 2]))
    assert seeds[4:] == first
    assert transforms.chain(lambda x: x + 1, lambda x: (x, x))(1) == (2, 2)
    by_rows = transforms.chain(
        lambda x, seeds: x + tf.cast(seeds[:, 0], tf.int64),
        lambda x, seeds: x + tf.cast(seeds[:, 0], tf.int64),
    )
    batches = list(data.pipeline(np.zeros(6, np.int64), 3, batch_transform=by_rows))
    assert len(np.unique(batches)) == 6
    with pytest.raises(ValueError, match="expected transforms that all take `seed`"):
        transforms.chain(lambda x, seed: x, lambda x, seeds: x)


def test_chain_of_transforms_runs_in_a_data_pipeline(jpegs):
    noise = lambda x, y, seed: (x + tf.random.stateless_uniform([], seed), y)  # noqa: E731
    both = transforms.chain(transforms.images(8, augment=True), noise, lambda x, y: (x / 255, y))
    batches = list(data.pipeline((np.array(jpegs, object), np.arange(12)), 12, transform=both))
    assert batches[0][0].shape == (12, 8, 8, 3)
    assert np.max(batches[0][0]) <= 1.01
