"""The parallel tensor operator: the ranks share work that each rank would otherwise repeat, layer by layer.

From "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters" (Shi et al., 2021): layer-wise
optimizers need the norms of all layers, which otherwise every rank would compute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch

from topkube.errors import ArgumentError
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.world import World, current

Tensors = Sequence[torch.Tensor]


def assign_layers(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each of the layers with `sizes` elements. The layers are assigned from the largest to the
    smallest, each to the rank with the fewest elements. The result is the same on all ranks."""
    loads = [(0, rank) for rank in range(ranks)]
    owner = [0] * len(sizes)
    for layer in sorted(range(len(sizes)), key=lambda layer: -sizes[layer]):
        load, rank = heapq.heappop(loads)
        owner[layer] = rank
        heapq.heappush(loads, (load + sizes[layer], rank))
    return owner


@torch.no_grad()
def map(
    function: Callable[[list[int]], Sequence[Sequence[float]]],
    sizes: Sequence[int],
    numbers: int = 1,
    parallel: bool = True,
    ranks: World | None = None,
) -> list[list[float]]:
    """Return `numbers` numbers for each layer, computed by `function`, shape (layers, numbers).

    `function` receives the indices of some layers and returns the numbers of each of them; `sizes` is the cost of each
    layer, for example its elements. With `parallel`, each rank of `ranks` (by default of the current world) calls
    `function` for its share of the layers, and these ranks gather the numbers. They call this together, with equal
    arguments. The result has the same bits on all of them. Raises ArgumentError if `function` returns another count of
    numbers.
    """
    layers = len(sizes)
    world = (ranks or current()) if parallel and layers else None
    if world is None or world.size == 1:
        return _check_shape(function(list(range(layers))) if layers else [], layers, numbers)
    owner = assign_layers(sizes, world.size)
    own = [layer for layer in range(layers) if owner[layer] == world.rank]
    values = np.zeros((layers, numbers))
    if own:
        values[own] = _check_shape(function(own), len(own), numbers)
    # One rank has each number, and the other ranks add zeros to it: its bits stay the same.
    # In the communication thread, where other agreements wait in a queue that is the same on all ranks.
    gathered = QueuedAgreement(world).sum(values.reshape(-1).tolist())
    return [[float(x) for x in row] for row in gathered.reshape(layers, numbers)]


def compute_norms(*tensor_lists: Tensors, parallel: bool = False, ranks: World | None = None) -> list[list[float]]:
    """Return the 2-norms, in float32, of all tensors of one or more lists of equal length, for example weights and
    gradients.

    With `parallel`, each rank of `ranks` computes its share of the layers, and these ranks gather the numbers (`map`).
    This reads the tensors (or this rank's share of them) once, and waits for the device once per list.
    """
    layers = len(tensor_lists[0])
    assert all(len(tensors) == layers for tensors in tensor_lists)

    def compute_rows(chosen: list[int]) -> list[list[float]]:
        columns = [_compute_local_norms([tensors[layer] for layer in chosen]) for tensors in tensor_lists]
        return [list(row) for row in zip(*columns, strict=True)]

    rows = map(compute_rows, [tensor.numel() for tensor in tensor_lists[0]], len(tensor_lists), parallel, ranks)
    return [[row[number] for row in rows] for number in range(len(tensor_lists))]


def _check_shape(rows: Sequence[Sequence[float]], layers: int, numbers: int) -> list[list[float]]:
    """Return the rows as floats if there are `layers` rows of `numbers` numbers."""
    if len(rows) != layers or any(len(row) != numbers for row in rows):
        raise ArgumentError(
            f"the function of map returned numbers of shape {[len(row) for row in rows][:4]} for {layers} layers",
            cause=f"it must return {numbers} numbers for each layer",
            next_step="return a list of that many numbers for each index that the function receives",
        )
    return [[float(number) for number in row] for row in rows]


def _compute_local_norms(tensors: Tensors) -> list[float]:
    """Return the norms, with a fused kernel if torch has one: on CUDA, and for tensors of one dtype."""
    if not tensors:
        return []
    local_norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return [float(norm) for norm in torch.stack(list(local_norms)).tolist()]
