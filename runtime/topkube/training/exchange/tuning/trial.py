"""The trial of a choice in real steps, against the choice before it.

The steps of both sides are compared by their ranks (Mann and Whitney, "On a test of whether one of two random variables
is stochastically larger than the other", 1947): it does not matter how much longer the longest steps are, so neither an
evaluation every few steps nor sequences of different lengths hide a difference, and none appears by chance more often.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from topkube.algorithms import LEAST_GAIN, Choice, Machines
from topkube.training.exchange.tuning.step_times import Measurement

MOST_MEASUREMENTS = 9
"""The measurements after which a trial ends at the latest: five of the earlier choice, four of the one on trial."""
_CLEAR, _CLEAR_AT_THE_END = 2.0, 1.0
"""A difference is clear if its test statistic is this many standard deviations from that of equal steps. After the last
measurement, only a gain has to be clear. Otherwise the earlier choice stays: it compresses less, or the cost model
ranks it first."""
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
        """The standard error of `step` in seconds, from the spread of the measurements; 0 with a single one."""
        count = len(self.measured)
        return 0.0 if count == 1 else stdev(m.step for m in self.measured) / math.sqrt(count)

    @property
    def steps(self) -> list[float]:
        """The seconds of all steps."""
        return [seconds for measurement in self.measured for seconds in measurement.steps]


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
        score = compare_ranks(self.tried.steps, [(1 - LEAST_GAIN) * seconds for seconds in self.earlier.steps])
        is_faster = score > 0
        difference = abs(self.tried.step - (1 - LEAST_GAIN) * self.earlier.step)
        # All steps of a measurement may be slow for the same reason, which their ranks do not show.
        certainty = min(abs(score), difference / max(math.hypot(self.tried.error, self.earlier.error), 1e-12))
        count = len(self.earlier.measured) + len(self.tried.measured)
        if count >= MOST_MEASUREMENTS:
            return is_faster and certainty > _CLEAR_AT_THE_END
        is_clear = certainty > _CLEAR
        if count % 2 == 0:
            return True if is_clear and self.tried.step < (1 - _LARGE_GAIN) * self.earlier.step else None
        return is_faster if is_clear else None

    def change_sides(self) -> None:
        """Put the other side in force."""
        self.in_force = self.earlier if self.in_force is self.tried else self.tried


def compare_ranks(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the statistic of the test of Mann and Whitney, in its standard deviations: positive if the values of
    `first` are smaller than those of `second`."""
    wins = sum((a < b) + (a == b) / 2 for a in first for b in second)
    pairs, total = len(first) * len(second), len(first) + len(second)
    ties = sum(count**3 - count for count in Counter([*first, *second]).values())
    variance = pairs / 12 * (total + 1 - ties / (total * (total - 1)))
    return (wins - pairs / 2) / math.sqrt(variance) if variance > 0 else 0.0
