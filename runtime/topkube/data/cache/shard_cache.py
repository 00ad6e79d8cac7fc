"""The cache of one dataset. A shard comes from the disk tier. A missing shard is fetched from the remote into the tier,
or into memory if the tier takes no more shards. Readers get the same bytes in all cases.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from topkube.data.base.open_files import FilesPressure, build_too_many_files_error, is_files_pressure
from topkube.data.base.shared_counters import CacheCounters
from topkube.data.cache.cached_shards import CachedShards
from topkube.data.cache.disk.dataset_folder import DatasetFolder
from topkube.data.cache.disk.disk_tier import DiskLimits, DiskTier, Full
from topkube.data.cache.disk.record_log import read_hash
from topkube.data.cache.disk.shard_file import ReceivedChecksums, compute_digest
from topkube.data.cache.disk.stored_index import read_index
from topkube.data.cache.node_state import DROPPED, OPEN, NodeState
from topkube.data.cache.open_shards import OpenShards, ShardFile
from topkube.data.cache.shard_decompression import decompress_shard
from topkube.data.cache.shard_fetcher import ShardFetcher, ShardSource
from topkube.data.formats.sample_index import SampleIndex
from topkube.data.formats.shard_index import index_shard
from topkube.data.formats.shards import DataShard, Shards
from topkube.data.remote.object_store import ObjectStore
from topkube.errors import DatasetError

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.005, 0.02
_TRIES = 4


class ShardCache:
    """The shards of a dataset, by number. Threads may share it; it keeps working after a fork. `for_samples`: a shard
    whose samples cannot be read is not cached, and is an error."""

    def __init__(
        self,
        store: ObjectStore,
        shards: Shards,
        tier: DiskTier | None,
        node_state: NodeState,
        counters: CacheCounters,
        name: str,
        job: str,
        *,
        stall_seconds: float = 30.0,
        for_samples: bool = True,
    ) -> None:
        self.store, self.shards, self.node_state, self.counters = store, shards, node_state, counters
        self.name = name
        """A name for this listing in this directory: 16 hexadecimal digits."""
        self.job = job
        """The name under which objects without a version are cached; empty if all objects have versions."""
        self.stall_seconds, self._for_samples = stall_seconds, for_samples
        self.open_shards = OpenShards()
        self.fetcher = ShardFetcher(store, shards, node_state, counters)
        self._cached = CachedShards(shards, tier, node_state, counters)

    @property
    def folder(self) -> DatasetFolder | None:
        """The dataset's folder in the disk tier; None without a disk tier."""
        return self._cached.folder

    @property
    def disk_state(self) -> int:
        """The state of the disk tier: OPEN, FROZEN or DROPPED."""
        return self.node_state.disk_state

    # ---- shards

    def open(self, number: int, source: ShardSource | None = None) -> ShardFile:
        """Open the shard as it is stored, and fetch it if needed. Raises StoreError if the remote fails, DatasetError
        if the shard is unusable."""
        return self._open(self.shards[number], source)

    def open_samples(self, number: int, source: ShardSource | None = None) -> ShardFile:
        """Open the shard as `open` does, but decompressed: the samples are read from the result."""
        return self._open(self.shards.get_samples_shard(number), source)

    def _open(self, shard: DataShard, source: ShardSource | None) -> ShardFile:
        """Return the shard if this process has it open; otherwise open it and keep it open."""
        return self.open_shards.find(shard.cache_number) or self.open_shards.keep(
            shard.cache_number, self._open_with_retries(shard, source)
        )

    def _open_with_retries(self, shard: DataShard, source: ShardSource | None) -> ShardFile:
        for attempt in range(_TRIES):
            try:
                return self._cached.open(shard) or self._fetch_or_wait(shard, source)
            except FilesPressure:
                self.open_shards.close_idle()
                time.sleep(_POLL_SECONDS * attempt)  # other threads may close files meanwhile
        raise build_too_many_files_error()

    def report_lost(self, number: int, error: int) -> None:
        """Report that an open shard could not be read. `error`: the errno; 0 if the file is too short. The next `open`
        verifies the shard again, or reads it from the remote."""
        cache_number = self.shards.get_samples_shard(number).cache_number
        self.open_shards.forget(cache_number)
        self.node_state.clear_verified(cache_number)
        if error:
            self._cached.handle_volume_error(OSError(error, os.strerror(error)))

    def has(self, number: int) -> bool:
        """Return True if the disk tier has the shard as it is stored."""
        return self._cached.has(self.shards.compute_key(number))

    def has_samples(self, number: int) -> bool:
        """Return True if the disk tier has the file from which the samples of the shard are read."""
        return self._cached.has(self.shards.get_samples_shard(number).key)

    def _fetch_or_wait(self, shard: DataShard, source: ShardSource | None) -> ShardFile:
        """Fetch the shard, or wait for another process that fetches it. This process takes over if there was no
        progress for `stall_seconds`."""
        begun = progress_time = time.monotonic()
        progress = self.node_state.progress
        has_waited, pause = False, _POLL_SECONDS
        while self.folder is not None and self.disk_state == OPEN:
            now = time.monotonic()
            if self.node_state.progress != progress:
                progress, progress_time = self.node_state.progress, now
            is_stalled = now - progress_time > self.stall_seconds
            lock = self.folder.get_lock(shard.key)
            try:
                may_fetch = source is not None or is_stalled or not self._will_be_filled(shard)
                if not may_fetch:
                    self.node_state.request(shard.cache_number)
                has_lock = may_fetch and lock.acquire(wait=False)
            except OSError as error:
                self._cached.handle_volume_error(error)
                break
            if has_lock or is_stalled:
                try:
                    if opened := self._cached.open(shard):
                        return opened
                    if has_waited:
                        self.counters.add("takeovers", is_stalled)
                    opened = self._fetch_to_tier(shard, source)
                    if opened is not None:
                        return opened
                    break
                finally:
                    lock.release()
            has_waited, pause = True, min(pause * 1.2, _LONGEST_POLL_SECONDS)
            time.sleep(pause)
            if opened := self._cached.open(shard):
                self.counters.add("waits_seconds", time.monotonic() - begun)
                return opened
        return self._cached.open(shard) or self._fetch_to_memory(shard, source)

    def _will_be_filled(self, shard: DataShard) -> bool:
        """Return True if readers must leave the shard to the fillers of this node: fillers are at work, and none of
        them has finished this shard."""
        return bool(self.node_state.filler_count) and not self.node_state.is_left_to_readers(shard.cache_number)

    def _fetch_to_tier(self, shard: DataShard, source: ShardSource | None) -> ShardFile | None:
        """Fetch the shard into the disk tier. Return None if the tier takes no more shards."""
        assert self.folder is not None

        indexes: list[SampleIndex] = []

        def fill(file: int) -> ReceivedChecksums:
            received = self._fill(shard, file, source)
            if self.shards.format == "tar" and self._is_read_by_sample(shard):
                # Before the shard is published: a shard that cannot be read by sample is not cached.
                try:
                    indexes[:] = [index_shard(self.shards, shard, file)]
                except DatasetError:
                    if self._for_samples:
                        raise
            return received

        old_evictions, begun = self.folder.evictions, time.monotonic()

        def announce() -> None:  # a process that waits for the shard opens it at once, without another verification
            self.node_state.set_verified(shard.cache_number, begun)

        for attempt in range(2):
            try:
                file = self.folder.publish(shard.key, shard.size, fill, announce=announce)
            except FileNotFoundError:  # another process removed the dataset
                if attempt or not self._cached.create_folder_again():
                    return None
                continue
            except Full as error:
                if attempt == 0 and self._cached.evict_outdated():
                    continue
                self._cached.handle_volume_error(error)
                return None
            except OSError as error:
                self._cached.handle_volume_error(error)
                return None
            with contextlib.suppress(OSError):
                for index in indexes:
                    self.folder.store_index(shard.key, index)
            self.counters.add("evictions", self.folder.evictions - old_evictions)
            return ShardFile(shard, file, is_cached=True)
        return None

    def _fetch_to_memory(self, shard: DataShard, source: ShardSource | None) -> ShardFile:
        """Fetch the shard into the memory of this process."""
        try:
            file = os.memfd_create(f"topkube-{shard.key}", os.MFD_CLOEXEC)
        except OSError as error:
            if is_files_pressure(error):
                raise FilesPressure from error
            raise
        opened = ShardFile(shard, file, is_cached=False)
        self._fill(shard, opened.file, source)
        opened.shard = replace(shard, size=os.fstat(file).st_size)
        return opened

    def _is_read_by_sample(self, shard: DataShard) -> bool:
        """Return True if samples are read from this shard, and not from its decompressed bytes."""
        number = shard.cache_number % len(self.shards)
        is_source = shard.cache_number == self.shards.get_samples_shard(number).cache_number
        return is_source and self.shards.has_samples(number)

    def _fill(self, shard: DataShard, file: int, source: ShardSource | None) -> ReceivedChecksums:
        """Write the bytes of the shard to the descriptor: from the source, or decompressed from the cached shard."""
        if self.shards.is_decompressed(shard):
            return decompress_shard(self, self._cached, shard, file, source)
        return self.fetcher.fetch(shard, file, source)

    def fetch_from_store(self, shard: DataShard, file: int) -> ReceivedChecksums:
        """Fetch the bytes of the shard from the remote, and write them to the descriptor. Return their checksums. This
        is a source for `open`."""
        return self.fetcher.fetch_from_store(shard, file)

    def find_digest(self, opened: ShardFile) -> str:
        """Return the xxh3-128 of an open shard: from its record if there is a record, else computed from its bytes."""
        if opened.is_cached and self.folder is not None:
            record = self.folder.log.find(opened.shard.key)
            if record is not None:
                return read_hash(record)
        return compute_digest(opened.file, opened.shard.size)

    # ---- samples

    def load_index(self, number: int) -> SampleIndex:
        """Return the positions of the shard's samples. Raises DatasetError for a damaged or unsafe shard."""
        shard = self.shards.get_samples_shard(number)
        if self.shards.format == "files":
            return index_shard(self.shards, shard, -1)
        if (
            self.folder is not None
            and self.disk_state != DROPPED
            and (stored := read_index(self.folder.get_index_path(shard.key)))
        ):
            return stored
        opened = self.open_samples(number)  # this reference keeps the file open if another thread replaces it
        index = index_shard(self.shards, shard, opened.file)
        if self.has_samples(number):
            assert self.folder is not None
            with contextlib.suppress(OSError):
                self.folder.store_index(shard.key, index)
        return index

    def close(self) -> None:
        """Release the dataset. Open shards stay readable."""
        self.open_shards.clear()
        self._cached.close()
        self.node_state.close()


def open_tier(directory: Path, limits: DiskLimits, sharing: str = "auto") -> DiskTier | None:
    """Open the disk tier. If its volume cannot be used, print a warning and return None. Raises CacheError if another
    program uses the directory."""
    try:
        return DiskTier(directory, limits, sharing)
    except OSError as error:
        print(
            f"topkube: no disk cache in {directory} ({error.strerror or error}); data is read from the remote",
            file=sys.stderr,
            flush=True,
        )
        return None
