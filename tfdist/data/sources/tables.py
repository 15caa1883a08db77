"""CSV and TSV files: columns, class labels, and a Source of rows."""

from __future__ import annotations

import collections
import csv
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.data.files_io import absolute
from tfdist.data.sources.source import Source, check_labels
from tfdist.storage import files

_TYPES = ("int64", "float32", "string")


class Table(NamedTuple):
    """Columns of a file, as text.

    Attributes:
        file: Path of the file.
        names: Names of the columns; positions as text if the file has no header.
        columns: Cells of each column.
        lines: Line of each row in the file, counted from 1.
    """

    file: str
    names: tuple[str, ...]
    columns: tuple[list[str], ...]
    lines: list[int]


class Labels(NamedTuple):
    """A column of labels.

    Attributes:
        values: Labels, int64 `[rows]`, or float32 if they are not classes.
        classes: Number of classes; None if unknown.
        names: Names of the classes.
    """

    values: np.ndarray
    classes: int | None = None
    names: tuple[str, ...] | None = None


def read(
    file: str | os.PathLike,
    columns: Sequence[str | int] | None = None,
    delimiter: str = "auto",
    header: bool | None = None,
) -> Table:
    r"""Read columns of a CSV or TSV file.

    Args:
        file: Path of a text file in UTF-8, one row on each line; fields may be quoted as
            `csv.reader` allows. Empty lines are ignored.
        columns: Names or positions, from 0 on, of the columns to read; None: all.
        delimiter: Field separator. "auto": a tab if the file name ends in .tsv or the first line
            has a tab; else the most frequent in that line of comma, semicolon and bar.
        header: Whether the first line names the columns; None: if a column is given by name, or all
            columns are read.

    Returns:
        The columns, of one row or more.

    Raises:
        ValueError: If the file is missing, empty or not such a text, if it lacks a column, or if a
            row is longer or shorter than the first; the message names the line.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "people.csv")
        >>> _ = file.write_text("name,age\nAda,36\nAlan,41\n")
        >>> read(file, ["age"]).columns
        (['36', '41'],)
    """
    path = absolute(file)
    text = _text(path)
    if delimiter == "auto":
        delimiter = _delimiter(path, text)
    elif len(delimiter) != 1:
        raise ValueError(f'delimiter: expected one character, or "auto"; received {delimiter!r}.')
    if header is None:
        header = columns is None or any(isinstance(column, str) for column in columns)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows = ((reader.line_num, row) for row in reader if row)
    positions: list[int] = []
    cells_by_column: list[list[str]] = []
    lines: list[int] = []
    first: tuple[str, ...] = ()
    try:
        for line, row in rows:
            if not first:
                first = (
                    tuple(name.strip() for name in row)
                    if header
                    else tuple(map(str, range(len(row))))
                )
                positions = _positions(path, first, columns, header)
                cells_by_column = [[] for _ in positions]
                if header:
                    continue
            if len(row) != len(first):
                raise ValueError(
                    f"{path}, line {line}: expected {len(first)} columns, as in the first line, "
                    f"received {len(row)}. Correct that line; or pass delimiter=, if {delimiter!r} "
                    "does not separate the columns."
                )
            for cells, position in zip(cells_by_column, positions, strict=True):
                cells.append(row[position])
            lines.append(line)
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: {error}. Look for a quote that is never closed."
        ) from error
    if not lines:
        raise ValueError(
            f"{path}: no rows{' beside the header' if first else ''}. Expected one per line."
        )
    return Table(
        path, tuple(first[position] for position in positions), tuple(cells_by_column), lines
    )


def table(
    file: str | os.PathLike,
    *,
    features: str | Sequence[str] | None = None,
    label: str | None = None,
    classes: int | Sequence[str] | str | os.PathLike | None = None,
    types: Mapping[str, str] | None = None,
    delimiter: str = "auto",
) -> Source:
    r"""Return a Source of the rows of a CSV or TSV file, held in memory.

    Args:
        file: File that `read` accepts, with a header.
        features: Columns of x. A list: x is a dict of scalars. One name: x is that scalar. None:
            all columns but `label`.
        label: Column of y; None: the examples are x alone.
        classes: Classes that `classify` accepts.
        types: Types of columns by name: "int64", "float32" or "string". Columns not named are int64
            if all cells are whole numbers, float32 if all are numbers or empty (which become NaN),
            else string.
        delimiter: Delimiter that `read` accepts.

    Returns:
        A Source of dicts, or of `(x, y)`.

    Raises:
        ValueError: If `read` or `classify` raises it, or if a cell is not of its column's type.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "people.csv")
        >>> _ = file.write_text("city,age,paid\nParis,36,no\nRome,,yes\n")
        >>> source = table(file, label="paid")
        >>> x, y = next(iter(source.dataset()))
        >>> x["city"].numpy(), x["age"].numpy(), int(y), source.class_names
        (b'Paris', np.float32(36.0), 0, ('no', 'yes'))
    """
    requested = (
        None if features is None else [features] if isinstance(features, str) else list(features)
    )
    if requested is not None and label is not None and label not in requested:
        requested.append(label)
    rows = read(file, requested, delimiter, header=True)
    cells = dict(zip(rows.names, rows.columns, strict=True))
    for name in [*(types or {}), *([] if label is None else [label])]:
        if name not in cells:
            raise ValueError(f"{rows.file}: no column {name!r}. {config.nearest(name, cells)}")
    names = [name for name in rows.names if name != label] if features is None else requested
    columns = {
        name: _convert(rows, name, cells[name], (types or {}).get(name))
        for name in names or ()
        if name in cells
    }
    if features is not None:
        columns = {
            name: columns[name] for name in ([features] if isinstance(features, str) else features)
        }
    x: Any = columns[features] if isinstance(features, str) else columns
    labels = None if label is None else classify(cells[label], rows.file, rows.lines, classes)
    with tf.device("CPU"):
        data = tf.nest.map_structure(tf.constant, x if labels is None else (x, labels.values))
        lines = tf.constant(rows.lines, tf.int64)
    return Source(
        f"rows of {rows.file}",
        tf.nest.map_structure(lambda column: tf.TensorSpec([], column.dtype), data),
        len(rows.lines),
        None if labels is None else labels.classes,
        None if labels is None else labels.names,
        gather=lambda numbers: tf.nest.map_structure(
            lambda column: tf.gather(column, numbers), data
        ),
        describe=lambda number: tf.strings.join(
            [f"{rows.file}, line ", tf.strings.as_string(lines[number])]
        ),
        labels=labels_of(labels),
    )


def classify(
    values: Sequence[str],
    file: str,
    lines: Sequence[int],
    classes: int | Sequence[str] | str | os.PathLike | None = None,
) -> Labels:
    """Convert the cells of a label column to class numbers.

    Args:
        values: The cells.
        file: File of the cells, for messages.
        lines: Lines of the cells in the file.
        classes: Names of the classes in the order of their numbers; a file with one class on each
            line, `NAME` or `NAME what it is called`, such as ImageNet's LOC_synset_mapping.txt; or
            the number of classes, if labels are numbers from 0 on. None: if all labels are numbers
            they are used unchanged, else the classes are the distinct labels, sorted.

    Returns:
        The labels. Whole numbers that are not names of classes are the numbers of the classes.

    Raises:
        ValueError: If a label is empty or not one of the classes; the message names its line.

    Example:
        >>> classify(["cat", "ant", "cat"], "pets.csv", [2, 3, 4])
        Labels(values=array([1, 0, 1]), classes=2, names=('ant', 'cat'))
    """
    values = [value.strip() for value in values]
    for value, line in zip(values, lines, strict=True):
        if not value:
            raise ValueError(
                f"{file}, line {line}: the label is empty. Fill it in, or remove the line."
            )
    numbers = _numbers(values)
    if classes is None:
        if numbers is not None:
            return Labels(numbers)
        classes = sorted(set(values))
    if isinstance(classes, int):
        if numbers is None or numbers.dtype != np.int64:
            wrong = next(i for i, value in enumerate(values) if not _is_number(value, "int64"))
            raise ValueError(
                f"{file}, line {lines[wrong]}: expected a label from 0 to {classes - 1}, received "
                f"{values[wrong]!r}. If labels are names, pass the names in classes=."
            )
        check_labels(file, numbers, classes, lambda example: f"line {lines[example]}")
        return Labels(numbers, classes)
    if isinstance(classes, str | os.PathLike):
        keys, names = read_classes(classes)
        origin = f"classes of {os.fspath(classes)}"
    else:
        keys = tuple(classes)
        names = keys
        origin = "classes"
    numbers_by_key = {key: i for i, key in enumerate(keys)}
    if len(numbers_by_key) < len(keys):
        raise ValueError(f"classes: expected unique names; received {_repeated(keys)!r} twice.")
    if (
        numbers is not None
        and numbers.dtype == np.int64
        and numbers_by_key.keys().isdisjoint(values)
    ):
        check_labels(file, numbers, len(keys), lambda example: f"line {lines[example]}")
        return Labels(numbers, len(keys), names)
    class_numbers = [numbers_by_key.get(value, -1) for value in values]
    if -1 in class_numbers:
        wrong = class_numbers.index(-1)
        others = class_numbers.count(-1) - 1
        near = (
            config.nearest(values[wrong], keys)
            if len(keys) <= 1000
            else "Correct the label, or the classes."
        )
        raise ValueError(
            f"{file}, line {lines[wrong]}: expected one of the {len(keys)} {origin}, received the "
            f"label {values[wrong]!r}{f' and {others} more such' if others else ''}. {near}"
        )
    return Labels(np.array(class_numbers, np.int64), len(keys), names)


def read_classes(file: str | os.PathLike) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read a file with one class on each line, `KEY` or `KEY what it is called`.

    Args:
        file: Path of the file, such as ImageNet's LOC_synset_mapping.txt, whose lines are like
            `n01440764 tench, Tinca tinca`.

    Returns:
        Keys and names of the classes: ("n01440764", ...), ("tench, Tinca tinca", ...).

    Raises:
        ValueError: If the file is missing or has no classes, or if a class appears twice.
    """
    path = absolute(file)
    parts = [line.split(maxsplit=1) for line in _text(path).splitlines() if line.strip()]
    if not parts:
        raise ValueError(f"{path}: no classes. Expected one per line.")
    keys = tuple(part[0] for part in parts)
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"{path}: the class {_repeated(keys)!r} appears twice. Expected each on one line."
        )
    return keys, tuple(part[-1].strip() for part in parts)


def labels_of(labels: Labels | None) -> Any:
    """Return the `labels` of a Source: None if there are none, or if they are not integers."""
    return None if labels is None or labels.values.dtype != np.int64 else lambda: labels.values


def _text(path: str) -> str:
    try:
        return files.read(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file. Correct the path.") from None
    except (IsADirectoryError, NotADirectoryError):
        raise ValueError(f"{path}: expected a file, received a directory.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, byte {error.start}: expected text in UTF-8. Save it as such."
        ) from None


def _delimiter(path: str, text: str) -> str:
    line = text.lstrip().split("\n", 1)[0]
    if "\t" in line or path.lower().endswith(".tsv"):
        return "\t"
    return max(",;|", key=line.count)  # a comma, if the line has none of them


def _positions(
    path: str, names: tuple[str, ...], columns: Sequence[str | int] | None, header: bool
) -> list[int]:
    """Return the positions of the columns to read."""
    if columns is None:
        columns = names
    positions = []
    for column in columns:
        if isinstance(column, int):
            if not 0 <= column < len(names):
                raise ValueError(
                    f"{path}: no column {column}; expected 0 to {len(names) - 1}, as its first "
                    f"line has {len(names)}."
                )
            positions.append(column)
        elif names.count(column) > 1:
            raise ValueError(
                f"{path}: {names.count(column)} columns have the name {column!r}. Give each column "
                "a unique name."
            )
        elif column in names:
            positions.append(names.index(column))
        else:
            hint = config.nearest(column, names)
            known = "" if hint.startswith("Expected") else f" It has {', '.join(names)}."
            raise ValueError(f"{path}: no column {column!r} in its first line.{known} {hint}")
    return positions


def _convert(rows: Table, name: str, cells: list[str], kind: str | None) -> np.ndarray:
    """Convert a column to numbers or text."""
    if kind is not None and kind not in _TYPES:
        raise ValueError(f"types[{name!r}]: received {kind!r}. {config.nearest(kind, _TYPES)}")
    # Not NumPy's own strings, each of which is as long as the longest.
    text = np.array(cells, object)
    if kind == "string":
        return text
    filled = [cell.strip() or "nan" for cell in cells]
    numbers = _numbers(filled) if any(cell.strip() for cell in cells) else None
    if numbers is not None and kind in (None, numbers.dtype.name):
        return numbers
    if numbers is not None and kind == "float32":
        return numbers.astype(np.float32)
    if kind is None:
        return text
    for cell, value, line in zip(cells, filled, rows.lines, strict=True):
        if not _is_number(value, kind):
            raise ValueError(
                f"{rows.file}, line {line}: expected {kind} in column {name!r}, received {cell!r}."
            )
    raise AssertionError(name)


def _numbers(values: Sequence[str]) -> np.ndarray | None:
    """Convert text to int64 if all are integers, to float32 if all are numbers, else to None."""
    # Longer text is no number, and each of NumPy's strings is as long as the longest.
    if max(map(len, values)) > 40:
        return None
    array = np.array(values, np.str_)
    for kind in (np.int64, np.float32):
        try:
            return array.astype(kind)
        except (ValueError, OverflowError):
            pass
    return None


def _is_number(value: str, kind: str) -> bool:
    number = _numbers([value])
    return number is not None and kind in (number.dtype.name, "float32")


def _repeated(names: Sequence[str]) -> str:
    return collections.Counter(names).most_common(1)[0][0]
