"""Command-line flags of `tfdist bench`: definition, validation, and the jobs they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.config import nearest
from tfdist.runtime.cli_arguments import real, require_config, whole
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

USAGE = """\
tfdist bench --config=FILE [--config.SECTION.KEY=VALUE ...] [FLAGS]
       tfdist bench --config=FILE --predict [FLAGS]
       tfdist bench allreduce [FLAGS]"""
DESCRIPTION = """\
Measures how much faster a run trains with more replicas, and what the rest of the time is spent on.

  tfdist bench --config=configs/digits.py --workers 1,2,4 --strategies mirrored
  tfdist bench --config=configs/digits.py --predict --batches 16,64,256 --workers 1,2
  tfdist bench allreduce --workers 2 --bytes 4k,1M,16M

Strong scaling keeps the global batch of the config. Weak scaling keeps the batch of a replica,
which is the global batch of the config. All setups are measured in turns, so that a machine that
slows down slows all of them.
"""


def check(flags: argparse.Namespace, words: Sequence[str]) -> None:
    """Check the combination of the flags, and set defaults that depend on several of them.

    Args:
        flags: Flags of the command. `kind` becomes one of `results.KINDS`.
        words: Config arguments.

    Raises:
        ValueError: If flags contradict each other. The message names the flag, the expected and the
            received value.
    """
    _check_kind(flags, words)
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


def make_jobs(
    flags: argparse.Namespace, words: Sequence[str], settings: config.Run | None
) -> list[Job]:
    """Return the jobs of a benchmark, the baseline first.

    Args:
        flags: Flags that `check` completed.
        words: Config arguments.
        settings: Parsed config; None in an all-reduce.

    Returns:
        A job for each strategy and number of replicas. The caller sets their directories.

    Raises:
        ValueError: If the numbers of replicas, batches and workers do not fit together.
    """
    if settings and settings.data.service:
        raise ValueError(
            "--config.data.service: expected false, because a benchmark starts no data workers; "
            "received true"
        )
    strategies = list(flags.strategies)
    steps = flags.steps
    if flags.kind == "scaling":
        if BASELINE not in strategies and 1 not in flags.workers:
            strategies.insert(0, BASELINE)  # every benchmark needs a baseline
        per_call = settings.train.steps_per_execution if settings else 1
        steps = -(-steps // per_call) * per_call
    planned = []
    for strategy in sorted(strategies, key=lambda name: name != BASELINE):
        for replicas in [1] if strategy == BASELINE else flags.workers:
            cases = _cases(flags, replicas, settings)
            planned.append(
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
    return planned


def _cases(
    flags: argparse.Namespace, replicas: int, settings: config.Run | None
) -> tuple[Case, ...]:
    if flags.kind == "allreduce":
        if replicas == 1:
            raise ValueError(
                "--workers: expected at least 2 in an all-reduce, received 1; one replica has "
                "nothing to reduce"
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
    batch = settings.data.global_batch_size
    if replicas == 1:
        return (Case(batch, modes=flags.modes),)
    if "strong" in flags.modes and batch % replicas:
        problem = "at most" if replicas > batch else "divisors of"
        raise ValueError(
            f"--workers: expected {problem} data.global_batch={batch}, which strong scaling "
            f"keeps; received {replicas}. Choose other numbers, set --config.data.global_batch=N, "
            "or pass --weak alone."
        )
    sizes = {"strong": batch, "weak": batch * replicas}
    return tuple(Case(sizes[mode], modes=(mode,)) for mode in flags.modes)


def _check_kind(flags: argparse.Namespace, words: Sequence[str]) -> None:
    """Set the kind of the benchmark; raise ValueError if it contradicts other flags."""
    if flags.kind == "allreduce":
        for word in [*words, *(["--predict"] if flags.predict else [])]:
            raise ValueError(f"{word}: an all-reduce has no model; leave it out")
        return
    if flags.kind is not None:
        raise ValueError(f"expected flags, or `allreduce` before them; received {flags.kind!r}")
    flags.kind = "predict" if flags.predict else "scaling"
    require_config(words)


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
            f"expected synchronous strategies ({', '.join(STRATEGIES)}), received "
            "parameter_server, whose workers train asynchronously: there is no common step whose "
            "time could be compared"
        )
    if name not in STRATEGIES:
        raise argparse.ArgumentTypeError(f"received {name!r}. {nearest(name, STRATEGIES)}")
    return name


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command to a parser, except those of the config."""
    add = parser.add_argument
    add(
        "kind",
        nargs="?",
        metavar="allreduce",
        help="measure all-reduces instead of a run",
    )
    positive = whole(1)
    seconds = real("seconds above 0", lambda value: 0 < value < float("inf"))
    add(
        "--workers",
        type=_listed(positive),
        metavar="N,...",
        help="numbers of replicas: processes of multi_worker_mirrored, devices of the other "
        "strategies (1,2)",
    )
    add(
        "--strategies",
        type=_listed(_strategy),
        metavar="NAME,...",
        help=f"strategies to measure, some of {', '.join(STRATEGIES)} (all but central_storage; "
        "for allreduce without one_device; with --predict only mirrored)",
    )
    add(
        "--steps",
        type=positive,
        metavar="N",
        help="number of steps to measure in each round (50; with --predict: 20 batches of the "
        "largest size)",
    )
    add(
        "--warmup",
        type=whole(0),
        metavar="N",
        help="number of steps to run before the measurement; training rounds it up to a multiple "
        "of --steps (as many as --steps)",
    )
    add(
        "--rounds",
        type=positive,
        default=5,
        metavar="N",
        help="number of times that each setup is measured (5)",
    )
    add(
        "--strong",
        action="store_true",
        help="measure only strong scaling, which keeps the global batch (both)",
    )
    add(
        "--weak",
        action="store_true",
        help="measure only weak scaling, which keeps the batch of a replica (both)",
    )
    add("--predict", action="store_true", help="measure model.predict instead of training")
    add(
        "--batches",
        type=_listed(positive),
        metavar="N,...",
        help="examples in a batch of all devices together, with --predict (16,64,256)",
    )
    add(
        "--bytes",
        type=_listed(parse_bytes),
        metavar="N,...",
        help="bytes that each replica contributes to an all-reduce (4k,256k,1M,4M,16M)",
    )
    add(
        "--communication",
        choices=("auto", "ring", "nccl", "native"),
        help="implementation of an all-reduce between workers (auto)",
    )
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of each replica (the processes of a setup share the cores evenly)",
    )
    add(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds that a setup may take to start or to measure (300)",
    )
    add(
        "--out", metavar="DIR", help="directory for bench.json and bench.md (a new runs/bench-NAME)"
    )
    add("--json", action="store_true", help="print the content of bench.json instead of tables")
