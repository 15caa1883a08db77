"""Entry point of `tfdist plan`: compares options to distribute a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from tfdist.run.plan import step_memory
from tfdist.run.plan.options import (
    PIPELINE,
    Needs,
    Option,
    all_options,
    choose,
    largest_batches,
    rate_for,
)
from tfdist.runtime.cli_arguments import byte_count, real, require_config, whole
from tfdist.runtime.command import COMMON_EXIT_CODES, Command
from tfdist.runtime.formatting import aligned, format_bytes
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE

_DESCRIPTION = """\
Predicts the memory of each device and the bytes that it sends, for each option to distribute a run
over devices, and recommends one of them. The prediction is based on gradients of small
batches, which it computes on the CPU of this host.

  tfdist plan --config=configs/digits.py --devices 4 --memory 16GB
  tfdist plan --config=configs/digits.py --devices 4 --memory 16GB --find-batch
"""


def _plan(flags: argparse.Namespace, words: list[str]) -> int:
    from tfdist.run import train_command

    try:
        needs = step_memory.measure(train_command.parse(words), flags.devices, flags.timeout)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIGURATION_CODE
    if flags.find_batch:
        return _find_batch(flags, needs)
    options = all_options(needs, flags.devices, flags.microbatches)
    chosen, why = choose(options, flags.memory)
    if flags.json:
        facts = {
            "needs": dataclasses.asdict(needs),
            "devices": flags.devices,
            "memory": flags.memory,
            "ways": [dataclasses.asdict(option) for option in options],
        }
        print(
            json.dumps({**facts, "chosen": chosen.name if chosen else None, "why": why}, indent=1)
        )
    else:
        print("\n".join(table(needs, options, flags.memory, chosen, why)))
    return int(chosen is None)


def _find_batch(flags: argparse.Namespace, needs: Needs) -> int:
    """Print the largest global batch of each option."""
    found = [
        (option, batch, rate_for(needs, batch))
        for option, batch in largest_batches(needs, flags.devices, flags.memory, flags.microbatches)
    ]
    # A pipeline only where nothing simpler fits. The first of the largest that use all devices:
    # later options cost more.
    simpler = [each for each in found if each[0].name != PIPELINE]
    option, batch, rate = max(
        simpler if any(batch for _, batch, _ in simpler) else found,
        key=lambda each: (each[1], each[0].devices),
    )
    if flags.json:
        ways = [
            {**dataclasses.asdict(option), "global_batch": batch, "learning_rate": rate}
            for option, batch, rate in found
        ]
        facts = {"devices": flags.devices, "memory": flags.memory, "ways": ways}
        print(json.dumps({**facts, "chosen": option.name if batch else None}, indent=1))
    else:
        print("\n".join(batch_table(found, flags.memory)))
        settings = [*option.how.split(), f"data.global_batch={batch}"]
        if rate is not None:
            settings.append(f"train.learning_rate={rate:.3g}")
        flags_text = " ".join(f"--config.{each}" for each in settings)
        bound = f", all {needs.examples} examples" if batch == needs.examples else ""
        print(
            f"Take {option.name}{bound}: {flags_text}"
            if batch
            else "Nothing fits, not even one example on each device."
        )
    return int(not batch)


def batch_table(found: Sequence[tuple[Option, int, float | None]], memory: int) -> list[str]:
    """Return the lines that `tfdist plan --find-batch` prints before its advice.

    Args:
        found: Options with their largest global batch, 0 if none fits, and the learning rate for
            it, None if it stays as it is.
        memory: Memory of each device in bytes.

    Returns:
        Lines of text.
    """
    rows = [("option", "devices", "global batch", "peak", "learning rate", "how")]
    for option, batch, rate in found:
        rows.append(
            (
                option.name,
                str(option.devices),
                str(batch or "none fits"),
                format_bytes(option.peak),
                "-" if not batch else "as it is" if rate is None else f"{rate:.3g}",
                option.how,
            )
        )
    head = f"The largest global batch that fits {format_bytes(memory)} on each device:"
    return [head, "", *aligned(rows, left=(0, 5)), ""]


def table(
    needs: Needs, options: Sequence[Option], memory: int | None, chosen: Option | None, why: str
) -> list[str]:
    """Return the lines that `tfdist plan` prints.

    Args:
        needs: Needs of a training step on one device.
        options: Options that `all_options` returned.
        memory: Memory of each device in bytes; None if it is unknown.
        chosen: Option that `choose` returned; None if none fits.
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
    memory_text = f" of {format_bytes(memory)}" if memory else ""
    rows = [("option", "devices", "resident", f"peak{memory_text}", "sent a step", "", "how")]
    for option in options:
        if option.refused:
            rows.append(
                (option.name, str(option.devices), "-", "-", "-", "not possible", option.refused)
            )
            continue
        verdict = "" if memory is None else "fits" if option.peak <= memory else "too large"
        note = "; ".join(text for text in (option.why, verdict) if text)
        sent = "not known" if option.sent is None else format_bytes(option.sent)
        rows.append(
            (
                option.name,
                str(option.devices),
                format_bytes(option.resident),
                format_bytes(option.peak),
                sent,
                note,
                option.how,
            )
        )
    lines += [
        *aligned(rows, left=(0, 5, 6)),
        "",
        f"Take {chosen.name}: {why}." if chosen else f"Nothing fits: {why}.",
    ]
    return lines


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        type=whole(1),
        default=2,
        metavar="N",
        help="number of devices that train together (2)",
    )
    parser.add_argument(
        "--memory",
        type=byte_count(unit_required=True),
        metavar="AMOUNT",
        help="memory of each device, such as 16GB; the table then marks the options that fit",
    )
    parser.add_argument(
        "--find-batch",
        action="store_true",
        help="find the largest global batch of each option in that memory, and its learning rate",
    )
    parser.add_argument(
        "--microbatches",
        type=whole(1),
        default=8,
        metavar="M",
        help="number of micro-batches of pipeline parallelism (8)",
    )
    parser.add_argument(
        "--timeout",
        type=real("seconds above 0", lambda seconds: seconds > 0),
        default=300.0,
        metavar="S",
        help="seconds that the measurement may take (300)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )


def _check(flags: argparse.Namespace, words: list[str]) -> None:
    require_config(words)
    if flags.find_batch and flags.memory is None:
        raise ValueError("--find-batch: expected --memory AMOUNT too, such as 16GB; received none")


main = Command(
    name="tfdist plan",
    usage="tfdist plan --config=FILE [--config.SECTION.KEY=VALUE ...] [FLAGS]",
    description=_DESCRIPTION,
    exit_codes={
        **COMMON_EXIT_CODES,
        0: "the plan was printed",
        1: "no option fits the memory",
        CONFIGURATION_CODE: "the config is wrong, or the model could not be measured",
    },
    run=_plan,
    add_flags=_add_flags,
    check=_check,
    takes_config=True,
)
