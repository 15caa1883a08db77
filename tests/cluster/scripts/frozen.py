"""Train until another worker is lost; the command is `frozen.py`."""

import keras
import numpy as np

import tfdist

strategy = tfdist.make_strategy(timeout=1000)
assert strategy.tfdist_engine.transport is not None, "expected native collectives"
with strategy.scope():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((4000, 3), np.float32)
says = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("trains", flush=True))
model.fit(x, x[:, :1], batch_size=4, epochs=1_000_000, verbose=0, callbacks=[says])
