"""Test standby processes: the tasks they take over, fresh processes instead, and their end."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import is_gone
from tfdist.launch import standby as pool
from tfdist.launch.import_record import ImportRecorder, changed, read_imports
from tfdist.launch.standby import Standbys
from tfdist.launch.task_plan import SCRIPT_RUNNER, Role, TaskPlan
from tfdist.runtime.guardian import Guardian
from tfdist.runtime.launch_protocol import IMPORTS_FILE, read_journal

TIMEOUT_S = 60  # seconds for anything here; each takes tenths of one


@pytest.fixture
def standbys(tmp_path):
    """Make pools of a launch whose task is `task.py`; end them and their processes afterwards."""
    made = []
    with Guardian() as guardian:

        def make(count=None, available=lambda: 1 << 40):
            said = []
            made.append(Standbys(count, guardian, str(tmp_path), said.append, available))
            return made[-1], said

        yield make
        for each in made:
            each.close()


@pytest.fixture
def plan(tmp_path):
    """Plan `task.py` as a worker that has recorded an import of a module.

    It has no TensorFlow, to be quick.
    """

    def make(script="", modules=("colorsys",), record_environ=None, name="worker:0", **environ):
        (tmp_path / "task.py").write_text(script)
        stem = tmp_path / name.replace(":", "-")
        if modules:
            lines = [{"module": module} for module in modules]
            lines[0]["environ"] = record_environ or {}
            stem.with_suffix(".imports").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
        whole = {
            **os.environ,
            IMPORTS_FILE: str(stem.with_suffix(".imports")),
            "TFDIST_TASK": name,
            **environ,
        }
        return TaskPlan(
            name=name,
            role=Role.TRAINS,
            argv=(*SCRIPT_RUNNER, str(tmp_path / "task.py"), "a", "b"),
            environ=whole,
            log_path=f"{stem}.log",
            error_path=f"{stem}.error.json",
            progress_path=f"{stem}.progress",
        )

    return make


def wait_until(condition, what):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"waited {TIMEOUT_S} s for {what}"
        time.sleep(0.02)


def fill(standbys, plans, ready):
    """Maintain the pool until so many processes are ready."""

    def enough():
        standbys.keep(plans, True)
        return sum(each.ready for each in standbys._pool) >= ready

    wait_until(enough, f"{ready} standby processes")


def events(tmp_path, what):
    return [
        line
        for line in read_journal(str(tmp_path))
        if line["event"] == "standby" and line["what"] == what
    ]


def finish(popen):
    out = popen.stdout.read().decode()
    return popen.wait(TIMEOUT_S), out


def take(standbys, task):
    return standbys.take(task, lambda pid: None)


# --- What a script sees ---------------------------------------------------------------------------
SCRIPT = """
import {module}, json, logging, os, random, resource, signal, sys, threading, warnings
facts = dict(
    argv=sys.argv, path=sys.path, orig_argv=sys.orig_argv, flags=list(sys.flags), cwd=os.getcwd(),
    environ=dict(sorted(os.environ.items())), umask=os.umask(0), affinity=sorted(os.sched_getaffinity(0)),
    nice=[os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in [0, *os.listdir("/proc/self/task")]],
    oom=open("/proc/self/oom_score_adj").read(), comm=open("/proc/self/comm").read(),
    handlers={{int(s): str(signal.getsignal(s)).partition(" at ")[0] for s in signal.valid_signals()}},
    blocked=[int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    fds={{fd: os.readlink(f"/proc/self/fd/{{fd}}").partition(":")[0] for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{fd}}")}},
    group=os.getpgid(0) == os.getpid() == os.getsid(0), parent=os.getppid(), limits=[resource.getrlimit(i) for i in range(10)],
    main=[__name__, __file__, str(__spec__), sys.modules["__main__"].__dict__ is globals()],
    warnings=len(warnings.filters), hooks=[type(each).__name__ for each in sys.meta_path], logging=[str(logging.root.handlers), logging.root.level],
    threads=[each.name for each in threading.enumerate()], hook=sys.excepthook is sys.__excepthook__,
    streams=[[s.encoding, s.errors, s.line_buffering, s.write_through] for s in (sys.stdin, sys.stdout, sys.stderr)],
)
json.dump(facts, open("facts.json", "w"), default=str)
json.dump([random.random(), str(__import__("uuid").uuid4())], open("random.json", "w"))
print("to stdout", flush=True)
print("to stderr", file=sys.stderr)
sys.exit(7)
"""  # noqa: E501


def facts_of(popen, tmp_path):
    code, out = finish(popen)
    assert (code, out) == (7, "to stdout\nto stderr\n"), out
    return json.loads((tmp_path / "facts.json").read_text()), json.loads(
        (tmp_path / "random.json").read_text()
    )


def test_script_runs_the_same_in_a_standby_process(standbys, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    own, _ = standbys(1)
    task = plan(SCRIPT.format(module="colorsys"), TFDIST_ATTEMPT="1", MINE="from the plan")
    fill(own, [task], 1)
    popen = take(own, task)
    assert popen is not None
    handed, drawn = facts_of(popen, tmp_path)
    os.remove(task.environ[IMPORTS_FILE])
    fresh = subprocess.Popen(
        task.argv,
        env=task.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    expected, drawn_anew = facts_of(fresh, tmp_path)
    assert handed == expected
    assert handed["environ"]["MINE"] == "from the plan"
    assert handed["argv"] == [str(tmp_path / "task.py"), "a", "b"]
    assert drawn != drawn_anew


def test_garbage_collection_skips_what_was_imported_in_advance(standbys, plan):
    """At exit it would traverse TensorFlow's modules, for a second."""
    own, _ = standbys(1)
    task = plan("import gc, colorsys\nprint(any(x is colorsys for x in gc.get_objects()))")
    fill(own, [task], 1)
    assert finish(take(own, task)) == (0, "False\n")


def test_an_exception_leaves_the_same_traces(standbys, plan, tmp_path):
    own, _ = standbys(1)
    error = tmp_path / "error.json"
    task = plan("def f():\n    raise KeyError('x')\nf()", TFDIST_ERROR_FILE=str(error))
    fill(own, [task], 1)
    code, out = finish(take(own, task))
    handed = out, {**json.loads(error.read_text()), "time": 0}
    done = subprocess.run(
        task.argv,
        env=task.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (code, *handed) == (
        done.returncode,
        done.stdout,
        {**json.loads(error.read_text()), "time": 0},
    )


SLOW = (
    "import os, time\nopen('importing', 'w').close()\nwhile not os.path.exists('go'): "
    "time.sleep(0.01)\n"
)


def test_imports_have_a_lower_priority_and_go_first_where_memory_is_short(
    standbys, plan, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    own, _ = standbys(1)
    task = plan(modules=("colorsys", "slow"))
    own.keep([task], True)
    (process,) = own._pool
    wait_until((tmp_path / "importing").exists, "the import")
    if os.geteuid() == 0:  # others may not be able to return from it
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 10
    with (
        open(f"/proc/{process.pid}/oom_score_adj") as score,
        open(f"/proc/{process.pid}/comm") as comm,
    ):
        assert (score.read(), comm.read()) == ("1000\n", "tfdist-standby\n")
    group = pathlib.Path(f"/proc/{process.pid}/autogroup")  # not every kernel has it
    assert not group.exists() or group.read_text().endswith(" nice 10\n")
    (tmp_path / "go").touch()
    fill(own, [task], 1)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert not group.exists() or group.read_text().endswith(" nice 0\n")


# --- When a fresh process is started instead ------------------------------------------------------
def test_a_variable_that_imports_read_and_that_differs_is_named(standbys, plan, tmp_path):
    own, _ = standbys(1)
    fill(own, [plan()], 1)
    assert take(own, plan(OMP_NUM_THREADS="5", TFDIST_ATTEMPT="3", UNRELATED="x")) is None
    (line,) = events(tmp_path, "refused")
    assert line["why"] == "OMP_NUM_THREADS of worker:0 differs"
    assert is_gone(line["pid"])


def test_cores_that_differ_are_named(standbys, plan, tmp_path):
    own, _ = standbys(1)
    fill(own, [plan()], 1)
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    os.sched_setaffinity(0, [min(cores)])
    try:
        assert take(own, plan()) is None
    finally:
        os.sched_setaffinity(0, cores)
    assert "may use cores" in events(tmp_path, "refused")[0]["why"]


def test_a_module_that_would_be_imported_twice_is_run_by_a_fresh_process(standbys, plan, tmp_path):
    own, _ = standbys(1)
    task = plan(modules=("colorsys", "tfdist.runtime.formatting"))
    fill(own, [task], 1)
    assert (
        take(
            own, dataclasses.replace(task, argv=(*SCRIPT_RUNNER, "-m", "tfdist.runtime.formatting"))
        )
        is None
    )
    assert "runs as a program" in events(tmp_path, "passed over")[0]["why"]
    assert take(own, task) is not None  # it is there for other tasks


def test_standby_starts_with_the_state_of_the_task_at_its_import(standbys, plan):
    own, _ = standbys(1)
    task = plan(
        "import os; print(os.environ.get('TF_MINE'), os.environ['KERAS_MINE'])",
        record_environ={"TF_MINE": "set by the script", "KERAS_MINE": None},
        KERAS_MINE="x",
    )
    own.keep([task], True)
    assert own._pool[0].image.start_environ()["TF_MINE"] == "set by the script"
    assert "KERAS_MINE" not in own._pool[0].image.start_environ()
    fill(own, [task], 1)
    assert finish(take(own, task)) == (0, "None x\n")  # the script sets and removes them itself


def test_tasks_that_differ_have_no_standby_and_the_reason_is_logged(standbys, plan, tmp_path):
    own, said = standbys(2)
    own.keep([plan(), plan(name="worker:1", record_environ={"CUDA_VISIBLE_DEVICES": "1"})], True)
    assert not own._pool
    assert said == [
        (
            "tfdist: no more standby processes (CUDA_VISIBLE_DEVICES of worker:1 differs from "
            "that of worker:0); restarts start new processes"
        )
    ]


def test_no_standby_starts_before_training_or_without_tensorflow(standbys, plan):
    own, _ = standbys(1)
    own.keep([plan()], False)
    own.keep([plan(modules=(), name="worker:1")], True)
    assert not own._pool


# --- Bad input and faults -------------------------------------------------------------------------
def test_without_memory_there_is_no_standby_and_a_warning(standbys, plan, tmp_path):
    own, said = standbys(2, lambda: 10**9)
    own.keep([plan()], True)
    own.keep([plan()], True)
    assert not own._pool
    assert said == [
        "tfdist: --standby 2: no standby process, because 1 GB of memory is available, and "
        "1.47 GB is needed"
    ]
    quiet, said = standbys(None, lambda: 10**9)
    quiet.keep([plan()], True)
    assert said == []
    assert len(events(tmp_path, "no memory")) == 2


def test_a_broken_package_is_named_once_and_ends_the_pool(standbys, plan, tmp_path):
    (tmp_path / "broken.py").write_text("raise ImportError('its library is missing')")
    own, said = standbys(1)
    task = plan(modules=("colorsys", "broken"))
    wait_until(lambda: own.keep([task], True) or said, "the error")
    assert said == [
        (
            "tfdist: no more standby processes (ImportError: its library is missing); restarts "
            "start new processes"
        )
    ]
    own.keep([task], True)
    assert not own._pool
    assert take(own, task) is None


def test_modules_that_the_task_did_not_find_are_left_out(standbys, plan):
    own, said = standbys(1)
    fill(own, [plan(modules=("colorsys", "tfdist.no_such_module"))], 1)
    assert not said


def test_standby_killed_while_waiting_is_replaced_three_times(standbys, plan, tmp_path):
    own, said = standbys(1)
    for count in range(1, pool.MAX_LOST + 1):
        fill(own, [plan()], 1)
        os.kill(own._pool[0].pid, signal.SIGKILL)
        wait_until(
            lambda count=count: own.keep([plan()], False) or len(events(tmp_path, "lost")) == count,
            "its loss",
        )
    assert said == [
        "tfdist: no more standby processes (ended with code -9); restarts start new processes"
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_next_standby_takes_over_when_one_dies_at_the_hand_over(
    number, standbys, plan, tmp_path, monkeypatch
):
    monkeypatch.setattr(pool, "HANDOVER_S", 0.5)
    own, said = standbys(2)
    task = plan("print('ran')")
    fill(own, [task], 2)
    victim = own._pool[0].pid
    popen = own.take(task, lambda pid: os.kill(pid, number) if pid == victim else None)
    assert finish(popen) == (0, "ran\n")
    assert [line["pid"] for line in events(tmp_path, "lost")] == [victim]
    assert is_gone(victim)
    assert not said


def test_standby_processes_end_with_the_launcher():
    code = """
import os, sys, time
from tfdist.runtime.guardian import Guardian
from tfdist.launch.import_record import Imports
from tfdist.launch.standby import Image, Standby
guard = Guardian()
standby = Standby(Image(dict(os.environ), Imports(("colorsys",)), ()), ["task.py"])
while not standby.look(): time.sleep(0.01)
print(standby.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as launcher:
        pid = int(launcher.stdout.readline())
        assert not is_gone(pid)
        launcher.kill()
    wait_until(
        lambda: is_gone(pid), "the standby process's end"
    )  # by the channel's end; nobody told the guard


# --- What is recorded -----------------------------------------------------------------------------
def test_imports_and_earlier_changes_of_the_environment_are_recorded(tmp_path):
    environ = {"TF_A": "1", "TF_GONE": "1", "MINE": "1"}
    path = tmp_path / "imports"
    recorder = ImportRecorder(str(path), environ)
    recorder.find_spec("json")
    recorder.find_spec("tfdist.runtime.formatting")
    assert not read_imports(str(path)).modules  # no TensorFlow yet
    environ |= {"TF_A": "2", "MINE": "2", "TF_CONFIG": "of each task alone"}
    del environ["TF_GONE"]
    recorder.find_spec("keras")
    environ["TF_A"] = "3"
    for name in ("tensorflow", "tensorflow.python", "tfdist.__main__"):
        recorder.find_spec(name)
    recorded = read_imports(str(path))
    assert recorded.modules == ("tfdist.runtime.formatting", "keras", "tensorflow")
    assert recorded.environ == {"TF_A": "2", "TF_GONE": None}


def test_import_record_that_cannot_be_written_or_read_is_ignored(tmp_path):
    ImportRecorder(str(tmp_path / "nowhere" / "imports"), {}).find_spec("tensorflow")
    assert not read_imports(str(tmp_path / "nowhere" / "imports")).modules
    (tmp_path / "cut off").write_text('{"module": "tensorflow", "environ": {}}\n{"module": "ker')
    assert read_imports(str(tmp_path / "cut off")).modules == ("tensorflow",)
    damaged = [
        b"3",
        b"null",
        b"{}",
        b"[" * 10_000,
        b'{"module": "\xff"}',
        b'{"module": ["keras"]}',
        b'{"module": "keras", "environ": {"TF_A": 2}}',
        b'{"module": "keras", "environ": []}',
    ]
    whole = b'{"module": "tensorflow", "environ": {}}\n'
    (tmp_path / "damaged").write_bytes(b"\n".join(damaged) + b"\n" + whole)
    assert read_imports(str(tmp_path / "damaged")).modules == ("tensorflow",)


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "TF_ENABLE_ONEDNN_OPTS",
        "KERAS_BACKEND",
        "LD_PRELOAD",
        "PYTHONHASHSEED",
        "HOME",
        "CUDA_VISIBLE_DEVICES",
    ],
)
def test_variables_that_imports_read(name):
    assert changed({}, {name: "1"}) == {name: "1"}


@pytest.mark.parametrize("name", ["TF_CONFIG", "TFDIST_ATTEMPT", "COLUMNS", "MINE"])
def test_variables_that_they_do_not_read(name):
    assert changed({}, {name: "1"}) == {}
