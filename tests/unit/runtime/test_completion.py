"""Test completion of commands and flags in the shells that are installed."""

import shutil
import subprocess

import pytest

from tfdist import cli


def script(shell, capsys):
    assert cli.main(["--completion", shell]) == 0
    return capsys.readouterr().out


def completed(code, words):
    """Return the words that bash offers for the last of these."""
    quoted = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        [
            "bash",
            "--norc",
            "-euc",
            f"{code}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words) - 1}\n"
            'COMP_WORDS+=("" "")\n_tfdist\nprintf "%s\\n" "${COMPREPLY[@]}"',
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split())


def test_bash_completes_commands_flags_and_keys(capsys):
    code = script("bash", capsys)
    assert completed(code, ["tfdist", "la"]) == ["launch"]
    assert set(cli.COMMANDS) < set(completed(code, ["tfdist", ""]))
    assert completed(code, ["tfdist", "launch", "--rest"]) == ["--restart-window", "--restarts"]
    assert completed(code, ["tfdist", "launch", "--workers", "2", "--restart-w"]) == [
        "--restart-window"
    ]
    assert completed(code, ["tfdist", "data", "sh"]) == ["show"]
    assert completed(code, ["tfdist", "data", "show", "digits", "--la"]) == ["--labels"]
    assert completed(code, ["tfdist", "train", "--config.train.opt"]) == [
        "--config.train.optimizer",
        "--config.train.optimizer_options",
    ]
    assert completed(code, ["tfdist", "new", "x", "--t"]) == ["--template"]


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_the_script_of_another_shell_can_be_parsed(shell, check, capsys, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (apt: {shell})")
    (tmp_path / "script").write_text(script(shell, capsys))
    subprocess.run([shell, check, str(tmp_path / "script")], check=True, timeout=60)


def test_scripts_of_all_shells_have_all_commands(capsys):
    for shell in ("bash", "zsh", "fish"):
        text = script(shell, capsys)
        assert not [name for name in cli.COMMANDS if f" {name}" not in text]
        assert "optimizer_options" in text


@pytest.mark.parametrize("words", [[], ["csh"], ["bash", "more"]])
def test_another_shell_is_an_error(words, capsys):
    assert cli.main(["--completion", *words]) == 2
    assert "--completion: expected bash, zsh, fish; received" in capsys.readouterr().err
