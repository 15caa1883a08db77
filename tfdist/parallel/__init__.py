"""Collectives between replicas, parameter sharding, and tensor and pipeline parallelism.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.parallel.collectives.group import Group, replicas
    from tfdist.parallel.pipeline_parallel.model import PipelineModel, pipeline
    from tfdist.parallel.sharding.fsdp import deferred, fsdp
    from tfdist.parallel.sharding.zero import zero
    from tfdist.parallel.tensor_parallel import ShardedMLP

# Name -> module that defines it.
_MODULES = {
    "Group": "tfdist.parallel.collectives.group",
    "PipelineModel": "tfdist.parallel.pipeline_parallel.model",
    "ShardedMLP": "tfdist.parallel.tensor_parallel",
    "pipeline": "tfdist.parallel.pipeline_parallel.model",
    "deferred": "tfdist.parallel.sharding.fsdp",
    "fsdp": "tfdist.parallel.sharding.fsdp",
    "replicas": "tfdist.parallel.collectives.group",
    "zero": "tfdist.parallel.sharding.zero",
}

__all__ = [
    "Group",
    "PipelineModel",
    "ShardedMLP",
    "deferred",
    "fsdp",
    "pipeline",
    "replicas",
    "zero",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(
            f"module 'tfdist.parallel' has no attribute {name!r}; it has "
            f"{', '.join(sorted(_MODULES))}"
        )
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES)
