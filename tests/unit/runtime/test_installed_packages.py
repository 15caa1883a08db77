"""Test that versions are found whichever package an import comes from."""

import sys

import pytest

from tfdist.runtime.installed_packages import version_of


@pytest.fixture
def nightly(tmp_path, monkeypatch):
    """Install the package `framework` by a distribution of another name."""
    metadata = tmp_path / "framework_nightly-2.0.dev1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: framework-nightly\nVersion: 2.0.dev1\n")
    (metadata / "top_level.txt").write_text("framework\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_a_package_may_come_from_a_distribution_of_another_name(nightly):
    assert version_of("framework") == version_of("framework-nightly") == "2.0.dev1"
    assert version_of("no_such_package") is None
