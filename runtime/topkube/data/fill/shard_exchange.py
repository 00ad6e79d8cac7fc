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
import queue
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.shard_cache import ShardSource
from topkube.data.cache.shard_file import Received, ShardWriter
from topkube.data.fill.shard_messages import FIRST_REPLY, GOODBYE, REPLIES, REQUEST, MessageBuffers, report
from topkube.data.fill.shard_receiver import Pull, ShardReceiver
from topkube.data.fill.shard_sender import ShardSender
from topkube.data.formats.shards import DataShard
from topkube.errors import TopKubeError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache

_IDLE_SECONDS = (0.002, 0.01, 0.1)
"""The shortest, the longest and the resting sleep between two tests of the requests. The shortest follows a test that
found progress. The thread rests if there has been no progress for _REST_AFTER_SECONDS, because training needs the
processor; a request of this rank ends its sleep."""
_REST_AFTER_SECONDS = 2.0


class ShardExchange:
    """Sends shards to other ranks and receives shards from them. The constructor is a collective."""

    def __init__(self, cache: ShardCache, place: RankPlace) -> None:
        self._cache, self._place = cache, place
        self._comm = place.world.comm.Dup()
        cache.is_exchanged = True
        self._new_pulls: queue.SimpleQueue[Pull] = queue.SimpleQueue()
        self._gone: set[int] = set()
        buffers = self._buffers = MessageBuffers()
        self._receiver = ShardReceiver(cache, self._comm, buffers)
        self._sender = ShardSender(cache, self._comm, buffers)
        self._stopping, self._wake = threading.Event(), threading.Event()
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="topkube-exchange", daemon=True)
        self._thread.start()

    def source(self, home: int) -> ShardSource:
        """Return a source that receives shards from rank `home`, and from the remote if that rank cannot send them."""

        def receive_shard(shard: DataShard, file: int) -> Received:
            if self._dead is None and home not in self._gone and not self._stopping.is_set():
                with ShardWriter(file) as writer:  # nothing is written after its end, also after a timeout
                    pull = Pull(home, shard, writer)
                    self._new_pulls.put(pull)
                    self._wake.set()
                    with contextlib.suppress(TopKubeError, TimeoutError, OSError):
                        expected = pull.done.result(self._cache.stall_seconds * 4 + shard.size / 1e6)
                        if writer.digest(shard.size) == expected:
                            return Received(expected, expected)
                        report(f"shard {shard.number} from rank {home} is damaged; it is read from the remote instead")
                    pull.done.cancel()
            return self._cache.fetch_from_store(shard, file)

        return receive_shard

    def _run(self) -> None:
        idle, moved = _IDLE_SECONDS[0], time.monotonic()
        try:
            while not self._stopping.is_set() or self._sender.pushes:
                self._wake.clear()
                if self._make_progress():
                    idle, moved = _IDLE_SECONDS[0], time.monotonic()
                    continue
                self._wake.wait(idle)
                idle = _lengthen(idle, time.monotonic() - moved)
        except BaseException as error:  # from now on all shards come from the remote
            self._dead = error
            report(f"nodes no longer exchange shards ({type(error).__name__}: {error}); every node reads the remote")
        finally:
            self._fail_pulls()

    def _fail_pulls(self) -> None:
        while not self._new_pulls.empty():
            self._receiver.pulls.append(self._new_pulls.get())
        self._receiver.fail()

    def _make_progress(self) -> bool:
        """Test all requests once. Return True if there was progress."""
        moved = self._accept_messages()
        while not self._new_pulls.empty():
            self._receiver.request(self._new_pulls.get())
            moved = True
        self._buffers.drop_completed()
        has_received = self._receiver.make_progress(self._gone)
        has_sent = self._sender.make_progress()
        return moved or has_received or has_sent

    def _accept_messages(self) -> bool:
        from mpi4py import MPI

        status, moved = MPI.Status(), False
        while self._comm.Iprobe(MPI.ANY_SOURCE, GOODBYE, status):
            self._comm.Recv(np.empty(1, np.int64), status.source, GOODBYE)
            self._gone.add(status.source)
        while self._comm.Iprobe(MPI.ANY_SOURCE, REQUEST, status):
            request = np.empty(2, np.int64)
            self._comm.Recv(request, status.source, REQUEST)
            number, tag = int(request[0]), int(request[1])
            if not FIRST_REPLY <= tag < FIRST_REPLY + REPLIES or not 0 <= number < len(self._cache.shards):
                report(f"rank {status.source} requested shard {number} with tag {tag}; one of these numbers is invalid")
                continue
            self._sender.reply(status.source, tag, number)
            moved = True
        return moved

    def close(self) -> None:
        """Finish the shards that are being sent, then announce to the other ranks that this rank no longer answers."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake.set()
        self._thread.join(self._cache.stall_seconds)
        self._sender.close()
        if self._dead is None and not self._thread.is_alive():
            with contextlib.suppress(Exception):
                for rank in range(self._place.size):
                    if rank != self._place.rank:
                        self._comm.Isend(np.zeros(1, np.int64), rank, GOODBYE).Free()


def _lengthen(idle: float, quiet_seconds: float) -> float:
    """Return the sleep after a sleep of `idle` seconds, if there has been no progress for `quiet_seconds`."""
    _, longest, resting = _IDLE_SECONDS
    return min(idle * 1.2, longest if quiet_seconds < _REST_AFTER_SECONDS else resting)
