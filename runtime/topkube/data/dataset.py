"""`CachedDataset`: a remote dataset for torch that is read through the cache of the node."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from topkube.data.base.batch import ArrayOf, Decode
from topkube.data.base.open_datasets import register_dataset
from topkube.data.base.rank_place import RankPlace, find_place
from topkube.data.cache.fingerprint import compute_fingerprint
from topkube.data.cache.memory.memory_tier import MemoryTier
from topkube.data.cache.memory_folder import choose_memory_folder
from topkube.data.cache.node_state import STATES
from topkube.data.cache.sample_reader import SampleReader, convert_indices
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.decoded_samples import DecodedSamples, report_frozen_memory
from topkube.data.fill.disk_filler import DiskFiller
from topkube.data.fill.memory_filler import MemoryFiller
from topkube.data.formats.shards import GROUP_BYTES, Format
from topkube.data.opening import open_cache, resolve_address
from topkube.data.remote.listing import Longs
from topkube.data.remote.retry import Patience
from topkube.data.sample_counts import count_samples
from topkube.data.sampler import DistributedSampler
from topkube.errors import DatasetError
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

    def _open(self, place: RankPlace, prefetch: bool, job: str = "") -> None:
        """Open the tiers and start to fill them. If `place` has several ranks, this is a collective. `job`: see
        `open_cache`."""
        self._place = place
        self.cache = open_cache(
            self.uri,
            self._settings,
            place,
            memory_limit=self._memory_limit,
            memory=self._memory_folder,
            job=job,
            **self._cache_options,
        )
        self.node_state, self.counters = self.cache.node_state, self.cache.counters
        # Also without a disk tier on this node: other nodes may have one, and the filler begins with collectives.
        self.filler = DiskFiller(self.cache, place) if prefetch else None
        self._process = os.getpid()
        closers: list[Callable[[], object]] = []
        self._end = weakref.finalize(self, _close, self.cache, self.filler, closers, os.getpid())
        try:
            if self.filler is not None:
                self.filler.start()
                if place.world is not None:  # readers must know that fillers are at work before they read
                    place.world.comm.Barrier()
            field = self.decode.field if isinstance(self.decode, ArrayOf) else None
            counts = count_samples(self.cache, place)
            self._reader = SampleReader(self.cache, counts, field, early=self._early_samples)
            memory = self._open_memory_tier() if self._memory_limit else None
            if memory is not None:
                closers.append(memory.close)
            self._samples = DecodedSamples(self._reader, self.decode, memory)
            if (memory_filler := self._start_memory_filler()) is not None:
                closers.insert(0, memory_filler.close)
        except BaseException:
            self._end()
            raise
        register_dataset(self)

    def _open_memory_tier(self) -> MemoryTier | None:
        """Return the memory tier, which jobs with the same limit share. Return None, with a warning, if its directory
        cannot be used."""
        name = f"{self.cache.name}-{self._memory_limit}-{self._fingerprint}"
        try:
            return MemoryTier(self._memory_folder, name, len(self._reader), self._memory_limit)
        except OSError as error:
            report_frozen_memory(self.node_state, error)
            return None

    def _start_memory_filler(self) -> MemoryFiller | None:
        """Fill the memory tier in the background if `decode` is an ArrayOf. Another function would run in Python, and
        slow down the training loop."""
        samples = self._samples
        if samples.memory is None or samples.array_decode is None or self.filler is None or self.cache.folder is None:
            return None
        return MemoryFiller(
            samples.memory,
            self.filler,
            self.filler.share,
            self._reader.starts,
            samples.array_decode.record_bytes,
            samples.decode_and_store,
            samples.reads,
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
        return self._samples.get_batch(indices)

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
        statistics["disk_state"] = self.node_state.disk_state
        statistics["memory_state"] = self.node_state.memory_state
        memory = self._samples.memory
        statistics["memory_used_bytes"] = memory.used_bytes if memory is not None else 0
        return statistics

    def __repr__(self) -> str:
        return (
            f"CachedDataset({self.uri!r}, {len(self):,} samples in {len(self.cache.shards):,} shards of "
            f"{self.cache.shards.format}, disk tier {STATES[self.node_state.disk_state]})"
        )

    def close(self) -> None:
        """Stop filling and release the tiers. Without this call, they are released when the process ends. Raises
        Changed if a sample that was read early differs from its shard."""
        try:
            self._reader.verify_early()
        finally:
            self._end()

    def __getstate__(self) -> dict[str, Any]:
        listing = self.cache.shards.listing.compute_digest()
        return {"listing": listing, "job": self.cache.job, **{name: getattr(self, name) for name in _DESCRIPTION}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the dataset in a spawned worker, without a filler and without collectives. Raises DatasetError if its
        listing has changed."""
        self.__dict__.update({name: state[name] for name in _DESCRIPTION})
        self._open(RankPlace(), prefetch=False, job=state["job"])
        if self.cache.shards.listing.compute_digest() != state["listing"]:
            self.close()
            raise DatasetError(
                f"the dataset {self.uri} has changed since this process's parent opened it",
                cause="objects were added, removed or replaced while it is in use, so an index may name another sample",
                next_step="write a manifest (topkube cache manifest), or start again when the dataset is complete",
            )


def _close(cache: ShardCache, filler: DiskFiller | None, closers: list[Callable[[], object]], process: int) -> None:
    """Stop filling and release the cache, in the process that has opened it. `closers` end what uses the memory tier,
    and then release it."""
    if os.getpid() != process:
        return
    if filler is not None:
        filler.close()
    for close in closers:
        close()
    cache.close()
