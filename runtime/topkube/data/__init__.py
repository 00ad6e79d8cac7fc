"""Training data: how samples are split over ranks, and the node-local cache that they are read through.

From the outside in: `dataset.py` (what torch sees) reads samples through `memory_tier.py` and `reader.py`; `cache.py`
gives the reader whole shards from `disk_tier.py` or from `store.py`; `fill.py` brings shards ahead of time, passing
them between nodes by `exchange.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from topkube.data.batch import ArrayOf, collate
from topkube.data.sampler import DistributedSampler

if TYPE_CHECKING:
    from topkube.data.batches import Batches
    from topkube.data.dataset import CachedDataset

__all__ = ["ArrayOf", "Batches", "CachedDataset", "DistributedSampler", "collate"]


def __getattr__(name: str) -> Any:
    if name == "CachedDataset":  # brings fsspec
        return importlib.import_module("topkube.data.dataset").CachedDataset
    if name == "Batches":
        return importlib.import_module("topkube.data.batches").Batches
    raise AttributeError(f"module 'topkube.data' has no attribute {name!r}")
