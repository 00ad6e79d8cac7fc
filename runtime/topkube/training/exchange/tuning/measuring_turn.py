"""The turn to measure steps: one optimizer of a world at a time compares its choices.

A script may have several optimizers, such as those of a generator and a discriminator. If they changed their choices at
the same steps, each would take the gain of the others for its own.
"""

from __future__ import annotations

import weakref

from topkube.training.exchange.tuning.step_times import COUNTED_STEPS, SKIPPED_STEPS
from topkube.world import World

_LONGEST_ABSENCE = 4 * (SKIPPED_STEPS + COUNTED_STEPS)
"""An optimizer that makes more steps than this, while the holder makes none, gets the turn: the holder may be
unused."""


class MeasuringTurn:
    """The turn in one world. Ranks make the same steps in the same order, so it has the same holder on all of them."""

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None
        self._steps_since: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        """The steps of the others since the last step of the holder."""

    def take(self, asker: object) -> bool:
        """Return True if `asker`, whose step has ended, has the turn."""
        holder = self._holder() if self._holder is not None else None
        if holder is not asker:
            self._steps_since[asker] = self._steps_since.get(asker, 0) + 1
            if holder is not None and self._steps_since[asker] <= _LONGEST_ABSENCE:
                return False
            self._holder = weakref.ref(asker)
        self._steps_since.clear()
        return True

    def leave(self, asker: object) -> None:
        """Give the turn back, if `asker` has it."""
        if self._holder is not None and self._holder() is asker:
            self._holder = None


def find_measuring_turn(world: World) -> MeasuringTurn:
    """Return the turn of `world`."""
    turn: MeasuringTurn = world.cache.setdefault("measuring turn", MeasuringTurn())
    return turn
