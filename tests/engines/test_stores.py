"""Test snapshots, data and models in object stores: moto's S3, and a GCS server of our own.

Both listen on loopback. They can be asked to answer 503 or late, and to cut connections.
"""

import concurrent.futures
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests import object_servers
from tests.processes import ROOT, environment
from tfdist.backup import claim
from tfdist.backup.claim import Superseded
from tfdist.backup.snapshot import Snapshot
from tfdist.backup.store import Store
from tfdist.storage import files, object_store, retries
from tfdist.storage.store_errors import StoreFailed, UnusableStore

pytestmark = pytest.mark.timeout(300)
NEEDS = {"s3": ("moto", "s3fs", "flask"), "gs": ("gcsfs",)}
STATE = Snapshot({"a": np.arange(6.0).reshape(2, 3), "b": np.array(7, np.int64)}, {"epoch": 3})


def skip_without(scheme):
    missing = [name for name in NEEDS[scheme] if importlib.util.find_spec(name) is None]
    if missing:
        packages = "moto[server] s3fs" if scheme == "s3" else "gcsfs"
        pytest.skip(f"needs the PyPI packages {packages}; missing: {', '.join(missing)}")


@pytest.fixture(scope="module")
def s3_server():
    skip_without("s3")
    with object_servers.moto() as server:
        yield server


@pytest.fixture(scope="module")
def gcs_server():
    skip_without("gs")
    with object_servers.gcs() as (_, server):
        yield server


@pytest.fixture(params=["s3", "gs"])
def place(request, monkeypatch, tmp_path):
    """Return (URL of an empty directory, its server, environment of other processes)."""
    return of_scheme(request, monkeypatch, tmp_path, request.param)


@pytest.fixture
def s3_place(request, monkeypatch, tmp_path):
    return of_scheme(request, monkeypatch, tmp_path, "s3")


def of_scheme(request, monkeypatch, tmp_path, scheme):
    server = request.getfixturevalue("s3_server" if scheme == "s3" else "gcs_server")
    make = object_servers.s3_environment if scheme == "s3" else object_servers.gcs_environment
    variables = {**make(server), "TFDIST_CACHE_DIR": str(tmp_path / "cache")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    server.faults.clear()
    object_store._known_buckets.clear()
    if scheme == "s3":
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        if not s3fs.S3FileSystem().exists("bucket"):
            s3fs.S3FileSystem().mkdir("bucket")
    else:
        import gcsfs

        gcsfs.GCSFileSystem.clear_instance_cache()
    folder = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"{scheme}://bucket/{folder}", server, environment(**variables)


# --- Files ----------------------------------------------------------------------------------------
def test_files_are_written_listed_read_and_removed(place, tmp_path):
    url, _, _ = place
    assert not files.exists(url)
    assert files.glob(f"{url}/*") == []
    files.write_whole(f"{url}/a/x.txt", b"hello")
    files.write_pieces(f"{url}/a/y.txt", [b"one", memoryview(b"two")])
    files.write_whole(f"{url}/empty", b"")
    assert files.read(f"{url}/a/y.txt") == b"onetwo"
    assert files.read(f"{url}/empty") == b""
    assert files.list_dir(url) == ["a", "empty"]
    assert files.list_dir(f"{url}/a/") == ["x.txt", "y.txt"]
    assert files.glob(f"{url}/a/*.txt") == [f"{url}/a/x.txt", f"{url}/a/y.txt"]
    assert files.is_dir(f"{url}/a")
    assert not files.is_dir(f"{url}/a/x.txt")
    before = files.stat(f"{url}/a/x.txt")
    assert before.size == 5
    files.write_whole(f"{url}/a/x.txt", b"HELLO")
    assert files.stat(f"{url}/a/x.txt") != before
    with files.open_read(f"{url}/a/y.txt") as file:
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"two"
        file.seek(1)
        assert file.read(3) == b"net"
    files.download(f"{url}/a/y.txt", str(tmp_path / "local"))
    assert (tmp_path / "local").read_bytes() == b"onetwo"
    with pytest.raises(OSError, match="changed while it was read"):
        files.download(f"{url}/a/x.txt", str(tmp_path / "local"), before)
    files.remove(f"{url}/a/x.txt")
    assert not files.exists(f"{url}/a/x.txt")
    with pytest.raises(FileNotFoundError, match=r"no such file\. Correct the path"):
        files.read(f"{url}/a/x.txt")
    files.remove_tree(url)
    assert not files.exists(url)


def test_only_one_process_creates_a_file(place):
    url, _, environ = place
    code = (
        "import sys\n"
        "from tfdist.storage import files\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "try:\n"
        "    files.create(sys.argv[1], sys.argv[2].encode())\n"
        "    print('made')\n"
        "except FileExistsError:\n"
        "    print('taken')\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, f"{url}/claim", name],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second", "third")
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert sorted(answers) == ["made", "taken", "taken"]
    winner = ("first", "second", "third")[answers.index("made")]
    assert files.read(f"{url}/claim") == winner.encode()


# --- Faults ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["503", "slow", "cut", "lost"])
def test_faulty_requests_are_sent_again(place, kind):
    url, server, _ = place
    store = Store(url)
    store.claim()
    for number in range(2):
        server.faults.plan(kind, 2, delay=0.2)
        store.write(Snapshot(STATE.arrays, {"epoch": number}))
        assert not server.faults.left
        server.faults.plan(kind, 2, "GET HEAD", delay=0.2)
        found = Store(url).newest()
        assert not server.faults.left
        assert found.snapshot.facts == {"epoch": number}
        np.testing.assert_array_equal(found.snapshot.arrays["a"], STATE.arrays["a"])
    assert store.numbers() == [0, 1]


def test_claim_whose_answer_was_lost_is_no_loss(place):
    url, server, _ = place
    files.make_dirs(url)
    server.faults.plan("lost", 1, "PUT POST")
    store = Store(url)
    store.claim()
    assert server.faults.failed == 1
    store.write(STATE)


def test_a_store_that_stays_down_is_named_after_the_last_try(s3_place, monkeypatch):
    url, server, _ = s3_place
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.01)
    store = Store(url)
    store.write(STATE)
    server.faults.plan("503", 10**6)
    with pytest.raises(StoreFailed, match=rf"{url}/x: the store did not answer .*start again"):
        files.read(f"{url}/x")
    assert server.faults.failed <= retries.TRIES
    with pytest.raises(OSError, match="did not answer as expected after several tries"):
        store.write(STATE)
    server.faults.clear()
    assert store.numbers() == [0]


def test_a_hanging_server_is_given_up(s3_place, monkeypatch):
    url, server, _ = s3_place
    import s3fs

    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 0.3)
    files.write_whole(f"{url}/x", b"content")
    s3fs.S3FileSystem.clear_instance_cache()
    server.faults.plan("slow", 2, "GET HEAD", delay=5)
    assert files.read(f"{url}/x") == b"content"
    assert server.faults.failed == 2


# --- Places that cannot work ----------------------------------------------------------------------
def test_a_missing_bucket_is_named(place):
    url, _, _ = place
    wrong = url.replace("://bucket/", "://no-such-bucket/")
    message = r"there is no bucket 'no-such-bucket'.*Create it, or correct the name"
    for call in (
        lambda: files.make_dirs(wrong),
        lambda: files.read(wrong),
        lambda: files.write_whole(wrong, b""),
        lambda: files.list_dir(wrong),
        lambda: files.glob(f"{wrong}/*"),
        lambda: Store(wrong).claim(),
        lambda: Store(wrong).write(STATE),
    ):
        with pytest.raises(UnusableStore, match=message):
            call()


def test_missing_credentials_are_named(s3_place, monkeypatch, tmp_path):
    url, _, _ = s3_place
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UnusableStore, match=r"no valid credentials .*Set AWS_ACCESS_KEY_ID"):
        Store(url).claim()


# --- Snapshots ------------------------------------------------------------------------------------
def test_newest_snapshots_are_kept(place):
    url, _, _ = place
    store = Store(url, keep=3)
    store.claim()
    assert store.newest() is None
    for number in range(5):
        store.write(Snapshot(STATE.arrays, {"epoch": number}))
    assert store.numbers() == [2, 3, 4]
    found = Store(url).newest()
    assert found.snapshot.facts == {"epoch": 4}
    for name, array in STATE.arrays.items():
        np.testing.assert_array_equal(found.snapshot.arrays[name], array)
    files.write_whole(store.path(4), files.read(store.path(4))[:-3])
    assert store.newest().number == 3  # the damaged one is skipped
    store.clear()
    assert not files.exists(url)


def test_large_snapshot_is_uploaded_in_parts(s3_place):
    url, server, _ = s3_place
    large = Snapshot({"x": np.arange(15_000_000.0)}, {})  # 120 MB: more than one part
    store = Store(url)
    server.faults.plan("cut", 1, "PUT")
    store.write(large)
    assert server.faults.failed == 1
    server.faults.plan("cut", 1, "GET")
    np.testing.assert_array_equal(store.newest().snapshot.arrays["x"], large.arrays["x"])


def test_the_last_to_claim_a_directory_is_the_only_writer(place):
    url, _, _ = place
    first, second = Store(url), Store(url)
    first.claim()
    first.write(STATE)
    second.claim()
    with pytest.raises(Superseded, match="another one is: process"):
        first.write(STATE)
    with pytest.raises(Superseded):
        first.clear()
    assert second.write(STATE) == 1
    assert files.list_dir(url) == [
        "snapshot-0.tfdist",
        "snapshot-1.tfdist",
        "writer-000001.json",
        "writer-000002.json",
    ]
    Store(url).claim()
    assert claim.names(url)[1:] == ["writer-000002.json", "writer-000003.json"]


def test_an_attempt_that_was_given_up_cannot_take_over(place, monkeypatch):
    """Between its look at the claim and its own claim, a later attempt claims the directory."""
    url, _, _ = place
    Store(url).claim("a", 0)
    create = files.create

    def claimed_before(path, content):
        monkeypatch.setattr(files, "create", create)
        Store(url).claim("a", 2)
        create(path, content)

    monkeypatch.setattr(files, "create", claimed_before)
    with pytest.raises(Superseded, match="because attempt 2 does"):
        Store(url).claim("a", 1)
    assert claim.holder(url)["attempt"] == 2


def test_a_late_upload_of_a_former_writer_replaces_nothing(place, monkeypatch):
    """The claim changes between the check and the upload, which no check can see."""
    url, _, _ = place
    first, second = Store(url), Store(url)
    first.claim()
    create = files.create_pieces

    def overtaken(path, pieces):
        monkeypatch.setattr(files, "create_pieces", create)
        second.claim()
        second.write(Snapshot({}, {"writer": "second"}))
        create(path, pieces)

    monkeypatch.setattr(files, "create_pieces", overtaken)
    with pytest.raises(Superseded):
        first.write(Snapshot({}, {"writer": "first"}))
    assert Store(url).newest().snapshot.facts == {"writer": "second"}


def test_many_writers_race_for_the_claim(place):
    url, _, _ = place
    stores = [Store(url) for _ in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda store: store.claim(), stores))

    def write(store):
        try:
            return store.write(STATE)
        except Superseded:
            return None

    assert [write(store) for store in stores].count(None) == 5


TRAINING = """
import json, os, sys
import keras, numpy as np
import tfdist

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == int(sys.argv[2]):
            os._exit(9)

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
batches = tfdist.data.pipeline((x, x[:, :1]), global_batch=8, seed=1)
strategy = tfdist.make_strategy("one_device", devices="cpu")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.2),
                              keras.layers.Dense(1)])
    model.compile("adam", "mse")
backup = tfdist.BackupAndRestore(sys.argv[1], save_freq=2, delete_checkpoint=False)
history = model.fit(batches, epochs=3, verbose=0, callbacks=[Stop(), backup])
print(json.dumps([history.history["loss"], [v.numpy().tolist() for v in model.variables]]))
"""


def test_killed_training_resumes_bit_equal_to_one_on_a_disk(place, tmp_path):
    url, server, environ = place

    def train(directory, steps, code=0):
        done = subprocess.run(
            [sys.executable, "-c", TRAINING, directory, str(steps)],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == code, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1]) if not code else None

    expected = train(str(tmp_path / "local"), -1)
    train(url, 9, code=9)
    server.faults.plan("503", 2)
    assert train(url, -1) == expected
    assert server.faults.failed == 2


# --- Data -----------------------------------------------------------------------------------------
def numbers_of(batches, epochs=2):
    """Return the labels of some epochs' batches, in order."""
    return [y.numpy().tolist() for epoch in range(epochs) for _, y in batches.of_epoch(epoch, 0)]


def pipeline(source, **options):
    from tfdist import data

    return data.pipeline(source, global_batch=8, seed=5, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a directory of TFRecord files: 100 examples of some 200 bytes in 5 files."""
    from tfdist import data

    directory = tmp_path_factory.mktemp("written") / "numbers"
    x = np.random.default_rng(0).normal(size=(100, 40)).astype(np.float32)
    data.write((x, np.arange(100)), directory, shard_bytes=5_000)
    assert len(list(directory.glob("*.tfrecord"))) > 3
    return directory


def upload(directory, url):
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            files.upload(str(path), f"{url}/{path.name}")


def cached(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.data"))


@pytest.mark.parametrize("access", ["stream", "random"])
def test_records_have_the_order_of_local_ones(place, written, tmp_path, access):
    from tfdist import data

    url, server, _ = place
    upload(written, url)
    expected = numbers_of(pipeline(data.records(written, access=access)))
    batches = pipeline(data.records(url, access=access))
    server.faults.plan("503", 2, "GET")
    assert numbers_of(batches) == expected
    fetched = [(path, path.stat().st_ino) for path in cached(tmp_path)]
    again = pipeline(data.records(f"{url}/*.tfrecord", access=access))
    assert numbers_of(again) == expected
    assert len(fetched) == 5
    assert [(path, path.stat().st_ino) for path in cached(tmp_path)] == fetched
    later = [y.numpy().tolist() for _, y in batches.of_epoch(1, 4)]
    assert later == expected[len(expected) // 2 + 4 :]  # a resumed epoch


def test_cache_stays_within_its_bound_and_fetches_again(s3_place, written, tmp_path, monkeypatch):
    from tfdist import data
    from tfdist.data import remote_cache

    url, _, _ = s3_place
    upload(written, url)
    size = max(path.stat().st_size for path in written.glob("*.tfrecord"))
    monkeypatch.setenv("TFDIST_CACHE_BYTES", str(2 * size + 100))
    monkeypatch.setattr(remote_cache, "PINS", 1)
    remote_cache._cache.cache_clear()
    source = data.records(url, access="stream")
    expected = [int(y) for _, y in data.records(written, access="stream").dataset()]
    for _ in range(2):
        assert [int(y) for _, y in source.dataset()] == expected
        assert sum(path.stat().st_size for path in cached(tmp_path)) <= 2 * size + 100
    with pytest.raises(
        ValueError, match=r'Set TFDIST_CACHE_BYTES to more, or pass access="stream"'
    ):
        data.records(url, access="random")
    monkeypatch.setenv("TFDIST_CACHE_BYTES", "1000")
    with pytest.raises(
        ValueError, match=r"do not fit into the local cache .*Set TFDIST_CACHE_BYTES"
    ):
        remote_cache.of_environment().path(source_file(url))


def source_file(url):
    return files.glob(f"{url}/*.tfrecord")[0]


def test_damaged_and_changed_files_are_fetched_again(s3_place, tmp_path, caplog):
    from tfdist.data.remote_cache import RemoteCache

    url, server, _ = s3_place
    files.write_whole(f"{url}/x", b"content\0\0")
    directory = str(tmp_path / "cache")
    path = RemoteCache(directory, 1000).path(f"{url}/x")
    with open(path, "r+b") as file:
        file.write(b"C")
    assert RemoteCache(directory, 1000).read(f"{url}/x") == b"content\0\0"
    assert "damaged; the file is fetched again" in caplog.text
    requests = server.faults.count["GET"]
    assert RemoteCache(directory, 1000).read(f"{url}/x") == b"content\0\0"
    assert server.faults.count["GET"] == requests
    files.write_whole(f"{url}/x", b"other")
    assert RemoteCache(directory, 1000).read(f"{url}/x") == b"other"


def test_processes_fetch_a_file_once(s3_place, tmp_path):
    url, server, environ = s3_place
    files.write_whole(f"{url}/x", os.urandom(1 << 20))
    code = (
        "import sys\n"
        "from tfdist.data.remote_cache import of_environment\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(len(of_environment().read(sys.argv[1])))\n"
    )
    server.faults.clear()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, f"{url}/x"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    answers = [process.communicate("go\n", timeout=120)[0] for process in processes]
    assert answers == [f"{1 << 20}\n"] * 3
    assert server.faults.count["GET"] <= 4  # one of the content; HEAD or lists ask for its size
    assert len(cached(tmp_path)) == 1


def test_images_tables_and_arrays_are_read(place, tmp_path):
    import tensorflow as tf

    from tfdist import data
    from tfdist.data.sources.catalog import Catalog

    url, _, _ = place
    local = tmp_path / "set"
    for name, value in (("cats", 10), ("dogs", 200)):
        (local / "images" / name).mkdir(parents=True)
        for number in range(3):
            image = tf.fill([4, 6, 3], tf.cast(value + number, tf.uint8))
            path = local / "images" / name / f"{number}.png"
            path.write_bytes(tf.io.encode_png(image).numpy())
            files.upload(str(path), f"{url}/images/{name}/{number}.png")
    (local / "t.csv").write_text("a,b\n1,2\n3,4\n")
    files.upload(str(local / "t.csv"), f"{url}/t.csv")
    np.savez(local / "a.npz", x=np.arange(10.0).reshape(5, 2), y=np.arange(5))
    files.upload(str(local / "a.npz"), f"{url}/a.npz")

    def pixels(directory):
        return [
            (int(image[0, 0, 0]), int(label))
            for image, label in data.image_folder(directory).dataset()
        ]

    assert pixels(f"{url}/images") == pixels(local / "images")
    assert [int(y) for _, y in data.table(f"{url}/t.csv", label="b").dataset()] == [2, 4]
    entry = "points: {kind: arrays, location: LOCATION, label: y}\n"
    (tmp_path / "c.yaml").write_text(entry.replace("LOCATION", f"{url}/a.npz"))
    assert Catalog.load(tmp_path / "c.yaml").source("points", "train").cardinality == 5
    (tmp_path / "c.yaml").write_text(entry.replace("LOCATION", f"{url}/none.npz"))
    with pytest.raises(ValueError, match="there is no file at"):
        Catalog.load(tmp_path / "c.yaml").source("points", "train")


def test_data_sets_are_written(place):
    from tfdist import data
    from tfdist.data.writing.writer import verify

    url, _, _ = place
    x = np.arange(60.0).reshape(20, 3)
    manifest = data.write((x, np.arange(20)), f"{url}/set", shard_bytes=300)
    assert data.write((x, np.arange(20)), f"{url}/set", shard_bytes=300) == manifest
    verify(f"{url}/set")
    assert [int(y) for _, y in data.records(f"{url}/set").dataset()] == list(range(20))
    assert not files.exists(f"{url}/set/.writing")


# --- Models and logs ------------------------------------------------------------------------------
def test_models_are_saved_exported_and_loaded(place):
    import keras
    import tensorflow as tf

    import tfdist

    url, _, _ = place
    tfdist.make_strategy("one_device", devices="cpu")
    x = np.ones((8, 3), np.float32)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    checkpoint = keras.callbacks.ModelCheckpoint(
        f"{url}/c/epoch-{{epoch}}.weights.h5", save_weights_only=True
    )
    best = keras.callbacks.ModelCheckpoint(f"{url}/best.keras", monitor="loss", save_best_only=True)
    table = keras.callbacks.CSVLogger(f"{url}/log.csv")
    model.fit(x, x[:, :2], epochs=2, verbose=0, callbacks=[checkpoint, best, table])
    assert files.list_dir(f"{url}/c") == ["epoch-1.weights.h5", "epoch-2.weights.h5"]
    assert len(files.read(f"{url}/log.csv").splitlines()) == 3
    expected = model.predict(x, verbose=0)
    for name in ("best.keras", "own.keras"):
        if name == "own.keras":
            model.save(f"{url}/{name}")
        loaded = keras.models.load_model(f"{url}/{name}")
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    model.set_weights([w * 0 for w in model.get_weights()])
    model.load_weights(f"{url}/c/epoch-2.weights.h5")
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    model.export(f"{url}/exported", verbose=False)
    assert "saved_model.pb" in files.list_dir(f"{url}/exported")
    assert tf is not None


BOARD = """
import os, sys
import keras, numpy as np
import tfdist

class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == int(sys.argv[2]):
            os._exit(9)

keras.utils.set_random_seed(3)
x = np.ones((16, 4), "float32")
strategy = tfdist.make_strategy("one_device", devices="cpu")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=8, epochs=4, verbose=0, callbacks=[
    tfdist.TensorBoard(sys.argv[1] + "/logs", graph=False), Stop(),
    tfdist.BackupAndRestore(sys.argv[1] + "/backup")])
"""


def curve(directory, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), {"tensors": 0})
    events.Reload()
    return [event.step for event in events.Tensors(name)]


def test_tensorboard_files_are_uploaded_and_go_on_after_a_restart(s3_place, tmp_path):
    url, _, environ = s3_place
    for stop, code in ((2, 9), (-1, 0)):
        done = subprocess.run(
            [sys.executable, "-c", BOARD, url, str(stop)],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == code, done.stderr[-3000:]
    (tmp_path / "train").mkdir()
    for name in files.list_dir(f"{url}/logs/train"):
        files.download(f"{url}/logs/train/{name}", str(tmp_path / "train" / name))
    assert curve(tmp_path / "train", "epoch_loss") == [0, 1, 2, 3]
    assert curve(tmp_path / "train", "speed/step_milliseconds") == [0, 1, 2, 3]


def test_keras_tensorboard_is_refused_where_tensorflow_cannot_write(s3_place):
    import keras

    import tfdist

    url, _, _ = s3_place
    with tfdist.make_strategy("one_device", devices="cpu").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    board = keras.callbacks.TensorBoard(f"{url}/logs")
    with pytest.raises(ValueError, match=r"TensorFlow cannot write .*Use tfdist\.TensorBoard"):
        model.fit(np.ones((8, 3)), np.ones((8, 2)), callbacks=[board])


def test_doctor_tries_a_store(place):
    from tfdist.tools.doctor import probe

    url, _, _ = place
    assert not probe.try_directory(f"{url}/runs").error
    assert not files.exists(url)
    wrong = probe.try_directory(url.replace("://bucket/", "://no-such-bucket/"))
    assert "there is no bucket 'no-such-bucket'" in wrong.error
