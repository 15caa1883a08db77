"""Provide fixtures for tests of several directories, and end tests that no other bound ends."""

import faulthandler
import functools
import gc
import importlib
import os
import pathlib
import signal
import sys

import pytest

from tests import forkserver

# Seconds after a test's own bound, which neither ends a call that never returns to Python nor waits
# in what clears up after it.
LATE_S = 240

_real_stderr = pytest.StashKey[int]()


# A virtual machine may show AMX to programs and end those that use it (SIGILL); oneDNN takes this
# as its limit.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def pytest_addoption(parser):
    parser.addoption(
        "--standby",
        type=int,
        default=1,
        help="0: start each process by exec, none from the fork server",
    )


def pytest_configure(config):
    if config.getoption("standby") and sys.platform == "linux":
        foreign = ("TF_CONFIG", "TFDIST_", "SLURM_", "OMPI_")
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(foreign)
        }
        forkserver.Popen.make_server = functools.partial(forkserver.Server.start, environ)
    # Under nohup, or in a script's background, these are ignored, here and in the processes that
    # tests start.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_real_stderr] = os.dup(2)  # of a test it is captured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End the process, with the stacks of all threads, if a test's timeout did not end the test."""
    own = item.get_closest_marker("timeout")
    asked = item.config.getoption("timeout")
    seconds = float(item.config.getini("timeout")) if asked is None else asked
    if item.config.getoption("usepdb") or not seconds:
        return (yield)
    seconds = own.args[0] if own else seconds
    faulthandler.dump_traceback_later(
        seconds + LATE_S, exit=True, file=item.config.stash[_real_stderr]
    )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def garbage():
    """Free the objects that a test leaves behind when it ends.

    The end of a data set's iterator may wait, with Python's lock held, for the thread that tunes
    it: as long as the iterator lived, up to a minute. Freed young, it takes no time; what the next
    test shares with this one is not looked at again, so that this does not either.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def ci_program(monkeypatch):
    """Return a function that imports a program of the directory .ci, by its name."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).resolve().parent.parent / ".ci")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory):
    """Return a TFDS data_dir with the digits prepared."""
    from tfdist import data

    directory = tmp_path_factory.mktemp("tfds")
    data.load("tfdist_digits", "test", directory)
    return directory
