"""The turn to measure steps: one optimizer of a world at a time compares its choices.

A script may have several optimizers, such as those of a generator and a discriminator. If they changed their choices at
the same steps, each would take the gain of the others for its own.
"""

from __future__ import annotations

import weakref

from topkube.training.exchange.tuning.step_times import COUNTED_STEPS, SKIPPED_STEPS
from topkube.world import World

_LONGEST_ABSENCE = 4 * (SKIPPED_STEPS + COUNTED_STEPS)
"""If others ask for the turn so often while its holder makes no step, they get it: the optimizer may be unused."""


class MeasuringTurn:
    """The turn in one world. Ranks make the same steps in the same order, so it has the same holder on all of them."""

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None
        self._absence = 0

    def take(self, asker: object) -> bool:
        """Return True if `asker`, whose step has ended, has the turn."""
        holder = self._holder() if self._holder is not None else None
        self._absence = 0 if holder is asker else self._absence + 1
        if holder is None or self._absence > _LONGEST_ABSENCE:
            self._holder, self._absence = weakref.ref(asker), 0
            return True
        return holder is asker

    def leave(self, asker: object) -> None:
        """Give the turn back, if `asker` has it."""
        if self._holder is not None and self._holder() is asker:
            self._holder = None


def find_measuring_turn(world: World) -> MeasuringTurn:
    """Return the turn of `world`."""
    turn: MeasuringTurn = world.cache.setdefault("measuring turn", MeasuringTurn())
    return turn
