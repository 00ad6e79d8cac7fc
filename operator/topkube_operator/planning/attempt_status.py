"""Write the phase, conditions, counts and progress of a running attempt into the status draft. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from topkube_operator.model import names
from topkube_operator.model.observed import LauncherReport, Observed
from topkube_operator.model.status import StatusDraft
from topkube_operator.planning.causes import rendezvous
from topkube_operator.planning.causes.failures import AttemptPods
from topkube_operator.planning.causes.pod_failures import find_blocked_container


@dataclass(frozen=True)
class Description:
    """The results of `describe_attempt` that the planner uses."""

    wake: datetime | None = None
    """When to plan again, if no event will cause it."""
    start_seconds: float | None = None
    """Seconds from the start of the job to its first running rank. None if that is not new."""


def begin_next_attempt(draft: StatusDraft, reason: str, message: str) -> None:
    """Count the next attempt, which has no pods yet."""
    draft.attempt += 1
    draft.conditions.pop("Created", None)  # its time is the beginning of the attempt
    draft.set_condition("Created", False, reason, message)
    draft.clear_condition("Scheduled", reason, message)
    draft.set_condition("Running", False, reason, message)


def describe_attempt(
    draft: StatusDraft, attempt: AttemptPods, observed: Observed, slots_per_worker: int
) -> Description:
    """Write the state of an attempt that has neither succeeded nor failed into `draft`."""
    report, wake, start_seconds = find_current_report(observed, attempt), None, None
    pods = [pod for pod in (attempt.launcher, *attempt.workers) if pod is not None]
    draft.set_replica_counts(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), report)
    waiting = [pod for pod in pods if pod.scheduling_message and not pod.node]
    blocked = find_blocked_container(pods)
    if waiting:
        reason, message = waiting[0].scheduling_reason, f"{waiting[0].name}: {waiting[0].scheduling_message}"
        count = f" ({len(waiting)} of {len(pods)} pods wait)" if len(waiting) > 1 else ""
        draft.set_condition(
            "Scheduled", False, reason, message + count, "Normal" if reason == "SchedulingGated" else "Warning"
        )
    elif draft.holds("Created") and all(pod.node for pod in pods):
        draft.set_condition("Scheduled", True, "PodsScheduled", "all pods have a node")
    is_running = report is not None and report.state in ("Running", "Succeeded")
    if is_running or draft.phase == "Running":  # ranks that have ended do not start again in this attempt
        start_seconds = _mark_running(draft, attempt, slots_per_worker)
    elif blocked:
        mark_pending(draft, "Pending", *blocked, "Warning")
    elif waiting:
        mark_pending(
            draft, "Pending", waiting[0].scheduling_reason, f"{waiting[0].name}: {waiting[0].scheduling_message}"
        )
    elif draft.holds("Created") and all(pod.container.started for pod in pods):
        message = "all pods run; ranks are starting"
        if report is not None and report.state == "Waiting" and report.missing:
            suspicious_from = rendezvous.find_suspicious_time(pods)
            wake = suspicious_from if suspicious_from > draft.now else None
            message = rendezvous.describe_missing_workers(
                attempt.names, report.missing, with_causes=draft.now >= suspicious_from
            )
        mark_pending(draft, "Starting", "Starting", message)
    elif draft.holds("Created"):
        mark_pending(draft, "Pending", "PodsPending", "pods are being started")
    if report is not None:
        _note_checkpoints(draft, report.progress or {}, attempt.number)
        draft.progress = dict(report.progress) if report.progress else draft.progress
        draft.cache = dict(report.cache) if report.cache else draft.cache
    return Description(wake, start_seconds)


def mark_created(draft: StatusDraft, attempt: AttemptPods) -> None:
    """Set the Created condition of an attempt whose pods have all been made."""
    count = len(attempt.workers) + (attempt.launcher is not None and attempt.launcher.role == names.LAUNCHER)
    draft.set_condition("Created", True, "PodsCreated", f"{count} pods of attempt {attempt.number}", "Normal")


def mark_pending(draft: StatusDraft, phase: str, reason: str, message: str, event: Any = None) -> None:
    """Set a phase before Running. After a restart the phase stays Restarting."""
    draft.phase = "Restarting" if draft.holds("Restarting") else phase
    before = draft.conditions.get("Running", {})
    if before.get("reason") == reason and str(before.get("message")).startswith(message):
        message = str(before["message"])  # the kubelet alternates between two messages for the same problem
    draft.set_condition("Running", False, reason, message, event)


def _note_checkpoints(draft: StatusDraft, progress: Mapping[str, Any], attempt: int) -> None:
    """Set the condition CheckpointFailed if checkpoints failed since the stored progress. Clear it if a newer
    checkpoint exists."""
    before = draft.progress or {}
    failed, step = progress.get("failedCheckpoints") or 0, progress.get("checkpointStep") or 0
    if failed and failed != before.get("failedCheckpoints"):
        checkpoints = "1 checkpoint" if failed == 1 else f"{failed} checkpoints"
        newest = f"the newest checkpoint is of step {step}" if step else "there is no checkpoint yet"
        message = f"{checkpoints} of attempt {attempt} could not be written; {newest}. Next: read the log of rank 0"
        draft.set_condition("CheckpointFailed", True, "CheckpointFailed", message, "Warning")
    elif step > (before.get("checkpointStep") or 0):
        draft.clear_condition("CheckpointFailed", "CheckpointWritten", f"a checkpoint of step {step} was written")


def find_current_report(observed: Observed, attempt: AttemptPods) -> LauncherReport | None:
    """Return the launcher's last report if it is about this attempt."""
    report = observed.report
    return report if report is not None and report.attempt == attempt.number else None


def _mark_running(draft: StatusDraft, attempt: AttemptPods, slots_per_worker: int) -> float | None:
    """Set phase Running. Return the seconds since the job's start if its first attempt has just begun to run."""
    if draft.phase == "Pending":  # clients that watch the job see every phase, however fast the ranks start
        mark_pending(draft, "Starting", "Starting", "all pods run; ranks are starting")
        return None
    seconds = None
    if draft.phase != "Running" and draft.attempt == 1 and draft.start is not None:
        seconds = (draft.now - draft.start).total_seconds()
    draft.phase = "Running"
    ranks = len(attempt.workers) * slots_per_worker
    message = f"{ranks} ranks on {len(attempt.workers)} workers, attempt {attempt.number}"
    draft.set_condition("Running", True, "Running", message, "Normal")
    draft.clear_condition("Restarting", "Running", message)
    return seconds
