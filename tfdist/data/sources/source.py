"""`Source`, a dataset of numbered examples, made of arrays, datasets or generators.

The order of the examples during training is up to `tfdist.data.order`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset of examples with numbers from 0 on, which can be read repeatedly.

    Exactly one way of reading is set: `gather` (examples in memory), `read` (one by one), `scan`
    (file after file) or `walk` (all, from the first to the last). The functions of the first three
    are graphs without Python code, so that other processes can run them too, unless the files are
    in an object store.

    Attributes:
        name: Name for messages, such as "mnist[train]".
        element_spec: Spec of one example, a nest of `tf.TensorSpec`.
        cardinality: Number of examples; None if only reading can tell.
        classes: Number of classes of the label; None if there are none or their number is unknown.
        class_names: Names of the classes, if they have any.
        gather: Function from numbers, int64 `[k]`, to a batch of these examples.
        read: Function from a number, int64 scalar, to the example.
        scan: Function from file, first example in it and count, int64 scalars, to a dataset of
            these examples as they are stored.
        lengths: Number of examples of each file, with `scan`.
        fetch: Function that fetches a file from a remote store ahead of `scan`; it returns its
            argument, the file.
        decode: Function from a stored example, a string scalar, to the example, with `scan`.
        walk: Function that makes a dataset of all examples.
        describe: Function from a number to the place where the example is stored, a string scalar,
            such as "file X, byte 123".
        labels: Function that returns all labels, int `[cardinality]`, if they are known without
            reading examples.
        raw: Function from a number to the example as it is stored, a string scalar: a JPEG file, a
            serialized record.
        assemble: Function from a number and the stored example to the example, if `decode` is not
            enough.
    """

    name: str
    element_spec: Any
    cardinality: int | None = None
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    gather: Callable[[tf.Tensor], Any] | None = dataclasses.field(default=None, repr=False)
    read: Callable[[tf.Tensor], Any] | None = dataclasses.field(default=None, repr=False)
    scan: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.data.Dataset] | None = dataclasses.field(
        default=None, repr=False
    )
    lengths: tuple[int, ...] | None = dataclasses.field(default=None, repr=False)
    decode: Callable[[tf.Tensor], Any] | None = dataclasses.field(default=None, repr=False)
    fetch: Callable[[tf.Tensor], tf.Tensor] | None = dataclasses.field(default=None, repr=False)
    walk: Callable[[], tf.data.Dataset] | None = dataclasses.field(default=None, repr=False)
    describe: Callable[[tf.Tensor], tf.Tensor] | None = dataclasses.field(default=None, repr=False)
    labels: Callable[[], np.ndarray] | None = dataclasses.field(default=None, repr=False)
    raw: Callable[[tf.Tensor], tf.Tensor] | None = dataclasses.field(default=None, repr=False)
    assemble: Callable[[tf.Tensor, tf.Tensor], Any] | None = dataclasses.field(
        default=None, repr=False
    )

    def __post_init__(self) -> None:
        ways = [way for way in ("gather", "read", "scan", "walk") if getattr(self, way) is not None]
        assert len(ways) == 1, f"{self.name}: one way of reading, not {ways}"

    def dataset(self) -> tf.data.Dataset:
        """Return all examples once, in the order of their numbers."""
        if self.walk is not None:
            return self.walk()
        if self.scan is not None:
            assert self.lengths is not None
            assert self.decode is not None
            scan = self.scan
            zero = tf.constant(0, tf.int64)
            lengths = tf.constant(self.lengths, tf.int64)
            files = tf.data.Dataset.range(len(self.lengths))
            examples = files.flat_map(lambda file: scan(file, zero, lengths[file]))
            examples = examples.map(self.decode, num_parallel_calls=tf.data.AUTOTUNE)
            return examples.apply(tf.data.experimental.assert_cardinality(self.cardinality))
        return tf.data.Dataset.range(self.cardinality).map(
            self.single, num_parallel_calls=tf.data.AUTOTUNE
        )

    def single(self, number: tf.Tensor) -> Any:
        """Return one example of a source with `gather` or `read`.

        Args:
            number: Number of the example, int64 scalar.
        """
        if self.read is not None:
            return self.read(number)
        assert self.gather is not None
        return tf.nest.map_structure(lambda x: x[0], self.gather(number[tf.newaxis]))

    def map(self, function: Callable[..., Any]) -> Source:
        """Apply a function without randomness to each example, before any cache.

        Args:
            function: Function called with an example, `(x, y)` as two arguments; returns the new
                one.

        Returns:
            A Source of the new examples.

        Example:
            >>> source = Source.of((np.arange(3), np.arange(3))).map(lambda x, y: (x * 2, y))
            >>> [(int(x), int(y)) for x, y in source.dataset()]
            [(0, 0), (2, 1), (4, 2)]
        """
        changed: dict[str, Any] = {"raw": None, "assemble": None, "labels": None}
        if self.gather is not None or self.read is not None:
            changed |= {
                "gather": None,
                "decode": None,
                "read": lambda number: call(function, self.single(number)),
            }
        elif self.scan is not None:
            decode = self.decode
            assert decode is not None
            changed["decode"] = lambda stored: call(function, decode(stored))
        else:
            walk = self.walk
            assert walk is not None
            changed["walk"] = lambda: walk().map(
                function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
            )
        new = dataclasses.replace(self, **changed)
        return dataclasses.replace(new, element_spec=new.dataset().element_spec)

    @classmethod
    def of(cls, data: Any) -> Source:
        """Return the Source of a dataset or of arrays.

        Args:
            data: A Source; a `tf.data.Dataset` of single examples; or arrays with the examples
                along the first axis, in a tuple or dict such as `(x, y)`.

        Returns:
            The Source.

        Raises:
            ValueError: If `data` is something else, if arrays have unequal lengths, or if a dataset
                is infinite.

        Example:
            >>> Source.of((np.zeros([5, 2]), np.arange(5))).cardinality
            5
        """
        if isinstance(data, Source):
            return data
        if isinstance(data, tf.data.Dataset):
            return of_dataset("tf.data.Dataset", data)
        return of_arrays(data)


def of_dataset(name: str, dataset: tf.data.Dataset) -> Source:
    """Return a Source of a dataset of single examples, read from its beginning to its end.

    Args:
        name: Name for messages.
        dataset: A finite dataset of examples.

    Returns:
        The Source.

    Raises:
        ValueError: If the dataset is infinite.
    """
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"{name}: expected a finite data set, received an infinite one, whose epochs would "
            "never end. Use .take(examples)."
        )
    examples = None if cardinality == tf.data.UNKNOWN_CARDINALITY else cardinality
    return Source(name, dataset.element_spec, examples, walk=lambda: dataset)


def of_generator(
    function: Callable[[], Any],
    element_spec: Any,
    examples: int | None = None,
    name: str = "generator",
) -> Source:
    """Return a Source of the elements of a Python generator, which are the same in each pass.

    Every worker runs the generator and transforms all examples, to keep its own rows.

    Args:
        function: Function that makes a new generator of examples.
        element_spec: Spec of one example, a nest of `tf.TensorSpec`.
        examples: Number of examples that the generator yields; another number ends a pass with an
            error. None: unknown.
        name: Name for messages.

    Returns:
        The Source.

    Example:
        >>> source = of_generator(lambda: iter(range(4)), tf.TensorSpec([], tf.int64), examples=4)
        >>> [int(x) for x in source.dataset()]
        [0, 1, 2, 3]
    """
    dataset = tf.data.Dataset.from_generator(function, output_signature=element_spec)
    if examples is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(examples))
    return of_dataset(name, dataset)


def of_arrays(arrays: Any, name: str = "arrays", classes: int | None = None) -> Source:
    """Return a Source of arrays in memory, with the examples along the first axis.

    Args:
        arrays: A nest of arrays or tensors `[examples, ...]`, such as `(x, y)`.
        name: Name for messages.
        classes: Number of classes of `y`; if given, the labels are checked.

    Returns:
        The Source.

    Raises:
        ValueError: If `arrays` holds no arrays, or arrays of unequal lengths, or if a label is not
            one of the classes.
    """
    shapes = [tuple(getattr(x, "shape", ())) for x in tf.nest.flatten(arrays)]
    if not shapes or not all(shapes):
        raise ValueError(
            "source: expected the name of a data set, a Source, a tf.data.Dataset, or arrays such "
            f"as (x, y) with the examples along the first axis; received {type(arrays).__name__}."
        )
    rows = [shape[0] for shape in shapes]
    if len(set(rows)) > 1:
        raise ValueError(
            f"source: expected arrays of equal length, received {', '.join(map(str, rows))} rows. "
            "Cut them to the same examples."
        )
    if any(isinstance(x, tf.RaggedTensor | tf.SparseTensor) for x in tf.nest.flatten(arrays)):
        with tf.device("CPU"):
            return of_dataset(name, tf.data.Dataset.from_tensor_slices(arrays))
    with tf.device("CPU"):
        tensors = tf.nest.map_structure(tf.convert_to_tensor, arrays)
    labels = None
    if (
        isinstance(arrays, tuple)
        and len(arrays) > 1
        and getattr(tensors[1], "dtype", tf.string).is_integer
        and tensors[1].shape.rank == 1
    ):
        labels = tensors[1].numpy
        if classes is not None:
            check_labels(name, labels(), classes)
    return Source(
        name,
        tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape[1:], x.dtype), tensors),
        rows[0],
        classes,
        gather=lambda numbers: tf.nest.map_structure(lambda x: tf.gather(x, numbers), tensors),
        labels=labels,
    )


def check_labels(
    name: str, labels: np.ndarray, classes: int, location_of: Callable[[int], str] | None = None
) -> None:
    """Raise ValueError unless all labels are in [0, classes).

    Args:
        name: Name of the source, for messages.
        labels: Labels, int `[examples]`.
        classes: Number of classes.
        location_of: Function from the number of an example to the place of its label; default:
            "example 17".

    Raises:
        ValueError: If a label is out of range; the message names the first one.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        location = location_of(first) if location_of else f"example {first}"
        raise ValueError(
            f"{name}: expected labels from 0 to {classes - 1} for {classes} classes; "
            f"received {labels[first]} in "
            f"{location}{f', and {len(wrong) - 1} more such' if len(wrong) > 1 else ''}. Correct "
            "the labels, or the number of classes."
        )


def call(function: Callable[..., Any], example: Any, **options: Any) -> Any:
    """Call a function with an example as `tf.data.Dataset.map` does.

    The parts of a tuple become the arguments.

    Args:
        function: The function.
        example: The example.
        **options: Keyword arguments.
    """
    return (
        function(*example, **options)
        if isinstance(example, tuple)
        else function(example, **options)
    )


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of the given name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions have no signature
        return False
