"""The TFDS dataset `tfdist_digits`: handwritten digits that are a part of tfdist.

They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak
(1998), https://doi.org/10.24432/C50P49, licensed under CC BY 4.0, as scikit-learn has it too.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import io

import numpy as np
import tensorflow_datasets as tfds

TRAIN = 1500
TEST = 297


class TfdistDigits(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of 1,797 handwritten digits of 8 x 8 pixels: 1,500 train and 297 test.

    The grey levels 0 to 16 of the original are scaled to 0 to 255, so that the images have the
    range of other TFDS datasets; `round(image / 255 * 16)` restores the original. The test images
    are spread evenly over the original order, see `is_test`. Importing this module registers the
    name with TFDS.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits of 8 x 8 pixels, in 17 grey levels.",
            homepage="https://archive.ics.uci.edu/dataset/80",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            disable_shuffling=True,  # keep the original order
        )

    def download_and_prepare(self, **kwargs) -> None:
        """Prepare the dataset; see `tfds.core.DatasetBuilder`.

        TFDS' announcement of a download and its progress bars are suppressed, because this takes a
        second.
        """
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
    """Return whether digits belong to the test split.

    Args:
        index: Places in the original order, int `[n]`, each in [0, 1797).

    Returns:
        bool `[n]`; about every sixth is True, 297 in total.

    Example:
        >>> int(is_test(np.arange(1797)).sum())
        297
        >>> np.flatnonzero(is_test(np.arange(20))).tolist()
        [6, 12, 18]
    """
    return (index + 1) * TEST // (TRAIN + TEST) > index * TEST // (TRAIN + TEST)


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 `[1797, 8, 8, 1]` from 0 to 255, and labels, uint8 `[1797]`."""
    file = importlib.resources.files(__package__) / "digits.npz"
    with file.open("rb") as opened, np.load(opened) as digits:
        images = np.round(digits["images"] * (255 / 16)).astype(np.uint8)
        return images[..., np.newaxis], digits["labels"]
