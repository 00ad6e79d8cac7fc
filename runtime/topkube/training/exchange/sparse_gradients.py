"""The exchange of gradients that are sparse tensors (`nn.Embedding(sparse=True)`): every rank gathers the rows of all
ranks."""

from __future__ import annotations

import torch

from topkube.training.ranks.agreement import Agreement
from topkube.world import World


@torch.no_grad()
def mean_of_rows(world: World, agreement: Agreement, gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the mean over ranks of sparse gradients, coalesced; `gradient` is this rank's, None if it has none. The
    result has the shape, dtype and device of `like`. Rows are added in rank order: the same bits on all ranks.

    Each rank sends its rows to every other rank. Call this in the communication thread.
    """
    own = None if gradient is None else gradient.coalesce()
    if world.size == 1:
        return own if own is not None else _no_rows(like, 1)
    [dimensions] = agreement.maximum([0 if own is None else own.sparse_dim()])
    own = _no_rows(like, int(dimensions) or 1) if own is None else own
    counts = [int(count) for count in agreement.gather([own._nnz()])[:, 0]]
    indices = _gather(world, own.indices().t().contiguous().cpu(), counts)
    values = _gather(world, own.values().contiguous().cpu(), counts)
    mean = torch.sparse_coo_tensor(indices.t(), values / world.size, like.shape, check_invariants=False)
    return mean.coalesce().to(like.device)


def _no_rows(like: torch.Tensor, sparse_dimensions: int) -> torch.Tensor:
    indices = torch.empty(sparse_dimensions, 0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[sparse_dimensions:], dtype=like.dtype, device=like.device)
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
    everyone = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype)
    row_bytes = rows[0].numel() * rows.element_size() if len(rows) else everyone[:1].numel() * everyone.element_size()
    sizes = [count * row_bytes for count in counts]
    sent, received = _bytes(rows), _bytes(everyone)
    world.wait([world.comm.Iallgatherv(sent, [received, sizes])], "the exchange of sparse gradients")
    return everyone


def _bytes(tensor: torch.Tensor):  # type: ignore[no-untyped-def]  # NumPy array of bytes, the same memory
    return tensor.reshape(-1).view(torch.uint8).numpy()
