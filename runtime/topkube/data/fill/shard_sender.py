"""The shards that this rank sends to other ranks. Only the thread of the exchange calls MPI."""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from topkube.data.cache.disk.shard_file import ArrivingShard
from topkube.data.cache.open_shards import ShardFile
from topkube.data.fill.shard_messages import MOST_POSTED, NO_SIZE, MessageBuffers, print_message
from topkube.errors import TopKubeError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache


class Push:
    """A shard that this rank sends. `opening` is a future: its result is the open shard and its digest. `source`: the
    whole shard, or the shard that arrives."""

    def __init__(self, to: int, tag: int, number: int, opening: Future[tuple[ShardFile, str]]) -> None:
        self.to, self.tag, self.number, self.opening = to, tag, number, opening
        self.sends: deque[tuple[Any, Any]] = deque()
        """The posted sends: request, buffer."""
        self.source: ShardFile | ArrivingShard | None = None
        self.sent = 0
        self.size: int | None = None
        self.is_ended = False
        """True if no more messages are posted."""
        self.progress_time = time.monotonic()
        """The time of the last progress."""


class ShardSender:
    """Sends shards while they arrive, or from the cache. A pool of threads opens the shards."""

    def __init__(self, cache: ShardCache, comm: Any, buffers: MessageBuffers) -> None:
        self._cache, self._comm, self._buffers = cache, comm, buffers
        self._pool = ThreadPoolExecutor(2, "topkube-provide")
        self.pushes: list[Push] = []

    def reply(self, rank: int, tag: int, number: int) -> None:
        """Begin to send a shard to a rank."""
        self.pushes.append(Push(rank, tag, number, self._pool.submit(self._open, number)))

    def close(self) -> None:
        """Open no more shards."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def make_progress(self) -> bool:
        """Test all pushes once. Return True if there was progress."""
        has_progress, now = False, time.monotonic()
        for push in list(self.pushes):
            if self._send(push):
                has_progress, push.progress_time = True, now
            elif not push.sends:  # this rank waits for the remote
                push.progress_time = now
            elif now - push.progress_time > self._cache.stall_seconds:
                self._drop(push)
        return has_progress

    def _open(self, number: int) -> tuple[ShardFile, str]:
        """Open a shard. Return the shard and the digest of this node's copy."""
        shard = self._cache.open(number, self._cache.fetch_from_store)
        return shard, self._cache.find_digest(shard)

    def _send(self, push: Push) -> bool:
        """Post the next messages of a shard. Return True if there was progress."""
        if push.size is None:
            return self._begin_reply(push)
        has_progress = False
        while push.sends and push.sends[0][0].Test():
            self._buffers.give_back(push.sends.popleft()[1])
            has_progress = True
        while push.sent < push.size and len(push.sends) < MOST_POSTED and not push.is_ended:
            count = self._buffers.count_next_bytes(push.size - push.sent)
            if not self._has_arrived(push, push.sent + count):
                break
            buffer = self._buffers.take(push.size - push.sent)
            assert push.source is not None
            if not _read_chunk(push.source.file, buffer, push.sent):
                self._end_early(push)
                break
            self._post(push, buffer)
            push.sent += buffer.size
            has_progress = True
        if push.sent == push.size and not push.is_ended and (digest := self._find_digest(push)):
            self._post(push, np.array([int(digest[:16], 16), int(digest[16:], 16)], np.uint64))
            push.is_ended = has_progress = True
        if push.is_ended and not push.sends:
            self.pushes.remove(push)
            return True
        return has_progress

    def _begin_reply(self, push: Push) -> bool:
        """Send the header if this rank has the shard, or if its bytes arrive in order. Return True if it was sent."""
        if push.opening.done():
            try:
                push.source = push.opening.result()[0]
            except Exception as error:  # the other rank reads the remote, and reports its own error
                if not isinstance(error, TopKubeError):
                    print_message(
                        f"shard {push.number} cannot be sent to another node ({type(error).__name__}: {error})"
                    )
                push.size, push.is_ended = 0, True
                self._post(push, np.array((push.number, NO_SIZE), np.uint64))
                return True
            push.size = push.source.shard.size
        else:
            arriving = self._cache.fetcher.find_arriving(push.number)
            if arriving is None or arriving.is_over or arriving.written_bytes <= 0:
                return False
            push.source, push.size = arriving, arriving.size
        self._post(push, np.array((push.number, push.size), np.uint64))
        return True

    def _has_arrived(self, push: Push, end: int) -> bool:
        """Return True if the bytes up to `end` have arrived. If they will not arrive, end the reply."""
        source = push.source
        if not isinstance(source, ArrivingShard):
            return True
        is_over = source.is_over  # read before the number of bytes, which may grow until the shard is over
        if source.written_bytes >= end:
            return True
        if is_over or source.written_bytes < 0:  # below 0: the bytes do not arrive in order
            self._end_early(push)
        return False

    def _find_digest(self, push: Push) -> str:
        """Return the digest of the shard whose bytes were sent; an empty text while it is unknown. If the bytes were
        wrong, end the reply."""
        source = push.source
        if not isinstance(source, ArrivingShard):
            return push.opening.result()[1]
        if source.is_over and not source.digest:
            self._end_early(push)
        return source.digest

    def _end_early(self, push: Push) -> None:
        """Send an empty message in place of the rest of the shard. The other rank then reads the shard from the
        remote."""
        push.is_ended = True
        self._post(push, np.empty(0, np.uint8))

    def _drop(self, push: Push) -> None:
        """Stop sending a shard to a rank that no longer receives."""
        self._buffers.abandon(push.sends)
        self.pushes.remove(push)

    def _post(self, push: Push, buffer: Any) -> None:
        push.sends.append((self._comm.Isend(buffer, push.to, push.tag), buffer))


def _read_chunk(file: int, buffer: Any, offset: int) -> bool:
    """Fill the buffer from an open file. Return False if the file is too short."""
    view = memoryview(buffer)
    while view:
        count = os.preadv(file, [view], offset)
        if count <= 0:
            return False
        view, offset = view[count:], offset + count
    return True
