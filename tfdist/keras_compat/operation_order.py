"""Order of stateful operations within a function: that of each replica alone.

TensorFlow runs the stateful operations of a graph that use no resource, such as calls of Python
functions, assertions and checks for NaN, one after the other: all those of one replica before those
of the next. Where the replicas call a collective in between, the first replica then waits for the
second one's call, and the second for the first one's operations after it, for ever. Lookups in a
table that the replicas share are run in the same way.
"""

from __future__ import annotations

import re
import threading
import weakref
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps as _auto_control_deps
from tensorflow.python.framework import auto_control_deps_utils as _auto_control_deps_utils
from tensorflow.python.ops import control_flow_v2_func_graphs as _control_flow_v2_func_graphs

# TensorFlow's name scope of the operations of each replica but the first, of gradients, too.
_SCOPE = re.compile(r"(?:^|/)replica_(\d+)/")

# What reads a table, and changes nothing; TensorFlow takes each of them for a change.
TABLE_READS = ("LookupTableFindV2", "LookupTableSizeV2")


@dataclass
class _Traced:
    """What is in order of a graph that is being traced.

    Attributes:
        operations: Number of its operations that were looked at.
        last: Name of the last operation in the order of each replica. The operation itself would
            keep the graph alive.
    """

    operations: int = 0
    last: dict[str, str] = field(default_factory=dict)


_traced: weakref.WeakKeyDictionary[tf.Graph, _Traced] = weakref.WeakKeyDictionary()


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
            _order(graph)
        graph = getattr(graph, "outer_graph", None)


def in_loop_of_replica() -> bool:
    """Return whether a loop is traced within one of several replicas of this process.

    TensorFlow tells collectives apart by the loop that they are in, so that those in the loops of
    two replicas would wait for each other for ever. A loop around `strategy.run` is one loop.
    """
    begin = getattr(threading.current_thread(), "graph", None)  # where the replica begins
    graph = tf.compat.v1.get_default_graph()
    while begin is not None and graph not in (begin, None):
        if isinstance(graph, _control_flow_v2_func_graphs.WhileBodyFuncGraph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def hook_table_reads() -> None:
    """Let replicas read a table at the same time; a change keeps its place among the reads."""
    for name in TABLE_READS:
        _auto_control_deps_utils.register_read_only_resource_op(name)


def _order(graph: tf.Graph) -> None:
    operations = graph.get_operations()
    traced = _traced.setdefault(graph, _Traced())
    for op in operations[traced.operations :]:
        if not _auto_control_deps.op_is_stateful(op) or any(
            tensor.dtype == tf.resource for tensor in op.inputs
        ):
            continue
        scope = _SCOPE.search(op.name)
        replica = scope[1] if scope else "0"
        if replica in traced.last:
            op._add_control_input(graph.get_operation_by_name(traced.last[replica]))
        traced.last[replica] = op.name
        unordered(op)
    traced.operations = len(operations)
