"""Terminal text: line assembly, removal of escape sequences, colours and clipping."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping

LONGEST_LINE = 1 << 16  # characters, so that an endless line does not fill the memory

# Readable on dark and light backgrounds; red is reserved for errors.
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;:]*m")
# Every escape character that does not begin a colour code is removed, so what is left of the text
# around it cannot form a new sequence. ECMA-48 section 5.4 has the grammar; C1 controls are
# one-character forms of escape sequences; bidirectional marks show text in another order.
_CONTROL = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x9c|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class Line:
    r"""A one-line terminal that turns bytes with carriage returns and backspaces into lines.

    Example:
        >>> line = Line()
        >>> line.feed(b"epoch 1\n1/3 ..\r2/3 .")
        ['epoch 1']
        >>> line.text
        '2/3 .'
        >>> line.feed(b"\b\b\b\b\b\r3/3 done\r\n"), line.text
        (['3/3 done'], '')
    """

    def __init__(self):
        # surrogateescape: bytes that are not UTF-8 reach the log file unchanged.
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._return = False  # the next text replaces the line
        self.text = ""

    def feed(self, data: bytes) -> list[str]:
        """Process the next bytes; return the lines that they finish, without newline."""
        finished = []
        for token in re.findall(r"\n|\r|\x08+|[^\n\r\x08]+", self._decode(data)):
            if token == "\n" or len(self.text) > LONGEST_LINE:
                finished.append(self.text.rstrip())
                self.text = ""
                self._return = False
            if token == "\r":
                self._return = True
            elif token[0] == "\b":
                self.text = self.text[: -len(token)]
            elif token != "\n":
                self.text = token if self._return else self.text + token
                self._return = False
        return finished


def paint(text: str, index: int, colour: bool) -> str:
    r"""Return the text in the colour of a number.

    Example:
        >>> paint("a", 0, True), paint("a", 0, False)
        ('\x1b[36ma\x1b[0m', 'a')
    """
    return f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{text}\x1b[0m" if colour else text


def printable(text: str, colour: bool) -> str:
    r"""Remove what controls a terminal, but keep colours if wanted, tabs and newlines.

    Undecodable bytes become "?".

    Example:
        >>> printable("\x1b[2K\x1b[1mbold\x1b[", True), printable("\x1b[1mbold\x1b[0m", False)
        ('\x1b[1mbold\x1b[0m', 'bold')
    """
    text = _CONTROL.sub(lambda found: (colour and found["colour"]) or "", text)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text + "\x1b[0m" if "\x1b" in text and not text.endswith("\x1b[0m") else text


def clip(line: str, width: int) -> str:
    r"""Cut a line to `width` columns, not counting colour codes.

    Example:
        >>> clip("\x1b[1mabc\x1b[0mdef", 4)
        '\x1b[1mabc\x1b[0md'
    """
    pieces = []
    remaining = width
    for piece in re.split(f"({_COLOUR_CODE.pattern})", line):
        if not _COLOUR_CODE.fullmatch(piece):
            piece = piece[:remaining]
            remaining -= len(piece)
        pieces.append(piece)
    return "".join(pieces)


def wants_colour(choice: str, tty: bool, environ: Mapping[str, str]) -> bool:
    """Return whether to use colours.

    "auto" means on a terminal, unless NO_COLOR is set. "always" and "never" do not depend on it.
    """
    if choice != "auto":
        return choice == "always"
    return tty and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
