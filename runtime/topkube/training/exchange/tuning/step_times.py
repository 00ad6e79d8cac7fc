"""The times of the first steps after a choice, which show if the prediction was right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

SKIPPED_STEPS, COUNTED_STEPS = 3, 8
"""After a choice, the first SKIPPED_STEPS steps are not measured, because memory and connections are new. The next
COUNTED_STEPS steps are measured, or whole periods, if an exchange comes only every few steps."""
_LEAST_PERIODS = 2


@dataclass(frozen=True)
class Measurement:
    """The counted steps, on which all ranks agreed. `steps` has the seconds from one step to the next on the slowest
    rank, or their means over periods. `between` and `inside` are the seconds of a step's exchange between nodes and
    inside the node on the rank that waited least for others."""

    steps: tuple[float, ...]
    between: float
    inside: float

    @classmethod
    def from_agreed(cls, agreed: Sequence[float]) -> Measurement:
        """Return the measurement of all ranks from the largest of each number that `StepTimes.note_step` returned."""
        *steps, between, inside = map(float, agreed)
        return cls(tuple(steps), -between, -inside)

    @property
    def step(self) -> float:
        """The seconds of a step: the mean without the shortest and the longest quarter. An evaluation or a checkpoint
        in one or two of eight steps does not change it; if steps have different lengths, all kinds of them count."""
        cut = len(self.steps) // 4
        return fmean(sorted(self.steps)[cut : len(self.steps) - cut])


class StepTimes:
    """The times of this rank's steps: from one step to the next, and of one optimizer's exchange between nodes and
    inside the node."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, float]] = []
        self._noted_steps = 0
        self._last: tuple[float, float, float] | None = None

    def restart(self) -> None:
        """Begin again, for another choice."""
        self._steps, self._last, self._noted_steps = [], None, 0

    def note_step(
        self, now: float, exchange: tuple[float, float], is_changing: bool = False, period: int = 1
    ) -> list[float] | None:
        """Note that the exchange of a step ended at `now` (seconds). `exchange` has the seconds of all exchanges so
        far, between nodes and inside the node. No step counts while the exchange `is_changing` to the choice, the same
        on all ranks. With a `period`, an exchange comes every so many steps: only means of whole periods count. After
        the last counted step, return the seconds of the steps, and the medians -between nodes, -inside the node, whose
        maxima over all ranks make a `Measurement`; before that, return None."""
        last, self._last = self._last, (now, *exchange)
        self._noted_steps = min(self._noted_steps + 1, SKIPPED_STEPS) if is_changing else self._noted_steps + 1
        if last is None or self._noted_steps <= SKIPPED_STEPS:
            return None
        self._steps.append(tuple(b - a for a, b in zip(last, self._last, strict=True)))  # type: ignore[arg-type]
        if len(self._steps) < max(COUNTED_STEPS, _LEAST_PERIODS * period) or len(self._steps) % period:
            return None
        steps, between, inside = (_average(values, period) for values in zip(*self._steps, strict=True))
        return [*steps, -median(between), -median(inside)]


def _average(values: Sequence[float], period: int) -> list[float]:
    """Return the mean of each period."""
    return [fmean(values[first : first + period]) for first in range(0, len(values), period)]
