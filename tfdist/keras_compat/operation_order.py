"""Order of stateful operations within a function: that of each replica alone.

TensorFlow runs the stateful operations of a graph that use no resource, such as calls of Python
functions, assertions and checks for NaN, one after the other: all those of one replica before those
of the next. Where the replicas call a collective in between, the first replica then waits for the
second one's call, and the second for the first one's operations after it, for ever. Lookups in a
table that the replicas share are run in the same way.
"""

from __future__ import annotations

import functools
import re
import threading
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps as _auto_control_deps
from tensorflow.python.framework import auto_control_deps_utils as _auto_control_deps_utils
from tensorflow.python.ops import control_flow_v2_func_graphs as _control_flow_v2_func_graphs

from tfdist.keras_compat.parallel import objects_of

# TensorFlow's name scope of the operations of each replica but the first, of gradients, too. Other
# operations count as the first replica's: also those before and after the replicas. A layer of the
# first replica must not have such a name.
_SCOPE = re.compile(r"(?:^|/)replica_(\d+)/")

_LOOPS = (
    _control_flow_v2_func_graphs.WhileBodyFuncGraph,
    _control_flow_v2_func_graphs.WhileCondFuncGraph,
)

_KEY = "order of operations"  # in `objects_of` a graph

# What reads a table, and changes nothing; TensorFlow takes each of them for a change.
TABLE_READS = ("LookupTableFindV2", "LookupTableSizeV2")


@dataclass
class _Traced:
    """State of the order of a graph that is being traced.

    Attributes:
        operations: Number of its operations that are in order.
        last: Last stateful operation of each replica.
    """

    operations: int = 0
    last: dict[str, tf.Operation] = field(default_factory=dict)


def unordered(op: tf.Operation) -> None:
    """Let a stateful operation of a function run as soon as it can.

    TensorFlow otherwise runs stateful operations one after the other, in program order.
    """
    op.graph.experimental_acd_manager.run_independently(op)


def order_by_replica() -> None:
    """Order the stateful operations that are traced so far by replica.

    Each replica's operations keep their order, and wait for no other replica's. Each replica calls
    this before each collective.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(graph, "experimental_acd_manager", None) is not None:
            _order(graph, objects_of(graph).setdefault(_KEY, _Traced()))
        graph = getattr(graph, "outer_graph", None)


def in_loop_of_replica() -> bool:
    """Return whether a loop is traced within one of several replicas of this process.

    TensorFlow tells collectives apart by the loop that they are in, so that those in the loops of
    two replicas would wait for each other for ever. A loop around `strategy.run` is one loop.
    """
    begin = getattr(threading.current_thread(), "graph", None)  # where the replica begins
    graph = tf.compat.v1.get_default_graph()
    while begin is not None and graph not in (begin, None):
        if isinstance(graph, _LOOPS):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def hook_order() -> None:
    """Order what follows the last collective of a function, and let replicas share tables.

    They look up at the same time. A change of a table keeps its place among the lookups.
    """
    for name in TABLE_READS:
        _auto_control_deps_utils.register_read_only_resource_op(name)
    cls = _auto_control_deps.AutomaticControlDependencies
    original = cls.__exit__

    @functools.wraps(original)
    def order(self, *error):
        graph = tf.compat.v1.get_default_graph()
        if (traced := objects_of(graph).get(_KEY)) is not None:
            _order(graph, traced)
        return original(self, *error)

    cls.__exit__ = order


def _order(graph: tf.Graph, traced: _Traced) -> None:
    operations = graph.get_operations()
    for op in operations[traced.operations :]:
        if not _is_in_order(op):
            continue
        scope = _SCOPE.search(op.name)
        replica = scope[1] if scope else "0"
        if replica in traced.last:
            op._add_control_input(traced.last[replica])
        traced.last[replica] = op
        unordered(op)
    traced.operations = len(operations)


def _is_in_order(op: tf.Operation) -> bool:
    """Return whether TensorFlow would run an operation after all stateful ones before it."""
    if not _auto_control_deps.op_is_stateful(op) or tf.resource in [x.dtype for x in op.inputs]:
        return False
    try:
        return not op.get_attr("_independent_side_effects")  # of `unordered`
    except ValueError:
        return True
