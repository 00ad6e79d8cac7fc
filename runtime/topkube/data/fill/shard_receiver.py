"""The shards that this rank receives from other ranks. Only the thread of the exchange calls MPI."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import numpy as np

from topkube.data.cache.shard_file import ShardWriter
from topkube.data.fill.shard_messages import (
    FIRST_REPLY,
    HEADER,
    NO_SIZE,
    REPLIES,
    REQUEST,
    UNDER_WAY,
    MessageBuffers,
    Words,
)
from topkube.data.formats.shards import DataShard
from topkube.errors import StoreError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache


class Pull:
    """A shard that this rank receives. The result of `done` is the digest of the sender's copy."""

    def __init__(self, home: int, shard: DataShard, writer: ShardWriter) -> None:
        self.home_rank, self.shard, self.writer = home, shard, writer
        self.done: Future[str] = Future()
        self.header: Words = np.empty(HEADER, np.uint64)
        self.chunks: deque[tuple[Any, Any, int]] = deque()
        """The posted receives: request, buffer, offset."""
        self.tag = 0
        self.posted = self.received = 0
        self.header_request: Any = None
        self.ending: tuple[Any, Words] | None = None
        """The posted receive of the digest, and its buffer."""
        self.moved = time.monotonic()


class ShardReceiver:
    """Receives shards. Each pull ends with the digest of the sender's copy, or with an error."""

    def __init__(self, cache: ShardCache, comm: Any, buffers: MessageBuffers) -> None:
        self._cache, self._comm, self._buffers = cache, comm, buffers
        self.pulls: list[Pull] = []
        self.retired: set[tuple[int, int]] = set()
        """The ranks and tags of pulls that were given up. These tags are not used again, since messages may follow."""
        self.replies = 0

    def request(self, pull: Pull) -> None:
        """Ask the home rank for a shard."""
        if pull.done.cancelled():
            return
        while (pull.home_rank, tag := FIRST_REPLY + self.replies % REPLIES) in self.retired:
            self.replies += 1
            if len(self.retired) >= REPLIES:
                fail_pull(pull, StoreError("other ranks left too many requests without an answer"))
                return
        pull.tag = tag
        self.replies += 1
        pull.header_request = self._comm.Irecv(pull.header, pull.home_rank, pull.tag)
        self._comm.Isend(np.array([pull.shard.number, pull.tag], np.int64), pull.home_rank, REQUEST).Wait()
        pull.moved = time.monotonic()
        self.pulls.append(pull)

    def make_progress(self, gone: Collection[int]) -> bool:
        """Test all pulls once. Return True if there was progress. Ranks in `gone` answer no more."""
        moved, now = False, time.monotonic()
        for pull in list(self.pulls):
            if pull.done.cancelled():
                self._give_up(pull)
            elif self._receive(pull):
                moved, pull.moved = True, now
            elif now - pull.moved > self._cache.stall_seconds or pull.home_rank in gone:
                self._give_up(pull)
        return moved

    def _receive(self, pull: Pull) -> bool:
        from mpi4py import MPI

        if pull.header_request is not None:
            if not pull.header_request.Test():
                return False
            pull.header_request = None
            if pull.header.tolist() != [pull.shard.number, pull.shard.size]:
                if pull.header[1] != NO_SIZE:  # the bytes of a shard may follow
                    self.retired.add((pull.home_rank, pull.tag))
                self.pulls.remove(pull)
                fail_pull(pull, StoreError(f"rank {pull.home_rank} has no shard {pull.shard.number}"))
                return True
        moved, status = False, MPI.Status()
        while pull.chunks and pull.chunks[0][0].Test(status):
            _, buffer, offset = pull.chunks.popleft()
            if status.Get_count(MPI.BYTE) != buffer.nbytes:
                self._give_up(pull, StoreError(f"rank {pull.home_rank} could not fetch shard {pull.shard.number}"))
                return True
            try:
                pull.writer.write(offset, buffer)
            except (OSError, StoreError) as error:  # the volume is full, or the writer has ended
                self._give_up(pull, error)
                return True
            pull.received += buffer.size
            self._buffers.give_back(buffer)
            self._cache.node_state.advance(buffer.size)
            self._cache.counters.add("peer_bytes", buffer.size)
            moved = True
        while pull.posted < pull.shard.size and len(pull.chunks) < UNDER_WAY:
            buffer = self._buffers.take(pull.shard.size - pull.posted)
            pull.chunks.append((self._comm.Irecv(buffer, pull.home_rank, pull.tag), buffer, pull.posted))
            pull.posted += buffer.size
        return self._receive_digest(pull) if pull.received == pull.shard.size else moved

    def _receive_digest(self, pull: Pull) -> bool:
        from mpi4py import MPI

        if pull.ending is None:
            halves = np.empty(2, np.uint64)
            pull.ending = (self._comm.Irecv(halves, pull.home_rank, pull.tag), halves)
        status = MPI.Status()
        if not pull.ending[0].Test(status):
            return False
        halves = pull.ending[1]
        if status.Get_count(MPI.BYTE) != halves.nbytes:
            pull.ending = None
            self._give_up(pull, StoreError(f"rank {pull.home_rank} could not fetch shard {pull.shard.number}"))
            return True
        self.pulls.remove(pull)
        with contextlib.suppress(InvalidStateError):  # another thread has just cancelled it
            pull.done.set_result("".join(f"{half:016x}" for half in halves.tolist()))
        return True

    def _give_up(self, pull: Pull, error: Exception | None = None) -> None:
        """Stop receiving. MPI may still write to the buffers of matched requests. The tag is not used again, because
        the sender may continue for a while."""
        posted = [(pull.header_request, pull.header)] if pull.header_request is not None else []
        posted += [(request, buffer) for request, buffer, _ in pull.chunks]
        posted += [pull.ending] if pull.ending is not None else []
        for request, _ in posted:
            request.Cancel()
        self._buffers.abandon(posted)
        self.retired.add((pull.home_rank, pull.tag))
        self.pulls.remove(pull)
        fail_pull(pull, error or StoreError(f"rank {pull.home_rank} does not answer"))

    def fail(self) -> None:
        """End all pulls with an error, because the exchange has ended."""
        for pull in self.pulls:
            fail_pull(pull, StoreError("the exchange between nodes has ended"))
        self.pulls.clear()


def fail_pull(pull: Pull, error: Exception) -> None:
    """End a pull with an error, unless it has ended."""
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        pull.done.set_exception(error)
