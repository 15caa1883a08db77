"""Test that the script of docs/ecosystem.md trains, where KerasHub is installed."""

import json
import re

import pytest

from tests.cluster.test_docs import SCRIPT_S, blocks, output_of_script
from tests.processes import ROOT

pytest.importorskip("keras_hub")
pytestmark = pytest.mark.timeout(2 * SCRIPT_S)
LAUNCH = ("-m", "tfdist", "launch", "--workers", "2", "--")


def test_the_script_of_the_docs_gives_the_same_on_workers(tmp_path):
    (script,) = (text for name, text in blocks(ROOT / "docs" / "ecosystem.md", "python") if name)
    one = "'one_device', devices='cpu'"
    alone = output_of_script(tmp_path, script, "alone", strategy=one)
    workers = output_of_script(tmp_path, script, "workers", *LAUNCH)

    def said(log):
        losses = [json.loads(words) for words in re.findall(r"losses (.*)", log)]
        return losses, re.findall(r"generated (.*)", log)

    ((losses,), (text,)), (of_workers, texts) = said(alone), said(workers)
    assert losses[1] < losses[0]
    for of_worker in of_workers:
        assert of_worker == pytest.approx(losses, rel=1e-5)
    assert texts == [text, text]
