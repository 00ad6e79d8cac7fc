"""The training loop: buckets, schedule, the distributed optimizer, checkpoints."""

from __future__ import annotations

from topkube.training.broadcast import broadcast_optimizer_state, broadcast_parameters
from topkube.training.distributed import DistributedOptimizer
from topkube.training.run import Run, checkpointing

__all__ = ["DistributedOptimizer", "Run", "broadcast_optimizer_state", "broadcast_parameters", "checkpointing"]
