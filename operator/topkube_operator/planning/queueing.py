"""The reports of a job to Kueue about its Workload: its pods are ready, its pods are gone, it has ended. Pure.

The operator is the controller of the job in Kueue's protocol. It makes the Workload, and makes pods while the Workload
is admitted. After an eviction it removes all pods, and then it gives the quota back.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from topkube.timestamps import format_timestamp
from topkube_operator.children import workloads
from topkube_operator.model.observed import Child
from topkube_operator.model.plan import StatusPatch
from topkube_operator.model.status import StatusDraft

_REQUEUED_AFTER = ("Preempted", "NodeFailures")
"""The evictions after which a Workload is queued again at once. After others, Kueue decides when: after a pause, or
when its queue is active again."""
_LONGEST_MESSAGE = 1024


def describe_waiting(workload: Child | None) -> tuple[str, str]:
    """Return why a job may not have pods, as reason and message."""
    if workload is None or workload.is_being_deleted:
        return "Queued", "a Workload asks Kueue for the job's admission"
    if workloads.has_condition(workload, "Evicted"):
        cause, now = _read_message(workload, "Evicted"), _read_message(workload, "QuotaReserved")
        is_waiting = now != cause and not workloads.has_condition(workload, "QuotaReserved")
        wait = f"; Kueue has not admitted the job again: {now}" if now and is_waiting else ""
        return "Evicted", f"Kueue has taken the quota back: {cause}{wait}"
    if workloads.has_condition(workload, "Finished"):
        end = _read_message(workload, "Finished")
        return "Queued", f"the Workload {workload.name} is finished: {end}. Next: suspend and resume the job"
    for kind in ("QuotaReserved", "Admitted"):
        if message := _read_message(workload, kind):
            return "Queued", f"Kueue has not admitted the job: {message}"
    return "Queued", f"Kueue has not processed the Workload {workload.name} yet: check that its LocalQueue is active"


def may_change_queue(workload: Child, queue: str) -> bool:
    """Return True if the Workload waits in another queue than `queue`, and can change it."""
    is_fixed = workload.is_being_deleted or any(
        workloads.has_condition(workload, kind) for kind in ("QuotaReserved", "Finished")
    )
    return not is_fixed and workload.content.get("queueName") != queue


def build_quota_return(workload: Child | None, now: datetime) -> StatusPatch | None:
    """Return the change of an evicted Workload whose pods are gone. None if it holds no quota."""
    if (
        workload is None
        or not workloads.has_condition(workload, "Evicted")
        or workloads.has_condition(workload, "Finished")
    ):
        return None
    if not workloads.has_condition(workload, "QuotaReserved"):
        return None
    reason, message = (
        str(workloads.find_condition(workload, "Evicted").get("reason")),
        _read_message(workload, "Evicted"),
    )
    changes = [
        ("QuotaReserved", False, "Pending", message),
        ("Admitted", False, "NoReservation", "The workload has no reservation"),
        ("PodsReady", False, "WaitForStart", "the pods are gone"),
        ("Requeued", reason in _REQUEUED_AFTER, reason, message),
    ]
    return _build_patch(workload, changes, now, {"admission": None})


def build_pods_report(workload: Child, draft: StatusDraft) -> StatusPatch | None:
    """Return the change of an admitted Workload that reports if all pods of the job run; None if nothing changes."""
    last_reason = str(workloads.find_condition(workload, "PodsReady").get("reason"))
    was_ready = last_reason in ("Started", "Recovered", "WaitForRecovery")
    if draft.phase == "Running":
        reason = "Recovered" if last_reason in ("WaitForRecovery", "Recovered") else "Started"
        return _build_patch(workload, [("PodsReady", True, reason, "all ranks run")], draft.now)
    reason = "WaitForRecovery" if was_ready else "WaitForStart"
    return _build_patch(workload, [("PodsReady", False, reason, f"the job is {draft.phase or 'Pending'}")], draft.now)


def build_end_report(workload: Child | None, draft: StatusDraft) -> StatusPatch | None:
    """Return the change that gives back the quota of a finished job; None if it is given back already."""
    if workload is None or workloads.has_condition(workload, "Finished"):
        return None
    message = str(draft.conditions.get(draft.phase, {}).get("message") or draft.phase)
    return _build_patch(workload, [("Finished", True, draft.phase, message)], draft.now)


def _read_message(workload: Child, kind: str) -> str:
    return str(workloads.find_condition(workload, kind).get("message") or "")


def _build_patch(
    workload: Child,
    changes: list[tuple[str, bool, str, str]],
    now: datetime,
    more: Mapping[str, Any] | None = None,
) -> StatusPatch | None:
    """Return the merge patch that sets conditions of a Workload; None if the Workload has them already."""
    stored = [dict(entry) for entry in workload.content.get("status", {}).get("conditions") or ()]
    conditions, has_changed = {str(entry.get("type")): entry for entry in stored}, bool(more)
    for kind, is_true, reason, message in changes:
        before, text = conditions.get(kind, {}), "True" if is_true else "False"
        if (before.get("status"), before.get("reason")) == (text, reason):
            continue
        has_moved = before.get("status") != text
        conditions[kind] = {
            "type": kind,
            "status": text,
            "reason": reason,
            "message": message[:_LONGEST_MESSAGE],
            "lastTransitionTime": format_timestamp(now) if has_moved else before.get("lastTransitionTime"),
        }
        has_changed = True
    if not has_changed:
        return None
    status = {"conditions": list(conditions.values()), **(more or {})}
    return StatusPatch(workload.kind, workload.name, workload.uid, workload.version, status)
