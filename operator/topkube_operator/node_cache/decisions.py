"""The decisions of a node agent: `decide` compares the cache with its limits, and with the pins and deletions that
people ask for in CachedDatasets. Pure.

`decide` keeps nothing between two calls: everything that it needs is on the disk or in the cluster, or is passed by the
agent. So an agent that was killed at any time continues from the state of the disk and the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from topkube.job.cached_dataset import MOST_NODES, NodeShare
from topkube.timestamps import format_timestamp, parse_timestamp

Name = tuple[str, str]
"""Namespace and id of a dataset."""
_FORGET_AFTER = timedelta(hours=1)
"""A node whose agent has been silent for this long is removed from the list."""
REPEAT_AFTER = timedelta(minutes=10)
"""An agent repeats an unchanged report after this time."""
MOST_REPORTED = 256
"""The most datasets of a namespace that an agent reports. Any pod of the namespace can make thousands of folders."""
MOST_OBJECTS = 1000
"""The number of CachedDatasets in a namespace from which on agents create no more."""
_LONGEST_NAMES = 500
"""Characters of the names of nodes. With the number of further nodes, they fit into the 512 that the CRD allows."""
_EPOCH = datetime.fromtimestamp(0, UTC)
_MINUTE = 60.0
_SHOWN_NODES = 3


@dataclass(frozen=True)
class LocalDataset:
    """A dataset on this node's disk. `total_bytes` is None until a job has listed the dataset."""

    namespace: str
    id: str
    uri: str
    cached_bytes: int = 0
    shards: int = 0
    total_bytes: int | None = None
    last_used: float = 0.0
    in_use: bool = False
    pinned: bool = False

    @property
    def name(self) -> Name:
        return self.namespace, self.id

    @property
    def percent(self) -> int | None:
        """The cached share of the dataset. It is 100 only if nothing is missing; None if the size is unknown."""
        if self.total_bytes is None:
            return None
        if self.cached_bytes >= self.total_bytes:
            return 100
        return min(99, 100 * self.cached_bytes // self.total_bytes)


@dataclass(frozen=True)
class CacheLimits:
    """`size`: maximum bytes of all datasets, None: the size of the volume. `free`: bytes of the volume to leave free.
    `idle_seconds`: datasets that nobody has used for this long are evicted, 0: idle datasets stay."""

    size: int | None = None
    free: int = 0
    idle_seconds: float = 0.0


@dataclass(frozen=True)
class CacheState:
    """Everything that `decide` reads."""

    allowed: frozenset[str] = frozenset()
    """Namespaces that may use the node cache: they have its claim (docs/data.md). They need a folder."""
    present: frozenset[str] = frozenset()
    """Namespaces with a folder on this node. Some may not be allowed any more."""
    datasets: tuple[LocalDataset, ...] = ()
    free: int = 0
    """Free bytes of the volume."""
    pin_requests: Mapping[Name, bool] = field(default_factory=dict)
    """True for each dataset whose CachedDataset asks to pin it, False for the others."""
    deleted: frozenset[Name] = frozenset()
    """Datasets whose CachedDataset somebody has deleted."""


@dataclass(frozen=True)
class Decisions:
    """Folders to create, datasets to remove (in this order), pins to set or remove."""

    create: tuple[str, ...] = ()
    evict: tuple[Name, ...] = ()
    pin: tuple[Name, ...] = ()
    unpin: tuple[Name, ...] = ()
    excess_bytes: int = 0
    """Bytes that exceed the limits after the eviction of everything that may be evicted."""


def decide(state: CacheState, limits: CacheLimits, now: float) -> Decisions:
    """Return what to do at `now` (Unix seconds)."""
    pinned = {dataset.name: state.pin_requests.get(dataset.name, dataset.pinned) for dataset in state.datasets}
    evicted = [dataset for dataset in state.datasets if dataset.name in state.deleted and not dataset.in_use]
    evictable = [
        dataset
        for dataset in state.datasets
        if dataset not in evicted and not dataset.in_use and not pinned[dataset.name]
    ]
    evictable.sort(key=lambda dataset: (dataset.last_used, dataset.name))
    if limits.idle_seconds:
        idle = [dataset for dataset in evictable if dataset.last_used < now - limits.idle_seconds]
        evicted += idle
        evictable = [dataset for dataset in evictable if dataset not in idle]
    evicted_bytes = sum(dataset.cached_bytes for dataset in evicted)
    used = sum(dataset.cached_bytes for dataset in state.datasets) - evicted_bytes
    free = state.free + evicted_bytes
    for dataset in evictable:
        if _count_excess_bytes(used, free, limits) == 0:
            break
        if dataset.cached_bytes:
            evicted.append(dataset)
            used, free = used - dataset.cached_bytes, free + dataset.cached_bytes
    evicted_names = {dataset.name for dataset in evicted}
    kept = [dataset for dataset in state.datasets if dataset.name not in evicted_names]
    return Decisions(
        create=tuple(sorted(state.allowed - state.present)),
        evict=tuple(dataset.name for dataset in evicted),
        pin=tuple(dataset.name for dataset in kept if pinned[dataset.name] and not dataset.pinned),
        unpin=tuple(dataset.name for dataset in kept if dataset.pinned and not pinned[dataset.name]),
        excess_bytes=_count_excess_bytes(used, free, limits),
    )


def _count_excess_bytes(used: int, free: int, limits: CacheLimits) -> int:
    excess = used - limits.size if limits.size is not None else 0
    return max(0, excess, limits.free - free)


# The status of CachedDatasets.
def select_reported(datasets: Iterable[LocalDataset]) -> list[LocalDataset]:
    """Return the datasets that the agent reports: of each namespace, those that were used last."""
    by_namespace: dict[str, list[LocalDataset]] = {}
    for dataset in sorted(datasets, key=lambda dataset: (-dataset.last_used, dataset.name)):
        by_namespace.setdefault(dataset.namespace, []).append(dataset)
    return [dataset for in_namespace in by_namespace.values() for dataset in in_namespace[:MOST_REPORTED]]


def build_share(dataset: LocalDataset, node: str, now: datetime) -> dict[str, Any]:
    """Return this node's entry in the status of a CachedDataset."""
    # Whole minutes, so that a dataset in use does not change the status with every report, and no time in the future.
    used = datetime.fromtimestamp(min(dataset.last_used, now.timestamp()) // _MINUTE * _MINUTE, UTC)
    entry = NodeShare(
        name=node,
        cached_bytes=dataset.cached_bytes,
        shards=dataset.shards,
        percent=dataset.percent,
        in_use=dataset.in_use,
        last_used=format_timestamp(used) if dataset.last_used > 0 else None,
        updated_at=format_timestamp(now),
    )
    return entry.model_dump(by_alias=True, exclude_none=True)


def build_status(stored: Any, node: str, dataset: LocalDataset | None, now: datetime) -> dict[str, Any] | None:
    """Return the status of a CachedDataset with this node's current entry; None if the status need not be written.

    `stored` is the current status, whatever it contains. `dataset` is None if the dataset is not on this node any more.
    """
    before = stored if isinstance(stored, dict) else {}
    entries = [
        entry for entry in before.get("nodes") or () if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    ]
    own = next((entry for entry in entries if entry["name"] == node), None)
    others = [entry for entry in entries if entry["name"] != node]
    kept = [entry for entry in others if _read_update_time(entry) >= now - _FORGET_AFTER]
    current = build_share(dataset, node, now) if dataset is not None else None
    if current is not None and own is not None and _is_same_share(current, own):
        current = own if _read_update_time(own) >= now - REPEAT_AFTER else current
    nodes = sorted([*kept, *([current] if current else [])], key=lambda entry: entry["name"])[:MOST_NODES]
    if nodes == entries and before:
        return None
    total = dataset.total_bytes if dataset is not None and dataset.total_bytes is not None else before.get("totalBytes")
    last_used = [entry["lastUsed"] for entry in nodes if entry.get("lastUsed")]
    return {
        "nodes": nodes,
        "where": _summarise_nodes(nodes),
        "cachedPercent": _find_lowest_percent(nodes),
        "lastUsed": max(last_used, default=before.get("lastUsed")),
        "totalBytes": total,
    }


def _is_same_share(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return {**first, "updatedAt": ""} == {**second, "updatedAt": ""}


def _summarise_nodes(nodes: Iterable[Mapping[str, Any]]) -> str | None:
    names = [str(entry["name"]) for entry in nodes if entry.get("cachedBytes")]
    more = f",+{len(names) - _SHOWN_NODES}" if len(names) > _SHOWN_NODES else ""
    return (",".join(names[:_SHOWN_NODES])[:_LONGEST_NAMES] + more) or None


def _find_lowest_percent(nodes: Iterable[Mapping[str, Any]]) -> int | None:
    return min((entry.get("percent") or 0 for entry in nodes if entry.get("cachedBytes")), default=None)


def _read_update_time(entry: Mapping[str, Any]) -> datetime:
    return parse_timestamp(entry.get("updatedAt")) or _EPOCH
