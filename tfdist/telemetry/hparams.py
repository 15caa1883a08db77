"""Hyperparameters of a run for TensorBoard's HPARAMS dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names, with values that TensorBoard can show.

    Example:
        >>> flat({"model": {"name": "mlp", "widths": (16, 8)}, "seed": 1, "cluster": None})
        {'model.name': 'mlp', 'model.widths': '(16, 8)', 'seed': 1, 'cluster': 'None'}
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = (
                value if isinstance(value, bool | int | float | str) else str(value)
            )
    return result


def begin(writer: Any, name: str, values: Mapping[str, Any]) -> None:
    """Write the settings to the directory whose subdirectories hold the run's curves.

    Args:
        writer: A `tf.summary` writer for that directory.
        name: Name of the run. Runs that share a name are one trial.
        values: Settings, which may be nested.
    """
    from tensorboard.plugins.hparams import api

    with writer.as_default():
        api.hparams(flat(values), trial_id=name)
    writer.flush()


def end(writer: Any) -> None:
    """Mark the run as finished; TensorBoard shows it as "running" until then."""
    import tensorflow as tf
    from tensorboard.plugins.hparams import api_pb2, summary

    with writer.as_default():
        message = summary.session_end_pb(api_pb2.STATUS_SUCCESS)
        tf.summary.experimental.write_raw_pb(message.SerializeToString(), step=0)
    writer.flush()
