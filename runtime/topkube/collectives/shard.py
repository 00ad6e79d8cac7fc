"""A rank's shard of an array, between the two stages inside the node."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from topkube import kernels
from topkube.algorithms import Algorithm, Scope
from topkube.arrays import is_tensor
from topkube.collectives.call import compute_shard_bounds, find_own_shard
from topkube.collectives.request import Request
from topkube.world import World


@dataclass
class Shard:
    """This rank's shard of one array: what `ShardAllReduce.pack` and `unpack` work on.

    `values` is a 1-D NumPy array, or a tensor on a device, of the array's type. It holds the node's sum or mean at
    first, and must hold the result of all nodes in the end. `number` counts the exchanges of this world: it is the
    same on all ranks. `scratch(name, length, dtype)` returns a 1-D work buffer beside `values` whose contents last
    until the exchange ends; `dtype` is "float32", "uint32" or "uint8". The same name returns the same memory.
    """

    world: World
    request: Request
    values: Any
    number: int
    scratch: Callable[[str, int, str], Any]
    finite: list[Any] = field(default_factory=list)
    is_accumulated: bool = False
    """True if `accumulate` has nothing left to do: the reduction inside the node wrote its result."""

    def accumulate(self) -> Any:
        """Return the shard as float32, with what was not sent before added to it. The algorithm clears or lowers the
        entries that it sends, in this array; what is left there is sent in later steps."""
        residual, values = self.request.residual, self.values
        if self.is_accumulated and residual is not None:
            return residual.pending
        if residual is None:
            if self.request.dtype == "float32":
                return values
            total = self.scratch("float32 values", len(values), "float32")
            total[:] = values
            return total
        residual.arriving[:] = values
        if residual.has_velocity:
            residual.accumulate()
        else:
            residual.pending += residual.current
        return residual.pending

    def clear(self, indices: Any) -> None:
        """Clear the entries that are sent, in the array that `accumulate` returned. `indices` is a slice, or an array
        of indices in the shard."""
        if self.request.residual is not None:
            self.request.residual.clear(indices)

    def rows(self, row_bytes: int) -> Any:
        """Return a work buffer (nodes, row_bytes) of uint8, for an all-gather: `pack` fills row `world.node`, `unpack`
        finds the rows of all nodes in it. `row_bytes` is the same on all ranks, and a multiple of 8."""
        return self.scratch("rows", self.world.nodes * row_bytes, "uint8").reshape(self.world.nodes, row_bytes)

    def check(self, values: Any) -> None:
        """Have all ranks skip the step if one of `values` is NaN or Inf."""
        if len(values):
            self.finite.append(values.isfinite().all() if is_tensor(values) else kernels.is_finite(values))

    @property
    def lengths(self) -> list[int]:
        """The lengths of all shards of the array, in the order of local ranks."""
        bounds = compute_shard_bounds(self.request.length, self.world.shards)
        return [stop - start for start, stop in itertools.pairwise(bounds)]


def residual_range(algorithm: Algorithm, world: World, length: int) -> tuple[int, int]:
    """Return the part [start, stop) of an array of `length` elements that this rank's residual belongs to. It is empty
    if the algorithm keeps none, or if the rank has no shard."""
    if algorithm.residual is None:
        return 0, 0
    return find_own_shard(world, length) if algorithm.residual.scope is Scope.SHARD else (0, length)


def residual_length(algorithm: Algorithm, world: World, length: int) -> int:
    """Return how many float32 values this rank's residual has, for arrays of `length` elements."""
    start, stop = residual_range(algorithm, world, length)
    return stop - start


def count_residual_copies(algorithm: Algorithm, world: World) -> tuple[int, int]:
    """Return how many residuals each element has in the whole world, and the number of the copy that this rank holds a
    part of: one per node, or one per rank."""
    state = algorithm.residual
    is_of_node = state is not None and state.scope is Scope.SHARD
    return (world.nodes, world.node) if is_of_node else (world.size, world.rank)
