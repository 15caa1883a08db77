"""Test doctor's checks of a host: facts with one fault each, most of them in real files."""

import dataclasses
import json
import os
import re
import time

import pytest

from tests.processes import ROOT
from tfdist.cluster.spec import ClusterSpec
from tfdist.launch import doctor_check
from tfdist.launch import main as launch
from tfdist.runtime import resource_limits
from tfdist.tools.doctor import (
    check_results,
    file_systems,
    frameworks,
    host,
    machine,
    main,
    rendering,
)
from tfdist.tools.doctor.file_systems import WriteTest
from tfdist.tools.doctor.frameworks import Frameworks
from tfdist.tools.doctor.machine import Card, Machine

GB = 1 << 30
GOOD = Machine(
    python=(3, 11, 4),
    versions={"tensorflow": "2.21.0", "keras": "3.15.1", "tfdist": "0.1.0"},
    available=16 * GB,
    capacity=32 * GB,
    cores=8,
    machine_cores=8,
    shm=(8 * GB, 8 * GB),
    files=(65536, 65536),
    now=1.8e9,
    installed=1.7e9,
)
GPUS = dataclasses.replace(GOOD, cards=2, driven=2, smi=(Card("H200", 140 * GB, 139 * GB),) * 2)
TENSORFLOW = Frameworks(seconds=3.0, tensorflow="2.21.0", keras="3.15.1")
CUDA = dataclasses.replace(
    TENSORFLOW,
    cuda=True,
    cuda_version="12.5.1",
    cudnn_version="9",
    gpus=("/physical_device:GPU:0", "/physical_device:GPU:1"),
)


def bad(checks):
    """Return the checks that do not pass, by name; each has a remedy."""
    assert all(check.remedy for check in checks if check.status != "pass")
    return {check.name: check for check in checks if check.status != "pass"}


@pytest.mark.parametrize(("facts", "said"), [(GOOD, TENSORFLOW), (GPUS, CUDA)])
def test_a_good_host_passes(facts, said):
    assert not bad([*host.check_machine(facts, workers=2), *host.check_frameworks(facts, said)])


@pytest.mark.parametrize(
    ("fault", "name", "status", "text"),
    [
        ({"python": (3, 9, 1)}, "Python", "fail", "3.9.1; supported: 3.10 to 3.13"),
        ({"python": (3, 15, 0)}, "Python", "warn", "3.15.0; supported"),
        (
            {"versions": {"tensorflow": None, "keras": "3.15.1"}},
            "TensorFlow",
            "fail",
            "not installed",
        ),
        (
            {"versions": {"tensorflow": "2.21.0", "keras": "2.15.0"}},
            "Keras",
            "fail",
            "2.15.0; supported: 3.10 to 3.15",
        ),
        (
            {"versions": {"tensorflow": "2.30.0rc1", "keras": "3.15.1"}},
            "TensorFlow",
            "warn",
            "2.30.0rc1",
        ),
        (
            {"now": 1.6e9},
            "clock",
            "fail",
            "2020-09-13 12:26:40 UTC, which is before tfdist was installed",
        ),
        ({"now": 5e9}, "clock", "fail", "2128"),
        ({"available": 1 * GB}, "memory", "fail", "1.07 GB available"),
        (
            {"available": 2 * GB},
            "memory",
            "warn",
            "2 workers of TensorFlow alone take some 1.26 GB",
        ),
        ({"available": None}, "memory", "warn", "unknown"),
        ({"cores": 1}, "cores", "warn", "1 of 8 cores for 2 workers"),
        ({"quota": 1.5}, "cores", "warn", "time of 1.5 by the container's limit"),
        ({"threads": {"OMP_NUM_THREADS": "8"}}, "threads", "warn", "2 x 8 threads on 8 cores"),
        ({"threads": {"OMP_NUM_THREADS": "all"}}, "threads", "fail", "OMP_NUM_THREADS='all'"),
        ({"shm": (32 << 20, 64 << 20)}, "/dev/shm", "warn", "33.6 MB free of 67.1 MB"),
        ({"shm": None}, "/dev/shm", "warn", "there is none"),
        ({"files": (1000, 4096)}, "open files", "warn", "1,000"),
        ({"files": (100, 100)}, "open files", "fail", "100"),
    ],
)
def test_fault_of_the_machine_is_named(fault, name, status, text):
    faults = bad(host.check_machine(dataclasses.replace(GOOD, **fault), workers=2))
    assert set(faults) == {name}
    assert faults[name].status == status
    assert text in faults[name].found


@pytest.mark.parametrize(
    ("facts", "said", "name", "text"),
    [
        (
            GOOD,
            Frameworks(error="failed: ImportError: libcudart.so.12"),
            "import",
            "import of TensorFlow and Keras failed: ImportError: libcudart.so.12",
        ),
        (GOOD, dataclasses.replace(TENSORFLOW, backend="jax"), "Keras backend", "jax"),
        (
            dataclasses.replace(GOOD, cards=1),
            CUDA.__class__(seconds=1.0),
            "GPUs",
            "1 NVIDIA card on the bus, but no driver is loaded",
        ),
        (
            GPUS,
            TENSORFLOW,
            "GPUs",
            "2 with a driver, but TensorFlow sees 0: it is built without CUDA",
        ),
        (GPUS, dataclasses.replace(CUDA, gpus=()), "GPUs", "the CUDA libraries are missing"),
        (
            dataclasses.replace(GPUS, visible="0,7"),
            dataclasses.replace(CUDA, gpus=("GPU:0",)),
            "GPUs",
            "'0,7' names 2, TensorFlow sees 1",
        ),
    ],
)
def test_fault_of_the_frameworks_is_named(facts, said, name, text):
    faults = bad(host.check_frameworks(facts, said))
    assert set(faults) == {name}
    assert faults[name].status == "fail"
    assert text in faults[name].found


def test_hidden_gpus_are_meant_so():
    assert not bad(
        host.check_frameworks(
            dataclasses.replace(GPUS, visible="-1"), dataclasses.replace(CUDA, gpus=())
        )
    )


def test_busy_gpus():
    busy = dataclasses.replace(
        GPUS, smi=(Card("H200", 140 * GB, 139 * GB), Card("H200", 140 * GB, 3 * GB))
    )
    assert bad(host.check_frameworks(busy, CUDA))["GPUs"].status == "warn"


def test_the_memory_of_gpus_is_unknown():
    assert (
        "free memory: unknown"
        in bad(host.check_frameworks(dataclasses.replace(GPUS, smi=()), CUDA))["GPUs"].found
    )


def test_gpus_that_are_hidden_are_not_judged():
    cards = (Card("T4", 16 * GB, 0, "GPU-11aa"), Card("H200", 140 * GB, 139 * GB, "GPU-22bb"))
    for visible, shown in (
        (None, cards),
        ("1", cards[1:]),
        ("GPU-22", cards[1:]),
        ("1,0", cards[::-1]),
        ("1,-1,0", cards[1:]),
        ("MIG-33", ()),
        ("-1", ()),
    ):
        assert dataclasses.replace(GPUS, smi=cards, visible=visible).shown == shown
    one = dataclasses.replace(CUDA, gpus=CUDA.gpus[:1])
    assert not bad(host.check_frameworks(dataclasses.replace(GPUS, driven=1, smi=cards[1:]), one))
    assert not bad(host.check_frameworks(dataclasses.replace(GPUS, smi=cards, visible="1"), one))


def test_oldest_versions_equal_those_in_setup_py():
    """The oldest versions of the checks are those of the package."""
    asked = (ROOT / "setup.py").read_text()
    for package, version in host.OLDEST.items():
        assert f'"{package}>={".".join(map(str, version))}"' in asked
    assert f'python_requires=">={".".join(map(str, host.OLDEST_PYTHON))}"' in asked


# What a process with TensorFlow says: real processes, and packages that break.
BROKEN = {
    "raise ImportError('libcudart.so.12: cannot open shared object file')": (
        "failed: ImportError: libcudart.so.12: cannot open"
    ),
    "import time; time.sleep(60)": "did not end within 3 s",
    "import os, signal; os.kill(os.getpid(), signal.SIGILL)": (
        "ended by SIGILL: this processor lacks instructions"
    ),
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "was ended by SIGSEGV",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_tensorflow_is_a_failing_check(code, tmp_path, monkeypatch):
    (tmp_path / "keras.py").write_text(code)  # it is imported first
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    result = frameworks.look(["ram://somewhere"], ["--config=x.py"], timeout=3)
    assert BROKEN[code] in result.frameworks.error
    (check,) = host.check_frameworks(GOOD, result.frameworks)
    assert (check.name, check.status) == ("import", "fail")
    assert "TensorFlow could not test it: its process" in result.directories[0].error
    assert result.trial.error


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1000 kB\nMemAvailable:   16777216 kB\n"


def test_memory_limits_and_cards_are_read_from_files(tmp_path):
    plant(tmp_path, {"proc/meminfo": MEMINFO})
    assert resource_limits.memory(tmp_path) == (16 * GB, 32 * GB)
    assert resource_limits.quota(tmp_path) is None
    assert machine.driven_cards(tmp_path) == machine.pci_cards(tmp_path) == 0


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GB}\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/cpu.max": "150000 100000\n",
        },
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GB}",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_limits_of_a_container(files, tmp_path):
    plant(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert resource_limits.memory(tmp_path) == (1 * GB, 4 * GB)
    assert resource_limits.quota(tmp_path) == 1.5


def test_cards_on_the_bus_and_in_a_container(tmp_path):
    for number in range(4):
        plant(
            tmp_path,
            {
                f"sys/bus/pci/devices/{number}/vendor": "0x10de\n",
                f"sys/bus/pci/devices/{number}/class": "0x030200\n",
            },
        )
        plant(tmp_path, {f"proc/driver/nvidia/gpus/{number}/information": ""})
    plant(
        tmp_path,
        {"sys/bus/pci/devices/9/vendor": "0x10de\n", "sys/bus/pci/devices/9/class": "0x040300\n"},
    )  # a sound device
    assert (machine.pci_cards(tmp_path), machine.driven_cards(tmp_path)) == (4, 4)
    plant(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""})
    assert machine.driven_cards(tmp_path) == 2


def test_this_machine_is_looked_at():
    facts = machine.look()
    assert facts.available
    assert facts.cores >= 1
    assert facts.versions["keras"]
    assert not [
        check
        for check in host.check_machine(facts, 1)
        if check.name in ("Python", "TensorFlow", "Keras", "clock") and check.status == "fail"
    ]


# Places: real ones.
def test_usable_directory_is_left_unchanged(tmp_path):
    (tmp_path / "there").write_text("mine")
    for path in (tmp_path, tmp_path / "a" / "b"):
        write_test = file_systems.try_directory(str(path))
        assert file_systems.check_directory(write_test).status == "pass"
        assert write_test.free > 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


def test_file_instead_of_a_directory_is_named(tmp_path):
    (tmp_path / "runs").write_text("mine")
    for path in (tmp_path / "runs", tmp_path / "runs" / "digits"):
        check = file_systems.check_directory(file_systems.try_directory(str(path)))
        assert check.status == "fail"
        assert "a file is in its way" in check.remedy
    assert (tmp_path / "runs").read_text() == "mine"


def test_unwritable_directory_is_named():
    check = file_systems.check_directory(
        file_systems.try_directory("/proc/self")
    )  # root may write anywhere else
    assert check.status == "fail"
    assert "/proc/self: writing a file: " in check.found


def test_a_file_system_that_cannot_replace(tmp_path, monkeypatch):
    def refuse(part, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "replace", refuse)
    check = file_systems.check_directory(file_systems.try_directory(str(tmp_path)))
    assert "renaming a file over another one: Invalid cross-device link" in check.found
    assert "cannot replace a file" in check.remedy
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_hangs(monkeypatch):
    monkeypatch.setattr(file_systems, "try_directory", lambda path: time.sleep(2))
    (write_test,) = file_systems.look(["/mnt/gone"], timeout=0.1)
    check = file_systems.check_directory(write_test)
    assert "no answer within 0.1 s" in check.found
    assert "its server runs" in check.remedy


@pytest.mark.parametrize(
    ("write_test", "status", "text"),
    [
        (WriteTest("runs", free=10 << 20, total=GB, skew=0.0), "fail", "10.5 MB free"),
        (WriteTest("runs", free=GB, total=2 * GB, skew=0.0), "warn", "1.07 GB free of 2.15 GB"),
        (
            WriteTest("runs", free=9 * GB, total=9 * GB, skew=-60.0),
            "warn",
            "its clock is 1 min 0 s behind this host's",
        ),
        (
            WriteTest("runs", free=9 * GB, total=9 * GB, skew=4000.0),
            "fail",
            "its clock is 1 h 6 min ahead of this host's",
        ),
        (
            WriteTest("gs://bucket/runs", error="writing a file: Permission denied"),
            "fail",
            "gs://bucket/runs: writing a file",
        ),
    ],
)
def test_fault_of_a_directory_is_named(write_test, status, text):
    check = file_systems.check_directory(write_test)
    assert check.status == status
    assert text in check.found


# The table, the JSON, the flags.
MIXED = [
    check_results.Check("host", "cores", "pass", "8 cores"),
    check_results.Check("host", "memory", "warn", "little " * 20, "free some " * 20),
    check_results.Check("run", "config", "fail", "broken", "mend it"),
]


def test_the_table_fits_a_terminal():
    lines = rendering.lines(MIXED, {"host": "this host", "run": "the run"}, width=80)
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")] == ["this host", "the run"]
    assert "  fail  config           broken" in lines
    nasty = check_results.Check("cluster", "spec", "fail", "a\x1b[2Jb", "c")
    assert "\x1b" not in "".join(rendering.lines([nasty], {}, width=80))
    assert rendering.summary(MIXED) == "1 passed, 1 warning, 1 failure"


def test_json_for_machines(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["--quick", "--json", "--directory", str(tmp_path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {"tfdist", "host", "status", "counts", "checks"}
    assert all(
        set(check) == {"part", "name", "status", "found", "remedy"} for check in said["checks"]
    )
    assert sum(said["counts"].values()) == len(said["checks"])


def test_a_failure_is_exit_code_1(capsys, tmp_path):
    (tmp_path / "runs").write_text("a file")
    assert main.main(["--quick", "--directory", str(tmp_path / "runs")]) == 1
    assert re.search(
        r"fail  directory .* remedy: a file is in its way.*1 failure",
        capsys.readouterr().out,
        re.DOTALL,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cluster none.yaml", "--cluster none.yaml: expected a file"),
        ("--config=none.py", "--config=none.py: no such file in"),
        ("--config.train.epochs=3", "--config: expected one config file"),
        ("--confg=a.py", "Did you mean --config?"),
        ("--directroy x", "Did you mean --directory?"),
        ("word", "expected a flag, received 'word'"),
        ("--serve", "--serve: expected together with --cluster FILE"),
        ("--task worker:0", "--task: expected together with --cluster FILE"),
        ("--workers 0", "--workers: expected a whole number of at least 1"),
        ("--timeout 0", "--timeout: expected seconds above 0, received '0'"),
        ("--timeout 5", "--timeout: expected together with --cluster FILE"),
        ("--cluster setup.py --serve --together", "--serve: expected without --together"),
        ("--cluster setup.py --serve --json", "--json: expected without --serve"),
    ],
)
def test_a_mistake_on_the_command_line(words, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("tfdist doctor: error: ")
    assert message in err


def test_config_flags_are_passed_through():
    words = [
        "--config",
        str(ROOT / "configs/digits.py"),
        "--config.data.cache",
        "--workers",
        "2",
        "--config.train.epochs",
        "3",
        "--noconfig.data.cache",
    ]
    flags, config = main.main.parse(words)
    assert flags.workers == 2
    assert config == [*words[:3], *words[5:]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--workers 3 -- train.py", "--workers 3 --directory runs"),
        ("--chief --workers 2 --ps 1 --log-dir logs -- train.py", "--workers 4 --directory logs"),
        (
            "--cluster c.yaml --task worker:1 -- train.py",
            "--cluster c.yaml --together --task worker:1",
        ),
        (
            "--rendezvous a:1 --max-workers 4 --workers 2 -- train.py",
            "--workers 2 --directory runs",
        ),
        (
            "-- tfdist train --config=c.py --config.train.epochs=3",
            "--workers 1 --directory runs --config=c.py --config.train.epochs=3",
        ),
        ("-- tfdist train --help", "--workers 1 --directory runs"),
        ("-- other train --config=c.py", "--workers 1 --directory runs"),
    ],
)
def test_launch_flags_are_translated_for_doctor(words, expected):
    flags, command = launch.main.parse(words.split())
    counts = {
        "workers": 1 if flags.workers is None else flags.workers,
        "ps": flags.ps or 0,
        "chief": bool(flags.chief),
    }
    spec = None if flags.rendezvous else ClusterSpec.local(**counts)
    asked = doctor_check.doctor_words(flags, spec, command)
    assert asked == expected.split()
    if not flags.cluster and "--config=c.py" not in asked:
        main.main.parse(asked)


def test_no_remedy_is_lost():
    check = check_results.of_error("run", "model", "model 'x': no such model. Did you mean cnn?")
    assert (check.found, check.remedy) == ("model 'x': no such model", "Did you mean cnn?")
