"""Deterministic image transforms and seed utilities for single examples.

`pipeline(transform=...)` calls transforms with an example and a seed that follows from (seed,
epoch, number of the example). Transforms keep no state, so that the same seed gives the same
result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.data.sources.source import call, takes

__all__ = ["IMAGENET", "Images", "chain", "decode_image", "images", "seeds_for"]

IMAGENET: Mapping[str, Any] = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
"""Mean and standard deviation of ImageNet's pixels (0 to 255): `images(224, **IMAGENET)`."""

_CROPS = ("random", "center", "none")
# Interpolation methods whose pixels stay within the range of the pixels they are computed from.
_BOUNDED_METHODS = ("area", "bilinear", "gaussian", "nearest")
_METHODS = (*_BOUNDED_METHODS, "bicubic", "lanczos3", "lanczos5", "mitchellcubic")
# Attempts to find a random crop before the whole image is taken.
_TRIES = 10
# Largest factor by which libjpeg can shrink an image while it decodes.
_SHRINK = 8
# Hue and saturation change in YIQ space: its first number is a pixel's grey level, the others are a
# point in the colour plane. These are three maps of pixels, `[n, 3] @`: to their grey level, to
# their colour without grey, and to that colour rotated by a quarter of a circle.
_YIQ = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_GREY, _COLOUR, _QUARTER = (
    (np.linalg.inv(_YIQ) @ np.array(part) @ _YIQ).T.astype(np.float32)
    for part in (
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0, 0, 0], [0, 0, -1], [0, 1, 0]],
    )
)
# XOR mask that derives a second seed. The result is never the seed of another example, because the
# numbers of examples differ from each other in few of the upper bits.
_COLOUR_SEED_MASK = (0x2545F491, 0x4F6CDD1D)


def images(size: int | tuple[int, int], *, augment: bool = False, **options: Any) -> Images:
    """Return a transform to images of one size: random for training, fixed for evaluation.

    Args:
        size: Height and width in pixels, or one number for both.
        augment: Whether to take a random crop (`crop="random"`) and flip half of the images at
            random (`flip=True`), unless `options` say otherwise; default: False.
        **options: Other attributes of `Images`.

    Returns:
        The transform.

    Raises:
        ValueError: If a value is invalid.

    Example:
        >>> train = images(224, augment=True, brightness=0.2, **IMAGENET)
        >>> x, y = train(tf.zeros([375, 500, 3], tf.uint8), 7, seed=[1, 2])
        >>> x.shape, y
        (TensorShape([224, 224, 3]), 7)
    """
    return Images(size, **{**({"crop": "random", "flip": True} if augment else {}), **options})


@dataclasses.dataclass(frozen=True)
class Images:
    """Transform to images of one size; `images` is a shortcut with common settings.

    You call it with an image, or with an image and its label or other data, which stays unchanged.
    The image is either pixels from 0 to 255, `[height, width, channels]`, or the content of its
    file, a string scalar. Only the part of a JPEG file that the crop needs is decoded, which is
    faster. The pixels are the pixels of the whole image, except that the crop's first column may
    differ by some grey levels. A JPEG file without the proper end marker is decoded as a whole, so
    that a truncated file is an error, whatever the crop.

    Attributes:
        size: Height and width of the result in pixels, or one number for both.
        crop: Part of the image. "random": a part of random area and aspect ratio, as ResNet and
            Inception are trained with. "center" (default): the largest part of the result's aspect
            ratio around the centre, times `fraction`. "none": the whole image; its aspect ratio
            changes.
        area: Smallest and largest fraction of the image's area, for "random".
        aspect: Smallest and largest ratio of width to height, for "random".
        fraction: Fraction of the height and width, for "center"; 0.875 is a crop of 224 from 256.
        flip: Whether to mirror half of the images at random, left and right.
        brightness: Largest value that is added to or subtracted from all pixels, as a fraction of
            255.
        contrast: Range of the contrast factor: distances from the image's mean are multiplied by a
            number from 1 - contrast to 1 + contrast.
        saturation: Range of the saturation factor: distances of colours from grey are multiplied by
            a number from 1 - saturation to 1 + saturation.
        hue: Largest rotation of the colours around the grey axis, as a fraction of a circle, up to
            0.5, in either direction.
        mean: Value subtracted from the pixels (from 0 to 255); one number, or one for each channel.
        std: Value that the pixels are divided by afterwards; one number, or one for each channel.
        dtype: Type of the result. "uint8": pixels from 0 to 255, rounded. It takes a quarter of the
            memory, and a model's `Rescaling` layer is faster on the device than `mean` and `std`
            are here.
        channels: Number of channels that files are decoded to, and of images whose number of
            channels the graph does not know: 1, 3 or 4.
        method: Interpolation method of `tf.image.resize`.
        antialias: Whether `tf.image.resize` smooths images that it makes smaller.
        shrink: Whether a JPEG's crop is decoded at 1/2, 1/4 or 1/8 of its size if it is that many
            times larger than the result; faster, and smoother than "bilinear" without `antialias`.

    Raises:
        ValueError: If a value is invalid.

    Example:
        >>> file = tf.io.encode_jpeg(tf.zeros([375, 500, 3], tf.uint8))
        >>> Images((96, 128), dtype="uint8")(file).shape
        TensorShape([96, 128, 3])
    """

    size: int | tuple[int, int]
    crop: str = "center"
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    fraction: float = 0.875
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    dtype: str = "float32"
    channels: int = 3
    method: str = "bilinear"
    antialias: bool = False
    shrink: bool = True

    def __post_init__(self) -> None:
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        _check(
            "size",
            self.size,
            len(size) == 2 and all(side >= 1 for side in size),
            "height and width, in pixels",
        )
        for name, choices in (("crop", _CROPS), ("method", _METHODS)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}: received {getattr(self, name)!r}. "
                    f"{config.nearest(str(getattr(self, name)), choices)}"
                )
        _check(
            "area",
            self.area,
            len(self.area) == 2 and 0 < self.area[0] <= self.area[1] <= 1,
            "two fractions between 0 and 1, the lesser first",
        )
        _check(
            "aspect",
            self.aspect,
            len(self.aspect) == 2 and 0 < self.aspect[0] <= self.aspect[1],
            "two ratios, the lesser first",
        )
        _check(
            "fraction",
            self.fraction,
            0 < self.fraction <= 1,
            "a fraction, more than 0 and at most 1",
        )
        for name, maximum in (("brightness", 1), ("contrast", 1), ("saturation", 1), ("hue", 0.5)):
            _check(
                name,
                getattr(self, name),
                0 <= getattr(self, name) <= maximum,
                f"a number from 0 to {maximum}",
            )
        _check("channels", self.channels, self.channels in (1, 3, 4), "1, 3 or 4")
        dtype = tf.as_dtype(self.dtype)
        _check(
            "dtype",
            self.dtype,
            dtype.is_floating or dtype == tf.uint8,
            '"uint8" or a floating type',
        )
        if dtype == tf.uint8 and self._scales:
            raise ValueError(
                'dtype="uint8": expected pixels from 0 to 255, received mean or std. Remove them, '
                'or pass dtype="float32".'
            )

    @property
    def random(self) -> bool:
        """Return whether the result depends on the seed."""
        return self.crop == "random" or self.flip or self._colours

    @property
    def _colours(self) -> bool:
        return any((self.brightness, self.contrast, self.saturation, self.hue))

    @property
    def _scales(self) -> bool:
        return bool(np.any(self.mean) or np.any(np.not_equal(self.std, 1)))

    def __call__(self, image: Any, *rest: Any, seed: Any = None) -> Any:
        """Transform one image.

        Args:
            image: Pixels `[height, width, channels]`, or a file's content.
            *rest: Other parts of the example, such as its label.
            seed: Seed, int32 `[2]`; required if `random`.

        Returns:
            The image `[*size, channels]`; with `rest`, a tuple.
        """
        if self.random and seed is None:
            raise ValueError(
                "images: a random transform needs a seed. Pass it as transform= to "
                "tfdist.data.pipeline, not to Source.map."
            )
        if isinstance(image, Mapping):
            raise ValueError(
                f"images: expected an image, received features {', '.join(map(str, image))}. "
                'Select the image first: source.map(lambda x: (x["image"], x["label"])).'
            )
        image = tf.convert_to_tensor(image)
        if image.shape.rank not in (None, 0 if image.dtype == tf.string else 3):
            raise ValueError(
                "images: expected pixels [height, width, channels], or a file's content; received "
                f"{image.dtype.name} of shape {image.shape}."
            )
        # Cheaper than seeds_for.
        crop_seed, colour_seed = (
            (seed, tf.cast(seed, tf.int32) ^ _COLOUR_SEED_MASK) if self.random else (None, None)
        )
        cropped = (
            self._decode(image, crop_seed)
            if image.dtype == tf.string
            else self._cut(image, crop_seed)
        )
        result = self._finish(cropped, colour_seed)
        return (result, *rest) if rest else result

    @property
    def _height_and_width(self) -> tuple[int, int]:
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        return height, width

    def _window(self, shape: tf.Tensor, seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the crop of an image: its origin and its size.

        Both are int32 `[3]`, as `tf.slice` takes them.
        """
        if self.crop == "random":
            begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
                shape,
                tf.zeros([1, 0, 4]),
                seed,
                min_object_covered=0.0,
                aspect_ratio_range=self.aspect,
                area_range=self.area,
                max_attempts=_TRIES,
                use_image_if_no_bounding_boxes=True,
            )
            return begin, size
        part = shape[:2]
        if self.crop == "center":
            target = tf.constant(self._height_and_width, tf.float32)
            scale = tf.reduce_min(tf.cast(part, tf.float32) / target) * self.fraction
            part = tf.clip_by_value(tf.cast(tf.round(target * scale), tf.int32), 1, part)
        return tf.concat([(shape[:2] - part) // 2, [0]], 0), tf.concat([part, [-1]], 0)

    def _cut(self, image: tf.Tensor, seed: Any) -> tf.Tensor:
        """Return the crop of an image, with a static number of channels, which layers need."""
        part = tf.slice(image, *self._window(tf.shape(image), seed))
        channels = image.shape[-1] if image.shape.rank else None
        # Where the graph does not know the number, it is checked when the graph runs.
        return tf.ensure_shape(part, [None, None, channels or self.channels])

    def _decode(self, content: tf.Tensor, seed: Any) -> tf.Tensor:
        """Decode the crop of the image in a file."""

        def part() -> tf.Tensor:
            begin, size = self._window(tf.io.extract_jpeg_shape(content), seed)
            window = tf.gather(tf.concat([begin, size], 0), [0, 1, 3, 4])
            return (
                shrunk(1, window, tf.reduce_min(window[2:] // self._height_and_width))
                if self.shrink
                else at(1, window)
            )

        def shrunk(ratio: int, window: tf.Tensor, times: tf.Tensor) -> tf.Tensor:
            if ratio == _SHRINK:
                return at(ratio, window)
            return tf.cond(
                times < 2 * ratio,
                lambda: at(ratio, window),
                lambda: shrunk(2 * ratio, window, times),
            )

        def at(ratio: int, window: tf.Tensor) -> tf.Tensor:
            return tf.io.decode_and_crop_jpeg(
                content,
                window // ratio if ratio > 1 else window,
                channels=self.channels,
                ratio=ratio,
            )

        def whole() -> tf.Tensor:
            return self._cut(decode_image(content, self.channels), seed)

        if self.channels == 4:  # no JPEG has transparency
            return whole()
        complete = tf.strings.substr(content, -2, 2) == b"\xff\xd9"
        image = tf.cond(tf.io.is_jpeg(content) & complete, part, whole)
        image.set_shape([None, None, self.channels])
        return image

    def _finish(self, image: tf.Tensor, seed: Any) -> tf.Tensor:
        """Resize and augment a crop, and convert it to the result."""
        if self.random:
            # All numbers are drawn in any case, so that an option does not change the results of
            # the others. This is one op; tf.random.stateless_uniform makes about ten, which take a
            # tenth of the time of the whole image.
            draws = tf.raw_ops.StatelessRandomUniform(shape=[5], seed=seed)
        if self.flip:  # before the cast: these are bytes, the result has 4-byte numbers
            image = tf.cond(draws[0] < 0.5, lambda: tf.reverse(image, [1]), lambda: image)
        image = tf.cast(
            tf.image.resize(image, self._height_and_width, self.method, antialias=self.antialias),
            tf.float32,
        )
        if self._colours:
            image = self._change_colours(image, 2.0 * draws[1:] - 1.0)
        if tf.as_dtype(self.dtype) == tf.uint8:
            within = (
                image if self.method in _BOUNDED_METHODS else tf.clip_by_value(image, 0.0, 255.0)
            )
            image = tf.cast(within + 0.5, tf.uint8)
        if self._scales:
            image = self._normalize(image)
        return tf.cast(image, self.dtype)

    def _normalize(self, image: tf.Tensor) -> tf.Tensor:
        """Subtract the mean from the pixels, and divide them by the standard deviation."""
        channels = image.shape[-1]
        for name in ("mean", "std"):
            if np.size(getattr(self, name)) not in (1, channels):
                raise ValueError(
                    f"{name}: expected one number, or one for each of {channels} channels; "
                    f"received {getattr(self, name)!r}."
                )
        if np.size(self.std) == 1 and not np.any(self.mean):
            return image * (1.0 / float(np.squeeze(self.std)))
        scale = np.broadcast_to(1.0 / np.asarray(self.std, np.float32), [channels])
        return _by_rows(image, scale, -np.asarray(self.mean, np.float32) * scale)

    def _change_colours(self, image: tf.Tensor, amounts: tf.Tensor) -> tf.Tensor:
        """Change the colours of the pixels; the amounts, `[4]`, are from -1 to 1.

        All changes are one affine map of a pixel's colour, because TensorFlow's own ops for
        saturation and hue take about ten times as long.
        """
        channels = image.shape[-1]
        if channels not in ((3,) if self.saturation or self.hue else (1, 3)):
            raise ValueError(
                "brightness, contrast, saturation, hue: expected images of 3 channels, or 1 for "
                f"the first two; received {channels}. Leave them out."
            )
        brightness = amounts[0] * self.brightness * 255.0
        contrast = 1.0 + amounts[1] * self.contrast
        turned = tf.eye(channels)
        if channels == 3:
            angle = amounts[3] * self.hue * 2 * math.pi
            turned = _GREY + (1.0 + amounts[2] * self.saturation) * (
                tf.cos(angle) * _COLOUR + tf.sin(angle) * _QUARTER
            )
        # A mean over both axes at once takes four times as long.
        mean = tf.reduce_mean(tf.reduce_mean(image, 0), 0)
        shift = tf.linalg.matvec(turned, (1.0 - contrast) * mean + brightness, transpose_a=True)
        pixels = tf.reshape(image, [-1, channels]) @ (contrast * turned)
        return tf.clip_by_value(_by_rows(tf.reshape(pixels, image.shape), shift=shift), 0.0, 255.0)


def chain(*transforms: Callable[..., Any]) -> Callable[..., Any]:
    """Compose several transforms; each one takes the result of the one before.

    Args:
        *transforms: Transforms of single examples, which may have a parameter `seed`; or transforms
            of batches, which may have a parameter `seeds`.

    Returns:
        A function for `pipeline(transform=...)`, or for `batch_transform=` if a transform takes
        `seeds`. Each transform receives a seed of its own.

    Raises:
        ValueError: If some transforms take `seed` and others `seeds`.

    Example:
        >>> both = chain(lambda x, y: (x + 1, y), lambda x, y: (x * 2, y))
        >>> both(3, 0)
        (8, 0)
    """
    kinds = {
        name for transform in transforms for name in ("seed", "seeds") if takes(transform, name)
    }
    if len(kinds) > 1:
        raise ValueError(
            "chain: expected transforms that all take `seed` (examples) or all take `seeds` "
            "(batches), received both. Pass them as transform= and batch_transform=."
        )

    def run(example: tuple, name: str = "", seed: Any = None) -> Any:
        seeds = [] if seed is None else seeds_for(seed, len(transforms))
        result: Any = example if len(example) > 1 else example[0]
        for number, transform in enumerate(transforms):
            own = {name: seeds[number]} if name and takes(transform, name) else {}
            result = call(transform, result, **own)
        return result

    if kinds == {"seed"}:
        return lambda *example, seed: run(example, "seed", seed)
    if kinds == {"seeds"}:
        return lambda *batch, seeds: run(batch, "seeds", seeds)
    return lambda *example: run(example)


def seeds_for(seed: Any, count: int) -> list[tf.Tensor]:
    """Derive several seeds from one; random numbers drawn with them are independent.

    Args:
        seed: Seed or seeds, int32 `[..., 2]`.
        count: Number of seeds to derive.

    Returns:
        `count` seeds, int32 `[..., 2]` each.

    Example:
        >>> a, b = seeds_for([1, 2], 2)
        >>> a.shape, bool(tf.reduce_any(a != b))
        (TensorShape([2]), True)
    """
    # SplitMix64 (Steele, Lea, Flood 2014) hashes each row; tf.random.split takes one seed only.
    seed = tf.bitcast(tf.cast(seed, tf.int32), tf.uint64)
    state = seed[..., tf.newaxis] + tf.constant(
        [(i * 0x9E3779B97F4A7C15) % 2**64 for i in range(1, count + 1)], tf.uint64
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = tf.bitwise.bitwise_xor(
            state, tf.bitwise.right_shift(state, tf.constant(shift, tf.uint64))
        ) * tf.constant(factor, tf.uint64)
    state = tf.bitwise.bitwise_xor(state, tf.bitwise.right_shift(state, tf.constant(31, tf.uint64)))
    return tf.unstack(tf.bitcast(state, tf.int32), axis=-2)


def decode_image(content: Any, channels: int = 3) -> tf.Tensor:
    """Decode an image file: JPEG, PNG, BMP or GIF (its first picture).

    JPEG is decoded with TensorFlow's default, the fast integer transform, as in the utilities of
    Keras.

    Args:
        content: Content of the file, a string scalar.
        channels: Number of channels: 1, 3 or 4; default: 3.

    Returns:
        uint8 `[height, width, channels]`.
    """
    image = tf.io.decode_image(content, channels, expand_animations=False)
    image.set_shape([None, None, channels])
    return image


def _by_rows(image: tf.Tensor, scale: Any = None, shift: Any = None) -> tf.Tensor:
    """Multiply and shift pixels `[height, width, channels]` by numbers for each channel.

    It works on a row at a time, because channels alone are too few numbers for the processor's
    vector instructions: ten times as fast.
    """
    rows = tf.reshape(image, [image.shape[0], -1])
    if scale is not None:
        rows *= tf.tile(tf.cast(scale, tf.float32), [image.shape[1]])
    return tf.reshape(rows + tf.tile(tf.cast(shift, tf.float32), [image.shape[1]]), image.shape)


def _check(name: str, value: Any, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"{name}: expected {expected}; received {value!r}.")
