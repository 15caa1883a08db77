"""Test that endings lead to the right root cause; no test here starts a process."""

import dataclasses

import pytest

from tfdist.launch.failure_report import format_verdict
from tfdist.launch.failures import Ending, Kind, classify, judge, last_traceback
from tfdist.runtime.launch_protocol import LOG_SAYS_WHY

ABORTED = (
    "Graph execution error:\n\nDetected at node x\nCollective ops is aborted by: Socket closed\n"
    " [[x]]"
)
UNHEALTHY = (
    "Graph execution error:\n\nCollective ops is aborted by: Error reported from "
    "/job:worker/task:1: "
    "The following tasks are unhealthy (stopped sending heartbeats):\n"
    "/job:worker/replica:0/task:1\nThe tasks have crashed."
)


def error(kind, message, time):
    trace = f"Traceback (most recent call last):\n  File 'a.py'\n{kind}: {message}"
    return {"type": kind, "message": message, "traceback": trace, "time": time}


def victim(task, time, message=ABORTED):
    return Ending(
        task, 1, time, error=error("UnavailableError", message, time), log_path=f"{task}.log"
    )


def test_nobody_failed():
    assert judge([Ending("worker:0", 0, 1.0), Ending("ps:0", -15, 2.0, signalled=1.5)]) is None


@pytest.mark.parametrize(
    ("ending", "kind", "code"),
    [
        (Ending("worker:1", -9, 7.0), Kind.SIGNAL, 137),
        (Ending("worker:1", 137, 7.0), Kind.SIGNAL, 137),
        (
            Ending("worker:1", -6, 7.0, log="Check failed\nFatal Python error: Aborted"),
            Kind.SIGNAL,
            134,
        ),
        (Ending("worker:1", 1, 7.0, error=error("KeyError", "'x'", 6.0)), Kind.ERROR, 1),
        (Ending("worker:1", 3, 7.0), Kind.ERROR, 3),
        (Ending("worker:1", 78, 7.0), Kind.CONFIGURATION, 78),
        (Ending("worker:1", 0, 7.0), Kind.ENDED_EARLY, 1),
    ],
)
def test_root_cause_is_blamed_although_its_victim_ended_first(ending, kind, code):
    verdict = judge([victim("worker:0", 5.0), ending])
    assert (verdict.cause.task, verdict.cause.kind, verdict.cause.code) == ("worker:1", kind, code)
    assert [(other.task, other.kind) for other in verdict.others] == [("worker:0", Kind.LOST_PEERS)]
    assert (
        verdict.others[0].message == "UnavailableError: Collective ops is aborted by: Socket closed"
    )


def test_task_that_waited_too_long_is_not_the_cause():
    waited = error(
        "TimeoutError",
        "worker:0 waited too long for worker:1: no step for 600 s. A worker hangs, is cut off",
        3.0,
    )
    verdict = judge([Ending("worker:0", 1, 5.0, error=waited), Ending("worker:1", -9, 6.0)])
    assert verdict.cause.task == "worker:1"
    assert verdict.others[0].kind is Kind.LOST_PEERS


def test_a_task_that_names_the_log_of_another_is_not_the_cause():
    pointing = error("RuntimeError", f"worker:0 failed in model.save(); {LOG_SAYS_WHY}.", 3.0)
    own = error("ValueError", "Invalid filepath", 4.0)
    verdict = judge(
        [Ending("worker:1", 1, 5.0, error=pointing), Ending("worker:0", 1, 6.0, error=own)]
    )
    assert verdict.cause.task == "worker:0"
    assert verdict.others[0].kind is Kind.LOST_PEERS


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        (
            "ValueError",
            'in user code:\n\n    File "a.py", line 27, in run  *\n        step()\n\n'
            "    ValueError: sgd: no weights.\n",
            "ValueError: sgd: no weights.",
        ),
        (
            "InvalidArgumentError",
            "Graph execution error:\n\nDetected at node sub defined at (most recent call last):\n"
            '  File "a.py", line 1, in <module>\n\n  File "b.py", line 2, in step\n\n'
            "Incompatible shapes: [64] vs. [64,10]\n\t [[{{node sub}}]] [Op:__inference_a_1]",
            "InvalidArgumentError: Incompatible shapes: [64] vs. [64,10]",
        ),
        (
            "InvalidArgumentError",
            "Graph execution error:\n\nDetected at node a defined at (most recent call last):\n"
            "<stack traces unavailable>\n2 root error(s) found.\n  (0) INVALID_ARGUMENT:  No rows\n"
            "\t [[{{node a}}]]\n  (1) INVALID_ARGUMENT:  No rows\n0 successful operations.",
            "InvalidArgumentError: (0) INVALID_ARGUMENT:  No rows",
        ),
        (
            "AssertionError",
            'in user code:\n\n    File "a.py", line 2, in run  *\n\n    AssertionError: \n',
            "AssertionError:",
        ),
        ("ValueError", "in user code:", "ValueError: in user code:"),
        ("UnknownError", "Graph execution error:", "UnknownError: Graph execution error:"),
        ("ValueError", "first\nValueError: second", "ValueError: first"),
    ],
)
def test_the_line_of_an_error_says_what_is_wrong(name, message, expected):
    verdict = judge([Ending("worker:0", 1, 5.0, error=error(name, message, 3.0))])
    assert verdict.cause.message == expected


def test_of_two_errors_the_first_is_the_cause():
    errors = {"worker:0": error("KeyError", "'x'", 3.0), "worker:1": error("KeyError", "'x'", 2.0)}
    endings = [Ending(task, 1, 9.0, error=raised) for task, raised in errors.items()]
    assert judge(endings).cause.task == "worker:1"


def test_an_abort_over_lost_peers_is_no_cause():
    endings = [
        Ending(
            "worker:0",
            -6,
            5.0,
            log="E0000 ABORTED: Mutex corrupt\nFatal Python error: Aborted\n  File a",
        ),
        Ending("worker:1", 1, 6.0, log="Traceback (most recent call last):\n  File\nKeyError: 1\n"),
    ]
    assert judge(endings).cause.task == "worker:1"


def test_absent_peers_are_no_cause_where_a_task_died():
    endings = [
        Ending("worker:0", 75, 5.0, log="error: preflight of worker:0: worker:1 is absent\n"),
        Ending("worker:1", -11, 6.0),
    ]
    verdict = judge(endings)
    assert verdict.cause.task == "worker:1"
    assert verdict.others[0].message == "error: preflight of worker:0: worker:1 is absent"


def test_early_end_is_explained():
    verdict = judge([victim("worker:0", 5.0), Ending("worker:1", 0, 4.0), victim("worker:2", 5.5)])
    assert verdict.cause.how == "ended with code 0 while worker:0 and worker:2 still needed it"


def test_an_evaluator_may_end_early():
    stopped = Ending("worker:1", -15, 8.0, signalled=7.0)
    evaluator = Ending("evaluator:0", 0, 4.0)
    verdict = judge([victim("worker:0", 5.0), stopped, evaluator])
    assert verdict.cause.task == "worker:0"


def test_a_frozen_task_is_named_by_its_peers():
    verdict = judge(
        [victim("worker:0", 5.0, UNHEALTHY), Ending("worker:1", -9, 9.0, signalled=8.0)]
    )
    assert (verdict.cause.task, verdict.cause.kind) == ("worker:1", Kind.UNRESPONSIVE)
    assert verdict.stopped == ()


@pytest.mark.parametrize("stopped", ["worker:0", "worker:1"])
def test_stopped_task_is_blamed_not_the_peer_whose_error_names_no_task(stopped):
    """Where the chief is stopped, so is TensorFlow's coordination service."""
    other = "worker:1" if stopped == "worker:0" else "worker:0"
    message = "Collective ops is aborted by: Deadline Exceeded"
    deadline = error("DeadlineExceededError", message, 5.0)
    verdict = judge(
        [
            Ending(other, 1, 5.2, error=deadline),
            Ending(stopped, -9, 8.5, signalled=8.0, stopped=True),
        ]
    )
    assert (verdict.cause.task, verdict.cause.kind) == (stopped, Kind.STOPPED)
    assert verdict.cause.how == "was stopped while its peers needed it; the launcher killed it"
    assert [(failure.task, failure.kind) for failure in verdict.others] == [
        (other, Kind.LOST_PEERS)
    ]
    assert verdict.stopped == ()


def test_an_error_of_a_tasks_own_is_the_cause_although_another_is_stopped():
    endings = [
        Ending("worker:0", -9, 8.5, signalled=8.0, stopped=True),
        Ending("worker:1", 1, 5.2, error=error("KeyError", "'x'", 5.0)),
    ]
    assert judge(endings).cause.task == "worker:1"


def test_stopped_task_that_went_on_is_listed_once():
    endings = [
        Ending("worker:0", 1, 8.0, error=error("AbortedError", "", 7.0), stopped=True),
        victim("worker:1", 5.0),
    ]
    verdict = judge(endings)
    assert verdict.cause.task == "worker:0"
    assert [failure.task for failure in verdict.others] == ["worker:1"]


def test_first_victim_is_shown_when_there_is_no_cause():
    verdict = judge(
        [
            victim("worker:0", 5.0),
            victim("worker:1", 4.0),
            Ending("worker:2", -9, 9.0, signalled=8.0),
        ]
    )
    assert verdict.cause.task == "worker:1"
    assert verdict.stopped == ("worker:2",)


def test_an_error_of_a_task_that_then_hung_on_its_way_out():
    ending = Ending("worker:0", -9, 9.0, signalled=8.0, error=error("KeyError", "'x'", 5.0))
    assert (classify(ending).kind, classify(ending).code) == (Kind.ERROR, 1)


def test_an_error_in_answer_to_the_launchers_signal_is_none():
    assert classify(Ending("worker:0", 1, 9.0, signalled=8.0)) is None


def test_a_native_crash_keeps_the_lines_before_it():
    log = (
        "F0000 file.cc:1] Check failed: a == b\nFatal Python error: Aborted\n\nThread 0x1:\n"
        "  File 'a.py'\n"
    )
    failure = classify(Ending("worker:0", -6, 1.0, log=log))
    assert "Check failed: a == b" in failure.traceback
    assert "File 'a.py'" in failure.traceback


def test_the_last_traceback_of_a_log():
    start = "Traceback (most recent call last):\n"
    assert (
        last_traceback(f"{start}  old\nOld: 1\nmore\n\x1b[1m{start}  new\nNew: 1")
        == f"{start}  new\nNew: 1"
    )
    assert last_traceback("all is well") == ""


def test_a_log_stands_in_for_a_missing_error_file():
    failure = classify(
        Ending("worker:0", 4, 1.0, log="I0000 00:00:1.2 77 a.cc:1] chat\nline 1\nline 2\n")
    )
    assert failure.traceback == "line 1\nline 2"


def test_report():
    cause = Ending(
        "worker:1", 1, 12.0, error=error("KeyError", "'x'", 11.0), log_path="/logs/worker-1.log"
    )
    verdict = judge(
        [victim("worker:0", 12.5), cause, Ending("worker:2", -15, 15.0, signalled=14.0)]
    )
    lines = format_verdict(verdict, 1.0, "/logs").splitlines()
    assert lines[1] == "ROOT CAUSE: worker:1 failed with exit code 1: KeyError: 'x'"
    assert lines[2].endswith(", 10.0 s after the start")
    assert lines[3] == "  log:     /logs/worker-1.log"
    assert "  Traceback (most recent call last):" in lines
    lost = "UnavailableError: Collective ops is aborted by: Socket closed"
    assert f"  worker:0 failed with exit code 1: {lost} (1.5 s later)" in lines
    assert "  worker:2: ended by the launcher" in lines
    unhinted = dataclasses.replace(verdict.cause, hint="a hint")
    assert "  that is: a hint" in format_verdict(
        dataclasses.replace(verdict, cause=unhinted), 1.0, "/logs"
    )
