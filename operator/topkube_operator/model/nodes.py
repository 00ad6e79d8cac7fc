"""Faults of nodes: conditions that report a fault, and failures of jobs that began on a node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from topkube.timestamps import parse_timestamp

FAULT_CONDITIONS = (
    "KernelDeadlock",
    "ReadonlyFilesystem",
    "XfsShutdown",
    "CorruptDockerOverlay2",
    "CperHardwareErrorFatal",
    "KubeletUnhealthy",
    "ContainerRuntimeUnhealthy",
    "FrequentKubeletRestart",
    "FrequentContainerdRestart",
    "FrequentUnregisterNetDevice",
)
"""Condition types that report a fault if their status is True. The Node Problem Detector sets them."""
HEALTH_CONDITIONS = (
    "AcceleratedHardwareReady",
    "ContainerRuntimeReady",
    "KernelReady",
    "NetworkingReady",
    "StorageReady",
)
"""Condition types that report a fault if their status is False. Monitoring agents of cloud providers set them."""
REMEMBERED = timedelta(hours=1)
"""How long a failure counts against a node."""
_CLOCK_DIFFERENCE = timedelta(minutes=5)
"""The clocks of an earlier leader and of this operator may differ by this much. A failure with a later time was not
written by an operator."""


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """Failures of one job's attempts that began on one node."""

    node: str
    job: str
    """The UID of the job."""
    count: int
    reason: str
    at: datetime
    """The time of the last failure."""

    def counts_at(self, now: datetime) -> bool:
        """Return True if the failure counts against the node at the time `now`."""
        return now - REMEMBERED < self.at <= now + _CLOCK_DIFFERENCE


def find_fault(conditions: Iterable[Mapping[str, Any]], more_types: Iterable[str] = ()) -> str:
    """Return the type of the first condition that reports a fault of a node; empty if there is none. `more_types` are
    further condition types that report a fault if their status is True."""
    faults = {*FAULT_CONDITIONS, *more_types}
    for condition in conditions:
        kind, status = condition.get("type"), condition.get("status")
        if (kind in faults and status == "True") or (kind in HEALTH_CONDITIONS and status == "False"):
            return str(kind)
    return ""


def read_node_failures(uid: str, status: Any) -> tuple[NodeFailure, ...]:
    """Return the `nodeFailures` in the stored status of the job with UID `uid`, whatever is stored."""
    entries = status.get("nodeFailures") if isinstance(status, Mapping) else None
    failures = list[NodeFailure]()
    for entry in entries if isinstance(entries, list) else ():
        time = parse_timestamp(entry.get("lastFailureTime")) if isinstance(entry, Mapping) else None
        if time is None or not isinstance(entry.get("name"), str):
            continue
        count = entry.get("count")
        count = count if isinstance(count, int) and count > 0 else 1
        failures.append(NodeFailure(entry["name"], uid, count, str(entry.get("reason") or ""), time))
    return tuple(failures)
