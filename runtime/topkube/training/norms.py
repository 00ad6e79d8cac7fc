"""Norms of the aggregated gradient and of the residuals, taken now and then: each is a read of all their memory, and a
dashboard needs one value per scrape, not one per step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import torch

_INTERVAL_SECONDS = 5.0
MOST_OF_TIME = 1 / 300
"""Share of the time that measuring may take at most."""


class Norms:
    """The last measured norms; None before the first, and where there is nothing to measure."""

    def __init__(self) -> None:
        self.gradient: float | None = None
        self.residual: float | None = None
        self._next = 0.0

    @property
    def due(self) -> bool:
        return time.perf_counter() >= self._next

    @torch.no_grad()
    def measure(self, gradients: Sequence[torch.Tensor], residuals: Iterable[torch.Tensor]) -> None:
        """Takes both norms; the next time comes after five seconds, later where this took long."""
        start = time.perf_counter()
        self.gradient, self.residual = _norm(gradients), _norm(list(residuals))
        spent = time.perf_counter() - start
        self._next = start + max(_INTERVAL_SECONDS, spent / MOST_OF_TIME)


def _norm(tensors: Sequence[torch.Tensor]) -> float | None:
    if not tensors:
        return None
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))
