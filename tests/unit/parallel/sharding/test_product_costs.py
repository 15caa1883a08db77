"""Test which kernels are not gathered."""

import pytest

from tfdist.parallel.sharding.product_costs import Product, factors_travel, multiplied

DENSE = Product(inputs=100, outputs=50, rows_per_example=1)
SEQUENCE = Product(inputs=100, outputs=50, rows_per_example=4)
BIAS = 4 * 50


@pytest.mark.parametrize(
    ("product", "examples", "replicas", "fewer"),
    [
        # 24 * (100 + 2 * 50) < 100 * 50
        (DENSE, 24, 2, True),
        (DENSE, 25, 2, False),
        # 6 * 4 * (100 + 2 * 50)
        (SEQUENCE, 6, 2, True),
        (SEQUENCE, 7, 2, False),
        # All replicas' results travel: 9 * (100 + 9 * 50) < 100 * 50
        (DENSE, 9, 9, True),
        (DENSE, 10, 9, False),
    ],
)
def test_rows_travel_if_they_are_fewer_bytes(product, examples, replicas, fewer):
    bytes_of_unit = product.kernel_bytes + BIAS
    assert bool(multiplied([product], bytes_of_unit, examples, replicas)) is fewer


def test_a_unit_with_much_else_to_gather_is_gathered():
    small = Product(100, 10, 1)  # of 9 rows, it is fewer bytes
    both = DENSE.kernel_bytes + small.kernel_bytes
    assert multiplied([DENSE, small], both, 9, 2) == [0]
    assert multiplied([small, DENSE], both, 9, 2) == [1]
    assert multiplied([DENSE, small], both, 2, 2) == [0, 1]
    # Half of its weights are others.
    assert multiplied([DENSE], 2 * DENSE.kernel_bytes, 9, 2) == [0]
    assert multiplied([DENSE], 2 * DENSE.kernel_bytes + 1, 9, 2) == []
    # There is no one to send rows to.
    assert multiplied([DENSE], DENSE.kernel_bytes, 1, 1) == []


@pytest.mark.parametrize(
    ("product", "examples", "replicas", "travel"),
    [
        # 2 * 12 * (100 + 2 * 50) < 100 * 50
        (DENSE, 12, 2, True),
        (DENSE, 13, 2, False),
        (SEQUENCE, 3, 2, True),
        (SEQUENCE, 4, 2, False),
        (DENSE, 1, 1, False),
        (DENSE, 1, 3, False),  # 100 rows of a kernel cannot be divided
        (DENSE, 1, 4, True),
    ],
)
def test_factors_travel_if_they_are_half_the_bytes(product, examples, replicas, travel):
    assert factors_travel(product, examples, replicas) is travel
