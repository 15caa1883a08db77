"""Facts become words for a person; nothing is read or printed here."""

from __future__ import annotations


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """A number of things.

    Args:
        number: How many.
        noun: What one is called.
        nouns: What several are called; default: with an s.

    Example:
        >>> counted(1, "step"), counted(1500, "step"), counted(2, "batch", "batches")
        ('1 step', '1,500 steps', '2 batches')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
