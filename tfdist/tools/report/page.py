"""Self-contained HTML page rendered from chapters of text, tables and figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from tfdist.runtime.formatting import counted
from tfdist.tools.report import style
from tfdist.tools.report.style import Figure


@dataclasses.dataclass(frozen=True)
class Tile:
    """A key figure and its label."""

    value: str
    label: str

    @classmethod
    def count(cls, number: int, noun: str) -> Tile:
        """Return a tile with a number above its noun.

        Example:
            >>> Tile.count(2, "restart")
            Tile(value='2', label='restarts')
        """
        return cls(*counted(number, noun).split(" ", 1))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        rows: Cells of each row.
        head: Names of the columns; empty for a table without a head.
        right: Indices of the columns that hold numbers.
        long: Indices of the columns that hold sentences.
        marked: Indices of the rows that differ from the default.
        caption: Caption above the table.
        folded: True if the table is collapsed under its caption until you open it.
    """

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    right: Sequence[int] = ()
    long: Sequence[int] = ()
    marked: Sequence[int] = ()
    caption: str = ""
    folded: bool = False

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], **attributes: Any) -> Table:
        """Return a table of rows that have equal keys, the names of the columns."""
        return cls(
            [list(row.values()) for row in rows], list(rows[0]) if rows else (), **attributes
        )

    @property
    def pairs(self) -> bool:
        """Return whether each row is a name and its value."""
        return not self.head and all(len(row) == 2 for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a chapter.

    Attributes:
        title: Title of the section.
        figures: Figures, drawn side by side or over the whole width.
        tables: Tables beneath the figures.
        text: Sentences above the figures.
        columns: True if the tables stand side by side.
    """

    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    text: Sequence[str] = ()
    columns: bool = False


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A run, a benchmark or a comparison.

    Attributes:
        name: Part of the chapter's anchor and of its figures' file names; unique on a page.
        title: Title for the reader.
        subtitle: Line of facts below the title.
        badge: Status, and True if the status is good; None if there is nothing to say.
        tiles: Key figures.
        sections: Sections, in order.
        problems: Sentences about damaged files or failures.
        absent: Sentences about missing parts, and how to get them.
    """

    name: str
    title: str
    subtitle: str
    badge: tuple[str, bool] | None
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    problems: Sequence[str] = ()
    absent: Sequence[str] = ()

    @property
    def figures(self) -> list[Figure]:
        """Return the figures of all sections."""
        return [figure for section in self.sections for figure in section.figures]


def drawn(*figures: Figure | None) -> list[Figure]:
    """Return the figures that there are data for."""
    return [figure for figure in figures if figure]


def render(chapters: Sequence[Chapter], foot: str) -> str:
    """Render chapters as an HTML page.

    Args:
        chapters: Chapters, in order. The title of the first one is the title of the page.
        foot: Last line of the page.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdist.tools.report"),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = _svg
    page = environment.get_template("page.html")
    return page.render(chapters=chapters, foot=foot, colours=style.COLOURS)


def _svg(figure: Figure, prefix: str) -> tuple[str, Markup]:
    """Return the view box and the shapes of a figure, which matplotlib has escaped."""
    box, shapes = style.svg(figure, prefix)
    return box, Markup(shapes)


def _printable(value: Any) -> Any:
    """Replace the characters of a text that are not printable; markup stays as it is."""
    if isinstance(value, Markup):
        return value
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in str(value)
    )
