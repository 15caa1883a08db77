"""Make batches of augmented images from a folder of JPEG files, by one data pipeline, timed.

Nothing is trained.

All of them give batches `[64, 224, 224, 3]` of float32 in [0, 1] (PyTorch's `[64, 3, 224, 224]`)
and their labels, in an order that is shuffled among all files. Frameworks are imported only in the
process that uses them.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import time
from collections.abc import Callable, Iterable

BATCH = 64
SIDE = 224
# Of the random crop, as torchvision and TensorFlow's ImageNet examples have it.
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
KERAS_SIDE = 256  # what Keras' utility resizes to, before the random crop


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a process: a key of `PIPELINES`, its folder, and the cores that it may use."""

    pipeline: str
    directory: pathlib.Path
    cores: tuple[int, ...]


def serve(job: Job) -> tuple[None, Callable[[int, int], dict]]:
    """Build a data pipeline, and return a function that carries out an order.

    The function takes the number of untimed batches, and that of the timed ones after them.

    It returns "first", seconds to the first batch of a new pass; "seconds" and "cpu", time and
    processor time of the timed batches; "memory", bytes held. The last two are of this process and
    those it started.
    """
    os.sched_setaffinity(0, job.cores)  # before a framework counts the cores
    batches = PIPELINES[job.pipeline](job)

    def measure(untimed: int, timed: int) -> dict:
        begin = time.perf_counter()
        iterator = iter(batches)
        _check(next(iterator))
        first = time.perf_counter() - begin
        for _ in range(untimed - 1):
            next(iterator)
        memory = _total(_memory)
        cpu = _total(_processor_time)
        begin = time.perf_counter()
        for _ in range(timed):
            next(iterator)
        seconds = time.perf_counter() - begin
        return {
            "first": first,
            "seconds": seconds,
            "cpu": _total(_processor_time) - cpu,
            "memory": max(memory, _total(_memory)),
        }

    return None, measure


def _tfdist(job: Job) -> Iterable:
    """Read files by number and decode the crop alone.

    The order follows from the seed, for any number of threads.
    """
    from tfdist.data import pipeline, transforms
    from tfdist.data.sources import image_files

    source = image_files.image_folder(job.directory, decode=False)
    return pipeline(
        source, BATCH, tail="drop", transform=transforms.images(SIDE, augment=True, std=255.0)
    )


def _tf_data(job: Job) -> Iterable:
    """Shuffle all file names and decode the crop alone, as an expert writes it.

    The order is that in which the threads are ready.
    """
    import tensorflow as tf

    names = sorted(path.name for path in job.directory.iterdir())
    files = [
        (str(path), label)
        for label, name in enumerate(names)
        for path in sorted((job.directory / name).iterdir())
    ]
    paths, labels = map(list, zip(*files, strict=True))

    def load(path, label):
        encoded = tf.io.read_file(path)
        shape = tf.image.extract_jpeg_shape(encoded)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape,
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            aspect_ratio_range=ASPECT,
            area_range=AREA,
            max_attempts=10,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
        image = tf.image.random_flip_left_right(tf.image.resize(image, [SIDE, SIDE]))
        return tf.ensure_shape(image, [SIDE, SIDE, 3]) / 255, label

    options = tf.data.Options()
    options.deterministic = False
    data = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths))
    data = data.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH, drop_remainder=True)
    return data.prefetch(tf.data.AUTOTUNE).with_options(options)


def _keras(job: Job) -> Iterable:
    """Decode and resize whole images, then crop and flip batches at random by layers.

    Keras' guides do the same.
    """
    import keras
    import tensorflow as tf

    data = keras.utils.image_dataset_from_directory(
        job.directory,
        label_mode="int",
        image_size=(KERAS_SIDE, KERAS_SIDE),
        batch_size=BATCH,
        shuffle=True,
        seed=1,
    )
    layers = [
        keras.layers.RandomCrop(SIDE, SIDE),
        keras.layers.RandomFlip("horizontal"),
        keras.layers.Rescaling(1 / 255),
    ]
    augment = keras.Sequential(layers)
    data = data.map(
        lambda x, y: (augment(x, training=True), y), num_parallel_calls=tf.data.AUTOTUNE
    )
    return data.prefetch(tf.data.AUTOTUNE)


def _torch(job: Job) -> Iterable:
    """Apply torchvision's RandomResizedCrop, RandomHorizontalFlip and ToTensor, written out.

    Pillow decodes the images.
    """
    import torch

    return torch.utils.data.DataLoader(
        _Folder(job.directory),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=len(job.cores),
    )


class _Folder:
    """Read a folder of images as torchvision's ImageFolder does: a map-style data set."""

    def __init__(self, directory: pathlib.Path):
        names = sorted(path.name for path in directory.iterdir())
        self._files = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((directory / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int):
        import numpy as np
        import torch
        from PIL import Image

        path, label = self._files[number]
        with path.open("rb") as file:
            image = Image.open(file).convert("RGB")
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=_crop(*image.size))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255), label


def _crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Return a box of random area and aspect ratio, or the image's middle if none of ten fits."""
    import numpy as np

    for _ in range(10):
        area = width * height * random.uniform(*AREA)
        aspect = np.exp(random.uniform(*np.log(ASPECT)))
        w = round((area * aspect) ** 0.5)
        h = round((area / aspect) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left = random.randint(0, width - w)
            top = random.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left = (width - side) // 2
    top = (height - side) // 2
    return left, top, left + side, top + side


PIPELINES = {"tfdist": _tfdist, "tf_data": _tf_data, "keras": _keras, "torch": _torch}


def _check(batch) -> None:
    """Check that a data pipeline's batches have the shapes and types of the others'."""
    images, labels = batch
    shape = tuple(images.shape)
    if shape not in ((BATCH, SIDE, SIDE, 3), (BATCH, 3, SIDE, SIDE)) or tuple(labels.shape) != (
        BATCH,
    ):
        raise ValueError(
            f"expected {BATCH} images of {SIDE} x {SIDE} and their labels, received {shape} and "
            f"{tuple(labels.shape)}"
        )
    values = images.numpy()
    if values.dtype != "float32" or not (0 <= values.min() < 0.2 and 0.8 < values.max() <= 1.001):
        raise ValueError(
            f"expected float32 from 0 to 1, received {values.dtype} from {values.min()} to "
            f"{values.max()}"
        )


def _total(figure: Callable[[pathlib.Path], float], pid: int | None = None) -> float:
    """Return the sum of a figure over this process and all that it started."""
    process = pathlib.Path("/proc") / str(pid or os.getpid())
    try:
        children = {
            child
            for task in (process / "task").iterdir()
            for child in (task / "children").read_text().split()
        }
        return figure(process) + sum(_total(figure, int(child)) for child in children)
    except OSError:  # it has just ended
        return 0.0


def _memory(process: pathlib.Path) -> float:
    """Return a process's bytes in memory; a page that processes share is divided among them."""
    lines = (process / "smaps_rollup").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _processor_time(process: pathlib.Path) -> float:
    """Return a process's processor time, in seconds."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
