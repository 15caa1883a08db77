"""Shell completion of commands and their flags, as a script for bash, zsh or fish."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import NamedTuple

from tfdist.runtime.command import Command, Group

SHELLS = ("bash", "zsh", "fish")
USE = """\
# bash: source <(tfdist --completion bash), in ~/.bashrc
# zsh: source <(tfdist --completion zsh), in ~/.zshrc after compinit
# fish: tfdist --completion fish > ~/.config/fish/completions/tfdist.fish
"""


class Words(NamedTuple):
    """Completions after the words of a command.

    Attributes:
        path: Words after the program: "", "launch", "data list".
        summary: Line about the command in the help of its group.
        words: Names of commands below it, or its flags.
        is_group: Whether `words` are commands.
    """

    path: str
    summary: str
    words: list[str]
    is_group: bool


def script(shell: str, group: Group) -> str:
    """Return the script that completes a group's commands in a shell.

    Args:
        shell: One of `SHELLS`.
        group: Group of all commands.

    Raises:
        ValueError: If there is no script for the shell.
    """
    makers = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in makers:
        raise ValueError(f"--completion: expected {', '.join(SHELLS)}; received {shell!r}")
    return USE + makers[shell](group.name, list(_walk(group, "")))


def _walk(group: Group, path: str, summary: str = "") -> Iterator[Words]:
    """Return the words of a group and of all commands in it."""
    more = ["--help"] if path else ["--help", "--version", "--completion"]
    yield Words(path, summary, [*group.commands, *more], is_group=True)
    for name, entry in group.commands.items():
        module, _, attribute = entry.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        below = f"{path} {name}".strip()
        if isinstance(command, Group):
            yield from _walk(command, below, entry.summary)
        elif isinstance(command, Command):
            flags = [*command.parser().flags, *command.more_words()]
            yield Words(below, entry.summary, list(dict.fromkeys(flags)), is_group=False)


def _cases(found: list[Words], answer: str, first: int) -> str:
    """Return the branches of a `case` over "POSITION COMMAND SUBCOMMAND".

    Args:
        found: Words of all commands.
        answer: Statement that offers "{}".
        first: Position of the word after the program.
    """
    lines = []
    for path, _, words, is_group in found:
        depth = len(path.split())
        if is_group:
            pattern = f'"{first + depth} {path}{" " if path else ""}"*'
        else:
            pattern = f'*" {path}"' if depth == 2 else f'*" {path} "*'
        lines.append(f"        {pattern}) {answer.format(' '.join(words))} ;;")
    return "\n".join(lines)


def _bash(program: str, found: list[Words]) -> str:
    cases = _cases(found, 'words="{}"', 1)
    return f"""\
_{program}() {{
    local words=""
    case "$COMP_CWORD ${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _{program} {program}
"""


def _zsh(program: str, found: list[Words]) -> str:
    cases = _cases(found, "compadd -- {}", 2)
    return f"""\
_{program}() {{
    case "$CURRENT ${{words[2]}} ${{words[3]}}" in
{cases}
    esac
    [[ ${{words[CURRENT]}} == -* ]] || (( CURRENT == 2 )) || _files
}}
compdef _{program} {program}
"""


def _fish(program: str, found: list[Words]) -> str:
    lines = []
    summaries = {path: summary for path, summary, _, _ in found}
    for path, _, words, is_group in found:
        seen = [f"__fish_seen_subcommand_from {word}" for word in path.split()]
        if is_group:
            commands = [word for word in words if not word.startswith("-")]
            others = f"not __fish_seen_subcommand_from {' '.join(commands)}"
            condition = "; and ".join([*seen, others])
            for word in commands:
                summary = summaries[f"{path} {word}".strip()].replace("'", "\\'")
                lines.append(f"complete -c {program} -n '{condition}' -a {word} -d '{summary}'")
        for word in words:
            if word.startswith("--"):
                condition = "; and ".join(seen) or "__fish_use_subcommand"
                lines.append(f"complete -c {program} -n '{condition}' -l {word[2:]}")
    return "\n".join(lines) + "\n"
