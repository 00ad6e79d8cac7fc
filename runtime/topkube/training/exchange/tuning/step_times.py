"""The times of the first steps after a choice, which show if the prediction was right."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from topkube.telemetry import phases

SKIPPED_STEPS, COUNTED_STEPS = 3, 8
"""After a choice, the first SKIPPED_STEPS steps are not measured, because memory and connections are new. The next
COUNTED_STEPS steps are measured."""


@dataclass(frozen=True)
class Measurement:
    """Medians over the counted steps, on which all ranks agreed: the seconds from one step to the next on the slowest
    rank, and the seconds of its exchange between nodes and inside the node on the rank that waited least for others."""

    step: float
    between: float
    inside: float


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

    def note_step(self, now: float) -> list[float] | None:
        """Note that the exchange of a step ended at `now` (seconds). After the last counted step, return the medians
        [step, -between nodes, -inside the node], whose maxima over all ranks make a `Measurement`; before that, return
        None."""
        last, self._last = self._last, (now, phases.current.total("inter"), phases.current.total("intra"))
        self._noted_steps += 1
        if last is None or self._noted_steps <= SKIPPED_STEPS:
            return None
        self._steps.append(tuple(b - a for a, b in zip(last, self._last, strict=True)))  # type: ignore[arg-type]
        if len(self._steps) < COUNTED_STEPS:
            return None
        step, between, inside = (median(column) for column in zip(*self._steps, strict=True))
        return [step, -between, -inside]
