"""Test that N replicas on the same global batches give the numbers of one.

Every case of `cases.py` and `guide_cases.py` runs under every strategy.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.keras_facts import sums_activities
from tests.parity.guide_cases import CASES
from tests.parity.setups import runs

# Cases in which a third replica or process matters: who gets which rows, ends that leave some
# without, what is summed over them. The other cases have two.
OF_THREE = (
    "sequential",
    "unwatched",
    "embedding_of_other_lengths_unwatched",
    "recurrent_with_masking",
    "synchronized_batch_normalization",
    "numpy_arrays",
    "numpy_with_validation_split",
    "py_dataset",
    "generator",
    "sample_weight",
    "mean_with_sample_weight",
    "steps_per_epoch_of_an_endless_data_set",
    "steps_per_execution_unwatched",
    "distributed_by_the_user",
    "uneven_last_batch",
    "last_batch_leaves_replicas_empty",
    "clip_by_global_norm",
    "loss_scaling",
    "metrics_with_other_than_scalar_state",
    "evaluate_and_predict",
    "on_batch",
)
SETUPS = {  # name: strategy, devices, processes, cases where not all
    "one": ("one_device", "-", 1),
    "mirrored-2": ("mirrored", "2", 1),
    "mirrored-3": (
        "mirrored",
        "3",
        1,
        *OF_THREE,
        "custom_train_step",
        "sum_reduction",
        "gradient_accumulation",
        "keras_distribution",
        "keras_model_parallel",
        "keras_model_parallel_of_a_cnn",
    ),
    "central-2": ("central_storage", "2", 1),
    "workers-2": ("keras.distribution", "-", 2),
    "workers-3": ("multi_worker_mirrored", "-", 3, *OF_THREE),
    "workers-4": (
        "keras.distribution",
        "-",
        4,
        "keras_model_parallel",
        "keras_model_parallel_of_a_cnn",
    ),
}
# Setups of one process, two at a time: each spends its time in Python, on one core.
PAIRS = (("one", "mirrored-2"), ("mirrored-3", "central-2"))
# What central storage refuses: XLA, and a LossScaleOptimizer, which Keras applies in a replica.
REFUSED = {
    ("central-2", "loss_scaling"): "central_storage: a LossScaleOptimizer",
    ("central-2", "mixed_float16"): "central_storage: a LossScaleOptimizer",
    ("central-2", "compiled_by_xla"): "central_storage: compile(jit_compile=True)",
}
# With an activity regularizer. See "What to use instead" in docs/training.md.
OF_ACTIVITIES = ("synchronized_batch_normalization", "endpoint_layer")
TIMEOUT_S = 1000  # for one setup: 60 on an idle machine of 2 cores, 360 on a slow, busy one


def cases(prefix=""):
    """Return (setup, case) for all that is compared with one replica."""
    return [
        (setup, case)
        for setup, facts in SETUPS.items()
        if setup != "one" and setup.startswith(prefix)
        for case in facts[3:] or CASES
    ]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return the results of a setup's processes: a list of {case: numbers}."""
    return runs(tmp_path_factory, "runner.py", SETUPS, PAIRS, TIMEOUT_S)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(("setup", "case"), cases())
def test_equals_one_replica(run, setup, case):
    if case in OF_ACTIVITIES and sums_activities():
        pytest.skip("this Keras does not divide activity regularizers by the rows")
    one = run("one")[0][case]
    assert not isinstance(one, str), one
    for numbers in (process[case] for process in run(setup)):
        if (setup, case) in REFUSED:
            assert REFUSED[setup, case] in numbers
            continue
        assert not isinstance(numbers, str), numbers
        assert set(numbers) == set(one)
        for name, expected in one.items():
            tolerance = CASES[case].tolerance
            np.testing.assert_allclose(
                numbers[name], expected, rtol=tolerance, atol=tolerance, err_msg=f"{case}: {name}"
            )


@pytest.mark.parametrize(("setup", "case"), cases("workers"))
def test_workers_report_the_same_history(run, setup, case):
    chief, *others = (process[case] for process in run(setup))
    assert not isinstance(chief, str), chief
    for other in others:
        for name in (n for n in chief if n.startswith("history/")):
            np.testing.assert_array_equal(other[name], chief[name], err_msg=f"{case}: {name}")
