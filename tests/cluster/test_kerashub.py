"""Test that the script of docs/ecosystem.md trains, where KerasHub is installed."""

import json
import re

import pytest

from tests.cluster.test_docs import blocks
from tests.processes import PYTHON, ROOT, group

pytest.importorskip("keras_hub")
TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def test_the_script_of_the_docs_gives_the_same_on_workers(tmp_path):
    ((_, script),) = (
        (n, text) for n, text in blocks(ROOT / "docs" / "ecosystem.md", "python") if n
    )
    alone = script.replace("make_strategy()", "make_strategy('one_device', devices='cpu')")
    (tmp_path / "alone.py").write_text(alone)
    (tmp_path / "finetune.py").write_text(script)
    launch = ("-m", "tfdist", "launch", "--workers", "2", "--", "finetune.py")
    found = {}
    with group(tmp_path) as members:
        for name, words in {"alone": ("alone.py",), "workers": launch}.items():
            command = f"cd '{tmp_path}' && exec '{PYTHON}' \"$@\""
            members.start(name, ["bash", "-c", command, "bash", *words], PYTHONPATH=str(ROOT))
            members.succeed(TIMEOUT_S)
            log = members.log(name)
            losses = [json.loads(words) for words in re.findall(r"losses (.*)", log)]
            found[name] = (losses, re.findall(r"generated (.*)", log))
    (losses,), (text,) = found["alone"]
    assert losses[1] < losses[0]
    for of_worker in found["workers"][0]:
        assert of_worker == pytest.approx(losses, rel=1e-5)
    assert found["workers"][1] == [text, text]
