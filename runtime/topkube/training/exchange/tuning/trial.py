"""The trial of a choice in real steps, against the choice before it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

from topkube.algorithms import LEAST_GAIN, Choice, Machines
from topkube.training.exchange.tuning.step_times import Measurement

MOST_MEASUREMENTS = 5
"""The measurements after which a trial ends at the latest: three of the earlier choice, two of the one on trial."""
_CLEAR, _CLEAR_AT_THE_END = 2.0, 1.0
"""A difference is clear if it is this many times as large as its standard error. After the last measurement, only a
gain has to be clear. Otherwise the earlier choice stays: it compresses less, or the cost model ranks it first."""
_LARGE_GAIN = 0.1
"""From this share of the step on, a clear gain needs no second measurement of the earlier choice."""


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
        """The standard error of `step` in seconds: from the spread of the steps in each measurement, or from that of
        the measurements if it is larger."""
        count = len(self.measured)
        within = math.hypot(*(measurement.error for measurement in self.measured)) / count
        return within if count == 1 else max(within, stdev(m.step for m in self.measured) / math.sqrt(count))


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
        this is not clear. After an even number of measurements, those of the earlier choice are the older ones, and all
        steps may have become slower or faster since then: then only a large gain decides."""
        limit = (1 - LEAST_GAIN) * self.earlier.step
        is_faster = self.tried.step < limit
        difference = abs(self.tried.step - limit)
        error = math.hypot(self.tried.error, self.earlier.error)
        count = len(self.earlier.measured) + len(self.tried.measured)
        if count >= MOST_MEASUREMENTS:
            return is_faster and difference > _CLEAR_AT_THE_END * error
        is_clear = difference > _CLEAR * error
        if count % 2 == 0:
            return True if is_clear and self.tried.step < (1 - _LARGE_GAIN) * self.earlier.step else None
        return is_faster if is_clear else None

    def change_sides(self) -> None:
        """Put the other side in force."""
        self.in_force = self.earlier if self.in_force is self.tried else self.tried
