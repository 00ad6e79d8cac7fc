"""Fills the node's cache in the background: each rank brings its share of the shards, in the order of the epoch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from topkube.data.cache import Source
from topkube.data.exchange import Exchange
from topkube.data.listing import Longs
from topkube.data.place import Place
from topkube.data.session import OPEN
from topkube.errors import TopKubeError

if TYPE_CHECKING:
    from topkube.data.cache import Cache

THREADS = 3
"""Shards on their way at once, per rank."""


class Filler:
    """The shards of this rank's share that the node's cache lacks. Where nodes can reach one another every shard is
    fetched from the remote by one rank of the job; the others get it from there."""

    def __init__(self, cache: Cache, place: Place) -> None:
        self._cache, self._place = cache, place
        total = len(cache.shards)
        self.share = [number for number in range(total) if place.bringer(number) == place.rank]
        """The shards that this rank brings to its node."""
        self._waiting: list[int] = self.share[::-1]
        self._change = threading.Condition()
        self._busy = 0
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._running = False
        self.failure: TopKubeError | None = None
        self._exchange = Exchange(cache, place) if len(place.node_ranks) > 1 else None

    def start(self) -> None:
        self._running = True
        self._cache.session.filling(+1)
        self._threads = [
            threading.Thread(target=self._run, name=f"topkube-fill-{at}", daemon=True) for at in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def prefer(self, order: Longs) -> None:
        """`order`: shards as they will be needed, first to last. Those not named come last."""
        rank = np.full(len(self._cache.shards), order.size, np.int64)
        rank[order] = np.arange(order.size)
        with self._change:
            self._waiting.sort(key=lambda number: -rank[number])

    def _run(self) -> None:
        cache = self._cache
        while True:
            with self._change:
                if self._stopping or cache.state != OPEN or not self._waiting:
                    self._waiting.clear()
                    self._leave()
                    return
                number = self._waiting.pop()
                self._busy += 1
            try:
                if not cache.has(number):
                    cache.open(number, self._source(number))
            except TopKubeError as error:
                if self.failure is None and not self._stopping:
                    self.failure = error
                    print(f"topkube: the cache could not be filled ahead: {error}", file=sys.stderr, flush=True)
            finally:
                with self._change:
                    self._busy -= 1
                    self._change.notify_all()

    def _leave(self) -> None:
        """Of the last thread, under the condition: readers need not wait for this rank any longer."""
        if self._running and not self._busy:
            self._running = False
            self._cache.session.filling(-1)
            self._change.notify_all()

    def _source(self, number: int) -> Source:
        home = self._place.home(number)
        if self._exchange is None or home == self._place.rank:
            return self._cache.from_store
        return self._exchange.source(home)

    @property
    def running(self) -> bool:
        """Whether some of this rank's share is still to come."""
        return self._running

    @property
    def done(self) -> int:
        """Shards of this rank's share that need no more waiting for."""
        with self._change:
            return len(self.share) - len(self._waiting) - self._busy

    def wait(self, progress: Callable[[int], None] | None = None) -> None:
        """Until this rank's share is here, or cannot come. `progress` gets the number of shards done. Raises what the
        store raised."""
        with self._change:
            while self._running:
                self._change.wait(0.2)
                if progress is not None:
                    progress(len(self.share) - len(self._waiting) - self._busy)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Stops after the shards that are on their way."""
        with self._change:
            self._stopping = True
            self._waiting.clear()
        for thread in self._threads:
            thread.join(10)
        if self._exchange is not None:
            self._exchange.close()
