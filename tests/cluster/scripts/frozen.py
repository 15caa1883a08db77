"""Train until another worker is lost; the command is `frozen.py`."""

import keras
import numpy as np

import tfdist

strategy = tfdist.make_strategy(timeout=1000)
assert strategy.tfdist_engine.transport is not None, "expected native collectives"
with strategy.scope():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((400_000, 3), np.float32)
model.fit(x[:8], x[:8, :1], batch_size=4, verbose=0)
print("trains", flush=True)
# A single epoch: at its end, metrics travel by TensorFlow's collectives, which fail by themselves.
model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
