"""Test that tracking services get a run's results, on their own files, where they are installed.

A resumed training stays one run.
"""

import importlib.util
import json
import logging
import sys
import types

import pytest

from tfdist.telemetry import services


def needed(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")


def tell(writer):
    """Write a training of two epochs, interrupted after the first, with a new writer for each."""
    for epoch in range(2):
        each = writer()
        each.rewind(epoch, 0)
        each.settings({"optimizer": "adam", "learning_rate": 0.5})
        each.scalars(8 * epoch + 4, {"batch_loss": 3.0 - epoch}, "step")
        each.scalars(epoch, {"loss": 2.0 - epoch})
        each.close()


def test_mlflow_has_one_run_with_all_values(tmp_path, monkeypatch):
    needed("mlflow")
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    tell(lambda: services.MlflowWriter(tmp_path / "run", name="try"))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("tfdist").experiment_id])
    assert (run.info.run_name, run.info.status) == ("try", "FINISHED")
    assert run.data.params == {"optimizer": "adam", "learning_rate": "0.5"}
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [
        (0, 2.0),
        (1, 1.0),
    ]
    assert [
        (m.step, m.value) for m in client.get_metric_history(run.info.run_id, "batch_loss")
    ] == [(4, 3.0), (12, 2.0)]


class _Run:
    """Stand in for a service's run whose network fails once it has begun."""

    id = "r1"
    config: dict = {}

    def define_metric(self, *_, **__):
        pass

    def log(self, *_):
        raise ConnectionError("network is down")

    def finish(self):
        raise ConnectionError("network is down")


class _Client:
    info = types.SimpleNamespace(run_id="r1")
    experiment_id = 0

    def get_experiment_by_name(self, _):
        return self

    def create_run(self, *_, **__):
        return self

    def log_metric(self, *_, **__):
        raise ConnectionError("network is down")

    def set_terminated(self, *_):
        raise ConnectionError("network is down")


@pytest.mark.parametrize(
    ("writer", "package"),
    [
        (services.WandbWriter, types.SimpleNamespace(init=lambda **_: _Run())),
        (services.MlflowWriter, types.SimpleNamespace(MlflowClient=_Client)),
    ],
)
def test_outage_during_a_run_is_logged_once(writer, package, tmp_path, monkeypatch, caplog):
    name = writer.__name__.removesuffix("Writer").lower()
    monkeypatch.setitem(sys.modules, name, package)
    each = writer(tmp_path)
    with caplog.at_level(logging.WARNING, "tfdist"):
        for epoch in range(3):
            each.scalars(epoch, {"loss": 1.0})
        each.close()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{name}: a call failed: ConnectionError: network is down."
    )


@pytest.mark.parametrize(("content", "known"), [(b"r1\n", "r1"), (b"r\xff1", None), (b"", None)])
def test_a_run_whose_id_is_damaged_is_a_new_one(tmp_path, monkeypatch, content, known):
    asked = []

    def init(**options):
        asked.append(options.get("id"))
        return _Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    (tmp_path / "wandb.id").write_bytes(content)
    services.WandbWriter(tmp_path).scalars(0, {"loss": 1.0})
    assert asked == [known]
    assert (tmp_path / "wandb.id").read_text() == "r1\n"


def test_outage_at_the_start_is_an_error(tmp_path, monkeypatch):
    def init(**_):
        raise ConnectionError("network is down")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(ConnectionError):
        services.WandbWriter(tmp_path).scalars(0, {"loss": 1.0})


def test_wandb_offline_has_one_run_with_all_values(tmp_path, monkeypatch):
    needed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tell(lambda: services.WandbWriter(tmp_path / "run", name="try"))
    name = (tmp_path / "run" / "wandb.id").read_text().strip()
    assert name
    files = list((tmp_path / "run").rglob(f"*{name}.wandb"))
    assert files
    logged = [line for path in files for line in history(path)]
    assert [(line["epoch"], line["loss"]) for line in logged if "loss" in line] == [
        (0, 2.0),
        (1, 1.0),
    ]
    assert [(line["step"], line["batch_loss"]) for line in logged if "batch_loss" in line] == [
        (4, 3.0),
        (12, 2.0),
    ]


def history(path):
    """Yield the values in a file of wandb's."""
    from wandb.proto import wandb_internal_pb2

    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }


def records(content):
    """Return the records of a log as LevelDB writes it.

    It writes blocks; each part has its length and tells whether more follow.
    """
    at = 7
    whole = b""
    block = 2**15
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length = int.from_bytes(content[at + 4 : at + 6], "little")
        kind = content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or a last part
            yield whole
            whole = b""


@pytest.mark.parametrize("writer", [services.WandbWriter, services.MlflowWriter])
def test_a_service_that_is_not_installed_is_named(writer, tmp_path):
    package = writer.__name__.removesuffix("Writer").lower()
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"the package {package} is installed")
    with pytest.raises(
        ValueError, match=f"{writer.__name__} needs the package {package}.*pip install {package}"
    ):
        writer(tmp_path)
