"""Numbered batches of a data set, read by the workers or by the coordinator for them.

Every worker that reads iterates over the same batches in the same order, and skips those that other
workers train on. Each batch is therefore trained on once, however fast the workers are. When a
worker dies, another one takes over its batch numbers. tf.data draws or orders some things
differently in each process: unset seeds and "deterministic=False". Both are fixed before the data
set is sent to the workers.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data.portable import ANY_EPOCH, bound_to_process, graph_of, with_epoch
from tfdist.keras_compat import held_bytes
from tfdist.train.data_position import DataPosition
from tfdist.train.synchronous.feed import is_made_by_keras_threads, symbolic

# Most bytes of arrays that a data set may hold: sending more to every worker takes longer than
# sending batches.
MAX_MOVED_BYTES = 2 * 2**20

PREFETCH = 8  # batches

# Op -> positions of its seed inputs: (seed, seed2).
_SEEDS = {
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleDataset": (2, 3),
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
}


class Stream:
    """Iterable that Keras reads in one `fit`, `evaluate` or `predict`.

    Args:
        dataset: Data set of global batches.
        host: Device of the coordinator.
        by_workers: Whether workers may read the data set; False if the coordinator must.
        seed: Seed of the random operations that have no seed of their own; None: a random one.
        position: Position in the data set. None: that of passes over the data.
        epoch: Function that returns Keras' current epoch.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        host: str,
        by_workers: bool,
        seed: int | None,
        position: DataPosition | None = None,
        epoch: Callable[[], int] = lambda: 0,
    ):
        self.position = position or DataPosition(dataset)
        self._epoch_of_fit = epoch
        self.element_spec = dataset.element_spec
        self._host = host
        self._seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        self._passes = 0
        with tf.device(host):
            self.length = int(dataset.cardinality())
            # Keras stops its threads between passes, where nothing may be read ahead.
            ahead = dataset if is_made_by_keras_threads(dataset) else dataset.prefetch(PREFETCH)
            self._dataset = ahead.with_options(_options())
        # In a `tfdist.data` data pipeline, each epoch is a data set of its own.
        self._epochs = getattr(dataset, "epochs", None)
        self._graph = None
        if by_workers:
            with tf.device(host):
                self._graph = _graph(
                    dataset if self._epochs is None else dataset.of_epoch(ANY_EPOCH)
                )

    @property
    def by_workers(self) -> bool:
        """Return whether the workers read the data set."""
        return self._graph is not None

    def __iter__(self) -> Pass:
        return Pass(self)

    def symbolic_batch(self) -> Any:
        """Return the batch from whose shapes Keras builds a model; see `symbolic`."""
        return symbolic(self.element_spec)

    def local(self):
        """Return an iterator on the coordinator for the next pass."""
        self.position.begin_pass(self._epoch_of_fit())
        with tf.device(self._host):
            return iter(self._dataset)

    def graph(self) -> bytes:
        """Return the serialized graph from which workers make their iterators for the next pass."""
        self.position.begin_pass(self._epoch_of_fit())
        self._passes += 1
        graph = self._graph
        assert graph is not None
        if self._epochs is not None:
            graph = with_epoch(graph, int(self._epochs.take()))
        return fix_order(graph, self._seed, self._passes)

    def get_next(self, iterator):
        """Return the next batch of an iterator on the coordinator."""
        with tf.device(self._host):
            return next(iterator)


class Pass:
    """One iteration over a `Stream`: the iterator that Keras receives.

    Attributes:
        position: Number of the next batch.
        length: Number of all batches; None while unknown.
    """

    def __init__(self, stream: Stream):
        self.stream = stream
        self.position = 0
        self.length = stream.length if stream.length >= 0 else None
        self._iterator = None

    @functools.cached_property
    def graph(self) -> bytes:
        """Return the graph that workers read from, the same one for the whole pass."""
        return self.stream.graph()

    def prepare(self) -> None:
        """Build the graph in the owning thread, because workers ask for it from their threads."""
        if self.stream.by_workers:
            _ = self.graph

    def __iter__(self) -> Pass:
        return self

    def __next__(self):
        return self.batch()

    def batch(self):
        """Return the next batch, read on the coordinator.

        Raises:
            StopIteration: If there are no more batches.
        """
        if self._iterator is None:
            self._iterator = self.stream.local()
        try:
            batch = self.stream.get_next(self._iterator)
        except tf.errors.OutOfRangeError:
            raise StopIteration from None
        self.position += 1
        return batch


@functools.partial(tf.function, autograph=False)
def dataset_variant(graph: tf.Tensor) -> tf.Tensor:
    """Return the data set that a serialized graph describes, as a variant tensor."""
    return tf.raw_ops.DatasetFromGraph(graph_def=graph)


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    # Deleting an iterator waits for its autotune thread, which may sleep for most of a minute.
    options.autotune.enabled = False
    return options


def _graph(dataset: tf.data.Dataset) -> bytes | None:
    """Return a data set as a graph that other processes can run, or None.

    It is None if the data set holds Python code or many arrays.
    """
    if held_bytes(dataset) > MAX_MOVED_BYTES:
        return None
    try:
        graph = graph_of(dataset.prefetch(PREFETCH).with_options(_options()))
    except tf.errors.OpError:
        return None
    return graph if bound_to_process(graph) is None else None


def fix_order(graph: bytes, seed: int, number: int) -> bytes:
    """Return a data set's graph that yields the same order of elements in every process.

    The order differs between passes.

    Args:
        graph: Serialized GraphDef.
        seed: Seed of the random operations that have no seed of their own.
        number: Number of the pass. A `shuffle` with a seed that reshuffles each iteration draws
            another order in each pass.

    Returns:
        A serialized GraphDef.
    """
    definition = tf.compat.v1.GraphDef.FromString(graph)
    for nodes, reference in [
        (definition.node, "{}"),
        *((f.node_def, "{}:output:0") for f in definition.library.function),
    ]:
        constants = {node.name: node for node in nodes if node.op == "Const"}
        for node in list(nodes):
            if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
                node.attr["deterministic"].s = b"true"
            if "sloppy" in node.attr:
                node.attr["sloppy"].b = False
            if node.op in _SEEDS:
                positions = _SEEDS[node.op]
                seeds = [_constant(constants, node.input[i]) for i in positions]
                if None in seeds:
                    continue  # a computed seed: by the user, or by TensorFlow from its global seed
                same_each_pass = (
                    "reshuffle_each_iteration" in node.attr
                    and not node.attr["reshuffle_each_iteration"].b
                )
                derived = _derive_seeds(
                    *(seeds if any(seeds) else (seed, node.name)), 0 if same_each_pass else number
                )
                for position, value in zip(positions, derived, strict=True):
                    node.input[position] = reference.format(
                        _add_constant(nodes, f"{node.name}/tfdist_seed_{position}", value)
                    )
            elif "seed" in node.attr and "seed2" in node.attr:  # a random operation in a map
                seeds = [node.attr["seed"].i, node.attr["seed2"].i]
                node.attr["seed"].i, node.attr["seed2"].i = _derive_seeds(
                    *(seeds if any(seeds) else (seed, node.name)), number
                )
    return definition.SerializeToString()


def _name(reference: str) -> str:
    return reference.partition(":")[0]


def _constant(constants: dict, reference: str) -> int | None:
    node = constants.get(_name(reference))
    return None if node is None else int(tf.make_ndarray(node.attr["value"].tensor))


def _add_constant(nodes, name: str, value: int) -> str:
    node = nodes.add(name=name, op="Const")
    node.attr["dtype"].type = tf.int64.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))
    return name


def _derive_seeds(*values: Any) -> tuple[int, int]:
    """Return two seeds derived from a hash of the arguments, never both 0."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") % 2**31, 1 + int.from_bytes(
        digest[4:], "little"
    ) % (2**31 - 1)
