"""Traps in the source of a Keras script that is to train under a distribution strategy.

The source is read, not run. A trap is found by the names that the code uses, so that unusual code
may hide one.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Trap:
    """Kind of a trap.

    Attributes:
        problem: Description of what goes wrong.
        remedy: Change to make.
        page: Page of the docs, with its section.
    """

    problem: str
    remedy: str
    page: str


TRAPS = {
    "no-strategy": Trap(
        "the script makes no strategy: under several workers, each would train the whole model",
        "call `tfdist.init()` first, or `strategy = tfdist.make_strategy()`, and then make the "
        "model in `strategy.scope()`",
        "porting.md#one-line",
    ),
    "other-strategy": Trap(
        "tfdist's fixes apply to strategies of `tfdist.make_strategy` only",
        "call `tfdist.make_strategy()` instead; the launcher says which strategy it is",
        "training.md#bugs-of-keras-3-that-tfdist-fixes",
    ),
    "own-loop": Trap(
        "outside of `strategy.run` and `fit`, each worker trains the whole model by itself, and "
        "several devices of a process are an error",
        "make the step the `train_step` of a model, and call `fit`; or use `tfdist.loops`",
        "functions.md#your-own-training-loop",
    ),
    "keras-distribution": Trap(
        "on TensorFlow, Keras alone ignores `keras.distribution` and trains on one device",
        "call `tfdist.enable()` first",
        "keras_distribution.md#what-works",
    ),
    "keras-2": Trap(
        "`tf_keras` is Keras 2; tfdist fixes and tests Keras 3 only",
        "`import keras`, and leave out `TF_USE_LEGACY_KERAS`",
        "coming_from.md#from-tf_keras-and-tensorflows-strategies",
    ),
    "before-strategy": Trap(
        "this makes a tensor, a dataset or a model before the strategy",
        "make the strategy first",
        "porting.md#one-line",
    ),
    "model-outside-scope": Trap(
        "a model that is made outside of `strategy.scope()` is not distributed",
        "make it in `with strategy.scope():`, or call the function that makes it there",
        "training.md#models-outside-of-the-scope",
    ),
    "optimizer-outside-scope": Trap(
        "an optimizer or a metric that is made outside of `strategy.scope()` is refused",
        'make it in `with strategy.scope():`, or give `compile` a name such as "adam"',
        "training.md#bugs-of-keras-3-that-tfdist-fixes",
    ),
    "shard": Trap(
        "all workers must see the same batches, of which tfdist gives each its own rows",
        "leave out `shard()`",
        "training.md#batches",
    ),
    "replica-batch": Trap(
        "the batch size is divided by the number of replicas, but batches are global",
        "give the number of rows of all replicas together",
        "training.md#batches",
    ),
    "learning-rate": Trap(
        "the global batch grows with the number of replicas, and the learning rate does not",
        "multiply the learning rate too, and begin with a warm-up; or keep the global batch",
        "porting.md#batch-and-learning-rate",
    ),
    "unseeded": Trap(
        "this random generator has another seed on each worker",
        "give it a seed, such as `np.random.default_rng(0)`",
        "training.md#batches",
    ),
    "shuffle-seed": Trap(
        "after a resume, an unseeded shuffle has another order",
        "pass `seed=` and `reshuffle_each_iteration=False`, or use `tfdist.data.pipeline`",
        "training.md#resume-after-an-interruption",
    ),
    "sum-in-step": Trap(
        "a replica sums its own rows only: the loss is too small by the number of replicas",
        'take the mean over the rows, or a Keras loss with `reduction="sum"`',
        "training.md#what-to-use-instead",
    ),
    "mean-by-hand": Trap(
        "the loss is divided by the number of replicas twice",
        "take the plain mean over the rows, as for one device",
        "training.md#what-to-use-instead",
    ),
    "clip-in-step": Trap(
        "gradients are clipped before they are summed over the replicas",
        "use the optimizer's `clipnorm`, `global_clipnorm` or `clipvalue`",
        "training.md#what-to-use-instead",
    ),
    "assign-in-step": Trap(
        "a weight gets other values on each replica",
        "update it by `optimizer.apply`",
        "training.md#what-to-use-instead",
    ),
    "stateful": Trap(
        "a recurrent layer with `stateful=True` is refused under several replicas",
        "leave it out",
        "training.md#bugs-of-keras-3-that-tfdist-fixes",
    ),
    "callback-writes": Trap(
        "a callback of your own runs on all workers, which would all write this file",
        "write on the chief only: `tfdist.ClusterSpec.from_tf_config(...).is_chief`",
        "training.md#which-workers-write-files",
    ),
    "save-on-chief": Trap(
        "the other workers do not take part in this call, which may wait for them",
        "call it on all workers; only the chief writes",
        "training.md#which-workers-write-files",
    ),
    "watches-batches": Trap(
        "a callback that watches batches costs a wait for all replicas in each step",
        "use `on_epoch_end`, if that is enough",
        "training.md#several-steps-in-one-call",
    ),
}


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A trap at a line of a script.

    Attributes:
        line: Number of the line, from 1.
        kind: Key in `TRAPS`.
    """

    line: int
    kind: str


# Its scope is entered until the end of the script.
INIT = r"tfdist\.(strategies\.init\.)?init"
MODELS = (
    r"keras\.(Sequential|Model|models\.(Sequential|Model|clone_model)|applications\.\w+(\.\w+)?)"
)
OBJECTS = r"keras\.(optimizers|metrics)\.[A-Z]\w+"
OPTIMIZERS = r"(keras|tensorflow|tfdist)\.optimizers\.([A-Z]\w+|get)"
TRAINS = ("fit", "train_on_batch")
SUMS = r"tensorflow\.(math\.)?reduce_sum|keras\.ops\.sum"
SEEDED = r"numpy\.random\.(default_rng|RandomState)"
STARTS = rf"{MODELS}|keras\.(layers\.\w+|Input)|tensorflow\.(data\..*|constant|Variable|random\..*)"
CHIEF = re.compile(r"is_chief|\brank\b|task_(index|id)|process_index|worker_(index|id)")
STEPS = ("train_step", "compute_loss")
# In a statement in lower case: a learning rate, which is an optimizer's first argument.
RATE = r"learning_rate|\blr\b|_lr\b|\brate\b|\boptimizers\.|\b(sgd|adam|adamw|rmsprop)\("
CLIPS = r"tensorflow\.clip_by_\w+|keras\.ops\.clip"
WRITES = r"open|numpy\.save\w*|json\.dump|pickle\.dump|matplotlib\.pyplot\.savefig"
WRITE_METHODS = ("write_text", "write_bytes", "to_csv", "savefig", "save", "save_weights")
SAVES = ("save", "save_weights", "export")


def find(source: str) -> list[Finding]:
    r"""Return the traps of a script, in the order of its lines.

    Args:
        source: Text of the script.

    Raises:
        SyntaxError: If it is not Python.

    Example:
        >>> find("import keras\nmodel = keras.Sequential([])\nmodel.fit(x)")
        [Finding(line=3, kind='no-strategy')]
    """
    return sorted(set(_Script(ast.parse(source)).findings()))


class _Script:
    """The tree of a script, with the names that its imports give."""

    def __init__(self, tree: ast.Module):
        self.tree = tree
        self.nodes = list(ast.walk(tree))
        self.names = dict(_imported(self.nodes))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.in_scope = self._functions_called_in_scope()

    def findings(self) -> Iterator[Finding]:
        strategies = [call for call in self.calls if self._is_strategy(call)]
        distributes = r".*\.scope|tfdist\.parallel\..*|keras\.distribution\.set_distribution"
        if not strategies and not self._any(distributes):
            trains = [call.lineno for call in self.calls if _method(call) in TRAINS]
            if trains:
                yield Finding(min(trains), "no-strategy")
        if not self._any(r"tfdist\.(strategies\.keras_distribution\.)?enable"):
            for call in self.calls:
                if self._matches(call.func, r"keras\.distribution\.(initialize|\w+Parallel)"):
                    yield Finding(call.lineno, "keras-distribution")
        for call in strategies:
            if not self.name(call.func).startswith("tfdist"):
                yield Finding(call.lineno, "other-strategy")
            yield from self._before(call)
        needs_scope = bool(strategies) and not self._any(INIT)
        for call in self.calls:
            for kind in self._kinds(call, needs_scope):
                yield Finding(call.lineno, kind)
        yield from self._keras_2()
        yield from self._own_loops()
        yield from self._batches()
        yield from self._callbacks()

    def name(self, node: ast.AST) -> str:
        """Return a dotted name as its import gives it: "tensorflow.data.Dataset"."""
        if isinstance(node, ast.Attribute):
            return _keras(f"{self.name(node.value)}.{node.attr}")
        return self.names.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def _matches(self, node: ast.AST, pattern: str) -> bool:
        return re.fullmatch(pattern, self.name(node)) is not None

    def _any(self, pattern: str) -> bool:
        return any(self._matches(call.func, pattern) for call in self.calls)

    def _is_strategy(self, call: ast.Call) -> bool:
        return self._matches(
            call.func,
            rf"{INIT}|tfdist\.(strategies\.factory\.)?make_strategy|tensorflow\.distribute\."
            r"(\w+\.)*(?!OneDevice)\w*Strategy\w*",
        )

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def _in_step(self, node: ast.AST) -> bool:
        """Return whether a node is in a step of training, or in a loss, of the user's own."""
        return any(isinstance(o, ast.FunctionDef) and o.name in STEPS for o in self._around(node))

    def _on_chief(self, node: ast.AST) -> bool:
        """Return whether a node runs only if a condition about the worker's rank holds."""
        return any(
            isinstance(outer, ast.If) and CHIEF.search(ast.unparse(outer.test))
            for outer in self._around(node)
        )

    def _functions_called_in_scope(self) -> set[str]:
        """Return the names of functions that a scope may call, itself or by other functions."""
        called_names = {call.func for call in self.calls}
        # A function that is passed on may be called anywhere, in a scope too.
        found = {
            node.id
            for node in self.nodes
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node not in called_names
        }
        while True:
            called = {
                call.func.id
                for call in self.calls
                if isinstance(call.func, ast.Name) and self._scoped(call, found)
            }
            if called <= found:
                return found
            found |= called

    def _scoped(self, node: ast.AST, functions: set[str]) -> bool:
        for outer in self._around(node):
            if isinstance(outer, ast.With) and any(
                isinstance(item.context_expr, ast.Call) and _method(item.context_expr) == "scope"
                for item in outer.items
            ):
                return True
            if isinstance(outer, ast.FunctionDef) and outer.name in functions:
                return True
            # Code of a class or a lambda runs where it is called.
            if isinstance(outer, ast.ClassDef | ast.Lambda):
                return True
        return False

    def _before(self, strategy: ast.Call) -> Iterator[Finding]:
        """Find what is made before the strategy, in the same block or before its function."""
        bodies = (getattr(outer, "body", None) for outer in self._around(strategy))
        # The body of a conditional expression or a lambda is no list.
        block: list[ast.stmt] = next(body for body in bodies if isinstance(body, list))
        statements = [s for s in block if s.lineno < strategy.lineno]
        for statement in statements:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and self._matches(node.func, STARTS):
                    yield Finding(node.lineno, "before-strategy")

    def _kinds(self, call: ast.Call, needs_scope: bool) -> Iterator[str]:
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        method = _method(call)
        if needs_scope and not self._scoped(call, self.in_scope):
            if self._matches(call.func, MODELS):
                yield "model-outside-scope"
            if self._matches(call.func, OBJECTS):
                yield "optimizer-outside-scope"
        if method == "shard" and (call.args or keywords.keys() & {"num_shards", "index"}):
            yield "shard"
        if self._matches(call.func, SEEDED) and all(
            _is_none(seed) for seed in [*call.args, *keywords.values()]
        ):
            yield "unseeded"
        if (
            method == "shuffle"
            and (call.args or "buffer_size" in keywords)
            and "seed" not in keywords
            and len(call.args) < 2
            and self._any(r"(.*\.)?BackupAndRestore")
            and not self.name(call.func).startswith(("random.", "numpy."))
        ):
            yield "shuffle-seed"
        if _is_true(keywords.get("stateful")):
            yield "stateful"
        if method in SAVES and self._on_chief(call):
            yield "save-on-chief"
        if "on_train_batch_end" in keywords or "on_train_batch_begin" in keywords:
            yield "watches-batches"
        if self._in_step(call):
            yield from self._kinds_in_step(call, method)

    def _kinds_in_step(self, call: ast.Call, method: str) -> Iterator[str]:
        if self._matches(call.func, SUMS) and _sums_rows(call):
            yield "sum-in-step"
        if self._matches(
            call.func, r"tensorflow\.nn\.(compute_average_loss|scale_regularization_loss)"
        ):
            yield "mean-by-hand"
        if self._matches(call.func, CLIPS):
            yield "clip-in-step"
        if method == "assign_sub":
            yield "assign-in-step"

    def _keras_2(self) -> Iterator[Finding]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            else:
                continue
            if any(module.partition(".")[0] == "tf_keras" for module in modules):
                yield Finding(node.lineno, "keras-2")

    def _assigned(self, made_by: Callable[[ast.Call], bool]) -> set[str]:
        """Return the variables and attributes to which the result of such a call is assigned."""
        found = set()
        for node in self.nodes:
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
                continue
            if isinstance(node.value, ast.Call) and made_by(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {ast.unparse(target) for target in targets}
        return found

    def _own_loops(self) -> Iterator[Finding]:
        """Find updates by an optimizer that no step of a model makes, and no strategy runs."""
        strategies = self._assigned(self._is_strategy)
        optimizers = self._assigned(lambda call: self._matches(call.func, OPTIMIZERS))
        if self._any(r"tfdist\.loops\..*") or any(
            _method(call) == "run"
            and isinstance(call.func, ast.Attribute)
            and (
                ast.unparse(call.func.value) in strategies
                or "strategy" in ast.unparse(call.func.value).lower()
            )
            for call in self.calls
        ):
            return
        for call in self.calls:
            owner = ast.unparse(call.func).rpartition(".")[0]
            if (
                _method(call) == "apply_gradients"
                or (
                    _method(call) == "apply"
                    and (owner in optimizers or "optimizer" in owner.lower())
                )
            ) and not any(isinstance(outer, ast.ClassDef) for outer in self._around(call)):
                yield Finding(call.lineno, "own-loop")

    def _batches(self) -> Iterator[Finding]:
        """Find divisions by the number of replicas, and batches that grow with it."""
        grows: list[ast.BinOp] = []
        scaled = False
        for node in self.nodes:
            if not isinstance(node, ast.BinOp) or not _has_replicas(node.right, node.left):
                continue
            about = ast.unparse(self._statement(node)).lower()
            if isinstance(node.op, ast.Div | ast.FloorDiv):
                if self._in_step(node):
                    yield Finding(node.lineno, "mean-by-hand")
                elif "batch" in about:
                    yield Finding(node.lineno, "replica-batch")
            elif isinstance(node.op, ast.Mult):
                if re.search(RATE, about):
                    scaled = True
                elif "batch" in about:
                    grows.append(node)
        if not scaled:
            yield from (Finding(node.lineno, "learning-rate") for node in grows)

    def _statement(self, node: ast.AST) -> ast.AST:
        return next(o for o in [node, *self._around(node)] if isinstance(o, ast.stmt))

    def _callbacks(self) -> Iterator[Finding]:
        for node in self.nodes:
            if not isinstance(node, ast.ClassDef) or not any(
                self.name(base).endswith("Callback") for base in node.bases
            ):
                continue
            for method in node.body:
                if not isinstance(method, ast.FunctionDef):
                    continue
                if method.name in ("on_train_batch_begin", "on_train_batch_end"):
                    yield Finding(method.lineno, "watches-batches")
                yield from self._writes(method)

    def _writes(self, method: ast.FunctionDef) -> Iterator[Finding]:
        for node in ast.walk(method):
            if not isinstance(node, ast.Call) or self._on_chief(node):
                continue
            # tfdist itself lets only the chief write a model.
            saves_model = "model" in ast.unparse(node.func) and _method(node) in SAVES
            opens = self.name(node.func) == "open"
            if (
                (self._matches(node.func, WRITES) or _method(node) in WRITE_METHODS)
                and not saves_model
                and (not opens or _opens_to_write(node))
            ):
                yield Finding(node.lineno, "callback-writes")


def _imported(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, _keras(alias.name if alias.asname else first)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, _keras(f"{node.module}.{alias.name}")


def _keras(name: str) -> str:
    """Return a dotted name, with `keras` for `tensorflow.keras`."""
    return name.replace("tensorflow.keras", "keras", 1)


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _sums_rows(call: ast.Call) -> bool:
    """Return whether a call of a sum names axis 0, the rows, or may do so by a variable."""
    axes = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "axis")]
    try:
        axis = ast.literal_eval(axes[0]) if axes else None
    except ValueError:  # a variable
        return True
    numbers = axis if isinstance(axis, tuple | list) else (axis,)
    return None in numbers or 0 in numbers


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _has_replicas(*nodes: ast.AST) -> bool:
    return any("num_replicas_in_sync" in ast.unparse(node) for node in nodes)


def _opens_to_write(call: ast.Call) -> bool:
    mode = next((k.value for k in call.keywords if k.arg == "mode"), None)
    mode = mode or (call.args[1] if len(call.args) > 1 else None)
    return isinstance(mode, ast.Constant) and bool(set(str(mode.value)) & set("wax+"))
