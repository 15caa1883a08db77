"""Memory of the training step of a config, measured in a subprocess on this machine's CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfdist import config, sync
from tfdist.parallel.sharding.product_costs import Product
from tfdist.run.plan.options import Needs, Stage
from tfdist.runtime import subprocesses
from tfdist.runtime.cpu_settings import KEEP_MEMORY, ONEDNN

# Maximum rows of the larger of the two batches that are compared, because the planned batch may be
# too large for this machine.
_ROWS = 64
# Share that TensorFlow's allocator adds to activations, as it gives a tensor a free chunk of up to
# twice its size. Training steps of a small CNN had peaks of 0.95 to 1.16 times this measurement.
_ROUNDING = 0.15
# Passes that are measured. In every other one the allocator may give a tensor a much larger chunk,
# and the same 64 rows take 3.7 MB instead of 2.9.
_PASSES = 2
# Bytes that the allocator of the measuring process takes at once; an axis has less than 2^31.
_REGION = (8, 1 << 30)
# Bytes of the tensors that take the free chunks of fragmented memory, and how many of each size.
_CHUNKS = [1 << power for power in range(26, 7, -1)]
_OF_A_SIZE = 8


def measure(settings: config.Run, devices: int, timeout: float = 300.0) -> Needs:
    """Measure the memory of a training step in a subprocess.

    Args:
        settings: Settings of a run, whose `data.global_batch` is a number.
        devices: Number of stages into which the model is cut.
        timeout: Seconds that the measurement may take, default 300.

    Returns:
        Needs of a training step on one device.

    Raises:
        ValueError: If the model cannot be built or measured.
    """
    question = {"run": settings.to_dict(), "devices": devices}
    # TensorFlow's other CPU allocator does not count tensors below 256 KB.
    answer, end = subprocesses.ask(
        __name__,
        question,
        timeout,
        **{KEEP_MEMORY: "1", ONEDNN: "1"},  # the same kernels, and so the same memory, on all CPUs
    )
    if "error" in answer or not answer:
        raise ValueError(
            answer.get("error")
            or "the model could not be measured: the process that builds it "
            f"{end or 'printed no result'}; it has {timeout:g} s (tfdist plan --timeout)"
        )
    stages = [Stage(**stage) for stage in answer["stages"]]
    products = [[Product(**each) for each in of_unit] for of_unit in answer["products"]]
    return Needs(**{**answer, "stages": stages, "products": products})


def main(argv: list[str]) -> None:
    """Send the `Needs` of a config, or {"error": message}, to the parent process.

    Args:
        argv: One JSON text: {"run": settings of the run; "devices": number of devices}.
    """
    request = json.loads(argv[0])
    try:
        settings = config.Run.from_dict(request["run"])
        needs = _look(settings, request["devices"])
        subprocesses.answer(dataclasses.asdict(needs))
    except ValueError as error:
        subprocesses.answer({"error": str(error)})


def _look(settings: config.Run, devices: int) -> Needs:
    """Build the model of a config, and measure the memory of its training step.

    It is measured with two numbers of rows, so that fixed costs can be told from those of a row.
    """
    import keras
    import tensorflow as tf

    from tfdist.data.batch_rows import count_rows
    from tfdist.keras_compat import fused_updates
    from tfdist.parallel import deferred
    from tfdist.parallel.sharding import fsdp, fsdp_unit, global_norm, layer_products
    from tfdist.run import build, input_pipeline

    tf.config.set_visible_devices([], "GPU")
    # One operation at a time, in the order in which a GPU is given them, so that no two gradients
    # are computed at once.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # The plan computes what these settings save, so the model is measured without them.
    settings = dataclasses.replace(settings, parallel=config.Parallel(), sync=config.Sync())
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, service=False))
    train = input_pipeline.pipeline(settings)
    batch = next(iter(train))
    rows = int(count_rows(batch))
    model = build.make_model(settings, tf.distribute.get_strategy(), train)
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    with deferred():
        optimizer.build(model.trainable_variables)
    reserve()
    peak = _peak_of(model, batch)
    more = min(rows, _ROWS)
    less = max(1, more // 8)
    low, high = peak(less), peak(more)
    per_row = max(0.0, (high - low) / (more - less)) if more > less else low
    stages, not_cut = _stages(model, devices)
    layers = fsdp_unit.layers_of(model)
    tables = [layer for layer in layers if fsdp.tables_of(layer)]
    units = [layer for layer in layers if layer not in tables]
    return Needs(
        weights=[_bytes([v]) for v in model.trainable_variables],
        units=[_bytes(fsdp_unit.weights_of(layer)) for layer in units],
        products=[list(layer_products.products_of(layer, devices).values()) for layer in units],
        frozen=_bytes(
            [v for v in model.variables if not any(v is t for t in model.trainable_variables)]
        ),
        slots=_bytes([v for v in optimizer.variables if len(v.shape)]),
        scalars=_bytes([v for v in optimizer.variables if not len(v.shape)]),
        fixed=math.ceil((1 + _ROUNDING) * max(0.0, low - per_row * less)),
        per_row=(1 + _ROUNDING) * per_row,
        rows=rows,
        examples=input_pipeline.examples(train),
        partial=settings.data.tail == "partial",
        learning_rate=None if settings.train.base_global_batch else settings.train.learning_rate,
        adaptive=not isinstance(inner, keras.optimizers.SGD),
        stages=stages,
        not_sharded=_refusal(global_norm.check_elementwise, inner),
        not_cut=not_cut,
        frozen_weights=[_bytes([v]) for v in fsdp_unit.weights_of(model) if not v.trainable],
        tables=[_bytes([v]) for layer in tables for v in layer.trainable_weights],
        frozen_tables=[_bytes([v]) for layer in tables for v in layer.non_trainable_weights],
        table_rows=_table_rows(model, tables),
        updates_rows=fsdp.updates_rows(optimizer, sync.Gradients()),
        fused=fused_updates.has_kernel(inner),
    )


def _table_rows(model: Any, tables: Sequence[Any]) -> int | None:
    """Return the bytes that tables give for one example; None if the model does not tell."""
    import keras

    from tfdist.layers import ShardedEmbedding
    from tfdist.parallel.pipeline_parallel import split

    if not tables:
        return 0
    if any(type(layer) not in (keras.layers.Embedding, ShardedEmbedding) for layer in tables):
        return None  # such a layer does not return the rows themselves
    try:
        graph = split.graph_of(model)
    except ValueError:
        return None
    calls = [call for call in graph.calls if call.operation in tables]
    if len({id(call.operation) for call in calls}) < len(tables):  # some are in a nested model
        return None
    sizes = [_size(graph.tensors[number]) for call in calls for number in call.output_numbers]
    return None if None in sizes else sum(size or 0 for size in sizes)


def reserve() -> None:
    """Let TensorFlow's allocator take one large region, as on a GPU; its pages stay unused.

    Otherwise it takes regions whose sizes are powers of two, and counts a tensor that fills more
    than half of one as the whole.
    """
    import tensorflow as tf

    with contextlib.suppress(tf.errors.ResourceExhaustedError):  # on a machine with less memory
        tf.raw_ops.Empty(shape=_REGION, dtype=tf.uint8)


def take_free_chunks() -> list[Any]:
    """Return tensors that take the free chunks between others; their pages stay unused.

    TensorFlow's allocator gives a tensor a free chunk of up to twice its size, so that without them
    a measurement would depend on how fragmented the memory is.
    """
    import tensorflow as tf

    taken: list[Any] = []
    with contextlib.suppress(tf.errors.ResourceExhaustedError):
        for size in _CHUNKS:
            taken += [tf.raw_ops.Empty(shape=[size], dtype=tf.uint8) for _ in range(_OF_A_SIZE)]
    return taken


def _peak_of(model: Any, batch: Any) -> Callable[[int], int]:
    """Return a function that measures the memory of a pass over the first rows of a batch.

    It returns the maximum growth of tensor memory in a forward and a backward pass, in bytes, and
    of several such pairs the smallest. The passes are one graph, as in training: TensorFlow frees
    what no later operation reads. A gradient is freed once it is computed. The largest one is taken
    for one that exists at the peak, and not counted, so that the result is too small by up to its
    size where it is computed after most activations are freed.
    """
    import keras
    import tensorflow as tf

    variables = [v.value for v in model.trainable_variables]
    largest = 0

    @tf.function
    def step(batch: Any) -> list[Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), weight)
        gradients = tape.gradient(loss, variables)
        nonlocal largest
        dense = (v for v, g in zip(variables, gradients, strict=True) if isinstance(g, tf.Tensor))
        largest = max((_bytes([v]) for v in dense), default=0)
        sums = [tf.reduce_sum(getattr(g, "values", g)) for g in gradients if g is not None]
        return [loss, *sums]

    def peak(rows: int) -> int:
        first = _first(batch, rows)
        graph = step.python_function if model.run_eagerly else step.get_concrete_function(first)
        graph(first)  # makes threads, and what they keep
        growths = []
        for _ in range(_PASSES):
            taken = take_free_chunks()
            growths.append(_growth(graph, first))
            del taken
        return max(0, min(growths) - largest)

    return peak


def _growth(step: Callable[[Any], Any], batch: Any) -> int:
    """Return the growth of tensor memory at the peak of a call, in bytes."""
    import tensorflow as tf

    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(batch)
    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)


def _first(batch: Any, rows: int) -> Any:
    import tensorflow as tf

    from tfdist.data.batch_rows import cut

    return cut(batch, tf.constant(0, tf.int64), tf.constant(rows, tf.int64))


def _stages(model: Any, count: int) -> tuple[list[Stage], str]:
    """Cut the model into stages, or return the reason why it cannot be cut.

    The cut is the default cut of `tfdist.parallel.pipeline`.
    """
    from tfdist.parallel.pipeline_parallel import split

    try:
        graph = split.graph_of(model)
        parts = split.split(graph, split.balanced(graph, count, split.parameters(graph)))
    except ValueError as error:
        return [], str(error).removeprefix("parallel.pipeline: ")
    sizes = [_size(x) for x in graph.tensors]
    whole = sum(size or 0 for size in sizes)
    stages = []
    for stage in parts:
        variables = [v for layer in stage.model.layers for v in layer.variables]
        passed = [
            n
            for n in (
                *stage.input_numbers,
                *(stage.output_numbers if stage is not parts[-1] else ()),
            )
            if n not in graph.inputs
        ]
        made = sum(
            sizes[n] or 0
            for call in graph.calls
            if call.name in stage.layers
            for n in call.output_numbers
        )
        stages.append(
            Stage(
                weights=_bytes([v for v in variables if v.trainable]),
                frozen=_bytes([v for v in variables if not v.trainable]),
                share=made / whole if whole else 1 / count,
                passed=None
                if any(sizes[n] is None for n in passed)
                else sum(sizes[n] or 0 for n in passed),
            )
        )
    return stages, ""


def _size(tensor: Any) -> int | None:
    """Return the bytes of a symbolic tensor for one example; None if a length is unknown."""
    import tensorflow as tf

    return (
        None
        if None in tensor.shape[1:]
        else math.prod(tensor.shape[1:]) * tf.as_dtype(tensor.dtype).size
    )


def _refusal(check: Any, *args: Any) -> str:
    """Return the message of a check that fails; "" if the check passes.

    Only the first sentence of the message is returned.
    """
    try:
        check(*args)
    except ValueError as error:
        return str(error).removeprefix("zero: ").partition(". ")[0]
    return ""


def _bytes(variables: Sequence[Any]) -> int:
    import tensorflow as tf

    return sum(
        math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables if v.dtype != "string"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
