"""The nodes of the cluster in the watch cache: contact, faults, labels, and nodes that were removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from datetime import UTC, datetime, timedelta
from typing import Any

from topkube_operator.children.placement import HOSTNAME
from topkube_operator.model.nodes import find_fault

_REMEMBERED = timedelta(minutes=10)
"""How long a removed node is remembered, at least."""


class KnownNodes:
    """The nodes of the cluster. `fault_conditions` are further condition types that report a fault if their status is
    True. Not safe for threads: the watch cache holds its lock."""

    def __init__(self, fault_conditions: Iterable[str] = ()) -> None:
        self._fault_conditions = tuple(fault_conditions)
        self._in_contact: dict[str, bool] = {}
        """True for nodes that the control plane is in contact with. Removed nodes are False."""
        self._cordoned: set[str] = set()
        self.faults: dict[str, str] = {}
        """The condition that reports a fault, by node."""
        self.hostnames: dict[str, str] = {}
        """The label by which the scheduler finds a node, by node."""
        self._labels: dict[str, Mapping[str, str]] = {}
        self._removed: dict[str, datetime] = {}
        """The time of removal of each removed node that is still known."""

    @property
    def names(self) -> Set[str]:
        """The names of all known nodes, also of removed nodes."""
        return self._in_contact.keys()

    def put(self, node: Mapping[str, Any]) -> bool:
        """Store a node. Return True if the node is new or its contact with the control plane has changed."""
        conditions, name = (node.get("status") or {}).get("conditions") or (), node["metadata"]["name"]
        self._removed.pop(name, None)
        labels = node["metadata"].get("labels") or {}
        self._labels[name], self.hostnames[name] = labels, labels.get(HOSTNAME) or name
        self.faults.pop(name, None)
        if fault := find_fault(conditions, self._fault_conditions):
            self.faults[name] = fault
        self._cordoned.discard(name)
        if (node.get("spec") or {}).get("unschedulable"):
            self._cordoned.add(name)
        ready = next((entry.get("status") for entry in conditions if entry.get("type") == "Ready"), "Unknown")
        return self._set_contact(name, ready != "Unknown")

    def remove(self, name: str) -> bool:
        """Store that a node is gone. Return True if the control plane was in contact with it, or it was not known."""
        changed = self._set_contact(name, False)
        self._removed.setdefault(name, datetime.now(UTC))
        self.faults.pop(name, None)
        self._cordoned.discard(name)
        return changed

    def find_nodes_removed_long_ago(self) -> set[str]:
        """Return the nodes that were removed more than 10 minutes ago."""
        oldest = datetime.now(UTC) - _REMEMBERED
        return {name for name, time in self._removed.items() if time < oldest}

    def forget(self, names: Iterable[str]) -> None:
        """Forget removed nodes."""
        for name in names:
            for index in (self._removed, self._in_contact, self.hostnames, self._labels):
                index.pop(name, None)

    def find_label(self, name: str, key: str) -> str:
        """Return a label of a node; empty if the node is not known or does not have it."""
        return self._labels.get(name, {}).get(key) or ""

    def is_in_contact(self, name: str) -> bool:
        """Return True if the node exists and the control plane is in contact with it."""
        return self._in_contact.get(name, False)

    def is_lost(self, name: str) -> bool:
        """Return True if a known node is gone or the control plane has lost contact with it. A node that was never seen
        is new, not lost."""
        return not self._in_contact.get(name, True)

    def count_schedulable(self) -> int:
        """Return the number of nodes in contact that are not cordoned."""
        return sum(in_contact and name not in self._cordoned for name, in_contact in self._in_contact.items())

    def _set_contact(self, name: str, in_contact: bool) -> bool:
        before = self._in_contact.get(name)
        self._in_contact[name] = in_contact
        return before != in_contact
