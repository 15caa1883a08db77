"""Configuration of a training run: typed, validated sections of settings."""

from tfdist.config.checks import nearest, step_range
from tfdist.config.sections import (
    Data,
    Model,
    Output,
    Parallel,
    Run,
    Strategy,
    Sync,
    Telemetry,
    Train,
    check_key,
    default,
)

__all__ = [
    "Data",
    "Model",
    "Output",
    "Parallel",
    "Run",
    "Strategy",
    "Sync",
    "Telemetry",
    "Train",
    "check_key",
    "default",
    "nearest",
    "step_range",
]
