"""Test a data pipeline by way of data workers in this process: the same elements in the same order.

Also test that what cannot go there is refused.
"""

import itertools
import os
import time

import numpy as np
import pytest
import tensorflow as tf

from tfdist.cluster import spec
from tfdist.cluster.addresses import Presence, free_ports
from tfdist.data import of_generator, pipeline, portable, service

X = np.arange(22, dtype=np.float32)
Y = np.arange(22) % 3


@pytest.fixture(scope="module")
def data_workers(tmp_path_factory):
    """Start two data workers, and return their addresses."""
    ports = [service.serve("127.0.0.1:0", str(tmp_path_factory.mktemp("data"))) for _ in range(2)]
    return [f"127.0.0.1:{port}" for port in ports]


def noisy(x, y, seed):
    return {"x": x, "noise": tf.random.stateless_uniform([3], seed)}, y


def values(elements):
    return [
        [np.asarray(part).tolist() for part in tf.nest.flatten(element)] for element in elements
    ]


def counted(epoch, first, stride):
    return tf.data.Dataset.range(first, 7, stride).map(lambda step: (epoch, step))


def at(epoch, first):
    return tf.data.Dataset.from_tensors(
        (tf.constant(epoch, tf.int64), tf.constant(first, tf.int64))
    )


# --- Order ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def both(data_workers):
    """Return a data pipeline without service, and the same by way of two data workers."""
    return [
        pipeline((X, Y), 4, seed=3, transform=noisy, service=addresses)
        for addresses in (None, data_workers)
    ]


def test_epochs_are_those_of_the_pipeline_without_service(both, data_workers):
    plain, served = both
    one = pipeline((X, Y), 4, seed=3, transform=noisy, service=data_workers[:1])
    assert served.element_spec == one.element_spec == plain.element_spec
    expected = [values(plain) for _ in range(2)]
    assert [values(served) for _ in range(2)] == expected
    assert values(one) == expected[0]
    assert values(one.of_epoch(1, first_step=3)) == expected[1][3:]


def test_workers_that_read_at_the_same_time_get_their_own_rows(data_workers):
    expected, shares = (
        [batches.replica_rows(index, 1, 2, epoch=1, first_step=1) for index in range(2)]
        for batches in (pipeline((X, Y), 4, seed=3, service=each) for each in (None, data_workers))
    )
    steps = list(zip(*map(values, shares), strict=True))
    assert len(steps) == 5
    assert steps == list(zip(*map(values, expected), strict=True))


@pytest.mark.parametrize("steps", [7, None])
def test_pass_begins_and_ends_at_any_step_and_reads_its_position_once(steps, data_workers):
    asked = zip(itertools.count(), itertools.cycle([0, 5, 7]))

    def position(_):
        where = tf.numpy_function(
            lambda: tuple(map(np.int64, next(asked))), [], (tf.int64, tf.int64)
        )
        return tuple(tf.ensure_shape(x, []) for x in where)

    served = service.distribute(
        counted,
        tf.data.Dataset.from_tensors(0).map(position),
        data_workers,
        steps=steps,
        name="counted",
    )
    for epoch, first in enumerate((0, 5, 7, 0)):
        assert values(served) == [[epoch, step] for step in range(first, 7)]


def test_structures_of_all_kinds_are_sent_unchanged(data_workers):
    def make(epoch, first, stride):
        def one(step):
            ragged = tf.RaggedTensor.from_row_lengths(tf.range(step), [step])
            sparse = tf.sparse.from_dense(tf.one_hot([step], 4))
            return {
                "ragged": ragged,
                "sparse": sparse,
                "text": tf.strings.as_string(step),
                "half": tf.cast(step, tf.bfloat16),
            }

        return tf.data.Dataset.range(first, 4, stride).map(one)

    served = service.distribute(make, at(0, 1), data_workers, steps=4, name="kinds")
    plain = make(tf.constant(0, tf.int64), tf.constant(1, tf.int64), 1)
    assert served.element_spec == plain.element_spec
    for ours, theirs in zip(served, plain, strict=True):
        for a, b in zip(
            *(tf.nest.flatten(x, expand_composites=True) for x in (ours, theirs)), strict=True
        ):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_transforms_may_use_lookup_tables(data_workers):
    keys = tf.constant([0, 1, 2], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 5), -1)
    batches = pipeline(np.arange(4), 2, shuffle=False, transform=table.lookup, service=data_workers)
    assert [batch.numpy().tolist() for batch in batches] == [[0, 5], [10, -1]]


def test_a_lost_element_is_an_error_and_not_a_gap(data_workers):
    part = tf.data.Dataset.from_tensor_slices(([0, 2], ["a", "c"])).map(
        lambda n, x: (tf.cast(n, tf.int64), x)
    )
    checked = tf.data.Dataset.zip((tf.data.Dataset.counter(), part)).map(
        lambda n, p: service._check_number(n, p, 1)
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="an element from a data worker was lost"
    ):
        list(checked)


ALONE = """
import faulthandler, numpy as np, tensorflow as tf
from tfdist.data import pipeline, service
service.TICK_US = 1
state = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name="state")
tf.raw_ops.AssignVariableOp(resource=state, value=tf.constant(""))
faulthandler.dump_traceback_later(60, exit=True)
for _ in range(4):
    ticks = service._status_ticks(state).prefetch(2)
    for _ in range(50):
        next(iter(ticks))
print("ended")
tf.keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()
pipeline(np.arange(10), 2, seed=1, service=["127.0.0.1:1"])
"""


def test_abandoned_pass_ends_and_deterministic_operations_are_refused(
    run_python,
):
    """Run in a process of its own, as it might hang, and its operations stay deterministic."""
    ended = run_python(ALONE)
    assert ended.stdout == "ended\n", ended.stderr
    assert (
        "ValueError: service: data workers cannot run the data pipeline of arrays after tf.config"
        in ended.stderr
    )


# --- What it leaves -------------------------------------------------------------------------------
def test_old_pipelines_are_removed(tmp_path):
    (tmp_path / "datasets").mkdir()
    old = tmp_path / "datasets" / "1000"
    new = tmp_path / "datasets" / "1001"
    for path in (old, new):
        path.write_bytes(b"graph")
    os.utime(old, (time.time() - 2 * service.KEEP_S,) * 2)
    service._sweep(str(tmp_path))
    assert not old.exists()
    assert new.exists()


# --- What cannot go to data workers ---------------------------------------------------------------
def python_map(x, y):
    return tf.ensure_shape(tf.numpy_function(lambda v: v + 1, [x], tf.float32), []), y


def with_variable():
    variable = tf.Variable(2.0)
    return lambda x, y: (x * variable, y)


@pytest.mark.parametrize(
    ("source", "options", "cause"),
    [
        (lambda: (X, Y), lambda: {"transform": python_map}, "runs Python code"),
        (lambda: (X, Y), lambda: {"transform": with_variable()}, "uses a tf.Variable"),
        (lambda: (np.zeros([40, 2**20], np.float32), np.zeros(40)), dict, "160 MiB of data"),
        (
            lambda: of_generator(lambda: iter([1, 2, 3]), tf.TensorSpec([], tf.int64), 3),
            dict,
            "runs Python code",
        ),
    ],
)
def test_data_bound_to_this_process_are_refused_at_once(source, options, cause):
    nobody = [f"127.0.0.1:{free_ports(1)[0]}"]
    with pytest.raises(ValueError, match=cause) as raised:
        pipeline(source(), 2, service=nobody, **options())
    assert "pass service=None" in str(raised.value)


def test_caches_and_shuffles_do_not_bind_data_to_this_process():
    dataset = tf.data.Dataset.range(5).cache().shuffle(3, seed=1).map(lambda x: x + 1)
    assert portable.bound_to_process(portable.graph_of(dataset)) is None


# --- Addresses ------------------------------------------------------------------------------------
def test_service_none_uses_no_data_workers():
    assert service.addresses_of(None) == service.addresses_of(False) == ()


def test_service_true_uses_the_data_workers_of_the_launch(monkeypatch):
    monkeypatch.setenv(spec.DATA_WORKERS, "127.0.0.1:5050, 127.0.0.1:5051")
    assert service.addresses_of(True) == ("127.0.0.1:5050", "127.0.0.1:5051")
    monkeypatch.delenv(spec.DATA_WORKERS)
    with pytest.raises(ValueError, match="tfdist launch --data-workers N"):
        service.addresses_of(True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("127.0.0.1:5050", r"a list of addresses, received the text '127.0.0.1:5050'"),
        (["127.0.0.1"], "'127.0.0.1' is not host:port"),
        (["a:1", "a:1"], "'a:1' is there twice"),
        ([], "at least one address"),
    ],
)
def test_wrong_addresses_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        service.addresses_of(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:1,b", "data:1: address 'b' is not host:port"),
        ("a:1,a:1", "data:1: address 'a:1' is there twice"),
    ],
)
def test_a_wrong_variable_is_named(text, message):
    with pytest.raises(ValueError, match=f"TFDIST_DATA_WORKERS: {message}"):
        spec.data_workers({"TFDIST_DATA_WORKERS": text})


# --- Absence --------------------------------------------------------------------------------------
def test_missing_data_workers_are_named_after_the_start_timeout():
    there = {"a:1": False, "b:1": False}
    now = [0.0]
    presences = [
        Presence(address, probe=lambda address, _: there[address], clock=lambda: now[0])
        for address in there
    ]
    assert service.check_workers(presences) == "?"
    there["a:1"] = True
    assert service.check_workers(presences) == "?"
    now[0] = service.START_S + 1
    assert service.check_workers(presences).startswith("data:1 at b:1 never answered")
    there["b:1"] = True
    assert service.check_workers(presences) == ""
    there["a:1"] = False
    assert service.check_workers(presences) == ""
    now[0] += service.RETURN_S + 1
    assert service.check_workers(presences).startswith("data:0 at a:1 no longer answers")
    there["a:1"] = True
    assert service.check_workers(presences) == ""


def test_data_worker_that_never_starts_is_named(monkeypatch):
    monkeypatch.setattr(service, "START_S", 1.0)
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"data:0 at {nobody} never answered"):
        list(pipeline((X, Y), 4, service=[nobody]))


@pytest.mark.parametrize("words", [[], ["127.0.0.1"], ["a:1", "b:1"]])
def test_a_wrong_command_line_is_a_configuration_error(words, capsys):
    with pytest.raises(SystemExit) as ended:
        service.main(words)
    assert ended.value.code == 78
    assert "data worker: address" in capsys.readouterr().err
