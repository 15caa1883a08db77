"""Train on an object store while tasks are killed: the result is that of an undisturbed run."""

import json

import numpy as np
import pytest

from tests.engines.test_stores import gcs_server, of_scheme, s3_server, upload  # noqa: F401
from tests.launches import Launch
from tfdist import data
from tfdist.storage import files

pytestmark = pytest.mark.timeout(580)
PLAN = "kill worker:1@step=4; kill chief@saving; kill worker:1@step=9; kill chief@end"
SCRIPT = """
import json, sys
import keras, numpy as np
import tfdist
from tfdist import data

root, source = sys.argv[1:]
strategy = tfdist.make_strategy("auto")
keras.utils.set_random_seed(2)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
batches = data.pipeline(data.records(source, access="stream"), global_batch=8, seed=3)
history = model.fit(batches, epochs=2, verbose=0, callbacks=[
    tfdist.TensorBoard(root + "/logs", graph=False),
    tfdist.BackupAndRestore(root + "/backup", save_freq=2)])
with open(f"{me}.json", "w") as file:
    json.dump([history.history, [v.numpy().tolist() for v in model.variables]], file)
"""


def trained(directory, root, source, plan):
    directory.mkdir()
    launch = Launch(directory, 280)
    try:
        code, _, err = launch.run(
            *("--allow-remote", "--workers", "2", "--restarts", "5", "--chaos", plan),
            script=SCRIPT,
            command=("task.py", root, source),
        )
    finally:
        left = launch.wait_for_nobody(20)
    assert code == 0, err[-4000:]
    assert not left
    return [json.loads((directory / f"worker:{i}.json").read_text()) for i in range(2)], err


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_killed_tasks_change_nothing(request, monkeypatch, tmp_path, scheme):
    url, server, _ = of_scheme(request, monkeypatch, tmp_path, scheme)
    x = np.random.default_rng(0).normal(size=(56, 4)).astype(np.float32)
    data.write((x, x[:, :1]), tmp_path / "set", shard_bytes=1000)
    upload(tmp_path / "set", f"{url}/set")
    local = tmp_path / "local"
    expected, _ = trained(local, str(local), str(tmp_path / "set"), "none")
    server.faults.plan("503", 5)
    found, err = trained(tmp_path / "store", url, f"{url}/set", PLAN)
    assert found == expected, err[-2000:]
    assert server.faults.failed == 5
    assert files.list_dir(f"{url}/logs") == ["train"]
