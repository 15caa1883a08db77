"""Lease of a Slurm allocation: a process that asks for nodes, and gives them back.

Usage:
    python slurm_lease.py OPTIONS OF SALLOC

The launcher holds the other end of standard input. Its end means that the launcher is gone, even by
`kill -9`; this process then cancels the job, whether it is pending or runs. What `salloc` writes
goes to standard output.
"""

import re
import signal
import subprocess
import sys
import threading

CANCEL_S = 60.0


def main(options):
    """Hold an allocation until the end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    salloc = subprocess.Popen(
        ["salloc", "--no-shell", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        restore_signals=True,
        preexec_fn=_take_signals,
    )
    jobs = set()

    def copy():
        assert salloc.stdout is not None
        for line in salloc.stdout:
            jobs.update(re.findall(rb"job allocation (\d+)|job (\d+) ", line)[:1])
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except OSError:  # the launcher is gone
                pass
        try:
            sys.stdout.buffer.write(b"ended with %d\n" % salloc.wait())
            sys.stdout.buffer.flush()
        except OSError:
            pass

    reader = threading.Thread(target=copy)
    reader.start()
    sys.stdin.buffer.read()
    if salloc.poll() is None:
        salloc.terminate()  # while it waits, it then withdraws its request
    reader.join(CANCEL_S)
    for job in jobs:
        number = (job[0] or job[1]).decode()
        try:
            subprocess.run(
                ["scancel", number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=CANCEL_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue


def _take_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main(sys.argv[1:])
