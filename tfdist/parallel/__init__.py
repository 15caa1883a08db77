"""Replicas exchange tensors, and share what one of them cannot hold; names are found on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.parallel.collectives import Group, replicas
    from tfdist.parallel.optimizer import zero
    from tfdist.parallel.sharded import deferred, fsdp
    from tfdist.parallel.staged import PipelineModel, pipeline
    from tfdist.parallel.tensor import ShardedMLP

# Name -> module that defines it.
_HOMES = {
    "Group": "tfdist.parallel.collectives",
    "PipelineModel": "tfdist.parallel.staged",
    "ShardedMLP": "tfdist.parallel.tensor",
    "pipeline": "tfdist.parallel.staged",
    "deferred": "tfdist.parallel.sharded",
    "fsdp": "tfdist.parallel.sharded",
    "replicas": "tfdist.parallel.collectives",
    "zero": "tfdist.parallel.optimizer",
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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(
            f"module 'tfdist.parallel' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}"
        )
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES)
