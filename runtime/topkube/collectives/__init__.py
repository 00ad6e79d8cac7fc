"""Collectives: the implementations of the algorithms that the catalogue declares."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube import algorithms
from topkube.algorithms import MATRIX_RANK, Algorithm
from topkube.arrays import FLOATS, Array, is_tensor, view_flat
from topkube.collectives.all_reduce import AllReduce, ShardAllReduce, load
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.collectives.error_feedback import Residual
from topkube.collectives.occupancy import find_occupancy
from topkube.collectives.request import Matrix, Request
from topkube.collectives.shard import Shard, residual_length, residual_range
from topkube.errors import ArgumentError
from topkube.kernels.arguments import check_apart
from topkube.world import World, current

__all__ = [
    "AllReduce",
    "Request",
    "Residual",
    "Shard",
    "ShardAllReduce",
    "allreduce_",
    "load",
    "new_residual",
    "residual_range",
    "resolve",
]


def allreduce_(
    array: Any,
    op: str = "mean",
    algorithm: str = "hitopk",
    density: float = 0.01,
    wire: str = "fp32",
    *,
    selection: str = "topk",
    residual: Residual | Any | None = None,
    world: World | None = None,
    dense_wire: str = "fp32",
    matrix_rank: int = MATRIX_RANK.default,
) -> Any:
    """Reduce `array` over all ranks in place and return it.

    `array` is a contiguous NumPy array or torch tensor of any shape, float32, bfloat16 or float16; every rank calls
    this with the same length, dtype and parameters. For a CUDA tensor the call waits for the device, and `residual`
    is a float32 tensor on the same device. `op` is "mean" or "sum". `algorithm` is a name of the catalogue
    (`topkube.algorithms.names()`), or "dense" or "auto" (`resolve`). Sparse algorithms send the share `density` of the
    entries, their values as `wire` ("fp32", "bf16", "fp16"), chosen by `selection` ("topk" or "mstopk"). `hierarchical`
    sends float32 values between nodes as `dense_wire` ("fp32", "bf16", "fp16"). `powersgd` and `acpsgd` approximate the
    array by rank `matrix_rank`, as a matrix with one row per element of its first dimension. Without `residual` nothing
    is kept between calls. With a residual (`new_residual`, or a float32 array of that length, zeros at first), what was
    not sent is added to the next call's array; all ranks pass one, or none. `powersgd` and `acpsgd` take only what
    `new_residual` returns, because they also keep factors. If any rank meets NaN or Inf, the residual stays as
    it was on all ranks. `world` is a sub-world (`topkube.new_world`) whose ranks alone take part.

    One thread at a time calls it in a world, and not during a backward that exchanges gradients there: use a sub-world.

    Raises ArgumentError before anything is sent, CollectiveError if two threads use the world, AlgorithmError if the
    algorithm's package cannot be loaded, MismatchError if ranks disagree, CollectiveTimeout if a rank does not arrive.
    """
    world = world or current()
    occupancy = find_occupancy(world)
    occupancy.enter(world)
    calls = world.calls
    try:
        if is_tensor(array) and array.is_cuda:
            return _reduce_on_device(world, array, op, algorithm, density, wire, selection, residual, dense_wire)
        view = view_flat(array, "array", writable=True)
        chosen = resolve(algorithm, world, view.size, density)
        state = _check_residual(residual, chosen, world, view)
        matrices = _list_matrices(tuple(array.shape)) if MATRIX_RANK in chosen.parameters else ()
        request = Request(view, op, density, wire, selection, state, dense_wire, matrix_rank, matrices)
        finite = load(chosen).run(world, request)
        if state is not None and world.agree(finite):
            state.accept()
            state.commit()
            if state is not residual:
                view_flat(residual, "residual", writable=True)[:] = state.current
        _note_change(array)
        return array
    except BaseException as error:
        if world.calls > calls:
            world.leave_collective(error)
        raise
    finally:
        occupancy.leave()


def _note_change(array: Any) -> None:
    """Have autograd count the change of a tensor, as that by an operation in place: a backward that needs the old
    values is then an error."""
    if is_tensor(array) and not array.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(array)


def _list_matrices(shape: tuple[int, ...]) -> tuple[Matrix, ...]:
    """Return an array of this shape as one matrix; no matrix if the array is empty or has one dimension."""
    length = math.prod(shape)
    return (Matrix(0, length, length // shape[0]),) if len(shape) > 1 and length else ()


def _reduce_on_device(
    world: World,
    x: Any,
    op: str,
    algorithm: str,
    density: float,
    wire: str,
    selection: str,
    residual: Any,
    dense_wire: str,
) -> Any:
    flat = _view_flat_on_device(x, "array", FLOATS)
    engine: DeviceAllReduce | None = world.cache.get(f"all-reduce on {x.device}")
    if engine is None:
        engine = world.cache[f"all-reduce on {x.device}"] = DeviceAllReduce(world, x.device)
    chosen = resolve(algorithm, world, x.numel(), density)
    state = None
    if residual is not None and chosen.residual is not None:
        residual_elements = residual_length(chosen, world, x.numel())
        if not is_tensor(residual) or residual.device != x.device or residual.numel() != residual_elements:
            raise ArgumentError(
                f"residual is not a float32 tensor of {residual_elements} elements on {x.device}",
                next_step=f"make it with torch.zeros({residual_elements}, device=array.device)",
            )
        state = Residual(0)
        state.current = _view_flat_on_device(residual, "residual", FLOATS[:1])
        state.pending = residual.new_empty(residual_elements)
    engine.wait_for(engine.mark_caller())
    engine.begin(load(chosen), Request(flat, op, density, wire, selection, state, dense_wire))
    finite = engine.flush()
    engine.make_caller_wait()
    if state is not None and world.agree(finite):
        state.current.copy_(state.pending)
    _note_change(x)
    return x


def _view_flat_on_device(x: Any, name: str, dtypes: Sequence[np.dtype[Any]]) -> Any:
    """Return a 1-D view of a tensor on a device, as `view_flat` does for host memory. Raises ArgumentError."""
    names = [dtype.name for dtype in dtypes]
    if str(x.dtype).removeprefix("torch.") not in names:
        raise ArgumentError(
            f"{name} has dtype {x.dtype}; allowed: {', '.join(names)}",
            next_step=f"convert it: {name}.to(torch.float32)",
        )
    if not x.is_contiguous():
        raise ArgumentError(f"{name} is not contiguous", next_step=f"pass {name}.contiguous()")
    return x.detach().view(-1)


def new_residual(algorithm: str, length: int, world: World | None = None) -> Residual:
    """Return a residual of zeros for this rank of `world` and arrays of `length`. Pass it to every `allreduce_` of the
    same array."""
    world = world or current()
    return Residual(residual_length(resolve(algorithm, world, length), world, length))


def resolve(algorithm: str, world: World, length: int, density: float = 0.01) -> Algorithm:
    """Return the algorithm behind a name, for arrays of `length` elements in this world. Raises ArgumentError or
    AlgorithmError."""
    return algorithms.resolve(algorithm, world.nodes, length, density)


def _check_residual(residual: Any, algorithm: Algorithm, world: World, array: Array) -> Residual | None:
    if residual is None or algorithm.residual is None:
        return None
    length = array.size
    residual_elements = residual_length(algorithm, world, length)
    if isinstance(residual, Residual):
        state, residual_size = residual, residual.current.size
    elif MATRIX_RANK in algorithm.parameters:
        raise ArgumentError(
            f"residual is a {type(residual).__name__}; {algorithm.name} also keeps factors from call to call",
            next_step=f"make it with topkube.collectives.new_residual({algorithm.name!r}, {length})",
        )
    else:
        view: Array = view_flat(residual, "residual", writable=True, dtypes=(np.dtype(np.float32),))
        check_apart("array", array, "residual", view)
        state, residual_size = Residual(0), view.size
        state.current, state.pending = view, np.empty_like(view)
    if residual_size != residual_elements:
        raise ArgumentError(
            f"residual has length {residual_size}; {algorithm.name} keeps {residual_elements} on rank {world.rank}",
            next_step=f"make it with topkube.collectives.new_residual({algorithm.name!r}, {length})",
        )
    return state
