"""Train the network of benchmarks/imagenet.py by Keras alone, with a tf.data input of its own.

python benchmarks/common/imagenet_keras.py TREE SIZE FILTERS BATCH EPOCHS RATE RESULT.json
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time


def main(tree: str, *numbers: str) -> None:
    """Train on the tree, and write accuracy and images/s of the median epoch but the first."""
    size, filters, batch, epochs = map(int, numbers[:4])
    rate, result = float(numbers[4]), pathlib.Path(numbers[5])
    import keras
    import tensorflow as tf

    from tfdist import models

    def files(split: str) -> tuple[list[str], list[int]]:
        classes = sorted(path.name for path in pathlib.Path(tree, split).iterdir())
        paths = sorted(map(str, pathlib.Path(tree, split).glob("*/*.JPEG")))
        return paths, [classes.index(pathlib.Path(path).parent.name) for path in paths]

    def crop(content: tf.Tensor) -> tf.Tensor:
        begin, shape, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(content),
            tf.zeros([1, 0, 4]),
            area_range=(0.08, 1.0),
            min_object_covered=0.0,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], shape[0], shape[1]])
        image = tf.image.decode_and_crop_jpeg(content, window, channels=3)
        return tf.image.random_flip_left_right(tf.image.resize(image, [size, size]))

    def centre(content: tf.Tensor) -> tf.Tensor:
        image = tf.image.central_crop(tf.io.decode_jpeg(content, 3), 0.875)
        return tf.image.resize(image, [size, size])

    def read(split: str) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(files(split))
        train = split == "train"
        if train:
            data = data.shuffle(len(data))
        data = data.map(
            lambda path, y: ((crop if train else centre)(tf.io.read_file(path)), y),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        return data.batch(batch).prefetch(tf.data.AUTOTUNE)

    class Seconds(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds.append(time.perf_counter() - self.began)

    keras.utils.set_random_seed(0)
    seconds: list[float] = []
    train = read("train")
    model = models.resnet34((size, size, 3), len(set(files("train")[1])), filters=filters)
    updates = epochs * len(train)
    model.compile(
        keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(rate, updates), 0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(train, epochs=epochs, callbacks=[Seconds()], verbose=2)
    facts = {
        "accuracy": model.evaluate(read("val"), return_dict=True, verbose=2)["accuracy"],
        "rate": len(files("train")[0]) / statistics.median(seconds[1:]),
    }
    result.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
