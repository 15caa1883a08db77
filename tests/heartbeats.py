"""Check the heartbeats of evaluations and predictions in a fit."""

import keras
import numpy as np
import pytest

from tfdist.runtime.launch_protocol import PROGRESS_FILE, Phase, progress, read_heartbeat
from tfdist.train.health.heartbeat import Heartbeat


def check(strategy, path: str) -> None:
    """Check them under a strategy, whose heartbeats go to a file meanwhile."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PROGRESS_FILE, path)
            progress.cache_clear()
            patch.setattr(strategy.tfdist_engine, "heartbeat", Heartbeat(is_chief=True))
            _check(strategy, path)
    finally:
        progress.cache_clear()


def _check(strategy, path: str) -> None:
    traced = {"evaluate": set(), "predict": set()}
    seen = []

    class Model(keras.Sequential):
        def test_step(self, batch):
            traced["evaluate"].add(read_heartbeat(path).phase)
            return super().test_step(batch)

        def predict_step(self, batch):
            traced["predict"].add(read_heartbeat(path).phase)
            return super().predict_step(batch)

    class Predict(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            before = read_heartbeat(path)
            self.model.predict(x, batch_size=1, verbose=0)
            after = read_heartbeat(path)
            seen.append((before.phase, after.phase, after.beats > before.beats + 1))

    x, y = np.ones([16, 2], "float32"), np.ones([16, 1], "float32")
    with strategy.scope():
        model = Model([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(
        x, y, batch_size=4, epochs=2, validation_data=(x, y), callbacks=[Predict()], verbose=0
    )
    assert seen == [(Phase.RUNNING, Phase.RUNNING, True)] * 2
    assert traced == {"evaluate": {Phase.TRACING}, "predict": {Phase.TRACING}}
    assert read_heartbeat(path).phase == Phase.IDLE
    model.predict_on_batch(x)
    assert read_heartbeat(path).phase == Phase.IDLE
