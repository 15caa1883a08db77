"""Test what the flags and the job around a launcher mean; tests/engines runs it on a real Slurm."""

import pytest

from tfdist.launch.engines import slurm_launch
from tfdist.launch.engines.slurm import request_of
from tfdist.launch.policy import Policy
from tfdist.runtime.launch_protocol import note


def start(directory, number, *, used=0, code=None):
    """Write the journal of a start of a job."""
    path = directory / f"start-{number}"
    path.mkdir()
    note(str(path), "launch", chaos=None, used=used)
    if code is not None:
        note(str(path), "over", code=code)
    return path


@pytest.mark.parametrize(
    ("starts", "used"),
    [
        ([], 0),
        ([{"code": 42}], 0),  # preempted, and saved
        ([{"code": 75}], 1),
        ([{"used": 2, "code": 75}], 3),
        ([{"used": 1}], 2),  # killed, or its node was lost
        ([{"used": 1, "code": 75}, {"used": 2, "code": 42}], 2),
    ],
)
def test_restarts_are_counted_over_the_starts_of_a_job(tmp_path, starts, used):
    for number, facts in enumerate(starts):
        start(tmp_path, number, **facts)
    here = tmp_path / f"start-{len(starts)}"
    here.mkdir()
    assert slurm_launch.restarts_used(str(here)) == used


def test_restarts_of_another_directory_count_nothing(tmp_path):
    assert slurm_launch.restarts_used(str(tmp_path)) == 0


def test_exit_code_75_needs_a_restart_that_is_left():
    lines = []
    assert slurm_launch.final_code(75, Policy(2, used=1), lines.append) == 75
    assert slurm_launch.final_code(42, Policy(0), lines.append) == 42
    assert not lines
    assert slurm_launch.final_code(75, Policy(1, used=1), lines.append) == 1
    assert "no restart is left" in lines[0]


def test_preemption_before_a_snapshot_counts_as_a_restart():
    lines = []
    assert slurm_launch.final_code(143, Policy(1), lines.append, interrupted=True) == 75
    assert "no task has saved" in lines[0]
    assert slurm_launch.final_code(143, Policy(1), lines.append) == 143  # a task's own SIGTERM
    assert slurm_launch.final_code(143, Policy(0), lines.append, interrupted=True) == 1


def test_component_that_does_not_say_its_tasks_is_refused():
    with pytest.raises(ValueError, match="expected --ntasks=N in each component after ':'"):
        request_of(3, options=["--ntasks=2", ":", "--partition=cpu"])
