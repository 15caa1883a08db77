"""Test that each promise of docs/faults.md names tests that exist."""

import re

from tests.launches import ROOT

SECTION = re.compile(r"## Guarantees\n(.*?)\n## ", re.DOTALL)


def test_every_promise_has_its_tests():
    (section,) = SECTION.findall((ROOT / "docs" / "faults.md").read_text())
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    missing = []
    for row in rows:
        names = re.findall(r"`(tests/\S+?\.py)::(\w+)`", row)
        assert names, row
        missing += [
            f"{path}::{name}"
            for path, name in names
            if f"def {name}(" not in (ROOT / path).read_text()
        ]
    assert not missing
