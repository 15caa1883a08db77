"""Tables of the documentation that a command writes, each between two comments of its page."""

from __future__ import annotations

import pathlib

END = "<!-- end -->\n"


def read(page: str, begin: str) -> str:
    """Return the table of a page that follows this comment."""
    return page.partition(begin)[2].partition(END)[0]


def write(path: pathlib.Path, begin: str, table: str) -> None:
    """Replace the table of a page that follows this comment."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{begin}{table}\n{END}{after}", encoding="utf-8")
