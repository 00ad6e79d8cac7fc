"""How bytes move between ranks: one registry of all-reduce algorithms, dense and sparse."""

from __future__ import annotations

from typing import Any

from topkube.arrays import flat_view
from topkube.collectives import dense as _dense
from topkube.collectives.registry import ALGORITHMS, Algorithm, Request, find, register
from topkube.compression.error_feedback import Residual
from topkube.world import current

__all__ = ["ALGORITHMS", "Algorithm", "Request", "allreduce_", "find", "register"]


def allreduce_(
    array: Any,
    op: str = "mean",
    algorithm: str = "hitopk",
    density: float = 0.01,
    wire: str = "fp32",
    *,
    selection: str = "topk",
    residual: Residual | None = None,
) -> Any:
    """Reduces `array` over all ranks in place and returns it."""
    view = flat_view(array, "array", writable=True)
    find(algorithm).run(current(), Request(view, op, density, wire, selection, residual))
    return array
