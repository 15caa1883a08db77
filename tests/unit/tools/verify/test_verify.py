"""Test `tfdist verify`: differences, their causes, the steps shown, and refused arguments."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.processes import ROOT, environment, is_gone
from tfdist.runtime.guardian import Guardian
from tfdist.tools.verify import main as command
from tfdist.tools.verify import rendering
from tfdist.tools.verify.causes import likely
from tfdist.tools.verify.compare import compare
from tfdist.tools.verify.probes import (
    disable_dropout_and_noise,
    fingerprints,
    first_rows,
    layers_of,
    reverse,
)
from tfdist.tools.verify.processes import RecordingFailed, reason, run
from tfdist.tools.verify.recording import (
    EXAMPLES,
    GRADIENTS,
    LOGS,
    OPTIMIZER,
    SEEDS,
    STATISTICS,
    WEIGHTS,
    Recording,
    Variable,
    read,
    relative,
)

VARIABLES = (
    Variable(WEIGHTS, "dense/kernel", "Dense", gradient=0),
    Variable(WEIGHTS, "dense/bias", "Dense", gradient=1),
    Variable(STATISTICS, "norm/moving_mean", "BatchNormalization"),
    Variable(WEIGHTS, "last/kernel", "Dense", gradient=2),
    Variable(OPTIMIZER, "adam/velocity"),
    Variable(SEEDS, "dropout/seed"),
)
STEPS = 3


def recording(**changes):
    """Return a recording.

    `changes` are functions of (step, value) by the beginning of an array's name after its step.
    """
    arrays = {}
    for step in range(STEPS + 1):
        for index in range(len(VARIABLES)):
            arrays[f"{step}/state/{index}"] = (
                np.arange(1.0, 5.0)
                * (index + 1)
                * (1 + 0.1 * step * (VARIABLES[index].kind != SEEDS))
            )
        arrays[f"{step}/copies"] = np.zeros(len(VARIABLES))
        if step:
            arrays[f"{step}/logs"] = np.array([2.0 / step, 0.1 * step])
            arrays[f"{step}/rows"] = np.arange(8) + 8 * step
            for index in range(3):
                arrays[f"{step}/gradient/{index}"] = np.array(1.0 + index)
    for name, value in arrays.items():
        step, _, rest = name.partition("/")
        for beginning, change in changes.items():
            if rest.startswith(beginning.replace("__", "/")):
                arrays[name] = change(int(step), value)
    return Recording(VARIABLES, ("loss", "accuracy"), STEPS, arrays=arrays)


def halves(whole):
    """Return the recordings of two workers that share the rows of a recording."""
    parts = []
    for rank in range(2):
        rows = {
            f"{step}/rows": whole.rows(step)[4 * rank : 4 * rank + 4]
            for step in range(1, STEPS + 1)
        }
        parts.append(dataclasses.replace(whole, replicas=2, arrays={**whole.arrays, **rows}))
    return parts


def comparison_of(workers, rounding=None, tolerance=1e-4):
    return compare(recording(), workers, rounding, tolerance)


def test_equal_recordings_are_the_same():
    comparison = comparison_of(halves(recording()), recording())
    assert comparison.same
    assert comparison.largest(WEIGHTS).value == 0
    assert comparison.steps == STEPS


def test_the_first_difference_is_the_earliest_and_foremost():
    late = recording(
        state__3=lambda step, x: x * (1 + 0.01 * (step >= 2)),
        state__0=lambda step, x: x * (1 + 0.01 * (step >= 2)),
    )
    first = comparison_of(halves(late)).first
    assert (first.step, first.kind, first.name) == (2, WEIGHTS, "dense/kernel")
    assert first.value == pytest.approx(0.01)


def test_rounding_errors_are_no_difference():
    noisy = recording(state__4=lambda step, x: x * (1 + 1e-3 * (step > 0)))
    assert not comparison_of(halves(noisy)).same
    comparison = comparison_of(
        halves(noisy), rounding=recording(state__4=lambda step, x: x * (1 - 1e-3 * (step > 0)))
    )
    assert comparison.same
    assert comparison.lenient == ["adam/velocity"]
    far = recording(state__4=lambda step, x: x * (1 + 0.1 * (step > 0)))
    assert not comparison_of(
        halves(far), rounding=recording(state__4=lambda step, x: x * (1 - 1e-3 * (step > 0)))
    ).same


@pytest.mark.parametrize("far", [lambda step, x: x * 1.1, lambda step, x: x * np.inf])
def test_no_rounding_allows_an_unscaled_loss(far):
    unscaled = recording(gradient=lambda step, x: 2 * x, logs=lambda step, x: 2 * x)
    comparison = comparison_of(halves(unscaled), rounding=recording(gradient=far, logs=far))
    assert not comparison.same
    assert not rendering.facts({"compiled": comparison}, [])["same"]
    text = " ".join(rendering.verdict({"compiled": comparison}, [], "2 devices"))
    assert text.startswith("NOT COMPARED: step 1: loss differs by") == (not comparison.differs)
    assert ("?" in rendering.table({"compiled": comparison})[1]) == (not comparison.differs)
    near = comparison_of(
        halves(recording(gradient=lambda step, x: 1.005 * x)),
        rounding=recording(gradient=lambda step, x: x * 1.0004),
    )
    assert near.same
    assert near.largest("gradients' norms").allowed <= 0.01


def test_weights_whose_gradients_are_rounding_are_set_apart_and_others_are_not():
    noisy = {"state__1": lambda step, x: x * (1 + 0.3 * (step > 0))}
    comparison = comparison_of(halves(recording(**noisy)), rounding=recording(**noisy))
    assert comparison.same
    assert comparison.lenient == ["dense/bias"]
    boundless = comparison_of(
        halves(recording(**noisy)),
        rounding=recording(state__1=lambda step, x: x * (np.inf if step else 1)),
    )
    assert not boundless.same
    begun = {"state__1": lambda step, x: x * 1.3}
    assert (
        comparison_of(halves(recording(**begun)), rounding=recording(**begun)).first.step == 0
    )  # nothing is rounded before the first step


def test_nonfinite_loss_is_not_compared():
    broken = recording(logs=lambda step, x: x if step < 2 else x * np.nan)
    comparison = compare(broken, halves(broken), broken, 1e-4)
    assert not comparison.same
    assert (
        rendering.verdict({"compiled": comparison}, [], "2 devices")[0]
        == "NOT COMPARED: step 2: loss of one replica is not finite."
    )
    assert not rendering.facts({"compiled": comparison}, [])["same"]


def test_nothing_recorded_is_never_the_same(tmp_path):
    assert rendering.verdict({}, [], "2 devices")[0].startswith(
        "NOT COMPARED: nothing was recorded"
    )
    assert not rendering.facts({}, [])["same"]
    recording().write(tmp_path / "a.npz")
    got, missing = read(
        {"compiled": [tmp_path / "a.npz", tmp_path / "b.npz"], "eager": [tmp_path / "a.npz"]}
    )
    assert list(got) == ["eager"]
    assert "worker 1 wrote no recording of the steps 'compiled'" in missing


def test_each_worker_is_compared_with_the_chief():
    both = halves(recording())
    both[1] = dataclasses.replace(
        both[1], arrays={**both[1].arrays, "2/logs": both[1].arrays["2/logs"] * 1.1}
    )
    first = comparison_of(both, recording()).first
    assert (first.step, first.kind, first.name, first.worker) == (2, LOGS, "loss", 1)
    assert "step 2, worker 1: loss differs" in " ".join(rendering.first(comparison_of(both)))
    both = halves(recording())
    both[1] = dataclasses.replace(both[1], arrays={**both[1].arrays, "3/gradient/2": np.array(4.0)})
    first = comparison_of(both, recording()).first
    assert (first.step, first.name, first.worker) == (3, "last/kernel", 1)


def test_a_worker_with_fewer_steps_is_a_difference():
    both = halves(recording())
    short = {name: value for name, value in both[1].arrays.items() if not name.startswith("3/")}
    both[1] = dataclasses.replace(both[1], steps=2, arrays=short)
    comparison = comparison_of(both, recording())
    assert not comparison.same
    assert (comparison.rows.step, comparison.rows.missing) == (3, 4)
    assert (comparison.first.kind, comparison.first.worker) == (EXAMPLES, 1)
    assert "end at a different step" in likely(dataclasses.replace(comparison, rows=None), [])
    assert "the number of steps (2, and 3 of one replica)" in " ".join(
        rendering.verdict({"compiled": comparison}, [], "2 workers")
    )


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"state__0": lambda step, x: x + 0.5}, "initial weights differ"),
        (
            {"gradient": lambda step, x: 2 * x, "state__4": lambda step, x: x * 4**step},
            "all gradients are 2 times too large: the step sums them",
        ),
        ({"gradient": lambda step, x: x / 2}, "2 times too small: the loss is a sum"),
        ({"gradient": lambda step, x: 3 * x}, "all gradients are 3 times"),
        (
            {"state__2": lambda step, x: x * (1 + 0.1 * step), "logs": lambda step, x: x * 1.1},
            r"^norm normalizes with .*synchronized=True",
        ),
        (
            {"gradient": lambda step, x: x**1.1, "logs": lambda step, x: x * 1.1},
            r"rows of a batch depend on each other.*all_gather_rows",
        ),
        (
            {"gradient": lambda step, x: x**1.1},
            r"the loss agrees, and gradients do not.*clipnorm.*depend on each other",
        ),
        ({"logs": lambda step, x: x * 1.1}, "only what is reported differs: loss, accuracy"),
        ({"state__3": lambda step, x: x * (1 + 0.1 * step)}, "something other than the optimizer"),
        ({"copies": lambda step, x: x + 0.1 * step}, "copies of dense/kernel differ"),
    ],
)
def test_a_pattern_has_its_cause(changes, cause):
    blames_no_layer = "only" in cause or "depend" in cause
    workers = [
        dataclasses.replace(worker, local_replicas=2) for worker in halves(recording(**changes))
    ]
    variables = (
        tuple(v for v in VARIABLES if v.kind != STATISTICS) if blames_no_layer else VARIABLES
    )
    workers = [dataclasses.replace(worker, variables=variables) for worker in workers]
    comparison = comparison_of(workers)
    if blames_no_layer:
        comparison = dataclasses.replace(
            comparison, differences=tuple(d for d in comparison.differences if d.kind != STATISTICS)
        )
    with pytest.raises(ValueError, match=cause):
        raise ValueError(likely(comparison, []))


def test_a_difference_without_gradients_is_no_known_pattern():
    comparison = comparison_of(halves(recording(state__3=lambda step, x: x * (1 + 0.1 * step))))
    without = dataclasses.replace(
        comparison, differences=tuple(d for d in comparison.differences if d.kind != GRADIENTS)
    )
    assert (
        "no pattern can be found without whole gradients: with parallel.zero each replica has only"
        in likely(without, [])
    )


def test_weights_that_each_replica_assigns_without_gradients_are_named():
    changes = {"state__3": lambda step, x: x * (1 + 0.1 * step), "copies": lambda step, x: x + step}
    workers = [dataclasses.replace(each, local_replicas=2) for each in halves(recording(**changes))]
    comparison = comparison_of(workers)
    without = dataclasses.replace(
        comparison, differences=tuple(d for d in comparison.differences if d.kind != GRADIENTS)
    )
    assert "copies of dense/kernel differ" in likely(without, [])
    assert "optimizer.apply(gradients, variables)" in likely(without, [])


def test_the_first_rows_of_a_batch():
    ragged = tf.ragged.constant([[1], [2, 3], [4]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0]])
    dense, ragged, sparse, scalar = first_rows((tf.range(3), ragged, sparse, tf.constant(7)), 2)
    assert dense.numpy().tolist() == [0, 1]
    assert ragged.to_list() == [[1], [2, 3]]
    assert tf.sparse.to_dense(sparse).numpy().tolist() == [[1, 0], [0, 2]]
    assert int(scalar) == 7


def test_rows_on_several_workers_overlap():
    both = halves(recording())
    rows = {f"{step}/rows": both[0].rows(step) for step in range(1, STEPS + 1)}
    both[1] = dataclasses.replace(both[1], arrays={**both[1].arrays, **rows})
    comparison = comparison_of(both)
    assert (comparison.rows.step, comparison.rows.shared, comparison.rows.missing) == (1, 4, 4)
    assert "shards overlap" in likely(comparison, [])


def test_reordered_rows_are_distinguished_from_overlapping_shards():
    other = halves(recording(rows=lambda step, x: x + 1000 * (step > 1)))
    comparison = comparison_of(other)
    assert (comparison.rows.step, comparison.rows.strange) == (2, 8)
    assert "other examples" in likely(comparison, [])


def test_a_difference_of_uncompiled_steps_alone_has_its_cause():
    ways = {
        "compiled": comparison_of(halves(recording())),
        "not compiled": comparison_of(halves(recording(gradient=lambda step, x: 2 * x))),
    }
    text = " ".join(" ".join(rendering.verdict(ways, [], "2 workers")).split())
    assert "NOT THE SAME: not compiled." in text
    assert "Likely cause: only steps that are not compiled differ" in text


def test_table_marks_differences():
    comparison = comparison_of(halves(recording(gradient=lambda step, x: 2 * x)))
    lines = rendering.table({"compiled": comparison})
    assert lines[1].count("!") == 1
    assert (
        rendering.facts({"compiled": comparison}, [])["ways"]["compiled"]["first"]["name"]
        == "dense/kernel"
    )


def test_random_numbers_that_are_drawn_leave_nothing_proved():
    same = {"compiled": comparison_of(halves(recording()))}
    assert rendering.verdict(same, [], "2 devices")[0].startswith("The same: 2 devices compute")
    assert rendering.verdict(same, ["dropout/seed"], "2 devices")[0].startswith("NOT COMPARED")
    assert not rendering.facts(same, ["dropout/seed"])["same"]


def test_a_recording_survives_its_file(tmp_path):
    written = dataclasses.replace(recording(), silenced=("dropout",))
    written.write(tmp_path / "x.npz")
    read = Recording.read(tmp_path / "x.npz")
    assert dataclasses.replace(read, arrays={}) == dataclasses.replace(written, arrays={})
    assert relative(read.arrays["2/state/0"], written.arrays["2/state/0"]) == 0
    assert not read.draws()
    drawing = recording(state__5=lambda step, x: x + step)
    assert drawing.draws() == ["dropout/seed"]


# --- What passes through a step -------------------------------------------------------------------
def test_no_flipped_bit_changes_a_recording(tmp_path):
    path = tmp_path / "x.npz"
    written = Recording(VARIABLES, ("loss",), 1, arrays={"1/rows": np.arange(4)})
    written.write(path)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            again = Recording.read(path)
        except ValueError as error:
            unchanged = str(error).startswith(f"{path}: damaged: ") and "\n" not in str(error)
        else:  # a time, or another field that nothing reads
            arrays = {name: array.tolist() for name, array in again.arrays.items()}
            unchanged = again == dataclasses.replace(written, arrays=again.arrays)
            unchanged = unchanged and arrays == {"1/rows": [0, 1, 2, 3]}
        assert unchanged, bit


def test_fingerprints_are_those_of_rows():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (2000, 5), np.uint8)
    y = rng.normal(size=2000).astype(np.float32)
    whole = fingerprints((x, tf.constant(y), tf.constant([str(i) for i in range(2000)]))).numpy()
    assert len(set(whole.tolist())) == 2000
    images = fingerprints(tf.constant(x)).numpy()
    assert len(set(images.tolist())) == len({tuple(row) for row in x.tolist()})
    np.testing.assert_array_equal(fingerprints(tf.constant(x[::-1][:7])).numpy(), images[::-1][:7])


def several(order):
    """Return a batch of a ragged, a nested ragged and a sparse tensor, its rows in this order."""
    ragged = tf.gather(tf.ragged.constant([[1, 2], [], [2, 1], [1, 2]]), order)
    nested = tf.gather(tf.ragged.constant([[["a"], []], [["b"]], [[], ["a"]], [["a"], []]]), order)
    dense = np.array([[0, 3.0], [4.0, 0], [3.0, 0], [0, 3.0]])[order]
    return ragged, nested, tf.sparse.from_dense(dense)


def test_fingerprints_of_ragged_and_sparse_rows():
    for part in range(3):
        numbers = fingerprints(several([0, 1, 2, 3])[part]).numpy()
        assert numbers[0] == numbers[3]
        assert len(set(numbers.tolist())) == 3
        np.testing.assert_array_equal(
            fingerprints(several([2, 0, 1])[part]).numpy(), numbers[[2, 0, 1]]
        )
    assert fingerprints({"scale": tf.constant(1.0)}).shape == [0]


def test_all_of_a_batch_is_reversed_or_nothing():
    labels = tf.constant([0, 1, 2, 3])
    *parts, reversed_labels = tf.function(reverse)((*several([0, 1, 2, 3]), labels))
    np.testing.assert_array_equal(reversed_labels, labels[::-1])
    for part, expected in zip(parts, several([3, 2, 1, 0]), strict=True):
        np.testing.assert_array_equal(fingerprints(part).numpy(), fingerprints(expected).numpy())
    other = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]))
    assert reverse((other, labels))[1] is labels


class Nested(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.parts = {
            "a": [keras.layers.Dropout(0.5)],
            "b": keras.layers.LSTM(3, dropout=0.2, recurrent_dropout=0.3),
        }

    def call(self, x, training=False):
        return self.parts["b"](self.parts["a"][0](x, training=training), training=training)


def test_dropout_is_silenced_however_deep():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 3))
    y = keras.layers.MultiHeadAttention(1, 2, dropout=0.5)(inputs, inputs)
    model = keras.Model(inputs, Nested()(keras.layers.GaussianNoise(1.0)(y)))
    x = np.ones((2, 4, 3), np.float32)
    assert not np.allclose(model(x, training=True), model(x))
    assert len(disable_dropout_and_noise(model)) >= 4
    np.testing.assert_allclose(model(x, training=True), model(x))
    assert disable_dropout_and_noise(model) == []
    assert (
        len([layer for layer in layers_of(model) if isinstance(layer, keras.layers.Dropout)]) == 2
    )


# --- Processes and words --------------------------------------------------------------------------
def test_a_process_that_takes_too_long_is_ended_and_named(tmp_path):
    (tmp_path / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    with pytest.raises(
        RecordingFailed, match=r"two workers had not taken its steps after 2 s.*--timeout"
    ) as info:
        run(
            ["timeit", "-n1", "-r1", f"exec(open({str(tmp_path / 'slow.py')!r}).read())"],
            tmp_path / "log",
            2.0,
            "two workers",
        )
    assert info.value.code is None
    assert "begun" in str(info.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_processes_end_when_verify_does(tmp_path, number):
    script = (
        "import pathlib, signal, sys\n"
        "from tfdist.runtime.termination import ending\n"
        "from tfdist.tools.verify.processes import run\n"
        "with ending():\n"
        "    run(['timeit', '-n1', '-r1', sys.argv[2]], pathlib.Path(sys.argv[1]) / 'log', 60.0, "
        "'it')\n"
    )
    recorder = (
        "import os, pathlib, time; "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), recorder], cwd=ROOT, env=environment()
    ) as owner:
        end = time.monotonic() + 30
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(1)
        assert owner.poll() is None
        os.kill(owner.pid, number)
        assert owner.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    pid = int((tmp_path / "pid").read_text())
    while not is_gone(pid):
        assert time.monotonic() < end + 30
        time.sleep(0.1)


def test_a_log_that_cannot_be_written_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(Guardian, "__init__", lambda self: None)
    ended = []
    monkeypatch.setattr(Guardian, "__exit__", lambda self, *_: ended.append(self))
    with pytest.raises(FileNotFoundError):
        run(["timeit"], tmp_path / "missing" / "log", 1.0, "it")
    assert len(ended) == 1


def test_the_reason_is_the_launchers_root_cause(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "noise\n"
        + "-" * 72
        + (
            "\nROOT CAUSE: worker:1 failed: KeyError: 'x'\n  log:     a\n\n  line\n\nThe other "
            "tasks:\n  worker:0\n"
        )
        + "-" * 72
    )
    assert reason(log, 1) == "worker:1 failed: KeyError: 'x'\n\n  line"
    log.write_text("noise\nerror: data.name: no such\n")
    assert reason(log, 1) == "data.name: no such"
    log.write_text("no space left\n")
    assert reason(log, 3) == "its process ended with code 3.\n  The end of log:\n  no space left"
    log.write_text("")
    assert reason(log, -11) == "its process was ended by SIGSEGV."


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config: expected a config file"),
        (
            ["--config=a.py", "--strategy=miror"],
            "--strategy: expected one of .* Did you mean mirrored",
        ),
        (
            ["--config=a.py", "--strategy=parameter_server"],
            "expected a synchronous strategy, received parameter_server.*compare the final",
        ),
        (
            ["--config=a.py", "--workers=1"],
            "--workers: expected at least 2 with multi_worker_mirrored",
        ),
        (
            ["--config=a.py", "--workers=2", "--strategy=mirrored"],
            "--workers: expected 1, because mirrored trains in one process.*--devices 2",
        ),
        (["--config=a.py", "--steps=0"], "--steps: expected a whole number of at least 1"),
        (
            ["--config=a.py", "--tolerance=0"],
            "--tolerance: expected a number above 0, received '0'",
        ),
        (["--config=a.py", "--tolerance=-1"], "--tolerance: expected a number above 0"),
        (["--config=a.py", "--worker=2"], "--worker=2: no such flag. Did you mean --workers"),
    ],
)
def test_wrong_arguments_are_named(capsys, argv, message):
    assert command.main(argv) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)


def test_a_policy_that_differs_by_design_is_not_compared(capsys):
    with pytest.raises(SystemExit, match="78"):
        command.main(["--config=configs/digits.py", "--config.sync.comm_dtype=bfloat16"])
    assert "sync: expected its defaults, with which N replicas equal one" in capsys.readouterr().err
