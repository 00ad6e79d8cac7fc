"""The turn to measure steps: one optimizer of a world at a time compares its choices.

A script may have several optimizers, such as those of a generator and a discriminator. If they changed their choices at
the same steps, each would take the gain of the others for its own.
"""

from __future__ import annotations

from topkube.training.exchange.tuning.step_times import COUNTED_STEPS, SKIPPED_STEPS
from topkube.world import World

_LONGEST_ABSENCE = 4 * (SKIPPED_STEPS + COUNTED_STEPS)
"""An optimizer that makes more steps than this, while the holder makes none, gets the turn: the holder may be
unused."""


class MeasuringTurn:
    """The turn in one world. Optimizers ask with a key of their own. Ranks make the same steps in the same order, so
    the turn has the same holder on all of them: it counts steps only, and does not see if an optimizer is gone, which
    each rank notices at another time."""

    def __init__(self) -> None:
        self._holder: object | None = None
        self._steps_since: dict[object, int] = {}
        """The steps of the others since the last step of the holder."""

    def take(self, key: object) -> bool:
        """Return True if the optimizer with this key, whose step has ended, has the turn."""
        if self._holder is not key:
            self._steps_since[key] = self._steps_since.get(key, 0) + 1
            if self._holder is not None and self._steps_since[key] <= _LONGEST_ABSENCE:
                return False
            self._holder = key
        self._steps_since.clear()
        return True

    def leave(self, key: object) -> None:
        """Give the turn back, if the optimizer with this key has it."""
        if self._holder is key:
            self._holder = None


def find_measuring_turn(world: World) -> MeasuringTurn:
    """Return the turn of `world`."""
    turn: MeasuringTurn = world.cache.setdefault("measuring turn", MeasuringTurn())
    return turn
