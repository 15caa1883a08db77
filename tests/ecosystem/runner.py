"""Train models of other packages in one way, and write their numbers to a file.

The command is `python -m tests.ecosystem.runner WAY OUT [MODEL ...]`, in each process of the way.
"""

from __future__ import annotations

import contextlib
import pathlib
import pickle
import sys
import tempfile
import time
import traceback

import keras
import numpy as np
import tensorflow as tf

from tests.ecosystem.models import LENGTH, MODELS

EPOCHS = 2
BATCH = 8


def strategy_of(way: str):
    """Return the strategy of a way; None is Keras without tfdist."""
    if way == "plain":
        assert "tfdist" not in sys.modules
        return None
    import tfdist

    if way == "layouts":
        tfdist.enable(devices=2)
        return None
    if way in ("mirrored", "pipeline"):  # a pipeline takes its two devices
        return tfdist.make_strategy("mirrored", devices="2")
    return tfdist.make_strategy(timeout=60)


def compiled(way: str, facts, strategy):
    """Return a model that is ready to train in this way."""
    keras.utils.set_random_seed(1)
    if way == "layouts":
        import keras_hub

        mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"))
        layouts = getattr(keras_hub.models, facts.backbone).get_layout_map(mesh)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        )
    with strategy.scope() if strategy and way != "pipeline" else contextlib.nullcontext():
        model = facts.build()
        if way in ("fsdp", "pipeline"):
            from tfdist.parallel import fsdp, pipeline

            if way == "fsdp":
                fsdp(model)
            else:
                model = pipeline(model, stages=2, microbatches=2)
        # Classes of KerasHub have metrics and a sampler of their own where none is named.
        own = {"sampler": "greedy"} if hasattr(model, "generate") else {}
        metric = facts.metric()
        model.compile(facts.optimizer(), facts.loss, metrics=[], weighted_metrics=[metric], **own)
    return model


def trained(way: str, facts, strategy) -> dict:
    """Train a model; return its losses, results, predictions, and those of the saved model.

    A model that generates text also does that, greedily.
    """
    model = compiled(way, facts, strategy)
    arrays = facts.data()
    inputs = arrays[0]
    data = tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else inputs).batch(BATCH)
    history = model.fit(data, epochs=EPOCHS, verbose=0).history
    results = model.evaluate(data, verbose=0, return_dict=True)
    numbers = {f"history/{name}": np.asarray(values) for name, values in history.items()}
    numbers |= {f"test/{name}": np.asarray(value) for name, value in results.items()}
    numbers["predictions"] = model.predict(inputs, batch_size=BATCH, verbose=0)
    if hasattr(model, "generate"):
        texts = isinstance(inputs, np.ndarray)
        prompts = inputs[:4].tolist() if texts else {k: rows[:4] for k, rows in inputs.items()}
        made = model.generate(prompts, max_length=LENGTH, stop_token_ids=None)
        numbers["generated"] = np.asarray(made if texts else made["token_ids"])
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "model.keras"
        model.save(path)
        if path.exists():  # the chief wrote it
            loaded = keras.saving.load_model(path, compile=False)
            numbers["predictions of the file"] = loaded.predict(inputs, batch_size=BATCH, verbose=0)
    return numbers


def main(way: str, out: str, *names: str) -> None:
    strategy = strategy_of(way)
    results = {}
    for name in names or MODELS:
        keras.backend.clear_session()
        began = time.monotonic()
        try:
            results[name] = trained(way, MODELS[name], strategy)
        except Exception:
            results[name] = traceback.format_exc()
            print(name, results[name], file=sys.stderr, flush=True)
        print(f"{time.monotonic() - began:6.1f} s {name}", flush=True)
    pathlib.Path(out).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
