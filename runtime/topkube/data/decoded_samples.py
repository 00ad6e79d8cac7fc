"""Decoded samples of a dataset: from the memory tier, or read from their shards, decoded and stored in the tier."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.data.base.batch import ArrayOf, Batch, Decode, merge_batches
from topkube.data.base.open_files import is_files_pressure
from topkube.data.cache.memory.memory_tier import Frozen, MemoryTier
from topkube.data.cache.node_state import NodeState
from topkube.data.cache.sample_reader import SampleReader
from topkube.data.fill.memory_filler import ReadsInProgress
from topkube.data.remote.listing import Longs


class DecodedSamples:
    """The samples that `reader` reads and `decode` decodes. If `memory` is None, they are not stored. Threads may share
    it."""

    def __init__(self, reader: SampleReader, decode: Decode | None, memory: MemoryTier | None) -> None:
        self._reader, self._decode_sample, self.memory = reader, decode, memory
        self._counters = reader.cache.counters
        self.reads = ReadsInProgress()
        self.array_decode = (
            decode if isinstance(decode, ArrayOf) and reader.cache.shards.format in ("files", "tar") else None
        )
        """The `decode` function if it decodes whole batches at once; else None."""

    def get_batch(self, indices: Longs) -> Sequence[Any]:
        """Return decoded samples: a Batch if they are stored in columns, else a list. All indices must be valid and not
        negative."""
        memory = self.memory
        if memory is None:
            return self._decode(indices)
        if (batch := memory.gather_present(indices)) is not None:
            self._counters.add_memory_hits(indices.size, batch.nbytes)
            self.reads.last_end = time.monotonic()
            return batch
        self.reads.begin()
        try:
            return self._read_tiers(memory, indices)
        finally:
            self.reads.end()

    def _read_tiers(self, memory: MemoryTier, indices: Longs) -> Sequence[Any]:
        """Return decoded samples from the memory tier. Samples that it does not have are decoded and stored in it."""
        present = memory.has(indices)
        hits = int(np.count_nonzero(present))
        self._counters.add("memory_requests", indices.size)
        if hits < indices.size:
            self._counters.add("memory_misses", indices.size - hits)
            missing = indices[~present]
            fresh = self.decode_and_store(missing)
            if not hits:
                return fresh
            if not memory.has(missing).all():  # there was no room, or another process is writing them
                return _join_batches(present, self._read_memory(memory, indices[present]), fresh)
        return self._read_memory(memory, indices)

    def _read_memory(self, memory: MemoryTier, indices: Longs) -> Batch:
        """Return samples from the memory tier, which has all of them."""
        batch = memory.gather(indices)
        self._counters.add("memory_bytes", batch.nbytes)
        return batch

    def decode_and_store(self, indices: Longs) -> Sequence[Any]:
        """Return decoded samples. Samples for which there is room are stored in the memory tier."""
        assert self.memory is not None
        fresh = self._decode(indices)
        try:
            self.memory.admit(indices, fresh)
        except Frozen as error:
            report_frozen_memory(self._reader.cache.node_state, error)
        except OSError as error:
            if not is_files_pressure(error):
                raise
        return fresh

    def _decode(self, indices: Longs) -> Sequence[Any]:
        """Read samples from their shards and decode them."""
        if self.array_decode is not None:
            return self._reader.read_arrays(indices, self.array_decode)
        raw = self._reader.read_samples(indices)
        return raw if self._decode_sample is None else [self._decode_sample(sample) for sample in raw]


def _join_batches(present: npt.NDArray[np.bool_], kept: Batch, fresh: Sequence[Any]) -> Sequence[Any]:
    """Return one batch: the next sample of `kept` at every position where `present` is true, else the next sample of
    `fresh`."""
    if isinstance(fresh, Batch) and fresh.schema == kept.schema and kept.schema.has_fixed_shape:
        return merge_batches(present, kept, fresh)
    kept_samples, fresh_samples = iter(kept), iter(fresh)
    return [next(kept_samples) if is_kept else next(fresh_samples) for is_kept in present.tolist()]


def report_frozen_memory(node_state: NodeState, error: OSError) -> None:
    """Freeze the memory tier of the node. Only one process of the node reports the change."""
    if node_state.freeze_memory_tier():
        print(
            f"topkube: the memory cache takes no more samples ({error.strerror or error}); "
            "all other samples are read from the disk cache",
            file=sys.stderr,
            flush=True,
        )
