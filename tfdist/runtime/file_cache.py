"""Settings of the local cache of remote data files, from the environment."""

from __future__ import annotations

import os

from tfdist.runtime.formatting import parse_bytes

DIRECTORY = "TFDIST_CACHE_DIR"
BYTES = "TFDIST_CACHE_BYTES"
DEFAULT_BYTES = 32 * 10**9


def directory() -> str:
    """Return the directory of the cache: TFDIST_CACHE_DIR, default ~/.cache/tfdist/files."""
    return os.path.abspath(os.path.expanduser(os.environ.get(DIRECTORY) or "~/.cache/tfdist/files"))


def max_bytes() -> int:
    """Return the largest size of the cache: TFDIST_CACHE_BYTES such as "20GB", default 32 GB.

    Raises:
        ValueError: If the variable is no positive number of bytes.
    """
    text = os.environ.get(BYTES)
    if not text:
        return DEFAULT_BYTES
    try:
        count = parse_bytes(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f'{BYTES}={text!r}: expected a size in bytes, such as "20GB".')
    return count
