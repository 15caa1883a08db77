"""scikit-learn's handwritten digits become the TFDS data set `tfdist_digits`; nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import tensorflow_datasets as tfds

TRAIN, TEST = 1500, 297


class TfdistDigits(tfds.core.GeneratorBasedBuilder):
    """1,797 handwritten digits of 8 x 8 pixels, 1,500 to train on and 297 to test on.

    The grey levels 0 to 16 of the original are spread over 0 to 255, so that the images are scaled like those
    of every other TFDS data set; `round(image / 255 * 16)` gives the original back. The test images lie
    evenly among the others in scikit-learn's order, see `is_test`. Importing this module registers the name
    with TFDS.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits of 8 x 8 pixels, as they come with scikit-learn.",
            homepage="https://archive.ics.uci.edu/dataset/80",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            disable_shuffling=True,  # keep scikit-learn's order
        )

    def download_and_prepare(self, **kwargs) -> None:
        """Prepares without TFDS' announcement of a download and its progress bars: it takes a second."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            super().download_and_prepare(**kwargs)

    def _split_generators(self, dl_manager):
        images, labels = _read()
        test = is_test(np.arange(len(labels)))
        return {
            "train": self._generate_examples(images[~test], labels[~test]),
            "test": self._generate_examples(images[test], labels[test]),
        }

    def _generate_examples(self, images, labels):
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield index, {"image": image, "label": int(label)}


def is_test(index: np.ndarray) -> np.ndarray:
    """Whether the digits at these places of scikit-learn's order belong to the test split.

    Args:
        index: Places, int `[n]`, each in [0, 1797).

    Returns:
        bool `[n]`; about every sixth is True, 297 in all.

    Example:
        >>> int(is_test(np.arange(1797)).sum())
        297
        >>> np.flatnonzero(is_test(np.arange(20))).tolist()
        [6, 12, 18]
    """
    return (index + 1) * TEST // (TRAIN + TEST) > index * TEST // (TRAIN + TEST)


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 `[1797, 8, 8, 1]` from 0 to 255, labels int `[1797]`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "tfdist_digits: preparing this data set for the first time takes scikit-learn, which is not installed. "
            "Run: pip install tfdist[digits]"
        ) from error
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return images[..., np.newaxis], digits.target
