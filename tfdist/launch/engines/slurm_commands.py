"""Slurm's own commands: run one within a bound, and turn its errors into one sentence."""

from __future__ import annotations

import re
import shutil
import subprocess

from tfdist.launch.engines.fleet import NoRoom

COMMAND_S = 60.0  # a busy slurmctld answers after seconds
# Part of an error message, in lower case, and what to do about it.
REMEDIES = {
    "invalid partition": "`sinfo` lists the partitions (--partition)",
    "time limit": "write --time as MINUTES, HH:MM:SS or DAYS-HH:MM:SS, within the limit",
    "--time specification": "write --time as MINUTES, HH:MM:SS or DAYS-HH:MM:SS",
    "invalid account": "`sacctmgr show associations user=$USER` lists your accounts (--account)",
    "invalid qos": "`sacctmgr show associations user=$USER` lists what you may use",
    "permission denied": "the job belongs to another user, or you may not use what it asks for",
    "invalid job id": "`tfdist jobs` lists your jobs",
    "node configuration is not available": "ask for fewer nodes, tasks, cores or GPUs; "
    "`sinfo -N -l` lists the nodes",
    "unrecognized option": "see --slurm-options",
    "invalid option": "see --slurm-options",
    "invalid generic resource": "`sinfo -o '%N %G'` lists the GPUs of the nodes",
    "configuration source": "run this command on a machine of the cluster, or set SLURM_CONF",
}
# Part of an error message about a controller that may answer later.
TRANSIENT = ("unable to contact slurm controller", "socket timed out", "connection refused")
# Why a job is pending that never starts, and what to do about it.
NEVER = {
    "PartitionTimeLimit": "--time is above the limit of the partition: see `sinfo -o '%P %l'`",
    "PartitionNodeLimit": "the partition has fewer nodes, or allows fewer for a job: see `sinfo`",
    "PartitionConfig": "the partition has fewer nodes, or allows a job fewer or less time: see "
    "`sinfo -o '%P %D %l'`",
    "BadConstraints": "no node fits the options of the job: see `sinfo -N -l`",
    "InvalidAccount": REMEDIES["invalid account"],
    "InvalidQOS": REMEDIES["invalid qos"],
    "AccountNotAllowed": REMEDIES["invalid account"],
    "QOSNotAllowed": REMEDIES["invalid qos"],
    "JobHeldUser": "the job is held: `scontrol release JOB` starts it",
}


def is_installed() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def check_installed() -> None:
    """Refuse a machine without Slurm's commands.

    Raises:
        ValueError: If there are none.
    """
    if not is_installed():
        raise ValueError(
            "--on slurm: expected Slurm's commands in PATH, found no `squeue`; run this on a login "
            "node of the cluster, or load Slurm's module there"
        )


def run(*argv: str) -> str:
    """Run a command of Slurm; return what it prints.

    Args:
        *argv: Words of the command.

    Raises:
        NoRoom: If Slurm's controller does not answer.
        ValueError: If the command is not installed, or refuses its options.
    """
    check_installed()
    try:
        result = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
        )
    except FileNotFoundError as error:
        raise ValueError(f"--on slurm: `{argv[0]}` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise NoRoom(
            f"Slurm: `{argv[0]}` did not answer within {COMMAND_S:g} s; look at `scontrol ping`"
        ) from error
    if result.returncode:
        raise refusal(argv[0], result.stderr or result.stdout)
    return result.stdout


def refusal(command: str, text: str) -> ValueError | NoRoom:
    r"""Return the error for what a command of Slurm has written.

    Args:
        command: Name of the command.
        text: Its output.

    Example:
        >>> refusal("salloc", "salloc: error: invalid partition specified: x\n")
        ValueError('Slurm: salloc: invalid partition specified: x; `sinfo` lists the partitions (--partition)')
    """  # noqa: E501
    sentences = [
        re.sub(r"^\S+: (?:error: |fatal: )?", "", line).strip()
        for line in text.splitlines()
        if ": " in line and "Try " not in line
    ]
    lower = text.lower()
    # The sentence that has a remedy says more than the last one, "Job submit failed".
    sentence = next(
        (line for line in sentences if any(part in line.lower() for part in REMEDIES)),
        sentences[-1] if sentences else text.strip() or "ended without a message",
    )
    message = f"Slurm: {command}: {sentence}"
    if any(part in lower for part in TRANSIENT):
        return NoRoom(f"{message}; look at `scontrol ping`")
    remedy = next((remedy for part, remedy in REMEDIES.items() if part in lower), "")
    return ValueError(f"{message}; {remedy}" if remedy else message)
