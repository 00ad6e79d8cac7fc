"""Attempts whose pods wait: when they give their nodes back, and when they may use the nodes that they avoid. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from topkube.job import FailurePolicy
from topkube.job.fields.failure_policy import AVOIDED_NODE_NEEDED, PENDING_TIMEOUT
from topkube_operator.model import names
from topkube_operator.model.observed import Observed, Pod
from topkube_operator.model.status import StatusDraft
from topkube_operator.planning import pacing
from topkube_operator.planning.causes.failures import AttemptPods, Verdict
from topkube_operator.planning.causes.pod_failures import Failure, find_blocked_container

_AVOIDANCE = timedelta(seconds=60)
"""How long pods without a node wait for other nodes than the avoided nodes."""


def assess_waiting(policy: FailurePolicy, attempt: AttemptPods, draft: StatusDraft, observed: Observed) -> Verdict:
    """Return the verdict on an attempt that has not failed: failed if its pods have waited for too long."""
    pods = [pod for pod in (attempt.launcher, *attempt.workers) if pod is not None]
    if any(pod.has_ended or pod.deletion is not None for pod in pods):
        pods = [pod for pod in pods if not pod.has_ended and pod.deletion is None]
        if draft.holds("Created"):
            return Verdict("running")  # a verdict on the ended pod comes
    since = (
        draft.find_change_time("Created")
        if draft.holds("Created")
        else pacing.compute_earliest_start(draft, observed.policy)
    )
    verdicts = [
        _assess_avoidance(pods, draft, observed, since or draft.now),
        _assess_partial_gang(policy, attempt, pods, draft, since or draft.now),
    ]
    failed = next((verdict for verdict in verdicts if verdict.state == "failed"), None)
    until = min((verdict.until for verdict in verdicts if verdict.until is not None), default=None)
    return failed or Verdict("running", until=until)


def _assess_avoidance(pods: list[Pod], draft: StatusDraft, observed: Observed, since: datetime) -> Verdict:
    """Return a failure if pods that avoid nodes found no other node, or if the API server refuses these pods: avoiding
    nodes must not stop a job."""
    waiting = _find_unplaced_pods(pods) if draft.holds("Created") else _find_refused_pods(draft, observed)
    if not waiting:
        return Verdict("running")
    due = since + _AVOIDANCE
    if draft.now < due:
        return Verdict("running", until=due)
    nodes = ", ".join(str(entry["name"]) for entry in draft.avoided_nodes)
    first, problem = next(iter(waiting.items()))
    message = f"{problem}, so the next attempt may use the avoided nodes" + (f" ({nodes})" if nodes else "")
    return Verdict("failed", Failure(AVOIDED_NODE_NEEDED, message, first, disruption=True, lost=frozenset(waiting)))


def _find_unplaced_pods(pods: list[Pod]) -> dict[str, str]:
    """Return the pods that avoid nodes and for which the scheduler finds no node, with its message."""
    return {
        pod.name: f"found no node in {_AVOIDANCE.seconds} s ({pod.scheduling_message})"
        for pod in pods
        if pod.avoids_nodes and not pod.node and pod.scheduling_reason == "Unschedulable" and pod.scheduling_message
    }


def _find_refused_pods(draft: StatusDraft, observed: Observed) -> dict[str, str]:
    """Return the pods that avoid nodes and that the API server refuses, with its message."""
    return {
        name: f"was refused for {_AVOIDANCE.seconds} s ({trouble.message})"
        for (kind, name), trouble in observed.troubles.items()
        if kind == "Pod" and trouble.reason == "Refused" and draft.avoided_nodes
    }


def _assess_partial_gang(
    policy: FailurePolicy, attempt: AttemptPods, pods: list[Pod], draft: StatusDraft, since: datetime
) -> Verdict:
    """Return a failure if workers have occupied nodes for pendingTimeoutSeconds while other pods have not started."""
    holding = [pod.scheduled or pod.created for pod in pods if pod.role == names.WORKER and pod.node]
    waiting = [pod for pod in pods if pod.container.started is None]
    missing = len(attempt.workers) - sum(worker is not None for worker in attempt.workers)
    if policy.pending_timeout_seconds is None or not holding or not (waiting or missing or attempt.launcher is None):
        return Verdict("running")
    due = max(since, min(holding)) + timedelta(seconds=policy.pending_timeout_seconds)
    if draft.now < due:
        return Verdict("running", until=due)
    cause = _describe_cause(waiting)
    message = (
        f"pods have occupied nodes for {policy.pending_timeout_seconds} s while others have not started"
        f"{cause}: all pods of the attempt are deleted"
    )
    first = waiting[0].name if waiting else ""
    lost = frozenset(pod.name for pod in pods)
    return Verdict("failed", Failure(PENDING_TIMEOUT, message, first, disruption=True, lost=lost))


def _describe_cause(waiting: list[Pod]) -> str:
    blocked = find_blocked_container(waiting)
    if blocked is not None:
        return f" ({blocked[1]})"
    refused = next((pod for pod in waiting if pod.scheduling_message), None)
    return f" ({refused.name}: {refused.scheduling_message})" if refused is not None else ""
