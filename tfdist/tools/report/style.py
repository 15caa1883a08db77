"""Style and rendering of figures as SVG or PNG."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from typing import Any

# Each colour on a light and on a dark page. Images, and the figures before they are on a page, have
# the light ones; the page replaces them by CSS variables of these names.
COLOURS = {
    "ink": ("#1f2933", "#e4e8ed"),
    "muted": ("#5f6b7a", "#a3aebb"),
    "grid": ("#dde2e8", "#343c47"),
    "paper": ("#fefefe", "#1b2027"),  # not #ffffff: a white label is white on a dark page, too
    # Okabe and Ito, "Color Universal Design": colour-blind readers can tell these apart, too.
    "blue": ("#0072b2", "#3d9fdb"),
    "orange": ("#e69f00", "#f0b429"),
    "green": ("#009e73", "#22b98c"),
    "red": ("#d55e00", "#ef7d34"),
    "sky": ("#56b4e9", "#8accf3"),
    "pink": ("#cc79a7", "#dc98bf"),
    "grey": ("#8a94a6", "#97a2b3"),
}
INK, MUTED, GRID, PAPER, BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY = (
    light for light, _ in COLOURS.values()
)
CYCLE = (BLUE, ORANGE, GREEN, RED, PINK, SKY, GREY)
DASHES = ("-", "--", ":", "-.")
_NAMES = {light: name for name, (light, _) in COLOURS.items()}

NARROW = (4.4, 2.75)  # inches
WIDE = (9.2, 3.4)  # inches
_DOTS = 180  # dots per inch of a PNG
_SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.titlecolor": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8,
    "axes.edgecolor": GRID,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",  # text stays text: it uses the page's font and can be searched
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure that is drawn on demand.

    Attributes:
        name: Name of its PNG file, without the extension.
        title: Title of the figure.
        caption: Explanation of the figure; may be "".
        draw: Function that draws into a matplotlib figure.
        size: Width and height in inches.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = NARROW

    @property
    def wide(self) -> bool:
        """Return whether the figure needs the whole width of the page."""
        return self.size[0] > NARROW[0]


def svg(figure: Figure, prefix: str) -> tuple[str, str]:
    """Render a figure as the view box and the content of an SVG element.

    The content has the colours and the font of the page.

    Args:
        figure: Figure to draw.
        prefix: Prefix of the ids in the element, which must be unique on a page.
    """
    text = _render(
        figure,
        "svg",
        transparent=True,
        metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
    ).decode()
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box
    inner = text[text.index(">", box.end()) + 1 : text.rindex("</svg>")]
    inner = re.sub(
        r"<!--.*?-->|<style.*?</style>|<metadata>.*?</metadata>", "", inner, flags=re.DOTALL
    )
    return box[1], re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], prefix), inner).strip()


def png(figure: Figure) -> bytes:
    """Render a figure as a PNG image on a white background."""
    return _render(figure, "png", dpi=_DOTS)


def _render(figure: Figure, form: str, **options: Any) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure as Drawing

    file = io.BytesIO()
    with matplotlib.rc_context(
        {**matplotlib.rcParamsDefault, **_SETTINGS, "backend": "agg", "svg.hashsalt": figure.name}
    ):
        drawing = Drawing(figsize=figure.size, layout="constrained")
        figure.draw(drawing)
        drawing.savefig(file, format=form, **options)
    return file.getvalue()


def _tag(tag: str, prefix: str) -> str:
    """Rewrite one SVG tag of matplotlib for use in the page.

    The ids get the figure's prefix, the font is replaced by that of the page, and known colours are
    replaced by CSS variables.
    """
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", tag)
    tag = re.sub(r"(font(?:-family)?:[^;\"]*?)'DejaVu Sans'[^;\"]*", r"\1var(--font)", tag)
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda colour: f"var(--{_NAMES[colour[0]]})" if colour[0] in _NAMES else colour[0],
        tag,
    )
