"""The CachedDataset: what the node caches hold of one dataset. `kubectl get cacheddatasets` lists them.

The node agents write it; people change only `spec.pinned`. Field names are stable, like those of the TrainingJob.
"""

from __future__ import annotations

import re

import xxhash
from pydantic import Field

from topkube.job.base.part import Part, Uri

CACHED_KIND = "CachedDataset"
CACHED_PLURAL = "cacheddatasets"
MOST_NODES = 1000


class CachedDatasetSpec(Part):
    """The dataset, and if it may be evicted."""

    uri: Uri = Field(description="address of the dataset, as in spec.dataset.uri of the jobs that read it")
    pinned: bool = Field(default=False, description="true: never evict the dataset to make room")


class NodeShare(Part):
    """What the cache of a node holds."""

    name: str = Field(description="name of the node")
    cached_bytes: int = Field(default=0, ge=0, description="bytes of whole shards")
    shards: int = Field(default=0, ge=0, description="whole shards")
    percent: int | None = Field(
        default=None, ge=0, le=100, description="cached share of the dataset in percent; absent if it is not known yet"
    )
    in_use: bool = Field(default=False, description="true if a pod of the node reads the dataset now")
    last_used: str | None = Field(default=None, description="time when a pod of the node last opened the dataset")
    updated_at: str | None = Field(default=None, description="time when the node's agent last reported")


class CachedDatasetStatus(Part):
    """What the node agents report."""

    total_bytes: int | None = Field(default=None, ge=0, description="bytes of the dataset in its newest listing")
    cached_percent: int | None = Field(
        default=None, ge=0, le=100, description="smallest share of the dataset that a listed node holds, in percent"
    )
    where: str | None = Field(
        default=None, max_length=512, description="nodes that hold parts of the dataset, for people"
    )
    last_used: str | None = Field(default=None, description="time when a pod on any node last opened the dataset")
    nodes: list[NodeShare] = Field(default=[], max_length=MOST_NODES, description="by node; the key is `name`")


def compute_dataset_id(uri: str) -> str:
    """Return the name of a dataset's folder in the disk tier (16 hexadecimal digits)."""
    return xxhash.xxh3_64_hexdigest(uri.encode())


def name_cached_dataset(uri: str) -> str:
    """Return the name of a dataset's CachedDataset: the end of its address, for people, and its ID."""
    words = re.sub(r"[^a-z0-9]+", "-", uri.partition("://")[2].lower().rstrip("/").rpartition("/")[2]).strip("-")
    return f"{words[:40].strip('-') or 'dataset'}-{compute_dataset_id(uri)}"
