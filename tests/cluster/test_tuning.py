"""Test that keras-tuner finds the same values under every strategy, where it is installed."""

import re

import pytest

from tests.cluster.test_docs import SCRIPT_S, blocks, output_of_script
from tests.processes import ROOT

pytest.importorskip("keras_tuner")
pytestmark = pytest.mark.timeout(3 * SCRIPT_S)
TUNER = re.compile(r"keras_tuner\.RandomSearch\((.*?)max_trials=2,", re.DOTALL)
HYPERBAND = r"keras_tuner.Hyperband(\1max_epochs=2, factor=2,"


def best(directory, script, name, *launch, strategy=""):
    """Run the script of the docs; return what its processes print as the best, without repeats."""
    log = output_of_script(directory, script, name, *launch, strategy=strategy)
    return re.findall(r"best (\{.*\}) (\S+)", log)


def same(found, expected, count):
    assert len(found) == count
    for values, score in found:
        assert values == expected[0][0]
        assert float(score) == pytest.approx(float(expected[0][1]), rel=1e-5)


def test_the_search_of_the_docs_finds_the_same_on_workers_and_devices(tmp_path):
    (script,) = (text for name, text in blocks(ROOT / "docs" / "tuning.md", "python") if name)
    script = script.replace("verbose=0)", "verbose=0, shuffle=False)")
    alone = best(tmp_path, script, "alone", strategy="'one_device', devices='cpu'")
    two = best(tmp_path, script, "two", strategy="'mirrored', devices='cpu:0,cpu:1'")
    same(two, alone, 1)
    launch = ("-m", "tfdist", "launch", "--workers", "2", "--")
    same(best(tmp_path, script, "workers", *launch), alone, 2)

    script = TUNER.sub(HYPERBAND, script)
    alone = best(tmp_path, script, "h_alone", strategy="'one_device', devices='cpu'")
    two = best(tmp_path, script, "h_two", strategy="'mirrored', devices='cpu:0,cpu:1'")
    same(two, alone, 1)
