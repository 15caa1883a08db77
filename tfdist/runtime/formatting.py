"""Facts become words for a person; nothing is read or printed here."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """A table's lines.

    Args:
        rows: Its cells, as many in each row.
        left: Columns whose cells stand to the left; those of others to the right.

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
