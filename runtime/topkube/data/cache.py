"""The cache of one dataset: a shard comes from the disk tier, or from the remote through it, or, where the tier takes
no more, from the remote alone. Nobody above sees the difference, except in time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

from topkube.data.counters import Counters
from topkube.data.dataset_folder import DatasetFolder
from topkube.data.disk_tier import DiskTier, Full, Limits
from topkube.data.sample_index import SampleIndex, files_index
from topkube.data.session import DROPPED, FROZEN, OPEN, Session
from topkube.data.shards import Shard, Shards
from topkube.data.store import Store
from topkube.data.stored_index import read_index, write_index
from topkube.data.tar import tar_index
from topkube.errors import DatasetError

Source = Callable[[Shard, int], None]
"""Puts a shard's bytes into a descriptor: from the store, or from another node."""
_OPEN_FILES = 400
_STREAM_BYTES = 1 << 30
"""Of shards that no tier takes, per process: a shuffle window of 16 shards of 64 MB should fit."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)
_POLL_SECONDS = 0.005


class ShardFile:
    """A whole shard, open for reading; closes with its last reference."""

    def __init__(self, shard: Shard, file: int, *, cached: bool) -> None:
        self.shard, self.file, self.cached = shard, file, cached

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.file)


class Cache:
    """Shards of a dataset by number. Threads may share it; forks go on with it."""

    def __init__(
        self,
        store: Store,
        shards: Shards,
        tier: DiskTier | None,
        session: Session,
        counters: Counters,
        name: str,
        *,
        stall_seconds: float = 30.0,
    ) -> None:
        self.store, self.shards, self.session, self.counters = store, shards, session, counters
        self.name = name
        """Of this listing in this directory; 16 hexadecimal digits."""
        self.stall_seconds = stall_seconds
        self._files: OrderedDict[int, ShardFile] = OrderedDict()
        self._streams: OrderedDict[int, ShardFile] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self.folder: DatasetFolder | None = None
        self._use = None
        if tier is None:
            session.lower(DROPPED)
            return
        try:
            self.folder = tier.dataset(shards.uri)
            self._use = self.folder.use()
        except OSError as error:
            self._lower(FROZEN if self.folder is not None else DROPPED, error)
        if not tier.writable:
            self._lower(FROZEN, OSError(errno.EROFS, "the volume is read-only"))

    # ---- the state of the tier

    @property
    def state(self) -> int:
        return self.session.state

    def _lower(self, state: int, error: OSError) -> None:
        """Freezes or drops the tier; one process of the node says so, once."""
        if not self.session.lower(state):
            return
        what = {FROZEN: "takes no more shards", DROPPED: "is no longer used"}[state]
        where = self.folder.tier.directory if self.folder is not None else "of this node"
        print(
            f"topkube: the disk cache {where} {what} ({error.strerror or error}); "
            "training goes on, what is not cached is read from the remote",
            file=sys.stderr,
            flush=True,
        )

    def _failed(self, error: OSError) -> None:
        self._lower(FROZEN if error.errno in _NO_ROOM else DROPPED, error)

    # ---- shards

    def open(self, number: int, source: Source | None = None) -> ShardFile:
        """The shard, brought here if needed. Raises StoreError where the remote fails, DatasetError where it gives
        something unusable."""
        with self._guard():
            for kept in (self._files, self._streams):
                if number in kept:
                    kept.move_to_end(number)
                    return kept[number]
        shard = self.shards[number]
        found = self._cached(shard) or self._bring(shard, source)
        with self._guard():
            if found.cached:
                self._files[number] = found
                while len(self._files) > _OPEN_FILES:
                    self._files.popitem(last=False)
            else:
                self._streams[number] = found
                while len(self._streams) > 1 and sum(one.shard.size for one in self._streams.values()) > _STREAM_BYTES:
                    self._streams.popitem(last=False)
        return found

    def _guard(self) -> threading.Lock:
        if self._process != os.getpid():  # the fork of a thread that held it
            self._process, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def lost(self, number: int, error: int) -> None:
        """An open shard could not be read: `error` is the errno, 0 where its file is too short. The next `open` finds
        it damaged, or goes around the tier."""
        with self._guard():
            self._files.pop(number, None)
            self._streams.pop(number, None)
        self.session.verified[number] = 0
        if error:
            self._failed(OSError(error, os.strerror(error)))

    def has(self, number: int) -> bool:
        """Whether the disk tier holds the shard."""
        if self.folder is None or self.state == DROPPED:
            return False
        try:
            return self.folder.shard_path(self.shards.key(number)).exists()
        except OSError:
            return False

    def _cached(self, shard: Shard) -> ShardFile | None:
        """From the disk tier, verified once per node; quarantined where it is damaged."""
        if self.folder is None or self.state == DROPPED:
            return None
        try:
            file = self.folder.open(shard.key)
            if file is None:
                return None
            opened = ShardFile(shard, file, cached=True)
            if self.session.verified[shard.number]:
                return opened
            if self._good(shard, file):
                self.session.verified[shard.number] = 1
                return opened
            return self._damaged(shard)
        except OSError as error:
            self._failed(error)
            return None

    def _good(self, shard: Shard, file: int) -> bool:
        assert self.folder is not None
        return os.fstat(file).st_size == shard.size and self.folder.whole(shard.key, file)

    def _damaged(self, shard: Shard) -> ShardFile | None:
        """Under the shard's lock once more: another process may have put a good one there meanwhile."""
        assert self.folder is not None
        lock = self.folder.lock(shard.key)
        lock.acquire()
        try:
            file = self.folder.open(shard.key)
            if file is None:
                return None
            opened = ShardFile(shard, file, cached=True)
            if self._good(shard, file):
                return opened
            self.counters.add("corruptions")
            self.folder.quarantine(shard.key)
            return None
        finally:
            lock.release()

    def _bring(self, shard: Shard, source: Source | None) -> ShardFile:
        """Fetches the shard, or waits for whoever does. A waiter takes over when nothing has moved for
        `stall_seconds`."""
        begun, seen, moved = time.monotonic(), self.session.progress, time.monotonic()
        waited = False
        while self.folder is not None and self.state == OPEN:
            now = time.monotonic()
            if self.session.progress != seen:
                seen, moved = self.session.progress, now
            late = now - moved > self.stall_seconds
            lock = self.folder.lock(shard.key)
            try:
                # Consumers leave shards to the fillers of this node, if there are any and they get on.
                mine = (source is not None or not self.session.fillers or late) and lock.acquire(wait=False)
            except OSError as error:
                self._failed(error)
                break
            if mine or late:
                try:
                    if found := self._cached(shard):
                        return found
                    if waited:
                        self.counters.add("takeovers", late)
                    found = self._fetch(shard, source)
                    if found is not None:
                        return found
                    break
                finally:
                    lock.release()
            waited = True
            time.sleep(_POLL_SECONDS)
            if found := self._cached(shard):
                self.counters.add("waits_seconds", time.monotonic() - begun)
                return found
        return self._cached(shard) or self._stream(shard, source)

    def _fetch(self, shard: Shard, source: Source | None) -> ShardFile | None:
        """Into the disk tier; None where it takes no more."""
        assert self.folder is not None

        found: list[SampleIndex] = []

        def fill(file: int) -> None:
            with self._timed():
                (source or self.from_store)(shard, file)
            if self.shards.format == "tar":  # a shard that cannot be read by sample is not cached
                found[:] = [self._index_of(shard, file)]

        before = self.folder.evictions
        for turn in range(2):
            try:
                file = self.folder.publish(shard.key, shard.size, fill)
            except FileNotFoundError:  # the dataset was removed under our hands
                if turn or not self._remade():
                    return None
                continue
            except Full as error:
                if turn == 0 and self._evict_outdated():
                    continue
                self._failed(error)
                return None
            except OSError as error:
                self._failed(error)
                return None
            with contextlib.suppress(OSError):
                for index in found:
                    write_index(self.folder.index_path(shard.key), index)
            self.counters.add("evictions", self.folder.evictions - before)
            self.session.verified[shard.number] = 1
            return ShardFile(shard, file, cached=True)
        return None

    def _remade(self) -> bool:
        assert self.folder is not None
        try:
            self.folder.make()
        except OSError as error:
            self._failed(error)
            return False
        return True

    def _evict_outdated(self) -> int:
        assert self.folder is not None
        try:
            return self.folder.evict_all_but(self.shards.keys())
        except OSError:
            return 0

    def _stream(self, shard: Shard, source: Source | None) -> ShardFile:
        """Into memory of this process."""
        opened = ShardFile(shard, os.memfd_create(f"topkube-{shard.key}", os.MFD_CLOEXEC), cached=False)
        with self._timed():
            (source or self.from_store)(shard, opened.file)
        return opened

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.counters.add("fetches")
        self.counters.add("fetch_seconds", time.monotonic() - start)

    def from_store(self, shard: Shard, file: int) -> None:
        """The shard's bytes from the remote."""

        def write(offset: int, data: bytes) -> None:
            view = memoryview(data)
            while view:
                done = os.pwrite(file, view, offset)
                view, offset = view[done:], offset + done

        def progress(count: int) -> None:
            self.session.advance(count)
            self.counters.add("remote_bytes", count)

        objects = self.shards.objects(shard)
        if len(objects) == 1:
            self.store.fetch(objects[0], write, progress=progress)
            return
        ends, offsets = 0, []
        for one in objects:
            offsets.append(ends)
            ends += one.size
        self.store.fetch_many(objects, offsets, write, progress)

    # ---- samples

    def index(self, number: int) -> SampleIndex:
        """Where the shard's samples lie. Raises DatasetError for a damaged or unsafe shard."""
        shard = self.shards[number]
        if self.shards.format == "files":
            return self._index_of(shard, -1)
        if (
            self.folder is not None
            and self.state != DROPPED
            and (stored := read_index(self.folder.index_path(shard.key)))
        ):
            return stored
        opened = self.open(number)  # held to the end: another thread may put its own in its place, and close this one
        index = self._index_of(shard, opened.file)
        if self.has(number):
            assert self.folder is not None
            with contextlib.suppress(OSError):
                write_index(self.folder.index_path(shard.key), index)
        return index

    def _index_of(self, shard: Shard, file: int) -> SampleIndex:
        if self.shards.format == "files":
            listing = self.shards.listing
            paths = [listing.paths[at] for at in range(shard.start, shard.stop)]
            return files_index(paths, listing.sizes[shard.start : shard.stop])
        name = self.shards.listing.paths[shard.start]
        index = tar_index(file, shard.size, name)
        if not len(index):
            raise DatasetError(f"{name} holds no samples", next_step="remove it from the dataset")
        return index

    def close(self) -> None:
        """Lets the dataset go; open shards stay readable."""
        self._files.clear()
        self._streams.clear()
        if self._use is not None and self._use.held:
            self._use.release()
        self.session.close()


def open_tier(directory: Path, limits: Limits) -> DiskTier | None:
    """The disk tier, None (with a warning) where its volume cannot be used. Raises CacheError where it is another's."""
    try:
        return DiskTier(directory, limits)
    except OSError as error:
        print(
            f"topkube: no disk cache in {directory} ({error.strerror or error}); data is read from the remote",
            file=sys.stderr,
            flush=True,
        )
        return None
