"""The `--check` flag: runs `tfdist doctor` before the tasks start, and stops on failure."""

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

# Timeout of doctor, which has its own: 600 s for TensorFlow, 300 s for the other hosts, less for
# disks and links.
DOCTOR_S = 1800.0
ENDING_S = 10.0  # time for doctor to end its own processes


def doctor_words(
    flags: argparse.Namespace, spec: ClusterSpec | None, command: Sequence[str]
) -> list[str]:
    """Return the arguments for `tfdist doctor`.

    Args:
        flags: Parsed flags of `tfdist launch`.
        spec: Cluster; None if hosts agree on one at a rendezvous.
        command: Command of the user; doctor also tests the config of a `tfdist train`.

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
        # With parameter servers each worker processes whole batches; otherwise the training tasks
        # share them.
        tasks = () if spec is None else spec.tasks if "ps" in spec.jobs else spec.training_tasks
        words += [
            "--workers",
            str(len(tasks) or flags.workers or 1),
            "--directory",
            flags.log_dir or "runs",
        ]
    if list(command[:2]) == ["tfdist", "train"] and any(
        re.match(r"--?config(=|$)", word) for word in command[2:]
    ):
        words += command[2:]
    return words


def run(flags: argparse.Namespace, words: Sequence[str], timeout: float = DOCTOR_S) -> int:
    """Run doctor on this terminal and print its outcome.

    Args:
        flags: Parsed flags of `tfdist launch`.
        words: Words after `tfdist doctor`.
        timeout: Timeout of doctor in seconds, default 1800.

    Returns:
        0 if the tasks may start, else the launcher's exit code.
    """
    scope = "this host"
    if flags.cluster:
        scope += " and the cluster, together with the doctors of the other hosts"
    elif flags.rendezvous:
        scope += " alone; hosts are compared when they join the rendezvous"
    print(f"tfdist: --check examines {scope}", flush=True)
    with ending():
        process = subprocess.Popen([sys.executable, "-m", "tfdist", "doctor", *words])
        try:
            code = process.wait(timeout)
        except BaseException as error:
            # Ctrl-C reaches doctor too; SIGTERM reaches only this process.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            process.kill()
            if isinstance(error, KeyboardInterrupt):
                return 128 + signal.SIGINT
            if isinstance(error, subprocess.TimeoutExpired):
                command = shlex.join(["tfdist", "doctor", *words])
                print(
                    f"tfdist: --check: doctor did not end within {timeout:g} s; no task was "
                    f"started. To see where it waits, run: {command}",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
            raise
    if code:
        print(
            "tfdist: --check found a fault; no task was started",
            file=sys.stderr,
            flush=True,
        )
    return code if code >= 0 else 128 - code
