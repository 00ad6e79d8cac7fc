"""The times of the first steps after a choice, which show if the prediction was right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from topkube.telemetry import phases

SKIPPED_STEPS, COUNTED_STEPS = 3, 8
"""After a choice, the first SKIPPED_STEPS steps are not measured, because memory and connections are new. The next
COUNTED_STEPS steps are measured."""


@dataclass(frozen=True)
class Measurement:
    """Medians over the counted steps, on which all ranks agreed: the seconds from one step to the next on the slowest
    rank, and the seconds of its exchange between nodes and inside the node on the rank that waited least for others.
    `spread` is the interquartile range of the seconds from one step to the next, on the rank where it is largest."""

    step: float
    between: float
    inside: float
    spread: float = 0.0

    @classmethod
    def from_agreed(cls, agreed: Sequence[float]) -> Measurement:
        """Return the measurement of all ranks from the largest of each number that `StepTimes.note_step` returned."""
        step, between, inside, spread = map(float, agreed)
        return cls(step, -between, -inside, spread)

    @property
    def error(self) -> float:
        """The standard error of `step` in seconds, if the steps are independent and normal: that of a median of n
        values is 1.2533 standard deviations / sqrt(n), and an interquartile range is 1.349 standard deviations (with
        few values, that of `statistics.quantiles` is larger, so the error is not underestimated)."""
        return 1.2533 / 1.349 * self.spread / math.sqrt(COUNTED_STEPS)


class StepTimes:
    """The times of this rank's steps: from one step to the next, and of the exchange between nodes and inside the
    node."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, float]] = []
        self._noted_steps = 0
        self._last: tuple[float, float, float] | None = None

    def restart(self) -> None:
        """Begin again, for another choice."""
        self._steps, self._last, self._noted_steps = [], None, 0

    def note_step(self, now: float, is_changing: bool = False) -> list[float] | None:
        """Note that the exchange of a step ended at `now` (seconds). No step counts while the exchange `is_changing` to
        the choice, the same on all ranks. After the last counted step, return the medians
        [step, -between nodes, -inside the node] and the interquartile range of the steps, whose maxima over all ranks
        make a `Measurement`; before that, return None."""
        last, self._last = self._last, (now, phases.current.total("inter"), phases.current.total("intra"))
        self._noted_steps = min(self._noted_steps + 1, SKIPPED_STEPS) if is_changing else self._noted_steps + 1
        if last is None or self._noted_steps <= SKIPPED_STEPS:
            return None
        self._steps.append(tuple(b - a for a, b in zip(last, self._last, strict=True)))  # type: ignore[arg-type]
        if len(self._steps) < COUNTED_STEPS:
            return None
        steps, between, inside = zip(*self._steps, strict=True)
        quarter, step, three_quarters = quantiles(steps, n=4)
        return [step, -median(between), -median(inside), three_quarters - quarter]
