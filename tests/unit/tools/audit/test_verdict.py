"""Test that an audit of the examples that workers read passes or names the first fault.

Most tests here start no process.
"""

import dataclasses
import signal

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.order import Order, rows_of_replicas
from tfdist.data.pipeline import pipeline
from tfdist.data.sources.records import records
from tfdist.runtime.subprocesses import Children
from tfdist.tools.audit import stage_throughput
from tfdist.tools.audit.processes import Workers
from tfdist.tools.audit.row_records import Step
from tfdist.tools.audit.settings import Settings
from tfdist.tools.audit.verdict import AuditError, Plan, verify
from tfdist.tools.audit.worker import Worker
from tfdist.tools.common import events

EXAMPLES = 10
BATCH = 4


def plan(tail="partial", order=True, **changes):
    order = Order(EXAMPLES, BATCH, seed=5, tail=tail) if order else None
    return Plan(order, EXAMPLES, BATCH, tail, **{"epochs": range(2), **changes})


def taken(plan, workers=2):
    """Return the records of a correct run by worker, as lists that a test may change."""
    order = Order(EXAMPLES, BATCH, seed=5, tail=plan.tail)
    records = [[] for _ in range(workers)]
    for epoch in plan.epochs:
        for step in range(plan.first_step if epoch == plan.epochs.start else 0, order.steps):
            numbers = order.batch(epoch, step).numpy()
            if plan.tail == "pad":
                numbers = np.pad(numbers, (0, BATCH - len(numbers)), constant_values=-1)
            for worker in range(workers):
                begin, end = rows_of_replicas(len(numbers), worker, 1, workers)
                records[worker].append(
                    Step(epoch, step, len(numbers), 7.0 * step, 0, numbers[begin:end].copy())
                )
    return records


def check(plan, records, left_out=None):
    return verify(
        [lambda of=of: iter(of) for of in records], plan, left_out or [{} for _ in records]
    )


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize(
    ("tail", "examples", "dropped"), [("partial", 20, 0), ("pad", 20, 0), ("drop", 16, 4)]
)
def test_correct_reads_are_counted(tail, examples, dropped, order):
    what = plan(tail, order)
    verdict = check(what, taken(what))
    assert (verdict.examples, verdict.dropped, verdict.whole) == (examples, dropped, 2)
    assert verdict.steps == 2 * (2 if tail == "drop" else 3)


def test_reads_before_a_resume_count_by_their_order():
    what = plan(first_step=2)
    verdict = check(what, taken(what, workers=1))
    assert (verdict.steps, verdict.examples, verdict.whole) == (4, 12, 2)
    what = plan(order=False, first_step=2)
    assert check(what, taken(what)).whole == 1  # of the first epoch nobody knows


@pytest.mark.parametrize("order", [True, False])
def test_an_example_on_two_workers_is_named_with_both(order):
    what = plan(order=order)
    records = taken(what)
    stolen = records[0][4].numbers[1]
    expected = records[1][5].numbers[0]
    records[1][5].numbers[0] = stolen
    with pytest.raises(
        AuditError, match=rf"received example {stolen}, which worker 0 had in step 1, row 1$"
    ) as caught:
        check(what, records)
    error = caught.value
    assert (error.epoch, error.step, error.row, error.worker) == (1, 2, 1, 1)
    assert (error.expected, error.received) == (expected if order else None, stolen)


def test_example_that_no_worker_read_is_named():
    what = plan(order=False, epochs=range(1))
    records = taken(what)
    missing = int(records[1][2].numbers[0])
    records = [[step for step in of if step.step < 2] for of in records]
    with pytest.raises(AuditError, match="expected example") as caught:
        check(what, records)
    assert caught.value.expected <= missing


def test_an_example_that_does_not_exist_is_named():
    what = plan(order=False, epochs=range(1))
    records = taken(what)
    records[0][0].numbers[0] = EXAMPLES
    with pytest.raises(
        AuditError, match=f"expected examples below {EXAMPLES}; received example {EXAMPLES}"
    ):
        check(what, records)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda records: records[1].pop(),
            r"epoch 1, step 2, worker 1: expected a batch, as worker 0 has one; received none",
        ),
        (
            lambda records: [of.pop() for of in records],
            r"epoch 1: expected 3 steps; all workers ended after 2",
        ),
        (
            lambda records: replace(records, 1, 1, fingerprint=3.0),
            r"worker 1: expected the fingerprint of worker 0's batch, 7.0; received 3.0",
        ),
        (
            lambda records: replace(records, 1, 1, rows=3),
            r"step 1, worker 1: expected a global batch of 4 rows; received one of 3",
        ),
        (
            lambda records: replace(records, 0, 1, numbers=records[0][1].numbers[:1]),
            r"row 1, worker 0: expected example \d+, as its rows are 0 to 1; received none",
        ),
        (
            lambda records: records[0][1].numbers.fill(-1),
            r"epoch 0, step 1, row 0, worker 0: expected example \d+; received none",
        ),
    ],
)
def test_other_faults_are_named(spoil, message):
    what = plan()
    records = taken(what)
    spoil(records)
    with pytest.raises(AuditError, match=message):
        check(what, records)


def test_one_row_too_many_is_named():
    what = plan()
    records = taken(what)
    more = int(records[1][0].numbers[0])
    replace(records, 0, 0, numbers=np.append(records[0][0].numbers, more))
    with pytest.raises(
        AuditError,
        match=f"row 2, worker 0: expected none, as its rows are 0 to 1; received example {more}",
    ):
        check(what, records)


def test_an_example_left_out_must_be_reported_by_its_worker():
    what = plan()
    records = taken(what)
    number = int(records[1][0].numbers[1])
    indexes = [
        int(step.numbers.tolist().index(number)) if number in step.numbers else None
        for step in records[1]
    ]
    for step, index in zip(records[1], indexes, strict=True):
        if index is not None:
            step.numbers[index] = -1
    gone = sum(index is not None for index in indexes)
    if any(
        number in step.numbers for step in records[0]
    ):  # worker 0 reads it in the other epoch, and can
        gone = 1
    verdict = check(what, records, [{}, {number: "file a"}])
    assert (verdict.left_out, verdict.examples) == (gone, 20 - gone)
    with pytest.raises(AuditError, match=f"expected example {number}; received none"):
        check(what, records, [{number: "file a"}, {}])


def test_an_event_that_is_missing_is_named_and_shifts_no_rank(tmp_path):
    settings = Settings(str(tmp_path), workers=3)
    for rank in (0, 2):
        with events.Writer(settings.file(rank, "events")) as report:
            report("read", left_out={})
    worker = object.__new__(Worker)  # without a data pipeline
    worker.settings = settings
    with pytest.raises(
        ValueError, match=r"worker 1: expected an event 'read' in .*worker-1\.events"
    ):
        worker._last_events("read")


def test_workers_that_cannot_start_leave_no_process(tmp_path, monkeypatch):
    start = Children.start

    def fail_at_the_second(self, words, *args, **kwargs):
        if words[-1] == "1":
            raise OSError("too many processes")
        started.append(start(self, ["timeit", "-n1", "-r1", "import time; time.sleep(60)"], *args))
        return started[-1]

    started = []
    monkeypatch.setattr(Children, "start", fail_at_the_second)
    with pytest.raises(OSError, match="too many"), Workers(Settings(str(tmp_path), workers=2), 1):
        pass
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def replace(records, worker, index, **changes):
    records[worker][index] = records[worker][index]._replace(**changes)


def test_stages_omit_those_that_the_data_pipeline_lacks(tmp_path):
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in range(6):
            writer.write(str(i).encode())
    content = bytearray(path.read_bytes())
    content[17 * 2 + 12] ^= 1
    path.write_bytes(content)
    source = records(str(path), access="random").map(
        lambda stored: (tf.strings.to_number(stored), 0)
    )
    batches = pipeline(
        dataclasses.replace(source, raw=records(str(path), access="random").raw), 2, ignore_errors=1
    ).batches
    names = [stage.name for stage in stage_throughput.measure(batches, (0, 1, 1), 0.02)]
    assert names == ["order", "read", "decode", "batch"]
    assert stage_throughput.stored_bytes(batches) == 1
