"""Filling a node's cache without training: `topkube cache warm`, and a pod's prefetch before its ranks start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from topkube.data.cache import Cache
from topkube.data.fill import THREADS
from topkube.data.session import OPEN
from topkube.data.view import View


@dataclass(frozen=True)
class Warmed:
    """What came of it. `shards` of `total` are in the cache now; `remote_bytes` were fetched for that."""

    total: int
    shards: int
    remote_bytes: int

    @property
    def complete(self) -> bool:
        return self.shards == self.total


def warm(
    cache: Cache,
    *,
    share: tuple[int, int] = (0, 1),
    view: Path | None = None,
    progress: Callable[[int], None] = lambda size: None,
    stop: threading.Event | None = None,
) -> Warmed:
    """Brings shards into the disk tier until they are there, the tier is full, or `stop` is set. `share=(i, n)`: only
    every n-th shard from i on, for n nodes that start together and pass shards on while they train. `view`: also show
    the dataset's files there. `progress` gets the bytes of every shard that is done. Raises StoreError."""
    shards = range(share[0], len(cache.shards), share[1])
    shown = View(cache, view) if view is not None else None

    def bring(number: int) -> None:
        if stop is not None and stop.is_set():
            return
        if shown is not None:
            shown.show(number)
        elif cache.state == OPEN and not cache.has(number):
            cache.open(number, cache.from_store)
        progress(int(cache.shards.sizes[number]))

    with ThreadPoolExecutor(THREADS, "topkube-warm") as pool:
        for done in [pool.submit(bring, number) for number in shards]:
            done.result()
    held = sum(cache.has(number) for number in shards)
    return Warmed(len(shards), held, int(cache.counters.totals()["remote_bytes"]))
