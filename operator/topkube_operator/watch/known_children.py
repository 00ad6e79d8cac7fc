"""The children of our jobs in the watch cache: pods and other objects, by name and by the job that owns them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from topkube_operator.model.observed import Child, Pod
from topkube_operator.watch.owner import Owner
from topkube_operator.watch.work_queue import Key

Name = tuple[str, str]
"""Namespace and name of any object."""


@dataclass(slots=True)
class Entry:
    """A child, the version of its object, and the job that owns it."""

    version: int
    uid: str
    owner: Owner
    value: Pod | Child


class KnownChildren:
    """The children of all jobs. Every index has the namespace in its key (`owner.py`). Not safe for threads: the watch
    cache holds its lock."""

    def __init__(self) -> None:
        self._by_kind: dict[str, dict[Name, Entry]] = {}
        self._of_owner: dict[Owner, dict[tuple[str, Name], Entry]] = {}
        self._owners: dict[Key, set[Owner]] = {}
        """The jobs that have children, by the key of the job. A key may have had several jobs."""
        self._on_node: dict[str, dict[Name, Owner]] = {}
        """The jobs of the pods on each node, by the name of the pod."""
        self._launchers: dict[Owner, dict[Name, Pod]] = {}
        """The pods of each job that contain a launcher."""

    def find(self, kind: str, name: Name) -> Entry | None:
        return self._by_kind.get(kind, {}).get(name)

    def list_kind(self, kind: str, namespace: str | None) -> list[tuple[Name, Entry]]:
        """Return the children of a kind in a namespace; None for all namespaces."""
        return [(name, entry) for name, entry in self._by_kind.get(kind, {}).items() if namespace in (None, name[0])]

    def list_children(self, owner: Owner) -> list[Pod | Child]:
        """Return the children of a job."""
        return [entry.value for entry in self._of_owner.get(owner, {}).values()]

    def list_pods(self) -> Iterator[tuple[Owner, Pod]]:
        """Yield all pods with their jobs."""
        for entry in self._by_kind.get("Pod", {}).values():
            if isinstance(entry.value, Pod):
                yield entry.owner, entry.value

    def list_launchers(self, owner: Owner) -> list[Pod]:
        """Return the pods of a job that contain a launcher."""
        return list(self._launchers.get(owner, {}).values())

    def find_owners_on_node(self, node: str) -> set[Owner]:
        """Return the jobs with pods on a node."""
        return set(self._on_node.get(node, {}).values())

    def find_pods(self, key: Key) -> list[tuple[Owner, Pod]]:
        """Return the pods, with their jobs, of all jobs that have had this key."""
        owners = self._owners.get(key, ())
        return [(owner, value) for owner in owners for value in self.list_children(owner) if isinstance(value, Pod)]

    def put(self, kind: str, name: Name, entry: Entry) -> None:
        """Store a child in place of the known child of this name."""
        if known := self.find(kind, name):
            self.forget(kind, name, known)
        self._by_kind.setdefault(kind, {})[name] = entry
        self._of_owner.setdefault(entry.owner, {})[kind, name] = entry
        self._owners.setdefault(entry.owner.key, set()).add(entry.owner)
        if isinstance(entry.value, Pod):
            if entry.value.node:
                self._on_node.setdefault(entry.value.node, {})[name] = entry.owner
            if entry.value.has_launcher:
                self._launchers.setdefault(entry.owner, {})[name] = entry.value

    def forget(self, kind: str, name: Name, entry: Entry) -> None:
        """Forget a known child."""
        del self._by_kind[kind][name]
        if isinstance(entry.value, Pod):
            _remove_entry(self._on_node, entry.value.node, name)
            _remove_entry(self._launchers, entry.owner, name)
        siblings = self._of_owner.get(entry.owner, {})
        siblings.pop((kind, name), None)
        if not siblings:
            self._of_owner.pop(entry.owner, None)
            owners = self._owners.get(entry.owner.key, set())
            owners.discard(entry.owner)
            if not owners:
                self._owners.pop(entry.owner.key, None)

    def forget_versions(self) -> None:
        """Treat the next version of every child as newer than the known version."""
        for entries in self._by_kind.values():
            for entry in entries.values():
                entry.version = -1


def _remove_entry(entries: dict[Any, dict[Name, Any]], index: Any, name: Name) -> None:
    """Remove the entry of a child from an index that may contain it."""
    named_entries = entries.get(index, {})
    named_entries.pop(name, None)
    if not named_entries:
        entries.pop(index, None)
