"""Text formatting for people: counts with their noun, and aligned tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun in the singular or plural.

    Args:
        number: The count.
        noun: Singular noun.
        nouns: Plural noun, default the singular with an "s".

    Example:
        >>> counted(1, "step"), counted(1500, "step"), counted(2, "batch", "batches")
        ('1 step', '1,500 steps', '2 batches')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        rows: Cells of the table, the same number in each row.
        left: Indices of the left-aligned columns, default (0,). All others are right-aligned.

    Example:
        >>> aligned([("strategy", "ms"), ("mirrored", "1.25"), ("one", "12.50")])
        ['strategy     ms', 'mirrored   1.25', 'one       12.50']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
