"""One command of the command line: help, parsing, errors, Ctrl-C and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib
import math
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfdist.runtime.cli_arguments import Parser, no_such_flag, split_config
from tfdist.runtime.configuration_errors import exit_on_configuration_error
from tfdist.runtime.termination import ending

USAGE_CODE = 2
INTERRUPTED_CODE = 128 + signal.SIGINT
MAX_WIDTH = 100  # columns of `--help`, also on a wider terminal

ExitCodes = Mapping[int | str, str]  # code, or words about it: when a command ends with it
COMMON_EXIT_CODES: ExitCodes = {
    USAGE_CODE: "the command line is wrong",
    INTERRUPTED_CODE: "you pressed Ctrl-C",
}


class UsageError(ValueError):
    """A mistake on the command line that a command finds only while it runs."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a ValueError of the block into a `UsageError`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Flags that a file gives to a command, over which those of the command line prevail.

    Attributes:
        words: Words for the command line, each with its value: "--workers=2".
        source: Text for messages, in which "{}" stands for the name of a flag.
    """

    words: Sequence[str] = ()
    source: str = ""

    def locate(self, error: ValueError, own: Sequence[str]) -> ValueError:
        """Return an error that also says which entry of the file is wrong, if it is one.

        Args:
            error: Error whose message begins with a flag.
            own: Words of the command line.

        Example:
            >>> defaults = Defaults(["--workers=x"], "launch.{} in a.py")
            >>> defaults.locate(ValueError("--workers: expected a number"), [])
            ValueError('--workers: expected a number (launch.workers in a.py)')
        """
        flag = str(error).partition(":")[0].partition(" ")[0]
        here, there = (
            flag in {word.partition("=")[0] for word in words} for words in (own, self.words)
        )
        if here or not there:
            return ValueError(str(error))
        name = flag.removeprefix("--").replace("-", "_")
        return ValueError(f"{error} ({self.source.format(name)})")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, which is called with its words and returns its exit code.

    A command that runs ends on SIGTERM and SIGHUP with the code 128 + signal, after the cleanup of
    `run`. After Ctrl-C it says so, and ends with the code 130.

    Attributes:
        name: Words that the user types, such as "tfdist doctor".
        description: Text of `--help` between usage and flags, or a function that returns it.
        exit_codes: Meaning of each exit code, for the end of `--help`.
        run: Runs the command, given the flags and the words that `split` set apart. A `UsageError`
            that it raises ends the command like a mistake on the command line. Other errors that
            tfdist raises are printed as one sentence, and end the process with code 78 or 75.
        add_flags: Adds the flags of the command to a parser.
        check: Raises ValueError if flags and words contradict each other; fills in defaults that
            depend on several flags.
        usage: Usage lines; by default argparse writes them.
        split: Divides the words of the command line into those of the parser, and others that `run`
            gets as they are; default: all are for the parser.
        others: Description of the other words, for the error about an unknown word.
        word_remedy: Remedy for an unknown word that is no flag; default: `others`.
        takes_config: Whether the command takes `--config` and `--config.KEY=VALUE`, which `run`
            then gets as the other words; default False.
        handles_signals: Whether `run` itself takes care of signals, including Ctrl-C.
        more_words: Words that the command takes besides its flags, for the completion of a shell.
        defaults: Finds defaults of the flags, given the parser, its words and the other words;
            default: there are none.

    Example:
        >>> def add_flags(parser):
        ...     parser.add_argument("--max-lines", type=int, default=3, help="lines to print (3)")
        >>> head = Command("head", "Print lines.", {0: "done"}, lambda flags, words: 0, add_flags)
        >>> head.parse(["--max-lines", "7"])[0].max_lines, head(["--max-lines", "7"])
        (7, 0)
        >>> head.parse(["--max_lines", "7"])
        Traceback (most recent call last):
        ValueError: --max_lines: no such flag. Did you mean --max-lines?
    """

    name: str
    description: str | Callable[[], str]
    exit_codes: ExitCodes
    run: Callable[[argparse.Namespace, list[str]], int]
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    check: Callable[[argparse.Namespace, list[str]], None] = lambda flags, words: None
    usage: str | None = None
    split: Callable[[Sequence[str]], tuple[list[str], list[str]]] = lambda argv: (list(argv), [])
    others: str = ""
    word_remedy: str = ""
    takes_config: bool = False
    handles_signals: bool = False
    more_words: Callable[[], Sequence[str]] = lambda: ()
    defaults: Callable[[Parser, Sequence[str], Sequence[str]], Defaults] = (
        lambda parser, own, words: Defaults()
    )

    def __call__(self, argv: Sequence[str]) -> int:
        """Run the command.

        Args:
            argv: Words after the name of the command.

        Returns:
            The exit code.

        Raises:
            SystemExit: For `--help`, a signal, or an error in the configuration.
        """
        try:
            flags, words = self.parse(argv)
        except ValueError as error:
            return refuse(self.name, error)
        if self.handles_signals:
            return exit_on_configuration_error(self._run, flags, words)
        try:
            with ending():
                return exit_on_configuration_error(self._run, flags, words)
        except KeyboardInterrupt:
            print(f"{self.name}: interrupted", file=sys.stderr)
            return INTERRUPTED_CODE

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the command line.

        Args:
            argv: Words after the name of the command.

        Returns:
            The checked flags, with the whole command line, after the defaults, as `argv`; and the
            words that `split` set apart.

        Raises:
            ValueError: If a flag is unknown or wrong. The message names the flag, what was expected
                and what was received.
        """
        own, words = split_config(argv) if self.takes_config else self.split(argv)
        parser = self.parser()
        defaults = self.defaults(parser, own, words)
        try:
            flags, unknown = parser.parse_known_args([*defaults.words, *own])
            for word in unknown:
                if word.startswith("-"):
                    raise ValueError(no_such_flag(word, parser.flags, self.others))
                remedy = self.word_remedy or self.others
                raise ValueError(f"expected a flag, received {word!r}. {remedy}".rstrip())
            flags.argv = [*defaults.words, *argv]
            self.check(flags, words)
        except ValueError as error:
            raise defaults.locate(error, own) from error
        return flags, words

    def parser(self) -> Parser:
        """Return the parser of the command's own flags."""
        parser = Parser(
            prog=self.name,
            usage=self.usage,
            description=self.description
            if isinstance(self.description, str)
            else self.description(),
            epilog=exit_code_lines(self.exit_codes),
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter, width=_help_width()
            ),
            allow_abbrev=False,
        )
        if self.takes_config:
            parser.add_argument(
                "--config",
                metavar="FILE",
                default=argparse.SUPPRESS,
                help="config file of the run; --config.SECTION.KEY=VALUE changes a key of it (see "
                "`tfdist train --help`)",
            )
        self.add_flags(parser)
        return parser

    def _run(self, flags: argparse.Namespace, words: list[str]) -> int:
        try:
            return self.run(flags, words)
        except UsageError as error:
            return refuse(self.name, error)


class Subcommand(NamedTuple):
    """Place of a command, `MODULE:NAME`, and its line in the help of its group."""

    target: str
    summary: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Group of commands below one word, such as `tfdist data`.

    Only the module of the command that is called is imported.

    Attributes:
        name: Words that the user types before the name of a command, such as "tfdist data".
        description: Text of `--help` before the list of the commands.
        commands: The commands by their names.
        exit_codes: Meaning of each exit code, for the end of `--help`; empty if each command has
            its own.
    """

    name: str
    description: str
    commands: Mapping[str, Subcommand]
    exit_codes: ExitCodes = dataclasses.field(default_factory=dict)

    def __call__(self, argv: Sequence[str]) -> int:
        """Run the command that the first word names.

        Args:
            argv: Words after the name of the group.

        Returns:
            The exit code of the command; 2 if there is no such command.
        """
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(self.help(), end="")
            return 0 if argv else USAGE_CODE
        if argv[0] not in self.commands:
            return refuse(self.name, ValueError(self._unknown(argv[0])))
        module, _, name = self.commands[argv[0]].target.partition(":")
        return getattr(importlib.import_module(module), name)(argv[1:])

    def help(self) -> str:
        """Return the text of `--help`."""
        width = max(map(len, self.commands))
        lines = [f"  {name:{width}}  {entry.summary}" for name, entry in self.commands.items()]
        blocks = [
            f"usage: {self.name} COMMAND ...",
            self.description.strip(),
            "\n".join(["commands:", *lines]),
            f"`{self.name} COMMAND --help` explains a command and lists its exit codes.",
        ]
        if self.exit_codes:
            blocks.append(exit_code_lines(self.exit_codes))
        return "\n\n".join(blocks) + "\n"

    def _unknown(self, word: str) -> str:
        nearest = difflib.get_close_matches(word, self.commands, n=1)
        hint = f" Did you mean `{self.name} {nearest[0]}`?" if nearest else ""
        return f"expected a command ({', '.join(self.commands)}), received {word!r}.{hint}"


def refuse(command: str, error: ValueError) -> int:
    """Print on stderr what is wrong with a command line.

    Args:
        command: The command as the user typed it, such as "tfdist doctor".
        error: The mistake.

    Returns:
        The exit code for a wrong command line, 2.
    """
    print(f"{command}: error: {error}\nSee `{command} --help`.", file=sys.stderr)
    return USAGE_CODE


def exit_code_lines(exit_codes: ExitCodes) -> str:
    """Return the list of exit codes at the end of `--help`.

    Example:
        >>> print(exit_code_lines({0: "no check fails", 78: "the config is wrong"}))
        exit codes:
          0     no check fails
          78    the config is wrong
    """
    width = _help_width()
    # The last line is about all other codes, if a command has more.
    order = sorted(exit_codes, key=lambda code: code if isinstance(code, int) else math.inf)
    lines = [
        textwrap.fill(
            exit_codes[code], width, initial_indent=f"  {code:<4}  ", subsequent_indent=" " * 8
        )
        for code in order
    ]
    return "\n".join(["exit codes:", *lines])


def _help_width() -> int:
    return min(max(shutil.get_terminal_size().columns - 2, 40), MAX_WIDTH)
