"""Test the batch script with programs that stand for Slurm's; tests/engines runs real jobs."""

import os
import signal
import subprocess

import pytest

from tfdist.launch.engines.slurm_script import batch_script, quote


@pytest.fixture
def programs(tmp_path):
    """Put programs that stand for squeue and scontrol first in PATH."""
    for name, text in {
        "squeue": 'echo "${STATE-RUNNING}"',
        "scontrol": f'echo "$@" >> {tmp_path}/requeued; exit 1',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return tmp_path


def start(script, programs, **environ):
    path = f"{programs}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", script], env={**os.environ, "PATH": path, "SLURM_JOB_ID": "7", **environ}
    )


@pytest.mark.parametrize(
    ("code", "state", "is_requeued"),
    [
        (0, "RUNNING", False),
        (1, "RUNNING", False),
        (42, "RUNNING", True),
        (75, "RUNNING", True),
        (78, "RUNNING", False),
        (42, "COMPLETING", False),  # cancelled, or out of time
    ],
)
def test_job_is_queued_again_after_42_and_75(programs, code, state, is_requeued):
    script = batch_script([], ["sh", "-c", f"exit {code}"])
    assert start(script, programs, STATE=state).wait(30) == code
    assert (programs / "requeued").exists() is is_requeued


def test_sigterm_goes_on_to_the_launcher_and_its_exit_code_is_kept(programs):
    command = (
        f"trap 'sleep 0.5; exit 42' TERM; touch {programs}/ready; while :; do sleep 0.05; done"
    )
    process = start(batch_script([], ["sh", "-c", command]), programs)
    while not (programs / "ready").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 42
    assert (programs / "requeued").read_text() == "requeue 7\n"


def test_setup_runs_before_the_launcher(programs):
    script = batch_script([], ["sh", "-c", "exit $CODE"], setup="export CODE=9")
    assert start(script, programs).wait(30) == 9


def test_an_option_cannot_add_lines_to_the_script():
    with pytest.raises(ValueError, match="without line breaks"):
        quote("--job-name=a\nrm")
