"""Fills the cache of a node in the background. Each rank fetches its share of the shards in the order of the epoch."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.node_state import OPEN
from topkube.data.cache.shard_fetcher import ShardSource
from topkube.data.fill.shard_exchange import ShardExchange
from topkube.data.remote.listing import Longs
from topkube.errors import StoreError, TopKubeError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache

THREADS = 3
"""The number of shards that a rank fetches at the same time."""


class DiskFiller:
    """Fetches the shards of this rank's share that are not in the node's cache.

    With several nodes, one rank of the job fetches each shard from the remote and sends it to the other nodes.
    """

    def __init__(self, cache: ShardCache, place: RankPlace) -> None:
        self._cache, self._place = cache, place
        total = len(cache.shards)
        self.share = [number for number in range(total) if place.find_filling_rank(number) == place.rank]
        """The shards that this rank puts into the cache of its node."""
        self._waiting: list[int] = self.share[::-1]
        """The order of the shards that are not being fetched yet; the last is the next. Shards that are not in
        `_not_begun` any more are skipped."""
        self._not_begun = set(self.share)
        self._change = threading.Condition()
        self._busy = 0
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._is_running = False
        self.failure: TopKubeError | None = None
        """The first error."""
        self._exchange = ShardExchange(cache, place) if len(place.node_ranks) > 1 else None
        self._sharing = _find_ranks_with_folder(cache, place) if self._exchange is not None else {place.rank}
        """The ranks that use the same folder. None of them can send a shard to another: one of the two would wait for
        the lock that the other holds."""

    def start(self) -> None:
        """Start the threads that fetch shards."""
        self._is_running = True
        self._cache.node_state.change_filler_count(+1)
        self._threads = [
            threading.Thread(target=self._run, name=f"topkube-fill-{index}", daemon=True) for index in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def prefer(self, order: Longs) -> None:
        """Fetch shards in this order, first to last, and all other shards afterwards."""
        position = np.full(len(self._cache.shards), order.size, np.int64)
        position[order] = np.arange(order.size)
        with self._change:
            self._waiting.sort(key=lambda number: -position[number])

    def _run(self) -> None:
        """Fetch shards until no shard is left, the tier takes no more shards, or `close` is called."""
        cache = self._cache
        while True:
            with self._change:
                if self._stopping or cache.disk_state != OPEN or not self._not_begun:
                    self._not_begun.clear()
                    self._end_if_last()
                    return
                number = self._choose_next()
                self._not_begun.discard(number)
                self._busy += 1
            try:
                if not cache.has_samples(number):
                    cache.open_samples(number, self._choose_source(number))
            except Exception as error:
                if not isinstance(error, TopKubeError):  # the thread must continue, because readers wait for this rank
                    error = StoreError(
                        f"shard {number} cannot be fetched ({type(error).__name__}: {error})",
                        cause="a bug in TopKube",
                        next_step="report it; training continues, and readers fetch the missing shards",
                    )
                if self.failure is None and not self._stopping:
                    self.failure = error
                    print(f"topkube: the cache could not be filled ahead: {error}", file=sys.stderr, flush=True)
            finally:
                cache.node_state.leave_to_readers(cache.shards.get_samples_shard(number).cache_number)
                with self._change:
                    self._busy -= 1
                    self._change.notify_all()

    def _choose_next(self) -> int:
        """Return the shard that is fetched next: a shard for which a reader waits, else the next in the order. At least
        one shard is not begun. The caller holds the condition."""
        for cache_number in self._cache.node_state.list_requested():
            if (number := cache_number % len(self._cache.shards)) in self._not_begun:
                return number
        while (number := self._waiting.pop()) not in self._not_begun:
            pass
        return number

    def _end_if_last(self) -> None:
        """If this is the last thread that ends, report that this rank no longer fills the tier, so that readers do not
        wait for it. The caller holds the condition."""
        if self._is_running and not self._busy:
            self._is_running = False
            self._cache.node_state.change_filler_count(-1)
            self._change.notify_all()

    def _choose_source(self, number: int) -> ShardSource:
        """Return the source of a shard: the remote if this rank must fetch it for the job, else another rank."""
        home = self._place.find_home_rank(number)
        if self._exchange is None or home in self._sharing:
            return self._cache.fetch_from_store
        return self._exchange.build_source(home)

    @property
    def is_running(self) -> bool:
        """True until this rank's share has been fetched or has failed."""
        return self._is_running

    def wait(self, progress: Callable[[int], None] | None = None) -> None:
        """Wait until this rank's share has been fetched or has failed. `progress` gets the number of shards that have
        been fetched or have failed. Raises the first error of the store."""
        with self._change:
            while self._is_running:
                self._change.wait(0.2)
                if progress is not None:
                    progress(len(self.share) - len(self._not_begun) - self._busy)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Fetch no more shards. Wait, at most 10 s per thread, for the shards that are being fetched."""
        with self._change:
            self._stopping = True
            self._not_begun.clear()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may call this in any thread
                thread.join(10)
        if self._exchange is not None:
            self._exchange.close()


def _find_ranks_with_folder(cache: ShardCache, place: RankPlace) -> set[int]:
    """Return the ranks whose caches are in the same folder as that of this rank. They may count as several nodes: the
    workers of a run on one machine, or several pods on a node. All ranks call this together."""
    identity = uuid.uuid4().hex if cache.folder is None else _identify_folder(cache.folder.path)
    own = np.array([xxhash.xxh3_64_intdigest(identity.encode()) >> 1], np.int64)
    identities = np.empty(place.size, np.int64)
    place.world.comm.Allgather(own, identities)
    return set(np.flatnonzero(identities == own[0]).tolist())


def _identify_folder(path: Path) -> str:
    """Return a text that is the same in all containers of a machine that see the folder."""
    try:
        status, boot = path.stat(), Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return uuid.uuid4().hex
    return f"{boot}\0{status.st_dev}\0{status.st_ino}"
