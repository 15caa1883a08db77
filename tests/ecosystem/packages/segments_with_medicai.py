"""Train a segmentation with a loss and a metric of medicai, which add up over rows and pixels."""

import keras
import numpy as np
from medicai.losses import SparseDiceCELoss
from medicai.metrics import SparseDiceMetric

rng = np.random.default_rng(0)
x = rng.normal(size=(22, 16, 16, 1)).astype("float32")
y = np.digitize(x, [-0.5, 0.5]).astype("float32")
model = keras.Sequential(
    [
        keras.Input((16, 16, 1)),
        keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(3, 3, padding="same"),
    ]
)
model.compile(
    keras.optimizers.Adam(1e-2),
    SparseDiceCELoss(from_logits=True, num_classes=3),
    metrics=[SparseDiceMetric(from_logits=True, num_classes=3, ignore_empty=True, name="dice")],
)
model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x[:9], y[:9]))
