"""The trial of a choice in real steps, against the choice before it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean

from topkube.algorithms import LEAST_GAIN, Choice, Machines
from topkube.training.exchange.tuning.step_times import Measurement

MOST_MEASUREMENTS = 6
"""The measurements after which a trial ends at the latest: three of each side."""
_CLEAR = 2.0
"""A difference is clear if it is this many times as large as its standard error."""


@dataclass
class Side:
    """A choice of a trial, the machines from which it was predicted, and what steps took with it."""

    choice: Choice
    machines: Machines
    measured: list[Measurement] = field(default_factory=list)

    @property
    def step(self) -> float:
        """The mean seconds per step over all measurements."""
        return fmean(measurement.step for measurement in self.measured)

    @property
    def error(self) -> float:
        """The standard error of `step` in seconds."""
        return math.hypot(*(measurement.error for measurement in self.measured)) / len(self.measured)


@dataclass
class Trial:
    """The comparison of the choice on trial, `tried`, with the choice before it, `earlier`, which was measured. The
    sides are measured in turns until the difference is clear: other work on the machines may change the times of steps
    by more than the choice does. `in_force` is the side of the present steps."""

    earlier: Side
    tried: Side
    in_force: Side = field(init=False)

    def __post_init__(self) -> None:
        self.in_force = self.tried

    def judge(self) -> bool | None:
        """Return True if the tried choice makes steps faster by LEAST_GAIN, False if it does not, and None as long as
        this is not clear. It was predicted to do so. So if it does not in its first steps, the steps of the earlier
        choice are measured once more: all may have become slower."""
        limit = (1 - LEAST_GAIN) * self.earlier.step
        is_faster = self.tried.step < limit
        count = len(self.earlier.measured) + len(self.tried.measured)
        if count >= MOST_MEASUREMENTS:
            return is_faster
        is_clear = abs(self.tried.step - limit) > _CLEAR * math.hypot(self.tried.error, self.earlier.error)
        return is_faster if is_clear and (is_faster or count > 2) else None

    def change_sides(self) -> None:
        """Put the other side in force."""
        self.in_force = self.earlier if self.in_force is self.tried else self.tried
