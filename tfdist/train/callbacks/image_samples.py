"""Some images and what the model says of them become pictures for TensorBoard, after each epoch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import engine_of
from tfdist.telemetry import contact_sheet

_COLUMNS = 4  # TensorBoard shows a picture some 350 pixels wide


class ImageSamples(keras.callbacks.Callback):
    """Shows TensorBoard the same images after each epoch, with what the model says they are, and what they are.

    Every worker needs it, as all predict together; the chief writes.

    Args:
        log_dir: Directory of the logs; the pictures go to its subdirectory `validation`.
        data: Data set of batches `(images, labels)`, whose first examples are shown: images `[batch, height, width, channels]` with
            1, 3 or 4 channels, labels `[batch]` as numbers of classes. The model gives each image a probability, or a logit, of each
            class.
        count: How many.
        run: Name of this run, as for `tfdist.TensorBoard`.
        classes: Names of the classes; None: their numbers.
        every: After every so many epochs.

    Raises:
        ValueError: For data that are no such images, or a bad number.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike,
        data: Any,
        count: int = 16,
        *,
        run: str | None = None,
        classes: Sequence[str] | None = None,
        every: int = 1,
    ):
        super().__init__()
        for name, value in (("count", count), ("every", every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a number, 1 or more; received {value!r}.")
        self.directory = os.path.join(log_dir, *([run] if run is not None else []), "validation")
        self.images, self.labels = _first(data, count, classes)
        self.classes, self.every = classes, every
        self._writer: Any = None

    def on_train_begin(self, logs=None):
        engine = engine_of(self.model.distribute_strategy)
        if engine is None or engine.is_chief:
            self._writer = tf.summary.create_file_writer(self.directory, filename_suffix=".images")

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every:
            return
        said = np.asarray(self.model.predict(self.images, batch_size=len(self.images), verbose=0))
        _check(said, self.classes)  # on all workers: the chief alone would let the others wait
        if self._writer is None:
            return
        captions = [
            caption(scores, label, self.classes)
            for scores, label in zip(probabilities(said), self.labels, strict=True)
        ]
        right = int(np.sum(said.argmax(axis=1) == self.labels))
        pairs = list(zip(captions, self.images, strict=True))
        rows = [
            contact_sheet.Row("", "", pairs[i : i + _COLUMNS])
            for i in range(0, len(pairs), _COLUMNS)
        ]
        picture = contact_sheet.draw(f"epoch {epoch + 1}: {right} of {len(pairs)} right", rows)
        with self._writer.as_default(), tf.summary.record_if(True):
            tf.summary.image("predictions", np.asarray(picture)[None], step=epoch)
        self._writer.flush()

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def caption(scores: np.ndarray, label: int, classes: Sequence[str] | None = None) -> str:
    """What a model says of an image, and what it is where that differs.

    Example:
        >>> caption(np.array([0.1, 0.9]), 1), caption(np.array([0.3, 0.7]), 0, ["cat", "dog"])
        ('1 90 %', 'dog 70 %, is cat')
    """

    def name(number: int) -> str:
        return str(number) if classes is None else classes[number]

    said = int(scores.argmax())
    wrong = "" if said == int(label) else f", is {name(int(label))}"
    return f"{name(said)} {scores[said]:.0%}".replace("%", " %") + wrong


def probabilities(said: np.ndarray) -> np.ndarray:
    """What a model says of each class, as probabilities: logits, which are none, by their softmax.

    Example:
        >>> probabilities(np.array([[2.0, 2.0], [-5.0, -5.0]])).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    said = said.astype(np.float64)
    if (said >= 0).all() and np.allclose(
        said.sum(axis=1), 1, atol=0.02
    ):  # half precision is not closer
        return said
    powers = np.exp(said - said.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _check(said: np.ndarray, classes: Sequence[str] | None) -> None:
    """Raises ValueError for predictions that are no scores of the classes."""
    if said.ndim != 2 or said.shape[1] < 2:
        raise ValueError(
            f"ImageSamples: expected a model that gives each image a score of each class, [batch, classes], of 2 classes or more; received {list(said.shape)}."
        )
    if classes is not None and said.shape[1] > len(classes):
        raise ValueError(
            f"ImageSamples: classes: expected a name for each of the model's {said.shape[1]} outputs; received {len(classes)} names."
        )


def _check_labels(labels: np.ndarray, classes: Sequence[str] | None) -> None:
    """Raises ValueError for labels that are no numbers of the classes."""
    if labels.dtype.kind not in "iufb" or not np.equal(np.mod(labels, 1), 0).all():
        raise ValueError(
            f"data: expected labels that are numbers of classes, whole ones; received {labels.dtype}, such as {labels[0]!r}."
        )
    if classes is not None and not ((labels >= 0) & (labels < len(classes))).all():
        raise ValueError(
            f"classes: expected a name for each label; received {len(classes)} names, and labels from {int(labels.min())} to {int(labels.max())}."
        )


def _first(data: Any, count: int, classes: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """The first examples of a data set, as arrays."""
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for batch in itertools.islice(iter(data), count):  # a batch has one example at least
        if not isinstance(batch, tuple) or len(batch) < 2:
            raise ValueError(
                f"data: expected batches of images and labels, (x, y); received a {type(batch).__name__}."
            )
        x, y = np.asarray(batch[0]), np.asarray(batch[1])
        if not contact_sheet.is_image(x.shape[1:], x.dtype) or y.ndim != 1:
            raise ValueError(
                "data: expected images [batch, height, width, 1, 3 or 4] with labels [batch]; "
                f"received {list(x.shape)} with {list(y.shape)}."
            )
        images.append(x)
        labels.append(y)
        if sum(map(len, images)) >= count:
            break
    if not images:
        raise ValueError("data: expected images to show; received no batch.")
    shown = np.concatenate(labels)[:count]
    _check_labels(shown, classes)
    return np.concatenate(images)[:count], shown
