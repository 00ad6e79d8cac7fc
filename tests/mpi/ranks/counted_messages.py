"""A count of the messages that ranks really send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from topkube.world import World


class CountedMessages:
    """A communicator that counts the messages and the bytes that this rank sends through it. The bytes of a
    collective of MPI are the fewest that this rank can send for it."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.messages, self.sent_bytes = comm, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Isend(self, data: Any, *arguments: Any) -> Any:
        self.messages += 1
        self.sent_bytes += data.nbytes
        return self._comm.Isend(data, *arguments)

    def Iallreduce(self, own: Any, *arguments: Any) -> Any:
        self.sent_bytes += own.nbytes * (self._comm.size - 1).bit_length()
        return self._comm.Iallreduce(own, *arguments)

    def Iallgather(self, own: Any, *arguments: Any) -> Any:
        self.sent_bytes += own.nbytes * (self._comm.size - 1)
        return self._comm.Iallgather(own, *arguments)


class _CountedLinks:
    """The links of a world, whose messages count as those of `counted`."""

    def __init__(self, links: Any, counted: CountedMessages) -> None:
        self._links, self._counted = links, counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)

    def Isend(self, data: Any, *arguments: Any) -> Any:
        self._counted.messages += 1
        self._counted.sent_bytes += data.nbytes
        return self._links.Isend(data, *arguments)

    def begin_reduction(self, x: Any, buffer: Any, scale: float, tag: int, is_gathered: bool) -> Any:
        ranks, rank = self._links.size, self._links.rank
        own = x.size * (rank + 1) // ranks - x.size * rank // ranks
        self._counted.messages += (ranks - 1) * (2 if is_gathered else 1)
        self._counted.sent_bytes += x.nbytes - own * x.itemsize + is_gathered * (ranks - 1) * own * x.itemsize
        return self._links.begin_reduction(x, buffer, scale, tag, is_gathered)

    def begin_integers(self, integers: Any) -> Any:
        self._counted.messages += 2 * (self._links.size - 1)
        self._counted.sent_bytes += integers.sent_bytes
        return self._links.begin_integers(integers)

    def greet(self, partners: Any, *arguments: Any) -> Any:
        self._count_greetings(partners)
        return self._links.greet(partners, *arguments)

    def greet_and_reduce(
        self, partners: Any, signature: int, room: int, x: Any, tag: int, scale: float, is_in_one_round: bool
    ) -> Any:
        self._count_greetings(partners)
        ranks, rank = self._links.size, self._links.rank
        own = (x.size * (rank + 1) // ranks - x.size * rank // ranks) * x.itemsize
        self._counted.sent_bytes += (ranks - 1) * x.nbytes if is_in_one_round else x.nbytes - own + (ranks - 1) * own
        self._counted.messages += 0 if is_in_one_round else ranks - 1
        return self._links.greet_and_reduce(partners, signature, room, x, tag, scale, is_in_one_round)

    def _count_greetings(self, partners: Any) -> None:
        self._counted.messages += len(partners)
        self._counted.sent_bytes += 8 * len(partners)


@contextmanager
def count_messages(world: World) -> Iterator[CountedMessages]:
    """Count what this rank sends to ranks of equal local rank on other nodes."""
    comm, links = world.cross_comm, world.links
    counted = CountedMessages(comm)
    if comm is not None:
        world.cross_comm = counted
    if links is not None:
        world.links = _CountedLinks(links, counted)
    try:
        yield counted
    finally:
        world.cross_comm, world.links = comm, links
