"""Watch over the workers that native collectives wait for: one that is frozen is given up.

TensorFlow's own collectives fail when a worker no longer answers. A native one learns from the
kernel that a process has ended, but not that it is stopped, or that its machine is gone.
"""

from __future__ import annotations

import threading
import time

import tensorflow as tf

from tfdist.keras_compat import check_peer
from tfdist.train.health.watchdog import Abortable

PAUSE_S = 1.0
WAITS = 5  # looks at which a call waits for others, until these are asked whether they are alive
ANSWER_S = 5.0  # seconds for the answer of a worker


def watch_peers(transport: Abortable, own: str) -> None:
    """Abort the collectives of a transport, in a thread, when a worker no longer answers.

    A worker that is busy still answers: TensorFlow does that in a thread of its own.

    Args:
        transport: Native collectives of all workers.
        own: Name of this worker.
    """
    thread = threading.Thread(
        target=_watch, args=(transport, own), name="tfdist-peers", daemon=True
    )
    thread.start()


def _watch(transport: Abortable, own: str) -> None:
    waits = 0
    while True:
        time.sleep(PAUSE_S)
        awaited = transport.waiting_for()
        waits = waits + 1 if awaited else 0
        if waits < WAITS:
            continue
        waits = 0
        for name in awaited:
            try:
                check_peer(name, ANSWER_S)
            except tf.errors.OpError as error:
                transport.abort(
                    f"{own} waits for {name}, which does not answer: it is stopped, its machine is "
                    f"gone, or the network is cut; look at its log ({error.message})"
                )
                return
