"""Choice of kernels and gradients that do not travel, as rows are fewer bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

_MARGIN = 2  # times that factors are to be fewer bytes, as they take more calls


@dataclasses.dataclass(frozen=True)
class Product:
    """Describe the product of a layer's input and its kernel.

    Attributes:
        inputs: Number of values of a row of the input.
        outputs: Number of values of a row of the result.
        rows_per_example: Number of rows that an example has, such as the length of its sequence.
        kernel_width: Size of a value of the kernel in bytes.
        row_width: Size of a value of a row in bytes.
        trained: Whether the kernel is trained.
    """

    inputs: int
    outputs: int
    rows_per_example: float
    kernel_width: int = 4
    row_width: int = 4
    trained: bool = True

    @property
    def kernel_bytes(self) -> int:
        """Return the size of the kernel in bytes."""
        return self.inputs * self.outputs * self.kernel_width

    def exchanged(self, examples: float, replicas: int) -> int:
        """Return the bytes that travel in a pass, forward or backward, times N / (N - 1).

        They are this replica's inputs and, for all N replicas, their results.

        Args:
            examples: Number of examples of a replica.
            replicas: Number of replicas.
        """
        rows = examples * self.rows_per_example
        return math.ceil(rows * (self.inputs + replicas * self.outputs) * self.row_width)


def multiplied(
    products: Sequence[Product], weight_bytes: int, examples: float, replicas: int
) -> list[int]:
    """Return the indices of the products whose kernels are not gathered for a call of a unit.

    Rows travel forward and backward. A kernel that is trained travels at least twice, too: once
    whole, and once as its gradient.

    Args:
        products: Products of the unit.
        weight_bytes: Size of all weights of the unit in bytes.
        examples: Number of examples of a replica.
        replicas: Number of replicas.

    Example:
        >>> dense = Product(2048, 1000, 1)
        >>> multiplied([dense], dense.kernel_bytes, 64, 8)
        [0]
        >>> multiplied([dense], dense.kernel_bytes, 512, 8)
        []
    """
    if replicas == 1:  # there is no one to send rows to
        return []
    found = [
        i
        for i, each in enumerate(products)
        if each.exchanged(examples, replicas) < each.kernel_bytes
    ]
    others = weight_bytes - sum(products[i].kernel_bytes for i in found)
    # What is gathered beside the kernels stays until backward, as nothing is computed twice.
    return found if replicas * others <= weight_bytes else []


def factors_travel(product: Product, examples: float, replicas: int) -> bool:
    """Return whether factors travel instead of the gradient of a kernel.

    Args:
        product: Product of the kernel.
        examples: Number of examples of a replica.
        replicas: Number of replicas.

    Example:
        >>> factors_travel(Product(2048, 1000, 1), 64, 8)
        True
        >>> factors_travel(Product(2048, 1000, 1), 256, 8)
        False
    """
    return (
        replicas > 1
        and product.inputs % replicas == 0
        and _MARGIN * product.exchanged(examples, replicas) < product.kernel_bytes
    )
