"""Test that tasks' output is readable lines: progress bars, colours, broken bytes."""

import fcntl
import io
import os
import re
import struct
import termios
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tfdist.launch.output import Console, TaskOutput
from tfdist.launch.terminal_text import Line, clip, printable, wants_colour

TASKS = ["worker:0", "worker:1"]


def bar(step, width):
    """Return one redraw as keras.utils.Progbar writes it."""
    return "\b" * width + "\r" + f"\x1b[1m{step}/3\x1b[0m {'━' * step} loss: 0.5  "


@pytest.fixture
def console():
    def make(**options):
        out = io.StringIO()
        err = io.StringIO()
        return Console(out, err, tasks=TASKS, drawer="worker:0", shown=TASKS, **options), out, err

    return make


def taken(pipe):
    """Return once all that was written to a pipe has been read.

    The next piece comes in a reading of its own.
    """
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]:
        time.sleep(0.001)


def test_a_bar_leaves_its_last_state():
    line = Line()
    finished = line.feed(
        ("Epoch 1\n" + bar(1, 0) + bar(2, 15) + bar(3, 16) + "\nEpoch 2\n").encode()
    )
    assert finished == ["Epoch 1", "\x1b[1m3/3\x1b[0m ━━━ loss: 0.5", "Epoch 2"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_output_does_not_depend_on_how_it_is_split(size):
    data = ("a\r\n" + bar(1, 0) + bar(2, 15) + "\n|\b/\b-\n\xff é ✓\n").encode()
    line = Line()
    whole = Line()
    pieces = [line.feed(data[i : i + size]) for i in range(0, len(data), size)]
    finished = [text for piece in pieces for text in piece]
    assert finished == whole.feed(data) == ["a", "\x1b[1m2/3\x1b[0m ━━ loss: 0.5", "-", "\xff é ✓"]


def test_a_line_without_end_is_cut():
    line = Line()
    finished = [text for _ in range(40) for text in line.feed(b"x" * 4096)]
    assert finished
    assert len(line.text) <= 1 << 17


def test_only_the_drawers_unfinished_line_is_drawn(console):
    board, out, _ = console(redraw=True)
    board.show("worker:0", [], "1/3", False)
    board.show("worker:1", [], "2/3", False)
    board.show("worker:1", ["hello"], "", False)
    drawn = "[worker:0] 1/3"
    erase = "\r\x1b[K"
    assert out.getvalue() == f"{erase}{drawn}{erase}{drawn}{erase}[worker:1] hello\n{drawn}"


def test_without_a_terminal_a_bar_is_a_line_now_and_then(console):
    board, out, _ = console()
    board.show("worker:0", [], "1/3", False)
    board.show("worker:0", [], "2/3", True)
    board.show("worker:1", [], "2/3", True)
    assert out.getvalue() == "[worker:0] 2/3\n"


def test_closed_output_pipe_does_not_stop_the_run(console):
    board, out, err = console()
    out.close()
    board.show("worker:0", ["a"], "", False)
    board.notice("still here")
    assert err.getvalue() == "still here\n"


def test_information_lines_stay_in_the_log(console):
    noise = "I0000 00:00:1795255133.890992   14180 port.cc:153] oneDNN custom operations are on."
    for chatter, shown in ((False, ""), (True, f"[worker:0] {noise}\n")):
        board, out, _ = console(chatter=chatter)
        board.show("worker:0", [noise], "", False)
        assert out.getvalue() == shown


def test_log_and_console_of_a_task(console, tmp_path):
    board, out, _ = console()
    reading, writing = os.pipe()
    output = TaskOutput("worker:1", os.fdopen(reading, "rb"), str(tmp_path / "log"), board)
    os.write(writing, ("a\n" + bar(1, 0) + bar(2, 15) + "\n").encode() + b"\xff raw\nno newline")
    os.close(writing)
    output.join(5)
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0, "others may not read it"
    logged = (tmp_path / "log").read_bytes()
    assert logged == "a\n\x1b[1m2/3\x1b[0m ━━ loss: 0.5\n".encode() + b"\xff raw\nno newline\n"
    lines = ("a", "2/3 ━━ loss: 0.5", "? raw", "no newline")
    assert out.getvalue() == "".join(f"[worker:1] {line}\n" for line in lines)


def test_a_log_without_end_keeps_its_last_two_files(console, tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.launch.output.LOG_CHARACTERS", 3)
    reading, writing = os.pipe()
    pipe = os.fdopen(reading, "rb")
    output = TaskOutput("worker:1", pipe, str(tmp_path / "log"), console()[0])
    for number in range(4):
        os.write(writing, b"line %d\n" % number)
        taken(pipe)
    os.close(writing)
    output.join(5)
    assert (tmp_path / "log").read_text() == "line 3\n"
    assert (tmp_path / "log.1").read_text() == "line 2\n"


def test_a_quiet_bar_reaches_the_log_now_and_then(console, tmp_path):
    board, out, _ = console()
    reading, writing = os.pipe()
    times = iter(range(0, 1000, 6))  # six seconds from one reading of the clock to the next
    pipe = os.fdopen(reading, "rb")
    output = TaskOutput("worker:0", pipe, str(tmp_path / "log"), board, clock=lambda: next(times))
    for step in (1, 2, 3, 3):
        os.write(writing, bar(step, 15).encode())
        taken(pipe)
    os.close(writing)
    output.join(5)
    assert out.getvalue() == "[worker:0] 3/3 ━━━ loss: 0.5  \n" * 2


def test_a_line_that_arrives_in_pieces_after_a_long_silence_is_one_line(console, tmp_path):
    board, out, _ = console()
    reading, writing = os.pipe()
    times = iter([30.0, 30.0, 30.0, 60.0, 60.0])
    pipe = os.fdopen(reading, "rb")
    output = TaskOutput("worker:0", pipe, str(tmp_path / "log"), board, clock=lambda: next(times))
    for piece in (
        b"a line",
        b" of two",
        b"\n",
        b"another",
        b"\n",
    ):  # as `print` writes without a buffer
        os.write(writing, piece)
        taken(pipe)
    os.close(writing)
    output.join(5)
    assert out.getvalue() == "[worker:0] a line of two\n[worker:0] another\n"
    assert (tmp_path / "log").read_text() == "a line of two\nanother\n"


def test_cursor_movements_are_removed():
    assert (
        printable("\x1b[2K\x1b[1Aa\x1b]0;title\x07b\x1b[31mc", colour=True) == "ab\x1b[31mc\x1b[0m"
    )
    assert printable("\x1b[31mc\x1b", colour=False) == "c"


CONTROLS = (
    *("\x1b", "\x1b[", "[", "]", "2", "1K", "J", "31m", ";", "?", " ", "\\", "P", "0", "a", "\t"),
    *("\x07", "\x0e", "\r", "\x7f", "\x84", "\x90", "\x9b", "\x9c", "\x9d", "\u202e", "\u2066"),
)


@given(text=st.lists(st.sampled_from(CONTROLS), max_size=30).map("".join), colour=st.booleans())
@example(text="\x1b[2\x1b[1KJ", colour=True)
@example(text="\x1b\x1b[31m[2J", colour=False)
def test_nothing_but_colours_controls_the_terminal(text, colour):
    shown = printable(text, colour)
    assert printable(shown, colour) == shown
    plain = re.sub(r"\x1b\[[0-9;:]*m", "", shown)
    assert plain.replace("\t", "").isprintable()
    assert colour or plain == shown


def test_text_of_all_languages_is_shown():
    text = "naïve\tДж 你好 👩\u200d🔬 ━ שלום"
    assert printable(text, colour=False) == text


def test_messages_that_quote_a_task_do_not_control_the_terminal(console):
    board, _, err = console()
    board.notice("ROOT CAUSE: worker:0 failed: \x1b]0;title\x07a\n\x1b[2Jlog")
    assert err.getvalue() == "ROOT CAUSE: worker:0 failed: a\nlog\n"


def test_a_drawn_line_fits_the_terminal():
    assert (
        clip("\x1b[36m[a] \x1b[0mbar \x1b[1mrest\x1b[0m", 6)
        == "\x1b[36m[a] \x1b[0mba\x1b[1m\x1b[0m"
    )


@pytest.mark.parametrize(
    ("choice", "tty", "environ", "expected"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_colour(choice, tty, environ, expected):
    assert wants_colour(choice, tty, environ) is expected
