"""All-reduces of compressed arrays in two halves, for DeAR (decoupled.py): until the second half begins, the array and
its residual need no more messages.

The residual is final after the first half. So the ranks can agree whether the step is finite, and the optimizer can
make its step, before the second half begins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from topkube.collectives.all_reduce import AllReduce
from topkube.collectives.call import Call
from topkube.collectives.exchange import Place
from topkube.collectives.request import Request
from topkube.collectives.rounds import Exchange
from topkube.world import World


@dataclass(frozen=True, eq=False)
class Halves:
    """An all-reduce in two halves, which has reduced the array inside the node.

    `first` is the exchange of the first half, in which this rank sends `sent` bytes to other nodes; None for a rank
    without a shard. `second(comm)` is the exchange of the second half over `comm`, which puts the result into this
    rank's shard. `own` holds the elements [start, stop) of the array that have their result after the first half:
    those of all ranks together are the whole array. It is None if no element has. `finite` has False after the first
    half if a value that this rank sent was not finite.
    """

    call: Call
    first: Exchange | None
    sent: int
    second: Callable[[Any], Exchange]
    own: tuple[int, int] | None
    finite: list[Any]


class HalvableAllReduce(AllReduce):
    """An algorithm that keeps a residual and can reduce an array in two halves."""

    def can_halve(self, dtype: str) -> bool:
        """Return True if it can reduce an array of `dtype`, such as "float16", in two halves: the ranks have to know
        after the first half if the result is finite."""
        return True

    @abstractmethod
    def begin_in_halves(self, world: World, request: Request, place: Place, kept: str) -> Halves:
        """Reduce the array inside the node, and return the halves of its exchange between nodes. Messages of both have
        the tag of `place`. Buffers that the second half reads have names that end with `kept`: they are in use until it
        ends."""
