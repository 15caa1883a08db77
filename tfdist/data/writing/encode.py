"""Encoding of examples as serialized `tf.train.Example`.

Images that are stored as files are copied, not encoded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from tfdist.data.sources.features import Feature, Features, listable, packable, shape_of
from tfdist.data.sources.source import Source

_TUPLE = ("x", "y", "sample_weight")  # the terms of Keras
WHOLE = ""  # stands for the stored bytes themselves, rather than a feature in them


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Encoder from a source's examples to bytes.

    Attributes:
        features: Stored features, and the structure of an example.
        images: Mapping from the name of each feature whose file is copied to the feature of the
            source's stored Example that holds it. `WHOLE`: the stored bytes of the source are that
            file.
    """

    features: Features
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, source: Source) -> Encoder:
        """Return the encoder for a source's examples.

        Args:
            source: A source of dense tensors.

        Returns:
            The encoder.

        Raises:
            ValueError: If a record cannot hold a part of the examples; the message names it.
        """
        structure = _names(source.element_spec, ())
        columns: dict[str, Any] = {}

        def add(name: str, spec: Any) -> None:
            columns[name] = _feature(source.name, name, spec)

        tf.nest.map_structure(add, structure, source.element_spec)
        names = set(columns) | {
            shape_of(name) for name, feature in columns.items() if feature.has_shape
        }
        if len(names) < len(tf.nest.flatten(structure)) + sum(
            feature.has_shape for feature in columns.values()
        ):
            raise ValueError(
                f"{source.name}: expected unique names for the parts of an example; received "
                f"{structure}. Rename some with map()."
            )
        return cls(Features(columns, structure))

    def with_images(self, examples: Sequence[Any], stored: Sequence[bytes]) -> Encoder:
        """Return an encoder that copies image files where possible.

        Some examples show where image files are in the source's stored bytes.

        Args:
            examples: Decoded examples.
            stored: The same examples as the source stores them.

        Returns:
            The encoder. It copies an image file only if the file is the very image in all these
            examples.
        """
        images: dict[str, str] = {}
        for name, feature in self.features.columns.items():
            if feature.image and stored:
                candidates = [WHOLE, *_strings(stored[0])]
                fits = (
                    p
                    for p in candidates
                    if all(
                        _holds_image(s, p, self._flat(e)[name], feature)
                        for e, s in zip(examples, stored, strict=True)
                    )
                )
                key = next(fits, None)
                if key is not None:
                    images[name] = key
        return dataclasses.replace(self, images=images)

    def prepare(self, example: Any, stored: tf.Tensor | None) -> dict[str, tf.Tensor]:
        """Return the stored values of an example, by name; a graph.

        Args:
            example: Decoded example.
            stored: The example as the source stores it, a string scalar; None if no image file is
                copied.

        Returns:
            Image files, string scalars; and the values of other tensors, `[values]`, of the types
            of an Example's lists; uint8 for the bytes of a packed tensor.
        """
        parts = {}
        for name, value in self._flat(example).items():
            feature = self.features.columns[name]
            if feature.has_shape:
                parts[shape_of(name)] = tf.shape(value, tf.int64)
            if feature.packed:
                parts[name] = tf.reshape(tf.bitcast(value, tf.uint8), [-1])
            elif not feature.image:
                parts[name] = tf.reshape(tf.cast(value, feature.stored), [-1])
            elif name not in self.images:
                parts[name] = tf.io.encode_png(value)
            elif self.images[name] == WHOLE:
                parts[name] = stored
            else:
                key = self.images[name]
                parts[name] = tf.io.parse_single_example(
                    stored, {key: tf.io.FixedLenFeature([], tf.string)}
                )[key]
        return parts

    def serialize(self, parts: Mapping[str, Any]) -> bytes:
        """Return the serialized Example of the values that `prepare` returned.

        Equal values give equal bytes.

        Args:
            parts: Values of `prepare`, as NumPy arrays.
        """
        example = tf.train.Example()
        features = example.features.feature
        for name, value in parts.items():
            if isinstance(value, bytes):
                features[name].bytes_list.value.append(value)
            elif value.dtype == np.uint8:
                features[name].bytes_list.value.append(value.tobytes())
            elif value.dtype == object:
                features[name].bytes_list.value.extend(value.tolist())
            elif value.dtype == np.float32:
                # Written in protobuf's wire format: extend() takes twenty times as long.
                content = value.tobytes()
                features[name].float_list.MergeFromString(b"\x0a" + _varint(len(content)) + content)
            else:
                features[name].int64_list.value.extend(value.tolist())
        return example.SerializeToString(deterministic=True)

    def _flat(self, example: Any) -> dict[str, Any]:
        """Return the parts of an example by name."""
        return dict(
            zip(tf.nest.flatten(self.features.structure), tf.nest.flatten(example), strict=True)
        )


def _names(spec: Any, path: tuple[str, ...]) -> Any:
    """Return a nest of names like `spec`.

    A name is made of the keys on the path to it. The parts of the outermost tuple are x, y and
    sample_weight.
    """
    if isinstance(spec, tuple):
        words = _TUPLE if not path and 2 <= len(spec) <= 3 else tuple(map(str, range(len(spec))))
        return tuple(_names(part, (*path, word)) for part, word in zip(spec, words, strict=False))
    if isinstance(spec, Mapping):
        return {key: _names(part, (*path, str(key))) for key, part in spec.items()}
    return "/".join(path) or "x"


def _feature(source: str, name: str, spec: Any) -> Feature:
    """Return the declaration under which a tensor is stored."""
    if (
        not isinstance(spec, tf.TensorSpec)
        or spec.shape.rank is None
        or not (listable(spec.dtype) or packable(spec.dtype))
    ):
        raise ValueError(
            f"{source}: expected dense tensors of known rank, of numbers or strings; received "
            f"{spec} for {name}. Convert or remove it with map()."
        )
    shape = tuple(spec.shape)
    if spec.dtype == tf.uint8 and len(shape) == 3 and shape[2] in (1, 3, 4) and 0 not in shape:
        return Feature(tf.uint8, shape, image=True)
    return Feature(spec.dtype, shape, packed=listable(spec.dtype) is None)


def _strings(stored: bytes) -> list[str]:
    """Return the features of a stored Example that are one string.

    The result is empty if the bytes are not an Example.
    """
    try:
        features = tf.train.Example.FromString(stored).features.feature
    except DecodeError:
        return []
    return sorted(name for name, feature in features.items() if len(feature.bytes_list.value) == 1)


def _holds_image(stored: bytes, key: str, image: Any, feature: Feature) -> bool:
    """Return whether the given feature of a stored Example is the file of this image."""
    if key != WHOLE:
        try:
            stored = tf.train.Example.FromString(stored).features.feature[key].bytes_list.value[0]
        except (DecodeError, IndexError):  # no such Example, or no string there
            return False
    try:
        return bool(np.array_equal(feature.decode(key, {key: tf.constant(stored)}), image))
    except (tf.errors.OpError, ValueError):
        return False


def _varint(number: int) -> bytes:
    """Encode a length as protobuf does."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
