"""The job's status while the planner decides it: read leniently, changed in place, compared with the stored status.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from topkube.timestamps import format_timestamp, parse_timestamp
from topkube_operator.model.observed import LauncherReport, Pod

Urgency = Literal["now", "soon", "progress"]
"""When to write a change: transitions at once, counts of pods within a second, progress every 15 seconds at most."""
CHECKPOINT_FAILED = "CheckpointFailed"
"""The condition that does not determine the phase of the job."""
CONDITIONS = ("Created", "Scheduled", "Running", "Restarting", "CheckpointFailed", "Suspended", "Succeeded", "Failed")
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
    "restartsInARow",
    "recentDisruptions",
    "firstFailure",
    "lostWorkers",
    "nodeFailures",
    "avoidedNodes",
    "startTime",
    "completionTime",
)
"""The fields of the status that the operator writes."""
_MAPPINGS = {
    "acceptedSpec": "accepted",
    "firstFailure": "first_failure",
    "progress": "progress",
    "cache": "cache",
    "replicaStatuses": "replicas",
}
"""The fields that hold a mapping, and the attributes of StatusDraft for them."""
_LONGEST_REASON, _LONGEST_MESSAGE = 64, 8192


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event on the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass
class StatusDraft:
    """One job's status, with the Events that its changes cause."""

    now: datetime
    generation: int | None
    stored: Mapping[str, Any]
    phase: str = ""
    attempt: int = 0
    restarts: int = 0
    disruptions: int = 0
    restarts_in_a_row: int = 0
    """Restarts and disruptions since the last attempt that ran for long. The pause before the next attempt grows with
    this number."""
    recent_disruptions: list[str] = field(default_factory=list)
    """Times of the disruptions that count against maxDisruptions."""
    lost_workers: list[int] = field(default_factory=list)
    """Indices of workers that the attempt replaces although they look alive; MOST_LOST_WORKERS entries: all workers."""
    node_failures: list[dict[str, Any]] = field(default_factory=list)
    """Failures of this job that began on a node."""
    avoided_nodes: list[dict[str, Any]] = field(default_factory=list)
    """Nodes that new pods of the job avoid."""
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
    def read(cls, status: Any, generation: int | None, pods: Iterable[Pod], now: datetime) -> StatusDraft:
        """Return the draft of a stored status, whatever is stored. If the attempt number is lost, the newest pod has
        it."""
        stored = status if isinstance(status, dict) else {}
        draft = cls(now=now, generation=generation, stored=stored)
        draft.phase = stored["phase"] if stored.get("phase") in PHASES else ""
        newest = max((pod.attempt for pod in pods), default=0)
        attempt = stored.get("attempt")
        draft.attempt = attempt if isinstance(attempt, int) and attempt >= 0 else newest
        draft.restarts, draft.disruptions = _read_count(stored.get("restarts")), _read_count(stored.get("disruptions"))
        in_a_row = stored.get("restartsInARow")
        total = draft.restarts + draft.disruptions
        draft.restarts_in_a_row = total if in_a_row is None else _read_count(in_a_row)
        draft.start = parse_timestamp(stored.get("startTime"))
        draft.completion = parse_timestamp(stored.get("completionTime"))
        ready = stored.get("workersReady")
        draft.workers_ready = ready if isinstance(ready, str) else None
        for name, attribute in _MAPPINGS.items():
            value = stored.get(name)
            setattr(draft, attribute, dict(value) if isinstance(value, dict) else None)
        times = stored.get("recentDisruptions")
        draft.recent_disruptions = [text for text in times if isinstance(text, str)] if isinstance(times, list) else []
        lost = stored.get("lostWorkers")
        draft.lost_workers = [index for index in lost if isinstance(index, int)] if isinstance(lost, list) else []
        draft.node_failures = _read_named_entries(stored.get("nodeFailures"))
        draft.avoided_nodes = _read_named_entries(stored.get("avoidedNodes"))
        conditions = stored.get("conditions")
        for entry in conditions if isinstance(conditions, list) else ():
            if isinstance(entry, dict) and entry.get("type") in CONDITIONS and entry.get("status") in ("True", "False"):
                draft.conditions[entry["type"]] = dict(entry)
        return draft

    def holds(self, condition: str, reason: str = "") -> bool:
        """Return True if a condition is true (and, if a reason is passed, true for this reason)."""
        entry = self.conditions.get(condition, {})
        return entry.get("status") == "True" and reason in ("", entry.get("reason"))

    def set_condition(
        self,
        condition: str,
        status: bool,
        reason: str,
        message: str,
        event: Literal["Normal", "Warning"] | None = None,
    ) -> None:
        """Set a condition. Its time changes only with `status`; an Event is added if the status or reason changes."""
        reason, message = reason[:_LONGEST_REASON], message[:_LONGEST_MESSAGE]
        before = self.conditions.get(condition, {})
        text = "True" if status else "False"
        status_changed = before.get("status") != text
        time = (
            format_timestamp(self.now)
            if status_changed
            else before.get("lastTransitionTime") or format_timestamp(self.now)
        )
        entry = {
            "type": condition,
            "status": text,
            "reason": reason,
            "message": message,
            "lastTransitionTime": time,
        }
        if self.generation is not None:
            entry["observedGeneration"] = self.generation
        if event and (status_changed or before.get("reason") != reason):
            self.events.append(Event(event, reason, message))
        self.conditions[condition] = entry

    def find_change_time(self, condition: str) -> datetime | None:
        """Return when the status of a condition changed last, by the operator's clock; None if it was never set."""
        return parse_timestamp(self.conditions.get(condition, {}).get("lastTransitionTime"))

    def clear_condition(self, condition: str, reason: str, message: str) -> None:
        """Make a true condition false. A condition that was never true stays absent."""
        if self.holds(condition):
            self.set_condition(condition, False, reason, message)

    def set_replica_counts(
        self, launcher: Pod | None, workers: Iterable[Pod], total: int, report: LauncherReport | None
    ) -> None:
        """Set the replica counts. Ready workers are those that have called the launcher. After an operator restart, a
        running job keeps its count until its launcher has answered the new operator."""
        workers = list(workers)
        counts = _count_pods(workers)
        before = self.replicas.get("workers") if self.replicas else None
        last_count = _read_count(before.get("ready")) if isinstance(before, dict) and self.phase == "Running" else 0
        counts["ready"] = min(report.joined if report is not None else last_count, counts["active"])
        self.replicas = {"launcher": _count_pods([launcher] if launcher else []), "workers": counts}
        self.workers_ready = f"{counts['ready']}/{total}"

    def to_dict(self) -> dict[str, Any]:
        """Return the status as it is stored. Fields that are None are left out."""
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
            self.restarts_in_a_row if self.restarts_in_a_row != self.restarts + self.disruptions else None,
            self.recent_disruptions or None,
            self.first_failure,
            self.lost_workers or None,
            self.node_failures or None,
            self.avoided_nodes or None,
            format_timestamp(self.start) if self.start else None,
            format_timestamp(self.completion) if self.completion else None,
        )
        return {name: value for name, value in zip(OURS, values, strict=True) if value is not None}

    def build_patch(self) -> dict[str, Any]:
        """Return the change of the stored status as a merge patch (None removes a field); empty if nothing changes."""
        current = self.to_dict()
        return {
            name: _build_merge_patch(self.stored.get(name), current.get(name))
            for name in OURS
            if current.get(name) != self.stored.get(name)
        }


def choose_urgency(patch: Mapping[str, Any], stored: Mapping[str, Any]) -> Urgency:
    """Return how soon a patch must be written."""
    changed = set(patch)
    if "conditions" in changed and _list_states(patch["conditions"]) == _list_states(stored.get("conditions")):
        changed.discard("conditions")
        changed.add("replicaStatuses")
    if changed <= {"progress", "cache"}:
        return "progress"
    if changed <= {"progress", "cache", "replicaStatuses", "workersReady"}:
        return "soon"
    return "now"


def _build_merge_patch(before: Any, after: Any) -> Any:
    """Return the merge patch (RFC 7386) that turns `before` into `after`. Fields to remove become None."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    removed: dict[str, Any] = {name: None for name in before if name not in after}
    return removed | {name: _build_merge_patch(before.get(name), value) for name, value in after.items()}


def _list_states(conditions: Any) -> list[tuple[Any, ...]]:
    entries = conditions if isinstance(conditions, list) else []
    return [
        (entry.get("type"), entry.get("status"), entry.get("reason")) for entry in entries if isinstance(entry, dict)
    ]


def _count_pods(pods: list[Pod]) -> dict[str, int]:
    ended = [pod for pod in pods if pod.has_ended]
    succeeded = sum(pod.has_succeeded for pod in ended)
    return {
        "active": len(pods) - len(ended),
        "ready": sum(pod.ready and not pod.has_ended and pod.deletion is None for pod in pods),
        "succeeded": succeeded,
        "failed": len(ended) - succeeded,
    }


def _read_named_entries(entries: Any) -> list[dict[str, Any]]:
    """Return the entries of a stored list that are mappings with a name."""
    entries = entries if isinstance(entries, list) else []
    return [dict(entry) for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)]


def _read_count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
