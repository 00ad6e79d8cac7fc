"""Fills the cache of a node without training, for `topkube cache warm`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from topkube.data.cache.node_state import OPEN
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.fill.disk_filler import THREADS
from topkube.data.fill.file_view import FileView


@dataclass(frozen=True)
class Warmed:
    """The result of warming: `shards` of `total` shards are in the cache; `remote_bytes` were fetched."""

    total: int
    shards: int
    remote_bytes: int

    @property
    def complete(self) -> bool:
        return self.shards == self.total


def warm(
    cache: ShardCache,
    *,
    share: tuple[int, int] = (0, 1),
    view: Path | None = None,
    progress: Callable[[int], None] = lambda size: None,
    stop: threading.Event | None = None,
) -> Warmed:
    """Fetch shards into the disk tier until all are there, the tier is full, or `stop` is set.

    `share=(i, n)`: only every n-th shard from shard i on, for n nodes that exchange shards when they train. `view`: a
    directory in which the dataset's files are shown too. `progress` gets the bytes of every shard that is done. Raises
    StoreError.
    """
    shards = range(share[0], len(cache.shards), share[1])
    file_view = FileView(cache, view) if view is not None else None

    def fetch_shard(number: int) -> None:
        if stop is not None and stop.is_set():
            return
        if file_view is not None:
            file_view.show(number)
        elif cache.state == OPEN and not cache.has_samples(number):
            cache.open_samples(number, cache.fetch_from_store)
        progress(int(cache.shards.sizes[number]))

    with ThreadPoolExecutor(THREADS, "topkube-warm") as pool:
        for done in [pool.submit(fetch_shard, number) for number in shards]:
            done.result()
    cached = sum(cache.has(number) for number in shards)
    return Warmed(len(shards), cached, int(cache.counters.totals()["remote_bytes"]))
