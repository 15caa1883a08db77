"""Text and Markdown rendering of benchmark reports, for terminals of 100 columns."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence

from tfdist.runtime.formatting import aligned, counted, format_bytes, percent
from tfdist.telemetry.step_records import PARTS
from tfdist.tools.bench.reason import mean_parts
from tfdist.tools.bench.results import MODES, Bench, Setup

WIDTH = 100
_HEADS = {
    "input": "input",
    "forward_backward": "fwd+bwd",
    "gradient_sync": "sync",
    "update": "update",
    "wait": "wait",
    "host": "host",
}
Rows = list[Sequence[str]]


def text(bench: Bench) -> str:
    """Render a benchmark for the terminal."""
    lines = [title(bench), ""]
    for heading, rows, sentences in _sections(bench):
        lines += [heading, *(f"  {line}" for line in aligned(rows)), ""]
        if sentences:
            lines += [*_sentences(sentences), ""]
    lines += _paragraphs(bench.notes)
    for name, error in failures(bench.setups):
        first, *rest = error.splitlines()
        lines += [
            *textwrap.wrap(
                f"FAILED: {name}: {first}", WIDTH, subsequent_indent="  ", break_on_hyphens=False
            ),
            *rest,
        ]
    return "\n".join(lines).rstrip()


def markdown(bench: Bench) -> str:
    """Render a benchmark as a Markdown page."""
    lines = [
        f"# {_capital(title(bench))}",
        "",
        *(f"- {key}: {value}" for key, value in about(bench).items()),
        "",
    ]
    for heading, rows, sentences in _sections(bench):
        head, *body = rows
        lines += [
            f"## {_capital(heading)}",
            "",
            f"| {' | '.join(head)} |",
            f"|---|{'--:|' * (len(head) - 1)}",
        ]
        lines += [*(f"| {' | '.join(row)} |" for row in body), ""]
        lines += [f"- {name}: {sentence}" for name, sentence in sentences]
        lines += [""] if sentences else []
    lines += [line for note in bench.notes for line in (note, "")]
    lines += [
        f"- **failed**: {name}: {error.splitlines()[0]}" for name, error in failures(bench.setups)
    ]
    return "\n".join(lines).rstrip() + "\n"


def failures(setups: Sequence[Setup]) -> list[tuple[str, str]]:
    """Return the name and error of each process group that failed.

    Setups of the same group have the same error, and it is listed only once.

    Example:
        >>> failed = Setup("mirrored", 2, 1, error="no memory")
        >>> failures([failed, failed])
        [('mirrored with 2 replicas', 'no memory')]
    """
    return list(dict.fromkeys((setup.title, setup.error) for setup in setups if setup.error))


def title(bench: Bench) -> str:
    """Return one line that says what was measured."""
    what = {
        "scaling": "scaling of {}",
        "predict": "inference of {}",
        "allreduce": "all-reduce of float32 numbers",
    }[bench.kind]
    model = (bench.config or {}).get("model", {}).get("name")
    parameters = bench.options.get("parameters")
    described = f" ({model}, {parameters:,} parameters)" if model and parameters else ""
    rounds = f"medians of {counted(bench.options['rounds'], 'round')}"
    return f"{what.format(bench.name)}{described} on {machine(bench.machine)}: {rounds}"


def about(bench: Bench) -> dict[str, str]:
    """Return the conditions of the measurement, which a reader needs to judge the numbers."""
    options = bench.options
    return {
        "Command": f"`{bench.command}`",
        "Date": time.strftime("%Y-%m-%d", time.gmtime(bench.time)),
        "Versions": ", ".join(f"{name} {version}" for name, version in bench.versions.items()),
        "Machine": (
            f"{bench.machine['system']}, {machine(bench.machine)}, "
            f"{format_bytes(bench.machine['memory'])} of memory, "
            f"load {bench.machine['load']:.1f} at the beginning"
        ),
        "Rounds": (
            f"{options['rounds']}, each over all setups, every second one in reverse order; "
            f"{options['steps']} steps count in each, after {options['warmup']} that do not"
        ),
        "Threads": (
            "TensorFlow's and the launcher's choice: all cores for one process, shared evenly by "
            "several"
            if options.get("threads") is None
            else f"{options['threads']} for each replica"
        ),
    }


def machine(facts: dict) -> str:
    """Describe the hardware in a few words.

    Example:
        >>> gpus = ["NVIDIA A100", "NVIDIA A100"]
        >>> machine({"cores": 2, "gpus": []}), machine({"cores": 8, "gpus": gpus})
        ('2 cores', '2 x NVIDIA A100')
    """
    gpus = facts["gpus"]
    if not gpus:
        return counted(facts["cores"], "core")
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Format the minimum and the maximum of some values.

    Example:
        >>> spread([3.0, 1.0, 2.0])
        '1..3'
    """
    return f"{min(values):{form}}..{max(values):{form}}"


def _sections(bench: Bench) -> Iterable[tuple[str, Rows, list[tuple[str, str]]]]:
    """Yield the heading, the rows, and the named sentences of each table."""
    done = [setup for setup in bench.setups if setup.seconds]
    if not done:
        return
    if bench.kind == "predict":
        yield (
            "examples per second of model.predict, by batch (rows of all devices together)",
            _predict_rows(done),
            [],
        )
        return
    if bench.kind == "allreduce":
        yield "sums, one after another", _allreduce_rows(done), []
        return
    for mode in MODES:
        setups = [setup for setup in done if mode in setup.modes]
        if setups:
            sentences = [
                (_name(setup), setup.reason)
                for setup in setups
                if setup.reason and setup.modes[0] == mode
            ]  # a setup with both modes has its sentence only under the first
            yield _mode(mode, setups), _scaling_rows(setups), sentences
    measured = [setup for setup in done if setup.step_breakdown]
    if measured:
        yield "step breakdown, ms a step, mean of the workers", _step_breakdown_rows(measured), []


def _mode(mode: str, setups: Sequence[Setup]) -> str:
    if mode == "strong":
        return (
            f"strong scaling: global batch {setups[0].global_batch}, whatever the number of "
            "replicas"
        )
    return (
        f"weak scaling: a batch of {setups[0].global_batch // setups[0].replicas} for each replica"
    )


def _scaling_rows(setups: Sequence[Setup]) -> Rows:
    rows: Rows = [
        ("strategy", "replicas", "examples/s", "min..max", "ms/step", "speed-up", "efficiency")
    ]
    for setup in setups:
        gain = (
            ("-", "-")
            if setup.speedup is None or setup.efficiency is None
            else (f"{setup.speedup:.2f}", percent(setup.efficiency))
        )
        rows.append(
            (
                setup.strategy,
                str(setup.replicas),
                f"{setup.rate:,.0f}",
                spread(setup.rates),
                f"{1e3 * setup.step:.2f}",
                *gain,
            )
        )
    return rows


def _step_breakdown_rows(setups: Sequence[Setup]) -> Rows:
    rows: Rows = [("strategy", "replicas", "batch", *_HEADS.values(), "whole")]
    for setup in setups:
        parts = mean_parts(setup)
        cells = [f"{1e3 * parts[part]:.2f}" for part in PARTS]
        rows.append(
            (
                setup.strategy,
                str(setup.replicas),
                str(setup.global_batch),
                *cells,
                f"{1e3 * sum(parts.values()):.2f}",
            )
        )
    return rows


def _predict_rows(setups: Sequence[Setup]) -> Rows:
    rows: Rows = [
        ("strategy", "devices", "batch", "examples/s", "min..max", "ms/batch", "speed-up")
    ]
    for setup in sorted(setups, key=lambda setup: setup.global_batch):
        gain = "-" if setup.speedup is None else f"{setup.speedup:.2f}"
        cells = f"{setup.rate:,.0f}", spread(setup.rates), f"{1e3 * setup.step:.2f}", gain
        rows.append((setup.strategy, str(setup.replicas), str(setup.global_batch), *cells))
    return rows


def _allreduce_rows(setups: Sequence[Setup]) -> Rows:
    rows: Rows = [
        ("strategy", "replicas", "bytes", "median, ms", "min..max", "algorithm GB/s", "bus GB/s")
    ]
    for setup in setups:
        bandwidths = (
            f"{value / 1e9:.3f}" for value in (setup.algorithm_bandwidth, setup.bus_bandwidth)
        )
        times = [1e3 * seconds for seconds in setup.seconds]
        rows.append(
            (
                setup.strategy,
                str(setup.replicas),
                format_bytes(setup.bytes, binary=True),
                f"{1e3 * setup.step:.2f}",
                spread(times, ".2f"),
                *bandwidths,
            )
        )
    return rows


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _name(setup: Setup) -> str:
    return f"{setup.strategy} x {setup.replicas}"


def _sentences(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Format each name with its sentence, wrapped and aligned."""
    width = max(len(name) for name, _ in pairs)
    lines = []
    for name, sentence in pairs:
        lines += textwrap.wrap(
            sentence,
            WIDTH,
            initial_indent=f"  {name:{width}}  ",
            subsequent_indent=" " * (width + 4),
            break_on_hyphens=False,
        )
    return lines


def _paragraphs(sentences: Sequence[str]) -> list[str]:
    lines = [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, WIDTH, break_on_hyphens=False)
    ]
    return [*lines, ""] if lines else []
