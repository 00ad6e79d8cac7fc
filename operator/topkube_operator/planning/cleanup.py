"""The removal of pods after the end of a job or of an attempt: which pods, and when. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from topkube_operator.model.observed import Observed, Pod
from topkube_operator.model.plan import GroupEnd, Release, find_releases
from topkube_operator.model.status import StatusDraft
from topkube_operator.planning import accepted_spec
from topkube_operator.planning.causes.failures import AttemptPods

_NATURAL_END = timedelta(seconds=10)
"""How long workers that have the launcher's result may take to end by themselves."""
_LATE_REPORT = timedelta(seconds=30)
"""How long a kubelet may take to report the end of a pod after its wrapped container has ended. Sidecars end in this
time."""
_AFTER_DELETION = timedelta(seconds=5)


def compute_natural_end(pod: Pod, attempt: AttemptPods, draft: StatusDraft) -> datetime:
    """Return until when an active pod may end by itself, which keeps its log. For a pod that would not end by itself,
    this is the time at which the job ended."""
    ended = draft.find_change_time(draft.phase) or draft.now
    launcher_has_ended = attempt.launcher is not None and attempt.launcher_container.exit_code is not None
    if pod.has_ended or (pod is attempt.launcher and launcher_has_ended):
        return ended + _LATE_REPORT
    return ended + _NATURAL_END if launcher_has_ended and pod.container.started is not None else ended


def find_due_releases(
    pods: Iterable[Pod], draft: StatusDraft, observed: Observed
) -> tuple[tuple[Release, ...], list[datetime]]:
    """Return the releases of the launcher pods whose result the status already contains, and the times at which other
    launcher pods are due."""
    times = [(pod, _compute_release_time(pod, draft, observed)) for pod in pods if pod.has_finalizer]
    due_pods = [pod for pod, time in times if time is not None and time <= draft.now]
    return find_releases(due_pods), [time for _, time in times if time is not None and time > draft.now]


def _compute_release_time(pod: Pod, draft: StatusDraft, observed: Observed) -> datetime | None:
    """Return the time from which a launcher's pod needs no finalizer: the stored status contains the end of its
    attempt, or the pod cannot report anything more. None if its attempt continues. While the spec is invalid, the end
    of a pod that nobody deletes is assessed later, with a valid spec."""
    if accepted_spec.has_ended(draft) or not pod.is_launcher_of(draft.attempt):
        return draft.now
    is_kept = draft.phase != "Failed" or pod.deletion is None
    if draft.phase != "Suspended" and is_kept:
        return None
    is_silent = pod.node in observed.lost_nodes or pod.launcher_container.started is None
    if is_silent or pod.launcher_container.exit_code is not None or not pod.is_active:
        return draft.now
    return pod.deletion + _AFTER_DELETION if pod.deletion is not None else None


def find_group_ends(draft: StatusDraft, pods: Iterable[Pod]) -> tuple[GroupEnd, ...]:
    """Return the pods to mark, so that Kueue sees the end of the job. Otherwise Kueue waits for replacements of its
    pods, and keeps the quota of the group."""
    if draft.phase not in ("Succeeded", "Failed"):
        return ()
    return tuple(GroupEnd(pod.name, pod.uid) for pod in pods if pod.pod_group and pod.is_retriable)


def find_unused_pods(attempt: AttemptPods, pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods of this and older attempts that the attempt does not use: a late call of a former leader made
    them."""
    used = {pod.uid for pod in (attempt.launcher, *attempt.workers) if pod is not None}
    return [pod for pod in pods if pod.uid not in used and pod.attempt <= attempt.number]


def update_final_counts(draft: StatusDraft, attempt: AttemptPods) -> None:
    """Count the pods that are still ending. Pods that were cleaned up stay counted as they ended."""
    before = draft.replicas
    if not any(pod is not None for pod in (attempt.launcher, *attempt.workers)):
        if before:
            draft.replicas = {role: {**counts, "active": 0, "ready": 0} for role, counts in before.items()}
        return
    ready = draft.workers_ready
    draft.set_replica_counts(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), None)
    if draft.phase == "Succeeded":
        draft.workers_ready = ready  # all workers, from the end of the job
    assert draft.replicas is not None
    for role, counts in (before or {}).items():
        for end in ("succeeded", "failed"):
            role_counts = draft.replicas.setdefault(role, {"active": 0, "ready": 0, "succeeded": 0, "failed": 0})
            role_counts[end] = max(role_counts[end], counts.get(end, 0) if isinstance(counts, dict) else 0)
