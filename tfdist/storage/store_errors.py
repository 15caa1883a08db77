"""Errors of file systems: one line that names the URL, the reason and the remedy."""

from __future__ import annotations

import errno
from typing import NamedTuple


class UnusableStore(ValueError):
    """Error: a place cannot work as it is configured. To try again does not help."""


class StoreFailed(OSError):
    """Error: a store did not answer as expected, even after the last retry."""


class Scheme(NamedTuple):
    """File system of fsspec for the URLs of one scheme.

    Attributes:
        package: Python package that implements it.
        extra: Extra of tfdist that installs the package.
        credentials: Place where the package finds credentials, for messages.
    """

    package: str
    extra: str
    credentials: str


_AZURE = Scheme(
    "adlfs",
    "azure",
    "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and a key, token or identity",
)
_GOOGLE = Scheme(
    "gcsfs",
    "gcs",
    "GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
)
SCHEMES = {
    "s3": Scheme(
        "s3fs", "s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws"
    ),
    "gs": _GOOGLE,
    "az": _AZURE,
    "abfs": _AZURE,
    "hf": Scheme("huggingface_hub", "hf", "HF_TOKEN, or run `hf auth login`"),
}

# Classes of errors, by name, because their packages are not always installed.
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
}
_MISTAKES = {"ParamValidationError", "NonRetryableError", "HFValidationError"}
_PERMANENT_ERRNO = {
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ENOSPC,  # of the local disk
    errno.ENOSYS,
}
_DENIED = ("forbidden", "access denied", "accessdenied", "anonymous caller")


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, "" for a local path.

    Example:
        >>> scheme_of("s3://bucket/a"), scheme_of("/data/a")
        ('s3', '')
    """
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def bucket_of(url: str) -> str:
    """Return the bucket of a URL; for Azure, the container.

    Example:
        >>> bucket_of("s3://bucket/a/b")
        'bucket'
    """
    return url.partition("://")[2].partition("/")[0]


def is_transient(error: Exception) -> bool:
    """Return whether a request that failed may succeed if it is sent again.

    Example:
        >>> is_transient(ConnectionResetError()), is_transient(FileNotFoundError())
        (True, False)
    """
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError | ImportError):
        return False
    if isinstance(error, ValueError | TypeError | KeyError | AttributeError | AssertionError):
        return False
    if isinstance(error, OSError) and error.errno in _PERMANENT_ERRNO:
        return False
    return not (_named(error, _NO_CREDENTIALS | _MISTAKES) or _is_denied(error))


def translated(error: Exception, url: str, writes: bool) -> Exception:
    """Return an error of a file system as one that says what to do.

    Args:
        error: Error that fsspec or a package below it raised.
        url: URL of the file.
        writes: Whether the request was to write.

    Returns:
        `UnusableStore`, `StoreFailed`, `FileNotFoundError` or `FileExistsError`.

    Example:
        >>> print(translated(ImportError("Install s3fs"), "s3://bucket/a", writes=False))
        s3://bucket/a: needs the package s3fs, which is not installed. Run: pip install 'tfdist[s3]'
    """
    if isinstance(error, UnusableStore | StoreFailed):
        return error
    scheme = SCHEMES[scheme_of(url)]
    bucket = bucket_of(url)
    if isinstance(error, ImportError):
        return UnusableStore(
            f"{url}: needs the package {scheme.package}, which is not installed. Run: pip install "
            f"'tfdist[{scheme.extra}]'"
        )
    if isinstance(error, FileExistsError):
        return FileExistsError(f"{url}: exists already.")
    if isinstance(error, FileNotFoundError):
        if writes or "bucket does not exist" in str(error).lower():
            return UnusableStore(
                f"{url}: there is no bucket {bucket!r}, or it is not visible to these "
                "credentials. Create it, or correct the name."
            )
        return FileNotFoundError(f"{url}: no such file. Correct the path.")
    if (
        _named(error, _NO_CREDENTIALS)
        or getattr(error, "code", None) in (401, "401")
        or (isinstance(error, ValueError) and "credentials" in str(error))
    ):
        return UnusableStore(f"{url}: no valid credentials were found. Set {scheme.credentials}.")
    if isinstance(error, PermissionError) or _is_denied(error):
        action = "write" if writes else "read"
        return UnusableStore(
            f"{url}: access denied: {_first_line(error)}. Give these credentials the right to "
            f"list and {action} in {bucket!r}, or use others: {scheme.credentials}."
        )
    if not is_transient(error):
        return UnusableStore(f"{url}: {_first_line(error)}. Correct the URL or its settings.")
    return StoreFailed(
        f"{url}: the store did not answer as expected after several tries: "
        f"{_first_line(error)}. See whether the store and the network to it work; then start again."
    )


def _named(error: Exception, names: set[str]) -> bool:
    return any(cls.__name__ in names for cls in type(error).__mro__)


def _is_denied(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, OSError) and any(word in text for word in _DENIED)


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
