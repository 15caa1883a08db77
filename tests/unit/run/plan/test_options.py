"""Test predictions of the needs of several devices from those of one device.

Figures are computed by hand; tests also cover the chosen option and the largest batches.
"""

import dataclasses

import pytest

from tfdist.parallel.sharding.product_costs import Product
from tfdist.run.plan.options import Needs, Stage, all_options, choose, largest_batches, rate_for
from tfdist.tools.plan import table

MEGA = 1_000_000
# Four equal layers with Adam: 40 MB of weights, 80 MB of slots; 1 MB of activations an example.
NEEDS = Needs(
    [10 * MEGA] * 4,
    [10 * MEGA] * 4,
    frozen=0,
    slots=80 * MEGA,
    scalars=0,
    fixed=0,
    per_row=MEGA,
    rows=32,
    learning_rate=0.1,
)


def options_by_name(devices, needs=None, **more):
    needs = needs or cut(*[(4 / devices, 1 / devices)] * devices)
    return {option.name: option for option in all_options(needs, devices, **more)}


def cut(*stages):
    """Return the model in stages of so many layers, with these shares of the activations."""
    return dataclasses.replace(
        NEEDS, stages=[Stage(layers * 10 * MEGA, 0, share, 1000) for layers, share in stages]
    )


FOUR = cut(*[(1, 0.25)] * 4)


def test_one_device_has_one_way():
    (option,) = all_options(NEEDS, 1)
    assert (option.name, option.resident, option.peak, option.sent) == (
        "one device",
        120 * MEGA,
        (120 + 40 + 32 + 2 * 10) * MEGA,
        0,
    )  # gradients, activations, two products of a variable


@pytest.mark.parametrize(
    ("name", "resident", "peak", "sent"),
    [
        ("data parallel", 120, 120 + 2 * 40 + 8 + 20, 60),
        ("data parallel, bfloat16", 120, 120 + 2 * 40 + 8 + 20, 30),
        ("ZeRO-1", 40 + 10 + 20, 70 + 40 + 10 + 8 + 5, 90),
        ("ZeRO-2", 40 + 10 + 20, 70 + 40 + 10 + 8 + 5, 60),
        ("ZeRO-2, bfloat16", 40 + 10 + 20, 70 + 40 + 10 + 8 + 5, 30),
        ("FSDP (ZeRO-3)", 10 + 20, 30 + 10 + 3 * 10 + 8 + 5, 90 - 15),
    ],
)
def test_four_devices(name, resident, peak, sent):
    option = options_by_name(4)[name]
    assert (option.resident, option.peak, option.sent) == (
        resident * MEGA,
        peak * MEGA,
        sent * MEGA,
    )


def test_a_pipeline_holds_its_heaviest_stage_and_the_activations_of_its_depth():
    option = options_by_name(2, cut((2, 0.5), (2, 0.5)), microbatches=8)["pipeline parallel"]
    assert (option.resident, option.sent) == (60 * MEGA, 1000 * 32)
    assert (
        option.peak == (60 + 2 * 20 + 4) * MEGA
    )  # gradients, and their sums; of two micro-batches of four rows half of the activations
    early = options_by_name(2, cut((1, 0.9), (3, 0.1)), microbatches=4)["pipeline parallel"]
    assert early.resident == 90 * MEGA
    assert early.peak == max(30 + 10 + 20 + 0.9 * 8 * 2, 90 + 2 * 30 + 0.1 * 8) * MEGA


def test_pipeline_whose_traffic_depends_on_the_data():
    needs = dataclasses.replace(NEEDS, stages=[Stage(20 * MEGA, 0, 0.5, None)] * 2)
    assert options_by_name(2, needs)["pipeline parallel"].sent is None
    assert "not known" in "\n".join(
        table(needs, all_options(needs, 2), None, *choose(all_options(needs, 2), None))
    )


def test_frozen_weights_are_whole_except_under_fsdp():
    frozen = [20 * MEGA] * 4
    units = [30 * MEGA] * 4
    needs = dataclasses.replace(FOUR, frozen=81 * MEGA, frozen_weights=frozen, units=units)
    options = options_by_name(4, needs)
    assert options["ZeRO-2"].resident == (40 + 81 + 10 + 20) * MEGA
    fsdp = options["FSDP (ZeRO-3)"]
    assert fsdp.resident == (10 + 20 + 1 + 20) * MEGA  # 1 MB of state is whole
    assert fsdp.peak == fsdp.resident + (10 + 3 * 30 + 8 + 5) * MEGA
    # All weights twice, but those of the two last layers once; the gradients once.
    assert fsdp.sent == (2 * 120 - 60 + 40) * MEGA * 3 // 4


def test_kernels_stay_in_parts_under_fsdp_where_rows_are_fewer_bytes():
    """Two of four layers are products with a kernel of 10 MB."""
    kernel = Product(inputs=1000, outputs=2500, rows_per_example=1)
    needs = dataclasses.replace(FOUR, products=[[kernel], [kernel], [], []])
    fsdp = options_by_name(4, needs)["FSDP (ZeRO-3)"]
    rows = 8 * (1000 + 4 * 2500) * 4 / MEGA
    assert fsdp.resident == 30 * MEGA
    assert fsdp.peak == fsdp.resident + (10 + 3 * 10 + 8 + 5 + 2 * rows) * MEGA
    # The two other layers are the last ones: gathered once. Gradients once; rows twice.
    assert fsdp.sent == (20 + 20 + 2 * 2 * rows) * MEGA * 3 / 4
    # A kernel of TensorFlow computes no copies. Two others of 10 MB are not such products.
    fused = options_by_name(4, dataclasses.replace(needs, fused=True))["FSDP (ZeRO-3)"]
    assert fused.peak == fsdp.peak
    many = options_by_name(4, dataclasses.replace(needs, rows=32_000))["FSDP (ZeRO-3)"]
    assert (many.sent, many.why) == ((90 - 15) * MEGA, "forward is computed twice")
    frozen = dataclasses.replace(kernel, trained=False)
    needs = dataclasses.replace(
        FOUR,
        units=[20 * MEGA] * 2,
        frozen=20 * MEGA,
        frozen_weights=[10 * MEGA] * 2,
        weights=[10 * MEGA] * 2,
        products=[[kernel, frozen]] * 2,
    )
    option = options_by_name(4, needs)["FSDP (ZeRO-3)"]
    assert option.sent == 4 * 2 * rows * MEGA * 3 / 4
    fused = options_by_name(4, dataclasses.replace(needs, fused=True))["FSDP (ZeRO-3)"]
    assert fused.peak == option.peak - 2 * 10 * MEGA // 4
    assert option.why == "rows of the batch travel, not large kernels"


@pytest.mark.parametrize("updates_rows", [True, False])
def test_tables_stay_in_parts_under_fsdp(updates_rows):
    """Two of four weights of 10 MB are tables, which give 0.1 MB of rows for each example."""
    needs = dataclasses.replace(
        FOUR,
        units=[10 * MEGA] * 2,
        tables=[10 * MEGA] * 2,
        table_rows=MEGA // 10,
        updates_rows=updates_rows,
    )
    fsdp = options_by_name(4, needs)["FSDP (ZeRO-3)"]
    assert fsdp.resident == (10 + 20) * MEGA
    lookups = 8 * 0.1
    part_of_gradients = 5 if updates_rows else 10
    assert fsdp.peak == fsdp.resident + (part_of_gradients + 3 * 10 + 8 + 5 + 11 * lookups) * MEGA
    # The two other weights twice, but those of the last layers once; gradients once; rows twice.
    assert fsdp.sent == (2 * 20 - 20 + 20 + 2 * lookups) * MEGA * 3 / 4
    frozen = dataclasses.replace(
        needs, frozen=50 * MEGA, frozen_weights=[50 * MEGA], frozen_tables=[50 * MEGA]
    )
    assert options_by_name(4, frozen)["FSDP (ZeRO-3)"].sent == fsdp.sent
    unknown = dataclasses.replace(needs, table_rows=None)
    assert options_by_name(4, unknown)["FSDP (ZeRO-3)"].sent is None


@pytest.mark.parametrize(
    ("needs", "name", "reason"),
    [
        (
            dataclasses.replace(NEEDS, not_cut="the model can be cut into at most 1 stages"),
            "pipeline parallel",
            "at most 1 stages",
        ),
        (
            dataclasses.replace(cut((2, 0.5), (2, 0.5)), rows=30),
            "pipeline parallel",
            "8 micro-batches do not divide the batch of 30 examples",
        ),
        (
            dataclasses.replace(cut((2, 0.5), (2, 0.5)), examples=44),
            "pipeline parallel",
            "an epoch's last batch of 12 examples; take data.tail",
        ),
        (
            dataclasses.replace(
                cut((2, 0.5), (2, 0.5)), not_sharded="the optimizer Muon cannot be sharded"
            ),
            "ZeRO-2",
            "Muon",
        ),
    ],
)
def test_impossible_option_is_explained_and_not_chosen(needs, name, reason):
    options = all_options(needs, 2)
    assert reason in next(option.refused for option in options if option.name == name)
    chosen, _ = choose(options, 100 * MEGA)
    assert chosen is None or not chosen.refused
    assert any(
        "not possible" in line and reason in line
        for line in table(needs, options, None, *choose(options, None))
    )


def test_rows_of_a_batch_that_does_not_divide_are_those_of_the_fullest_replica():
    assert options_by_name(3)["data parallel"].peak == (120 + 2 * 40 + 11 + 20) * MEGA


@pytest.mark.parametrize(
    ("memory", "name", "why"),
    [
        (None, "data parallel", "not known"),
        (300 * MEGA, "data parallel", "nothing simpler"),
        (170 * MEGA, "ZeRO-2", "data parallel needs 228 MB"),
        (100 * MEGA, "FSDP (ZeRO-3)", "ZeRO-2 needs 133 MB"),
    ],
)
def test_the_first_option_that_fits_is_taken(memory, name, why):
    chosen, reason = choose(all_options(FOUR, 4), memory)
    assert chosen.name == name
    assert why in reason


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("one device", 500 - 120 - 40 - 20),
        ("data parallel", 4 * (500 - 120 - 80 - 20)),
        ("ZeRO-2", 4 * (500 - 70 - 40 - 10 - 5)),
        ("FSDP (ZeRO-3)", 4 * (500 - 30 - 10 - 30 - 5)),
    ],
)
def test_largest_batch_fills_the_memory(name, batch):
    found = {option.name: rows for option, rows in largest_batches(FOUR, 4, 500 * MEGA)}
    assert found[name] == batch


def test_a_larger_batch_than_the_largest_does_not_fit():
    memory = 301 * MEGA
    for option, rows in largest_batches(FOUR, 4, memory, microbatches=8):
        more = rows + (8 if option.name == "pipeline parallel" else option.devices)
        larger = dataclasses.replace(FOUR, rows=more, partial=False)
        assert option.peak <= memory < options_by_name(4, larger)[option.name].peak


def test_largest_batch_is_bounded_by_the_examples_and_may_not_exist():
    few = dataclasses.replace(FOUR, examples=102, not_sharded="no", not_cut="no")
    found = {option.name: rows for option, rows in largest_batches(few, 4, 500 * MEGA)}
    assert found == {"one device": 102, "data parallel": 100, "data parallel, bfloat16": 100}
    assert [rows for _, rows in largest_batches(few, 4, 190 * MEGA)] == [10, 0, 0]


@pytest.mark.parametrize(
    ("changes", "rate"),
    [({"adaptive": False}, 0.4), ({"adaptive": True}, 0.2), ({"learning_rate": None}, None)],
)
def test_learning_rate_follows_the_batch(changes, rate):
    found = rate_for(dataclasses.replace(NEEDS, **changes), 4 * 32)
    assert found == (None if rate is None else pytest.approx(rate))


def test_nothing_fits():
    chosen, reason = choose(all_options(NEEDS, 1), MEGA)
    assert chosen is None
    assert 'more devices, a smaller global batch, or train.precision="mixed_bfloat16"' in reason
