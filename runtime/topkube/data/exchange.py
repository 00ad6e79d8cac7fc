"""Passing shards between nodes over MPI, so that the remote sends each byte once per job.

A rank asks the shard's home rank, which fetches it (once) and sends it on. One thread per rank makes all MPI calls on a
communicator of its own, with tests and short sleeps, never a blocking call: training's collectives are not held up, and
a rank that is gone costs a deadline, after which the shard comes from the remote after all.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from topkube.data.cache import ShardFile, Source
from topkube.data.place import Place
from topkube.data.shards import Shard
from topkube.errors import StoreError, TopKubeError

if TYPE_CHECKING:
    from topkube.data.cache import Cache

CHUNK_BYTES = 2 << 20
_REQUEST, _GOODBYE, _FIRST_REPLY, _REPLIES = 1, 2, 16, 30_000
_NOT_HERE = -1
_IDLE_SECONDS = 0.002
_UNDER_WAY = 2
"""Chunks of one shard posted at once."""


class _Pull:
    """A shard that another rank sends us."""

    def __init__(self, home: int, shard: Shard, file: int) -> None:
        self.home, self.shard, self.file = home, shard, file
        self.done: Future[None] = Future()
        self.header = np.empty(1, np.int64)
        self.chunks: deque[tuple[Any, Any, int]] = deque()
        """Receives that are posted: request, buffer, offset."""
        self.tag = 0
        self.posted = self.received = 0
        self.first: Any = None
        self.moved = time.monotonic()


class _Push:
    """A shard that we send to another rank."""

    def __init__(self, to: int, tag: int, provided: Future[ShardFile]) -> None:
        self.to, self.tag, self.provided = to, tag, provided
        self.sends: deque[tuple[Any, Any]] = deque()
        self.sent = 0
        self.size: int | None = None
        self.moved = time.monotonic()


class Exchange:
    """This rank's door to other nodes. The constructor is a collective."""

    def __init__(self, cache: Cache, place: Place) -> None:
        self._cache, self._place = cache, place
        self._comm = place.world.comm.Dup()
        self._orders: queue.SimpleQueue[_Pull] = queue.SimpleQueue()
        self._gone: set[int] = set()
        self._providers = ThreadPoolExecutor(2, "topkube-provide")
        self._pulls: list[_Pull] = []
        self._pushes: list[_Push] = []
        self._replies = 0
        self._stopping = threading.Event()
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="topkube-exchange", daemon=True)
        self._thread.start()

    # ---- asking

    def source(self, home: int) -> Source:
        """Shards from rank `home`; from the remote where that rank cannot give them."""

        def bring(shard: Shard, file: int) -> None:
            if self._dead is None and home not in self._gone and not self._stopping.is_set():
                pull = _Pull(home, shard, file)
                self._orders.put(pull)
                with contextlib.suppress(TopKubeError, TimeoutError):
                    pull.done.result(self._cache.stall_seconds * 4 + shard.size / 1e6)
                    return
            self._cache.from_store(shard, file)

        return bring

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() or self._pushes:
                if not self._turn():
                    time.sleep(_IDLE_SECONDS)
        except BaseException as error:  # from here on everything comes from the remote
            self._dead = error
        finally:
            self._fail_pulls()

    def _fail_pulls(self) -> None:
        while not self._orders.empty():
            self._pulls.append(self._orders.get())
        for pull in self._pulls:
            if not pull.done.done():
                pull.done.set_exception(StoreError("the exchange between nodes has ended"))
        self._pulls.clear()

    def _turn(self) -> bool:
        """One look at everything under way; whether anything moved."""
        moved = self._accept()
        while not self._orders.empty():
            self._ask(self._orders.get())
            moved = True
        now = time.monotonic()
        for pull in list(self._pulls):
            if self._receive(pull):
                moved, pull.moved = True, now
            elif now - pull.moved > self._cache.stall_seconds or pull.home in self._gone:
                self._give_up(pull)
        for push in list(self._pushes):
            if self._send(push):
                moved, push.moved = True, now
            elif push.size is not None and now - push.moved > self._cache.stall_seconds:
                self._pushes.remove(push)
        return moved

    def _accept(self) -> bool:
        from mpi4py import MPI

        status, moved = MPI.Status(), False
        while self._comm.Iprobe(MPI.ANY_SOURCE, _GOODBYE, status):
            self._comm.Recv(np.empty(1, np.int64), status.source, _GOODBYE)
            self._gone.add(status.source)
        while self._comm.Iprobe(MPI.ANY_SOURCE, _REQUEST, status):
            asked = np.empty(2, np.int64)
            self._comm.Recv(asked, status.source, _REQUEST)
            number, tag = int(asked[0]), int(asked[1])
            provided = self._providers.submit(self._provide, number)
            self._pushes.append(_Push(status.source, tag, provided))
            moved = True
        return moved

    def _provide(self, number: int) -> ShardFile:
        return self._cache.open(number, self._cache.from_store)

    def _ask(self, pull: _Pull) -> None:
        pull.tag = _FIRST_REPLY + self._replies % _REPLIES
        self._replies += 1
        pull.first = self._comm.Irecv(pull.header, pull.home, pull.tag)
        self._comm.Isend(np.array([pull.shard.number, pull.tag], np.int64), pull.home, _REQUEST).Wait()
        pull.moved = time.monotonic()
        self._pulls.append(pull)

    def _receive(self, pull: _Pull) -> bool:
        if pull.first is not None:
            if not pull.first.Test():
                return False
            pull.first = None
            if pull.header[0] != pull.shard.size:
                self._pulls.remove(pull)
                pull.done.set_exception(StoreError(f"rank {pull.home} has no shard {pull.shard.number}"))
                return True
        moved = False
        while pull.chunks and pull.chunks[0][0].Test():
            _, buffer, offset = pull.chunks.popleft()
            try:
                _write(pull.file, buffer, offset)
            except OSError as error:
                self._give_up(pull, error)
                return True
            pull.received += buffer.size
            self._cache.session.advance(buffer.size)
            self._cache.counters.add("peer_bytes", buffer.size)
            moved = True
        while pull.posted < pull.shard.size and len(pull.chunks) < _UNDER_WAY:
            buffer = np.empty(min(CHUNK_BYTES, pull.shard.size - pull.posted), np.uint8)
            pull.chunks.append((self._comm.Irecv(buffer, pull.home, pull.tag), buffer, pull.posted))
            pull.posted += buffer.size
        if pull.received == pull.shard.size:
            self._pulls.remove(pull)
            pull.done.set_result(None)
            return True
        return moved

    def _give_up(self, pull: _Pull, error: OSError | None = None) -> None:
        for request in (pull.first, *(chunk[0] for chunk in pull.chunks)):
            if request is not None:
                request.Cancel()
                request.Free()
        self._pulls.remove(pull)
        pull.done.set_exception(error or StoreError(f"rank {pull.home} does not answer"))

    def _send(self, push: _Push) -> bool:
        if push.size is None:
            if not push.provided.done():
                return False
            try:
                push.size = push.provided.result().shard.size
                header = push.size
            except TopKubeError:
                push.size, header = 0, _NOT_HERE
            self._post(push, np.array([header], np.int64))
            return True
        moved = False
        while push.sends and push.sends[0][0].Test():
            push.sends.popleft()
            moved = True
        while push.sent < push.size and len(push.sends) < _UNDER_WAY:
            buffer = np.empty(min(CHUNK_BYTES, push.size - push.sent), np.uint8)
            if not _read(push.provided.result().file, buffer, push.sent):
                self._pushes.remove(push)  # the other side gives up by its deadline
                return True
            self._post(push, buffer)
            push.sent += buffer.size
        if push.sent == push.size and not push.sends:
            self._pushes.remove(push)
            return True
        return moved

    def _post(self, push: _Push, buffer: Any) -> None:
        push.sends.append((self._comm.Isend(buffer, push.to, push.tag), buffer))

    def close(self) -> None:
        """Tells the others that nobody answers here any more, after what is on its way."""
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


def _write(file: int, buffer: Any, offset: int) -> None:
    view = memoryview(buffer)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _read(file: int, buffer: Any, offset: int) -> bool:
    view = memoryview(buffer)
    while view:
        done = os.preadv(file, [view], offset)
        if done <= 0:
            return False
        view, offset = view[done:], offset + done
    return True
