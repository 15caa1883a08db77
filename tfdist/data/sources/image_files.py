"""Sources of image files: class directories, file lists and ImageNet.

`image_folder` takes the label from a file's directory, `manifest` from a table, and `imagenet` from
ImageNet's own tables. A file is opened only when its example is read.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.data import remote_cache
from tfdist.data.files_io import absolute, is_remote
from tfdist.data.sources.source import Source
from tfdist.data.sources.tables import Labels, classify, labels_of, read
from tfdist.data.transforms import decode_image
from tfdist.storage import files

# Formats that `tf.io.decode_image` reads in every supported version of TensorFlow.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
# Number of directories listed at a time: each thread waits for a disk or a server.
_THREADS = 16


def image_folder(
    directory: str | os.PathLike,
    *,
    classes: Sequence[str] | None = None,
    labels: bool = True,
    channels: int = 3,
    extensions: Sequence[str] = EXTENSIONS,
    decode: bool = True,
) -> Source:
    """Return a Source of images that are stored in one directory for each class.

    Names that begin with a dot, files with other extensions, and images outside the class
    directories are ignored. A class directory may have subdirectories. EXIF orientation is ignored.

    Args:
        directory: Directory of the class directories; it may be in an object store,
            "s3://bucket/train".
        classes: Names of the class directories in the order of their numbers; others are ignored.
            None: all, in alphabetical order.
        labels: Whether to read labels. False: all images below `directory`, without labels, for
            `predict`.
        channels: Number of channels: 1 (grey), 3, or 4 (with transparency, which no JPEG has);
            default: 3.
        extensions: Extensions of image files, in lower case.
        decode: Whether to decode images. False: an image is its file's content, a string scalar.
            `transforms.images` accepts it, and decodes only the part of a JPEG that it needs.

    Returns:
        A Source of `(image, label)`, uint8 `[height, width, channels]` and int64, ordered by class
        and path; or of images alone.

    Raises:
        ValueError: If a directory is missing, if a class has no images, or if there are no images
            at all.

    Example:
        >>> import pathlib, tempfile
        >>> directory = pathlib.Path(tempfile.mkdtemp())
        >>> image = tf.io.encode_png(tf.zeros([4, 6, 3], tf.uint8)).numpy()
        >>> for name in ("cats", "dogs"):
        ...     (directory / name).mkdir()
        ...     _ = (directory / name / "1.png").write_bytes(image)
        >>> source = image_folder(directory)
        >>> source.class_names, [(image.shape, int(label)) for image, label in source.dataset()]
        (('cats', 'dogs'), [(TensorShape([4, 6, 3]), 0), (TensorShape([4, 6, 3]), 1)])
    """
    if isinstance(extensions, str):
        raise ValueError(
            f"extensions: expected a tuple, such as ({extensions!r},); received {extensions!r}."
        )
    root = absolute(directory)
    root_images, subdirectories, ignored = _list(root, tuple(extensions))
    name = f"images in {root}"
    if not labels:
        image_paths = _walk(
            [os.path.join(root, subdirectory) for subdirectory in subdirectories],
            tuple(extensions),
            ignored,
        )
        paths = sorted(itertools.chain(root_images, *image_paths))
        if not paths:
            raise ValueError(
                f"{name}: there are none, nor in the directories below. "
                f"{_describe_ignored(ignored, extensions)}"
            )
        return _source(name, paths, None, channels, decode)
    names = tuple(subdirectories if classes is None else classes)
    for subdirectory in names:
        if subdirectory not in subdirectories:
            hint = config.nearest(subdirectory, subdirectories) if subdirectories else ""
            raise ValueError(
                f"{root}: no directory for the class {subdirectory!r}. "
                f"{hint or 'It has no directories.'}"
            )
    image_paths = _walk(
        [os.path.join(root, subdirectory) for subdirectory in names], tuple(extensions), ignored
    )
    if not any(image_paths):
        unlabelled = (
            f" {len(root_images)} are in {root} itself: pass labels=False if they have no labels."
            if root_images
            else ""
        )
        raise ValueError(
            f"{name}: there are none in its {len(names)} class directories.{unlabelled} "
            f"{_describe_ignored(ignored, extensions)}"
        )
    for subdirectory, paths in zip(names, image_paths, strict=True):
        if not paths:
            raise ValueError(
                f"{os.path.join(root, subdirectory)}: a class directory without images. Remove "
                "it, or list the other classes in classes=."
            )
    numbers: np.ndarray = np.repeat(
        np.arange(len(names), dtype=np.int64), [len(paths) for paths in image_paths]
    )
    return _source(
        name,
        list(itertools.chain(*image_paths)),
        Labels(numbers, len(names), names),
        channels,
        decode,
    )


def manifest(
    file: str | os.PathLike,
    *,
    root: str | os.PathLike | None = None,
    path_column: str | int = 0,
    label_column: str | int | None = 1,
    delimiter: str = "auto",
    header: bool | None = None,
    classes: int | Sequence[str] | str | os.PathLike | None = None,
    channels: int = 3,
    decode: bool = True,
    check: bool = True,
) -> Source:
    r"""Return a Source of the files that a CSV or TSV file lists, one in each row.

    A file may be listed several times.

    Args:
        file: The list, as `tables.read` accepts it.
        root: Directory that relative paths start from; None: the directory of `file`.
        path_column: Column of the paths, by name or by position from 0 on.
        label_column: Column of the labels; None: the examples are x alone.
        delimiter: Column separator; "auto": see `tables.read`.
        header: Whether the first line names the columns; None: if a column is given by name.
        classes: Names of the classes, their number, or a file of names; None: see
            `tables.classify`.
        channels: Number of channels of the images.
        decode: Whether to decode images. False: x is the file's content, a string scalar; for
            `transforms.images`, and for files that are not images.
        check: Whether to check now that all files exist; each of their directories is listed once.
            False: a missing file is an error when it is read.

    Returns:
        A Source of `(image, label)`, in the order of the rows.

    Raises:
        ValueError: If the list is missing, empty or damaged, if it lacks a column, if a label is
            not one of the classes, or if a listed file does not exist; the message names the line.

    Example:
        >>> import pathlib, tempfile
        >>> directory = pathlib.Path(tempfile.mkdtemp())
        >>> image = tf.io.encode_png(tf.zeros([4, 6, 3], tf.uint8)).numpy()
        >>> _ = (directory / "a.png").write_bytes(image)
        >>> _ = (directory / "list.csv").write_text("file,animal\na.png,cat\na.png,dog\n")
        >>> source = manifest(directory / "list.csv", path_column="file", label_column="animal")
        >>> source.cardinality, source.class_names, source.labels()
        (2, ('cat', 'dog'), array([0, 1]))
    """
    columns = [path_column] if label_column is None else [path_column, label_column]
    listed = read(file, columns, delimiter, header)
    base = os.path.dirname(listed.file) if root is None else absolute(root)
    paths = [path if is_remote(path) else os.path.join(base, path) for path in listed.columns[0]]
    if check:
        _check_present(listed.file, listed.columns[0], paths, listed.lines, base)
    labels = (
        None
        if label_column is None
        else classify(listed.columns[1], listed.file, listed.lines, classes)
    )
    return _source(f"files of {listed.file}", paths, labels, channels, decode)


def imagenet(
    root: str | os.PathLike,
    split: str = "train",
    *,
    channels: int = 3,
    decode: bool = True,
    check: bool = True,
) -> Source:
    """Return a Source of ImageNet (ILSVRC 2012) in the layout of Kaggle's archive, unpacked.

    Args:
        root: Directory of LOC_train_solution.csv, LOC_val_solution.csv, LOC_synset_mapping.txt and
            ILSVRC/.
        split: Split to read: "train", "val", or "test", which has no labels.
        channels: Number of channels of the images.
        decode: Whether to decode images. False: images are their files' content, for
            `transforms.images`.
        check: Whether to check now that all listed images exist. The list of the test images is
            `LOC_sample_submission.csv`; without that file, they are not checked.

    Returns:
        A Source of `(image, label)`. The classes are the ones of LOC_synset_mapping.txt, by their
        English names. The test split is a Source of images alone.

    Raises:
        ValueError: If `manifest` raises it, or if the split is unknown.
    """
    base = absolute(root)
    images = os.path.join(base, "ILSVRC", "Data", "CLS-LOC", split)
    if split == "test":
        test_list = os.path.join(base, "LOC_sample_submission.csv")
        if check and files.exists(test_list):
            listed = read(test_list, ["ImageId"])
            names = [f"{image}.JPEG" for image in listed.columns[0]]
            test_paths = [os.path.join(images, name) for name in names]
            _check_present(listed.file, names, test_paths, listed.lines, images)
        return image_folder(images, labels=False, channels=channels, decode=decode)
    if split not in ("train", "val"):
        raise ValueError(
            f"split: received {split!r}. {config.nearest(split, ('train', 'val', 'test'))}"
        )
    listed = read(os.path.join(base, f"LOC_{split}_solution.csv"), ["ImageId", "PredictionString"])
    # "n02017213 115 49 448 294": the first word is the class, the rest a box.
    synsets = [text.split(" ", 1)[0] for text in listed.columns[1]]
    labels = classify(
        synsets, listed.file, listed.lines, os.path.join(base, "LOC_synset_mapping.txt")
    )
    train_names = (
        f"{synset}/{image}.JPEG" for synset, image in zip(synsets, listed.columns[0], strict=True)
    )
    names = (
        list(train_names) if split == "train" else [f"{image}.JPEG" for image in listed.columns[0]]
    )
    paths = [os.path.join(images, name) for name in names]
    if check:
        _check_present(listed.file, names, paths, listed.lines, images)
    return _source(f"imagenet[{split}] in {base}", paths, labels, channels, decode)


def _source(
    name: str, paths: list[str], labels: Labels | None, channels: int, decode: bool
) -> Source:
    if channels not in (1, 3, 4):
        raise ValueError(f"channels: expected 1, 3 or 4, received {channels!r}.")
    cached = any(map(remote_cache.is_cached, paths))
    with tf.device("CPU"):
        table = tf.constant(paths)
        numbers = None if labels is None else tf.constant(labels.values)

    def raw(number: tf.Tensor) -> tf.Tensor:
        path = tf.gather(table, number)
        return remote_cache.content(path) if cached else tf.io.read_file(path)

    def assemble(number: tf.Tensor, content: tf.Tensor) -> Any:
        x = decode_image(content, channels) if decode else content
        return x if numbers is None else (x, tf.gather(numbers, number))

    spec = (
        tf.TensorSpec([None, None, channels], tf.uint8) if decode else tf.TensorSpec([], tf.string)
    )
    return Source(
        name,
        spec if labels is None else (spec, tf.TensorSpec([], labels.values.dtype)),
        len(paths),
        None if labels is None else labels.classes,
        None if labels is None else labels.names,
        read=lambda number: assemble(number, raw(number)),
        describe=lambda number: tf.strings.join(["file ", tf.gather(table, number)]),
        labels=labels_of(labels),
        raw=raw,
        assemble=assemble,
    )


def _check_present(
    file: str, names: Sequence[str], paths: Sequence[str], lines: Sequence[int], root: str
) -> None:
    """Raise ValueError unless all files exist."""
    expected: dict[str, set[str]] = collections.defaultdict(set)
    for path in paths:
        directory, _, name = path.rpartition("/")
        expected[directory].add(name)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        missing = dict(
            zip(
                expected,
                threads.map(
                    lambda directory: expected[directory].difference(_names(directory) or ()),
                    expected,
                ),
                strict=True,
            )
        )
    if not any(missing.values()):
        return
    absent = [
        i
        for i, path in enumerate(paths)
        if path.rpartition("/")[2] in missing[path.rpartition("/")[0]]
    ]
    first = absent[0]
    remedy = f"Relative paths begin at {root}: correct the list, or pass their directory as root=."
    if lines[first] == 1:
        remedy = "Is that line a header? Then pass header=True, or name the columns. " + remedy
    raise ValueError(
        f"{file}, line {lines[first]}: {names[first]!r} does not exist"
        f"{f', nor do the files of {len(absent) - 1} more' if len(absent) > 1 else ''} of "
        f"{len(paths)} lines. {remedy}"
    )


def _names(directory: str) -> list[str] | None:
    """Return the names in a directory; None if the directory does not exist."""
    try:
        return files.list_dir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _list(
    directory: str, extensions: tuple[str, ...]
) -> tuple[list[str], list[str], collections.Counter]:
    """List a directory.

    Returns:
        Paths of its images, names of its subdirectories, and the number of ignored entries of each
        kind.
    """
    names = _names(directory)
    if names is None:
        raise ValueError(f"{directory}: no such directory. Correct the path.")
    images = []
    subdirectories = []
    ignored = collections.Counter[str]()
    for entry in sorted(names):
        name = entry.rstrip("/")  # some file systems mark directories with a slash
        if name.startswith("."):
            ignored["hidden"] += 1
        elif name.lower().endswith(extensions):
            # Not checked for being a directory: to check each file would take minutes.
            images.append(os.path.join(directory, name))
        elif entry != name or files.is_dir(os.path.join(directory, name)):
            subdirectories.append(name)
        else:
            ignored[os.path.splitext(name)[1].lower() or "without extension"] += 1
    return images, subdirectories, ignored


def _walk(
    directories: Sequence[str], extensions: tuple[str, ...], ignored: collections.Counter
) -> list[list[str]]:
    """Return the paths of the images below each directory.

    Ignored entries are counted in `ignored`.
    """

    def images_below(directory: str) -> tuple[list[str], collections.Counter]:
        images, subdirectories, ignored_here = _list(directory, extensions)
        for name in subdirectories:
            deeper, more = images_below(os.path.join(directory, name))
            images += deeper
            ignored_here += more
        return sorted(images), ignored_here

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        results = list(threads.map(images_below, directories))
    for _, ignored_here in results:
        ignored.update(ignored_here)
    return [images for images, _ in results]


def _describe_ignored(ignored: collections.Counter, extensions: Sequence[str]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in ignored.most_common(5))
    return (
        f"Expected files that end in {', '.join(extensions)}; ignored "
        f"{f'{ignored.total()} others: {kinds}' if kinds else 'no others'}."
    )
