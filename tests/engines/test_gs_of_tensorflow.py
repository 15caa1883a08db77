"""Test `gs://` through TensorFlow's own client, which gcsfs replaces where it is installed.

The client knows only the addresses of Google. So client and server run in namespaces of their own,
in which these are loopback addresses, with a certificate made here.
"""

import shutil
import subprocess
import sys

import pytest

from tests.processes import ROOT, environment

pytestmark = pytest.mark.timeout(300)
HOSTS = ("www.googleapis.com", "storage.googleapis.com", "oauth2.googleapis.com")
CODE = """
import os, ssl, sys, threading
from tests import object_servers
ready, served = os.pipe()
if not os.fork():  # TensorFlow holds Python's lock while it waits for the server
    os.close(1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1], sys.argv[2])
    store = object_servers.Gcs()
    server = object_servers.Server(store.handler(), 443, context)
    os.write(served, b"1")
    sys.stdin.read()  # until the test's process ends
    os._exit(0)
os.read(ready, 1)

from tfdist.storage import files
files.is_installed = lambda scheme: False  # gcsfs

import keras, numpy as np
import tfdist
from tfdist import data
from tfdist.backup.claim import Superseded
from tfdist.backup.snapshot import Snapshot
from tfdist.backup.store import Store

url = "gs://bucket/run"
assert not files.through_fsspec(url)
first, second = Store(url), Store(url)
first.claim()
for number in range(3):
    first.write(Snapshot({"x": np.arange(9.0) + number}, {"epoch": number}))
assert first.numbers() == [1, 2]
second.claim()
try:
    first.write(Snapshot({}, {}))
    raise SystemExit("a former writer wrote")
except Superseded:
    pass
found = Store(url).newest()
assert found.snapshot.facts == {"epoch": 2} and found.snapshot.arrays["x"][0] == 2.0
second.clear()

x = np.arange(60.0, dtype="float32").reshape(20, 3)
data.write((x, np.arange(20)), sys.argv[3], shard_bytes=300)
data.write((x, np.arange(20)), "gs://bucket/set", shard_bytes=300)
def order(place, access):
    batches = data.pipeline(data.records(place, access=access), global_batch=4, seed=2)
    return [y.numpy().tolist() for _, y in batches.of_epoch(0, 0)]
for access in ("stream", "random"):
    assert order("gs://bucket/set", access) == order(sys.argv[3], access)

with tfdist.make_strategy("one_device", devices="cpu").scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
model.fit(x, x, verbose=0, callbacks=[
    tfdist.TensorBoard("gs://bucket/logs"), tfdist.BackupAndRestore("gs://bucket/backup")])
model.save("gs://bucket/m.keras")
loaded = keras.models.load_model("gs://bucket/m.keras")
assert (loaded.predict(x, verbose=0) == model.predict(x, verbose=0)).all()
assert any("events.out" in name for name in files.list_dir("gs://bucket/logs/train"))
print("all right", flush=True)
os._exit(0)
"""


def test_snapshots_data_logs_and_models(tmp_path):
    missing = [name for name in ("unshare", "ip", "mount", "openssl") if not shutil.which(name)]
    if missing:
        pytest.skip(f"needs the programs {', '.join(missing)}")
    names = ",".join(f"DNS:{name}" for name in HOSTS)
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=test", "-addext", f"subjectAltName={names}"),
            *("-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
    hosts = "".join(f"127.0.0.1 {name}\n" for name in ("localhost", *HOSTS))
    (tmp_path / "hosts").write_text(hosts)
    inside = f"mount --bind {tmp_path}/hosts /etc/hosts && ip link set lo up"
    spaces = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c"]
    allowed = subprocess.run([*spaces, inside], capture_output=True, text=True, timeout=60)
    if allowed.returncode:
        pytest.skip(f"namespaces are refused here: {allowed.stderr.strip()}")
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    variables = environment(
        CURL_CA_BUNDLE=certificate, NO_GCE_CHECK="true", TFDIST_CACHE_DIR=str(tmp_path / "cache")
    )
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        variables.pop(name, None)
    errors = (tmp_path / "errors").open("w")
    process = subprocess.Popen(
        [
            *(*spaces, f'{inside} && exec "$@"', "sh", sys.executable, "-c", CODE),
            *(certificate, key, str(tmp_path / "set")),
        ],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.PIPE,  # its end ends the server
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    try:
        out = process.stdout.read()
        code = process.wait(30)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        errors.close()
    assert code == 0, (tmp_path / "errors").read_text()[-4000:]
    assert out.splitlines()[-1] == "all right"
