"""Test the child processes of commands: their end with the command, limits and reasons."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import ROOT, environment, is_gone
from tfdist.runtime.subprocesses import Children, ask
from tfdist.runtime.termination import ending

SLEEP = ["timeit", "-n1", "-r1", "import time; time.sleep(120)"]
# A module that starts a process of its own, as a user's data pipeline may, and then hangs.
PARENT = (
    "import subprocess, sys, time\n"
    "from tfdist.runtime.subprocesses import answer\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
    "answer({'pid': child.pid})\n"
    "time.sleep(120)\n"
)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A directory whose modules children can run."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    return tmp_path


def test_children_end_with_the_block():
    with Children() as children:
        first, second = (children.start(SLEEP) for _ in range(2))
        assert first.poll() is None
    assert (first.returncode, second.returncode) == (-signal.SIGKILL, -signal.SIGKILL)
    assert second.stdout.closed


def test_a_signal_at_the_start_of_a_child_ends_the_child_too(monkeypatch):
    class Signalled(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    started: list[subprocess.Popen] = []
    with ending(), Children() as children:
        monkeypatch.setattr(subprocess, "Popen", Signalled)
        with pytest.raises(SystemExit):
            children.start(SLEEP)
    assert [process.poll() for process in started] == [-signal.SIGKILL]


@pytest.mark.parametrize(
    ("handler", "code"), [("lambda *_: sys.exit(7)", 7), ("signal.SIG_IGN", -signal.SIGKILL)]
)
def test_children_have_a_grace_to_end_by_themselves(modules, handler, code):
    (modules / "graceful.py").write_text(
        f"import signal, sys, time\nsignal.signal(signal.SIGTERM, {handler})\n"
        "print('begun', flush=True)\ntime.sleep(120)\n"
    )
    with Children(grace=2.0) as children:
        process = children.start(["graceful"])
        assert process.stdout.readline() == "begun\n"
    assert process.returncode == code


def test_late_child_is_killed_with_its_own_children(modules):
    (modules / "late.py").write_text(PARENT)
    answer, problem = ask("late", None, timeout=5)
    assert problem == "did not end within 5 s"
    wait_until(lambda: is_gone(answer["pid"]))


def test_a_child_that_cannot_start_is_a_problem(monkeypatch):
    def fail(*_, **__):
        raise OSError("too many processes")

    monkeypatch.setattr(Children, "start", fail)
    assert ask("late", None, timeout=5) == ({}, "could not begin: too many processes")


def test_children_do_not_get_the_secret_of_the_launchers(modules, monkeypatch):
    (modules / "told.py").write_text(
        "import os\nfrom tfdist.runtime.subprocesses import answer\nanswer(dict(os.environ))\n"
    )
    monkeypatch.setenv("TFDIST_TOKEN", "of the launchers")
    variables, problem = ask("told", None, timeout=60, OTHER="given")
    assert problem == ""
    assert variables["OTHER"] == "given"
    assert "TFDIST_TOKEN" not in variables


@pytest.mark.parametrize("through", ["module", "launcher"])
def test_children_end_when_their_command_is_killed(modules, through):
    """The children take no part in it, and may themselves be launchers."""
    (modules / "sleeper.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
        f"path = pathlib.Path({str(modules)!r}) / f'{{os.getpid()}}.pid'\n"
        "path.with_suffix('.part').write_text(f'{os.getpid()} {child.pid}')\n"
        "path.with_suffix('.part').rename(path)\n"
        "time.sleep(120)\n"
    )
    words = ["sleeper"]
    if through == "launcher":
        words = [
            "tfdist",
            "launch",
            "--workers",
            "2",
            f"--log-dir={modules}/logs",
            "--",
            "-m",
            *words,
        ]
    command = (
        "import pathlib, sys, time\n"
        "from tfdist.runtime.subprocesses import Children\n"
        "with Children() as children:\n"
        "    children.start(sys.argv[2:], pathlib.Path(sys.argv[1]) / 'log')\n"
        "    time.sleep(120)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command, str(modules), *words],
        cwd=ROOT,
        env=environment(PYTHONPATH=f"{modules}{os.pathsep}{ROOT}"),
    ) as owner:
        count = 2 if through == "launcher" else 1
        wait_until(lambda: len(list(modules.glob("*.pid"))) == count)
        assert owner.poll() is None
        owner.kill()
    pids = [pid for path in modules.glob("*.pid") for pid in path.read_text().split()]
    assert len(pids) == 2 * count
    wait_until(lambda: all(map(is_gone, pids)))
