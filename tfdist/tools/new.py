"""Entry point of `tfdist new`: writes a small project that trains at once."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import pathlib
import re
import shutil
import tempfile

from tfdist.config import nearest
from tfdist.runtime.command import COMMON_EXIT_CODES, Command, UsageError

TEMPLATES = {  # the command that trains in a project of each
    "script": "python train.py",
    "config": "tfdist train --config=config.py",
    "loop": "python train.py",
    "imagenet": "tfdist train --config=config.py",
    "recommender": "python train.py",
}
_DIRECTORY = pathlib.Path(__file__).with_name("templates")
_PARTS = {  # the directories of files of each
    "script": ("common", "train_script", "script"),
    "config": ("common", "train_config", "config"),
    "loop": ("common", "train_script", "loop"),
    "imagenet": ("common", "train_config", "imagenet"),
    "recommender": ("common", "train_script", "recommender"),
}
_SUFFIX = ".template"
_DESCRIPTION = """\
Writes a small project into the new directory NAME: a training on made-up data that runs at once,
a test and a README.

templates:
  script       a script that calls `model.fit` (default)
  config       a config file for `tfdist train`, with data and model beside it
  loop         a script with a training loop of its own, without `fit`
  imagenet     a config file for images in a directory for each class
  recommender  a script for numbers and categories, with embeddings
"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="NAME", help="directory to make")
    parser.add_argument(
        "--template",
        metavar="|".join(TEMPLATES),
        default="script",
        help="kind of project (script)",
    )


def _check(flags: argparse.Namespace, words: list[str]) -> None:
    if flags.template not in TEMPLATES:
        raise ValueError(
            f"--template: received {flags.template!r}. {nearest(flags.template, TEMPLATES)}"
        )
    name = os.path.basename(os.path.normpath(flags.directory))
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII):
        raise ValueError(
            "NAME: expected a name that begins with a letter or digit and has letters, digits, "
            f"- and _; received {name!r}"
        )


def _run(flags: argparse.Namespace, words: list[str]) -> int:
    directory = pathlib.Path(flags.directory)
    try:
        files = create(directory, flags.template)
    except FileExistsError as error:
        raise UsageError(
            f"NAME: expected a directory that does not exist, received {directory}, which does. "
            "Choose another name, or remove it."
        ) from error
    except OSError as error:
        raise UsageError(f"NAME: {directory} cannot be made: {error.strerror}") from error
    train = TEMPLATES[flags.template]
    tasks = train.removeprefix("python ")
    print(f"{directory} has {', '.join(files)}. Next:\n")
    print(f"  cd {directory}\n  {train}\n  tfdist launch --workers 2 -- {tasks}")
    return 0


def create(directory: pathlib.Path, template: str) -> list[str]:
    """Write a project: the whole of it, or nothing.

    Args:
        directory: Directory to make. Its last part is the name of the project.
        template: One of `TEMPLATES`.

    Returns:
        The names of the files.

    Raises:
        FileExistsError: If the directory exists.
        OSError: If it cannot be written.
    """
    if os.path.lexists(directory):
        raise FileExistsError(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
    unfinished = pathlib.Path(tempfile.mkdtemp(prefix=".tfdist-new-", dir=directory.parent))
    try:
        project = unfinished / "project"  # mkdtemp's own directory is private
        project.mkdir()
        for source in (path for part in _PARTS[template] for path in (_DIRECTORY / part).iterdir()):
            name = source.name.removesuffix(_SUFFIX)
            text = source.read_text(encoding="utf-8").replace("PROJECT", directory.name)
            path = project / (".gitignore" if name == "gitignore" else name)
            path.write_text(text, encoding="utf-8")
        names = sorted(path.name for path in project.iterdir())
        project.rename(directory)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(unfinished)
    return names


main = Command(
    name="tfdist new",
    description=_DESCRIPTION,
    exit_codes={**COMMON_EXIT_CODES, 0: "the project is written"},
    run=_run,
    add_flags=_add_flags,
    check=_check,
)
