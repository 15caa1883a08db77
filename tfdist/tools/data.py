"""Command `tfdist data`: list, show and convert data sets, and audit data pipelines."""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from tfdist.config import packaged
from tfdist.runtime.cli_arguments import byte_count, whole
from tfdist.runtime.command import COMMON_EXIT_CODES, Command, ExitCodes, Group, Subcommand
from tfdist.runtime.formatting import aligned, format_bytes
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE
from tfdist.runtime.startup_lines import hidden

if TYPE_CHECKING:
    from tfdist.data.sources.catalog import Entry
    from tfdist.data.sources.source import Source

CATALOG = "configs/datasets.yaml"


COMMANDS = {
    "list": Subcommand(
        "tfdist.tools.data:list_command", "list the data sets of a catalog, and find their files"
    ),
    "show": Subcommand(
        "tfdist.tools.data:show_command",
        "show features, counts, class balance, and a contact sheet of images",
    ),
    "head": Subcommand(
        "tfdist.tools.data:head_command", "print some examples, and where they are stored"
    ),
    "write": Subcommand(
        "tfdist.tools.data:write_command",
        "write a copy as TFRecord files; if it is interrupted, the same command resumes",
    ),
    "audit": Subcommand(
        "tfdist.tools.audit.main:main", "read a data pipeline without training, and check its order"
    ),
}

_DESCRIPTION = """\
Shows and copies data sets. NAME is an entry of the catalog (a YAML file, configs/datasets.yaml),
or else a data set of TFDS, which TFDS prepares at first use.

  tfdist data list
  tfdist data show digits --split test
  tfdist data head digits -n 3
  tfdist data write digits --to /tmp/digits
"""
_EXIT_CODES: ExitCodes = {
    **COMMON_EXIT_CODES,
    0: "success",
    1: "an example cannot be read",
    CONFIGURATION_CODE: "the catalog is wrong, or data are missing or damaged",
}


@hidden()
def _list(flags: argparse.Namespace, words: list[str]) -> int:
    from tfdist.data.sources.catalog import Catalog

    catalog = Catalog.load(flags.catalog or _catalog())
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
        missing = [path for split in splits if (path := split.missing())]
        if entry.kind == "tfds":
            return _prepared(entry, data_dir)
    except ValueError as error:
        return (
            str(error)
            .removeprefix(f"{entry.file}: {entry.name}.location: ")
            .partition(". Set it:")[0]
        )
    paths = missing or [str(split.location()) for split in splits]
    return f"{'missing' if missing else 'found'} {', '.join(dict.fromkeys(paths))}"


def _source(flags: argparse.Namespace) -> tuple[Source, Entry | None]:
    """Return the data set that the command line names, and its catalog entry or None."""
    from tensorflow_datasets.core import DatasetNotFoundError

    from tfdist.data.sources.catalog import Catalog, resolve

    found = Catalog.load(flags.catalog or _catalog())
    entry = found.entries.get(flags.name)
    # A name that the packaged catalog lacks is one of TFDS.
    catalog = found if entry or flags.catalog or os.path.exists(CATALOG) else None
    split = flags.split or (next(iter(entry.splits)) if entry else "train")
    try:
        return resolve(flags.name, split, flags.data_dir, catalog), entry
    except ValueError as error:
        if catalog or not isinstance(error.__cause__, DatasetNotFoundError):
            raise
        raise ValueError(
            f"{error} Or name a catalog with --catalog FILE: there is no {CATALOG} in "
            f"{os.getcwd()}."
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
    if (builder.data_path / "dataset_info.json").exists():
        return f"found {builder.data_path}"
    return "not prepared yet; TFDS prepares it at first use"


@hidden()
def _show(flags: argparse.Namespace, words: list[str]) -> int:
    from tfdist.tools import show

    source, entry = _source(flags)
    default = re.sub(r"[^\w.-]+", "_", source.name).strip("_")
    return show.show(
        source,
        entry.license if entry else None,
        flags.labels,
        flags.sheet or f"runs/data/{default}.png",
    )


@hidden()
def _head(flags: argparse.Namespace, words: list[str]) -> int:
    from tfdist.tools import show

    source, _ = _source(flags)
    return show.head(source, flags.n) if flags.example is None else show.one(source, flags.example)


def _write(flags: argparse.Namespace, words: list[str]) -> int:
    with hidden():  # not the meter, which asks whether it is on a terminal
        import tensorflow as tf

        from tfdist.data.writing.writer import verify, write

        tf.config.list_physical_devices()
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
        print("\nThe same command resumes where this one stopped.", file=sys.stderr)
        raise
    finally:
        meter.close()
    shards = written["shards"]
    total = format_bytes(sum(shard["bytes"] for shard in shards))
    print(f"{flags.to}: {written['examples']:,} examples in {len(shards)} files, {total}")
    if flags.verify:
        verify(flags.to, flags.workers)
        print(f"{flags.to}: the checksums of all files are right")
    return 0


class _Meter:
    """Progress display of a long task.

    It is one line that is rewritten on a terminal, and otherwise a new line every ten seconds.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._begin = time.monotonic()
        self._last = self._begin
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


def _catalog() -> str:
    """Return the catalog of this directory, or that of the package."""
    return CATALOG if os.path.exists(CATALOG) else str(packaged.directory() / "datasets.yaml")


def _add_catalog(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--catalog", metavar="FILE", help=f"the catalog ({CATALOG}, else the packaged one)"
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="directory of the prepared TFDS data sets (that of TFDS)"
    )


def _add_data_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="entry of the catalog, or data set of TFDS")
    parser.add_argument(
        "--split", metavar="S", help="split (the first of the entry; for TFDS: train)"
    )
    _add_catalog(parser)


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_data_set(parser)
    parser.add_argument(
        "--labels",
        type=whole(1),
        default=5000,
        metavar="N",
        help="maximum number of examples to read for the class balance (5000)",
    )
    parser.add_argument(
        "--sheet", metavar="FILE", help="file of the contact sheet (runs/data/NAME_SPLIT.png)"
    )


def _add_head(parser: argparse.ArgumentParser) -> None:
    _add_data_set(parser)
    parser.add_argument(
        "-n", type=whole(1), default=5, metavar="N", help="number of examples to print (5)"
    )
    parser.add_argument(
        "--example",
        type=whole(0),
        metavar="K",
        help="print only example number K, or why it cannot be read",
    )


def _add_write(parser: argparse.ArgumentParser) -> None:
    _add_data_set(parser)
    parser.add_argument("--to", required=True, metavar="DIR", help="directory of the new files")
    parser.add_argument(
        "--shard-size",
        type=byte_count(),
        default="100MB",
        metavar="SIZE",
        help="size of each file (100MB)",
    )
    parser.add_argument(
        "--compression",
        choices=("GZIP", "none"),
        default="none",
        help="compression of the files (none)",
    )
    parser.add_argument(
        "--workers",
        type=whole(1),
        metavar="N",
        help="number of threads, each of which writes a file (one per core)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all files again, and compare their checksums"
    )


def _command(
    name: str,
    run: Callable[[argparse.Namespace, list[str]], int],
    add_flags: Callable[[argparse.ArgumentParser], None],
) -> Command:
    summary = COMMANDS[name].summary
    description = f"{summary[0].upper()}{summary[1:]}."
    return Command(f"tfdist data {name}", description, _EXIT_CODES, run, add_flags)


list_command = _command("list", _list, _add_catalog)
show_command = _command("show", _show, _add_show)
head_command = _command("head", _head, _add_head)
write_command = _command("write", _write, _add_write)
main = Group("tfdist data", _DESCRIPTION, COMMANDS, _EXIT_CODES)
