"""The index of the samples in a shard, computed from the listing or from the bytes of the shard."""

from __future__ import annotations

import os

from topkube.data.formats.sample_index import SampleIndex, index_files
from topkube.data.formats.shards import DataShard, Shards
from topkube.data.formats.tar import index_tar
from topkube.errors import DatasetError


def index_shard(shards: Shards, shard: DataShard, file: int) -> SampleIndex:
    """Return the positions of the samples in the shard that is open as `file`. A shard of files is not read. Raises
    DatasetError for a damaged or unsafe shard."""
    listing = shards.listing
    if shards.format == "files":
        paths = [listing.paths[position] for position in range(shard.start, shard.stop)]
        return index_files(paths, listing.sizes[shard.start : shard.stop])
    name = listing.paths[shard.start]
    index = index_tar(file, os.fstat(file).st_size, name)
    if not len(index):
        raise DatasetError(f"{name} has no samples", next_step="remove it from the dataset")
    return index
