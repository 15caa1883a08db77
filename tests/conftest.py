"""Fixtures that tests of several directories share."""

import pytest


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory):
    """A TFDS data_dir with the digits prepared."""
    from tfdist import data

    directory = tmp_path_factory.mktemp("tfds")
    data.load("tfdist_digits", "test", directory)
    return directory
