"""The check that one thread at a time uses the all-reduces of a world.

Ranks match all-reduces by their order. Two threads would enter them in an order that differs from rank to rank, and
would use the same work buffers and the same memory of the node: the results would be wrong in silence. An exchange of
gradients occupies a world from the first bucket that is handed over to the communication thread until the last bucket
has arrived, because it is unknown how far the thread is on other ranks.
"""

from __future__ import annotations

import threading
import weakref

from topkube.errors import CollectiveError
from topkube.world import World

_KEY = "occupancy"
"""The key of the Occupancy in the world's cache."""
_NEXT_STEP = "call it from one thread, before or after backward(); or in a world of its own (topkube.new_world)"


class Occupancy:
    """What uses the all-reduces of one world: a call of `allreduce_`, or exchanges of gradients. Both note themselves
    first and look for the other one then, so that one of two threads always notices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exchanges: set[weakref.ref[object]] = set()

    def enter(self, world: World) -> None:
        """Begin a call of `allreduce_`. It ends with `leave`. Raises CollectiveError if another thread is in such a
        call, or if gradients are exchanged."""
        if not self._lock.acquire(blocking=False):
            raise _explain(world, "two threads call allreduce_() at the same time", "threads of the script")
        if self._exchanges:
            self._lock.release()
            raise _explain(
                world,
                "allreduce_() was called during a backward() that exchanges gradients in the same world",
                "a hook, a layer's backward, or another thread called it",
            )

    def leave(self) -> None:
        """End a call of `allreduce_`."""
        self._lock.release()

    def begin_exchange(self, world: World, user: object) -> None:
        """Note that `user` exchanges gradients, until `end_exchange` or until `user` is gone. Raises CollectiveError if
        a thread is in a call of `allreduce_`."""
        self._exchanges.add(weakref.ref(user, self._exchanges.discard))
        if self._lock.locked():
            raise _explain(world, "backward() began to exchange gradients during a call of allreduce_()", "two threads")

    def end_exchange(self, user: object) -> None:
        """Note that all gradients of `user` have arrived."""
        self._exchanges.discard(weakref.ref(user))


def find_occupancy(world: World) -> Occupancy:
    """Return the Occupancy of `world`."""
    occupancy: Occupancy | None = world.cache.get(_KEY)
    if occupancy is None:
        occupancy = world.cache.setdefault(_KEY, Occupancy())  # another thread may have set it
    return occupancy


def _explain(world: World, what: str, cause: str) -> CollectiveError:
    return CollectiveError(f"rank {world.members[world.rank]}: {what}", cause=cause, next_step=_NEXT_STEP)
