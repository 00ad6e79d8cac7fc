"""`CachedDataset`: a remote dataset for torch that is read through the cache of the node."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.data.base.batch import ArrayOf, Batch, Decode, merge_batches
from topkube.data.base.open_datasets import register_dataset
from topkube.data.base.open_files import is_files_pressure
from topkube.data.base.rank_place import RankPlace, find_place
from topkube.data.cache.fingerprint import compute_fingerprint
from topkube.data.cache.memory.memory_tier import Frozen, MemoryTier
from topkube.data.cache.node_state import STATES
from topkube.data.cache.row_groups import RowGroups, count_parquet_rows
from topkube.data.cache.sample_reader import SampleReader, convert_indices
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.fill.disk_filler import DiskFiller
from topkube.data.fill.memory_filler import MemoryFiller, ReadsInProgress
from topkube.data.formats.shards import GROUP_BYTES, Format
from topkube.data.opening import choose_memory_folder, open_cache, resolve_address
from topkube.data.rank_messages import share_counts, share_failure
from topkube.data.remote.listing import UNKNOWN, Longs
from topkube.data.remote.retry import Patience
from topkube.data.sampler import DistributedSampler
from topkube.errors import TopKubeError
from topkube.settings import Settings

if TYPE_CHECKING:
    from topkube.data.batch_stream import Batches

_DESCRIPTION = (
    "uri",
    "decode",
    "transform",
    "_fingerprint",
    "_settings",
    "_memory_folder",
    "_memory_limit",
    "_early_samples",
    "_cache_options",
)
"""The attributes from which a spawned process opens the dataset again."""


class CachedDataset:
    """A map-style dataset for `torch.utils.data.DataLoader` over any store that fsspec opens.

    uri: a folder of files, of tar shards (WebDataset), or of Parquet or Arrow files; a manifest (.jsonl); or the
    mountPath of the job's dataset. A raw sample is the bytes of a file, a dict of the fields of a sample in a tar (its
    name is the value of `__key__`), or a dict of the columns of a row.
    decode: a deterministic function of the raw sample. The memory tier stores its results.
    fingerprint: a text that identifies `decode`. It is needed if the code of `decode` does not show everything that it
    uses (see `fingerprint.py`).
    transform: a function that is applied whenever a sample is read; its results are not stored. Use it for random
    augmentation.
    size_limit: bytes per node on disk; 0 means no limit. memory_limit: bytes per node in memory; 0 means no memory
    tier.
    prefetch: fill the cache in the background; the ranks share the work.
    early_samples: request a file, a sample of a tar shard with an index (`topkube cache manifest --index`), or a row
    group of a Parquet shard alone if it is needed before its shard is in the cache and its bytes can be checked (see
    `early_samples.py` and `early_groups.py`). The first batches come sooner, and the remote sends these bytes twice.
    wait_seconds: how long a reader waits for another process that fetches the same shard without progress. After this
    time, the reader fetches the shard itself.

    With several ranks, the constructor is a collective: every rank must call it. Raises DatasetError for invalid
    arguments or data, StoreError if the remote fails, CacheError if another user or program owns the directory.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        decode: Decode | None = None,
        transform: Callable[[Any], Any] | None = None,
        fingerprint: str | None = None,
        format: Format = "auto",
        cache_directory: str | os.PathLike[str] | None = None,
        size_limit: int | None = None,
        memory_limit: int | None = None,
        memory_directory: str | os.PathLike[str] | None = None,
        free_bytes: int | None = None,
        group_bytes: int = GROUP_BYTES,
        prefetch: bool | None = None,
        early_samples: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
        wait_seconds: float = 30.0,
        settings: Settings | None = None,
    ) -> None:
        self._settings = settings or Settings.from_environment()
        self.uri = resolve_address(os.fspath(uri), self._settings)
        self.decode, self.transform = decode, transform
        self._fingerprint = fingerprint if fingerprint is not None else compute_fingerprint(decode)
        self._memory_limit = self._settings.cache_memory_limit if memory_limit is None else memory_limit
        self._memory_folder = choose_memory_folder(memory_directory, self._settings)
        self._early_samples = early_samples
        self._cache_options: dict[str, Any] = {
            "format": format,
            "cache_directory": cache_directory,
            "size_limit": size_limit,
            "free_bytes": free_bytes,
            "group_bytes": group_bytes,
            "storage_options": storage_options,
            "patience": patience,
            "wait_seconds": wait_seconds,
        }
        self._open(find_place(), bool(self._settings.cache_prefetch) if prefetch is None else prefetch)

    # ---- opening

    def _open(self, place: RankPlace, prefetch: bool) -> None:
        """Open the tiers and start to fill them. If `place` has several ranks, this is a collective."""
        self._place = place
        self.cache = open_cache(
            self.uri,
            self._settings,
            place,
            memory_limit=self._memory_limit,
            memory=self._memory_folder,
            **self._cache_options,
        )
        self.node_state, self.counters = self.cache.node_state, self.cache.counters
        self.filler = DiskFiller(self.cache, place) if prefetch and self.cache.folder is not None else None
        self._memory: MemoryTier | None = None
        self._reads = ReadsInProgress()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _close, self.cache, self.filler, os.getpid())
        try:
            if self.filler is not None:
                self.filler.start()
                if place.world is not None:  # readers must know that fillers are at work before they read
                    place.world.comm.Barrier()
            field = self.decode.field if isinstance(self.decode, ArrayOf) else None
            self._reader = SampleReader(self.cache, self._count_samples(), field, early=self._early_samples)
            if self._memory_limit:
                self._memory = self._open_memory_tier()
            self._memory_filler = self._start_memory_filler()
        except BaseException:
            self._end()
            raise
        register_dataset(self)

    def _count_samples(self) -> Longs:
        """Return the number of samples of each shard. If shards must be read to count their samples, each rank reads a
        part of these shards."""
        store, shards = self.cache.store, self.cache.shards
        counts = shards.count_samples().copy()
        unknown = np.flatnonzero(counts == UNKNOWN)
        if not unknown.size:
            return counts
        failure: TopKubeError | None = None
        in_cache = shards.format == "arrow" or (shards.format == "parquet" and shards.has_compressed)
        groups = RowGroups(self.cache) if in_cache else None
        for number in unknown.tolist():
            if self._place.find_home_rank(number) != self._place.rank:
                continue
            try:
                if shards.format == "parquet" and not shards.find_compression(number):
                    counts[number] = count_parquet_rows(store, shards.listing[number])
                elif groups is not None:
                    counts[number] = groups.count_rows(number)
                else:
                    counts[number] = len(self.cache.load_index(number))
            except TopKubeError as error:
                failure = error
                break
        if self._place.world is not None:
            failure = share_failure(self._place.world.comm, failure)
            counts = share_counts(self._place.world.comm, counts)
        if failure is not None:
            raise failure
        return counts

    def _open_memory_tier(self) -> MemoryTier | None:
        """Return the memory tier. Return None, with a warning, if its directory cannot be used."""
        name = f"{self.cache.name}-{self._fingerprint}"
        try:
            return MemoryTier(self._memory_folder, name, len(self._reader), self._memory_limit)
        except OSError as error:
            self._report_frozen_memory(error)
            return None

    def _start_memory_filler(self) -> MemoryFiller | None:
        """Fill the memory tier in the background if `decode` is an ArrayOf. Another function would run in Python, and
        slow down the training loop."""
        if self._memory is None or self.filler is None or (decode := self._array_decode) is None:
            return None
        return MemoryFiller(
            self._memory,
            self.filler,
            self.filler.share,
            self._reader.starts,
            decode.record_bytes,
            self._decode_and_store,
            self._reads,
        )

    def _report_frozen_memory(self, error: OSError) -> None:
        if self.node_state.freeze_memory_tier():
            print(
                f"topkube: the memory cache takes no more samples ({error.strerror or error}); "
                "all other samples are read from the disk cache",
                file=sys.stderr,
                flush=True,
            )

    # ---- reading

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | Longs) -> Sequence[Any]:
        """Return several samples. Negative indices count from the end. The DataLoader of torch reads a whole batch with
        this method."""
        samples = self.batch(convert_indices(indices, len(self)))
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def batch(self, indices: Longs) -> Sequence[Any]:
        """Return decoded samples without `transform`: a Batch if they are stored in columns, else a list. `collate`
        accepts both. All indices must be valid and not negative."""
        memory = self._memory
        if memory is None:
            return self._decode(indices)
        if (batch := memory.gather_present(indices)) is not None:
            self.counters.add_memory_hits(indices.size, batch.nbytes)
            self._reads.last_end = time.monotonic()
            return batch
        self._reads.begin()
        try:
            return self._read_tiers(memory, indices)
        finally:
            self._reads.end()

    def _read_tiers(self, memory: MemoryTier, indices: Longs) -> Sequence[Any]:
        """Return decoded samples from the memory tier. Samples that it does not have are decoded and stored in it."""
        present = memory.has(indices)
        hits = int(np.count_nonzero(present))
        self.counters.add("memory_requests", indices.size)
        if hits < indices.size:
            self.counters.add("memory_misses", indices.size - hits)
            missing = indices[~present]
            fresh = self._decode_and_store(missing)
            if not hits:
                return fresh
            if not memory.has(missing).all():  # there was no room, or another process is writing them
                return self._join(present, self._read_memory(indices[present]), fresh)
        return self._read_memory(indices)

    def _read_memory(self, indices: Longs) -> Batch:
        """Return samples from the memory tier, which has all of them."""
        assert self._memory is not None
        batch = self._memory.gather(indices)
        self.counters.add("memory_bytes", batch.nbytes)
        return batch

    def _decode_and_store(self, indices: Longs) -> Sequence[Any]:
        """Return decoded samples. Samples for which there is room are stored in the memory tier."""
        assert self._memory is not None
        fresh = self._decode(indices)
        try:
            self._memory.admit(indices, fresh)
        except Frozen as error:
            self._report_frozen_memory(error)
        except OSError as error:
            if not is_files_pressure(error):
                raise
        return fresh

    @staticmethod
    def _join(present: npt.NDArray[np.bool_], kept: Batch, fresh: Sequence[Any]) -> Sequence[Any]:
        """Return one batch: the next sample of `kept` at every position where `present` is true, else the next sample
        of `fresh`."""
        if isinstance(fresh, Batch) and fresh.schema == kept.schema and kept.schema.has_fixed_shape:
            return merge_batches(present, kept, fresh)
        kept_samples, fresh_samples = iter(kept), iter(fresh)
        return [next(kept_samples) if is_kept else next(fresh_samples) for is_kept in present.tolist()]

    @property
    def _array_decode(self) -> ArrayOf | None:
        """The `decode` function if it decodes whole batches at once; else None."""
        return (
            self.decode if isinstance(self.decode, ArrayOf) and self.cache.shards.format in ("files", "tar") else None
        )

    def _decode(self, indices: Longs) -> Sequence[Any]:
        """Read samples from their shards and decode them."""
        if (decode := self._array_decode) is not None:
            return self._reader.read_arrays(indices, decode)
        raw = self._reader.read_samples(indices)
        return raw if self.decode is None else [self.decode(sample) for sample in raw]

    # ---- order

    @property
    def shard_starts(self) -> Longs:
        """The first sample of each shard, then the number of samples: (shards + 1,)."""
        return self._reader.starts

    @cached_property
    def identity(self) -> str:
        """A name for the samples and their order that does not depend on the dataset's address: 32 hexadecimal digits.
        They change with the paths and sizes of the objects and with the division into shards."""
        listing, state = self.cache.shards.listing, xxhash.xxh3_128()
        for part in (listing.paths.blob, listing.paths.ends, listing.sizes, self._reader.starts):
            state.update(part.tobytes())
        return state.hexdigest()

    def expect(self, order: Longs) -> None:
        """Fetch shards in the order in which these samples will be read. DistributedSampler calls this method."""
        if self.filler is not None and self.filler.is_running and os.getpid() == self._process:
            shards = self._reader.find_shards(order)
            _, first = np.unique(shards, return_index=True)
            self.filler.prefer(shards[np.sort(first)])

    def batches(
        self,
        batch_size: int | None,
        sampler: DistributedSampler | None = None,
        *,
        drop_last: bool = False,
        ahead: int = 0,
    ) -> Batches:
        """Return an iterable of this rank's samples in the sampler's order, in collated batches. If `batch_size` is
        None, it yields single samples. See `Batches`."""
        from topkube.data.batch_stream import Batches  # loads torch

        return Batches(self, batch_size, sampler or DistributedSampler(self), drop_last=drop_last, ahead=ahead)

    def warm(self, progress: Callable[[int], None] | None = None) -> None:
        """Wait until every shard of this rank's share is in the node's cache, or the cache is full. `progress` gets the
        number of shards that are finished."""
        filler = self.filler or DiskFiller(self.cache, self._place)
        if self.filler is None:
            filler.start()
        try:
            filler.wait(progress)
        finally:
            if self.filler is None:
                filler.close()

    # ---- reporting

    def statistics(self) -> dict[str, float]:
        """Return all counters (telemetry.cache_counters.NAMES) of this process and its workers, and the states of the
        tiers and the bytes in memory."""
        statistics = self.counters.sum_rows()
        statistics["disk_state"] = self.node_state.state
        statistics["memory_state"] = self.node_state.memory_state
        statistics["memory_used_bytes"] = self._memory.used_bytes if self._memory is not None else 0
        return statistics

    def __repr__(self) -> str:
        return (
            f"CachedDataset({self.uri!r}, {len(self):,} samples in {len(self.cache.shards):,} shards of "
            f"{self.cache.shards.format}, disk tier {STATES[self.node_state.state]})"
        )

    def close(self) -> None:
        """Stop filling and release the tiers. Without this call, they are released when the process ends. Raises
        Changed if a sample that was read early differs from its shard."""
        try:
            self._reader.verify_early()
        finally:
            self._end()
            if self._memory_filler is not None:
                self._memory_filler.close()
            if self._memory is not None:
                self._memory.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _DESCRIPTION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the dataset in a spawned worker, without a filler and without collectives."""
        self.__dict__.update(state)
        self._open(RankPlace(), prefetch=False)


def _close(cache: ShardCache, filler: DiskFiller | None, process: int) -> None:
    """Stop filling and release the cache, in the process that has opened it."""
    if os.getpid() != process:
        return
    if filler is not None:
        filler.close()
    cache.close()
