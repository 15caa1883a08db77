"""Test the fault matrix: a training that is killed, stopped, preempted or robbed at any moment.

It ends as if nothing had happened.

Each launch takes several faults one after the other. `make chaos` runs longer ones.
"""

import functools
import json
import os
import pickle
import random
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.scripts.chaotic import EPOCHS, EXAMPLES, STEPS
from tests.launches import ROOT, Launch
from tfdist import cli
from tfdist.runtime.fault_plan import EVENT, parse
from tfdist.runtime.launch_protocol import read_journal

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "chaotic.py")
TIMEOUT_S = 600
SEEN = EXAMPLES * (EXAMPLES + 1) * (2 * EXAMPLES + 1) / 6  # each example once an epoch
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Return launch flags, strategy, undisturbed result and logs, by name of a setup."""

    @functools.cache
    def run(setup):
        flags, name = (
            (("--workers", "2"), "auto") if setup == "workers" else (("--workers", "1"), "mirrored")
        )
        root = tmp_path_factory.mktemp("undisturbed")
        disturb(Launch(root, TIMEOUT_S), flags, name, "none")
        return (
            flags,
            name,
            results(root),
            points(root),
            (root / "log.csv").read_text(),
            root / "runs" / "latest",
        )

    return run


def disturb(launch, flags, name, plan, save_freq="3", attempts=None):
    """Run a launch with a chaos plan, and check that it ends well after all faults."""
    code, _, err = launch.run(
        *flags,
        "--restarts",
        "99",
        "--chaos",
        plan,
        "--hang-timeout",
        "10",
        command=(SCRIPT, ".", save_freq, name),
        environ=QUIET,
    )
    journal = read_journal(str(launch.directory / "runs" / "latest"))
    assert code == 0, f"{err[-6000:]}\n{journal}"
    struck = [line["text"] for line in journal if line["event"] == EVENT]
    # Each fault costs one attempt: nothing else went wrong.
    expected = attempts or 1 + sum(text.split()[0] in LETHAL for text in struck)
    assert len([line for line in journal if line["event"] == "attempt"]) == expected, err[-6000:]
    assert sorted(struck) == sorted(fault.text for fault in parse(plan)), err[-3000:]
    return err, journal


LETHAL = {"kill", "raise", "term", "hang", "stop", "fill"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}


def results(root):
    return [pickle.loads(file.read_bytes()) for file in sorted(root.glob("*.pickle"))]


def points(root):
    """Return tags, steps and values of all curves but those of speed."""
    files = sorted(str(file) for file in (root / "logs").rglob("events.*"))
    events = [
        tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(files)
    ]
    return sorted(
        (v.tag, event.step, tf.make_ndarray(v.tensor).tolist())
        for event in events
        for v in event.summary.value
        if not v.tag.startswith(("speed/", "goodput/", "keras"))
    )


def check(root, setup):
    """Check that the results are those of the undisturbed run, and that no process is left."""
    _, _, wholes, curves, csv, _ = setup
    ends = results(root)
    assert len(ends) == len(wholes)
    for end, whole in zip(ends, wholes, strict=True):
        assert end["iterations"] == whole["iterations"] == EPOCHS * STEPS
        assert end["epochs"] == whole["epochs"] == list(range(EPOCHS))
        assert end["history"]["seen"] == [SEEN] * EPOCHS
        assert end["history"].keys() == whole["history"].keys()
        for key, values in whole["history"].items():
            np.testing.assert_array_equal(end["history"][key], values, err_msg=key)
        for a, b in zip(end["weights"], whole["weights"], strict=True):
            np.testing.assert_array_equal(a, b)
    assert points(root) == curves
    assert (root / "log.csv").read_text() == csv
    assert not list(root.rglob("*.part"))


# Setup -> plans; the numbers of a plan's faults are the kills and the like of one launch.
PLANS = {
    "workers": (
        (
            "kill worker:1@step=2; kill chief@saving; kill worker:1@restoring; kill "
            "chief@step=20; kill chief@end"
        ),
        "term worker:1@step=9; stop worker:0@step=13; corrupt newest; fill disk@step=20",
    ),
    "mirrored": ("kill worker:0@step=2; kill chief@saved; term chief@step=14; corrupt newest",),
}


def random_plan(seed, kills=9):
    """Return a plan that kills random tasks at random steps and moments."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(1, EPOCHS * STEPS), kills - 3))
    faults = [f"kill {rng.choice(('worker:0', 'worker:1', 'chief'))}@step={step}" for step in steps]
    faults += [
        f"kill {rng.choice(('chief', 'worker:1'))}@{rng.choice(('start', 'restoring', 'end'))}",
        "kill chief@saving",
        "kill chief@saved",
    ]
    return "; ".join(faults)


def plans():
    yield from ((name, plan) for name, some in PLANS.items() for plan in some)
    for seed in range(int(os.environ.get("TFDIST_CHAOS_ROUNDS", "0"))):  # set by `make chaos`
        yield "workers", random_plan(seed)
        yield "mirrored", random_plan(seed).replace("worker:1", "worker:0")


@pytest.mark.parametrize(("setup", "plan"), list(plans()))
def test_results_equal_those_of_an_undisturbed_run(setup, plan, undisturbed, launch, capsys):
    launch.bound = TIMEOUT_S
    setup = undisturbed(setup)
    flags, name, *_ = setup
    err, _ = disturb(launch, flags, name, plan)
    if "stop worker:0" in plan:  # the chief, by TensorFlow's heartbeat or by the launcher's
        assert re.search("ROOT CAUSE: worker:0 (was stopped|made no step)", err), err
    check(launch.directory, setup)
    assert (
        cli.main(
            [
                "chaos",
                "report",
                str(launch.directory / "runs" / "latest"),
                "--against",
                str(setup[-1]),
            ]
        )
        == 0
    )
    output = capsys.readouterr().out
    check_report(output.splitlines(), [fault.text for fault in parse(plan)], output)
    check_goodput(launch.directory / "runs" / "latest", err, capsys)


def check_goodput(logs, err, capsys):
    """Check that each second of the launch is in one category, and each kept step counted once."""
    assert cli.main(["goodput", str(logs), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    journal = read_journal(str(logs))
    wall = journal[-1]["clock"] - journal[0]["clock"]
    assert sum(facts["seconds"].values()) == pytest.approx(wall, abs=0.1)
    assert facts["wall_seconds"] == pytest.approx(wall, abs=0.1)
    for category in ("training", "compile", "save", "restore", "startup", "restart"):
        assert facts["seconds"][category] > 0, category
    ended = [line for line in journal if line["event"] == "ended"]
    steps = [
        max(a["steps"] for a in line["accounts"].values()) for line in ended if line["accounts"]
    ]
    assert sum(steps) == EPOCHS * STEPS + facts["lost_steps"]
    assert facts["problems"] == []
    last = [line for line in err.splitlines() if line.startswith("tfdist: ")][-1]
    # The launcher shows the figure before its last line in the journal.
    shown = float(last.removeprefix("tfdist: goodput ").partition(" % of ")[0])
    assert shown == pytest.approx(100 * facts["goodput"], abs=0.2)


def check_report(lines, faults, output):
    """Check each fault's row of the report.

    Faults that cost an attempt were seen, and training went on after them.

    Faults that cost an attempt were seen, and training went on after them.
    """
    head, *rows = lines[: 1 + len(faults)]
    assert head.split()[0] == "fault"
    assert sorted(
        next(text for text in sorted(faults, key=len, reverse=True) if row.startswith(text))
        for row in rows
    ) == sorted(faults), output
    for row in rows:
        cost = row.split()[0] in LETHAL
        assert len(re.findall(r" \d+\.\d+ s", row)) == (3 if cost else 1), output
        assert bool(re.search(r" \d+  (snapshot-\d+|the beginning)", row)) == cost, output
    attempts = 1 + sum(fault.split()[0] in LETHAL for fault in faults)
    assert re.fullmatch(
        rf"{attempts} attempts in \d+\.\d s, \d+ steps? lost.*; a snapshot every \d+ steps?",
        lines[-2],
    ), output
    assert lines[-1].startswith("result: equal bit for bit to "), output


def test_lost_servers_are_replaced_and_each_example_counts_once(launch):
    launch.bound = TIMEOUT_S
    plan = "kill worker:1@step=5; kill ps:0@step=12; kill chief@step=22"
    err, _ = disturb(
        launch, ("--chief", "--workers", "2", "--ps", "1"), "auto", plan, "epoch", attempts=3
    )
    assert (
        "worker:1 was killed by SIGKILL; the launcher restarts it, the other tasks continue" in err
    )
    (end,) = results(launch.directory)
    assert end["epochs"] == list(range(EPOCHS))
    assert end["history"]["seen"] == [SEEN] * EPOCHS
    assert end["iterations"] == EPOCHS * STEPS
