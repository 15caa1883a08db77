"""Test the table of `tfdist plan`, its wrong arguments and its exit codes."""

import pytest

from tests.unit.run.plan.test_options import FOUR, MEGA
from tfdist.run.plan.options import all_options, choose
from tfdist.tools.plan import main, table


def test_table_marks_fitting_options_and_their_flags():
    options = all_options(FOUR, 4)
    lines = table(FOUR, options, 170 * MEGA, *choose(options, 170 * MEGA))
    assert lines[0] == (
        "One device, 32 examples a step: weights 40 MB, gradients 40 MB, optimizer 80 MB, "
        "activations 32 MB"
    )
    by_name = {line.split("  ")[0]: line for line in lines}
    assert "too large" in by_name["data parallel"]
    assert "fits" in by_name["ZeRO-2"]
    assert by_name["ZeRO-2, bfloat16"].endswith('parallel.zero=2 sync.comm_dtype="bfloat16"')
    assert lines[-1].startswith("Take ZeRO-2: the first that fits")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "4"], "--config: expected a config file"),
        (
            ["--config=a.py", "--memory", "16"],
            "expected a size such as 16GB, 800MiB or 64k, received '16'",
        ),
        (["--config=a.py", "--memory", "0GB"], "received '0GB'"),
        (["--config=a.py", "--devices", "0"], "received '0'"),
        (["--config=a.py", "--device", "4"], "Did you mean --devices?"),
        (["--config=a.py", "--microbatches", "half"], "received 'half'"),
        (["--config=a.py", "--find-batch"], "--find-batch: expected --memory AMOUNT too"),
    ],
)
def test_wrong_arguments_are_named(words, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        main.parse(words)


def test_exit_codes(capsys):
    assert main(["--memory", "1GB"]) == 2
    assert "tfdist plan" in capsys.readouterr().err
