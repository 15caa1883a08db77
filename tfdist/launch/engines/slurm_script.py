"""Batch script of a Slurm job: runs the launcher, and queues the job again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

OPTIONS = (
    "--open-mode=append",  # each start of the job writes to the same file
    "--requeue",
)
# `wait` returns early when a signal arrives; bash keeps the exit code of a process that has ended.
BODY = """\
# sbatch --signal=B:TERM@60 sends the signal to this script alone.
trap 'kill -TERM "$!" 2> /dev/null' TERM
{command} &
launcher=$!
while kill -0 "$launcher" 2> /dev/null; do wait "$launcher"; done
wait "$launcher"
code=$?

# 42: preempted, and the training is saved. 75: nodes are lost, and a restart is left (--restarts).
# A job that was cancelled, or is out of time, no longer counts as running.
if [ "$code" = 42 ] || [ "$code" = 75 ]; then
  if [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T | sort -u)" = RUNNING ]; then
    echo "tfdist: exit code $code: queue job $SLURM_JOB_ID again" >&2
    scontrol requeue "$SLURM_JOB_ID" && sleep 300 # Slurm ends this script
  fi
fi
exit "$code"
"""


def batch_script(options: Sequence[str], command: Sequence[str], setup: str | None = None) -> str:
    r"""Return a batch script.

    Args:
        options: Options of `sbatch`; ":" before those of another component of a heterogeneous job.
        command: Words of the launcher.
        setup: Shell commands to run before, such as `module load cuda`.

    Example:
        >>> script = batch_script(["--ntasks=2"], ["tfdist", "launch", "--", "a b.py"])
        >>> print(script.partition("launcher=")[0].rstrip())
        #!/bin/bash
        #SBATCH --open-mode=append
        #SBATCH --requeue
        #SBATCH --ntasks=2
        <BLANKLINE>
        # sbatch --signal=B:TERM@60 sends the signal to this script alone.
        trap 'kill -TERM "$!" 2> /dev/null' TERM
        tfdist launch -- 'a b.py' &
    """
    words = ["hetjob" if option == ":" else quote(option) for option in (*OPTIONS, *options)]
    lines = ["#!/bin/bash", *(f"#SBATCH {word}" for word in words), ""]
    if setup:
        lines += [setup, ""]
    return "\n".join(lines) + "\n" + BODY.format(command=shlex.join(command))


def quote(option: str) -> str:
    """Return an option as a line of #SBATCH takes it.

    Raises:
        ValueError: If it has a line break, which would end the line.

    Example:
        >>> quote("--job-name=my job")
        '--job-name="my job"'
    """
    if "\n" in option or '"' in option:
        raise ValueError(f"expected an option without line breaks and quotes, received {option!r}")
    name, assigned, value = option.partition("=")
    return f'{name}="{value}"' if assigned and shlex.quote(value) != value else option
