"""Test that models of other packages give Keras' own numbers, whichever way they are spread.

The numbers to reach come from a process that does not import tfdist.
"""

from __future__ import annotations

import functools
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from tests.ecosystem.models import MODELS, missing
from tests.forkserver import OFF
from tests.processes import PYTHON, ROOT, group, tasks
from tfdist.cluster.spec import ClusterSpec

WAYS = ("mirrored", "workers", "servers", "fsdp", "pipeline", "layouts")
TIMEOUT_S = 1500  # for one way: about 200 on an idle machine of 2 cores
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
# What a way cannot do.
REFUSED = {
    ("GPT-2, raw text", "servers"): "the tokenizer's table of words is on the chief",
    ("GPT-2, raw text", "pipeline"): "texts are made tokens by the model's own fit",
}


def clusters() -> dict[str, ClusterSpec]:
    """Return the clusters of ways that have one."""
    return {
        "workers": ClusterSpec.local(workers=2),
        "fsdp": ClusterSpec.local(workers=2),
        # With one worker, steps have the order of the data.
        "servers": ClusterSpec.local(chief=True, workers=1, ps=2),
    }


@pytest.fixture(scope="session")
def run(request, tmp_path_factory) -> Callable[[str], list[dict]]:
    """Return the results of a way's processes: a list of {model: numbers} for selected models."""
    tests = [item for item in request.session.items if item.path == pathlib.Path(__file__)]
    selected = {item.callspec.params["name"] for item in tests}
    models = [n for n in MODELS if n in selected and not missing(MODELS[n].package)]

    @functools.cache
    def of(way: str) -> list[dict]:
        directory = tmp_path_factory.mktemp(way)
        out = str(directory / "{index}.pickle")
        names = [n for n in models if way != "layouts" or MODELS[n].backbone]
        command = [PYTHON, "-m", "tests.ecosystem.runner", way, out, *names]
        environ = {"PYTHONPATH": str(ROOT)}
        with group(tmp_path_factory.mktemp("logs")) as members:
            if way in clusters():
                tasks(members, clusters()[way], command, **environ)
            else:
                # Forks have imported tfdist, of which Keras alone must know nothing.
                environ |= {OFF: "1"} if way == "plain" else {}
                members.start(way, [word.format(index=0) for word in command], **environ)
            members.succeed(TIMEOUT_S)
        return [pickle.loads(file.read_bytes()) for file in sorted(directory.glob("*.pickle"))]

    return of


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in MODELS for way in WAYS if way != "layouts" or MODELS[name].backbone],
)
def test_numbers_are_those_of_keras(run, name, way):
    if missing(MODELS[name].package):
        pytest.skip(f"{MODELS[name].package} is not installed: pip install 'tfdist[ecosystem]'")
    if (name, way) in REFUSED:
        pytest.skip(REFUSED[name, way])
    (plain,) = run("plain")
    expected = plain[name]
    assert not isinstance(expected, str), expected
    if way == "pipeline":
        expected = {key: value for key, value in expected.items() if key != "generated"}
    for index, process in enumerate(run(way)):
        numbers = process[name]
        assert not isinstance(numbers, str), numbers
        only_of_chief = {"predictions of the file"} if index else set()
        assert set(numbers) == set(expected) - only_of_chief
        for key, value in numbers.items():
            if value.dtype.kind in "US":
                assert list(value) == list(expected[key])
            else:
                np.testing.assert_allclose(value, expected[key], **TOLERANCE, err_msg=key)
    assert len(np.unique(expected["history/loss"])) > 1  # it trains
