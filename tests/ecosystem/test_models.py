"""Test that models of other packages give Keras' own numbers, whichever way they are spread.

The numbers to reach come from a process that does not import tfdist.
"""

from __future__ import annotations

import importlib.util
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from tests.ecosystem.models import MODELS
from tests.processes import PYTHON, ROOT, group, workers
from tfdist.cluster.spec import ClusterSpec

WAYS = ("mirrored", "workers", "servers", "fsdp", "pipeline")
TIMEOUT_S = 1500  # for one way: about 200 on an idle machine of 2 cores
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


# What a way cannot do.
REFUSED = {
    ("GPT-2, raw text", "servers"): "the tokenizer's table of words is on the chief",
    ("GPT-2, raw text", "pipeline"): "texts are made tokens by the model's own fit",
}


def missing(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is None


def start(members, way: str, directory: pathlib.Path, models: list[str]) -> None:
    """Start the processes of a way, which write their numbers into the directory."""

    def command(name: str) -> list[str]:
        out = str(directory / f"{name}.pickle")
        return [PYTHON, "-m", "tests.ecosystem.runner", way, out, *models]

    if way in ("workers", "fsdp"):
        workers(members, 2, command("{index}"), PYTHONPATH=str(ROOT))
        return
    if way != "servers":
        members.start(way, command(way), PYTHONPATH=str(ROOT))
        return
    # With one worker, steps have the order of the data.
    spec = ClusterSpec.local(chief=True, workers=1, ps=2)
    for task in spec.tasks:
        config = spec.for_task(task.type, task.index).to_tf_config()
        name = str(task).replace(":", "-")
        members.start(name, command("chief"), TF_CONFIG=config, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="session")
def run(request, tmp_path_factory) -> Callable[[str], list[dict]]:
    """Return the results of a way's processes: a list of {model: numbers} for selected models."""
    done: dict[str, list[dict]] = {}
    tests = [item for item in request.session.items if item.path == pathlib.Path(__file__)]
    selected = {item.callspec.params["name"] for item in tests}
    models = [n for n, facts in MODELS.items() if n in selected and not missing(facts.package)]

    def of(way: str) -> list[dict]:
        if way not in done:
            directory = tmp_path_factory.mktemp(way)
            with group(tmp_path_factory.mktemp("logs")) as members:
                start(members, way, directory, models)
                members.succeed(TIMEOUT_S)
            files = sorted(directory.glob("*.pickle"))
            done[way] = [pickle.loads(file.read_bytes()) for file in files]
        return done[way]

    return of


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
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
