"""Command line of `tfdist bench`, and the jobs that it asks for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.config import nearest
from tfdist.runtime.cli_arguments import Parser, about_config, flag_of, no_such_flag, real, whole
from tfdist.runtime.formatting import parse_bytes
from tfdist.tools.bench.jobs import Case, Job
from tfdist.tools.bench.results import BASELINE, MODES

if TYPE_CHECKING:
    from tfdist import config

STRATEGIES = ("one_device", "mirrored", "central_storage", "multi_worker_mirrored")
STEPS = {"scaling": 50, "predict": 20, "allreduce": 50}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "scaling": {
        "workers": [1, 2],
        "strategies": ["one_device", "mirrored", "multi_worker_mirrored"],
    },
    "predict": {"workers": [1, 2], "strategies": ["mirrored"], "batches": [16, 64, 256]},
    "allreduce": {
        "workers": [2],
        "strategies": ["mirrored", "multi_worker_mirrored"],
        "bytes": [parse_bytes(text) for text in ("4k", "256k", "1M", "4M", "16M")],
    },
}
_ONLY = {
    "strong": "scaling",
    "weak": "scaling",
    "batches": "predict",
    "bytes": "allreduce",
    "communication": "allreduce",
}

_DESCRIPTION = """\
How much faster a run's training is with more replicas, and what the rest of the time goes into.

  tfdist bench --config=configs/digits.py --workers 1,2,4 --strategies \
one_device,mirrored,multi_worker_mirrored
  tfdist bench --config=configs/digits.py --predict --batches 16,64,256 --workers 1,2
  tfdist bench allreduce --workers 2 --bytes 4k,1M,16M

Strong scaling keeps the config's global batch; weak scaling keeps the batch of a replica, which \
is the config's global batch.
Setups are measured by turns, so that a machine that slows down slows all of them.
"""
_EPILOG = """\
exit code: 0 when all setups were measured; 1 when one failed, which is named, while the others \
are reported; 2 for a mistake
on this command line; 78 for a mistake in the config, or in what the first setup, which is the \
baseline, makes of it.
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Args:
        argv: Command-line arguments after `tfdist bench`.

    Returns:
        The flags, with `kind` from `results.KINDS` and all defaults filled in, and the config
        flags.

    Raises:
        ValueError: A flag is unknown or wrong. The message names the flag, what was expected and
            what was received.

    Example:
        >>> flags, words = parse(
        ...     ["--config=a.py", "--workers", "1,4", "--weak", "--config.data.cache=true"]
        ... )
        >>> flags.kind, flags.workers, flags.modes, words
        ('scaling', [1, 4], ('weak',), ['--config=a.py', '--config.data.cache=true'])
        >>> parse(["allreduce", "--bytes", "4k,1M"])[0].bytes
        [4096, 1048576]
    """
    words = list(argv)
    reduces = words[:1] == ["allreduce"]
    flags, rest = parser().parse_known_args(words[1:] if reduces else words)
    flags.kind = "allreduce" if reduces else "predict" if flags.predict else "scaling"
    _check_words(flags, rest)
    for name, kind in _ONLY.items():
        if getattr(flags, name) and kind != flags.kind:
            raise ValueError(
                f"--{name}: expected with {_called(kind)}, received with {_called(flags.kind)}"
            )
    for name, default in {
        **_DEFAULTS[flags.kind],
        "steps": STEPS[flags.kind],
        "communication": "auto",
    }.items():
        if getattr(flags, name) is None:
            setattr(flags, name, default)
    flags.warmup = flags.steps if flags.warmup is None else flags.warmup
    flags.modes = tuple(
        mode for mode in MODES if getattr(flags, mode) or not (flags.strong or flags.weak)
    )
    return flags, rest


def jobs(flags: argparse.Namespace, words: Sequence[str], settings: config.Run | None) -> list[Job]:
    """Return the jobs of a benchmark, the baseline first.

    Args:
        flags: Flags from `parse`.
        words: Config flags.
        settings: Parsed config; None in an all-reduce.

    Returns:
        A job for each strategy and number of replicas. The caller sets their directories.

    Raises:
        ValueError: The numbers of replicas, batches and workers do not fit together.
    """
    if settings and settings.data.service:
        raise ValueError(
            "--config.data.service: expected false, as a benchmark starts no data workers, "
            "received true"
        )
    strategies = list(flags.strategies)
    steps = flags.steps
    if flags.kind == "scaling":
        if BASELINE not in strategies and 1 not in flags.workers:
            strategies.insert(0, BASELINE)  # every benchmark needs a baseline
        per_call = settings.train.steps_per_execution if settings else 1
        steps = -(-steps // per_call) * per_call
    found = []
    for strategy in sorted(strategies, key=lambda name: name != BASELINE):
        for replicas in [1] if strategy == BASELINE else flags.workers:
            cases = _cases(flags, replicas, settings)
            found.append(
                Job(
                    flags.kind,
                    "",
                    strategy,
                    replicas,
                    cases,
                    tuple(words),
                    steps,
                    flags.warmup,
                    flags.threads,
                    flags.communication,
                    flags.timeout,
                )
            )
    return found


def _cases(
    flags: argparse.Namespace, replicas: int, settings: config.Run | None
) -> tuple[Case, ...]:
    if flags.kind == "allreduce":
        if replicas == 1:
            raise ValueError(
                "--workers: expected at least 2 in an all-reduce, received 1, which has nothing "
                "to sum"
            )
        return tuple(Case(bytes=count) for count in flags.bytes)
    if flags.kind == "predict":
        if min(flags.batches) < replicas:
            raise ValueError(
                f"--batches: expected at least a row for each of {replicas} devices, received "
                f"{min(flags.batches)}"
            )
        return tuple(Case(rows) for rows in flags.batches)
    assert settings is not None
    batch = settings.data.global_batch
    if replicas == 1:
        return (Case(batch, modes=flags.modes),)
    if "strong" in flags.modes and batch % replicas:
        problem = "at most" if replicas > batch else "divisors of"
        raise ValueError(
            f"--workers: expected {problem} data.global_batch={batch}, which strong scaling "
            f"keeps, received {replicas}. Take other numbers, --config.data.global_batch=N, or "
            "--weak alone."
        )
    sizes = {"strong": batch, "weak": batch * replicas}
    return tuple(Case(sizes[mode], modes=(mode,)) for mode in flags.modes)


def _check_words(flags: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise ValueError if an unknown argument is not a config flag."""
    for word in rest:
        if about_config(word):
            continue
        if not word.startswith("-"):
            if rest[max(0, rest.index(word) - 1)] in ("--config", "-config"):
                continue
            raise ValueError(f"expected flags, or `allreduce` before them; received {word!r}")
        raise ValueError(
            no_such_flag(
                word,
                [
                    "--config",
                    *(flag_of(name) for name in vars(flags) if name not in ("kind", "modes")),
                ],
            )
        )
    if flags.kind == "allreduce" and (rest or flags.predict):
        raise ValueError(
            f"{rest[0] if rest else '--predict'}: an all-reduce has no model; leave it out"
        )
    if flags.kind != "allreduce" and not rest:
        raise ValueError(
            "--config: expected the run to measure, such as --config=configs/digits.py; received "
            "none"
        )


def _called(kind: str) -> str:
    return {
        "scaling": "scaling (no --predict, no allreduce)",
        "predict": "--predict",
        "allreduce": "`tfdist bench allreduce`",
    }[kind]


def _listed(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a converter for distinct, comma-separated values, for `type=` of a flag."""

    def read(text: str) -> list[Any]:
        try:
            values = [convert(part.strip()) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected different values, received {text!r}")
        return values

    return read


def _strategy(name: str) -> str:
    if name == "parameter_server":
        raise argparse.ArgumentTypeError(
            "expected strategies whose replicas take each step together "
            f"({', '.join(STRATEGIES)}), received parameter_server, whose workers do not: it has "
            "no step whose time could be compared"
        )
    if name not in STRATEGIES:
        raise argparse.ArgumentTypeError(f"received {name!r}. {nearest(name, STRATEGIES)}")
    return name


def parser() -> argparse.ArgumentParser:
    """Return the parser of all flags except those of the config."""
    made = Parser(
        prog="tfdist bench",
        usage="tfdist bench --config=FILE.py [--config.SECTION.KEY=VALUE ...] [FLAGS]\n"
        "       tfdist bench --config=FILE.py --predict [FLAGS]\n"
        "       tfdist bench allreduce [FLAGS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    positive, seconds = whole(1), real("seconds above 0", lambda value: 0 < value < float("inf"))
    add(
        "--workers",
        type=_listed(positive),
        metavar="N,...",
        help="replicas: processes of multi_worker_mirrored, devices of the others (1,2)",
    )
    add(
        "--strategies",
        type=_listed(_strategy),
        metavar="NAME,...",
        help=f"of {', '.join(STRATEGIES)}",
    )
    add(
        "--steps",
        type=positive,
        metavar="N",
        help="that count in each round (50; 20 batches of the largest size with --predict)",
    )
    add(
        "--warmup",
        type=whole(0),
        metavar="N",
        help="steps before them, in training rounded up to multiples of --steps (as many)",
    )
    add(
        "--rounds",
        type=positive,
        default=5,
        metavar="N",
        help="how often each setup is measured (5)",
    )
    add("--strong", action="store_true", help="strong scaling alone: the global batch stays (both)")
    add(
        "--weak",
        action="store_true",
        help="weak scaling alone: the batch of a replica stays (both)",
    )
    add("--predict", action="store_true", help="measure model.predict instead of training")
    add(
        "--batches",
        type=_listed(positive),
        metavar="N,...",
        help="with --predict: rows of a batch, of all devices together (16,64,256)",
    )
    add(
        "--bytes",
        type=_listed(parse_bytes),
        metavar="N,...",
        help="of an all-reduce: given by each replica (4k,256k,1M,4M,16M)",
    )
    add(
        "--communication",
        choices=("auto", "ring", "nccl"),
        help="of an all-reduce of workers (auto)",
    )
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="of each replica (cores shared evenly by the processes of a setup)",
    )
    add(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="longest wait for a setup to start or measure, in seconds (300)",
    )
    add("--out", metavar="DIR", help="where bench.json and bench.md go (a new runs/bench-NAME)")
    add("--json", action="store_true", help="print what bench.json holds instead of tables")
    return made
