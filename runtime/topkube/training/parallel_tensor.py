"""The parallel tensor operator: what every rank would compute of every layer, each computes of some, and all gather.

From "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters" (Shi et al., 2021): layer-wise
optimizers need norms of all layers, which every rank would otherwise compute alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from topkube.training.agreement import agreement
from topkube.world import World, current

Tensors = Sequence[torch.Tensor]


def shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which of `ranks` has which of the layers with `sizes` elements: the largest first, each to the rank that has
    the least; the same on all ranks."""
    loads = [(0, rank) for rank in range(ranks)]
    owner = [0] * len(sizes)
    for layer in sorted(range(len(sizes)), key=lambda layer: -sizes[layer]):
        load, rank = heapq.heappop(loads)
        owner[layer] = rank
        heapq.heappush(loads, (load + sizes[layer], rank))
    return owner


@torch.no_grad()
def norms(*kinds: Tensors, parallel: bool = False) -> list[list[float]]:
    """The 2-norms, in float32, of all tensors of one or more lists of equal length (weights and gradients, say).

    With `parallel` each rank computes its share of the layers and the numbers are gathered: a collective of all ranks,
    which must hold equal tensors, and give them in the same order. The result has the same bits on all ranks. One read
    of the tensors (or of this rank's share), one wait for the device.
    """
    layers = len(kinds[0])
    assert all(len(kind) == layers for kind in kinds)
    world: World | None = current() if parallel else None
    if world is None or world.size == 1 or layers == 0:
        return [_local(kind) for kind in kinds]
    owner = shares([tensor.numel() for tensor in kinds[0]], world.size)
    mine = [layer for layer in range(layers) if owner[layer] == world.rank]
    values = [0.0] * (layers * len(kinds))
    for number, kind in enumerate(kinds):
        for layer, norm in zip(mine, _local([kind[layer] for layer in mine]), strict=True):
            values[number * layers + layer] = norm
    gathered = agreement()(values)  # one rank's number plus zeros: its own bits
    return [[float(x) for x in gathered[n * layers : (n + 1) * layers]] for n in range(len(kinds))]


def _local(tensors: Tensors) -> list[float]:
    """Fused where torch has a fused kernel: on CUDA, and for tensors of one dtype."""
    if not tensors:
        return []
    found = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return [float(norm) for norm in torch.stack(list(found)).tolist()]
