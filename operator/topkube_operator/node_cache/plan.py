"""What a node agent does next: `plan` looks at what there is and says what should be. Pure.

Nothing is remembered between two calls but the names of datasets that the cluster has known: an agent that was killed
at any moment goes on by looking again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from topkube.job.cached_dataset import MOST_NODES, NodeShare

Name = tuple[str, str]
"""Namespace, and id of a dataset."""
_FORGOTTEN = timedelta(hours=1)
"""A node whose agent has been silent for so long is taken off the list."""
_AGAIN = timedelta(minutes=10)
"""So often an agent says what it has said before."""
_MINUTE = 60.0
_SHOWN_NODES = 3


@dataclass(frozen=True)
class Folder:
    """A dataset in this node's cache, as found on the disk. `total_bytes`: None where no job has listed it yet."""

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
        """100 only where nothing is missing."""
        if self.total_bytes is None:
            return None
        if self.cached_bytes >= self.total_bytes:
            return 100
        return min(99, 100 * self.cached_bytes // self.total_bytes)


@dataclass(frozen=True)
class Limits:
    """`size`: most bytes of all datasets, None: what the volume holds. `free`: bytes of the volume that stay free.
    `idle_seconds`: datasets that nobody has opened for so long go, 0: they stay."""

    size: int | None = None
    free: int = 0
    idle_seconds: float = 0.0


@dataclass(frozen=True)
class Found:
    """All that `plan` looks at. `wishes`: by dataset, whether its CachedDataset asks for it to be pinned; `deleted`:
    datasets whose CachedDataset somebody has deleted."""

    allowed: frozenset[str] = frozenset()
    """Namespaces with a node cache."""
    present: frozenset[str] = frozenset()
    """Namespaces with a folder."""
    folders: tuple[Folder, ...] = ()
    free: int = 0
    wishes: Mapping[Name, bool] = field(default_factory=dict)
    deleted: frozenset[Name] = frozenset()


@dataclass(frozen=True)
class Plan:
    """Folders to make, datasets to remove (in this order), pins to set or take away."""

    make: tuple[str, ...] = ()
    evict: tuple[Name, ...] = ()
    pin: tuple[Name, ...] = ()
    unpin: tuple[Name, ...] = ()
    lacking: int = 0
    """Bytes that are still missing after all that may go has gone."""


def plan(found: Found, limits: Limits, now: float) -> Plan:
    """`now`: Unix seconds."""
    pinned = {one.name: found.wishes.get(one.name, one.pinned) for one in found.folders}
    goes = [one for one in found.folders if one.name in found.deleted and not one.in_use]
    free = [one for one in found.folders if one not in goes and not one.in_use and not pinned[one.name]]
    free.sort(key=lambda one: (one.last_used, one.name))
    if limits.idle_seconds:
        idle = [one for one in free if one.last_used < now - limits.idle_seconds]
        goes += idle
        free = [one for one in free if one not in idle]
    used = sum(one.cached_bytes for one in found.folders) - sum(one.cached_bytes for one in goes)
    left = found.free + sum(one.cached_bytes for one in goes)
    for one in free:
        if _lacking(used, left, limits) == 0:
            break
        if one.cached_bytes:
            goes.append(one)
            used, left = used - one.cached_bytes, left + one.cached_bytes
    gone = {one.name for one in goes}
    return Plan(
        make=tuple(sorted(found.allowed - found.present)),
        evict=tuple(one.name for one in goes),
        pin=tuple(one.name for one in found.folders if one.name not in gone and pinned[one.name] and not one.pinned),
        unpin=tuple(one.name for one in found.folders if one.name not in gone and one.pinned and not pinned[one.name]),
        lacking=_lacking(used, left, limits),
    )


def _lacking(used: int, left: int, limits: Limits) -> int:
    over = used - limits.size if limits.size is not None else 0
    return max(0, over, limits.free - left)


# What the cluster is told.


def share(folder: Folder, node: str, now: datetime) -> dict[str, Any]:
    """This node's entry in the status."""
    used = datetime.fromtimestamp(min(folder.last_used, now.timestamp()) // _MINUTE * _MINUTE, UTC)
    entry = NodeShare(
        name=node,
        cached_bytes=folder.cached_bytes,
        shards=folder.shards,
        percent=folder.percent,
        in_use=folder.in_use,
        last_used=_written(used) if folder.last_used > 0 else None,
        updated_at=_written(now),
    )
    return entry.model_dump(by_alias=True, exclude_none=True)


def status(stored: Any, node: str, folder: Folder | None, now: datetime) -> dict[str, Any] | None:
    """The status with this node's entry as it should be, from what is stored, whatever that is; None where nothing is
    to be written. `folder` None: the dataset is not on this node any more."""
    before = stored if isinstance(stored, dict) else {}
    entries = [one for one in before.get("nodes") or () if isinstance(one, dict) and isinstance(one.get("name"), str)]
    own = next((one for one in entries if one["name"] == node), None)
    others = [one for one in entries if one["name"] != node]
    kept = [one for one in others if _time(one.get("updatedAt")) >= now - _FORGOTTEN]
    wanted = share(folder, node, now) if folder is not None else None
    if wanted is not None and own is not None and _same(wanted, own):
        recent = _time(own.get("updatedAt")) >= now - _AGAIN
        wanted = own if recent else wanted
    nodes = sorted([*kept, *([wanted] if wanted else [])], key=lambda one: one["name"])[:MOST_NODES]
    if nodes == entries and before:
        return None
    total = folder.total_bytes if folder is not None and folder.total_bytes is not None else before.get("totalBytes")
    return {
        "nodes": nodes,
        "where": _where(nodes),
        "cachedPercent": _least(nodes),
        "lastUsed": max((one["lastUsed"] for one in nodes if one.get("lastUsed")), default=before.get("lastUsed")),
        "totalBytes": total,
    }


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return {**one, "updatedAt": ""} == {**other, "updatedAt": ""}


def _where(nodes: Iterable[Mapping[str, Any]]) -> str | None:
    names = [str(one["name"]) for one in nodes if one.get("cachedBytes")]
    more = f",+{len(names) - _SHOWN_NODES}" if len(names) > _SHOWN_NODES else ""
    return (",".join(names[:_SHOWN_NODES])[:500] + more) or None


def _least(nodes: Iterable[Mapping[str, Any]]) -> int | None:
    return min((one.get("percent") or 0 for one in nodes if one.get("cachedBytes")), default=None)


def _time(text: Any) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return datetime.fromtimestamp(0, UTC)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _written(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
