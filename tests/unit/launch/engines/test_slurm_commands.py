"""Test that errors of Slurm's commands are shown as one sentence with the remedy."""

import pytest

from tfdist.launch.engines import slurm_commands
from tfdist.launch.engines.fleet import NoRoom


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "sbatch: error: invalid partition specified: x\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            ValueError,
            "invalid partition specified: x; `sinfo` lists",
        ),
        ("sbatch: error: Invalid --time specification\n", ValueError, "HH:MM:SS"),
        (
            "scancel: error: Kill job error on job id 7: Access/permission denied\n",
            ValueError,
            "Access/permission denied; the job belongs to another user",
        ),
        (
            "salloc: error: Job submit/allocate failed: Invalid account or account/partition "
            "combination specified\n",
            ValueError,
            "sacctmgr",
        ),
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
            NoRoom,
            "scontrol ping",
        ),
        ("", ValueError, "ended without a message"),
    ],
)
def test_an_error_names_the_remedy(text, kind, message):
    error = slurm_commands.refusal("sbatch", text)
    assert type(error) is kind
    assert message in str(error)
    assert "\n" not in str(error)


def test_a_machine_without_slurm_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="found no `squeue`"):
        slurm_commands.run("squeue")
