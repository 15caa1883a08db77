"""Test training that saves on disks that are full, read-only or missing.

The disks are real ones, mounted in a namespace of the test's own.
"""

import json
import shutil
import subprocess

import pytest

from tests.cluster.scripts.disks import EPOCHS, STEPS
from tests.processes import PYTHON, ROOT, group

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "disks.py")
PRIVATE = ("unshare", "--user", "--map-root-user", "--mount")
TIMEOUT_S = 200  # for all trainings: some six on an idle machine


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    """Return the result of each training, by the name of its disk."""
    root = tmp_path_factory.mktemp("disks")
    mount_point = root / "disk"
    out = root / "out.json"
    mount_point.mkdir()
    if not shutil.which("unshare"):
        pytest.skip("a disk of the test's own needs the program unshare")
    trial = subprocess.run(
        [*PRIVATE, "mount", "-t", "tmpfs", "none", str(mount_point)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    if trial.returncode:
        pytest.skip(f"a mount namespace is refused here: {trial.stderr.strip()}")
    with group(root) as members:
        members.start(
            "disks", [*PRIVATE, PYTHON, SCRIPT, str(mount_point), str(out)], PYTHONPATH=str(ROOT)
        )
        members.succeed(TIMEOUT_S)
    return json.loads(out.read_text())


def parts(result):
    return [name for name in result["files"] or [] if name.endswith(".part")]


def test_full_disk_ends_training_and_keeps_earlier_snapshots(disks):
    full = disks["full"]
    kind, text = full["error"]
    assert kind == "OSError"
    assert "backup/snapshot-2.tfdist: cannot be written" in text
    assert "No space left on device" in text
    assert ("Expected a writable directory with free space. Earlier snapshots are kept.") in text
    assert disks["kept"] == [[0, 0], [1, 1]], (
        "number and epoch of each snapshot, and all can be read"
    )
    assert not parts(full)
    assert 2 * STEPS <= full["iterations"] <= 3 * STEPS, "it ends with the next save"


def test_training_resumes_once_there_is_room_again(disks):
    again = disks["room again"]
    whole = disks["elsewhere"]
    assert again["error"] is None
    assert again["iterations"] == EPOCHS * STEPS
    assert again["history"] == whole["history"]
    assert again["files"] == whole["files"]


@pytest.mark.parametrize("run", [".", "new"])
def test_no_step_runs_where_tensorboard_cannot_write(run, disks):
    result = disks[f"read-only, TensorBoard {run}"]
    kind, text = result["error"]
    assert kind == "UnusableStore"
    assert text.startswith("TensorBoard(log_dir=...): expected a directory that can be written")
    assert f"disk/{run}: Read-only file system. " in text
    assert result["iterations"] == 0


@pytest.mark.parametrize(
    ("disk", "file", "why"),
    [
        ("no byte left", "disk/backup/writer.json", "No space left on device"),
        ("read-only", "disk/backup/writer.json", "Read-only file system"),
        ("read-only, new", "disk/new/writer.json", "Read-only file system"),
        ("a file", "disk/file/writer.json", "is not a directory"),
        ("below a file", "disk/file/backup/writer.json", "is not a directory"),
        ("no such place", "/proc/nowhere/backup/writer.json", "No such file or directory"),
    ],
)
def test_no_step_runs_where_nothing_can_be_saved(disk, file, why, disks):
    result = disks[disk]
    kind, text = result["error"]
    assert kind == "OSError"
    assert f"{file}: cannot be written" in text
    assert why in text
    assert "Expected a writable directory with free space." in text
    assert result["iterations"] == 0
    assert not parts(result)
