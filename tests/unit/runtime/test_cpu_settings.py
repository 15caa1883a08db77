"""Test that memory of large tensors on CPUs is kept, and who is told of oneDNN."""

import os
import sys

import pytest

from tfdist.runtime import cpu_settings
from tfdist.runtime.cpu_settings import KEEP_MEMORY, LIMIT, ONEDNN, keep_memory, uses_onednn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux'")

FAULTS = """
import os, resource, sys
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # TensorFlow's default on CPUs without AVX512-VNNI
assert "tensorflow" not in sys.modules
import tensorflow as tf
import tfdist

with tfdist.make_strategy("one_device", devices="cpu").scope():
    x = tf.ones([2**24])
    for _ in range(3):
        x + 1.0  # 64 MiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        x + 1.0
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch):
    for name in (KEEP_MEMORY, LIMIT):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv(ONEDNN, "0")


def test_large_tensors_cause_no_page_faults(run_python):
    done = run_python(FAULTS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**26 / os.sysconf("SC_PAGE_SIZE") / 10


def test_the_users_choice_stays(monkeypatch):
    monkeypatch.setenv(KEEP_MEMORY, "0")
    keep_memory()
    assert (os.environ[KEEP_MEMORY], LIMIT in os.environ) == ("0", False)
    monkeypatch.delenv(KEEP_MEMORY)
    monkeypatch.setenv(LIMIT, "100")
    keep_memory()
    assert (os.environ[KEEP_MEMORY], os.environ[LIMIT]) == ("1", "100")


@pytest.mark.parametrize("limit", ["abc", "0", "-5", "1e3", ""])
def test_a_limit_that_is_no_number_is_named(monkeypatch, limit):
    monkeypatch.setenv(LIMIT, limit)
    with pytest.raises(
        ValueError, match=f"{LIMIT}: expected a number of MiB .* received '{limit}'"
    ):
        keep_memory()


@pytest.mark.parametrize(
    ("gib", "limit"), [(4, 64 << 10), (256, 1 << 20), (None, 64 << 10)], ids=str
)
def test_regions_of_the_allocator_may_be_larger_than_the_memory(monkeypatch, gib, limit):
    monkeypatch.setattr(cpu_settings, "memory", lambda: (None, gib and gib << 30))
    keep_memory()
    assert os.environ[LIMIT] == str(limit)


@pytest.mark.parametrize("onednn", [True, None])
def test_nothing_is_set_unless_onednn_is_left_out(monkeypatch, onednn):
    monkeypatch.setattr(cpu_settings, "uses_onednn", lambda: onednn)
    keep_memory()
    assert KEEP_MEMORY not in os.environ


@pytest.mark.parametrize(
    ("flags", "uses"),
    [
        ("flags\t\t: fpu sse avx2 fma\n", False),
        ("flags\t\t: fpu avx512_vnni\n", True),
        ("Features\t: fp asimd\n", None),
        (None, None),
    ],
)
def test_onednn_depends_on_the_features_of_the_cpu(tmp_path, monkeypatch, flags, uses):
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(f"processor\t: 0\n{flags}\nprocessor\t: 1\n")
    assert uses_onednn(path) is False
    monkeypatch.setenv(ONEDNN, "true")
    assert uses_onednn(path) is True
    monkeypatch.delenv(ONEDNN)
    assert uses_onednn(path) is uses


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("0", 2), ("", 2), (None, 2)])
def test_as_many_operations_run_at_once_as_there_are_cores(value, expected, monkeypatch):
    monkeypatch.setattr(cpu_settings, "cores", lambda: (0, 5))
    if value is None:
        monkeypatch.delenv("TF_NUM_INTEROP_THREADS", raising=False)
    else:
        monkeypatch.setenv("TF_NUM_INTEROP_THREADS", value)
    assert cpu_settings.operations_at_once() == expected
