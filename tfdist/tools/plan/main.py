"""Command-line interface of `tfdist plan`, which compares ways to distribute a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence

from tfdist.runtime.cli_arguments import Parser, flags_beside_config, real, refuse, whole
from tfdist.runtime.formatting import aligned, format_bytes, parse_bytes
from tfdist.runtime.termination import ending
from tfdist.tools.common import subprocesses
from tfdist.tools.plan.options import Needs, Stage, Way, choose, ways


def main(argv: Sequence[str]) -> int:
    """Run the command `tfdist plan`.

    Args:
        argv: Arguments after `tfdist plan`.

    Returns:
        Exit code: 0 on success; 1 if no way fits the memory; 2 for a mistake on the command line;
        78 for a config that cannot be built; 130 after Ctrl-C.
    """
    try:
        flags, words = parse(argv)
    except ValueError as error:
        return refuse("tfdist plan", error)
    try:
        with ending():
            question = {
                "words": words,
                "devices": flags.devices,
                "microbatches": flags.microbatches,
            }
            # TensorFlow's other CPU allocator does not count tensors below 256 KB.
            said, end = subprocesses.ask(
                "tfdist.tools.plan.probe", question, flags.timeout, TF_CPU_ALLOCATOR_USE_BFC="true"
            )
    except KeyboardInterrupt:
        print("plan interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    if "error" in said or not said:
        what = (
            "the model could not be measured: the process that builds it "
            f"{end or 'said nothing'}; --timeout gives it {flags.timeout:g} s"
        )
        print(f"error: {said.get('error') or what}", file=sys.stderr)
        return 78
    needs = Needs(**{**said, "stages": [Stage(**stage) for stage in said["stages"]]})
    found = ways(needs, flags.devices, flags.microbatches)
    chosen, why = choose(found, flags.memory)
    if flags.json:
        facts = {
            "needs": said,
            "devices": flags.devices,
            "memory": flags.memory,
            "ways": [dataclasses.asdict(way) for way in found],
        }
        print(
            json.dumps({**facts, "chosen": chosen.name if chosen else None, "why": why}, indent=1)
        )
    else:
        print("\n".join(table(needs, found, flags.memory, chosen, why)))
    return int(chosen is None)


def table(
    needs: Needs, found: Sequence[Way], memory: int | None, chosen: Way | None, why: str
) -> list[str]:
    """Return the lines that `tfdist plan` prints.

    Args:
        needs: Needs of a training step on one device.
        found: Ways that `ways` returned.
        memory: Memory of each device in bytes; None if it is unknown.
        chosen: Way that `choose` returned; None if no way fits.
        why: Reason that `choose` returned.

    Returns:
        Lines of text.
    """
    state = (
        f"weights {format_bytes(needs.trainable + needs.frozen)}, "
        f"gradients {format_bytes(needs.trainable)}, "
        f"optimizer {format_bytes(needs.slots + needs.scalars)}"
    )
    lines = [
        f"One device, {needs.rows} examples a step: {state}, "
        f"activations {format_bytes(needs.fixed + needs.per_row * needs.rows)}",
        "",
    ]
    room = f" of {format_bytes(memory)}" if memory else ""
    rows = [("way", "devices", "resident", f"peak{room}", "sent a step", "", "how")]
    for way in found:
        if way.refused:
            rows.append((way.name, str(way.devices), "-", "-", "-", "not possible", way.refused))
            continue
        fits = "" if memory is None else "fits" if way.peak <= memory else "too large"
        note = "; ".join(text for text in (way.why, fits) if text)
        sent = "not known" if way.sent is None else format_bytes(way.sent)
        rows.append(
            (
                way.name,
                str(way.devices),
                format_bytes(way.resident),
                format_bytes(way.peak),
                sent,
                note,
                way.how,
            )
        )
    lines += [
        *aligned(rows, left=(0, 5, 6)),
        "",
        f"Take {chosen.name}: {why}." if chosen else f"No way to take: {why}.",
    ]
    return lines


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Args:
        argv: Arguments after `tfdist plan`.

    Returns:
        The flags, and the arguments about the config.

    Raises:
        ValueError: A flag is wrong. The message names the flag, and what was expected and received.

    Example:
        >>> flags, words = parse(["--config=a.py", "--devices", "4", "--memory", "16GB"])
        >>> flags.devices, flags.memory, words
        (4, 16000000000, ['--config=a.py'])
    """
    return flags_beside_config(_parser(), argv)


def memory(text: str) -> int:
    """Convert the text of a flag to a number of bytes, as `type=` of the flag.

    Args:
        text: Amount with a unit, decimal or binary.

    Returns:
        Number of bytes.

    Raises:
        argparse.ArgumentTypeError: The text is not an amount with a unit.

    Example:
        >>> memory("16GB"), memory("1.5 GiB")
        (16000000000, 1610612736)
    """
    try:
        return parse_bytes(text, unit_required=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tfdist plan",
        usage="tfdist plan --config=FILE.py [--config.SECTION.KEY=VALUE ...] "
        "[--devices N] [--memory AMOUNT]",
        description="Predicts, for each way to spread a run over devices, "
        "the memory of each device and the bytes that it sends, from gradients of small "
        "batches on this machine's CPU; and recommends one.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        type=whole(1),
        default=2,
        metavar="N",
        help="devices that train together, default 2",
    )
    parser.add_argument(
        "--memory",
        type=memory,
        metavar="AMOUNT",
        help="of each device, such as 16GB; marks what fits",
    )
    parser.add_argument(
        "--microbatches", type=whole(1), default=8, metavar="M", help="of the pipeline, default 8"
    )
    parser.add_argument(
        "--timeout",
        type=real("seconds above 0", lambda seconds: seconds > 0),
        default=300.0,
        help="seconds that measuring may take, default 300",
    )
    parser.add_argument("--json", action="store_true", help="print the figures for programs")
    return parser
