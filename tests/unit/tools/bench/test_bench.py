"""Test the bench's figures, efficiencies, reasons, tables and arguments.

Planted figures give known medians and reasons; a wrong argument is an error.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.forkserver import Popen
from tfdist import config
from tfdist.runtime.guardian import Guardian
from tfdist.telemetry.step_records import PARTS
from tfdist.tools.bench import rendering
from tfdist.tools.bench.flags import make_jobs
from tfdist.tools.bench.groups import Group, GroupError
from tfdist.tools.bench.jobs import Case, Job
from tfdist.tools.bench.main import Rounds, main, measured
from tfdist.tools.bench.notes import notes
from tfdist.tools.bench.reason import Facts, losses, reason, slowest
from tfdist.tools.bench.results import MODES, Bench, Setup, compared, read

FACTS = Facts(cores=2)


def parts(**milliseconds):
    return dict.fromkeys(PARTS, 0.0) | {name: value / 1e3 for name, value in milliseconds.items()}


def setup(
    strategy="mirrored",
    replicas=2,
    *,
    modes=("strong",),
    batch=64,
    rates=(),
    step_breakdown=None,
    **more,
):
    """Return a setup of three equal rounds."""
    rates = (float(rates),) * 3 if not isinstance(rates, tuple) else rates
    step_breakdown = (
        {0: step_breakdown}
        if step_breakdown and "input" in step_breakdown
        else step_breakdown or {}
    )
    return Setup(
        strategy,
        replicas,
        more.pop("workers", 1),
        modes,
        batch,
        seconds=tuple(batch / r for r in rates),
        rates=rates,
        step_breakdown=step_breakdown,
        **more,
    )


ALONE = setup(
    "one_device",
    1,
    modes=MODES,
    rates=6400,
    step_breakdown=parts(forward_backward=8, update=1, host=1),
)


def sentence(other, facts=FACTS, alone=ALONE):
    first, second = compared([alone, other])
    return reason(second, first, facts)


# --- Figures --------------------------------------------------------------------------------------
def test_medians_and_efficiency():
    two = setup(rates=(9000.0, 9600.0, 100.0))
    weak = setup(modes=("weak",), batch=128, rates=(6400.0, 12800.0, 64000.0))
    alone, strong, both = compared([ALONE, two, weak])
    assert (alone.speedup, alone.efficiency) == (1.0, 1.0)
    assert (strong.rate, strong.speedup, strong.efficiency) == (9000.0, 1.40625, 0.703125)
    assert both.efficiency == 1.0  # the outlier does not count


def test_setups_are_compared_with_one_device_of_the_same_batch():
    own = setup("mirrored", 1, modes=MODES, rates=3200)
    assert (
        compared([own, setup(rates=6400)])[1].efficiency == 1.0
    )  # without one_device the same strategy
    assert compared([own, setup(rates=6400), ALONE])[1].efficiency == 0.5
    assert compared([setup(rates=6400)])[0].efficiency is None
    failed = setup("one_device", 1, modes=MODES, error="no memory")
    assert compared([failed, setup(rates=6400)])[1].efficiency is None
    small, large, two = (
        setup(replicas=n, modes=(), batch=b, rates=r)
        for n, b, r in [(1, 16, 100), (1, 64, 400), (2, 64, 600)]
    )
    assert compared([small, large, two])[2].speedup == 1.5  # of the same batch


def test_a_round_takes_as_long_as_on_its_slowest_worker():
    def timed(seconds, *, waits):
        return {
            "steps": 10,
            "examples": 640,
            "seconds": seconds,
            "step_breakdown": parts(wait=waits),
        }

    rounds = [
        [timed(1.0, waits=0), timed(2.0, waits=1)],
        [timed(3.0, waits=2), timed(1.0, waits=3)],
        [timed(9.0, waits=4), timed(9.0, waits=5)],
    ]
    got = measured(Setup("multi_worker_mirrored", 2, 2, ("strong",), 64), rounds)
    assert got.seconds == (0.2, 0.3, 0.9)
    assert got.rates == (320.0, 640 / 3, 640 / 9)
    assert got.step_breakdown == {0: parts(wait=2), 1: parts(wait=3)}  # of the median round


def test_bench_json_is_read_as_it_was_written(tmp_path):
    bench = Bench(
        "scaling",
        "digits",
        "tfdist bench",
        1.0,
        {"name": "digits"},
        {"gpus": []},
        {},
        {"rounds": 3},
        compared([ALONE, setup(rates=9600)]),
        ("so",),
    )
    (tmp_path / "bench.json").write_text(json.dumps(bench.to_json()))
    assert read(tmp_path) == read(tmp_path / "bench.json") == bench
    [_, two] = bench.to_json()["setups"]
    assert (two["median_rate"], two["rate_spread"], two["speedup"]) == (
        9600.0,
        [9600.0, 9600.0],
        1.5,
    )


@pytest.mark.parametrize(
    "content", [b"", b"3", b"\xff", b"[" * 10_000, b'{"setups": [{"replicas": 2}]}']
)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "bench.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"bench.json: damaged: "):
        read(tmp_path)


# --- Reasons: for each one planted ----------------------------------------------------------------
IDEAL = {"forward_backward": 4, "update": 0.5, "host": 0.5}  # of ALONE, split in two


@pytest.mark.parametrize(
    ("planted", "more", "expected"),
    [
        (
            {"gradient_sync": 3.1},
            {"bytes": 2_790_000},
            (
                "38 % of the step is gradient synchronization: 2.79 MB a step at 900 MB/s; "
                "a larger batch would"
            ),
        ),
        (
            {"gradient_sync": 3.1},
            {"bytes": 2_790_000, "strategy": "central_storage"},
            "mirrored would help, which neither gathers",
        ),
        (
            {"gradient_sync": 3.1},
            {"bytes": 84},
            (
                "38 % of the step is gradient synchronization: 84 B a step in 3.1 ms, "
                "which is latency; a larger batch would"
            ),
        ),
        (
            {"input": 5},
            {},
            (
                "50 % of the step is waiting for input: 5.0 ms where 1/2 of one replica's is 0.00 "
                "ms, as pipelines and steps of 2 replicas share 2 cores; data.cache=true, more "
                "cores or hosts, or data workers (tfdist launch --data-workers N with "
                "data.service=true) on another host would help"
            ),
        ),
        (
            {"wait": 5},
            {},
            "50 % of the step is waiting for the slowest replica: 5.0 ms a step within one process",
        ),
        (
            {"host": 5.5},
            {},
            (
                "55 % of the step is host overhead: 5.5 ms where 1/2 of one replica's is 0.50 ms; "
                "train.steps_per_execution above 1"
            ),
        ),
        ({"update": 5.5}, {}, "the update, which each replica does in full: 5.5 ms where"),
        (
            {"forward_backward": 9},
            {},
            (
                "90 % of the step is forward and backward: 9.0 ms where 1/2 of one replica's is "
                "4.0 ms, as 2 replicas share 2 cores"
            ),
        ),
        (
            {"forward_backward": 9},
            {"strategy": "multi_worker_mirrored", "workers": 2},
            "as 2 workers share 2 cores that one replica alone can use",
        ),
    ],
)
def test_the_reason_is_the_part_that_grew_most(planted, more, expected):
    step_breakdown = parts(**{**IDEAL, **planted})
    text = sentence(setup(rates=6400, step_breakdown=step_breakdown, **more))
    assert expected in text
    assert text.endswith(".")
    assert "\n" not in text


def test_remedies_follow_the_config():
    late = setup(rates=6400, step_breakdown=parts(**IDEAL, input=5))
    assert "data.cache" not in sentence(late, Facts(cores=2, cache=True))
    assert "ms; data.cache=true or data workers" in sentence(late, Facts(cores=2, threads=1))
    host = setup(rates=6400, step_breakdown=parts(**{**IDEAL, "host": 6}))
    assert "a larger train.steps_per_execution" in sentence(
        host, Facts(cores=2, steps_per_execution=8)
    )
    slow = setup(rates=6400, step_breakdown=parts(**{**IDEAL, "forward_backward": 9}))
    assert "32 rows do not keep a replica as busy as 64 do" in sentence(
        slow, Facts(cores=2, threads=1)
    )
    assert "cores" not in sentence(slow, Facts(cores=2, on_cpu=False))
    weak = setup(
        modes=("weak",),
        batch=128,
        rates=6400,
        step_breakdown=parts(forward_backward=18, update=1, host=1),
    )
    assert (
        "18.0 ms where one replica's is 8.0 ms, as replicas on one machine share its memory"
        in sentence(weak, Facts(cores=2, threads=1))
    )


def test_updates_are_divided_only_once():
    slow = setup(rates=6400, step_breakdown=parts(**{**IDEAL, "update": 5.5}))
    assert "(so may parallel.zero=1" in sentence(slow, Facts(cores=2))
    for facts in (Facts(cores=2, zero=2), Facts(cores=2, sync="diloco")):
        assert "zero" not in sentence(slow, facts)
    update = parts(**{**IDEAL, "update": 5.5})
    central = setup("central_storage", rates=6400, step_breakdown=update)
    assert "zero" not in sentence(central, Facts(cores=2))


@pytest.mark.parametrize("onednn", [True, False])
def test_one_replica_is_told_of_onednn(onednn):
    alone = setup("one_device", replicas=1, step_breakdown=parts(forward_backward=9, update=1))
    text = reason(alone, alone, Facts(cores=2, onednn=onednn))
    assert ("TF_ENABLE_ONEDNN_OPTS=1" in text) == (not onednn)
    assert "ONEDNN" not in reason(alone, alone, Facts(cores=2, on_cpu=False, onednn=onednn))


RING = {"communication": "ring"}


@pytest.mark.parametrize(
    ("size", "workers", "facts", "remedies"),
    [
        (50_000_000, 2, RING, ("native", "larger", "bfloat16", "local SGD", "zero=3")),
        (200_000, 2, RING, ("native", "larger", "local SGD")),
        (50_000_000, 1, RING, ("larger", "bfloat16", "local SGD", "zero=3")),
        (50_000_000, 2, RING | {"on_cpu": False}, ("larger", "bfloat16", "local SGD", "zero=3")),
        (50_000_000, 2, {}, ("larger", "bfloat16", "local SGD", "zero=3")),
        (50_000_000, 2, {"zero": 1}, ("larger", "bfloat16", "local SGD")),
        (
            50_000_000,
            2,
            RING | {"comm_dtype": "bfloat16"},
            ("native", "larger", "local SGD", "zero=3"),
        ),
        (50_000_000, 2, RING | {"sync": "local_sgd"}, ("native", "larger", "bfloat16")),
    ],
)
def test_remedies_of_slow_sums_are_not_in_use_yet(size, workers, facts, remedies):
    slow = setup(
        bytes=size,
        workers=workers,
        rates=6400,
        step_breakdown=parts(**IDEAL, gradient_sync=60),
    )
    found = sentence(slow, Facts(cores=2, **facts))
    every = ("native", "larger", "bfloat16", "local SGD", "zero=3")
    assert tuple(word for word in every if word in found) == remedies
    sent = "25 MB" if "comm_dtype" in facts else "50 MB" if size > 10**6 else "200 kB"
    assert sent in found


def test_the_slowest_worker_is_named_where_there_is_one():
    quick = parts(**IDEAL, wait=5)
    slow = parts(forward_backward=9, update=0.5, host=0.5)
    text = sentence(
        setup(
            "multi_worker_mirrored",
            rates=6400,
            workers=3,
            replicas=3,
            step_breakdown={0: quick, 1: slow, 2: quick},
        )
    )
    assert "worker 1; look at what else runs on its host" in text
    assert slowest(setup("multi_worker_mirrored", step_breakdown={0: quick, 1: quick})) is None
    text = sentence(
        setup(
            "multi_worker_mirrored",
            rates=6400,
            workers=2,
            step_breakdown={0: parts(**IDEAL, wait=5), 1: parts(**IDEAL, wait=4.9)},
        )
    )
    assert "up to 5.0 ms a step, for another worker each time" in text


def test_reason_with_ties_and_without_losses():
    tie = setup(
        rates=6400, bytes=10**6, step_breakdown=parts(**IDEAL, input=2.5, gradient_sync=2.5)
    )
    assert "is waiting for input" in sentence(tie)  # of equals the first, each time
    assert (
        sentence(setup(rates=12400, step_breakdown=parts(**IDEAL)))
        == "2 replicas: 97 % of 2 times the work of one, no significant loss."
    )
    assert sentence(setup(rates=6400, step_breakdown=parts(**IDEAL))).startswith(
        "No part of the step is slower than"
    )
    assert sentence(setup(rates=6400)) == ""  # no step breakdown
    assert sentence(setup(rates=6400, step_breakdown=parts())) == ""
    only = setup(rates=6400, step_breakdown=parts(**IDEAL))
    assert "one replica was not measured" in reason(only, None, FACTS)
    nothing = setup("one_device", 1, modes=MODES, rates=6400, step_breakdown=parts(input=1e-3))
    assert losses(only, nothing)["forward_backward"] == 0.004
    assert (
        reason(compared([ALONE])[0], None, FACTS)
        == "80 % of the step of one replica is forward and backward."
    )
    waits = setup(
        "one_device", 1, modes=MODES, rates=6400, step_breakdown=parts(input=9, forward_backward=1)
    )
    assert "data.cache=true" in reason(waits, None, FACTS)


def test_one_replica_under_another_strategy():
    slow = parts(forward_backward=16, update=1, host=1)
    text = sentence(setup("central_storage", 1, modes=MODES, rates=3556, step_breakdown=slow))
    assert (
        "16.0 ms where one replica's is 8.0 ms, as variables are copied out of one device in "
        "each step; mirrored would help"
    ) in text
    assert "the strategy costs that" in sentence(
        setup("mirrored", 1, modes=MODES, rates=3556, step_breakdown=slow)
    )
    assert (
        sentence(setup("mirrored", 1, modes=MODES, rates=6400, step_breakdown=slow))
        == "1 replica: 100 % of the work of one_device, no significant loss."
    )


def test_loss_within_the_spread_of_rounds_gets_no_reason():
    slow = parts(**{**IDEAL, "forward_backward": 9})
    alone = setup(
        "one_device", 1, modes=MODES, rates=(6400.0,) * 5, step_breakdown=ALONE.step_breakdown
    )
    both = setup(rates=(13000.0, 10000.0, 10000.0, 12900.0, 9000.0), step_breakdown=slow)
    assert "within the spread of the rounds" in sentence(both, alone=alone)


def test_one_round_that_is_disturbed_hides_no_loss():
    slow = parts(**{**IDEAL, "forward_backward": 9})
    disturbed = setup(
        "one_device",
        1,
        modes=MODES,
        rates=(6400.0, 2000.0, 6400.0),
        step_breakdown=ALONE.step_breakdown,
    )
    assert "is forward and backward" in sentence(
        setup(rates=7000, step_breakdown=slow), alone=disturbed
    )
    halting = setup(
        "one_device",
        1,
        modes=MODES,
        rates=(6400.0, 3200.0, 6400.0, 3200.0, 6400.0),
        step_breakdown=ALONE.step_breakdown,
    )
    both = setup(
        rates=(9000.0, 4500.0, 9000.0, 4500.0, 9000.0), step_breakdown=slow
    )  # slower in the same rounds
    assert "is forward and backward" in sentence(both, alone=halting)


def test_notes_compare_setups():
    central = setup("central_storage", rates=(50.0, 60.0, 40.0))
    mirrored = setup(rates=(100.0, 90.0, 80.0))
    note, places = notes("scaling", [ALONE, central, mirrored])
    assert note == (
        "Strong scaling, 2 replicas: mirrored is 2.00 times as fast as central_storage (1.50 "
        "to 2.00 over the rounds)."
    )
    assert "copied out to the replicas in each step" in places
    assert notes("scaling", [central]) == ()
    one, two = (setup(replicas=n, modes=(), batch=16, rates=r) for n, r in [(1, 100), (2, 150)])
    assert notes("predict", compared([one, two])) == (
        "mirrored with 2 devices: 1.50 times the speed of one on batches of 16.",
    )
    sums = [
        Setup("mirrored", 2, 1, bytes=b, seconds=(s,)) for b, s in [(4096, 0.0005), (2**20, 0.001)]
    ]
    first, definitions = notes("allreduce", sums)
    assert first == (
        "mirrored with 2 replicas: latency 0.50 ms (the median of 4 KiB), "
        "bandwidth up to 1.05 GB/s on the bus (at 1 MiB)."
    )
    assert "2 (n - 1) / n" in definitions
    assert notes("allreduce", []) == ()


# --- Tables ---------------------------------------------------------------------------------------
def shown(kind, setups, **more):
    options = {"steps": 50, "warmup": 50, "rounds": 3, "threads": None, "parameters": 53_002}
    machine = {"system": "Linux x86_64", "cores": 2, "memory": 25e9, "gpus": [], "load": 0.5}
    return Bench(
        kind,
        "digits",
        "tfdist bench",
        1e9,
        {"model": {"name": "cnn"}},
        machine,
        {"tfdist": "0.1"},
        options,
        tuple(setups),
        **more,
    )


def test_tables_fit_a_terminal_and_hold_all_setups():
    step_breakdown = parts(forward_backward=123.45, gradient_sync=100)
    two = setup(
        "multi_worker_mirrored",
        rates=(12_345_678.0, 12_000_000.0, 13_000_000.0),
        step_breakdown=step_breakdown,
        workers=2,
        reason="word " * 60,
    )
    failed = setup("central_storage", error="ValueError: no\n    its log")
    bench = shown("scaling", compared([ALONE, two, failed]), notes=("A note of many words. " * 12,))
    text = rendering.text(bench)
    page = rendering.markdown(bench)
    assert max(map(len, text.splitlines())) <= rendering.WIDTH
    for part in (
        "caling of digits (cnn, 53,002 parameters) on 2 cores",
        "multi_worker_mirrored",
        "12,000,000..13,000,000",
        "123.45",
        "A note of many words.",
    ):
        assert part in text
        assert part in page
    assert "FAILED: central_storage with 2 replicas: ValueError: no\n    its log" in text
    assert "weak scaling: a batch of 64 for each replica" in text
    assert all(
        line.count("|") == 8
        for line in page.splitlines()
        if line.startswith("| one_device | 1 | 6,400")
    )


@pytest.mark.parametrize(("kind", "expected"), [("predict", "1.50"), ("allreduce", "0.003")])
def test_tables_of_the_other_kinds(kind, expected):
    if kind == "predict":
        setups = compared(
            [setup(replicas=n, modes=(), batch=16, rates=r) for n, r in [(1, 100), (2, 150)]]
        )
    else:
        setups = [Setup("mirrored", 2, 1, bytes=4096, seconds=(0.0015,) * 3)]
    assert expected in rendering.text(shown(kind, setups))
    assert expected in rendering.markdown(shown(kind, setups))


def test_a_benchmark_of_which_all_failed_still_has_a_page():
    bench = shown("allreduce", [setup(error="ValueError: no")])
    assert "sums" not in rendering.text(bench)
    bench = shown("scaling", [setup(error="ValueError: no")])
    assert "FAILED: mirrored with 2 replicas: ValueError: no" in rendering.text(bench)
    assert "**failed**: mirrored" in rendering.markdown(bench)


# --- Words ----------------------------------------------------------------------------------------
def jobs(*argv, **data):
    flags, rest = main.parse(argv)
    return make_jobs(
        flags,
        rest,
        config.Run.from_dict({"data": data, "train": {"steps_per_execution": 4}}) if rest else None,
    )


def test_arguments_give_jobs():
    first, mirrored, workers = jobs(
        "--config=a.py",
        "--workers",
        "4",
        "--strategies",
        "mirrored,multi_worker_mirrored",
        "--steps",
        "6",
    )
    assert (first.strategy, first.replicas, first.cases) == (
        "one_device",
        1,
        (Case(64, modes=MODES),),
    )  # added, to compare with
    assert mirrored.cases == (Case(64, modes=("strong",)), Case(256, modes=("weak",)))
    assert (mirrored.workers, workers.workers) == (1, 4)
    assert (mirrored.steps, mirrored.warmup, mirrored.words) == (
        8,
        6,
        ("--config=a.py",),
    )  # whole calls of 4 steps
    assert [
        job.strategy
        for job in jobs("--config=a.py", "--workers", "1,2", "--strategies", "mirrored")
    ] == ["mirrored"] * 2
    assert [
        case.global_batch
        for case in jobs("--config", "a.py", "--predict", "--batches", "8,2")[1].cases
    ] == [8, 2]
    assert [case.bytes for case in jobs("allreduce", "--bytes", "4k,1M")[0].cases] == [4096, 2**20]
    assert jobs("--config=a.py", "--workers", "128", "--weak")[-1].cases == (
        Case(64 * 128, modes=("weak",)),
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config: expected a config file"),
        (
            ["--config=a.py", "--workers", "0"],
            "--workers: expected a whole number of at least 1, received '0'",
        ),
        (["--config=a.py", "--workers", "1,x"], "received 'x'"),
        (["--config=a.py", "--workers", "2,2"], "--workers: expected different values"),
        (
            ["--config=a.py", "--workers", "128"],
            (
                "--workers: expected at most data.global_batch=64, which strong scaling keeps; "
                "received 128"
            ),
        ),
        (
            ["--config=a.py", "--workers", "3"],
            "--workers: expected divisors of data.global_batch=64",
        ),
        (["--config=a.py", "--steps", "0"], "--steps: expected a whole number of at least 1"),
        (["--config=a.py", "--stesp", "3"], "--stesp: no such flag. Did you mean --steps?"),
        (
            ["--config=a.py", "--strategies", "mirored"],
            "--strategies: received 'mirored'. Did you mean mirrored?",
        ),
        (
            ["--config=a.py", "--strategies", "parameter_server"],
            "received parameter_server, whose workers train asynchronously",
        ),
        (["--config=a.py", "--bytes", "4k"], "--bytes: expected with `tfdist bench allreduce`"),
        (["--config=a.py", "--predict", "--weak"], "--weak: expected with scaling"),
        (
            ["--config=a.py", "--predict", "--batches", "1"],
            "--batches: expected at least a row for each of 2 devices, received 1",
        ),
        (["--config=a.py", "--timeout", "0"], "--timeout: expected seconds above 0"),
        (["allreduce", "--config=a.py"], "an all-reduce has no model"),
        (["allreduce", "--workers", "1,2"], "--workers: expected at least 2 in an all-reduce"),
        (
            ["allreduce", "--bytes", "4x"],
            "--bytes: expected a size such as 16GB, 800MiB or 64k, or a number of bytes, received "
            "'4x'",
        ),
        (["alreduce"], "expected flags, or `allreduce` before them; received 'alreduce'"),
    ],
)
def test_wrong_arguments_are_named(argv, message):
    with pytest.raises(ValueError) as caught:
        jobs(*argv)
    assert message in str(caught.value)


def test_data_workers_are_refused():
    with pytest.raises(ValueError, match=r"data\.service: expected false"):
        jobs("--config=a.py", service=True)


def test_exit_codes(tmp_path, capsys):
    assert main(["--workers", "0"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "tfdist bench: error: --workers: expected a whole number of at least 1, received '0'\n"
        "See `tfdist bench --help`.\n"
    )
    (tmp_path / "file").touch()
    assert main(["allreduce", "--out", str(tmp_path / "file")]) == 2
    assert "--out: expected a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([f"--config={tmp_path}/none.py"])
    assert caught.value.code == 78


# --- Processes ------------------------------------------------------------------------------------
def test_a_group_that_does_not_start_in_time_is_named_and_ended(tmp_path):
    job = Job("allreduce", str(tmp_path / "group"), "mirrored", 2, (Case(bytes=4),))
    group = Group(job, 0.05)
    with (
        pytest.raises(
            GroupError, match=r"worker 0 did not start within 0\.05 s; pass a longer --timeout"
        ),
        group,
    ):
        group.ready()
    assert group._process.poll() is not None


def test_a_group_that_is_late_computes_no_more(tmp_path):
    (tmp_path / "logs").mkdir()
    job = Job("allreduce", "", "mirrored", 2, (Case(bytes=4),))
    with Rounds([job], 0.05, tmp_path / "logs") as rounds:
        rounds.prepare()
        assert not rounds.alive
        [group] = rounds._started.values()
        assert group._process.poll() is not None  # while the others would be measured
        assert "did not start" in rounds.setups()[0].error
        group.close()


def test_config_error_in_the_baseline_is_passed_on_and_files_are_replaced_atomically(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(subprocess, "Popen", Popen)
    (tmp_path / "config.py").write_text(
        "import tfdist\n\ndef get_config():\n    config = tfdist.config.default()\n"
        f"    config.model.name = '{tmp_path}/config.py:nothing'\n    return config\n"
    )
    for name in ("bench.json", "bench.md"):
        (tmp_path / name).write_text("before")
        os.link(tmp_path / name, tmp_path / f"kept-{name}")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert (
            main([f"--config={tmp_path}/config.py", "--strategies=one_device", f"--out={tmp_path}"])
            == 78
        )
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "nothing" in read(tmp_path).setups[0].error
    assert {(tmp_path / f"kept-{name}").read_text() for name in ("bench.json", "bench.md")} == {
        "before"
    }  # another file took its place


def test_a_group_that_cannot_start_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    monkeypatch.setattr(Guardian, "__init__", lambda self: None)
    ended = []
    monkeypatch.setattr(Guardian, "__exit__", lambda self, *_: ended.append(self))
    job = Job("allreduce", str(tmp_path / "group"), "mirrored", 2, (Case(bytes=4),))
    with pytest.raises(FileNotFoundError), Group(job, 1.0):
        pass
    assert len(ended) == 1
