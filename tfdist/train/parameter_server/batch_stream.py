"""A data set becomes numbered batches that workers read by themselves, or the coordinator for them; each number is one batch.

Every worker that reads walks over the same batches in the same order and skips those that others do. So each batch is
trained on once however fast the workers are, and when one dies another takes up its numbers. What tf.data would draw or order
differently in each process (seeds that nobody set, "deterministic=False") is settled before the data set travels.
"""

from __future__ import annotations

import functools
import hashlib
import random
from typing import Any

import tensorflow as tf

from tfdist.keras_compat import held_bytes
from tfdist.train.synchronous.feed import symbolic

# Bytes of arrays that a data set may hold: sending more to every worker takes longer than sending batches.
LARGEST_MOVED = 2 * 2**20

PREFETCH = 8  # batches made ahead

# Op -> where its inputs are that tell the seeds: (seed, seed2).
_SEEDS = {
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleDataset": (2, 3),
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
}
# Resources that a worker makes for itself where it does not find the coordinator's.
_OWN_RESOURCES = {
    "ShuffleDatasetV3": 4,
    "ShuffleAndRepeatDatasetV2": 5,
    "CacheDatasetV2": 2,
    "RandomDatasetV2": 2,
}


class Stream:
    """What Keras walks over in one `fit`, `evaluate` or `predict`.

    Args:
        dataset: Global batches.
        host: Device of the coordinator.
        by_workers: Whether workers may read it; False where the coordinator must.
        symbolic_first: Whether Keras' first `next()` only asks for shapes.
        seed: Of what the user left unseeded.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        host: str,
        by_workers: bool,
        symbolic_first: bool,
        seed: int | None,
    ):
        self.element_spec = dataset.element_spec
        self.symbolic_first = symbolic_first
        self._host = host
        self._seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        self._passes = 0
        self._source = dataset
        with tf.device(host):
            self.length = int(dataset.cardinality())
            self._dataset = dataset.prefetch(PREFETCH).with_options(_options())
        # Of a pipeline of `tfdist.data`, each epoch is a data set of its own.
        self._epochs = getattr(dataset, "epochs", None)
        self._epoch = None if self._epochs is None else self._epochs.next
        self._graph = self._graph_of(self._epoch) if by_workers else None

    @property
    def by_workers(self) -> bool:
        """Whether workers read it by themselves."""
        return self._graph is not None

    def __iter__(self) -> Pass:
        return Pass(self)

    def local(self):
        """An iterator here."""
        with tf.device(self._host):
            return iter(self._dataset)

    def graph(self) -> bytes:
        """What a worker makes its iterator of, for the next pass."""
        self._passes += 1
        if self._epochs is not None and (epoch := self._epochs.take()) != self._epoch:
            self._epoch, self._graph = epoch, self._graph_of(epoch)
        assert self._graph is not None
        return settled(self._graph, self._seed, self._passes)

    def _graph_of(self, epoch: int | None) -> bytes | None:
        with tf.device(self._host):
            return _graph(self._source if epoch is None else self._source.of_epoch(epoch))

    def get_next(self, iterator):
        """The next batch of a local iterator."""
        with tf.device(self._host):
            return next(iterator)


class Pass:
    """One walk over a Stream, as Keras' iterator.

    Attributes:
        position: Number of the next batch.
        length: Batches in all; None while unknown.
    """

    def __init__(self, stream: Stream):
        self.stream = stream
        self.position = 0
        self.length = stream.length if stream.length >= 0 else None
        self._iterator = None

    @functools.cached_property
    def graph(self) -> bytes:
        return self.stream.graph()

    def prepare(self) -> None:
        """Makes what workers read from, in the thread that owns this; they ask for it from theirs."""
        if self.stream.by_workers:
            _ = self.graph

    def __iter__(self) -> Pass:
        return self

    def __next__(self):
        if self.stream.symbolic_first and not self.position:
            return symbolic(self.stream.element_spec)
        return self.batch()

    def batch(self):
        """The next batch, read here.

        Raises:
            StopIteration: There is none.
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
    """The data set that a graph describes, as a variant tensor."""
    return tf.raw_ops.DatasetFromGraph(graph_def=graph)


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    # The end of an iterator waits for the thread that tunes it, which may sleep for most of a minute.
    options.autotune.enabled = False
    return options


def _graph(dataset: tf.data.Dataset) -> bytes | None:
    """A data set as a graph that other processes can run; None where it holds Python code, or much data."""
    if held_bytes(dataset) > LARGEST_MOVED:
        return None
    variant = tf.data.experimental.to_variant(dataset.prefetch(PREFETCH).with_options(_options()))
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=1, strip_device_assignment=True
        ).numpy()
    except tf.errors.OpError:
        return None
    return graph if movable(graph) else None


def movable(graph: bytes) -> bool:
    """Whether a data set's graph has a meaning outside of this process: no Python code, no variable, no handle."""
    definition = tf.compat.v1.GraphDef.FromString(graph)
    own = {
        _name(node.input[_OWN_RESOURCES[node.op]])
        for node in definition.node
        if node.op in _OWN_RESOURCES and len(node.input) > _OWN_RESOURCES[node.op]
    }
    for node in _nodes(definition):
        if "PyFunc" in node.op or node.op == "VarHandleOp":  # a variable would stay as it is now
            return False
        handle = node.op == "Const" and node.attr["dtype"].type in (
            tf.resource.as_datatype_enum,
            tf.variant.as_datatype_enum,
        )
        if handle and node.name not in own:
            return False
    return True


def settled(graph: bytes, seed: int, number: int) -> bytes:
    """A data set's graph with the same order of elements in every process, another one for each pass.

    Args:
        graph: A serialized GraphDef.
        seed: Of what the user left unseeded.
        number: Of the pass; a `shuffle` that the user seeded, and that reshuffles, draws another order in each.

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
                places = _SEEDS[node.op]
                given = [_constant(constants, node.input[i]) for i in places]
                if None in given:
                    continue  # computed: by the user, or by TensorFlow from its global seed
                again = (
                    "reshuffle_each_iteration" in node.attr
                    and not node.attr["reshuffle_each_iteration"].b
                )
                drawn = _draw(*(given if any(given) else (seed, node.name)), 0 if again else number)
                for place, value in zip(places, drawn, strict=True):
                    node.input[place] = reference.format(
                        _add_constant(nodes, f"{node.name}/tfdist_seed_{place}", value)
                    )
            elif "seed" in node.attr and "seed2" in node.attr:  # a random operation in a map
                given = [node.attr["seed"].i, node.attr["seed2"].i]
                node.attr["seed"].i, node.attr["seed2"].i = _draw(
                    *(given if any(given) else (seed, node.name)), number
                )
    return definition.SerializeToString()


def _nodes(definition) -> list:
    return [
        *definition.node,
        *(node for function in definition.library.function for node in function.node_def),
    ]


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


def _draw(*what: Any) -> tuple[int, int]:
    """Two seeds that follow from anything, never both 0."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") % 2**31, 1 + int.from_bytes(
        digest[4:], "little"
    ) % (2**31 - 1)
