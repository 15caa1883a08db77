"""Before the tasks start, `tfdist doctor` looks, in a process of its own; what it finds decides whether they do."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tfdist.cluster import ClusterSpec

ENDING_S = 10.0  # for doctor to end its own processes


def doctor_words(flags: argparse.Namespace, spec: ClusterSpec | None, command: Sequence[str]) -> list[str]:
    """What doctor is asked.

    Args:
        flags: Of `tfdist launch`.
        spec: The cluster; None where hosts agree at a rendezvous.
        command: The user's words; the config of a `tfdist train` is tried too.

    Returns:
        The words after `tfdist doctor`.
    """
    words: list[str] = []
    if flags.cluster:
        words += ["--cluster", flags.cluster, "--together", *(["--task", flags.task] if flags.task else [])]
    else:
        # Under parameter servers each worker takes whole batches, else the training tasks share them.
        tasks = () if spec is None else spec.tasks if "ps" in spec.jobs else spec.training_tasks
        words += ["--workers", str(len(tasks) or flags.workers or 1), "--place", flags.log_dir or "runs"]
    if list(command[:2]) == ["tfdist", "train"] and any(re.match(r"--?config(=|$)", word) for word in command[2:]):
        words += command[2:]
    return words


def run(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Runs doctor on this terminal, and says what comes of it.

    Args:
        flags: Of `tfdist launch`.
        words: After `tfdist doctor`.

    Returns:
        0 where the tasks may start, else the launcher's exit code.
    """
    where = "this host"
    if flags.cluster:
        where += " and the cluster, together with the doctors of the other hosts"
    elif flags.rendezvous:
        where += " alone; hosts compare themselves when they meet at the rendezvous"
    print(f"tfdist: --check looks at {where}", flush=True)
    with _terminated():
        process = subprocess.Popen([sys.executable, "-m", "tfdist", "doctor", *words])
        try:
            code = process.wait()
        except BaseException as error:  # Ctrl-C reaches doctor too, SIGTERM only us
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            process.kill()
            if isinstance(error, KeyboardInterrupt):
                return 128 + signal.SIGINT
            raise
    if code:
        print("tfdist: --check has found something wrong; no task was started", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """While the block runs, SIGTERM ends it as an exception does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
