"""Norms of the aggregated gradient and of the residuals, measured at intervals. A measurement reads all their memory,
and a dashboard needs a value per scrape, not per step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import torch

_INTERVAL_SECONDS = 5.0
MOST_OF_TIME = 1 / 300
"""The largest share of the time that measurements may take."""


class Norms:
    """The last measured norms; None before the first measurement, and if there is nothing to measure."""

    def __init__(self) -> None:
        self.gradient: float | None = None
        self.residual: float | None = None
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """True if it is time for the next measurement."""
        return time.perf_counter() >= self._next

    @torch.no_grad()
    def measure(self, gradients: Sequence[torch.Tensor], residuals: Iterable[torch.Tensor]) -> None:
        """Measure both norms. The next measurement is due after five seconds, or later if the measurement took long."""
        start = time.perf_counter()
        self.gradient, self.residual = _compute_norm(gradients), _compute_norm(list(residuals))
        spent = time.perf_counter() - start
        self._next = start + max(_INTERVAL_SECONDS, spent / MOST_OF_TIME)


def _compute_norm(tensors: Sequence[torch.Tensor]) -> float | None:
    if not tensors:
        return None
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))
