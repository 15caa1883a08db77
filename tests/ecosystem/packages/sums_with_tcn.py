"""Train temporal convolutions of keras-tcn to sum the values of a sequence."""

import keras
import numpy as np
from tcn import TCN

rng = np.random.default_rng(0)
x = rng.normal(size=(256, 24, 2)).astype("float32")
y = x[:, :, 0].sum(1, keepdims=True)
for options in ({}, {"return_sequences": True, "nb_stacks": 2}, {"use_layer_norm": True}):
    inputs = keras.Input((24, 2))
    hidden = TCN(nb_filters=8, kernel_size=3, dilations=[1, 2, 4], **options)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(hidden)))
    model.compile("adam", "mse")
    model.fit(x, y, epochs=2, validation_split=0.25, verbose=0)
