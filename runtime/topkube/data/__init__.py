"""Training data: samplers that divide samples among ranks, and the cache of a node through which ranks read samples.

`dataset.py` has the dataset that torch uses. It reads samples through `cache/memory/memory_tier.py` and
`cache/sample_reader.py`. The reader opens whole shards with `cache/shard_cache.py`, which takes them from
`cache/disk/disk_tier.py` or from `remote/object_store.py`. `fill/` fetches shards ahead of time and exchanges them
between nodes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from topkube.data.base.batch import ArrayOf, collate
from topkube.data.mixing import MixedDataset, MixedSampler
from topkube.data.sampler import DistributedSampler

if TYPE_CHECKING:
    from topkube.data.batch_stream import Batches
    from topkube.data.dataset import CachedDataset

__all__ = ["ArrayOf", "Batches", "CachedDataset", "DistributedSampler", "MixedDataset", "MixedSampler", "collate"]


def __getattr__(name: str) -> Any:
    if name == "CachedDataset":  # loads fsspec
        return importlib.import_module("topkube.data.dataset").CachedDataset
    if name == "Batches":
        return importlib.import_module("topkube.data.batch_stream").Batches
    raise AttributeError(f"module 'topkube.data' has no attribute {name!r}")
