"""Command `tfdist data`: list, show and convert data sets, and audit data pipelines."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from tfdist import config
from tfdist.runtime.cli_arguments import Parser, flag_of, nearest_flag, refuse, whole
from tfdist.runtime.formatting import aligned, format_bytes, parse_bytes

if TYPE_CHECKING:
    from tfdist.data.sources.base import Source
    from tfdist.data.sources.catalog import Catalog, Entry

CATALOG = "configs/datasets.yaml"


class Command(NamedTuple):
    """Subcommand of `tfdist data`.

    Attributes:
        summary: Line in `tfdist data --help`.
        module: Module with `main(argv)` that implements the command. None: this module does.
    """

    summary: str
    module: str | None = None


COMMANDS = {
    "list": Command("the data sets of a catalog, and whether they are there"),
    "show": Command("features, counts, class balance, and a contact sheet of images"),
    "head": Command("some examples: their values, and where they lie"),
    "write": Command(
        "a copy as TFRecord files; the same command again goes on where one was stopped"
    ),
    "audit": Command(
        "run an input pipeline without a model, and prove its order", "tfdist.tools.audit"
    ),
}

_DESCRIPTION = """\
Looks at data sets, and copies them. NAME is an entry of the catalog (a YAML file, \
configs/datasets.yaml), else a data set
of TFDS, which is prepared first where it is not.

  tfdist data list
  tfdist data show digits --split test
  tfdist data head digits -n 3
  tfdist data write digits --to /tmp/digits
"""
_EPILOG = """\
exit code: 0 when all is well; 1 when examples cannot be read; 2 for a mistake on this command \
line; 78 for a mistake in
the catalog, or data that are missing or not what they should be.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command `tfdist data`.

    Args:
        argv: Command-line arguments after `tfdist data`.

    Returns:
        The exit code.
    """
    words = list(argv)
    command = COMMANDS.get(words[0]) if words else None
    if command and command.module:
        return importlib.import_module(command.module).main(words[1:]) or 0
    if not words:
        print(_parser().format_help(), end="")
        return 2
    try:
        if not command and not words[0].startswith("-"):
            raise ValueError(
                f"expected a command, received {words[0]!r}. "
                f"{config.nearest(words[0], COMMANDS, 'tfdist data ')}"
            )
        flags = parse(words)
    except ValueError as error:
        return refuse(f"tfdist data {words[0]}" if command else "tfdist data", error)
    from tfdist import app  # imported late, so that --help is fast

    return app.plainly(_ACTIONS[flags.command], flags)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Args:
        words: Command-line arguments after `tfdist data`.

    Returns:
        The flags; `command` is the name of the command.

    Raises:
        ValueError: A flag is unknown or wrong. The message names the flag, what was expected and
            what was received.

    Example:
        >>> flags = parse(["head", "digits", "--split", "test"])
        >>> flags.command, flags.name, flags.split, flags.n
        ('head', 'digits', 'test', 5)
    """
    flags, unknown = _parser().parse_known_args(words)
    if unknown:
        known = [flag_of(name) for name in vars(flags) if name not in ("command", "name")]
        nearest = nearest_flag(unknown[0], known)
        remedy = f"Did you mean {nearest}?" if nearest else f"Expected {', '.join(known)}."
        raise ValueError(f"{unknown[0]}: no such flag of `tfdist data {flags.command}`. {remedy}")
    return flags


def shard_bytes(text: str) -> int:
    """Convert a size with a unit into a number of bytes.

    Example:
        >>> shard_bytes("100MB"), shard_bytes("1.5 GiB"), shard_bytes("4096")
        (100000000, 1610612736, 4096)
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _list(flags: argparse.Namespace) -> int:
    from tfdist.data.sources.catalog import Catalog

    catalog = Catalog.load(flags.catalog or CATALOG)
    rows = [("name", "kind", "splits", "location", "license")]
    for entry in catalog.entries.values():
        state = _state(entry, flags.data_dir)
        rows.append(
            (entry.name, entry.kind, ", ".join(entry.splits), state, entry.license or "not given")
        )
    print("\n".join(aligned(rows, left=range(len(rows[0])))))
    if not catalog.entries:
        print(f"{catalog.file} names no data set yet.")
    return 0


def _state(entry: Entry, data_dir: str | None) -> str:
    """Return in a few words whether the data of an entry are present."""
    try:
        splits = [entry.split(name) for name in entry.splits]
        missing = {split.name: place for split in splits if (place := split.missing())}
        if entry.kind == "tfds":
            return _prepared(entry, data_dir)
    except ValueError as error:
        return (
            str(error)
            .removeprefix(f"{entry.file}: {entry.name}.location: ")
            .partition(". Set it:")[0]
        )
    places = missing.values() if missing else [str(split.location()) for split in splits]
    return f"{'missing' if missing else 'found'} {', '.join(dict.fromkeys(places))}"


def _source(flags: argparse.Namespace) -> tuple[Source, Entry | None]:
    """Return the data set that the command line names, and its catalog entry or None."""
    from tensorflow_datasets.core import DatasetNotFoundError

    from tfdist.data.sources.catalog import Catalog, resolve

    catalog: Catalog | None = None
    if flags.catalog or os.path.exists(CATALOG):
        catalog = Catalog.load(flags.catalog or CATALOG)
    entry = catalog.entries.get(flags.name) if catalog else None
    split = flags.split or (next(iter(entry.splits)) if entry else "train")
    try:
        return resolve(flags.name, split, flags.data_dir, catalog), entry
    except ValueError as error:
        if catalog or not isinstance(error.__cause__, DatasetNotFoundError):
            raise
        raise ValueError(
            f"{error} Or name a catalog, --catalog FILE: there is no {CATALOG} in {os.getcwd()}."
        ) from error


def _prepared(entry: Entry, data_dir: str | None) -> str:
    """Return in a few words whether TFDS has prepared the data of an entry."""
    import tensorflow_datasets as tfds

    from tfdist.data.sources import digits  # noqa: F401  registers tfdist_digits

    split = entry.split(next(iter(entry.splits)))
    name = split.options.get("name", entry.name)
    try:
        builder = tfds.builder(name, data_dir=split.location() or data_dir)
    except tfds.core.DatasetNotFoundError:
        return f"missing: TFDS knows no {name}"
    found = (builder.data_path / "dataset_info.json").exists()
    return f"found {builder.data_path}" if found else "not prepared yet: TFDS does so at first use"


def _show(flags: argparse.Namespace) -> int:
    from tfdist.tools import show

    source, entry = _source(flags)
    default = re.sub(r"[^\w.-]+", "_", source.name).strip("_")
    return show.show(
        source,
        entry.license if entry else None,
        flags.labels,
        flags.sheet or f"runs/data/{default}.png",
    )


def _head(flags: argparse.Namespace) -> int:
    from tfdist.tools import show

    source, _ = _source(flags)
    return show.head(source, flags.n) if flags.example is None else show.one(source, flags.example)


def _write(flags: argparse.Namespace) -> int:
    from tfdist.data.writing.writer import verify, write

    source, _ = _source(flags)
    compression = None if flags.compression == "none" else flags.compression
    meter = _Meter(sys.stderr)
    try:
        written = write(
            source,
            flags.to,
            shard_bytes=flags.shard_size,
            compression=compression,
            workers=flags.workers,
            progress=meter.update,
        )
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on where this one stopped.", file=sys.stderr)
        return 130
    finally:
        meter.close()
    shards = written["shards"]
    total = format_bytes(sum(shard["bytes"] for shard in shards))
    print(f"{flags.to}: {written['examples']:,} examples in {len(shards)} files, {total}")
    if flags.verify:
        verify(flags.to, flags.workers)
        print(f"{flags.to}: all files are as they were written, by their checksums")
    return 0


class _Meter:
    """Progress display of a long task.

    It is one line that is rewritten on a terminal, and otherwise a new line every ten seconds.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._begin = self._last = time.monotonic()
        self._lock = threading.Lock()

    def update(self, done: int, total: int | None) -> None:
        """Show `done` of `total` if enough time has passed. Safe to call from any thread."""
        with self._lock:
            now = time.monotonic()
            if now - self._last < (0.2 if self._live else 10):
                return
            self._last = now
            of = "" if total is None else f" of {total:,} ({done / max(total, 1):.0%})"
            text = f"{done:,}{of} examples, {done / (now - self._begin):,.0f}/s"
            print(
                f"\r{text:60}" if self._live else text,
                end="" if self._live else "\n",
                file=self._stream,
                flush=True,
            )

    def close(self) -> None:
        """Clear the progress line of a terminal."""
        if self._live:
            print(f"\r{'':60}\r", end="", file=self._stream, flush=True)


_ACTIONS = {"list": _list, "show": _show, "head": _head, "write": _write}


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    parser = Parser(
        prog="tfdist data",
        usage="tfdist data [-h] COMMAND ...",
        description=_DESCRIPTION + "\ncommands:\n" + "\n".join(lines),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        prog="tfdist data", dest="command", metavar="COMMAND", help=argparse.SUPPRESS, required=True
    )

    def add(name: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            description=f"{COMMANDS[name].summary[0].upper()}{COMMANDS[name].summary[1:]}.",
            epilog=_EPILOG,
            allow_abbrev=False,
        )
        if name != "list":
            command.add_argument(
                "name", metavar="NAME", help="an entry of the catalog, or a data set of TFDS"
            )
            command.add_argument(
                "--split", metavar="S", help="split (the entry's first; of TFDS: train)"
            )
        command.add_argument(
            "--catalog", metavar="FILE", help=f"the catalog ({CATALOG}, if it is there)"
        )
        command.add_argument(
            "--data-dir",
            metavar="DIR",
            help="where TFDS data sets lie prepared (where TFDS keeps them)",
        )
        return command

    add("list")
    show = add("show")
    show.add_argument(
        "--labels",
        type=whole(1),
        default=5000,
        metavar="N",
        help="examples to read at most, for class balance (5000)",
    )
    show.add_argument(
        "--sheet", metavar="FILE", help="where the contact sheet goes (runs/data/NAME_SPLIT.png)"
    )
    head = add("head")
    head.add_argument("-n", type=whole(1), default=5, metavar="N", help="how many examples (5)")
    head.add_argument(
        "--example", type=whole(0), metavar="K", help="example K alone, and why it cannot be read"
    )
    write = add("write")
    write.add_argument("--to", required=True, metavar="DIR", help="directory of the files")
    write.add_argument(
        "--shard-size",
        type=shard_bytes,
        default="100MB",
        metavar="SIZE",
        help="bytes of a file (100MB)",
    )
    write.add_argument(
        "--compression", choices=("GZIP", "none"), default="none", help="of the files (none)"
    )
    write.add_argument(
        "--workers",
        type=whole(1),
        metavar="N",
        help="threads that write a file each (one per core)",
    )
    write.add_argument(
        "--verify", action="store_true", help="read all files again, and compare their checksums"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
