"""Image summaries: sample images with the model's predictions, after each epoch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import engine_of
from tfdist.storage import files
from tfdist.telemetry import contact_sheet

_COLUMNS = 4  # TensorBoard shows an image about 350 pixels wide


class ImageSamples(keras.callbacks.Callback):
    """Callback that writes sample images and their predictions to TensorBoard each epoch.

    The images are the same in every epoch. Every worker needs this callback, because all workers
    predict together. Only the chief writes.

    Args:
        log_dir: Directory of the logs. The images go to its subdirectory `validation`.
        data: Data set of batches `(images, labels)` whose first examples are shown. Images are
            `[batch, height, width, channels]` with 1, 3 or 4 channels; labels are `[batch]`, class
            numbers. The model returns a probability or a logit of each class for each image.
        count: Number of images, 16 by default.
        run: Name of this run, as for `tfdist.TensorBoard`.
        classes: Names of the classes; None to show class numbers.
        every: Number of epochs between two summaries, 1 by default.

    Raises:
        ValueError: If the data are not such images, or a number is invalid.
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
        if not files.tensorflow_writes(self.directory):
            raise ValueError(
                f"tfdist.ImageSamples: TensorFlow cannot write event files to {self.directory!r}. "
                "Pass a local log_dir."
            )
        self.images, self.labels = _first(data, count, classes)
        self.classes = classes
        self.every = every
        self._writer: Any = None

    def on_train_begin(self, logs=None):
        """See `keras.callbacks.Callback`."""
        engine = engine_of(self.model.distribute_strategy)
        if engine is None or engine.is_chief:
            files.make_writable(self.directory, "ImageSamples(log_dir=...)")
            self._writer = tf.summary.create_file_writer(self.directory, filename_suffix=".images")

    def on_epoch_end(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        if (epoch + 1) % self.every:
            return
        outputs = np.asarray(
            self.model.predict(self.images, batch_size=len(self.images), verbose=0)
        )
        # Checked on all workers: if only the chief failed, the others would hang.
        _check(outputs, self.classes)
        if self._writer is None:
            return
        captions = [
            caption(scores, label, self.classes)
            for scores, label in zip(probabilities(outputs), self.labels, strict=True)
        ]
        right = int(np.sum(outputs.argmax(axis=1) == self.labels))
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
        """See `keras.callbacks.Callback`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def caption(scores: np.ndarray, label: int, classes: Sequence[str] | None = None) -> str:
    """Return the predicted class of an image, and the label where that differs.

    Example:
        >>> caption(np.array([0.1, 0.9]), 1), caption(np.array([0.3, 0.7]), 0, ["cat", "dog"])
        ('1 90 %', 'dog 70 %, is cat')
    """

    def name(number: int) -> str:
        return str(number) if classes is None else classes[number]

    predicted = int(scores.argmax())
    wrong = "" if predicted == int(label) else f", is {name(int(label))}"
    return f"{name(predicted)} {scores[predicted]:.0%}".replace("%", " %") + wrong


def probabilities(outputs: np.ndarray) -> np.ndarray:
    """Return the model's outputs as probabilities, applying softmax if they are logits.

    Example:
        >>> probabilities(np.array([[2.0, 2.0], [-5.0, -5.0]])).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    outputs = outputs.astype(np.float64)
    # The tolerance is wide because half precision is not more exact.
    if (outputs >= 0).all() and np.allclose(outputs.sum(axis=1), 1, atol=0.02):
        return outputs
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _check(outputs: np.ndarray, classes: Sequence[str] | None) -> None:
    """Raise ValueError for predictions that are not scores of the classes."""
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ValueError(
            "ImageSamples: expected model outputs with a score per class, [batch, classes], of 2 "
            f"classes or more; received shape {list(outputs.shape)}."
        )
    if classes is not None and outputs.shape[1] > len(classes):
        raise ValueError(
            f"ImageSamples: classes: expected a name for each of the model's {outputs.shape[1]} "
            f"outputs; received {len(classes)} names."
        )


def _check_labels(labels: np.ndarray, classes: Sequence[str] | None) -> None:
    """Raise ValueError for labels that are not class numbers."""
    if labels.dtype.kind not in "iufb" or not np.equal(np.mod(labels, 1), 0).all():
        raise ValueError(
            "data: expected labels that are integer class numbers; received "
            f"{labels.dtype}, such as {labels[0]!r}."
        )
    if classes is not None and not ((labels >= 0) & (labels < len(classes))).all():
        raise ValueError(
            f"classes: expected a name for each label; received {len(classes)} names, and labels "
            f"from {int(labels.min())} to {int(labels.max())}."
        )


def _first(data: Any, count: int, classes: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` images and labels of a data set, as arrays."""
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for batch in itertools.islice(iter(data), count):  # a batch has at least one example
        if not isinstance(batch, tuple) or len(batch) < 2:
            raise ValueError(
                "data: expected batches of images and labels, (x, y); received a "
                f"{type(batch).__name__}."
            )
        x = np.asarray(batch[0])
        y = np.asarray(batch[1])
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
