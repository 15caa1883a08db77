"""Test the section `launch` of config files, which are run in processes of their own."""

import re
import shlex
import subprocess
import sys

import pytest
import yaml

from tests.processes import ROOT
from tfdist import config
from tfdist.launch import main, submit
from tfdist.run import train_command

HEAD = "import tfdist\ndef get_config(text=''):\n    config = tfdist.config.default()\n"
KUBERNETES = """
launch.on = "kubernetes"
launch.image = "registry.example/train:1"
launch.restarts = 5
launch.workers = 4
launch.memory = "8Gi"
launch.namespace = "ml"
launch.env = {"A": "b c", "N": 3}
launch.volume = ["snapshots:/snapshots"]
"""
SLURM = """
launch.on = "slurm"
launch.partition = "main"
launch.time = 60
launch.slurm_options = "--cpus-per-task=8 --exclusive"
launch.job_name = "digits"
launch.queue_timeout = 2.5
"""


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def write(text, name="own.py"):
    """Write a config file with a section."""
    lines = [f"    config.{line}\n" for line in text.strip().splitlines()]
    with open(name, "w") as file:
        file.write(HEAD + "".join(lines) + "    return config\n")
    return name


def test_a_config_does_not_see_the_secret_of_the_launchers(monkeypatch):
    monkeypatch.setenv("TFDIST_TOKEN", "of the launchers")
    write('launch.job_name = "seen" if "TFDIST_TOKEN" in __import__("os").environ else "unseen"')
    assert parse(submit.main, "--on", "slurm", "--config", "own.py").job_name == "unseen"


def parse(command, *words, script=("train.py",)):
    return command.parse([*words, "--", *script])[0]


def refused(command, *words, **options):
    with pytest.raises(ValueError) as error:
        parse(command, *words, **options)
    return str(error.value)


def test_options_of_a_manifest_come_from_the_file(capsys):
    write(KUBERNETES)
    words = ["--config=own.py", "--dry-run", "--env=A=mine"]
    assert submit.main([*words, "--", "tfdist", "train", "--config=own.py"]) == 0
    jobset = next(
        each for each in yaml.safe_load_all(capsys.readouterr().out) if each["kind"] == "JobSet"
    )
    assert jobset["metadata"]["namespace"] == "ml"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 5
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == 4
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    assert container["image"] == "registry.example/train:1"
    assert container["resources"]["requests"]["memory"] == "8Gi"
    environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert (environ["A"], environ["N"]) == ("mine", "3")
    claims = [volume.get("persistentVolumeClaim", {}) for volume in pod["volumes"]]
    assert {"claimName": "snapshots"} in claims


def test_flags_prevail_and_options_of_the_other_command_are_left_to_it():
    write(SLURM)
    flags = parse(main.main, "--config", "own.py", "--time=5", "--workers", "2")
    assert (flags.on, flags.partition, flags.time, flags.workers) == ("slurm", "main", "5", 2)
    assert flags.slurm_options == "--cpus-per-task=8 --exclusive"
    assert flags.queue_timeout == 2.5
    flags = parse(submit.main, "--config", "own.py")
    assert (flags.job_name, flags.time, flags.queue_timeout) == ("digits", "60", None)


def test_job_has_the_options_of_its_submission(capsys):
    write(SLURM + "launch.hang_timeout = 90\nlaunch.chief = True\n")
    assert submit.main(["--dry-run", "--", "tfdist", "train", "--config=own.py"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --partition=main" in script
    assert "#SBATCH --job-name=digits" in script
    launch = next(line for line in script.splitlines() if "-m tfdist launch" in line)
    words = shlex.split(launch.removesuffix(" &"))
    flags = parse(main.main, *words[words.index("launch") + 1 : words.index("--")])
    assert (flags.config, flags.chief, flags.hang_timeout) == ("none", True, 90)
    assert flags.partition is None


def test_the_config_of_a_training_counts_if_it_has_the_section():
    training = ("tfdist", "train", f"--config={write('launch.workers = 3')}")
    assert parse(main.main, script=training).workers == 3
    assert parse(main.main, "--config=none", script=training).workers is None
    assert (
        parse(main.main, f"--config={write('name = chr(97)', 'b.py')}", script=training).on is None
    )
    with open("slow.py", "w") as file:  # is not run
        file.write("raise SystemExit('imported')")
    for path in ("slow.py", "only_in_the_image.py"):
        assert parse(main.main, script=("tfdist", "train", "--config", path)).workers is None


def test_file_gets_its_text():
    write("launch.workers = int(text)")
    assert parse(main.main, "--config=own.py:7").workers == 7


def test_yaml_files_have_the_section_and_inherit_it():
    write("launch.workers = 4\nlaunch.restarts = 2")
    with open("own.yaml", "w") as file:
        file.write("base: own.py\nname: x\nlaunch:\n  workers: 3\n  chief: true\n")
    flags = parse(main.main, script=("tfdist", "train", "--config=own.yaml"))
    assert (flags.workers, flags.restarts, flags.chief) == (3, 2, True)
    with open("wrong.yaml", "w") as file:
        file.write("launch:\n  wrokers: 3\ntrain:\n  epoch: 3\n")
    message = refused(main.main, script=("tfdist", "train", "--config=wrong.yaml"))
    assert message.startswith("wrong.yaml, line 4: train.epoch: no such key"), message


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "launch.wrokers = 3",
            ["own.py: launch.wrokers:", "no --wrokers", "did you mean workers?"],
        ),
        (
            "launch.workers = 'x'",
            ["--workers: expected a whole number", "'x'", "launch.workers in"],
        ),
        ("launch.workers = True", ["own.py: launch.workers: expected a value", "received True"]),
        ("launch.workers = [1, 2]", ["launch.workers: expected one value", "received [1, 2]"]),
        ("launch.chief = 'yes'", ["--chief", "'yes'", "launch.chief in own.py"]),
        ("launch.workers = {'a': 1}", ["launch.workers: expected text", "{'a': 1}"]),
        ("launch.env = {'A': None}", ["launch.env: expected text", "{'A': None}"]),
        ("launch.on = 'kubernetes'", ["--on: invalid choice: 'kubernetes'", "launch.on in own.py"]),
        (
            "launch.partition = 'p'",
            ["--partition: expected together with --on slurm", "launch.partition in own.py"],
        ),
        ("launch.dry_run = True", ["launch.dry_run: expected an option"]),
        ("launch = 3", ["own.py: launch: expected a section of options, received 3"]),
        ("launch.env = {1, 2}", ["own.py: ", "set is not JSON serializable"]),
        ("name = missing", ["own.py: expected a config, received NameError", "(line 4)"]),
    ],
)
def test_wrong_options_are_named(line, parts):
    write(line)
    message = refused(main.main, "--config=own.py")
    assert all(part in message for part in parts), message


def test_option_of_another_engine_is_named():
    write("launch.image = 'a'\nlaunch.on = 'slurm'")
    message = refused(submit.main, "--config=own.py")
    assert re.match(
        r"--image: expected together with --on kubernetes, received --on slurm", message
    )
    assert "launch.image in own.py" in message


def test_wrong_files_are_named():
    assert "received 'none.py', which is not in" in refused(main.main, "--config=none.py")
    with open("empty.py", "w"):
        pass
    assert "empty.py: expected a function get_config()" in refused(main.main, "--config=empty.py")
    with open("dies.py", "w") as file:
        file.write("import os\ndef get_config(): os._exit(3)\n")
    assert "ended with code 3" in refused(main.main, "--config=dies.py")


def test_option_as_a_key_of_the_training_is_refused():
    path = write("launch.workers = 2")
    training = ("tfdist", "train", f"--config={path}", "--config.launch.workers=3")
    assert "as a flag before `--`, such as --workers" in refused(main.main, script=training)
    with pytest.raises(ValueError, match=r"launch.workers: expected in the config file"):
        train_command.parse(training[2:])


def test_runs_do_not_read_the_section():
    settings = train_command.parse([f"--config={write(KUBERNETES)}"])
    assert settings == config.Run()


def test_launcher_does_not_import_what_the_file_imports():
    write("launch.workers = 3")
    with open("own.py") as file:
        text = file.read()
    with open("own.py", "w") as file:
        file.write("import decimal\nprint('hello')\n" + text)
    code = (
        "import sys; from tfdist.launch import main; "
        "flags, _ = main.main.parse(['--config=own.py', '--', 'x']); "
        "print(flags.workers, {'decimal', 'ml_collections'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "3 set()\n", result.stderr
