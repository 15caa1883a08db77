"""Test which slow workers the launcher replaces, and when, from the lines of its journal."""

import pytest

from tfdist.launch.slow_workers import SlowWorkers
from tfdist.runtime.launch_protocol import STRAGGLER, STRAGGLER_OVER, note

TASKS = ("worker:0", "worker:1", "worker:2")


@pytest.fixture
def journal(tmp_path):
    """Write events to the journal of a launch."""

    class Journal:
        directory = str(tmp_path)
        said = []

        def write(self, event, task=None, attempt=0, **facts):
            note(self.directory, event, task=task, attempt=attempt, **facts)

        def save(self):
            self.write("saved", total=5, path="s")

        def workers(self, limit=9, move=lambda task: ""):
            self.said = []
            return SlowWorkers(self.directory, limit, self.said.append, move)

    return Journal()


def test_two_stragglers_are_replaced_in_one_restart(journal):
    workers = journal.workers(limit=1)
    journal.save()
    for task in ("worker:1", "worker:0"):  # the chief, too
        journal.write(STRAGGLER, task, slower=1.0, host="h")
    assert workers.due(0, TASKS) == ["worker:1", "worker:0"]
    assert [line.rpartition(": ")[2] for line in journal.said] == [
        "saving, to start it anew (replacement 1 of 1)"
    ] * 2
    journal.write(STRAGGLER, "worker:2", attempt=1)
    assert workers.due(1, TASKS) == []
    assert "worker:2 is slower than the median of the other workers; it stays" in journal.said[-1]


def test_straggler_for_which_there_is_no_room_stays_and_another_moves(journal):
    workers = journal.workers(move=lambda task: "b is full" if task == "worker:1" else "")
    journal.save()
    for task in ("worker:1", "worker:2"):
        journal.write(STRAGGLER, task)
    assert workers.due(0, TASKS) == ["worker:2"]
    assert journal.said[0].endswith("; it stays, as b is full")
    assert workers.due(0, TASKS) == []


def test_episode_that_is_over_before_the_save_is_forgotten(journal):
    workers = journal.workers()
    journal.write(STRAGGLER, "worker:1")
    assert workers.due(0, TASKS) == []
    journal.write(STRAGGLER_OVER, "worker:1")
    journal.save()
    assert workers.due(0, TASKS) == []


def test_straggler_of_an_earlier_attempt_is_forgotten(journal):
    workers = journal.workers()
    journal.write(STRAGGLER, "worker:1")
    assert workers.due(0, TASKS) == []  # there is no snapshot yet, and the attempt fails
    journal.save()
    assert workers.due(1, TASKS) == []
    journal.write(STRAGGLER, "worker:2", attempt=0)  # a line that arrives late
    assert workers.due(1, TASKS) == []
    journal.write(STRAGGLER, "worker:2", attempt=1)
    journal.write(STRAGGLER_OVER, "worker:2", attempt=0)
    assert workers.due(1, TASKS) == ["worker:2"]


def test_straggler_outside_of_a_fit_is_forgotten(journal):
    workers = journal.workers()
    journal.save()
    journal.write(STRAGGLER, "worker:1")
    assert workers.due(0, ()) == []
    assert workers.due(0, TASKS) == []


@pytest.mark.parametrize("facts", [{"task": "worker:9"}, {"task": None}, {"task": 3}])
def test_lines_that_name_no_task_of_the_attempt_are_ignored(journal, facts):
    workers = journal.workers()
    journal.save()
    journal.write(STRAGGLER, **facts)
    with open(f"{journal.directory}/events.jsonl", "a") as file:
        file.write('["straggler"]\n{"event": "straggler"}\n{"time": 1, "event": "stragg')
    assert workers.due(0, TASKS) == []
    assert journal.said == []
