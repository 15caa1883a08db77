"""Entry point of an audit's worker process.

The process reads commands from its standard input, one per line, and ends when its standard input
ends. The pipe closes when the audit ends, even by `kill -9`, so no worker outlives the audit.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfdist import app
from tfdist.tools.audit import events
from tfdist.tools.audit.settings import Settings


def main(argv: Sequence[str]) -> None:
    """Create the data pipeline, and run commands until the audit ends.

    Args:
        argv: The settings as JSON, and the rank of this process.
    """
    settings = Settings.of_json(argv[0])
    rank = int(argv[1])
    words = _listen()  # before TensorFlow, whose import takes seconds
    with events.Writer(settings.file(rank, "events")) as say:
        try:
            # A user's mistake is reported as one sentence. A later failure keeps its traceback,
            # in this worker's log.
            worker = app.plainly(_make, settings, rank, say)
            while True:
                getattr(worker, words.get())()
        except SystemExit as end:
            say("failed", error=str(end.__cause__), code=end.code)
            raise
        except Exception as error:
            text = re.sub(
                r"^\{\{.*?\}\} ", "", getattr(error, "message", str(error))
            )  # drops the name of the graph node
            say(
                "failed",
                error=f"{type(error).__name__}: {text.strip().partition(os.linesep)[0]}",
                code=1,
            )
            if not hasattr(error, "error_code"):
                raise
            sys.exit(text)  # an error of TensorFlow: the Python traceback adds nothing


def _make(settings: Settings, rank: int, say: Callable[..., None]) -> Any:
    from tfdist.tools.audit.worker import Worker

    return Worker(settings, rank, say)


def _listen() -> queue.Queue[str]:
    """Return a queue of the commands that arrive on standard input.

    At the end of standard input, the process kills itself, whatever it is doing.
    """
    words: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            words.put(line.strip())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    return words


if __name__ == "__main__":
    main(sys.argv[1:])
