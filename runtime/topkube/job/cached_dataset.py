"""The CachedDataset: what the node cache holds of one dataset, as `kubectl get cacheddatasets` shows it.

The node agents write it; only `spec.pinned` is for people. The names are promises, as those of the TrainingJob are.
"""

from __future__ import annotations

import re

import xxhash
from pydantic import Field

from topkube.job.part import Part, Uri

CACHED_KIND = "CachedDataset"
CACHED_PLURAL = "cacheddatasets"
MOST_NODES = 1000


class CachedDatasetSpec(Part):
    """Which dataset, and what is wanted of it."""

    uri: Uri = Field(description="the dataset's address, as in spec.dataset.uri of the jobs that read it")
    pinned: bool = Field(default=False, description="true: never evicted to make room")


class NodeShare(Part):
    """What one node holds."""

    name: str = Field(description="the node")
    cached_bytes: int = Field(default=0, ge=0, description="bytes of whole shards")
    shards: int = Field(default=0, ge=0, description="whole shards")
    percent: int | None = Field(default=None, ge=0, le=100, description="share of the dataset; absent: not known yet")
    in_use: bool = Field(default=False, description="whether a pod of the node reads it now")
    last_used: str | None = Field(default=None, description="when a pod of the node last opened it")
    updated_at: str | None = Field(default=None, description="when the node's agent last said so")


class CachedDatasetStatus(Part):
    """What the node agents have found."""

    total_bytes: int | None = Field(default=None, ge=0, description="bytes of the dataset, by its newest listing")
    cached_percent: int | None = Field(
        default=None, ge=0, le=100, description="the least that a node of the list holds, of the whole dataset"
    )
    where: str | None = Field(default=None, max_length=512, description="the nodes that hold some of it, for people")
    last_used: str | None = Field(default=None, description="when a pod on any node last opened it")
    nodes: list[NodeShare] = Field(default=[], max_length=MOST_NODES, description="by node; the key is `name`")


def dataset_id(uri: str) -> str:
    """The name of a dataset's folder in the disk tier (16 hexadecimal digits)."""
    return xxhash.xxh3_64_hexdigest(uri.encode())


def object_name(uri: str) -> str:
    """The name of a dataset's CachedDataset: the end of its address, for people, and its id."""
    words = re.sub(r"[^a-z0-9]+", "-", uri.partition("://")[2].lower().rstrip("/").rpartition("/")[2]).strip("-")
    return f"{words[:40].strip('-') or 'dataset'}-{dataset_id(uri)}"
