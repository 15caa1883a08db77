"""Run scripts that train in several ways, and compare their losses and metrics of each epoch."""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Collection

import numpy as np

from tests.forkserver import OFF
from tests.processes import PYTHON, ROOT, group, tasks
from tfdist.cluster.spec import ClusterSpec

TIMEOUT_S = 600


def epochs_of_ways(script: pathlib.Path, directory: pathlib.Path) -> list[list[dict]]:
    """Run a script by Keras alone, on two devices and on two workers.

    Args:
        script: The script, which knows nothing of tfdist.
        directory: Directory of the results and the logs.

    Returns:
        The logs of each epoch by Keras alone, on two devices, and of two workers.
    """
    command = [PYTHON, "-m", "tests.ecosystem.guide_runner"]
    environ = {"PYTHONPATH": str(ROOT)}
    with group(directory) as members:
        for way in ("plain", "mirrored"):
            # Forks have imported tfdist, of which Keras alone must know nothing.
            off = {OFF: "1"} if way == "plain" else {}
            out = str(directory / f"{way}.pickle")
            members.start(way, [*command, way, out, str(script)], **environ, **off)
        members.succeed(TIMEOUT_S)
        out = str(directory / "worker-{index}.pickle")
        of_workers = [*command, "workers", out, str(script)]
        tasks(members, ClusterSpec.local(workers=2), of_workers, **environ)
        members.succeed(TIMEOUT_S)
    return [
        pickle.loads((directory / f"{name}.pickle").read_bytes())
        for name in ("plain", "mirrored", "worker-0", "worker-1")
    ]


def check_epochs(
    epochs: list[dict], expected: list[dict], tolerance: float, others: Collection[int] = ()
) -> None:
    """Check that epochs have the logs of Keras, and its numbers, except in the epochs `others`."""
    assert [set(logs) for logs in epochs] == [set(logs) for logs in expected]
    for number, (logs, keras_logs) in enumerate(zip(epochs, expected, strict=True)):
        for name, value in logs.items():
            assert np.isfinite(value)
            if number not in others:
                np.testing.assert_allclose(
                    value, keras_logs[name], tolerance, tolerance, err_msg=f"{name} of {number}"
                )
