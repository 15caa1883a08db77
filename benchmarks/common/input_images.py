"""Make a folder of JPEG files, a directory for each class, unless the folder is there already.

Each picture is smooth noise of all scales, cut from a few large planes of it: as in photographs,
the power falls with the frequency, so that a file has about 100 kB, as ImageNet's have. The same
number always gives the same files.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import pathlib
import shutil
import tempfile

import numpy as np

WIDTH = 500
HEIGHT = 375
QUALITY = 93
CLASSES = 32
VERSION = 1  # of what the files hold
_PLANE = 1024
_PLANES = 4
# How fast the amplitude falls with the frequency, and the contrast.
_LUMA = (1.3, 50.0)
_CHROMA = (1.6, 20.0)


def folder(count: int, processes: int) -> pathlib.Path:
    """Return a directory with so many images, under the system's directory of temporary files.

    Args:
        count: Number of images.
        processes: Processes that make them.
    """
    directory = pathlib.Path(tempfile.gettempdir()) / f"tfdist-benchmark-images-{count}-v{VERSION}"
    if directory.exists():
        return directory
    made = pathlib.Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=directory.parent))
    try:
        for label in range(min(CLASSES, count)):
            (made / f"class_{label:03}").mkdir()
        numbers = [range(first, count, processes) for first in range(processes)]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
            list(pool.map(_write, [made] * processes, numbers))
        made.rename(directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return directory


def size(directory: pathlib.Path) -> tuple[int, int]:
    """Return the number of files, and of their bytes."""
    sizes = [file.stat().st_size for file in directory.glob("*/*.jpg")]
    return len(sizes), sum(sizes)


def _write(directory: pathlib.Path, numbers: range) -> None:
    from PIL import Image

    for number in numbers:
        random = np.random.default_rng(number)
        planes = [
            128 + contrast * _cut(random, slope) for slope, contrast in (_LUMA, _CHROMA, _CHROMA)
        ]
        pixels = np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)
        path = directory / f"class_{number % CLASSES:03}" / f"{number:06}.jpg"
        Image.frombytes("YCbCr", (WIDTH, HEIGHT), pixels.tobytes()).save(
            path, "JPEG", quality=QUALITY
        )


def _cut(random: np.random.Generator, slope: float) -> np.ndarray:
    """Return a piece of one of the planes, turned at random.

    The shape is [HEIGHT, WIDTH]. Mean and deviation are 0 and 1, but for chance.
    """
    plane = _planes(slope)[random.integers(_PLANES)]
    top = random.integers(_PLANE - HEIGHT)
    left = random.integers(_PLANE - WIDTH)
    return plane[top : top + HEIGHT, left : left + WIDTH][
        :: random.choice((1, -1)), :: random.choice((1, -1))
    ]


@functools.cache
def _planes(slope: float) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(_PLANE)[:, None], np.fft.rfftfreq(_PLANE)[None])
    amplitude = np.maximum(frequency, 1 / 250) ** -slope
    planes = [
        np.fft.irfft2(np.fft.rfft2(random.standard_normal((_PLANE, _PLANE))) * amplitude)
        for _ in range(_PLANES)
    ]
    return [(plane / plane.std()).astype(np.float32) for plane in planes]
