"""Declared features: parsing of a stored `tf.train.Example` into tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError

# Fields of `tf.train.Feature` by type.
_LISTS = {tf.int64: "int64_list", tf.float32: "float_list", tf.string: "bytes_list"}
_SYNTAX = (
    'expected a tf.io feature, or words such as "image", "image[224,224,3]", "int64", '
    '"float32[28,28]", "string[?]" or "bytes of float64[3]"'
)


@dataclasses.dataclass(frozen=True)
class Feature:
    """Declaration of a tensor in an Example.

    Attributes:
        dtype: Type of the tensor.
        shape: Sizes of the tensor; None for a size that differs between examples.
        image: Whether the tensor is stored as an image file: JPEG, PNG, GIF or BMP.
        packed: Whether the tensor is stored as one string of its bytes, little-endian, rather than
            as a list of numbers.
    """

    dtype: tf.DType
    shape: tuple[int | None, ...]
    image: bool = False
    packed: bool = False

    @classmethod
    def parse(cls, name: str, text: str) -> Feature:
        """Parse the declaration of a feature.

        Args:
            name: Name of the feature, for messages.
            text: Declaration: `image`, a type such as `int64`, or `bytes of` a type; then
                optionally a shape in brackets, with `?` for sizes that differ between examples.
                Without brackets: a scalar, or an image of any size with three channels. If there
                are several `?`, their sizes are read from a list `NAME/shape`.

        Returns:
            The feature.

        Raises:
            ValueError: If the text is not a declaration.

        Example:
            >>> Feature.parse("x", "float32[?,4]").shape
            (None, 4)
            >>> str(Feature.parse("x", "image")), str(Feature.parse("x", "bytes of float64"))
            ('image[?,?,3]', 'bytes of float64')
        """
        match = re.fullmatch(r"(bytes of )?(\w+)(?:\[([\d?, ]*)\])?", text.strip())
        if not match:
            raise ValueError(f"features[{name!r}]: {_SYNTAX}; received {text!r}.")
        sizes = (
            None
            if match[3] is None
            else [size.strip() for size in match[3].split(",") if size.strip()]
        )
        shape = () if sizes is None else tuple(None if size == "?" else int(size) for size in sizes)
        if match[2] == "image" and not match[1]:
            shape = (None, None, 3) if sizes is None else shape
            if len(shape) != 3 or shape[2] not in (1, 3, 4, None):
                raise ValueError(
                    f"features[{name!r}]: expected an image of a height, a width and 1, 3 or 4 "
                    f"channels; received {text!r}."
                )
            return cls(tf.uint8, shape, image=True)
        try:
            dtype = tf.as_dtype(match[2])
        except TypeError:
            raise ValueError(f"features[{name!r}]: {_SYNTAX}; received {text!r}.") from None
        feature = cls(dtype, shape, packed=bool(match[1]))
        if feature.packed and not packable(dtype):
            raise ValueError(
                f"features[{name!r}]: expected bytes of a type of numbers; received {text!r}."
            )
        if not feature.packed and not listable(dtype):
            raise ValueError(
                f'features[{name!r}]: expected "bytes of {text}", as a tf.train.Example has no '
                f"list of {dtype.name}; received {text!r}."
            )
        return feature

    def __str__(self) -> str:
        sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        kind = "image" if self.image else f"{'bytes of ' if self.packed else ''}{self.dtype.name}"
        return f"{kind}[{sizes}]" if self.shape else kind

    @property
    def stored(self) -> tf.DType:
        """Return the type of the list that holds the tensor: int64, float32 or string."""
        return tf.string if self.image or self.packed else listable(self.dtype)

    @property
    def has_shape(self) -> bool:
        """Return whether the shape is stored beside the tensor.

        It is if the number of values does not determine the shape.
        """
        return not self.image and self.shape.count(None) > 1

    @property
    def values(self) -> int | None:
        """Return the number of values in the list; None if it differs between examples."""
        if self.image or self.packed:
            return 1
        return None if None in self.shape else int(tf.TensorShape(self.shape).num_elements())

    def specs(self, name: str) -> dict[str, Any]:
        """Return the `tf.io` features that `tf.io.parse_single_example` needs for this tensor."""
        specs: dict[str, Any] = {}
        if self.image or self.packed:
            specs[name] = tf.io.FixedLenFeature([], tf.string)
        elif self.values:
            specs[name] = tf.io.FixedLenFeature(self.shape, self.stored)
        else:
            specs[name] = tf.io.FixedLenSequenceFeature([], self.stored, allow_missing=True)
        if self.has_shape:
            specs[shape_of(name)] = tf.io.FixedLenFeature([len(self.shape)], tf.int64)
        return specs

    def decode(self, name: str, parsed: Mapping[str, Any]) -> tf.Tensor:
        """Return the tensor from the result of `tf.io.parse_single_example`.

        Args:
            name: Name of the feature.
            parsed: Result of `tf.io.parse_single_example`.
        """
        # TensorFlow's error messages contain the scope.
        with tf.name_scope(re.sub(r"\W", "_", f"feature_{name}")):
            value = parsed[name]
            if self.image:
                image = tf.io.decode_image(value, self.shape[2] or 0, expand_animations=False)
                return tf.ensure_shape(image, self.shape)
            if self.packed:
                wide = self.dtype == tf.uint64  # decode_raw does not support it
                value = (
                    tf.bitcast(tf.io.decode_raw(value, tf.int64), tf.uint64)
                    if wide
                    else tf.io.decode_raw(value, self.dtype)
                )
            shape = (
                parsed[shape_of(name)]
                if self.has_shape
                else [-1 if size is None else size for size in self.shape]
            )
            value = tf.reshape(tf.cast(value, self.dtype), shape)
            return tf.ensure_shape(value, self.shape)


def listable(dtype: tf.DType) -> tf.DType | None:
    """Return the list type of an Example that represents values of a type exactly.

    Args:
        dtype: Type of the values.

    Returns:
        tf.int64, tf.float32 or tf.string; None if there is none.
    """
    if dtype == tf.string:
        return tf.string
    if dtype in (tf.float32, tf.float16, tf.bfloat16):
        return tf.float32
    if dtype in (tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32):
        return tf.int64
    return None


def packable(dtype: tf.DType) -> bool:
    """Return whether a string of bytes can be converted to values of a type."""
    return dtype in (tf.float64, tf.uint64, tf.complex64, tf.complex128) or listable(dtype) not in (
        None,
        tf.string,
    )


def shape_of(name: str) -> str:
    """Return the name under which the shape of a feature is stored."""
    return f"{name}/shape"


@dataclasses.dataclass(frozen=True)
class Features:
    """Features of an Example, and the structure in which you see an example.

    Attributes:
        columns: Mapping from name to Feature, or to a feature of `tf.io`.
        structure: A nest (tuple, dict) of their names.
    """

    columns: Mapping[str, Any]
    structure: Any

    @classmethod
    def of(
        cls, declared: Mapping[str, Any], label: str | None = None, structure: Any = None
    ) -> Features:
        """Return the Features of some declarations.

        Args:
            declared: Mapping from name to a declaration of `Feature.parse`, or to a feature of
                `tf.io`.
            label: Name of the feature that is `y`; the others are `x`: one as a tensor, several as
                a dict.
            structure: A nest of names, if there is no `label`; default: the tensor of the one
                feature, or a dict of all.

        Returns:
            The features.

        Raises:
            ValueError: If a declaration is invalid, or the label is not one of the features.

        Example:
            >>> features = Features.of({"image": "image", "label": "int64"}, label="label")
            >>> features.structure
            ('image', 'label')
        """
        if not isinstance(declared, Mapping) or not declared:
            raise ValueError(
                f'features: expected a mapping such as {{"image": "image", "label": "int64"}}; '
                f"received {declared!r}."
            )
        columns = {
            name: Feature.parse(name, declaration) if isinstance(declaration, str) else declaration
            for name, declaration in declared.items()
        }
        for name, declaration in columns.items():
            if not isinstance(declaration, Feature) and not type(declaration).__name__.endswith(
                "Feature"
            ):
                raise ValueError(f"features[{name!r}]: {_SYNTAX}; received {declaration!r}.")
        names = [name for name in columns if name != label]
        if label is not None:
            if label not in columns or not names:
                raise ValueError(
                    f"label={label!r}: expected one of several features, which are "
                    f"{', '.join(columns)}. Correct label=, or add the feature to features=."
                )
            return cls(
                columns, (names[0] if len(names) == 1 else {name: name for name in names}, label)
            )
        if structure is None:
            structure = names[0] if len(names) == 1 else {name: name for name in names}
        return cls(columns, structure)

    def decode(self, serialized: tf.Tensor) -> Any:
        """Decode a serialized `tf.train.Example`; in graphs and eagerly.

        Args:
            serialized: The serialized Example, a string scalar.

        Returns:
            The example, a nest of tensors like `structure`.
        """
        specs: dict[str, Any] = {}
        for name, feature in self.columns.items():
            specs |= feature.specs(name) if isinstance(feature, Feature) else {name: feature}
        parsed = tf.io.parse_single_example(serialized, specs)

        def tensor(name: str) -> Any:
            feature = self.columns[name]
            return feature.decode(name, parsed) if isinstance(feature, Feature) else parsed[name]

        return tf.nest.map_structure(tensor, self.structure)

    def check(self, serialized: bytes, location: str) -> None:
        """Raise ValueError unless an Example holds these features.

        Args:
            serialized: The serialized Example.
            location: File and position where the Example is stored, "FILE, byte 0".

        Raises:
            ValueError: If a feature is missing or of another kind; the message names the first one.
        """
        try:
            stored = tf.train.Example.FromString(serialized).features.feature
        except DecodeError as error:
            raise ValueError(
                f"{location}: expected a serialized tf.train.Example; received "
                f"{serialized[:20]!r}... Omit features= to get the records as bytes."
            ) from error
        for name, feature in self.columns.items():
            if isinstance(feature, Feature):
                _check_one(name, feature, stored, location)
        try:
            self.decode(tf.constant(serialized))
        except tf.errors.OpError as error:
            raise ValueError(
                f"{location}: does not hold the features {', '.join(self.columns)} as declared: "
                f"{error.message}"
            ) from error


def _check_one(
    name: str, feature: Feature, stored: Mapping[str, tf.train.Feature], location: str
) -> None:
    expected = _LISTS[feature.stored]
    if name not in stored:
        if feature.values is None:
            return  # an empty list may be left out
        present = ", ".join(f"{n} ({_kind(f)})" for n, f in sorted(stored.items())) or "nothing"
        raise ValueError(
            f"features[{name!r}]: expected this feature in {location}, received {present}. Correct "
            "the name in features=."
        )
    kind = stored[name].WhichOneof("kind")
    count = len(getattr(stored[name], kind).value) if kind else 0
    if (kind and kind != expected) or (feature.values is not None and count != feature.values):
        quantity = "a" if feature.values is None else f"{feature.values} values in a"
        raise ValueError(
            f"features[{name!r}]: expected {feature}, {quantity} {expected}; received "
            f"{_kind(stored[name])} in {location}. Correct the declaration in features=."
        )


def _kind(feature: tf.train.Feature) -> str:
    kind = feature.WhichOneof("kind")
    return f"{len(getattr(feature, kind).value)} values in a {kind}" if kind else "nothing"
