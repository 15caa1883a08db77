"""Conversion of model, optimizer, callback, random and history state to snapshots.

Under a strategy, a variable is saved as its value on all replicas. Values that each replica holds
for itself, such as metrics in the middle of an epoch, are not part of this state.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.backup import shards
from tfdist.backup.snapshot import Snapshot
from tfdist.keras_compat import CALLBACK_STATE as PRIVATE_STATE
from tfdist.keras_compat import engine_of, global_generator
from tfdist.keras_compat.parallel import as_shards

# Attributes of Keras callbacks that carry state between steps and epochs. Other callbacks define
# `get_state()`, which returns a JSON-serializable value, and `set_state(state)`.
_CALLBACK_STATE: tuple[tuple[type, tuple[str, ...]], ...] = (
    (keras.callbacks.EarlyStopping, ("wait", "best", "best_epoch", "stopped_epoch")),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (keras.callbacks.ModelCheckpoint, ("best", "epochs_since_last_save")),
    *PRIVATE_STATE,
)

_KINDS = "model", "optimizer"
_BEST = "best"
_RANDOM = "random"


def each_value(variables: Sequence[keras.Variable | tf.Variable]) -> list[np.ndarray]:
    """Return the values of variables, copied to the host."""
    return [
        tf.convert_to_tensor(v.value if isinstance(v, keras.Variable) else v).numpy()
        for v in variables
    ]


class WholeVariables(NamedTuple):
    """Variables of which a snapshot has all values, and what it says of the model.

    Attributes:
        variables: The variables by their keys in the snapshot.
        facts: Facts of the snapshot. For sharded variables, these are names, shapes and dtypes;
            `rows_of_model` returns this process's rows.
    """

    variables: Mapping[str, keras.Variable]
    facts: Mapping[str, Any]

    def read(self, values: Callable[[Sequence[keras.Variable]], list[Any]]) -> Snapshot:
        """Return the snapshot.

        Args:
            values: Function that reads variables: arrays, or tensors that no update changes.
        """
        read = values(list(self.variables.values()))
        return Snapshot(dict(zip(self.variables, read, strict=True)), self.facts)


def whole_variables(model: keras.Model, gathered: bool = False) -> WholeVariables:
    """Return what `of_model` reads of a model and its optimizer.

    Args:
        model: Built model. Its optimizer is built too, if it has one.
        gathered: Whether sharded variables are read whole, like others.
    """
    variables = _variables(model)
    whole = {key: v for key, v in variables.items() if gathered or not shards.is_sharded(v)}
    sharded = {
        key: [v.path, shards.whole_shape(v), v.dtype]
        for key, v in variables.items()
        if key not in whole
    }
    facts = {
        "optimizer": _kind(model),
        "names": [v.path for v in whole.values()],
        "shards": sharded,
    }
    return WholeVariables(whole, facts)


def of_model(model: keras.Model, *, gathered: bool = False) -> Snapshot:
    """Return the state of a model and its optimizer.

    This is the weights, moving statistics and seeds of the model, and the slots, iterations,
    learning rate and loss scale of the optimizer, or optimizers.

    Args:
        model: Built model. Its optimizer is built too, if it has one.
        gathered: Whether sharded variables are read whole, like others.

    Returns:
        Copies, which later changes of the model do not affect.
    """
    return whole_variables(model, gathered).read(each_value)


def is_sharded(model: keras.Model) -> bool:
    """Return whether replicas hold rows of a variable of the model or its optimizer."""
    return any(shards.is_sharded(v) for v in _variables(model).values())


def unsharded_bytes(model: keras.Model) -> int:
    """Return the bytes of the variables of which each process has all of a model's."""
    return sum(
        math.prod(v.shape) * tf.as_dtype(v.dtype).size
        for v in _variables(model).values()
        if not shards.is_sharded(v)
    )


def rows_of_model(model: keras.Model) -> dict[str, np.ndarray]:
    """Return the rows that this process holds of a model's sharded variables.

    Each array is `[replicas of this process, length]`. The result is {} if nothing is sharded.
    """
    sharded = {key: v for key, v in _variables(model).items() if shards.is_sharded(v)}
    return {
        key: np.stack([copy.numpy() for copy in _copies(model, v)]) for key, v in sharded.items()
    }


def into_model(
    snapshot: Snapshot,
    model: keras.Model,
    where: str,
    *,
    weights_only: bool = False,
    pieces: Callable[[str], list[shards.Piece]] | None = None,
    replicas: int = 1,
    first: int = 0,
) -> None:
    """Restore the state of a model, whole or sharded over any number of replicas.

    Args:
        snapshot: Snapshot that `of_model` returned.
        model: The same model, built and compiled.
        where: Name of the snapshot in messages.
        weights_only: Whether to leave the optimizer as it is.
        pieces: Function that returns the rows of a sharded variable of the snapshot, as pieces of
            the whole variable; None if the snapshot has no sharded variables.
        replicas: Number of replicas of this training.
        first: Index of the first replica of this process.

    Raises:
        ValueError: If the snapshot is of another model or optimizer. Nothing has been changed then.
    """
    variables = _variables(model)
    if not weights_only and snapshot.facts["optimizer"] != _kind(model):
        raise ValueError(
            f"{where}: expected the state of a model with the optimizer {_kind(model)}, received "
            f"one with {snapshot.facts['optimizer']}. "
            "Compile with the same optimizer, or name another directory."
        )
    arrays = {
        key: array for key, array in snapshot.arrays.items() if key.partition("/")[0] in _KINDS
    }
    saved = {
        key: [name, arrays[key].shape, str(arrays[key].dtype)]
        for key, name in zip(arrays, snapshot.facts["names"], strict=True)
    }
    saved |= snapshot.facts.get("shards", {})
    if weights_only:
        variables, saved = (
            {key: v for key, v in mapping.items() if key.startswith(_KINDS[0])}
            for mapping in (variables, saved)
        )
    for key in dict.fromkeys((*variables, *saved)):
        expected = (
            _describe(variables[key].path, shards.whole_shape(variables[key]), variables[key].dtype)
            if key in variables
            else "nothing"
        )
        received = _describe(*saved[key]) if key in saved else "nothing"
        if expected.partition(" ")[2] != received.partition(" ")[2]:
            raise ValueError(
                f"{where}: the snapshot belongs to another model: expected {expected} as "
                f"{key.replace('/', ' variable ')}, received {received}. Build the same model, or "
                "name another directory."
            )
    for key, variable in variables.items():
        if key in arrays and not shards.is_sharded(variable):
            variable.assign(arrays[key])
            continue
        if key in arrays:
            variable_pieces: list[shards.Piece] = [(0, arrays[key].reshape(-1))]
        else:
            assert pieces is not None
            variable_pieces = pieces(key)
        shape = shards.whole_shape(variable)
        kind = tf.as_dtype(variable.dtype).as_numpy_dtype
        if not shards.is_sharded(variable):
            variable.assign(shards.rows(variable_pieces, shape, kind, 1, 0, 1).reshape(shape))
            continue
        copies = _copies(model, variable)
        for copy, row in zip(
            copies,
            shards.rows(variable_pieces, shape, kind, replicas, first, len(copies)),
            strict=True,
        ):
            copy.assign(row)


def of_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> list[Any]:
    """Return the state of each callback; None for a callback without state."""
    return [_of_callback(callback) for callback in callbacks]


def into_callbacks(states: Sequence[Any], callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Restore the state of callbacks.

    A state is matched to a callback by its class, and by its position among the callbacks of that
    class.

    Args:
        states: States that `of_callbacks` returned.
        callbacks: Callbacks of the resumed training.
    """
    left = [state for state in states if state is not None]
    for callback in callbacks:
        kind = type(callback).__name__
        state = next((s for s in left if s["class"] == kind), None)
        if state is None:
            continue
        left.remove(state)
        if "state" in state:
            callback.set_state(state["state"])
        for name, value in state.get("memory", {}).items():
            setattr(callback, name, value)


def best_of_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, np.ndarray]:
    """Return the best weights that each EarlyStopping keeps.

    EarlyStopping restores them at the end of training.
    """
    best = enumerate(
        callback.best_weights or ()
        for callback in callbacks
        if isinstance(callback, keras.callbacks.EarlyStopping)
    )
    return {
        f"{_BEST}/{i}/{number}": np.array(array)
        for i, arrays in best
        for number, array in enumerate(arrays)
    }


def best_into_callbacks(
    arrays: Mapping[str, np.ndarray], callbacks: Sequence[keras.callbacks.Callback]
) -> None:
    """Restore the best weights of each EarlyStopping.

    Args:
        arrays: Arrays of a snapshot, which include those of `best_of_callbacks`.
        callbacks: Callbacks of the resumed training.
    """
    for i, callback in enumerate(
        c for c in callbacks if isinstance(c, keras.callbacks.EarlyStopping)
    ):
        callback.best_weights = [
            array for key, array in arrays.items() if key.startswith(f"{_BEST}/{i}/")
        ] or None


def of_history(epochs: Sequence[int], logs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the history of a training as a value that JSON keeps exactly.

    Args:
        epochs: Epochs that have ended.
        logs: Values of each loss and metric, one for each epoch: numbers or arrays.

    Returns:
        A dict of "epoch", of "values", in which arrays are nested lists, and of "dtypes", the dtype
        of each name that has arrays.

    Example:
        >>> of_history([0], {"loss": [0.5], "f1": [np.array([0.25, 1], np.float32)]})
        {'epoch': [0], 'values': {'loss': [0.5], 'f1': [[0.25, 1.0]]}, 'dtypes': {'f1': 'float32'}}
    """
    values: dict[str, list] = {}
    dtypes: dict[str, str] = {}
    for name, column in logs.items():
        values[name] = []
        for value in column:
            if not isinstance(value, float) and np.ndim(value):
                each = np.asarray(value)
                dtypes[name] = each.dtype.name
                values[name].append(each.tolist())
            else:
                values[name].append(float(value))
    return {"epoch": list(epochs), "values": values, "dtypes": dtypes}


def into_history(saved: Mapping[str, Any], history: keras.callbacks.History) -> None:
    """Restore the history of a training.

    Args:
        saved: History that `of_history` returned.
        history: History of the resumed training, which is replaced.
    """
    dtypes = {
        name: tf.as_dtype(dtype).as_numpy_dtype for name, dtype in saved.get("dtypes", {}).items()
    }
    history.epoch[:] = saved["epoch"]
    history.history.clear()
    for name, column in saved["values"].items():
        history.history[name] = [
            np.array(value, dtypes[name]) if isinstance(value, list) else value for value in column
        ]


def keras_seed() -> list[keras.Variable]:
    """Return the variable of Keras' global random generator, if it has been used."""
    generator = global_generator.current()
    return [] if generator is None else [generator.state]


def of_random(seed: Any = None) -> Snapshot:
    """Return the state of the random generators of Python, NumPy and Keras in this process.

    Args:
        seed: Value of the variable of `keras_seed`; None if there is none.
    """
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    arrays = {
        f"{_RANDOM}/python": np.array(numbers, np.uint32),
        f"{_RANDOM}/numpy": keys,
    }
    if seed is not None:
        arrays[f"{_RANDOM}/keras"] = seed
    return Snapshot(arrays, {_RANDOM: [version, gauss, kind, *rest]})


def into_random(snapshot: Snapshot) -> None:
    """Restore the random generators from the state that `of_random` returned."""
    version, gauss, kind, *rest = snapshot.facts[_RANDOM]
    if (seed := snapshot.arrays.get(f"{_RANDOM}/keras")) is not None:
        global_generator.restore(seed)  # may draw from Python's
    random.setstate((version, tuple(snapshot.arrays[f"{_RANDOM}/python"].tolist()), gauss))
    np.random.set_state((kind, snapshot.arrays[f"{_RANDOM}/numpy"], *rest))


def _of_callback(callback: keras.callbacks.Callback) -> dict[str, Any] | None:
    if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
        return {"class": type(callback).__name__, "state": callback.get_state()}
    names = [
        name
        for kind, names in _CALLBACK_STATE
        if isinstance(callback, kind)
        for name in names
        if hasattr(callback, name)
    ]
    return (
        {
            "class": type(callback).__name__,
            "memory": {name: _plain(getattr(callback, name)) for name in names},
        }
        if names
        else None
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic | np.ndarray) else value


def _variables(model: keras.Model) -> dict[str, keras.Variable]:
    of_optimizers = [v for optimizer in _optimizers(model) for v in optimizer.variables]
    both = zip(_KINDS, (model.variables, of_optimizers), strict=True)
    return {f"{kind}/{i}": v for kind, variables in both for i, v in enumerate(variables)}


def _optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers of a model, including those that its own `train_step` uses.

    Without a strategy, the other optimizers are built in the first step, after a snapshot is
    restored, and are left out.
    """
    kept = [
        x
        for x in (vars(model).values() if engine_of(model.distribute_strategy) else ())
        if isinstance(x, keras.optimizers.Optimizer)
    ]
    return list({id(x): x for x in (getattr(model, "optimizer", None), *kept) if x}.values())


def _kind(model: keras.Model) -> str | None:
    """Return the class name of the optimizer, or None.

    An optimizer that only shards another one is named as the inner one.
    """
    optimizer = getattr(model, "optimizer", None)
    return (
        None if optimizer is None else getattr(optimizer, "tfdist_kind", type(optimizer).__name__)
    )


def _copies(model: keras.Model, variable: keras.Variable) -> list[tf.Variable]:
    """Return the variables that this process's replicas hold: rows if it is sharded."""
    with as_shards():
        return list(model.distribute_strategy.experimental_local_results(variable.value))


def _describe(path: str, shape: Sequence[int], dtype: str) -> str:
    return f"{path} {dtype} {list(shape)}"
