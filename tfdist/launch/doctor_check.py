"""Before the tasks start, `tfdist doctor` looks, in a process of its own; what it finds decides whether they do."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

from tfdist.cluster.spec import ClusterSpec
from tfdist.runtime.termination import ending

LOOKING_S = 1800.0  # for doctor, whose own waits have bounds: for TensorFlow 600 s, for the other hosts 300 s, for disks and links less
ENDING_S = 10.0  # for doctor to end its own processes


def doctor_words(
    flags: argparse.Namespace, spec: ClusterSpec | None, command: Sequence[str]
) -> list[str]:
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
        words += [
            "--cluster",
            flags.cluster,
            "--together",
            *(["--task", flags.task] if flags.task else []),
        ]
    else:
        # Under parameter servers each worker takes whole batches, else the training tasks share them.
        tasks = () if spec is None else spec.tasks if "ps" in spec.jobs else spec.training_tasks
        words += [
            "--workers",
            str(len(tasks) or flags.workers or 1),
            "--place",
            flags.log_dir or "runs",
        ]
    if list(command[:2]) == ["tfdist", "train"] and any(
        re.match(r"--?config(=|$)", word) for word in command[2:]
    ):
        words += command[2:]
    return words


def run(flags: argparse.Namespace, words: Sequence[str], timeout: float = LOOKING_S) -> int:
    """Runs doctor on this terminal, and says what comes of it.

    Args:
        flags: Of `tfdist launch`.
        words: After `tfdist doctor`.
        timeout: Seconds that it may take.

    Returns:
        0 where the tasks may start, else the launcher's exit code.
    """
    where = "this host"
    if flags.cluster:
        where += " and the cluster, together with the doctors of the other hosts"
    elif flags.rendezvous:
        where += " alone; hosts compare themselves when they meet at the rendezvous"
    print(f"tfdist: --check looks at {where}", flush=True)
    with ending():
        process = subprocess.Popen([sys.executable, "-m", "tfdist", "doctor", *words])
        try:
            code = process.wait(timeout)
        except BaseException as error:  # Ctrl-C reaches doctor too, SIGTERM only us
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            process.kill()
            if isinstance(error, KeyboardInterrupt):
                return 128 + signal.SIGINT
            if isinstance(error, subprocess.TimeoutExpired):
                alone = shlex.join(["tfdist", "doctor", *words])
                print(
                    f"tfdist: --check: doctor had not ended after {timeout:g} s; no task was started. See where it waits: {alone}",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
            raise
    if code:
        print(
            "tfdist: --check has found something wrong; no task was started",
            file=sys.stderr,
            flush=True,
        )
    return code if code >= 0 else 128 - code
