"""Configuration of a training run: typed, validated sections of settings."""

from tfdist.config.checks import nearest as nearest
from tfdist.config.checks import step_range as step_range
from tfdist.config.sections import AUTO as AUTO
from tfdist.config.sections import AUTO_KEYS as AUTO_KEYS
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
    default,
)
from tfdist.config.sections import check_key as check_key

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
    "default",
]
