"""A process of an audit becomes a Worker that does what it is told, word by word; it never outlives the audit.

The words come on its standard input, whose end is also its own: that of a pipe, when the audit ends, if by `kill -9`.
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
    """Makes a pipeline, and then does what it is told until the audit ends.

    Args:
        argv: The settings as JSON, and the number of this process.
    """
    settings, rank = Settings.of_json(argv[0]), int(argv[1])
    words = _listen()  # before TensorFlow, whose import takes seconds
    with events.Writer(settings.file(rank, "events")) as say:
        try:
            # Mistakes of the user's are sentences; what goes wrong later keeps its traceback, in this worker's log.
            worker = app.plainly(_make, settings, rank, say)
            while True:
                getattr(worker, words.get())()
        except SystemExit as end:
            say("failed", error=str(end.__cause__), code=end.code)
            raise
        except Exception as error:
            text = re.sub(
                r"^\{\{.*?\}\} ", "", getattr(error, "message", str(error))
            )  # without the name of a graph's node
            say(
                "failed",
                error=f"{type(error).__name__}: {text.strip().partition(os.linesep)[0]}",
                code=1,
            )
            if not hasattr(error, "error_code"):
                raise
            sys.exit(text)  # an error of TensorFlow's: how this process came there tells nothing


def _make(settings: Settings, rank: int, say: Callable[..., None]) -> Any:
    from tfdist.tools.audit.worker import Worker

    return Worker(settings, rank, say)


def _listen() -> queue.Queue[str]:
    """The words on standard input; at its end the process ends, whatever it is doing."""
    words: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            words.put(line.strip())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    return words


if __name__ == "__main__":
    main(sys.argv[1:])
