"""Test that scripts of Keras' own give the same numbers on several replicas, unchanged.

The environment variable KERAS_SOURCE names a clone of github.com/keras-team/keras. The numbers to
reach come from a process that does not import tfdist.
"""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.ecosystem.models import missing
from tests.ecosystem.scripts import TIMEOUT_S, check_epochs, epochs_of_ways

SOURCE = os.environ.get("KERAS_SOURCE", "")
# Scripts, and epochs, counted over all fits, in which replicas give other numbers than one device.
DRAWS = "draws other numbers on each replica"
SUM = "adds a sum over the rows to the loss, of which each replica has its own rows"
SCRIPTS: dict[str, dict[int, str]] = {
    "guides/custom_train_step_in_tensorflow.py": {11: DRAWS},
    "guides/functional_api.py": {4: DRAWS},
    "guides/making_new_layers_and_models_via_subclassing.py": {2: DRAWS, 3: DRAWS},
    "guides/training_with_built_in_methods.py": {7: SUM},
    "guides/writing_your_own_callbacks.py": {},
    "examples/demo_custom_layer_backend_agnostic.py": dict.fromkeys(range(5), DRAWS),
    "examples/demo_subclass.py": {},
}
NEEDS = {"guides/training_with_built_in_methods.py": "torch"}
TOLERANCE = 5e-3

pytestmark = [
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(
        not SOURCE, reason="KERAS_SOURCE names no clone of github.com/keras-team/keras"
    ),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_keras_gives_its_numbers(script, tmp_path):
    package = NEEDS.get(script)
    if package and missing(package):
        pytest.skip(f"{package} is not installed, which the script imports")
    expected, *others = epochs_of_ways(pathlib.Path(SOURCE).resolve() / script, tmp_path)
    assert expected
    assert SCRIPTS[script].keys() <= set(range(len(expected)))
    for epochs in others:
        check_epochs(epochs, expected, TOLERANCE, SCRIPTS[script])
