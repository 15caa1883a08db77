"""Entry point of an audit's worker process.

The process reads commands from its standard input, one per line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfdist import app
from tfdist.tools.audit.settings import Settings
from tfdist.tools.common import events


def main(argv: Sequence[str]) -> None:
    """Create the data pipeline, and run commands until there are no more.

    Args:
        argv: The settings as JSON, and the rank of this process.
    """
    settings = Settings.of_json(argv[0])
    rank = int(argv[1])
    with events.Writer(settings.file(rank, "events")) as report:
        try:
            # A user's mistake is reported as one sentence. A later failure keeps its traceback,
            # in this worker's log.
            worker = app.exit_on_configuration_error(_make, settings, rank, report)
            for line in sys.stdin:
                getattr(worker, line.strip())()
        except SystemExit as end:
            report("failed", error=str(end.__cause__), code=end.code)
            raise
        except Exception as error:
            text = re.sub(
                r"^\{\{.*?\}\} ", "", getattr(error, "message", str(error))
            )  # drops the name of the graph node
            report(
                "failed",
                error=f"{type(error).__name__}: {text.strip().partition(os.linesep)[0]}",
                code=1,
            )
            if not hasattr(error, "error_code"):
                raise
            sys.exit(text)  # an error of TensorFlow: the Python traceback adds nothing


def _make(settings: Settings, rank: int, report: Callable[..., None]) -> Any:
    from tfdist.tools.audit.worker import Worker

    return Worker(settings, rank, report)


if __name__ == "__main__":
    main(sys.argv[1:])
