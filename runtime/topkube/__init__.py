"""TopKube: data-parallel training that scales on ordinary cloud networks.

The names below load on first use, so that `import topkube.job` needs neither torch nor MPI.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_DEFINING_MODULES = {
    "init": "topkube.world",
    "shutdown": "topkube.world",
    "rank": "topkube.world",
    "size": "topkube.world",
    "local_rank": "topkube.world",
    "local_size": "topkube.world",
    "node": "topkube.world",
    "nodes": "topkube.world",
    "allreduce_": "topkube.collectives",
    "allgather": "topkube.collectives.coordination",
    "barrier": "topkube.collectives.coordination",
    "broadcast_object": "topkube.collectives.coordination",
    "gather_object": "topkube.collectives.coordination",
    "new_world": "topkube.collectives.coordination",
    "reduce": "topkube.collectives.coordination",
    "broadcast_parameters": "topkube.training",
    "broadcast_buffers": "topkube.training",
    "broadcast_optimizer_state": "topkube.training",
    "DistributedOptimizer": "topkube.training",
    "checkpointing": "topkube.training",
    "device": "topkube.training",
    "ddp_hook": "topkube.integrations.ddp",
    "TrainingClient": "topkube.sdk",
}
_MODULES = ("kernels", "data", "errors", "job", "collectives", "training", "telemetry", "settings", "world")

__all__ = ["__version__", *_DEFINING_MODULES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _DEFINING_MODULES:
        return getattr(importlib.import_module(_DEFINING_MODULES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"topkube.{name}")
    raise AttributeError(f"module 'topkube' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
