"""Self-contained HTML page rendered from chapters of text, tables and figures."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

from tfdist.tools.report import style
from tfdist.tools.report.style import Figure

_CSS = """
:root { color-scheme: light dark; %(light)s
  --ground: #f5f6f8; --line: #e1e5ea; --good: #0b7a55; --bad: #b3400a; --good-ground: #e3f4ed; \
--bad-ground: #fdeee3;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", \
Arial, sans-serif; }
@media (prefers-color-scheme: dark) { @media not print { :root { %(dark)s
  --ground: #13171c; --line: #2c343e; --good: #43c79b; --bad: #f39a5b; --good-ground: #17302a; \
--bad-ground: #37251a; } } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 var(--font); \
-webkit-text-size-adjust: 100%%; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 48px; }
header h1 { font-size: 27px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; \
display: inline; }
.chapter > header h2 { font-size: 22px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; \
display: inline; }
.chapter + .chapter { margin-top: 44px; padding-top: 30px; border-top: 2px solid var(--line); }
.badge { display: inline-block; margin-left: 10px; padding: 1px 10px; border-radius: 11px; \
font-size: 13px; font-weight: 600;
  vertical-align: 3px; white-space: nowrap; }
.good { color: var(--good); background: var(--good-ground); } .bad { color: var(--bad); \
background: var(--bad-ground); }
.subtitle { margin: 6px 0 0; color: var(--muted); overflow-wrap: anywhere; }
nav { margin: 12px 0 0; display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 14px; }
a { color: var(--blue); text-decoration: none; } a:hover { text-decoration: underline; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; \
margin: 20px 0 0; }
.tile, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 11px 14px 10px; min-width: 0; }
.tile b { display: block; font-size: 22px; line-height: 1.25; font-weight: 650; \
font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tile span { display: block; color: var(--muted); font-size: 13px; line-height: 1.35; }
.problems { margin: 20px 0 0; padding: 11px 16px; border-radius: 10px; color: var(--bad); \
background: var(--bad-ground); }
.problems ul { margin: 4px 0 0; padding-left: 20px; } .problems li { overflow-wrap: anywhere; }
section { margin: 30px 0 0; }
section > h3 { font-size: 17px; margin: 0 0 10px; }
section > p, .card > p { margin: 0 0 10px; max-width: 80ch; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%%, 420px), \
1fr)); gap: 14px; }
section > * + .card, section > * + .columns { margin-top: 14px; }
figure { margin: 0; padding: 14px 14px 10px; min-width: 0; display: flex; flex-direction: column; }
figure.wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
figure svg { display: block; width: 100%%; height: auto; } figure svg * { stroke-linejoin: round; \
stroke-linecap: butt; }
figure.wide svg { min-width: 700px; }
figcaption { margin: 6px 2px 0; color: var(--muted); font-size: 13px; line-height: 1.4; }
.card.table { padding: 4px 16px 6px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%%; font-size: 14px; \
font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); font-size: 13px; padding: 8px 0 2px; }
th, td { text-align: left; vertical-align: top; padding: 6px 20px 6px 0; \
border-bottom: 1px solid var(--line); }
tr:last-child > td { border-bottom: 0; } th { color: var(--muted); font-weight: 600; \
font-size: 13px; white-space: nowrap; }
th.right, td.right { text-align: right; white-space: nowrap; } td { overflow-wrap: break-word; } \
td.long { min-width: 260px; }
td:last-child, th:last-child { padding-right: 0; }
.pairs td { overflow-wrap: anywhere; min-width: 90px; } \
.pairs td:first-child { color: var(--muted); width: 40%%; overflow-wrap: normal; min-width: 0; } \
.pairs td.changed { font-weight: 650; color: var(--ink); }
details > summary { cursor: pointer; padding: 6px 0; font-weight: 600; font-size: 14px; }
.columns { columns: 310px 3; column-gap: 14px; } .columns .card { break-inside: avoid; \
margin: 0 0 14px; }
.absent { margin: 0; padding: 10px 16px 10px 34px; color: var(--muted); font-size: 14px; } \
.absent li { overflow-wrap: anywhere; }
footer { margin: 34px 0 0; color: var(--muted); font-size: 13px; overflow-wrap: anywhere; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: 0.93em; overflow-wrap: anywhere; }
@media (max-width: 520px) { main { padding: 18px 12px 32px; } \
.tiles { grid-template-columns: repeat(2, 1fr); } figure { padding: 10px 8px 8px; } }
@media print { :root { color-scheme: light; --ground: #fff; } body { font-size: 12px; } \
main { max-width: none; padding: 0; }
  figure, .tile, tr, .problems { break-inside: avoid; } h2, h3 { break-after: avoid; } \
nav { display: none; }
  .scroll, .card.table { overflow: visible; } figure.wide svg { min-width: 0; } \
.chapter + .chapter { break-before: page; border: 0; } }
"""


@dataclasses.dataclass(frozen=True)
class Tile:
    """A key figure and its label."""

    value: str
    label: str


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


def render(chapters: Sequence[Chapter], foot: str) -> str:
    """Render chapters as an HTML page.

    Args:
        chapters: Chapters, in order. The title of the first one is the title of the page.
        foot: Last line of the page.
    """
    light, dark = (
        " ".join(f"--{name}: {pair[place]};" for name, pair in style.VARIABLES.items())
        for place in (0, 1)
    )
    body = "\n".join(_chapter(chapter, place, chapters) for place, chapter in enumerate(chapters))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(chapters[0].title)} · tfdist report</title>
<link rel="icon" href="data:,">
<style>{_CSS % {"light": light, "dark": dark}}</style>
</head>
<body>
<main>
{body}
<footer>{_text(foot)}</footer>
</main>
</body>
</html>
"""


def _chapter(chapter: Chapter, place: int, chapters: Sequence[Chapter]) -> str:
    level = "h1" if place == 0 else "h2"
    badge = ""
    if chapter.badge:
        badge = (
            '<span class="badge '
            f'{"good" if chapter.badge[1] else "bad"}">{_text(chapter.badge[0])}</span>'
        )
    links = [(f"chapter-{other.name}", other.title) for other in chapters[1:]] if place == 0 else []
    nav = "".join(f'<a href="#{_text(anchor)}">{_text(title)}</a>' for anchor, title in links)
    parts = [
        f'<article class="chapter" id="chapter-{_text(chapter.name)}">',
        (
            f"<header><{level}>{_text(chapter.title)}</{level}>{badge}<p "
            f'class="subtitle">{_text(chapter.subtitle)}</p>'
        ),
        f"<nav>{nav}</nav></header>" if nav else "</header>",
    ]
    if chapter.tiles:
        tiles = "".join(
            f'<div class="tile"><b>{_text(tile.value)}</b><span>{_text(tile.label)}</span></div>'
            for tile in chapter.tiles
        )
        parts.append(f'<div class="tiles">{tiles}</div>')
    if chapter.problems:
        parts.append(
            '<div class="problems" role="alert"><b>Something is '
            f"wrong</b>{_list(chapter.problems)}</div>"
        )
    parts += [_section(section, chapter) for section in chapter.sections]
    if chapter.absent:
        parts.append(
            "<section><h3>Left out</h3><div "
            f'class="card">{_list(chapter.absent, "absent")}</div></section>'
        )
    return "\n".join([*parts, "</article>"])


def _section(section: Section, chapter: Chapter) -> str:
    parts = [
        f"<section><h3>{_text(section.title)}</h3>",
        *(f"<p>{_text(sentence)}</p>" for sentence in section.text),
    ]
    if section.figures:
        drawn = [_figure(figure, f"{chapter.name}-{figure.name}") for figure in section.figures]
        parts.append('<div class="figures">' + "\n".join(drawn) + "</div>")
    tables = [_table(table) for table in section.tables if table.rows]
    if tables:
        parts.append(
            '<div class="columns">' + "\n".join(tables) + "</div>"
            if section.columns
            else "\n".join(tables)
        )
    return "\n".join([*parts, "</section>"])


def _figure(figure: Figure, prefix: str) -> str:
    caption = f"<figcaption>{_text(figure.caption)}</figcaption>" if figure.caption else ""
    drawn = style.svg(figure, prefix)
    if figure.wide:
        drawn = f'<div class="scroll">{drawn}</div>'
    return f'<figure class="card{" wide" if figure.wide else ""}">{drawn}{caption}</figure>'


def _table(table: Table) -> str:
    def cell(kind: str, column: int, text: str, row: int | None) -> str:
        names = (
            ["right"] * (column in table.right)
            + ["long"] * (column in table.long)
            + ["changed"] * (row in table.marked)
        )
        return f"<{kind}{_classes(names)}>{_text(text)}</{kind}>"

    head = "".join(cell("th", column, text, None) for column, text in enumerate(table.head))
    rows = "\n".join(
        "<tr>"
        + "".join(cell("td", column, text, place) for column, text in enumerate(row))
        + "</tr>"
        for place, row in enumerate(table.rows)
    )
    caption = (
        f"<caption>{_text(table.caption)}</caption>" if table.caption and not table.folded else ""
    )
    pairs = not table.head and all(len(row) == 2 for row in table.rows)
    whole = (
        f"<table{_classes(['pairs'] * pairs)}>{caption}"
        f"{f'<thead><tr>{head}</tr></thead>' if head else ''}"
        f"<tbody>\n{rows}\n</tbody></table>"
    )
    if table.folded:
        whole = f"<details><summary>{_text(table.caption)}</summary>{whole}</details>"
    return f'<div class="card table">{whole}</div>'


def _list(sentences: Sequence[str], kind: str = "") -> str:
    return (
        f"<ul{_classes([kind] if kind else [])}>"
        + "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
        + "</ul>"
    )


def _classes(names: Sequence[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""


def _text(text: str) -> str:
    """Escape a text for HTML, and replace characters that are not printable."""
    return html.escape(
        "".join(
            character
            if character.isprintable() or character in "\n\t"
            else "\N{REPLACEMENT CHARACTER}"
            for character in text
        )
    )
