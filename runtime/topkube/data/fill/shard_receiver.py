"""The shards that this rank receives from other ranks. Only the thread of the exchange calls MPI."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import numpy as np

from topkube.data.cache.disk.shard_file import ShardWriter
from topkube.data.fill.shard_messages import (
    FIRST_REPLY,
    HEADER_LENGTH,
    MOST_POSTED,
    NO_SIZE,
    REPLY_TAGS,
    REQUEST,
    MessageBuffers,
    Words,
)
from topkube.data.formats.shards import DataShard
from topkube.errors import StoreError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache


class Pull:
    """A shard that this rank receives. `digest` is a future: its result is the digest of the sender's copy."""

    def __init__(self, home: int, shard: DataShard, writer: ShardWriter) -> None:
        self.home_rank, self.shard, self.writer = home, shard, writer
        self.digest: Future[str] = Future()
        self.header: Words = np.empty(HEADER_LENGTH, np.uint64)
        self.chunks: deque[tuple[Any, Any, int]] = deque()
        """The posted receives: request, buffer, offset."""
        self.tag = 0
        self.posted = self.received = 0
        """The bytes for which receives have been posted, and the bytes that have arrived."""
        self.header_request: Any = None
        self.ending: tuple[Any, Words] | None = None
        """The posted receive of the digest, and its buffer."""
        self.progress_time = time.monotonic()
        """The time of the last progress."""


class ShardReceiver:
    """Receives shards. Each pull ends with the digest of the sender's copy, or with an error."""

    def __init__(self, cache: ShardCache, comm: Any, buffers: MessageBuffers) -> None:
        self._cache, self._comm, self._buffers = cache, comm, buffers
        self.pulls: list[Pull] = []
        self.retired: set[tuple[int, int]] = set()
        """The ranks and tags of pulls that were given up. These tags are not reused, because messages may follow."""
        self.reply_count = 0
        """The number of replies that have been requested; it determines the tag of the next reply."""

    def request(self, pull: Pull) -> None:
        """Request a shard from its home rank."""
        if pull.digest.cancelled():
            return
        while (pull.home_rank, tag := FIRST_REPLY + self.reply_count % REPLY_TAGS) in self.retired:
            self.reply_count += 1
            if len(self.retired) >= REPLY_TAGS:
                fail_pull(pull, StoreError("other ranks left too many requests without an answer"))
                return
        pull.tag = tag
        self.reply_count += 1
        pull.header_request = self._comm.Irecv(pull.header, pull.home_rank, pull.tag)
        # MPI sends 16 bytes at once, so this wait does not block.
        self._comm.Isend(np.array([pull.shard.cache_number, pull.tag], np.int64), pull.home_rank, REQUEST).Wait()
        pull.progress_time = time.monotonic()
        self.pulls.append(pull)

    def make_progress(self, departed: Collection[int]) -> bool:
        """Test all pulls once. Return True if there was progress. The ranks in `departed` answer no more."""
        has_progress, now = False, time.monotonic()
        for pull in list(self.pulls):
            if pull.digest.cancelled():
                self._give_up(pull)
            elif self._receive(pull):
                has_progress, pull.progress_time = True, now
            elif now - pull.progress_time > self._cache.stall_seconds or pull.home_rank in departed:
                self._give_up(pull)
        return has_progress

    def _receive(self, pull: Pull) -> bool:
        """Take what has arrived of a shard, and post the next receives. Return True if there was progress."""
        from mpi4py import MPI

        if pull.header_request is not None:
            if not pull.header_request.Test():
                return False
            pull.header_request = None
            if pull.header.tolist() != [pull.shard.cache_number, pull.shard.size]:
                if pull.header[1] != NO_SIZE:  # the bytes of a shard may follow
                    self.retired.add((pull.home_rank, pull.tag))
                self.pulls.remove(pull)
                fail_pull(pull, StoreError(f"rank {pull.home_rank} has no shard {pull.shard.cache_number}"))
                return True
        has_progress, status = False, MPI.Status()
        while pull.chunks and pull.chunks[0][0].Test(status):
            _, buffer, offset = pull.chunks.popleft()
            if status.Get_count(MPI.BYTE) != buffer.nbytes:
                self._give_up(
                    pull, StoreError(f"rank {pull.home_rank} could not fetch shard {pull.shard.cache_number}")
                )
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
            has_progress = True
        while pull.posted < pull.shard.size and len(pull.chunks) < MOST_POSTED:
            buffer = self._buffers.take(pull.shard.size - pull.posted)
            pull.chunks.append((self._comm.Irecv(buffer, pull.home_rank, pull.tag), buffer, pull.posted))
            pull.posted += buffer.size
        return self._receive_digest(pull) if pull.received == pull.shard.size else has_progress

    def _receive_digest(self, pull: Pull) -> bool:
        """Receive the digest that follows the bytes, and end the pull. Return True if there was progress."""
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
            self._give_up(pull, StoreError(f"rank {pull.home_rank} could not fetch shard {pull.shard.cache_number}"))
            return True
        self.pulls.remove(pull)
        with contextlib.suppress(InvalidStateError):  # another thread has just cancelled it
            pull.digest.set_result("".join(f"{half:016x}" for half in halves.tolist()))
        return True

    def _give_up(self, pull: Pull, error: Exception | None = None) -> None:
        """Stop receiving a shard. MPI may still write to the buffers of matched requests, so the buffers are kept. The
        tag is not reused, because the sender may continue for a while."""
        posted = [(pull.header_request, pull.header)] if pull.header_request is not None else []
        posted += [(request, buffer) for request, buffer, _ in pull.chunks]
        posted += [pull.ending] if pull.ending is not None else []
        for request, _ in posted:
            request.Cancel()
        self._buffers.abandon(posted)
        self.retired.add((pull.home_rank, pull.tag))
        self.pulls.remove(pull)
        fail_pull(pull, error or StoreError(f"rank {pull.home_rank} does not answer"))

    def fail_all(self) -> None:
        """End all pulls with an error, because the exchange has ended."""
        for pull in self.pulls:
            fail_pull(pull, StoreError("the exchange between nodes has ended"))
        self.pulls.clear()


def fail_pull(pull: Pull, error: Exception) -> None:
    """End a pull with an error, unless it has already ended."""
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        pull.digest.set_exception(error)
