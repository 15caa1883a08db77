"""Try features of Keras on a parameter-server cluster: `ps_features.py OUT [FEATURE ...]`.

The chief writes to the file OUT what went wrong with each feature, null where nothing did; other
tasks serve.
"""

import json
import pathlib
import sys
import time
import traceback

import keras

import tfdist

# Imported because they fill FEATURES.
from tests.cluster.scripts.ps import data, errors, models, training, xla  # noqa: F401
from tests.cluster.scripts.ps.base import FEATURES
from tests.cluster.scripts.ps.guides import GUIDES


def main(out: str, *names: str) -> None:
    strategy = tfdist.make_strategy(timeout=60)
    results = {}
    for name in names or FEATURES:
        keras.utils.set_random_seed(1)
        began = time.monotonic()
        try:
            results[name] = {**FEATURES, **GUIDES}[name](strategy)
        except Exception:
            results[name] = traceback.format_exc()
        print(f"{time.monotonic() - began:6.1f} s {name}", flush=True)
        pathlib.Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
