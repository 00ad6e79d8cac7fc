"""The training loop: buckets, schedule, the distributed optimizer, checkpoints."""

from __future__ import annotations

from topkube.training.broadcast import broadcast_optimizer_state, broadcast_parameters
from topkube.training.devices import device
from topkube.training.distributed import DistributedOptimizer
from topkube.training.lamb import LAMB
from topkube.training.lars import LARS
from topkube.training.mixed_precision import MasterWeights
from topkube.training.run import Run, checkpointing

__all__ = [
    "LAMB",
    "LARS",
    "DistributedOptimizer",
    "MasterWeights",
    "Run",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpointing",
    "device",
]
