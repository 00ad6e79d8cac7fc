"""The number of samples of each shard, counted once by all ranks together."""

from __future__ import annotations

import numpy as np

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.row_groups import RowGroups, count_parquet_rows
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.rank_messages import share_counts, share_failure
from topkube.data.remote.listing import UNKNOWN, Longs
from topkube.errors import TopKubeError


def count_samples(cache: ShardCache, place: RankPlace) -> Longs:
    """Return the number of samples of each shard. If shards must be read to count their samples, each rank reads a part
    of these shards. If `place` has several ranks, this is a collective."""
    counts = cache.shards.count_samples().copy()
    unknown = np.flatnonzero(counts == UNKNOWN)
    if not unknown.size:
        return counts
    failure: TopKubeError | None = None
    try:
        _count_own_shards(cache, place, unknown, counts)
    except TopKubeError as error:
        failure = error
    if place.world is not None:
        failure = share_failure(place.world.comm, failure)
        counts = share_counts(place.world.comm, counts)
    if failure is not None:
        raise failure
    return counts


def _count_own_shards(cache: ShardCache, place: RankPlace, unknown: Longs, counts: Longs) -> None:
    """Set the counts of the unknown shards that this rank reads. Raises TopKubeError."""
    shards = cache.shards
    has_rows = shards.format == "arrow" or (shards.format == "parquet" and shards.has_compressed)
    groups = RowGroups(cache) if has_rows else None
    for number in unknown.tolist():
        if place.find_home_rank(number) != place.rank:
            continue
        if shards.format == "parquet" and not shards.find_compression(number):
            counts[number] = count_parquet_rows(cache.store, shards.listing[number])
        elif groups is not None:
            counts[number] = groups.count_rows(number)
        else:
            counts[number] = len(cache.load_index(number))
