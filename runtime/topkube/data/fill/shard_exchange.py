"""The exchange of shards between nodes over MPI, so that the remote sends each byte once per job.

A rank requests a shard from the shard's home rank, which fetches it once and sends its bytes while they arrive. One
thread per rank makes all MPI calls on its own communicator, with tests and short sleeps and without blocking calls, so
the collectives of training are not delayed. If the home rank does not answer before a deadline, the shard is read from
the remote.

Messages are bounded and typed: they are arrays of known length, the number and size of a shard are checked, and its
bytes are used only if they have the digest of the sender's copy, which follows the bytes. An empty message ends a reply
early: the home rank could not fetch the rest. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.open_shards import ShardFile
from topkube.data.cache.shard_cache import ShardSource
from topkube.data.cache.shard_file import ArrivingShard, Received, ShardWriter
from topkube.data.formats.shards import DataShard
from topkube.errors import StoreError, TopKubeError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache

CHUNK_BYTES = 2 << 20
_REQUEST, _GOODBYE, _FIRST_REPLY, _REPLIES = 1, 2, 16, 30_000
_HEADER = 2
"""The elements at the start of a reply: the shard's number and its size. The digest at its end has two halves."""
_NO_SIZE = (1 << 64) - 1
"""The size in a header if this rank cannot send the shard."""
_IDLE_SECONDS = (0.002, 0.01)
"""The shortest and the longest sleep between two tests of the requests. The shortest follows a test that found
progress."""
_SPARE_BUFFERS = 8
_UNDER_WAY = 2
"""The number of chunks of a shard that are posted at the same time."""
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class _Pull:
    """A shard that this rank receives. The result of `done` is the digest of the sender's copy."""

    def __init__(self, home: int, shard: DataShard, writer: ShardWriter) -> None:
        self.home_rank, self.shard, self.writer = home, shard, writer
        self.done: Future[str] = Future()
        self.header: Words = np.empty(_HEADER, np.uint64)
        self.chunks: deque[tuple[Any, Any, int]] = deque()
        """The posted receives: request, buffer, offset."""
        self.tag = 0
        self.posted = self.received = 0
        self.header_request: Any = None
        self.ending: tuple[Any, Words] | None = None
        """The posted receive of the digest, and its buffer."""
        self.moved = time.monotonic()


class _Push:
    """A shard that this rank sends. `source`: the whole shard, or the shard that arrives."""

    def __init__(self, to: int, tag: int, number: int, provided: Future[tuple[ShardFile, str]]) -> None:
        self.to, self.tag, self.number, self.provided = to, tag, number, provided
        self.sends: deque[tuple[Any, Any]] = deque()
        self.source: ShardFile | ArrivingShard | None = None
        self.sent = 0
        self.size: int | None = None
        self.is_ended = False
        """True if nothing more is sent."""
        self.moved = time.monotonic()


class ShardExchange:
    """Sends shards to other ranks and receives shards from them. The constructor is a collective."""

    def __init__(self, cache: ShardCache, place: RankPlace) -> None:
        self._cache, self._place = cache, place
        self._comm = place.world.comm.Dup()
        cache.is_exchanged = True
        self._new_pulls: queue.SimpleQueue[_Pull] = queue.SimpleQueue()
        self._gone: set[int] = set()
        self._providers = ThreadPoolExecutor(2, "topkube-provide")
        self._pulls: list[_Pull] = []
        self._pushes: list[_Push] = []
        self._abandoned: list[tuple[Any, Any]] = []
        """Cancelled requests and their buffers, which MPI may write to until the requests are complete."""
        self._retired: set[tuple[int, int]] = set()
        """The ranks and tags of pulls that were given up. These tags are not used again, since messages may follow."""
        self._spare: list[Bytes] = []
        """Buffers of CHUNK_BYTES that are used again: new pages cost as much time as filling them."""
        self._replies = 0
        self._stopping = threading.Event()
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="topkube-exchange", daemon=True)
        self._thread.start()

    # ---- requests

    def source(self, home: int) -> ShardSource:
        """Return a source that receives shards from rank `home`, and from the remote if that rank cannot send them."""

        def receive_shard(shard: DataShard, file: int) -> Received:
            if self._dead is None and home not in self._gone and not self._stopping.is_set():
                with ShardWriter(file) as writer:  # nothing is written after its end, also after a timeout
                    pull = _Pull(home, shard, writer)
                    self._new_pulls.put(pull)
                    with contextlib.suppress(TopKubeError, TimeoutError, OSError):
                        expected = pull.done.result(self._cache.stall_seconds * 4 + shard.size / 1e6)
                        if writer.digest(shard.size) == expected:
                            return Received(expected, expected)
                        _report(f"shard {shard.number} from rank {home} is damaged; it is read from the remote instead")
                    pull.done.cancel()
            return self._cache.fetch_from_store(shard, file)

        return receive_shard

    # ---- the thread

    def _run(self) -> None:
        idle, longest = _IDLE_SECONDS
        try:
            while not self._stopping.is_set() or self._pushes:
                if self._make_progress():
                    idle = _IDLE_SECONDS[0]
                    continue
                time.sleep(idle)
                idle = min(idle * 1.2, longest)
        except BaseException as error:  # from now on all shards come from the remote
            self._dead = error
            _report(f"nodes no longer exchange shards ({type(error).__name__}: {error}); every node reads the remote")
        finally:
            self._fail_pulls()

    def _fail_pulls(self) -> None:
        while not self._new_pulls.empty():
            self._pulls.append(self._new_pulls.get())
        for pull in self._pulls:
            _fail(pull, StoreError("the exchange between nodes has ended"))
        self._pulls.clear()

    def _make_progress(self) -> bool:
        """Test all requests once. Return True if there was progress."""
        moved = self._accept_messages()
        while not self._new_pulls.empty():
            self._request(self._new_pulls.get())
            moved = True
        now = time.monotonic()
        self._abandoned = [(request, buffer) for request, buffer in self._abandoned if not request.Test()]
        for pull in list(self._pulls):
            if pull.done.cancelled():
                self._give_up(pull)
            elif self._receive(pull):
                moved, pull.moved = True, now
            elif now - pull.moved > self._cache.stall_seconds or pull.home_rank in self._gone:
                self._give_up(pull)
        for push in list(self._pushes):
            if self._send(push):
                moved, push.moved = True, now
            elif not push.sends:  # this rank waits for the remote
                push.moved = now
            elif now - push.moved > self._cache.stall_seconds:
                self._drop(push)
        return moved

    def _accept_messages(self) -> bool:
        from mpi4py import MPI

        status, moved = MPI.Status(), False
        while self._comm.Iprobe(MPI.ANY_SOURCE, _GOODBYE, status):
            self._comm.Recv(np.empty(1, np.int64), status.source, _GOODBYE)
            self._gone.add(status.source)
        while self._comm.Iprobe(MPI.ANY_SOURCE, _REQUEST, status):
            request = np.empty(2, np.int64)
            self._comm.Recv(request, status.source, _REQUEST)
            number, tag = int(request[0]), int(request[1])
            if not _FIRST_REPLY <= tag < _FIRST_REPLY + _REPLIES or not 0 <= number < len(self._cache.shards):
                _report(
                    f"rank {status.source} requested shard {number} with tag {tag}; one of these numbers is invalid"
                )
                continue
            provided = self._providers.submit(self._provide, number)
            self._pushes.append(_Push(status.source, tag, number, provided))
            moved = True
        return moved

    def _provide(self, number: int) -> tuple[ShardFile, str]:
        """Return the open shard and the digest of this node's copy."""
        shard = self._cache.open(number, self._cache.fetch_from_store)
        return shard, self._cache.digest(shard)

    def _request(self, pull: _Pull) -> None:
        if pull.done.cancelled():
            return
        while (pull.home_rank, tag := _FIRST_REPLY + self._replies % _REPLIES) in self._retired:
            self._replies += 1
            if len(self._retired) >= _REPLIES:
                _fail(pull, StoreError("other ranks left too many requests without an answer"))
                return
        pull.tag = tag
        self._replies += 1
        pull.header_request = self._comm.Irecv(pull.header, pull.home_rank, pull.tag)
        self._comm.Isend(np.array([pull.shard.number, pull.tag], np.int64), pull.home_rank, _REQUEST).Wait()
        pull.moved = time.monotonic()
        self._pulls.append(pull)

    def _receive(self, pull: _Pull) -> bool:
        from mpi4py import MPI

        if pull.header_request is not None:
            if not pull.header_request.Test():
                return False
            pull.header_request = None
            if pull.header.tolist() != [pull.shard.number, pull.shard.size]:
                if pull.header[1] != _NO_SIZE:  # the bytes of a shard may follow
                    self._retired.add((pull.home_rank, pull.tag))
                self._pulls.remove(pull)
                _fail(pull, StoreError(f"rank {pull.home_rank} has no shard {pull.shard.number}"))
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
            self._give_back(buffer)
            self._cache.node_state.advance(buffer.size)
            self._cache.counters.add("peer_bytes", buffer.size)
            moved = True
        while pull.posted < pull.shard.size and len(pull.chunks) < _UNDER_WAY:
            buffer = self._take_buffer(pull.shard.size - pull.posted)
            pull.chunks.append((self._comm.Irecv(buffer, pull.home_rank, pull.tag), buffer, pull.posted))
            pull.posted += buffer.size
        return self._receive_digest(pull) if pull.received == pull.shard.size else moved

    def _receive_digest(self, pull: _Pull) -> bool:
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
        self._pulls.remove(pull)
        with contextlib.suppress(InvalidStateError):  # another thread has just cancelled it
            pull.done.set_result("".join(f"{half:016x}" for half in halves.tolist()))
        return True

    def _give_up(self, pull: _Pull, error: Exception | None = None) -> None:
        """Stop receiving. MPI may still write to the buffers of matched requests. The tag is not used again, because
        the sender may continue for a while."""
        posted = [(pull.header_request, pull.header)] if pull.header_request is not None else []
        posted += [(request, buffer) for request, buffer, _ in pull.chunks]
        posted += [pull.ending] if pull.ending is not None else []
        for request, _ in posted:
            request.Cancel()
        self._abandoned += posted
        self._retired.add((pull.home_rank, pull.tag))
        self._pulls.remove(pull)
        _fail(pull, error or StoreError(f"rank {pull.home_rank} does not answer"))

    def _send(self, push: _Push) -> bool:
        if push.size is None:
            return self._begin_reply(push)
        moved = False
        while push.sends and push.sends[0][0].Test():
            self._give_back(push.sends.popleft()[1])
            moved = True
        while push.sent < push.size and len(push.sends) < _UNDER_WAY and not push.is_ended:
            count = min(CHUNK_BYTES, push.size - push.sent)
            if not self._has_arrived(push, push.sent + count):
                break
            buffer = self._take_buffer(push.size - push.sent)
            assert push.source is not None
            if not _read_chunk(push.source.file, buffer, push.sent):
                self._end_early(push)
                break
            self._post(push, buffer)
            push.sent += buffer.size
            moved = True
        if push.sent == push.size and not push.is_ended and (hashed := self._find_digest(push)):
            self._post(push, np.array([int(hashed[:16], 16), int(hashed[16:], 16)], np.uint64))
            push.is_ended = moved = True
        if push.is_ended and not push.sends:
            self._pushes.remove(push)
            return True
        return moved

    def _begin_reply(self, push: _Push) -> bool:
        """Send the header if this rank has the shard, or if the shard arrives in order from now on."""
        if push.provided.done():
            try:
                push.source = push.provided.result()[0]
            except Exception as error:  # the other rank reads the remote, and reports its own error
                if not isinstance(error, TopKubeError):
                    _report(f"shard {push.number} cannot be sent to another node ({type(error).__name__}: {error})")
                push.size, push.is_ended = 0, True
                self._post(push, np.array((push.number, _NO_SIZE), np.uint64))
                return True
            push.size = push.source.shard.size
        else:
            arriving = self._cache.find_arriving(push.number)
            if arriving is None or arriving.is_over or arriving.written <= 0:
                return False
            push.source, push.size = arriving, arriving.size
        self._post(push, np.array((push.number, push.size), np.uint64))
        return True

    def _has_arrived(self, push: _Push, end: int) -> bool:
        """Return True if the shard has its bytes up to `end`. If they do not arrive any more, end the reply."""
        source = push.source
        if not isinstance(source, ArrivingShard):
            return True
        is_over = source.is_over  # before the number of bytes is read
        if source.written >= end:
            return True
        if is_over or source.written < 0:
            self._end_early(push)
        return False

    def _find_digest(self, push: _Push) -> str:
        """Return the digest of the shard whose bytes were sent; an empty text as long as it is not known. If the bytes
        were wrong, end the reply."""
        source = push.source
        if not isinstance(source, ArrivingShard):
            return push.provided.result()[1]
        if source.is_over and not source.digest:
            self._end_early(push)
        return source.digest

    def _end_early(self, push: _Push) -> None:
        """Send an empty message in place of the rest of the shard. The other rank then reads the remote."""
        push.is_ended = True
        self._post(push, np.empty(0, np.uint8))

    def _take_buffer(self, left: int) -> Bytes:
        """Return a buffer for the next chunk of a shard of which `left` bytes are left."""
        if left >= CHUNK_BYTES and self._spare:
            return self._spare.pop()
        return np.empty(min(CHUNK_BYTES, left), np.uint8)

    def _give_back(self, buffer: Any) -> None:
        """Keep the buffer of a completed request for another chunk."""
        if buffer.nbytes == CHUNK_BYTES and len(self._spare) < _SPARE_BUFFERS:
            self._spare.append(buffer)

    def _drop(self, push: _Push) -> None:
        self._abandoned += push.sends
        self._pushes.remove(push)

    def _post(self, push: _Push, buffer: Any) -> None:
        push.sends.append((self._comm.Isend(buffer, push.to, push.tag), buffer))

    def close(self) -> None:
        """Finish the shards that are being sent, then announce to the other ranks that this rank no longer answers."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(self._cache.stall_seconds)
        self._providers.shutdown(wait=False, cancel_futures=True)
        if self._dead is None and not self._thread.is_alive():
            with contextlib.suppress(Exception):
                for rank in range(self._place.size):
                    if rank != self._place.rank:
                        self._comm.Isend(np.zeros(1, np.int64), rank, _GOODBYE).Free()


def _fail(pull: _Pull, error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        pull.done.set_exception(error)


def _report(text: str) -> None:
    print(f"topkube: {text}", file=sys.stderr, flush=True)


def _read_chunk(file: int, buffer: Any, offset: int) -> bool:
    view = memoryview(buffer)
    while view:
        done = os.preadv(file, [view], offset)
        if done <= 0:
            return False
        view, offset = view[done:], offset + done
    return True
