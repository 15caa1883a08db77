"""Test that errors of stores say what to do, in one line."""

import errno

import pytest

from tfdist.storage.store_errors import StoreFailed, UnusableStore, is_transient, translated


class NoCredentialsError(Exception):
    """Stand for botocore's class of this name."""


class HttpError(Exception):
    """Stand for gcsfs' class of this name."""

    def __init__(self, code):
        super().__init__(f"answer {code}")
        self.code = code


@pytest.mark.parametrize(
    ("error", "url", "kind", "message"),
    [
        (ImportError("no"), "s3://b/x", UnusableStore, r"needs .*s3fs.*pip install 'tfdist\[s3\]'"),
        (ImportError("no"), "gs://b/x", UnusableStore, r"pip install 'tfdist\[gcs\]'"),
        (ImportError("no"), "az://b/x", UnusableStore, r"pip install 'tfdist\[azure\]'"),
        (FileNotFoundError("x"), "s3://b/x", FileNotFoundError, "no such file"),
        (FileExistsError("x"), "s3://b/x", FileExistsError, "exists already"),
        (
            FileNotFoundError("The specified bucket does not exist"),
            "s3://b/x",
            UnusableStore,
            "there is no bucket 'b'",
        ),
        (NoCredentialsError("Unable"), "s3://b/x", UnusableStore, "Set AWS_ACCESS_KEY_ID"),
        (HttpError(401), "gs://b/x", UnusableStore, "Set GOOGLE_APPLICATION_CREDENTIALS"),
        (
            ValueError("Must provide either a connection_string or account_name with credentials"),
            "az://b/x",
            UnusableStore,
            "Set AZURE_STORAGE_CONNECTION_STRING",
        ),
        (PermissionError("Access Denied"), "s3://b/x", UnusableStore, "the right to list and read"),
        (OSError("Forbidden: b/x\nlong"), "gs://b/x", UnusableStore, "access denied"),
        (HttpError(503), "gs://b/x", StoreFailed, "did not answer as expected.*answer 503"),
        (OSError(errno.EBUSY, "Slow"), "s3://b/x", StoreFailed, "start again"),
        (ValueError("Invalid bucket name"), "s3://b/x", UnusableStore, "Correct the URL"),
    ],
)
def test_errors_name_the_url_and_the_remedy(error, url, kind, message):
    found = translated(error, url, writes=False)
    assert type(found) is kind
    with pytest.raises(kind, match=f"^{url}: .*{message}"):
        raise found
    assert "\n" not in str(found)


def test_a_missing_file_cannot_be_the_reason_if_writing_fails():
    found = translated(FileNotFoundError("x"), "s3://b/x", writes=True)
    assert "there is no bucket 'b'" in str(found)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        OSError(errno.EIO, "cut"),
        OSError(errno.EBUSY, "SlowDown"),
        HttpError(503),
    ],
)
def test_transient_errors_are_known(error):
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(),
        FileExistsError(),
        PermissionError(),
        ImportError(),
        ValueError(),
        NoCredentialsError(),
        OSError(errno.ENOSPC, "full"),
    ],
)
def test_permanent_errors_are_known(error):
    assert not is_transient(error)
