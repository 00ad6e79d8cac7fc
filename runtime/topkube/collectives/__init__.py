"""How bytes move between ranks: one registry of all-reduce algorithms, dense and sparse."""

from __future__ import annotations

from typing import Any

import numpy as np

from topkube.arrays import Array, flat_view
from topkube.collectives import dense as _dense  # noqa: F401  registers its algorithms
from topkube.collectives import sparse as _sparse  # noqa: F401
from topkube.collectives.cost import resolved
from topkube.collectives.registry import ALGORITHMS, Algorithm, Request, find, register
from topkube.compression.error_feedback import Residual
from topkube.errors import ArgumentError
from topkube.world import World, current

__all__ = ["ALGORITHMS", "Algorithm", "Request", "allreduce_", "find", "new_residual", "register", "resolve"]


def allreduce_(
    array: Any,
    op: str = "mean",
    algorithm: str = "hitopk",
    density: float = 0.01,
    wire: str = "fp32",
    *,
    selection: str = "topk",
    residual: Residual | Any | None = None,
) -> Any:
    """Reduces `array` over all ranks in place and returns it.

    `array` is a contiguous NumPy array or torch CPU tensor of any shape, float32, bfloat16 or float16; every rank
    calls this with the same length, dtype and parameters. `op` is "mean" or "sum", `algorithm` a name in
    `ALGORITHMS`, or "dense" or "auto" (`resolve`). Sparse algorithms send the share `density` of the entries, their
    values as `wire` ("fp32", "bf16", "fp16"), chosen by `selection` ("topk" or "mstopk"). Without `residual` nothing
    is kept between calls; with one (`new_residual`, or a float32 array of that length, zeros at first), what was not
    sent is added to the next call's array. Where any rank meets NaN or Inf the residual stays as it was on all ranks.

    Raises ArgumentError before anything is sent, MismatchError where ranks disagree, CollectiveTimeout where one does
    not come.
    """
    view = flat_view(array, "array", writable=True)
    world = current()
    chosen = find(resolve(algorithm, world, view.size, density))
    kept = _as_residual(residual, chosen, world, view.size)
    finite = chosen.run(world, Request(view, op, density, wire, selection, kept))
    if kept is not None:
        if world.agree(finite):
            kept.commit()
            if kept is not residual:
                flat_view(residual, "residual", writable=True)[:] = kept.current
        else:
            kept.discard()
    return array


def new_residual(algorithm: str, length: int) -> Residual:
    """A residual of zeros for this rank and arrays of `length`, to hand to every `allreduce_` of the same array."""
    world = current()
    return Residual(find(resolve(algorithm, world, length)).residual_length(world, length))


def resolve(algorithm: str, world: World, length: int, density: float = 0.01) -> str:
    """The algorithm behind a name, for arrays of `length` elements in this world: `cost.resolved`."""
    return resolved(algorithm, world.nodes, length, density)


def _as_residual(residual: Any, algorithm: Algorithm, world: World, length: int) -> Residual | None:
    if residual is None or not algorithm.sparse:
        return None
    wanted = algorithm.residual_length(world, length)
    if isinstance(residual, Residual):
        kept, found = residual, residual.current.size
    else:
        view: Array = flat_view(residual, "residual", writable=True, dtypes=(np.dtype(np.float32),))
        kept, found = Residual(0), view.size
        kept.current, kept.pending = view, np.empty_like(view)
    if found != wanted:
        raise ArgumentError(
            f"residual has length {found}; {algorithm.name} keeps {wanted} on rank {world.rank}",
            next_step=f"make it with topkube.collectives.new_residual({algorithm.name!r}, {length})",
        )
    return kept
