"""Nodes that the next attempt avoids: nodes with a fault, and nodes on which attempts failed first again and again.
Pure.

A failure is stored in the status of its job (`nodeFailures`) and is not counted after an hour. The operator has no
other memory of nodes, so a new leader avoids the same nodes. Tenants can make their own jobs fail, so failures of other
jobs count only from the third failure of at least two jobs on, and only a third of the nodes is avoided at a time. A
template may name a node that does not exist, so only nodes count that the operator has seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from topkube.job import TrainingJob
from topkube.job.fields.failure_policy import (
    AVOIDED_NODE_NEEDED,
    HARDWARE_FAULT,
    SCRIPT_ERRORS,
    SETUP_FAILED,
    SOURCE_UNAVAILABLE,
)
from topkube.job.status import MOST_NODES
from topkube.timestamps import format_timestamp, parse_timestamp
from topkube_operator.model.nodes import REMEMBERED, NodeFailure, read_node_failures
from topkube_operator.model.observed import Observed
from topkube_operator.model.status import Event, StatusDraft
from topkube_operator.planning.causes.pod_failures import Failure

_HARDWARE = ("NodeLost", "UnexpectedAdmissionError", "TopologyAffinityError", HARDWARE_FAULT)
"""One failure with such a reason is enough for the job to avoid the node."""
_NOT_THE_NODE = (*SCRIPT_ERRORS, SOURCE_UNAVAILABLE, SETUP_FAILED, "OOMKilled", "Evicted")
"""Reasons of failures that the job itself, or a store outside the cluster, causes."""
_LABEL_VALUE = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_OWN_FAILURES, _ALL_FAILURES, _JOBS = 2, 3, 2
"""Failures of the job itself, or of all jobs and of how many jobs, from which on a node is avoided."""
_URGENCY_FAULT, _URGENCY_HARDWARE, _URGENCY_OWN, _URGENCY_ALL = 3, 2, 1, 0
"""The urgency of avoiding a node: it reports a fault; the job failed there because of hardware; the job failed there
again and again; several jobs did."""


@dataclass(frozen=True)
class _Suspect:
    """A node to avoid. Nodes are ordered by urgency, and then by the number of failures."""

    urgency: int
    count: int
    name: str
    reason: str
    message: str
    until: datetime | None


def record_failure(draft: StatusDraft, failure: Failure, observed: Observed) -> None:
    """Count a failure against its node, if the node may be the cause."""
    by_cluster = failure.disruption and failure.reason not in (*_HARDWARE, "WorkerLost")
    if not _can_be_avoided(failure.node, observed) or by_cluster or failure.reason in _NOT_THE_NODE:
        return
    own_failures = {earlier.node: earlier for earlier in _find_own_failures(draft)}
    earlier_failure = own_failures.pop(failure.node, None)
    count = earlier_failure.count + 1 if earlier_failure is not None else 1
    others = sorted(own_failures.values(), key=lambda entry: (entry.at, entry.node))[1 - MOST_NODES :]
    entries = [*others, NodeFailure(failure.node, "", count, failure.reason, draft.now)]
    draft.node_failures = [
        {
            "name": entry.node,
            "count": entry.count,
            "reason": entry.reason,
            "lastFailureTime": format_timestamp(entry.at),
        }
        for entry in entries
    ]


def choose_avoided_nodes(job: TrainingJob, draft: StatusDraft, observed: Observed) -> None:
    """Store the nodes that the pods of the current attempt avoid in `draft.avoided_nodes`."""
    suspects = sorted(_find_suspects(draft, observed), key=lambda entry: (-entry.urgency, -entry.count, entry.name))
    if (draft.first_failure or {}).get("reason") == AVOIDED_NODE_NEEDED:
        suspects = []
    chosen = suspects[: _find_limit(job, observed)]
    before = {entry["name"] for entry in draft.avoided_nodes}
    draft.avoided_nodes = [_describe_suspect(suspect) for suspect in sorted(chosen, key=lambda entry: entry.name)]
    if {suspect.name for suspect in chosen} - before:
        causes = "; ".join(f"{entry['name']}: {entry['message']}" for entry in draft.avoided_nodes)
        draft.events.append(Event("Warning", "NodesAvoided", f"new pods of the job avoid {causes}"))


def forget_expired_nodes(draft: StatusDraft) -> datetime | None:
    """Remove avoided nodes whose time has passed. Return the next time at which there is something to remove; None if
    there is no such time."""
    entries = [(entry, parse_timestamp(entry.get("until"))) for entry in draft.avoided_nodes]
    draft.avoided_nodes = [entry for entry, until in entries if until is None or until > draft.now]
    return min((until for _, until in entries if until is not None and until > draft.now), default=None)


def _find_suspects(draft: StatusDraft, observed: Observed) -> list[_Suspect]:
    own_failures = {failure.node: failure for failure in _find_own_failures(draft)}
    own_failures = {node: failure for node, failure in own_failures.items() if _can_be_avoided(node, observed)}
    failures_of_others: dict[str, list[NodeFailure]] = {}
    for failure in observed.node_failures:
        if failure.counts_at(draft.now) and _can_be_avoided(failure.node, observed):
            failures_of_others.setdefault(failure.node, []).append(failure)
    suspects = [
        _Suspect(_URGENCY_FAULT, 0, node, fault, f"the node reports the condition {fault}", None)
        for node, fault in observed.node_faults.items()
        if _can_be_avoided(node, observed)
    ]
    for node in sorted({*own_failures, *failures_of_others} - observed.node_faults.keys()):
        own_failure, other_failures = own_failures.get(node), failures_of_others.get(node, [])
        all_failures = [*other_failures, *([own_failure] if own_failure is not None else [])]
        count = sum(failure.count for failure in all_failures)
        if own_failure is not None and own_failure.reason in _HARDWARE:
            message = f"an attempt of this job ended there: {own_failure.reason}"
            suspects.append(
                _Suspect(_URGENCY_HARDWARE, count, node, own_failure.reason, message, own_failure.at + REMEMBERED)
            )
        elif own_failure is not None and own_failure.count >= _OWN_FAILURES:
            message = f"{own_failure.count} attempts of this job failed there first, the last with {own_failure.reason}"
            suspects.append(
                _Suspect(_URGENCY_OWN, count, node, own_failure.reason, message, own_failure.at + REMEMBERED)
            )
        elif count >= _ALL_FAILURES and len(all_failures) >= _JOBS:
            last = max(all_failures, key=lambda failure: (failure.at, failure.reason))
            message = f"{count} attempts of {len(all_failures)} jobs failed there first, the last with {last.reason}"
            suspects.append(_Suspect(_URGENCY_ALL, count, node, last.reason, message, last.at + REMEMBERED))
    return suspects


def _can_be_avoided(node: str, observed: Observed) -> bool:
    """Return True if the operator has seen the node, and the node's hostname is valid in a rule. Without the right to
    list nodes, every node counts as seen."""
    has_been_seen = node in observed.hostnames or not observed.nodes
    return has_been_seen and _LABEL_VALUE.fullmatch(observed.hostnames.get(node, node)) is not None


def _find_limit(job: TrainingJob, observed: Observed) -> int:
    """Return the largest number of nodes to avoid: a third of all nodes, and enough nodes are left for the workers."""
    needed = job.spec.workers if job.spec.spread == "Node" else 1
    spare = observed.nodes - needed if observed.nodes else 1  # without the right to list nodes, avoid one
    return max(0, min(max(1, observed.nodes // 3), spare, MOST_NODES))


def _find_own_failures(draft: StatusDraft) -> list[NodeFailure]:
    """Return the failures of the job itself that still count."""
    failures = read_node_failures("", {"nodeFailures": draft.node_failures})
    return [failure for failure in failures if failure.counts_at(draft.now)]


def _describe_suspect(suspect: _Suspect) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": suspect.name, "reason": suspect.reason, "message": suspect.message}
    return entry if suspect.until is None else {**entry, "until": format_timestamp(suspect.until)}
