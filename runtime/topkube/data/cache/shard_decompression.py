"""Decompression of cached shards. The result is also a shard of the cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from topkube.data.cache.cached_shards import CachedShards
from topkube.data.cache.disk.shard_file import ReceivedChecksums, ShardWriter
from topkube.data.cache.open_shards import ShardFile
from topkube.data.cache.shard_fetcher import ShardSource
from topkube.data.formats.compression import decompress
from topkube.data.formats.shards import DataShard
from topkube.errors import DatasetError

if TYPE_CHECKING:
    from topkube.data.cache.shard_cache import ShardCache

_RESERVED_AT_ONCE = 64 << 20
"""The bytes that are reserved at once for a shard that is being decompressed."""


def decompress_shard(
    cache: ShardCache, cached: CachedShards, shard: DataShard, file: int, source: ShardSource | None
) -> ReceivedChecksums:
    """Write the decompressed bytes of a shard of `cache` to the descriptor. `cached`: the shards in its disk tier. If
    the compressed shard was damaged after its last verification, it is fetched again."""
    number = shard.cache_number - len(cache.shards)
    for attempt in range(2):
        compressed = cache.open(number, source or cache.fetch_from_store)
        try:
            return _decompress_file(cache, compressed, file)
        except DatasetError:
            if attempt or not compressed.is_cached or cached.is_good(compressed.shard, compressed.file):
                raise
            cache.open_shards.forget(number)
            cache.node_state.clear_verified(number)
    raise AssertionError


def _decompress_file(cache: ShardCache, compressed: ShardFile, file: int) -> ReceivedChecksums:
    """Write the decompressed bytes of an open shard to the descriptor. If the descriptor is in the disk tier, its space
    is reserved step by step, because the size of the result is unknown."""
    shard, folder = compressed.shard, cache.folder
    in_tier = folder is not None and folder.is_being_published(file)
    reserved = -1 if in_tier else None
    with ShardWriter(file) as writer:

        def write(offset: int, data: Any) -> None:
            nonlocal reserved
            end = offset + len(data)
            if reserved is not None and end > reserved:
                reserved = min(2 * end, end + _RESERVED_AT_ONCE)
                assert folder is not None
                folder.reserve_more(file, reserved)
            writer.write(offset, data)
            cache.node_state.advance(len(data))

        size = decompress(
            compressed.file,
            shard.size,
            cache.shards.find_compression(shard.cache_number),
            cache.shards.listing.paths[shard.start],
            write,
        )
        os.ftruncate(file, size)
        return ReceivedChecksums(digest=writer.compute_digest(size))
