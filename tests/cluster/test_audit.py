"""Test `tfdist data audit` in real processes: proofs, findings, and jobs that survive a kill."""

import os
import re
import signal
import time

import numpy as np
import pytest

from tests.cluster.scripts import audited
from tests.processes import PYTHON, ROOT, group, is_gone
from tfdist.tools.audit import row_records

TIMEOUT_S = 240  # for one audit: about 10 on an idle machine of 2 cores
SCRIPT = ROOT / "tests" / "cluster" / "scripts" / "audited.py"
LENGTHS = [37, 5, 58, 50]


@pytest.fixture
def members(tmp_path):
    with group(tmp_path) as members:
        yield members


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("audited")
    audited.write_images(directory / "images")
    audited.write_records(directory / "records", LENGTHS)
    return directory


def start(members, directory, name, *flags):
    command = [PYTHON, "-m", "tfdist", "data", "audit", *flags]
    return members.start(name, command, AUDITED=str(directory), PYTHONPATH=str(ROOT))


def audit(members, directory, *flags):
    """Run an audit; return its exit code and its output."""
    start(members, directory, "audit", *flags)
    return members.wait(TIMEOUT_S)["audit"], members.log("audit")


def all_gone(log):
    pids = re.search(r"process(?:es)? ([\d, ]+)", log)[1].split(", ")
    end = time.monotonic() + 10
    while not all(map(is_gone, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return all(map(is_gone, pids))


def test_two_workers_read_images_of_which_one_is_broken(members, directory):
    code, log = audit(
        members, directory, f"--pipeline={SCRIPT}:images", "--workers=2", "--stage-seconds=0.2"
    )
    assert code == 0, log
    assert (
        "every example exactly once per epoch, but for 1 row whose example cannot be read "
        "(ignore_errors)"
    ) in log
    assert f"left out: example {audited.BROKEN}: file {directory}/images/class-1/4.jpg" in log
    assert re.findall(r"^(order|read|decode|transform|batch) +[\d,]+ +\d+%$", log, re.M) == [
        "order",
        "read",
        "decode",
        "transform",
        "batch",
    ]
    assert re.search(
        r"bounded by: (order|read|decode|transform|batch)\. A model that takes less than", log
    )
    assert re.search(r"^all +26 ", log, re.M)
    assert all_gone(log)


def test_two_workers_of_two_replicas_read_records_at_random(members, directory):
    flags = ["--workers=2", "--devices=2", "--stage-seconds=0"]
    code, log = audit(members, directory, f"--pipeline={SCRIPT}:random_records", *flags)
    assert code == 0, log
    assert (
        'every example exactly once per epoch, but for 6 examples of the tails (tail="drop")' in log
    )
    assert "each global batch, row by row, is that which follows from seed, epoch and step" in log


def test_three_workers_read_records_as_a_stream(members, directory):
    flags = ["--workers=3", "--epochs=2", "--stage-seconds=0"]
    code, log = audit(members, directory, f"--pipeline={SCRIPT}:stream", *flags)
    assert code == 0, log
    assert (
        "proved for epochs 0 to 1, 26 batches, 300 examples:\n  every example exactly once "
        "per epoch\n"
    ) in log


def test_two_workers_read_the_digits_of_a_config(members, directory, digits_dir):
    flags = [
        "--workers=2",
        "--epochs=2",
        "--stage-seconds=0",
        f"--config.data.data_dir={digits_dir}",
    ]
    code, log = audit(members, directory, f"--config={ROOT / 'configs' / 'digits.py'}", *flags)
    assert code == 0, log
    assert (
        "proved for epochs 0 to 1, 48 batches, 3,000 examples:\n  every example exactly once "
        "per epoch\n"
    ) in log


def test_the_first_wrong_example_is_named(members, directory):
    code, log = audit(
        members, directory, f"--pipeline={SCRIPT}:defective", "--workers=2", "--epochs=2"
    )
    assert code == 1, log
    match = re.search(
        r"audit failed: epoch 1, step 2, row 5, worker 1: expected example (\d+); received "
        r"example (\d+), which worker 0 had in "
        r"step 2, row 0\.\n  example \1 is row \1 of an array\n  example \2 is row \2 of an "
        r"array\n",
        log,
    )
    assert match, log
    assert all_gone(log)


def test_killed_job_resumes_with_more_workers_and_uses_each_example_once(members, directory):
    before, after = (members.directory / name for name in ("before", "after"))
    flags = [f"--pipeline={SCRIPT}:slow_stream", "--stage-seconds=0"]
    start(members, directory, "before", *flags, "--workers=2", f"--keep={before}")
    end = time.monotonic() + TIMEOUT_S
    while min(len(list(taken(before, rank))) for rank in range(2)) < 3:
        assert time.monotonic() < end, members.logs()
        time.sleep(0.05)
    os.kill(int(re.search(r"processes \d+, (\d+)", members.log("before"))[1]), signal.SIGKILL)
    assert members.wait(20)["before"] == 1, members.logs()
    log = members.log("before")
    assert re.search(r"worker 1 was ended by SIGKILL, after epoch 0, step \d+", log), log
    assert all_gone(log)

    resume = re.search(r"--first-epoch=0 --first-step=(\d+)", log)
    assert 3 <= int(resume[1]) < 13
    start(members, directory, "after", *flags, "--workers=3", f"--keep={after}", *resume[0].split())
    assert members.wait(TIMEOUT_S)["after"] == 0, members.logs()
    seen = [
        step.numbers
        for rank in range(2)
        for step in taken(before, rank)
        if step.step < int(resume[1])
    ]
    seen += [step.numbers for rank in range(3) for step in taken(after, rank)]
    assert sorted(np.concatenate(seen).tolist()) == list(range(sum(LENGTHS)))


def taken(directory, rank):
    path = directory / f"worker-{rank}.steps"
    return row_records.read(path) if path.exists() else ()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_audit(members, directory, number):
    flags = ["--workers=1", f"--keep={members.directory / 'kept'}"]
    process = start(members, directory, "audit", f"--pipeline={SCRIPT}:slow_stream", *flags)
    members.says("audit", r"process \d+\n", TIMEOUT_S)
    process.send_signal(number)
    code = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert process.wait(TIMEOUT_S) == code
    assert all_gone(members.log("audit"))


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "expected --config=FILE, or --pipeline=FILE.py:FUNCTION; received neither"),
        (["--config=digits.py"], 78, "--config=digits.py: no such file in"),
        (
            ["--config=configs/digits.py", "--config.data.globl_batch=3"],
            78,
            "data.globl_batch: no such key. Did you mean data.global_batch?",
        ),
        (
            ["--config=configs/digits.py", "--wrokers", "3"],
            2,
            "--wrokers: no such flag. Did you mean --workers?",
        ),
        (
            ["--config=configs/digits.py", "--workers=0"],
            2,
            "--workers: expected a whole number of at least 1, received '0'",
        ),
        (["--pipeline=train.py"], 78, "--pipeline=train.py: expected FILE.py:FUNCTION"),
    ],
)
def test_wrong_arguments_are_named_before_a_worker_starts(capfd, monkeypatch, flags, code, message):
    from tfdist.tools.audit.main import main

    monkeypatch.chdir(ROOT)
    try:
        ended = main(flags)
    except SystemExit as exit:
        ended = exit.code
    assert ended == code
    assert message in capfd.readouterr().err


def test_an_example_that_cannot_be_read_is_named(members, directory):
    code, log = audit(members, directory, f"--pipeline={SCRIPT}:all_images")
    assert code == 1, log
    assert re.search(
        r"audit failed: worker 0 failed.*cannot be read or decoded.*file "
        rf"{directory}/images/class-1/4.jpg",
        log,
    ), log
    assert all_gone(log)


def test_replicas_that_do_not_divide_the_batch_are_named(members, directory):
    code, log = audit(members, directory, f"--pipeline={SCRIPT}:images", "--devices=4")
    assert code == 78, log
    assert log.splitlines()[1:] == [
        (
            "error: global_batch=6: expected a multiple of the 4 replicas, so that each gets "
            "equally many rows; the nearest are 4 and 8."
        )
    ]
