"""The exchange of gradients that are sparse tensors (`nn.Embedding(sparse=True)`): every rank gathers the rows of all
ranks. If there are more than twice as many rows as the whole tensor has, an all-reduce of the whole tensor sends
fewer bytes, and needs memory that does not grow with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from topkube import algorithms
from topkube.algorithms import DENSE
from topkube.arrays import view_flat
from topkube.collectives import Request, load
from topkube.collectives.double import average_doubles
from topkube.training.ranks.agreement import Agreement
from topkube.world import World

_MOST_ROWS = 2.0
"""The most rows that are gathered, as a multiple of the rows of the whole tensor: an all-reduce sends a whole tensor
twice, and every rank receives gathered rows once."""


@torch.no_grad()
def average_rows(
    world: World, agreement: Agreement, gradient: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the mean over ranks of sparse gradients of `dtype`, coalesced; `gradient` is this rank's, None if it has
    none. The result has the shape and device of `like`. Rows are added in rank order: the same bits on all ranks.

    Each rank sends its rows to every other rank, or takes part in an all-reduce of the whole tensor. Call this in the
    communication thread.
    """
    own = None if gradient is None else gradient.coalesce()
    if world.size == 1:
        return own if own is not None else _make_empty(like, 1, dtype)
    [dimensions] = agreement.maximum([0 if own is None else own.sparse_dim()])
    own = _make_empty(like, int(dimensions) or 1, dtype) if own is None else own
    counts = [int(count) for count in agreement.gather([own._nnz()])[:, 0]]
    if sum(counts) > _MOST_ROWS * math.prod(like.shape[: own.sparse_dim()]):
        return _average_whole(world, own)
    indices = _gather(world, own.indices().t().contiguous().cpu(), counts)
    values = _gather(world, own.values().contiguous().cpu(), counts)
    if values.itemsize == 2:  # a sum of 16 bits over many ranks would stop growing
        values = values.float()
    mean = torch.sparse_coo_tensor(indices.t(), values / world.size, like.shape, check_invariants=False)
    return mean.coalesce().to(device=like.device, dtype=dtype)


def _average_whole(world: World, own: torch.Tensor) -> torch.Tensor:
    """Return the mean over ranks of sparse tensors that have many rows. An additional column shows which rows a rank
    has: the result has the rows that any rank has, also if their sum is zero."""
    outer, inner = own.shape[: own.sparse_dim()], own.shape[own.sparse_dim() :]
    row_count, columns = math.prod(outer), math.prod(inner)
    values = own.values().cpu().reshape(own._nnz(), columns)
    if values.is_complex():
        values = torch.view_as_real(values).reshape(own._nnz(), 2 * columns)
    whole = torch.zeros(row_count, values.shape[1] + 1, dtype=values.dtype)
    rows = _flatten_indices(own.indices().cpu(), outer)
    whole[rows, :-1] = values
    whole[rows, -1] = 1
    flat = whole.view(-1)
    if flat.dtype == torch.float64:
        average_doubles(world, flat.numpy())
    else:
        dense = load(algorithms.resolve(DENSE, world.nodes, flat.numel(), 1.0))
        dense.run(world, Request(view_flat(flat, "rows", writable=True)))
    rows = whole[:, -1].nonzero().view(-1)
    sums = whole[rows, :-1].contiguous()
    if own.is_complex():
        sums = torch.view_as_complex(sums.view(len(rows), columns, 2))
    indices = torch.stack(torch.unravel_index(rows, outer))
    mean = torch.sparse_coo_tensor(
        indices, sums.view(len(rows), *inner), own.shape, is_coalesced=True, check_invariants=False
    )
    return mean.to(own.device)


def _flatten_indices(indices: torch.Tensor, outer: Sequence[int]) -> torch.Tensor:
    """Return the numbers of the rows at `indices`, (sparse dimensions, rows), in the order of memory: (rows,)."""
    flat = torch.zeros(indices.shape[1], dtype=torch.int64)
    for index, length in zip(indices, outer, strict=True):
        flat = flat * length + index
    return flat


def _make_empty(like: torch.Tensor, sparse_dimensions: int, dtype: torch.dtype) -> torch.Tensor:
    indices = torch.empty(sparse_dimensions, 0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[sparse_dimensions:], dtype=dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, is_coalesced=True, check_invariants=False)


def is_finite(gradient: torch.Tensor) -> bool:
    """Return True if all stored values of a sparse or strided gradient are finite."""
    stored = gradient._values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(stored).all())


def fill_with_nan(gradient: torch.Tensor) -> None:
    """Set all stored values to NaN."""
    (gradient._values() if gradient.is_sparse else gradient).fill_(torch.nan)


def _gather(world: World, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return the rows of all ranks, one rank after the other: shape (sum(counts), ...)."""
    all_rows = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype)
    row_bytes = rows[0].numel() * rows.element_size() if len(rows) else all_rows[:1].numel() * all_rows.element_size()
    sizes = [count * row_bytes for count in counts]
    sent, received = _view_bytes(rows), _view_bytes(all_rows)
    world.wait([world.comm.Iallgatherv(sent, [received, sizes])], "the exchange of sparse gradients")
    return all_rows


def _view_bytes(tensor: torch.Tensor):  # type: ignore[no-untyped-def]  # NumPy array of bytes, the same memory
    return tensor.reshape(-1).view(torch.uint8).numpy()
