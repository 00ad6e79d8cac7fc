"""Datasets on the disk of a node."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from topkube.data.cache.disk.dataset_folder import DatasetFolder
from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.job.cached_dataset import compute_dataset_id
from topkube_operator.node_cache.decisions import LocalDataset
from topkube_operator.node_cache.volume import Volume


def store_dataset(root: Path, namespace: str, uri: str, size: int = 1000, used: float | None = None) -> DatasetFolder:
    """Store a dataset as a job leaves it, last used at the time `used`."""
    folder = DiskTier(root / namespace).open_folder(uri)
    os.close(folder.publish(f"{size:032x}", size, lambda file: os.truncate(file, size)))
    folder.write_summary({"bytes": size, "shards": 1, "listing": "x"})
    if used is not None:
        os.utime(folder.path / "dataset.json", (used, used))
    return folder


class Disk(Volume):
    """The disk of a node with datasets of the namespace `team`, in memory. A later address was used later."""

    def __init__(self, uris: list[str]) -> None:
        self.uris, self.pinned = uris, set[str]()

    def measure_free_bytes(self) -> int:
        return 1 << 40

    def measure_total_bytes(self) -> int:
        return 1 << 41

    def list_namespaces(self) -> frozenset[str]:
        return frozenset(["team"])

    def read_datasets(self, namespace: str) -> list[LocalDataset]:
        return [
            LocalDataset(namespace, id_, uri, 1000, 1, 1000, last_used=number, pinned=id_ in self.pinned)
            for number, uri in enumerate(self.uris)
            for id_ in [compute_dataset_id(uri)]
        ]

    def apply(self, namespace: str, evict: Iterable[str], pin: Iterable[str], unpin: Iterable[str]) -> set[str]:
        removed = set(evict)
        self.uris = [uri for uri in self.uris if compute_dataset_id(uri) not in removed]
        self.pinned = (self.pinned | set(pin)) - set(unpin) - removed
        return removed
