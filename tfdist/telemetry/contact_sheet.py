"""Contact sheets: example images of a data set, one row per class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_CELL = 96  # pixels, both ways
_GAP = 8
_LINE = 16
_TITLES = 176
_DARK = "#202020"
_PALE = "#707070"


_Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Row(NamedTuple):
    """A row of a contact sheet.

    Attributes:
        title: Text to the left of the images; may be empty.
        note: Text below the title, in a paler colour.
        images: Pairs of a caption and an image, in the form that `to_image` accepts.
    """

    title: str
    note: str
    images: Sequence[tuple[str, np.ndarray]]


def draw(heading: str, rows: Sequence[Row]) -> Image.Image:
    """Draw a contact sheet.

    Args:
        heading: Text of the first line.
        rows: One or more rows of images.

    Returns:
        An RGB image.

    Example:
        >>> draw(
        ...     "noughts", [Row("0", "2 examples", [("5", np.zeros([8, 8, 1], np.uint8))] * 2)]
        ... ).size
        (400, 152)
    """
    font = ImageFont.load_default(13)
    small = ImageFont.load_default(11)
    titled = any(row.title for row in rows)
    left = _GAP + (_TITLES + _GAP if titled else 0)
    columns = max(len(row.images) for row in rows)
    height = _CELL + _LINE + _GAP
    width = max(left + columns * (_CELL + _GAP), int(font.getlength(heading)) + 2 * _GAP)
    sheet = Image.new("RGB", (width, 2 * _GAP + _LINE + len(rows) * height), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_GAP, _GAP), heading, _DARK, font)
    for index, row in enumerate(rows):
        top = 2 * _GAP + _LINE + index * height
        lines = _wrap(row.title, font, _TITLES)
        pen.text((_GAP, top), "\n".join(lines), _DARK, font)
        pen.text((_GAP, top + _LINE * len(lines)), _shorten(row.note, small, _TITLES), _PALE, small)
        for column, (caption, pixels) in enumerate(row.images):
            image = _fit(to_image(pixels))
            x = left + column * (_CELL + _GAP)
            sheet.paste(image, (x + (_CELL - image.width) // 2, top + (_CELL - image.height) // 2))
            pen.text((x, top + _CELL), _shorten(caption, small, _CELL), _PALE, small)
    return sheet


def is_image(shape: Sequence[int | None], dtype: np.dtype) -> bool:
    """Return whether an array of this shape and dtype should be drawn as an image.

    Example:
        >>> is_image([None, None, 3], np.dtype("uint8")), is_image([10], np.dtype("float32"))
        (True, False)
    """
    return len(shape) == 3 and shape[-1] in (1, 3, 4) and dtype.kind in "uifbV"


def to_image(pixels: np.ndarray) -> Image.Image:
    """Convert an array of pixels to an RGB image.

    Unsigned 16-bit values are scaled to 8 bits, and values from 0 to 1 are multiplied by 255. If
    other values lie outside 0 to 255, the range from the smallest to the largest value is mapped to
    0 to 255.

    Args:
        pixels: Numbers of shape `[height, width, channels]`. One channel is grey, three are RGB,
            and four are RGB with transparency, which is shown on white.
    """
    if pixels.dtype == np.uint16:
        pixels = pixels // 257
    elif pixels.dtype != np.uint8:
        pixels = np.nan_to_num(pixels.astype(np.float64))
        least, greatest = (pixels.min(), pixels.max()) if pixels.size else (0, 0)
        if least >= 0 and greatest <= 1:
            pixels = pixels * 255
        elif least < 0 or greatest > 255:
            pixels = (pixels - least) / max(greatest - least, 1e-300) * 255
    pixels = np.round(pixels).astype(np.uint8)
    if pixels.shape[-1] == 4:
        image = Image.fromarray(pixels)
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")


def _fit(image: Image.Image) -> Image.Image:
    """Scale an image to fit into a cell; small images keep square pixels."""
    scale = _CELL / max(*image.size, 1)
    if scale >= 1:
        return image.resize(
            (image.width * int(scale), image.height * int(scale)), Image.Resampling.NEAREST
        )
    size = [max(1, round(side * scale)) for side in image.size]
    return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)


def _wrap(text: str, font: _Font, width: int) -> list[str]:
    """Break text into at most four lines of at most `width` pixels each."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if len(lines) == 4 or font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [_shorten(line, font, width) for line in lines]


def _shorten(text: str, font: _Font, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."
