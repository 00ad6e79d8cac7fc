"""`CachedDataset`: a remote dataset as torch sees it, read through the node's cache."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from topkube.data.batch import ArrayOf, Batch, Decode, merged
from topkube.data.cache import Cache
from topkube.data.fill import Filler
from topkube.data.fingerprint import fingerprint as fingerprint_of
from topkube.data.listing import UNKNOWN, Longs
from topkube.data.memory_fill import MemoryFiller
from topkube.data.memory_tier import Frozen, MemoryTier
from topkube.data.opening import address, memory_folder, open_cache
from topkube.data.patience import Patience
from topkube.data.place import Place, here
from topkube.data.reader import Reader, as_indices
from topkube.data.row_groups import RowGroups, parquet_rows
from topkube.data.sampler import DistributedSampler
from topkube.data.session import STATES
from topkube.data.shards import GROUP_BYTES, Format
from topkube.data.watch import watch
from topkube.errors import TopKubeError
from topkube.settings import Settings

if TYPE_CHECKING:
    from topkube.data.batches import Batches

_opening_again = False
"""While a spawned worker opens its copy: it takes no part in collectives."""


class CachedDataset:
    """A map-style dataset for `torch.utils.data.DataLoader` over anything that fsspec opens.

    uri: a folder of files, of tar shards (WebDataset) or of Parquet or Arrow files, or a manifest (.jsonl); or the
    mountPath of the job's dataset. A raw sample is a file's bytes, a dict of a tar sample's fields (its name under
    `__key__`), or a dict of a row's columns.
    decode: a deterministic function of the raw sample; what it returns is kept in memory. `fingerprint` names it where
    its code does not (see `fingerprint.py`).
    transform: applied to every sample on its way out, never kept: random augmentation goes here.
    size_limit, memory_limit: bytes per node on disk and in memory (0: no limit, and no memory tier).
    prefetch: fill the cache in the background, ranks sharing the work. `wait_seconds`: how long a reader waits for
    another that makes no progress before it fetches a shard itself.

    With several ranks the constructor is a collective: every rank calls it. Raises DatasetError for what cannot work,
    StoreError where the remote fails, CacheError where the directory is another's.
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
        storage_options: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
        wait_seconds: float = 30.0,
        settings: Settings | None = None,
    ) -> None:
        settings = settings or Settings.from_environment()
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._place = Place() if _opening_again else here()
        self.uri = address(os.fspath(uri), settings)
        self.decode, self.transform = decode, transform
        self._fingerprint = fingerprint if fingerprint is not None else fingerprint_of(decode)
        memory_limit = settings.cache_memory_limit if memory_limit is None else memory_limit
        memory = memory_folder(memory_directory, settings)
        self.cache = open_cache(
            self.uri,
            settings,
            self._place,
            format=format,
            cache_directory=cache_directory,
            size_limit=size_limit,
            memory_limit=memory_limit,
            memory=memory,
            free_bytes=free_bytes,
            group_bytes=group_bytes,
            storage_options=storage_options,
            patience=patience,
            wait_seconds=wait_seconds,
        )
        self.session, self.counters = self.cache.session, self.cache.counters
        prefetch = bool(settings.cache_prefetch) if prefetch is None else prefetch
        self.filler = Filler(self.cache, self._place) if prefetch and self.cache.folder is not None else None
        self._memory: MemoryTier | None = None
        self._process = os.getpid()
        self._end = weakref.finalize(self, _close, self.cache, self.filler, os.getpid())
        try:
            if self.filler is not None:
                self.filler.start()
                if self._place.world is not None:  # whoever reads must know that shards are on their way
                    self._place.world.comm.Barrier()
            counts = self._counts()
            self._reader = Reader(self.cache, counts, decode.field if isinstance(decode, ArrayOf) else None)
            if memory_limit:
                self._memory = self._memory_tier(memory, f"{self.cache.name}-{self._fingerprint}", memory_limit)
            self._memory_filler = self._fill_memory()
        except BaseException:
            self._end()
            raise
        watch(self)

    # ---- opening

    def _counts(self) -> Longs:
        """Samples of each shard. Where only its content tells, ranks share the reading."""
        store, shards = self.cache.store, self.cache.shards
        counts = shards.counts().copy()
        unknown = np.flatnonzero(counts == UNKNOWN)
        if not unknown.size:
            return counts
        first: TopKubeError | None = None
        groups = RowGroups(self.cache) if shards.format == "arrow" else None
        for number in unknown.tolist():
            if self._place.home(number) != self._place.rank:
                continue
            try:
                if shards.format == "parquet":
                    counts[number] = parquet_rows(store, shards.listing[number])
                elif groups is not None:
                    counts[number] = groups.count(number)
                else:
                    counts[number] = len(self.cache.index(number))
            except TopKubeError as failure:
                first = failure
                break
        if self._place.world is not None:
            for other, failed in self._place.world.comm.allgather((counts, first)):
                first = first or failed
                counts = np.maximum(counts, other)
        if first is not None:
            raise first
        return counts

    def _memory_tier(self, directory: Path, name: str, limit: int) -> MemoryTier | None:
        try:
            return MemoryTier(directory, name, len(self._reader), limit)
        except OSError as error:
            self._memory_frozen(error)
            return None

    def _fill_memory(self) -> MemoryFiller | None:
        """Only of what is decoded without Python: a loop should not wait for the interpreter because of it."""
        if self._memory is None or self.filler is None or (decode := self._columns) is None:
            return None
        return MemoryFiller(
            self._memory, self.filler, self.filler.share, self._reader.starts, decode.record_bytes, self._keep
        )

    def _memory_frozen(self, error: OSError) -> None:
        if self.session.freeze_memory():
            print(
                f"topkube: the memory cache takes no more samples ({error.strerror or error}); "
                "others are read from the disk cache",
                file=sys.stderr,
                flush=True,
            )

    # ---- reading

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | Longs) -> Sequence[Any]:
        """Several samples at once; torch's DataLoader asks for a whole batch like this."""
        samples = self.batch(as_indices(indices, len(self)))
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def batch(self, indices: Longs) -> Sequence[Any]:
        """Decoded samples, before `transform`: a Batch where they come in columns, else a list. `collate` makes
        tensors of either."""
        memory = self._memory
        if memory is None:
            return self._decoded(indices)
        present = memory.has(indices)
        hits = int(np.count_nonzero(present))
        self.counters.add("memory_requests", indices.size)
        if hits < indices.size:
            self.counters.add("memory_misses", indices.size - hits)
            missing = indices[~present]
            fresh = self._keep(missing)
            if not hits:
                return fresh
            if not memory.has(missing).all():  # no room for them, or another is writing them
                return self._joined(present, self._remembered(indices[present]), fresh)
        return self._remembered(indices)

    def _remembered(self, indices: Longs) -> Batch:
        """Samples that memory has."""
        assert self._memory is not None
        found = self._memory.gather(indices)
        self.counters.add("memory_bytes", found.nbytes)
        return found

    def _keep(self, indices: Longs) -> Sequence[Any]:
        """Decoded samples, kept in memory as far as there is room."""
        assert self._memory is not None
        fresh = self._decoded(indices)
        try:
            self._memory.admit(indices, fresh)
        except Frozen as error:
            self._memory_frozen(error)
        return fresh

    @staticmethod
    def _joined(present: npt.NDArray[np.bool_], kept: Batch, fresh: Sequence[Any]) -> Sequence[Any]:
        """One batch of the samples that memory has (`kept`) and of those that it lacks (`fresh`)."""
        if isinstance(fresh, Batch) and fresh.schema == kept.schema and kept.schema.fixed:
            return merged(present, kept, fresh)
        held, new = iter(kept), iter(fresh)
        return [next(held) if here else next(new) for here in present.tolist()]

    @property
    def _columns(self) -> ArrayOf | None:
        """`decode`, where whole batches are decoded at once."""
        return (
            self.decode if isinstance(self.decode, ArrayOf) and self.cache.shards.format in ("files", "tar") else None
        )

    def _decoded(self, indices: Longs) -> Sequence[Any]:
        if (decode := self._columns) is not None:
            return self._reader.arrays(indices, decode)
        raw = self._reader.samples(indices)
        return raw if self.decode is None else [self.decode(sample) for sample in raw]

    # ---- order

    @property
    def shard_starts(self) -> Longs:
        """The first sample of each shard, and the number of samples: (shards + 1,)."""
        return self._reader.starts

    def expect(self, order: Longs) -> None:
        """Tells in which order samples will be asked for; the filler goes ahead in it. DistributedSampler calls it."""
        if self.filler is not None and self.filler.running and os.getpid() == self._process:
            shards = self._reader.shards_of(order)
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
        """The iterable style: a rank's samples in the sampler's order, in collated batches (`batch_size=None`: one by
        one). See `Batches`."""
        from topkube.data.batches import Batches  # brings torch

        return Batches(self, batch_size, sampler or DistributedSampler(self), drop_last=drop_last, ahead=ahead)

    def warm(self, progress: Callable[[int], None] | None = None) -> None:
        """Returns when every shard of this rank's share is in the node's cache, or the cache is full."""
        filler = self.filler or Filler(self.cache, self._place)
        if self.filler is None:
            filler.start()
        try:
            filler.wait(progress)
        finally:
            if self.filler is None:
                filler.close()

    # ---- telling

    def statistics(self) -> dict[str, float]:
        """All counters (telemetry.cache_counters.NAMES) of this process and its workers; tiers' states, bytes."""
        found = self.counters.totals()
        found["disk_state"] = self.session.state
        found["memory_state"] = self.session.memory_state
        found["memory_used_bytes"] = self._memory.used if self._memory is not None else 0
        return found

    def __repr__(self) -> str:
        return (
            f"CachedDataset({self.uri!r}, {len(self):,} samples in {len(self.cache.shards):,} shards of "
            f"{self.cache.shards.format}, disk tier {STATES[self.session.state]})"
        )

    def close(self) -> None:
        """Ends the filling and lets the tiers go. Called at the end of the process at the latest."""
        self._end()
        if self._memory_filler is not None:
            self._memory_filler.close()
        if self._memory is not None:
            self._memory.close()

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: they open the dataset again, without a filler and alone."""
        return {**self._arguments, "uri": self.uri, "prefetch": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        global _opening_again
        _opening_again = True
        try:
            self.__init__(**state)  # type: ignore[misc]
        finally:
            _opening_again = False


def _close(cache: Cache, filler: Filler | None, process: int) -> None:
    if os.getpid() != process:
        return
    if filler is not None:
        filler.close()
    cache.close()
