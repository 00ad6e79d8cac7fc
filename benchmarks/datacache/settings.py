"""The contenders of benchmarks/cache.py with their settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CacheSetting:
    """A contender with its settings: its class in `contenders`, and the arguments of this class. It reads the datasets
    of these `forms`."""

    label: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = ("files", "shards")


OURS, OURS_DISK = (
    CacheSetting("TopKube", "OurCache", {"memory": True}),
    CacheSetting("TopKube, disk only", "OurCache", {"memory": False}),
)
PEERS = (
    CacheSetting("DataLoader + fsspec filecache", "FileCache", {"workers": 0}, ("shards",)),
    CacheSetting("DataLoader + fsspec filecache, 2 workers", "FileCache", {"workers": 2}, ("files",)),
    CacheSetting("litdata", "LitData", {"workers": 0}),
    CacheSetting("litdata, 2 workers", "LitData", {"workers": 2}),
    CacheSetting("MosaicML Streaming", "Mosaic", {"workers": 0}),
    CacheSetting("MosaicML Streaming, 2 workers", "Mosaic", {"workers": 2}),
)
CONTENDERS = (OURS, OURS_DISK, *PEERS)
OWN_SHARDS = {
    "LitData": ("litdata", "pip install 'topkube[bench]'"),
    "Mosaic": ("mosaic", "pip install mosaicml-streaming"),
}
"""The peers that have a format of their own: the ending of its folder, and how to install the peer."""
ARRAY, PAGES = CacheSetting("NumPy array in memory", "InMemory"), CacheSetting("page cache, same samples", "PageCache")
REFERENCES = {OURS.label: ARRAY, OURS_DISK.label: PAGES}
"""The upper bound that each of TopKube's settings is compared with."""
