"""Summary of a data set for the terminal, and a contact sheet of its images.

Only a sample of the data set is read.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data import errors
from tfdist.data.sources.source import Source
from tfdist.runtime.formatting import format_bytes
from tfdist.telemetry import contact_sheet
from tfdist.tools import examples
from tfdist.tools.common import example_text

_CLASSES = 20  # maximum of rows in a contact sheet, and of lines of class balance
_EACH = 8  # images in each row
_WITHOUT = 48  # images if there are no classes
_TITLE = 48  # maximum length of a class's number and name
_SIZES = 200  # examples that are read to estimate sizes


def show(source: Source, license: str | None, limit: int, path: str) -> int:
    """Print a summary of a data set, and draw some of its images.

    Args:
        source: Data set.
        license: License of the data set; None if it is unknown.
        limit: Maximum number of examples to read for class counts, if labels are not available
            without reading examples.
        path: File of the contact sheet.

    Returns:
        1 if examples could not be read, else 0.
    """
    failed: dict[int, examples.Example] = {}

    def read(drawn: Iterator[examples.Example]) -> Iterator[examples.Example]:
        """Yield the examples that could be read, and record the others in `failed`."""
        for example in drawn:
            if example.error is None:
                yield example
            else:
                failed.setdefault(example.number, example)

    _line("data set", source.name)
    _line("license", license or "not given")
    total = source.cardinality
    _line("examples", "not known before all are read" if total is None else f"{total:,}")
    leaves = list(example_text.parts(source.element_spec))
    label = example_text.label_name(source.element_spec)
    for name, spec in leaves:
        known = f", {source.classes} classes" if name == label and source.classes else ""
        _line(
            "features" if name == leaves[0][0] else "", f"{name:8} {example_text.kind(spec)}{known}"
        )
    _sizes(source, read)
    numbers, labels = _labels(source, label, limit, read)
    if labels is not None and len(labels):
        _balance(source, labels)
    image = next((name for name, spec in leaves if _is_image(spec)), None)
    if image is None:
        _line("sheet", "none: no feature is an image")
    else:
        rows = _rows(source, image, numbers, labels, read)
        if any(row.images for row in rows):
            count = "" if total is None else f", {total:,} examples"
            drawn = len(np.unique(labels)) if labels is not None else 0
            some = f", {len(rows)} of {drawn:,} classes" if drawn > len(rows) else ""
            _save(contact_sheet.draw(f"{source.name}{count}{some}", rows), path)
            _line("sheet", f"{path}: {sum(len(row.images) for row in rows)} images")
        else:
            _line("sheet", "none: no image could be read")
    if not failed:
        return 0
    first = failed[min(failed)]
    _line("ERRORS", f"{len(failed)} of the sampled examples cannot be read. The first:")
    _failure(source, first)
    return 1


def head(source: Source, count: int) -> int:
    """Print the first examples.

    Args:
        source: Data set.
        count: Number of examples.

    Returns:
        1 if one of them cannot be read, else 0.
    """
    count = count if source.cardinality is None else min(count, source.cardinality)
    first = examples.numbered(source, np.arange(count))
    return max([_example(source, example) for example in first], default=0)


def one(source: Source, number: int) -> int:
    """Print one example, or everything that is known about why it cannot be read.

    Args:
        source: Data set.
        number: Index of the example.

    Returns:
        1 if it cannot be read, else 0.

    Raises:
        ValueError: If there is no such example.
    """
    known = source.cardinality is None or number < source.cardinality
    example = next(examples.numbered(source, np.array([number])), None) if known else None
    if example is None:
        last = (
            ""
            if source.cardinality is None
            else f", whose examples are 0 to {source.cardinality - 1}"
        )
        raise ValueError(
            f"--example: expected an example of {source.name}{last}; received {number}."
        )
    code = _example(source, example)
    if (error := example.error) is not None:
        print(f"\n{type(error).__name__}: {getattr(error, 'message', error)}")
    return code


def _sizes(source: Source, read: Callable[..., Any]) -> None:
    """Print the size of examples in storage and in memory."""
    total = source.cardinality
    stored = None
    if source.scan is not None:
        raw = dataclasses.replace(source, decode=tf.strings.length)
        stored = [int(example.data) for example in read(examples.draw(raw, _SIZES))]
    elif source.raw is not None and total:
        length = Source(
            source.name,
            None,
            total,
            read=lambda n: tf.strings.length(source.raw(n)),  # type: ignore[misc]
        )
        stored = [int(example.data) for example in read(examples.draw(length, _SIZES))]
    if stored:
        _line("stored", _size(stored, total))
    flat = [spec for _, spec in example_text.parts(source.element_spec)]
    if all(
        isinstance(spec, tf.TensorSpec)
        and spec.shape.is_fully_defined()
        and spec.dtype != tf.string
        for spec in flat
    ):
        each = sum(spec.shape.num_elements() * spec.dtype.size for spec in flat)
        _line(
            "in memory",
            f"{format_bytes(each)} each"
            + (f", {format_bytes(each * total)} in all" if total else ""),
        )
    else:
        drawn = [
            sum(example_text.byte_size(leaf) for _, leaf in example_text.parts(x.data))
            for x in read(examples.draw(source, _SIZES // 4))
        ]
        if drawn:
            _line("in memory", _size(drawn, total))


def _size(drawn: list[int], total: int | None) -> str:
    mean = sum(drawn) / len(drawn)
    some = len(drawn) != total
    text = f"{format_bytes(mean)} each" + (
        f", {format_bytes(mean * total)} in all" if total else ""
    )
    return text + (f", by the mean of {len(drawn)}" if some else "")


def _labels(
    source: Source, label: str | None, limit: int, read: Callable[..., Any]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the indices of examples and their classes, and print how many are counted."""
    if source.labels is not None:
        labels = np.asarray(source.labels())
        _line("classes", f"counted in all {len(labels):,} examples")
        return np.arange(len(labels)), labels
    if label is None:
        return None, None
    drawn = list(
        read(examples.draw(source, limit, lambda data: dict(example_text.parts(data))[label]))
    )
    of = "" if source.cardinality is None else f" of {source.cardinality:,}"
    some = f"{len(drawn):,}{of} examples, {examples.sampling(source, limit)}"
    if len(drawn) == source.cardinality:
        some = f"all {len(drawn):,} examples"
    _line("classes", f"counted in {some}")
    return np.array([x.number for x in drawn]), np.array([int(x.data) for x in drawn])


def _balance(source: Source, labels: np.ndarray) -> None:
    classes, counts = np.unique(labels, return_counts=True)
    by_size = np.argsort(-counts, kind="stable")
    shown = [*range(len(classes))]
    if len(classes) > _CLASSES:
        shown = [*by_size[: _CLASSES // 2], None, *by_size[-_CLASSES // 2 :]]
    width = max(len(_title(source, c)) for c in classes[[i for i in shown if i is not None]])
    for i in shown:
        if i is None:
            rest = counts[by_size[_CLASSES // 2 : -_CLASSES // 2]]
            span = f"{rest[0]:,}" if rest[0] == rest[-1] else f"{rest[0]:,} to {rest[-1]:,}"
            _line("", f"... {len(rest)} more, of {span} examples")
            continue
        bar = "#" * math.ceil(30 * counts[i] / counts.max())
        share = f"{counts[i]:>8,}  {counts[i] / len(labels):6.1%}"
        _line("", f"{_title(source, classes[i]):{width}}  {share}  {bar}")
    if source.classes:
        wrong = classes[(classes < 0) | (classes >= source.classes)]
        if len(wrong):
            _line("", f"outside of 0 to {source.classes - 1}: {', '.join(map(str, wrong[:5]))}")
        absent = source.classes - len(np.setdiff1d(classes, wrong))
        if absent:
            _line("", f"{absent} of {source.classes} classes have no example here")


def _title(source: Source, number: Any) -> str:
    text = f"{number}{example_text.named(number, source.class_names)}"
    return text if len(text) <= _TITLE else f"{text[: _TITLE - 3]}..."


def _rows(
    source: Source, image: str, numbers: Any, labels: Any, read: Callable[..., Any]
) -> list[contact_sheet.Row]:
    def pick(data: Any) -> Any:
        return dict(example_text.parts(data))[image]

    if labels is None or not len(labels):
        drawn = [
            (str(x.number), x.data.numpy()) for x in read(examples.draw(source, _WITHOUT, pick))
        ]
        return [
            contact_sheet.Row("", "", drawn[i : i + _EACH]) for i in range(0, len(drawn), _EACH)
        ]
    classes, counts = np.unique(labels, return_counts=True)
    chosen = examples.evenly(_CLASSES, len(classes))
    numbers_by_class = {
        int(classes[i]): numbers[labels == classes[i]][examples.evenly(_EACH, counts[i])]
        for i in chosen
    }
    order = np.sort(np.concatenate(list(numbers_by_class.values())))
    images = {x.number: x.data.numpy() for x in read(examples.numbered(source, order, pick))}
    return [
        contact_sheet.Row(
            f"{classes[i]}{example_text.named(classes[i], source.class_names)}",
            f"{counts[i]:,} examples",
            [
                (str(n), images[n])
                for n in numbers_by_class[int(classes[i])].tolist()
                if n in images
            ],
        )
        for i in chosen
    ]


def _save(image: Any, path: str) -> None:
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        image.save(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--sheet: {path} cannot be written: {error}. Name a PNG file in another directory."
        ) from error


def _example(source: Source, example: examples.Example) -> int:
    if example.error is not None:
        _failure(source, example)
        return 1
    label = example_text.label_name(source.element_spec)
    lines = [
        (
            f"{name:8} {example_text.kind(leaf)}  "
            f"{example_text.value(leaf, source.class_names if name == label else None)}"
        )
        for name, leaf in example_text.parts(example.data)
    ]
    location = errors.location_of(source, example.number)
    for i, line in enumerate([*lines, *([f"{'at':8} {location}"] if location else [])]):
        print(f"{'' if i else example.number:<8}  {line}")
    return 0


def _failure(source: Source, example: examples.Example) -> None:
    assert example.error is not None
    print(f"{example.number:<8}  cannot be read: {errors.cause(example.error)}")
    if location := errors.location_of(source, example.number):
        print(f"{'':8}  {'at':8} {location}")


def _is_image(spec: Any) -> bool:
    if not isinstance(spec, tf.TensorSpec) or spec.dtype == tf.string or spec.shape.rank is None:
        return False
    return contact_sheet.is_image(spec.shape.as_list(), np.dtype(spec.dtype.as_numpy_dtype))


def _line(title: str, text: str) -> None:
    print(f"{title:10} {text}".rstrip())
