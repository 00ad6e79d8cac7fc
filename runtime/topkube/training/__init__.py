"""The training loop: the distributed optimizer, the exchange of gradients, runs with checkpoints."""

from __future__ import annotations

from topkube.training.broadcast import broadcast_optimizer_state, broadcast_parameters
from topkube.training.buffers import broadcast_buffers
from topkube.training.distributed import DistributedOptimizer
from topkube.training.exchange.reduction.devices import device
from topkube.training.normalization import synchronize_batch_normalization as _synchronize_batch_normalization
from topkube.training.optimizers.lamb import LAMB
from topkube.training.optimizers.lars import LARS
from topkube.training.optimizers.mixed_precision import MasterWeights
from topkube.training.run import Run, checkpointing

__all__ = [
    "LAMB",
    "LARS",
    "DistributedOptimizer",
    "MasterWeights",
    "Run",
    "broadcast_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpointing",
    "device",
]

_synchronize_batch_normalization()
