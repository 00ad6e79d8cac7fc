"""The job's status while it is being decided: read leniently, changed in place, compared with what is stored. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from topkube_operator.observed import Pod, Report, timestamp, written

Urgency = Literal["now", "soon", "progress"]
"""Transitions are written at once, counts of pods within a second, progress every 15 seconds at most."""
CONDITIONS = ("Created", "Scheduled", "Running", "Restarting", "Suspended", "Succeeded", "Failed")
PHASES = ("Pending", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed")
OURS = (
    "phase",
    "observedGeneration",
    "acceptedSpec",
    "workersReady",
    "conditions",
    "replicaStatuses",
    "progress",
    "cache",
    "attempt",
    "restarts",
    "disruptions",
    "firstFailure",
    "startTime",
    "completionTime",
)
_MAPPINGS = {
    "acceptedSpec": "accepted",
    "firstFailure": "first_failure",
    "progress": "progress",
    "cache": "cache",
    "replicaStatuses": "replicas",
}
_LONGEST_MESSAGE = 8192


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event on the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass
class Record:
    """One job's status. `set` notes an Event for every condition that changes."""

    now: datetime
    generation: int | None
    stored: Mapping[str, Any]
    phase: str = ""
    attempt: int = 0
    restarts: int = 0
    disruptions: int = 0
    start: datetime | None = None
    completion: datetime | None = None
    accepted: dict[str, Any] | None = None
    """The spec that the job follows."""
    workers_ready: str | None = None
    first_failure: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None
    replicas: dict[str, Any] | None = None
    conditions: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @classmethod
    def read(cls, status: Any, generation: int | None, pods: Iterable[Pod], now: datetime) -> Record:
        """From what is stored, whatever that is. A lost attempt number is the newest pod's."""
        stored = status if isinstance(status, dict) else {}
        record = cls(now=now, generation=generation, stored=stored)
        record.phase = stored["phase"] if stored.get("phase") in PHASES else ""
        newest = max((pod.attempt for pod in pods), default=0)
        attempt = stored.get("attempt")
        record.attempt = attempt if isinstance(attempt, int) and attempt >= 0 else newest
        record.restarts, record.disruptions = _count(stored.get("restarts")), _count(stored.get("disruptions"))
        record.start, record.completion = timestamp(stored.get("startTime")), timestamp(stored.get("completionTime"))
        ready = stored.get("workersReady")
        record.workers_ready = ready if isinstance(ready, str) else None
        for name, attribute in _MAPPINGS.items():
            value = stored.get(name)
            setattr(record, attribute, dict(value) if isinstance(value, dict) else None)
        conditions = stored.get("conditions")
        for one in conditions if isinstance(conditions, list) else ():
            if isinstance(one, dict) and one.get("type") in CONDITIONS and one.get("status") in ("True", "False"):
                record.conditions[one["type"]] = dict(one)
        return record

    def holds(self, condition: str, reason: str = "") -> bool:
        """Whether a condition is true (for this reason, where one is given)."""
        found = self.conditions.get(condition, {})
        return found.get("status") == "True" and reason in ("", found.get("reason"))

    def set(
        self,
        condition: str,
        status: bool,
        reason: str,
        message: str,
        event: Literal["Normal", "Warning"] | None = None,
    ) -> None:
        """Sets a condition. Its time moves only when `status` does; an Event is noted when status or reason change."""
        message = message[:_LONGEST_MESSAGE]
        before = self.conditions.get(condition, {})
        text = "True" if status else "False"
        moved = before.get("status") != text
        time = written(self.now) if moved else before.get("lastTransitionTime") or written(self.now)
        entry = {
            "type": condition,
            "status": text,
            "reason": reason,
            "message": message,
            "lastTransitionTime": time,
        }
        if self.generation is not None:
            entry["observedGeneration"] = self.generation
        if event and (moved or before.get("reason") != reason):
            self.events.append(Event(event, reason, message))
        self.conditions[condition] = entry

    def clear(self, condition: str, reason: str, message: str) -> None:
        """Makes a condition false where it is true; leaves out what was never true."""
        if self.holds(condition):
            self.set(condition, False, reason, message)

    def count(self, launcher: Pod | None, workers: Iterable[Pod], total: int, report: Report | None) -> None:
        """Replica counts. Ready workers are those that have called the launcher. Until a new operator has asked it,
        a running job keeps the count that it has."""
        workers = list(workers)
        counted = _counted(workers)
        before = self.replicas.get("workers") if self.replicas else None
        known = _count(before.get("ready")) if isinstance(before, dict) and self.phase == "Running" else 0
        counted["ready"] = min(report.joined if report is not None else known, counted["active"])
        self.replicas = {"launcher": _counted([launcher] if launcher else []), "workers": counted}
        self.workers_ready = f"{counted['ready']}/{total}"

    def to_dict(self) -> dict[str, Any]:
        """As `status` is stored; what is None is left out."""
        values = (
            self.phase or None,
            self.generation,
            self.accepted,
            self.workers_ready,
            [self.conditions[name] for name in CONDITIONS if name in self.conditions],
            self.replicas,
            self.progress,
            self.cache,
            self.attempt,
            self.restarts,
            self.disruptions,
            self.first_failure,
            written(self.start) if self.start else None,
            written(self.completion) if self.completion else None,
        )
        return {name: value for name, value in zip(OURS, values, strict=True) if value is not None}

    def patch(self) -> dict[str, Any]:
        """What has to change in the stored status: a merge patch, None where a field goes. Empty: nothing."""
        wanted = self.to_dict()
        return {
            name: _replacing(self.stored.get(name), wanted.get(name))
            for name in OURS
            if wanted.get(name) != self.stored.get(name)
        }


def urgency(patch: Mapping[str, Any], stored: Mapping[str, Any]) -> Urgency:
    """How soon a patch has to be written."""
    changed = set(patch)
    if "conditions" in changed and _states(patch["conditions"]) == _states(stored.get("conditions")):
        changed.discard("conditions")
        changed.add("replicaStatuses")
    if changed <= {"progress", "cache"}:
        return "progress"
    if changed <= {"progress", "cache", "replicaStatuses", "workersReady"}:
        return "soon"
    return "now"


def _replacing(before: Any, after: Any) -> Any:
    """`after` as a merge patch (RFC 7386) on `before`: mappings are merged there, so what goes has to be named."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    gone: dict[str, Any] = {name: None for name in before if name not in after}
    return gone | {name: _replacing(before.get(name), value) for name, value in after.items()}


def _states(conditions: Any) -> list[tuple[Any, ...]]:
    found = conditions if isinstance(conditions, list) else []
    return [(one.get("type"), one.get("status"), one.get("reason")) for one in found if isinstance(one, dict)]


def _counted(pods: list[Pod]) -> dict[str, int]:
    ended = [pod for pod in pods if pod.over]
    succeeded = sum(pod.succeeded for pod in ended)
    return {
        "active": len(pods) - len(ended),
        "ready": sum(pod.ready and not pod.over and pod.deletion is None for pod in pods),
        "succeeded": succeeded,
        "failed": len(ended) - succeeded,
    }


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
