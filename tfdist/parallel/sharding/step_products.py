"""Products of large kernels and few rows in a step, and gradients from all replicas' rows.

The gradient of a kernel is the product of two factors: the rows of the inputs, and those of the
gradients of the results. Where they are fewer bytes than the kernel, replicas exchange them
(sufficient factor broadcasting; Xie et al. 2015, arXiv:1511.08486). Each replica then computes
some rows of the sum of all gradients, in the time that its own gradient would take. ZeRO needs no
more than its part of the sum; data parallelism gathers the parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import Kernel, multiplied_by
from tfdist.parallel.collectives.group import Group
from tfdist.parallel.replica_weight import Weight, weighted
from tfdist.parallel.sharding.few_rows import are_few, multiply, multiply_in_rows
from tfdist.parallel.sharding.fsdp_unit import layers_of
from tfdist.parallel.sharding.global_norm import scale
from tfdist.parallel.sharding.layer_products import products_of
from tfdist.parallel.sharding.product_costs import Product, factors_travel
from tfdist.sync import Gradients

_thread = threading.local()


@contextlib.contextmanager
def few_row_products(
    model: keras.Model, examples: int | None, group: Group | None, policy: Gradients
) -> Iterator[None]:
    """Compute the products of large kernels and few rows, in a step traced in the context.

    With a group, the step is Keras' own `train_step`, which takes the gradients of the loss right
    after `optimizer.scale_loss`. Gradients taken before, later or within these, as in a loss that
    penalizes gradients, are a replica's own. Layers in branches and loops compute their products as
    usual.

    Args:
        model: Built and compiled model.
        examples: Number of examples of a replica, at most; equal in all processes. None: unknown.
        group: All replicas, with native collectives, to exchange rows; None for gradients of each
            replica's own rows. Rows of an unknown number are not exchanged.
        policy: Gradient policy, for the weights of the replicas.
    """
    # In eager mode, replicas may be in different branches.
    graph = not tf.executing_eagerly()
    chosen = _chosen(model, examples, 1 if group is None else group.size) if graph else []
    if not chosen:
        yield
        return
    step = _Step(group, policy)
    with contextlib.ExitStack() as stack:
        if group is not None:
            stack.enter_context(_rows_after_scaling(model.optimizer, step))
        kernels: dict[int, Kernel] = {
            id(v): _KernelInStep(v, step, f"factors {i}", product, examples)
            for i, (v, product) in enumerate(chosen)
        }
        stack.enter_context(multiplied_by(kernels))
        yield


def take_rows(variables: Sequence[keras.Variable]) -> dict[int, tf.Tensor]:
    """Return this replica's rows of the summed gradients that the running step has computed.

    Args:
        variables: Variables that an optimizer updates.

    Returns:
        For each index of such a variable its rows, `[elements / replicas]`, in the variable's
        dtype: the same as this replica's row of `flat_shards.to_rows`. To the sum belongs also what
        the replicas' other gradients of the variable add.
    """
    step = getattr(_thread, "step", None)
    rows: dict[int, list] = {} if step is None else step.rows
    return {i: tf.add_n(rows.pop(id(v))) for i, v in enumerate(variables) if id(v) in rows}


@contextlib.contextmanager
def taking_gradients() -> Iterator[None]:
    """Note that a tape takes gradients in the context."""
    depth = getattr(_thread, "depth", 0)
    _thread.depth = depth + 1
    try:
        yield
    finally:
        _thread.depth = depth
        step = getattr(_thread, "step", None)
        if step is not None and not depth:
            step.takes_rows = False  # the gradients of the loss have been taken


@contextlib.contextmanager
def _rows_after_scaling(optimizer: keras.optimizers.Optimizer, step: _Step) -> Iterator[None]:
    """Exchange rows for the gradients that are taken next after `optimizer.scale_loss`."""
    scale_loss = optimizer.scale_loss
    was_set = "scale_loss" in vars(optimizer)

    def scale_last_loss(loss):
        loss = scale_loss(loss)
        step.takes_rows = True
        return loss

    optimizer.scale_loss = scale_last_loss
    before = getattr(_thread, "step", None)
    _thread.step = step
    try:
        yield
    finally:
        step.takes_rows = False
        _thread.step = before
        if was_set:
            optimizer.scale_loss = scale_loss
        else:
            del optimizer.scale_loss


def _chosen(
    model: keras.Model, examples: int | None, replicas: int
) -> list[tuple[keras.Variable, Product]]:
    """Return the kernels that few rows may be multiplied with, in the order of their layers."""
    weights = {id(v): v for v in model.trainable_variables}
    products: dict[int, Product] = {}
    for layer in layers_of(model):
        products |= {k: p for k, p in products_of(layer, 1).items() if k in weights}
    return [
        (weights[key], product)
        for key, product in products.items()
        if are_few(product, examples) is not False
        or (examples and factors_travel(product, examples, replicas))
    ]


class _Step:
    """Step of a replica.

    Args:
        group: All replicas, to exchange rows; or None.
        policy: Gradient policy.

    Attributes:
        takes_rows: Whether the gradients that are taken next are those of the step.
        rows: This replica's rows of summed gradients, by the id of the kernel.
    """

    def __init__(self, group: Group | None, policy: Gradients):
        self.group = group
        self._policy = policy
        self._graph = tf.compat.v1.get_default_graph()
        self.takes_rows = False
        self.rows: dict[int, list[tf.Tensor]] = {}

    def is_here(self) -> bool:
        """Return whether operations belong to the step itself, and not to a branch or loop."""
        return tf.compat.v1.get_default_graph() is self._graph

    def exchanges(self) -> bool:
        """Return whether the tape now takes the gradients of the step itself."""
        return self.takes_rows and self.is_here() and getattr(_thread, "depth", 0) == 1

    @property
    def factor(self) -> Weight:
        """Return the factor of this replica's gradients, which their sum needs."""
        assert self.group is not None
        return scale(self._policy, self.group.size)

    def exchange(self, x: tf.Tensor, dy: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what this replica needs for its rows of the sum of `transpose(x) @ dy`.

        Args:
            x: Rows of the input, `[rows, inputs]`; replicas may have different numbers of rows.
            dy: Gradients of the results, `[rows, outputs]`.
            name: Name of this call.

        Returns:
            Its columns of all replicas' inputs, `[all rows, inputs / replicas]`, and all gradients
            of results, `[all rows, outputs]`, times their replicas' factors where these differ.
        """
        group = self.group
        assert group is not None
        width, outputs = x.shape[1] // group.size, dy.shape[1]
        rows = tf.shape(x)[0]
        # Rows may be chosen by their values, so that even batches do not tell how many there are.
        most = tf.maximum(group.all_reduce(rows, f"{name}: number of rows", "Max"), 1)
        missing = [[0, most - rows], [0, 0]]
        if not isinstance(factor := self.factor, float):
            dy = weighted([dy], factor)[0]
            # Of no rows of a batch, a mean may be NaN.
            x = tf.math.multiply_no_nan(x, tf.cast(factor > 0, x.dtype))
        by_part = tf.transpose(tf.reshape(tf.pad(x, missing), [most, group.size, width]), [1, 0, 2])
        inputs = group.all_to_all(by_part, f"{name}: inputs")
        of_results = group.all_gather(
            tf.reshape(tf.pad(dy, missing), [-1]), f"{name}: gradients of results"
        )
        return tf.reshape(inputs, [-1, width]), tf.reshape(of_results, [-1, outputs])


class _KernelInStep(Kernel):
    """Kernel that is multiplied with few rows in one step.

    Args:
        variable: The kernel.
        step: The step.
        name: Name of the kernel's collectives.
        product: The product, with the rows that its layer is built for.
        examples: Number of examples of a replica, at most; None if it is unknown.
    """

    def __init__(
        self,
        variable: keras.Variable,
        step: _Step,
        name: str,
        product: Product,
        examples: int | None,
    ):
        self._variable = variable
        self._dtype = tf.as_dtype(variable.dtype)  # outside of layers, in which it is that of x
        self._step = step
        self._name = name
        self._product = product
        self._examples = examples

    def product(self, x: tf.Tensor, axes: int) -> tf.Tensor | None:
        """See `Kernel`."""
        if not self._step.is_here():
            return None
        shape = tuple(self._variable.shape)
        inputs, outputs = math.prod(shape[:axes]), math.prod(shape[axes:])
        kernel = tf.reshape(tf.convert_to_tensor(self._variable), [inputs, outputs])
        product = self._product_of(inputs, outputs, x.shape[1:-axes])
        return multiply_in_rows(x, shape, axes, lambda rows: self._multiply(rows, kernel, product))

    def _product_of(self, inputs: int, outputs: int, outer: Sequence[int | None]) -> Product | None:
        """Describe the product of one call; None if the number of rows is unknown.

        Args:
            inputs: Number of values of a row of the input.
            outputs: Number of values of a row of the result.
            outer: Shape of an example's rows. It may be larger than the layer was built for.
        """
        if None in outer:
            return None
        rows = max(self._product.rows_per_example, math.prod(n for n in outer if n is not None))
        return dataclasses.replace(
            self._product, inputs=inputs, outputs=outputs, rows_per_example=rows
        )

    def _sent(self, product: Product | None) -> int | None:
        """Return the bytes that a replica sends if factors travel; None if they do not."""
        group, examples = self._step.group, self._examples
        if group is None or product is None or examples is None:
            return None
        if not factors_travel(product, examples, group.size):
            return None
        return product.exchanged(examples, group.size) * (group.size - 1) // group.size

    def _multiply(self, x: tf.Tensor, kernel: tf.Tensor, product: Product | None) -> tf.Tensor:
        sent = self._sent(product)
        few = None if product is None else are_few(product, self._examples)

        def exchange(x: tf.Tensor, dy: tf.Tensor) -> list[tf.Tensor] | None:
            if sent is None or not self._step.exchanges():
                return None
            return self._add_rows(x, dy, sent)

        return multiply(x, kernel, few, exchange)

    def _add_rows(self, x: tf.Tensor, dy: tf.Tensor, sent: int) -> list[tf.Tensor]:
        """Note this replica's rows of the summed gradient; return what other replicas have sent."""
        before = self._step.rows.setdefault(id(self._variable), [])
        name = f"{self._name} {len(before)}"
        inputs, of_results = self._step.exchange(x, dy, name)
        assert self._step.group is not None
        self._step.group.bytes[name] = sent
        own = tf.reshape(tf.matmul(inputs, of_results, transpose_a=True), [-1])
        own = tf.cast(own, self._dtype)
        if isinstance(factor := self._step.factor, float):  # not rounded to 16 bits
            own = weighted([own], factor)[0]
        before.append(own)
        return [inputs, of_results]
