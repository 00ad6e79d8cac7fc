"""The guard of error feedback in the weights. It measures how much nodes keep of their changes, and shortens the period
if they keep too much.

At the first of every 16 exchanges, all ranks together measure two numbers. The unsent ratio is the norm of what
nodes keep of their changes, over the norm of what they send. The weight spread is the distance of the nodes' own
weights from the agreed weights after the exchange, over the norm of the agreed weights. Both are means over the nodes,
weighted by ranks, and the same on all ranks. If a number exceeds its limit, the period is halved. If the period is 1
already, rank 0 prints a warning once. An algorithm that sends everything (localsgd) keeps nothing, and never exceeds a
limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from topkube.arrays import Array

MEASURE_EVERY = 16
"""Exchanges between two measurements."""
MOST_UNSENT = 100.0
"""The largest unsent ratio. With a higher ratio, an exchange sends only a small part of the changes."""
MOST_SPREAD = 1.0
"""The largest weight spread. With a larger spread, nodes train different models."""


@dataclass
class Squares:
    """Sums of squares over this rank's shards: `change` is that of what nodes send plus that of what they keep,
    `unsent` that of what they keep, `agreed` that of the agreed weights. Except for rounding, `change` is that of the
    changes before an exchange, because both parts are orthogonal. But the owner of a segment sends its whole change,
    and keeps a part of the mean (collectives/two_stage.py): there, both count."""

    change: float = 0.0
    unsent: float = 0.0
    agreed: float = 0.0


def sum_squares(values: Array) -> float:
    """Return the sum of the squares of `values`, float32."""
    return float(np.dot(values, values))


class DriftGuard:
    """The guard of one optimizer. `period` is the number of steps between exchanges in force, at most the job's.
    `unsent_ratio` and `weight_spread` are None before the first measurement."""

    def __init__(self, period: int, algorithm: str) -> None:
        self.period = self._job_period = period
        self.unsent_ratio: float | None = None
        self.weight_spread: float | None = None
        self._algorithm, self._has_warned = algorithm, False

    def set_period(self, period: int) -> None:
        """Take another period from the job's schedule. It also replaces a period that the guard has shortened."""
        if period != self._job_period:
            self.period = self._job_period = period

    def is_due(self, steps: int) -> bool:
        """Return True if the exchange after `steps` steps is measured. The same on all ranks."""
        return steps // self.period % MEASURE_EVERY == 1

    def check_drift(self, change: float, unsent: float, agreed: float) -> str:
        """Compute both numbers from the weighted sums of squares of all nodes, and shorten the period if a number
        exceeds its limit. Return the message that rank 0 should print; empty if there is none."""
        sent = max(change - unsent, 0.0)  # below 0 by rounding only
        self.unsent_ratio = math.sqrt(unsent / sent) if sent > 0 else 0.0 if unsent == 0 else math.inf
        self.weight_spread = math.sqrt(unsent / agreed) if agreed > 0 else 0.0
        if self.unsent_ratio <= MOST_UNSENT and self.weight_spread <= MOST_SPREAD:
            return ""  # NaN exceeds every limit
        numbers = (
            f"nodes keep {self.unsent_ratio:.1f} times what they send (limit {MOST_UNSENT:g}), and their weights are"
            f" {self.weight_spread:.0%} away from the agreed weights (limit {MOST_SPREAD:.0%})"
        )
        if self.period > 1:
            self.period //= 2
            every = f"every {self.period} steps" if self.period > 1 else "in every step"
            return f"{numbers}: {self._algorithm} now exchanges {every}"
        if self._has_warned:
            return ""
        self._has_warned = True
        return f"{numbers}: lower the learning rate, or choose dense; {self._algorithm} may end with a higher loss"

    def save(self) -> dict[str, int]:
        """Return the present period, and the period of the job."""
        return {"period": self.period, "wanted": self._job_period}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load what `save` returned. If the job's period has changed since, or `state` is None, the job's period is in
        force."""
        is_same = state is not None and state["wanted"] == self._job_period
        self.period = state["period"] if state is not None and is_same else self._job_period
