"""Worker process of a benchmark: builds the model of a job, and measures cases on demand."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist import app
from tfdist.runtime.launch_protocol import Launched
from tfdist.tools.bench.jobs import END, Job, wait_for_order
from tfdist.tools.common import events


def main(argv: Sequence[str]) -> None:
    """Measure cases until the benchmark ends.

    Args:
        argv: Path of the job's file, as the only argument.
    """
    job = Job.from_json(Path(argv[0]).read_text(encoding="utf-8"))
    rank = int(Launched.from_environ().task.rpartition(":")[2] or 0)
    with events.Writer(job.answers(rank)) as report:
        try:
            meter = app.exit_on_configuration_error(_make, job, rank)
            report("ready", **meter.ready())
            received = 0
            while (number := wait_for_order(job, received)) != END:
                received += 1
                report(
                    "measured",
                    case=number,
                    **app.exit_on_configuration_error(meter.measure, number),
                )
        except SystemExit as end:
            report(
                "failed",
                error=str(end.__cause__ or f"ended itself with code {end.code}"),
                code=end.code,
            )
            raise
        except Exception as error:
            report(
                "failed",
                error=f"{type(error).__name__}: {_cause(str(getattr(error, 'message', error)))}",
                code=1,
            )
            raise


def _cause(message: str) -> str:
    r"""Return the line of an error message that says what happened.

    TensorFlow's description of the location in the graph is removed.

    Example:
        >>> _cause(
        ...     "Graph execution error:\n\nDetected at node X defined at (most recent call last):\n"
        ...     "<stack traces unavailable>\nOOM when allocating"
        ... )
        'OOM when allocating'
        >>> _cause("{{function_node __wrapped__X}} no space [Op:X]")
        'no space [Op:X]'
    """
    text = re.sub(r"^\{\{.*?\}\} ", "", message.rpartition("<stack traces unavailable>")[2])
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.startswith(("Graph execution error", "Detected at node"))
    ]
    return lines[0] if lines else message.strip()


def _make(job: Job, rank: int) -> Any:
    from tfdist.tools.bench import meters

    meter: Callable[[Job, int], Any] = {
        "scaling": meters.Training,
        "predict": meters.Prediction,
        "allreduce": meters.AllReduce,
    }[job.kind]
    return meter(job, rank)


if __name__ == "__main__":
    main(sys.argv[1:])
