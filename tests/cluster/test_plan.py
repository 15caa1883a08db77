"""Test the predictions of `tfdist plan` against measured memory and traffic, and the docs.

Also test its messages on mistakes.
"""

import json
import re

import pytest

from tests.processes import PYTHON, ROOT, group, tasks
from tfdist.cluster.spec import ClusterSpec
from tfdist.runtime.formatting import format_bytes

TIMEOUT_S = 600  # about 60 on an idle machine of 2 cores, 220 on one that is slow and busy
RESIDENT = [PYTHON, str(ROOT / "tests" / "cluster" / "scripts" / "resident.py")]
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
# Of each way the stages, the devices, and what else is in its config.
WAYS = {
    "one device": (0, "cpu:0", []),
    "data parallel": (0, "cpu:0,cpu:1", []),
    "ZeRO-1": (0, "cpu:0,cpu:1", ["--config.parallel.zero=1"]),
    "ZeRO-2, bfloat16": (
        0,
        "cpu:0,cpu:1",
        ["--config.parallel.zero=2", "--config.sync.comm_dtype=bfloat16"],
    ),
    "FSDP (ZeRO-3)": (0, "cpu:0,cpu:1", ["--config.parallel.zero=3"]),
    "pipeline parallel": (2, "cpu:0,cpu:1", []),
}


def words(digits_dir, devices="cpu:0,cpu:1", *more):
    """Return config flags for layers of 2^22 weights, which the allocator does not round."""
    return [
        f"--config={ROOT / 'configs' / 'digits.py'}",
        f"--config.data.data_dir={digits_dir}",
        "--config.model.name=mlp",
        "--config.model.options.widths=(2048,2048,2048,2048,2048)",
        "--config.data.tail=drop",
        f"--config.strategy.devices={devices}",
        *more,
    ]


# TensorFlow counts the memory of a CPU where it uses oneDNN, which on many CPUs is not its default.
COUNTS_MEMORY = {"TF_ENABLE_ONEDNN_OPTS": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits_dir):
    """Return the plan, and the measured memory and traffic of each way."""
    with group(tmp_path_factory.mktemp("plan")) as members:
        # A config that shards already is planned as any other.
        planned = words(digits_dir, "cpu:0,cpu:1", "--config.parallel.zero=2")
        members.start(
            "plan",
            [
                PYTHON,
                "-m",
                "tfdist",
                "plan",
                *planned,
                "--devices",
                "2",
                "--memory",
                "1GB",
                "--json",
            ],
        )
        for way, (stages, devices, more) in WAYS.items():
            members.start(
                way,
                [*RESIDENT, str(stages), *words(digits_dir, devices, *more)],
                **COUNTS_MEMORY,
            )
        members.succeed(TIMEOUT_S)
        printed = {
            way: dict(re.findall(r"^(resident|peak|sent) (\d+)$", members.log(way), re.MULTILINE))
            for way in WAYS
        }
        return json.loads(members.log("plan")), {
            way: {what: int(count) for what, count in each.items()} for way, each in printed.items()
        }


@pytest.mark.parametrize("way", WAYS)
def test_predictions_are_near_measured_memory_and_traffic(runs, way):
    plan, measured = runs
    predicted = next(each for each in plan["ways"] if each["name"] == way)
    assert measured[way]["resident"] == pytest.approx(predicted["resident"], rel=0.1)
    assert (
        0.95 * measured[way]["peak"] < predicted["peak"] < 1.4 * measured[way]["peak"]
    )  # what may be there at a time is not always
    if way != "pipeline parallel":
        assert measured[way]["sent"] == pytest.approx(predicted["sent"], rel=0.1)


def test_what_a_graph_frees_is_not_counted(tmp_path, digits_dir):
    """Eager BatchNormalization keeps outputs that no later operation of a graph reads."""
    resnet = [
        f"--config={ROOT / 'configs' / 'digits.py'}",
        f"--config.data.data_dir={digits_dir}",
        "--config.data.global_batch=256",
        "--config.data.tail=drop",
        "--config.model.name=resnet",
        "--config.model.options={}",
        "--config.model.options.filters=(32,64)",
        "--config.strategy.devices=cpu:0",
    ]
    with group(tmp_path) as members:
        members.start("plan", [PYTHON, "-m", "tfdist", "plan", *resnet, "--devices", "1", "--json"])
        members.start("train", [*RESIDENT, "0", *resnet], **COUNTS_MEMORY)
        members.succeed(TIMEOUT_S)
        (predicted,) = json.loads(members.log("plan"))["ways"]
        (peak,) = re.findall(r"^peak (\d+)$", members.log("train"), re.MULTILINE)
    assert 0.95 * int(peak) < predicted["peak"] < 1.6 * int(peak)  # measured eagerly: 2.1


def test_training_at_the_largest_batch_fills_the_memory(tmp_path, digits_dir):
    memory = 30_000_000
    cnn = [
        f"--config={ROOT / 'configs' / 'digits.py'}",
        f"--config.data.data_dir={digits_dir}",
        "--config.model.options.filters=(64,64)",
        "--config.data.tail=drop",
    ]
    with group(tmp_path) as members:
        find = ["plan", *cnn, "--memory", "30MB", "--find-batch", "--json"]
        members.start("find", [PYTHON, "-m", "tfdist", *find])
        members.succeed(TIMEOUT_S)
        found = json.loads(members.log("find"))
        batches = {way["name"]: way["global_batch"] for way in found["ways"]}
        # Training finds the same batch by itself, on two workers.
        auto = ("data.global_batch=auto", "strategy.device_memory_gb=0.03", "train.epochs=1")
        flags = [*cnn, *(f"--config.{each}" for each in (*auto, f"output.dir={tmp_path / 'auto'}"))]
        train = [PYTHON, "-m", "tfdist", "train", *flags, "--config.parallel.zero=3"]
        tasks(members, ClusterSpec.local(workers=2), train)
        assert found["chosen"] == "FSDP (ZeRO-3)"
        members.succeed(TIMEOUT_S)
    # Two replicas of one process seldom reach their peaks together, so that each has a process.
    (tmp_path / "measured").mkdir()
    with group(tmp_path / "measured") as members:
        script = [*RESIDENT, "0", *cnn]
        batch = "--config.data.global_batch={}"
        one = [*script, batch.format(batches["one device"]), "--config.strategy.devices=cpu:0"]
        members.start("one device", one, **COUNTS_MEMORY)
        sharded = [*script, batch.format(batches["FSDP (ZeRO-3)"]), "--config.parallel.zero=3"]
        tasks(members, ClusterSpec.local(workers=2), sharded, **COUNTS_MEMORY)
        members.succeed(TIMEOUT_S)
        for name in ("one device", "worker-0", "worker-1"):
            (peak,) = re.findall(r"^peak (\d+)$", members.log(name), re.MULTILINE)
            assert 0.95 * int(peak) < memory < 1.4 * int(peak), (name, batches)
    trained_with = json.loads((tmp_path / "auto" / "config.json").read_text())
    expected = pytest.approx(batches["FSDP (ZeRO-3)"], rel=0.1)  # measured anew
    assert trained_with["data"]["global_batch"] == expected


def test_the_plan_takes_the_first_that_fits(runs):
    plan, _ = runs
    assert (plan["chosen"], plan["devices"], plan["memory"]) == ("data parallel", 2, 1_000_000_000)


def test_docs_have_the_predicted_figures(tmp_path, digits_dir):
    text = (ROOT / "docs" / "choosing.md").read_text()
    (command,) = re.findall(
        r"^tfdist (plan .*--config.data.tail=drop --devices 4) --memory 1GB$", text, re.MULTILINE
    )
    plan = [
        PYTHON,
        "-m",
        "tfdist",
        *command.replace("configs", str(ROOT / "configs")).split(),
        f"--config.data.data_dir={digits_dir}",
        "--json",
    ]
    with group(tmp_path) as members:
        members.start("plan", plan)
        members.start("half", [*plan, "--config.train.precision=mixed_float16"])
        members.start(
            "muon",
            [*plan, "--config.train.precision=mixed_float16", "--config.train.optimizer=muon"],
        )
        members.succeed(TIMEOUT_S)
        plan, muon, half = (json.loads(members.log(name)) for name in ("plan", "muon", "half"))
    for way in plan["ways"]:
        (row,) = re.findall(rf"^\| {re.escape(way['name'])} \| ([^|]*) \|", text, re.MULTILINE)
        resident, _, sent = row.split(", ")
        expected = format_bytes(way["resident"]), format_bytes(way["sent"])
        assert (resident, sent) == expected, way["name"]
    refused = {way["name"]: way["refused"] for way in muon["ways"] if way["refused"]}
    assert set(refused) == {"ZeRO-1", "ZeRO-2", "ZeRO-2, bfloat16", "FSDP (ZeRO-3)"}
    assert all("the optimizer Muon cannot be sharded" in why for why in refused.values())
    assert not any(way["refused"] for way in half["ways"])


def test_config_that_cannot_be_built_is_named(tmp_path, digits_dir):
    with group(tmp_path) as members:
        process = members.start(
            "plan",
            [PYTHON, "-m", "tfdist", "plan", *words(digits_dir, "cpu", "--config.model.name=mpl")],
        )
        assert process.wait(TIMEOUT_S) == 78, members.logs()
        assert "model.name: received 'mpl'. Did you mean mlp?" in members.log("plan")
        assert "Traceback" not in members.log("plan")
