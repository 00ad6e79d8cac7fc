"""How bytes move between ranks: one registry of all-reduce algorithms, dense and sparse."""

from __future__ import annotations

from typing import Any

import numpy as np

from topkube.arrays import Array, flat_view, is_tensor
from topkube.collectives import dense as _dense  # noqa: F401  registers its algorithms
from topkube.collectives import sparse as _sparse  # noqa: F401
from topkube.collectives.cost import resolved
from topkube.collectives.device import DeviceAllReduce
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

    `array` is a contiguous NumPy array or torch tensor of any shape, float32, bfloat16 or float16; every rank calls
    this with the same length, dtype and parameters. For a CUDA tensor the call waits for the device, and `residual`
    is a float32 tensor beside it. `op` is "mean" or "sum", `algorithm` a name in
    `ALGORITHMS`, or "dense" or "auto" (`resolve`). Sparse algorithms send the share `density` of the entries, their
    values as `wire` ("fp32", "bf16", "fp16"), chosen by `selection` ("topk" or "mstopk"). Without `residual` nothing
    is kept between calls; with one (`new_residual`, or a float32 array of that length, zeros at first), what was not
    sent is added to the next call's array. Where any rank meets NaN or Inf the residual stays as it was on all ranks.

    Raises ArgumentError before anything is sent, MismatchError where ranks disagree, CollectiveTimeout where one does
    not come.
    """
    world = current()
    if is_tensor(array) and array.is_cuda:
        return _on_device(world, array, op, algorithm, density, wire, selection, residual)
    view = flat_view(array, "array", writable=True)
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


def _on_device(
    world: World, x: Any, op: str, algorithm: str, density: float, wire: str, selection: str, residual: Any
) -> Any:
    if not x.is_contiguous():
        raise ArgumentError("array is not contiguous", next_step="pass array.contiguous()")
    engine: DeviceAllReduce | None = world.cache.get(f"all-reduce on {x.device}")
    if engine is None:
        engine = world.cache[f"all-reduce on {x.device}"] = DeviceAllReduce(world, x.device)
    chosen = find(resolve(algorithm, world, x.numel(), density))
    kept = None
    if residual is not None and chosen.sparse:
        wanted = chosen.residual_length(world, x.numel())
        if not is_tensor(residual) or residual.device != x.device or residual.numel() != wanted:
            raise ArgumentError(
                f"residual is not a float32 tensor of {wanted} elements on {x.device}",
                next_step=f"make it with torch.zeros({wanted}, device=array.device)",
            )
        kept = Residual(0)
        kept.current, kept.pending = residual, residual.new_empty(wanted)
    engine.after(engine.ready())
    engine.begin(x.view(-1), chosen, op, density, wire, selection, kept)
    finite = engine.flush()
    engine.follow()
    if kept is not None and world.agree(finite):
        residual.copy_(kept.pending)
    return x


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
