"""Fills the cache of a node without training, for `topkube cache warm`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from topkube.data.cache.node_state import OPEN
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.fill.disk_filler import THREADS
from topkube.data.fill.file_view import COMPLETE, FileView
from topkube.data.remote.listing import Listing
from topkube.errors import CacheError, DatasetError


@dataclass(frozen=True)
class WarmResult:
    """The result of `warm`: `shards` of `total` shards are in the cache, and `remote_bytes` were fetched."""

    total: int
    shards: int
    remote_bytes: int

    @property
    def is_complete(self) -> bool:
        """True if all shards are in the cache."""
        return self.shards == self.total


def warm(
    cache: ShardCache,
    *,
    share: tuple[int, int] = (0, 1),
    view: Path | None = None,
    progress: Callable[[int], None] = lambda size: None,
    stop: threading.Event | None = None,
) -> WarmResult:
    """Fetch shards into the disk tier until all are there, the tier is full, or `stop` is set.

    `share=(i, n)`: fetch only every n-th shard, from shard i on, because n nodes exchange shards when they train.
    `view`: a directory in which the dataset's files are shown too. `progress` gets the bytes of each shard after the
    shard was fetched. Raises DatasetError if `view` has other files, CacheError if it cannot be written, and StoreError
    after all other shards were fetched. If this thread is interrupted (Ctrl-C), no further shard is begun.
    """
    shards = range(share[0], len(cache.shards), share[1])
    file_view = None
    if view is not None:
        _refuse_other_files(cache.shards.listing, view)
        try:
            file_view = FileView(cache, view)
        except OSError as refusal:
            raise _describe_view_error(view, refusal) from refusal

    def fetch_shard(number: int) -> None:
        if stop is not None and stop.is_set():
            return
        if file_view is not None:
            try:
                file_view.show(number)
            except OSError as refusal:
                raise _describe_view_error(file_view.directory, refusal) from refusal
        elif cache.disk_state == OPEN and not cache.has_samples(number):
            cache.open_samples(number, cache.fetch_from_store)
        progress(int(cache.shards.sizes[number]))

    with ThreadPoolExecutor(THREADS, "topkube-warm") as pool:
        futures = [pool.submit(fetch_shard, number) for number in shards]
        try:
            failures = [error for future in futures if (error := future.exception()) is not None]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failures:
        raise failures[0]
    cached = sum(cache.has(number) for number in shards)
    return WarmResult(len(shards), cached, int(cache.counters.sum_rows()["remote_bytes"]))


def _refuse_other_files(listing: Listing, view: Path) -> None:
    """Raise DatasetError if the directory `view` has a file that the view would remove or replace, and that is not a
    file of an earlier view: those are read-only."""
    if not any(names for _, _, names in os.walk(view)):
        return  # the usual case: no set of the paths of all objects
    listed = {listing.paths[index] for index in range(len(listing))}
    for folder, _, names in os.walk(view):
        for name in names:
            path = Path(folder, name)
            inside = path.relative_to(view).as_posix()
            is_unfinished = name.startswith(".") and name.endswith(".part")
            is_shown = inside == COMPLETE or (inside in listed and not path.lstat().st_mode & 0o222)
            if not is_unfinished and not is_shown:
                raise DatasetError(
                    f"--view {view} has files that are not of a view of this dataset, such as {inside}",
                    cause="the folder is in use for something else, or the dataset has changed",
                    next_step="name a new folder",
                )


def _describe_view_error(view: Path, error: OSError) -> CacheError:
    return CacheError(
        f"--view {view} cannot be written: {error.strerror}",
        cause="the folder is not writable, its disk is full, or a file has its name",
        next_step="name another folder; the shards that were fetched stay in the cache",
    )
