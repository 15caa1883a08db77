"""Train quantized layers of HGQ2, without and with XLA, from its PyDataset of kept tensors."""

import keras
import numpy as np
from hgq.config import QuantizerConfig, QuantizerConfigScope
from hgq.layers import QDense
from hgq.regularizers import MonoL1
from hgq.utils.sugar import Dataset, FreeEBOPs

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 16)).astype("float32")
y = keras.utils.to_categorical(x[:, :5].argmax(1), 5)
train = Dataset(x, y, batch_size=64, device="cpu:0")
validation = Dataset(x[:128], y[:128], batch_size=64, device="cpu:0")
weights = QuantizerConfigScope(
    place="all", k0=1, b0=3, i0=0, default_q_type="kbi", overflow_mode="sat_sym"
)
lanes = QuantizerConfigScope(
    place="datalane", k0=0, default_q_type="kif", overflow_mode="wrap", f0=3, i0=3
)
for options in ({"jit_compile": False}, {"jit_compile": True, "steps_per_execution": 4}):
    with weights, lanes:
        inputs = QuantizerConfig(place="datalane", k0=1)
        outputs = QuantizerConfig(place="datalane", k0=1, fr=MonoL1(1e-3))
        model = keras.Sequential(
            [
                QDense(16, beta0=1e-5, iq_conf=inputs, activation="relu"),
                QDense(8, beta0=1e-5, activation="relu"),
                QDense(5, beta0=1e-5, enable_oq=True, oq_conf=outputs),
            ]
        )
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(5e-3), loss, metrics=["accuracy"], **options)
    model.fit(train, epochs=3, validation_data=validation, verbose=0, callbacks=[FreeEBOPs()])
    model.evaluate(validation, verbose=0)
