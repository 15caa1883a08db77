"""Test that scripts with layers, losses and trainers of other packages train to Keras' numbers.

Each is a short form of an example of its package.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.ecosystem.models import missing
from tests.ecosystem.scripts import TIMEOUT_S, check_epochs, epochs_of_ways

SCRIPTS = pathlib.Path(__file__).resolve().parent / "packages"
PACKAGES = {  # by the module that a script imports
    "bayesflow": "inference_with_bayesflow.py",
    "hgq": "quantized_with_hgq.py",
    "medicai": "segments_with_medicai.py",
    "scikeras": "search_with_scikeras.py",
    "tcn": "sums_with_tcn.py",
}
TOLERANCE = 1e-4


def test_each_script_is_run():
    assert {path.name for path in SCRIPTS.glob("*.py")} == set(PACKAGES.values())


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_script_gives_the_numbers_of_keras(package, tmp_path):
    if missing(package):
        pytest.skip(f"{package} is not installed: pip install 'tfdist[ecosystem]'")
    expected, *others = epochs_of_ways(SCRIPTS / PACKAGES[package], tmp_path)
    assert expected
    for epochs in others:
        check_epochs(epochs, expected, TOLERANCE)
