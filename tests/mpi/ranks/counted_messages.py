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


@contextmanager
def count_messages(world: World) -> Iterator[CountedMessages]:
    """Count what this rank sends to ranks of equal local rank on other nodes."""
    comm = world.cross_comm
    counted = CountedMessages(comm)
    if comm is not None:
        world.cross_comm = counted
    try:
        yield counted
    finally:
        world.cross_comm = comm
