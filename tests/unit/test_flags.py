"""Test that a script's flags reach make_strategy, and that mistakes end it with exit code 78."""

import pytest
from absl import flags as absl_flags

from tfdist import app, flags
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE


def parsed(*words):
    values = absl_flags.FlagValues()
    flags.define(values)
    values(["train.py", *words])
    return values


def test_only_given_flags_are_returned():
    assert flags.parsed_options(parsed("--seed=3", "--strategy=mirrored")) == {
        "strategy": "mirrored"
    }
    words = [
        "--cluster=c.yaml",
        "--task_type=worker",
        "--task_index=1",
        "--devices=2",
        "--communication=ring",
    ]
    assert flags.parsed_options(parsed(*words)) == {
        "cluster": "c.yaml",
        "task": "worker:1",
        "devices": "2",
        "communication": "ring",
    }


def test_foreign_or_unparsed_flags_are_ignored():
    values = absl_flags.FlagValues()
    assert flags.parsed_options(values) == {}
    absl_flags.DEFINE_string("strategy", "theirs", "", flag_values=values)
    values(["train.py", "--strategy=theirs"])
    assert flags.parsed_options(values) == {}
    unparsed = absl_flags.FlagValues()
    flags.define(unparsed)
    assert flags.parsed_options(unparsed) == {}


@pytest.mark.parametrize(
    ("given", "missing"), [("--task_type=worker", "task_index"), ("--task_index=0", "task_type")]
)
def test_task_type_without_task_index_is_refused(given, missing):
    with pytest.raises(ValueError, match=f"--{missing} is missing"):
        flags.parsed_options(parsed(given))


def test_our_errors_read_plainly_and_others_keep_their_traceback(capsys):
    with pytest.raises(SystemExit) as stop:
        app.exit_on_configuration_error(flags.parsed_options, parsed("--task_type=worker"))
    assert stop.value.code == CONFIGURATION_CODE
    assert isinstance(stop.value.__cause__, ValueError)
    assert capsys.readouterr().err.startswith("error: --task_index is missing")
    with pytest.raises(ValueError, match="invalid literal"):
        app.exit_on_configuration_error(int, "x")


SCRIPT = """
from absl import flags
import tfdist
EPOCHS = flags.DEFINE_integer("epochs", 1, "Passes.")
def main(argv):
    print(argv[1:], EPOCHS.value, flags.FLAGS.log_dir, flags.FLAGS.seed, tfdist.flags.parsed_options())
tfdist.app.run(main)
"""  # noqa: E501


def test_a_script_gets_its_own_flags_and_ours(run_python):
    done = run_python(SCRIPT, "--epochs=2", "--log_dir=logs", "--devices=2", "more")
    assert done.stdout.strip() == "['more'] 2 logs 0 {'devices': '2'}", done.stderr
    wrong = run_python(SCRIPT, "--epoch=2")
    assert wrong.returncode == CONFIGURATION_CODE
    assert "Unknown command line flag 'epoch'" in wrong.stderr
