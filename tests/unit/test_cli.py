"""Test that the command line is quick, loads no TensorFlow, and is clear about mistakes."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tfdist import cli
from tfdist.cluster.spec import ClusterSpec
from tfdist.launch import main as launch
from tfdist.launch import task_plan
from tfdist.launch.task_plan import SCRIPT_RUNNER
from tfdist.runtime.command import Command, usage_errors
from tfdist.tools import chaos, data

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Return an empty directory with one script in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["launch", "--help"],
        ["data", "--help"],
        ["chaos", "report", "--help"],
        ["doctor", "--help"],
        ["new", "--help"],
        ["check", "--help"],
        ["--version"],
    ],
)
def test_help_imports_few_modules_and_no_tensorflow(words):
    """Importing modules is most of the time that it takes."""
    code = (
        "import sys\nfrom tfdist.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'absl'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert len(sys.modules) < 300, len(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60
    )


def test_python_m_tfdist_is_the_same(capsys):
    run = subprocess.run(
        [sys.executable, "-m", "tfdist", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == cli.main(["--help"]) == 0
    assert run.stdout == capsys.readouterr().out
    assert all(name in run.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lanch"], "received 'lanch'. Did you mean `tfdist launch`?"),
        (
            ["fly"],
            "expected a command ("
            + ", ".join(cli.COMMANDS)
            + "), received 'fly'.\nSee `tfdist --help`.",
        ),
    ],
)
def test_an_unknown_command(words, message, capsys):
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--help", "--version", "--completion bash"])
def test_output_that_nobody_reads_ends_the_command_without_a_traceback(words):
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "tfdist", *words.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")


def test_closed_output_changes_no_exit_code():
    run = subprocess.run(
        ["sh", "-c", '"$0" -m tfdist goodput /nowhere >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.returncode == 2
    assert "/nowhere" in run.stderr
    assert "Traceback" not in run.stderr


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--workers x -- train.py",
            "--workers: expected a whole number of at least 0, received 'x'",
        ),
        (
            "--workers -1 -- train.py",
            "--workers: expected a whole number of at least 0, received '-1'",
        ),
        (
            "--workers 0 -- train.py",
            "--workers: expected at least 1 without --chief, received 0",
        ),
        ("--workers", "--workers: expected one argument"),
        (
            "--threads 0 -- train.py",
            "--threads: expected auto or a whole number of at least 1, received '0'",
        ),
        ("--grace soon -- train.py", "--grace: expected seconds, 0 or more, received 'soon'"),
        ("--grace inf -- train.py", "--grace: expected seconds, 0 or more, received 'inf'"),
        ("--color red -- train.py", "--color: invalid choice: 'red'"),
        ("--wrokers 2 -- train.py", "--wrokers: no such flag. Did you mean --workers?"),
        ("--log_dir=x -- train.py", "--log_dir=x: no such flag. Did you mean --log-dir?"),
        (
            "--allow_remote -- train.py",
            "no such flag. Did you mean --allow-remote?",
        ),
        ("--learning_rate 1 -- train.py", "Write COMMAND and its own flags after `--`"),
        (
            "--workers 2 train.py",
            "expected a flag, received 'train.py'. Write COMMAND",
        ),
        (
            "--task worker:1 -- train.py",
            "--task: expected together with --cluster FILE, received alone",
        ),
        ("--workers 2 --ps 1 -- train.py", "--ps: expected together with --chief, received --ps 1"),
        ("--cluster c.yaml --ps 1 -- train.py", "--ps: expected without --cluster, received both"),
        ("--cluster none.yaml -- train.py", "none.yaml"),
        ("--log-dir train.py -- train.py", "--log-dir: expected a directory that can be written"),
        ("--workers 2", "expected a COMMAND after `--`, received none"),
        ("-- none.py", "expected a Python file, received 'none.py'; there is no such file in"),
        ("-- python none.py", "expected a Python file, received 'none.py'"),
        ("-- no-such-program", "can be executed, received 'no-such-program'; check its name"),
        ("-- ./data.txt", "received './data.txt'; make it executable (chmod +x)"),
        ("-- -m", "-m: expected a module's name, received nothing"),
        (
            "-- -m no_such_package.train",
            "received -m no_such_package.train; there is no 'no_such_package'",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_starts(words, message, workplace, capsys):
    (workplace / "data.txt").touch()
    assert launch.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("tfdist launch: error: ")
    assert message in err
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py --lr 1", (*SCRIPT_RUNNER, "train.py", "--lr", "1")),
        ("python train.py -x", (*SCRIPT_RUNNER, "train.py", "-x")),
        ("python3 train.py", (*SCRIPT_RUNNER, "train.py")),
        ("python -m json.tool a", (*SCRIPT_RUNNER, "-m", "json.tool", "a")),
        ("-m json.tool a", (*SCRIPT_RUNNER, "-m", "json.tool", "a")),
        ("tfdist train --config=a.py", (*SCRIPT_RUNNER, "-m", "tfdist", "train", "--config=a.py")),
        ("python -u train.py", (sys.executable, "-u", "train.py")),
        ("sh -c exit", ("sh", "-c", "exit")),
    ],
)
def test_command_is_resolved(words, expected, workplace):
    assert task_plan.resolve_command(words.split()) == expected


def test_arguments_after_the_script_are_passed_through():
    _, command = launch.main.parse(["--", "train.py", "--workers", "9", "--", "x"])
    assert command == ["train.py", "--workers", "9", "--", "x"]


def test_remote_access_is_off_unless_allowed():
    assert not launch.main.parse(["--", "train.py"])[0].allow_remote
    assert launch.main.parse(["--allow-remote", "--", "train.py"])[0].allow_remote
    assert launch.main.parse(["--cluster", "c.yaml", "--allow-remote", "--", "train.py"])[
        0
    ].allow_remote  # true there anyway


def test_tasks_get_a_secret_of_their_own_and_not_the_launchers(tmp_path):
    spec = ClusterSpec.local()
    for given, secret, expected in [
        ({}, "", None),
        ({}, "made here", "made here"),
        ({"TFDIST_TASK_SECRET": "of the scheduler"}, "", "of the scheduler"),
    ]:
        (plan,) = task_plan.plan_tasks(
            spec,
            spec.tasks,
            ["x"],
            environ={"TFDIST_TOKEN": "of the launchers", **given},
            log_dir=str(tmp_path),
            attempt=0,
            threads=None,
            cores=1,
            secret=secret,
        )
        assert plan.environ.get("TFDIST_TASK_SECRET") == expected
        assert "TFDIST_TOKEN" not in plan.environ


@pytest.mark.parametrize(
    ("cores", "threads", "environ", "expected"),
    [
        (8, None, {}, "2"),
        (2, None, {}, "1"),  # at least one
        (8, None, {"OMP_NUM_THREADS": "5"}, "5"),  # what the user set stays
        (8, 3, {"OMP_NUM_THREADS": "5"}, "3"),  # the flag is the nearer word
    ],
)
def test_environment_of_the_tasks(cores, threads, environ, expected, tmp_path):
    spec = ClusterSpec.local(workers=2, ps=1, chief=True)
    plans = task_plan.plan_tasks(
        spec,
        spec.tasks,
        ["x"],
        environ={"HOME": "/h", "TF_CONFIG": "stale", **environ},
        log_dir=str(tmp_path),
        attempt=2,
        threads=threads,
        cores=cores,
    )
    assert [task.name for task in plans] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert [task.role.value for task in plans] == ["trains", "serves", "serves", "serves"]
    worker = plans[2]
    assert worker.environ["OMP_NUM_THREADS"] == expected
    assert worker.environ["HOME"] == "/h"
    assert worker.environ["TFDIST_TASK"] == "worker:1"
    assert worker.environ["TFDIST_ATTEMPT"] == "2"
    assert worker.environ["TFDIST_LOG_DIR"] == str(tmp_path)
    assert (
        worker.environ["TFDIST_ERROR_FILE"]
        == worker.error_path
        == os.path.join(tmp_path, "attempt-2", "worker-1.error.json")
    )
    read = ClusterSpec.from_tf_config(worker.environ["TF_CONFIG"])
    assert (read.jobs, str(read.task)) == (spec.jobs, "worker:1")


EVERY_COMMAND = [
    *cli.COMMANDS,
    *(f"data {name}" for name in data.COMMANDS),
    *(f"chaos {name}" for name in chaos.COMMANDS),
]

REQUIRED = {
    "report": ["runs"],
    "data show": ["digits"],
    "data head": ["digits"],
    "data write": ["digits", "--to=copy"],
}


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_help_ends_with_the_exit_codes(command, capsys):
    with contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: tfdist {command}")
    codes = text.partition("\nexit codes:\n")[2]
    assert re.match(r"  0     \S", codes)
    mistake = "  78 " if command == "train" else "  2  "
    assert f"\n{mistake}" in codes
    assert "\n  130   you pressed Ctrl-C" in codes


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_help_is_at_most_100_columns_wide(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize("command", [name for name in EVERY_COMMAND if name != "train"])
def test_flags_have_hyphens_and_an_underscore_gets_a_hint(command, capsys):
    with contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out.partition("\noptions:\n")[2]
    for flag in set(re.findall(r"^  (--[a-z][\w-]*)", text, re.MULTILINE)):
        assert "_" not in flag
        wrong = "--" + flag[2:].replace("-", "_")
        if wrong != flag:
            assert cli.main([*command.split(), *REQUIRED.get(command, []), wrong]) == 2
            error = capsys.readouterr().err
            assert f"{wrong}: no such flag. Did you mean {flag}?" in error


def test_ctrl_c_is_reported_and_signals_are_given_back(capsys):
    def run(flags, words):
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGTERM)
    assert Command("tfdist x", "X.", {}, run)([]) == 130
    assert capsys.readouterr().err == "tfdist x: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_mistake_that_a_command_finds_while_it_runs(capsys):
    def run(flags, words):
        with usage_errors():
            raise ValueError("--x: wrong")

    assert Command("tfdist x", "X.", {}, run)([]) == 2
    assert capsys.readouterr().err == "tfdist x: error: --x: wrong\nSee `tfdist x --help`.\n"


def test_a_wrong_configuration_is_one_sentence(capsys):
    def run(flags, words):
        ClusterSpec.from_file("none.yaml")

    with pytest.raises(SystemExit, match="78"):
        Command("tfdist x", "X.", {}, run)([])
    assert re.fullmatch(r"error: .*none\.yaml.*\n", capsys.readouterr().err)
