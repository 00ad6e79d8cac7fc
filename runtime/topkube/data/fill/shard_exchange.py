"""The exchange of shards between nodes over MPI, so that the remote sends each byte once per job.

A rank requests a shard from the shard's home rank, which fetches it once and sends its bytes while they arrive. One
thread per rank makes the MPI calls of the exchange, on its own communicator. It tests the MPI operations and sleeps for
short times. It makes no blocking calls, so the collectives of training are not delayed. If the home rank does not
answer before a deadline, the shard is read from the remote.

Messages are bounded and typed. They are arrays of known length, and the number and the size of a shard are checked. The
digest of the sender's copy follows the bytes of a shard, and the bytes are used only if they have this digest. If the
home rank cannot fetch the rest of a shard, an empty message ends its reply. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.disk.shard_file import ReceivedChecksums, ShardWriter
from topkube.data.cache.shard_fetcher import ShardSource
from topkube.data.fill.shard_messages import FIRST_REPLY, GOODBYE, REPLY_TAGS, REQUEST, MessageBuffers, print_message
from topkube.data.fill.shard_receiver import Pull, ShardReceiver
from topkube.data.fill.shard_sender import ShardSender
from topkube.data.formats.shards import DataShard
from topkube.errors import TopKubeError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache

_IDLE_SECONDS = (0.002, 0.01, 0.1)
"""The sleep after progress, the longest sleep while progress is recent, and the longest sleep after _REST_AFTER_SECONDS
without progress: training needs the processor. If this rank requests a shard, the thread wakes at once."""
_REST_AFTER_SECONDS = 2.0
_GOODBYE_BODY = np.zeros(1, np.int64)
"""A constant, because nothing waits until MPI has sent it."""


class ShardExchange:
    """Sends shards to other ranks and receives shards from them. The constructor is a collective."""

    def __init__(self, cache: ShardCache, place: RankPlace) -> None:
        self._cache, self._place = cache, place
        self._comm = place.world.comm.Dup()
        cache.fetcher.is_exchanged = True
        self._new_pulls: queue.SimpleQueue[Pull] = queue.SimpleQueue()
        self._departed: set[int] = set()
        """The ranks that have announced that they answer no more."""
        buffers = self._buffers = MessageBuffers()
        self._receiver = ShardReceiver(cache, self._comm, buffers)
        self._sender = ShardSender(cache, self._comm, buffers)
        self._stopping, self._wake = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        """The error that has ended the exchange."""
        self._thread = threading.Thread(target=self._run, name="topkube-exchange", daemon=True)
        self._thread.start()

    def build_source(self, home: int) -> ShardSource:
        """Return a source that receives shards from rank `home`, or reads the remote if that rank cannot send them."""

        def receive_shard(shard: DataShard, file: int) -> ReceivedChecksums:
            if self._error is None and home not in self._departed and not self._stopping.is_set():
                with ShardWriter(file) as writer:  # nothing is written after its end, not even after a timeout
                    pull = Pull(home, shard, writer)
                    self._new_pulls.put(pull)
                    self._wake.set()
                    with contextlib.suppress(TopKubeError, TimeoutError, OSError):
                        # Wait for a few stalls, and for the bytes at 1 MB/s.
                        expected = pull.digest.result(self._cache.stall_seconds * 4 + shard.size / 1e6)
                        if writer.compute_digest(shard.size) == expected:
                            return ReceivedChecksums(expected, expected)
                        print_message(
                            f"shard {shard.cache_number} from rank {home} is damaged; "
                            "it is read from the remote instead"
                        )
                    pull.digest.cancel()
            return self._cache.fetch_from_store(shard, file)

        return receive_shard

    def _run(self) -> None:
        """Make progress until the exchange is closed and all shards that were begun are sent."""
        idle, progress_time = _IDLE_SECONDS[0], time.monotonic()
        try:
            while not self._stopping.is_set() or self._sender.pushes:
                self._wake.clear()
                if self._make_progress():
                    idle, progress_time = _IDLE_SECONDS[0], time.monotonic()
                    continue
                self._wake.wait(idle)
                idle = _lengthen(idle, time.monotonic() - progress_time)
        except BaseException as error:  # from now on all shards come from the remote
            self._error = error
            print_message(
                f"nodes no longer exchange shards ({type(error).__name__}: {error}); every node reads the remote"
            )
        finally:
            self._fail_pulls()

    def _fail_pulls(self) -> None:
        """End all pulls, so that no caller waits for a shard after the end of the thread."""
        while not self._new_pulls.empty():
            self._receiver.pulls.append(self._new_pulls.get())
        self._receiver.fail_all()

    def _make_progress(self) -> bool:
        """Test all MPI operations once. Return True if there was progress."""
        has_progress = self._accept_messages()
        while not self._new_pulls.empty():
            self._receiver.request(self._new_pulls.get())
            has_progress = True
        self._buffers.drop_completed()
        has_received = self._receiver.make_progress(self._departed)
        has_sent = self._sender.make_progress()
        return has_progress or has_received or has_sent

    def _accept_messages(self) -> bool:
        """Receive requests for shards and announcements. Return True if there was a valid request."""
        from mpi4py import MPI

        status, has_progress = MPI.Status(), False
        while self._comm.Iprobe(MPI.ANY_SOURCE, GOODBYE, status):
            self._comm.Recv(np.empty(1, np.int64), status.source, GOODBYE)
            self._departed.add(status.source)
        while self._comm.Iprobe(MPI.ANY_SOURCE, REQUEST, status):
            request = np.empty(2, np.int64)
            self._comm.Recv(request, status.source, REQUEST)
            number, tag = int(request[0]), int(request[1])
            if not FIRST_REPLY <= tag < FIRST_REPLY + REPLY_TAGS or not 0 <= number < len(self._cache.shards):
                print_message(
                    f"rank {status.source} requested shard {number} with tag {tag}; one of these numbers is invalid"
                )
                continue
            self._sender.reply(status.source, tag, number)
            has_progress = True
        return has_progress

    def close(self) -> None:
        """Wait at most `stall_seconds` seconds until the shards that are being sent are complete. If they are, announce
        to the ranks that could request shards that this rank sends no more. A message to every rank would open a
        connection to every rank."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake.set()
        self._thread.join(self._cache.stall_seconds)
        self._sender.close()
        if self._error is None and not self._thread.is_alive():
            with contextlib.suppress(Exception):
                for rank in self._place.list_requesters(len(self._cache.shards)):
                    self._comm.Isend(_GOODBYE_BODY, rank, GOODBYE).Free()


def _lengthen(idle: float, quiet_seconds: float) -> float:
    """Return the sleep after a sleep of `idle` seconds, if there has been no progress for `quiet_seconds`."""
    _, longest, resting = _IDLE_SECONDS
    return min(idle * 1.2, longest if quiet_seconds < _REST_AFTER_SECONDS else resting)
