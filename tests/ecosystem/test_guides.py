"""Test that scripts of Keras' own give the same numbers on several replicas, unchanged.

The environment variable KERAS_SOURCE names a clone of github.com/keras-team/keras. The numbers to
reach come from a process that does not import tfdist.
"""

from __future__ import annotations

import os
import pathlib
import pickle

import numpy as np
import pytest

from tests.ecosystem.models import missing
from tests.forkserver import OFF
from tests.processes import PYTHON, ROOT, group, tasks
from tfdist.cluster.spec import ClusterSpec

SOURCE = os.environ.get("KERAS_SOURCE", "")
TIMEOUT_S = 600
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
TOLERANCE = {"rtol": 5e-3, "atol": 5e-3}

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
    path = pathlib.Path(SOURCE).resolve() / script
    command = [PYTHON, "-m", "tests.ecosystem.guide_runner"]
    environ = {"PYTHONPATH": str(ROOT)}
    with group(tmp_path) as members:
        for way in ("plain", "mirrored"):
            # Forks have imported tfdist, of which Keras alone must know nothing.
            off = {OFF: "1"} if way == "plain" else {}
            out = str(tmp_path / f"{way}.pickle")
            members.start(way, [*command, way, out, str(path)], **environ, **off)
        members.succeed(TIMEOUT_S)
        out = str(tmp_path / "worker-{index}.pickle")
        tasks(
            members, ClusterSpec.local(workers=2), [*command, "workers", out, str(path)], **environ
        )
        members.succeed(TIMEOUT_S)
    expected, *others = (
        pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        for name in ("plain", "mirrored", "worker-0", "worker-1")
    )
    assert expected
    assert SCRIPTS[script].keys() <= set(range(len(expected)))
    for epochs in others:
        assert [set(logs) for logs in epochs] == [set(logs) for logs in expected]
        for number, (logs, keras_logs) in enumerate(zip(epochs, expected, strict=True)):
            for name, value in logs.items():
                assert np.isfinite(value)
                if number not in SCRIPTS[script]:
                    np.testing.assert_allclose(
                        value, keras_logs[name], **TOLERANCE, err_msg=f"{name} of {number}"
                    )
