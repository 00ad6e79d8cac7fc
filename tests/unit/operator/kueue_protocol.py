"""The status that Kueue writes into a Workload: quota, admission and evictions. The functions have no side effects.

The source is Kueue's API for Workloads (v1beta1 and v1beta2) and its description of custom jobs. The
simulated Kueues of the tests use these functions, in a simulated cluster and on a real API server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from topkube.timestamps import format_timestamp

BACKOFF = ("PodsReadyTimeout", "AdmissionCheck")
"""The reasons of evictions after which Kueue queues the Workload again when a pause is over."""


def find_condition(workload: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a condition of a Workload, or an empty dict if the Workload does not have the condition."""
    entries = (workload.get("status") or {}).get("conditions") or ()
    return next((dict(entry) for entry in entries if entry["type"] == kind), {})


def has_true_condition(workload: Mapping[str, Any], kind: str) -> bool:
    """Return True if a condition of a Workload is true."""
    return find_condition(workload, kind).get("status") == "True"


def holds_quota(workload: Mapping[str, Any]) -> bool:
    """Return True if quota is reserved for a Workload that has not finished."""
    return has_true_condition(workload, "QuotaReserved") and not has_true_condition(workload, "Finished")


def may_be_admitted(workload: Mapping[str, Any]) -> bool:
    """Return True if a Workload waits in its queue."""
    is_over = (
        has_true_condition(workload, "Finished")
        or holds_quota(workload)
        or bool(workload["metadata"].get("deletionTimestamp"))
    )
    is_paused = find_condition(workload, "Requeued").get("status") == "False"
    return not is_over and not is_paused and workload["spec"].get("active", True) is not False


def count_pods(workload: Mapping[str, Any]) -> int:
    """Return the number of pods of all pod sets of a Workload."""
    return sum(pod_set.get("count", 1) for pod_set in workload["spec"]["podSets"])


def build_admitted_status(
    workload: Mapping[str, Any],
    flavors: Mapping[str, str],
    now: datetime,
    checks: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the status of a Workload that has quota and is admitted. `flavors`: the ResourceFlavor of each resource.
    An earlier eviction is over."""
    assignments = [
        {"name": pod_set["name"], "flavors": dict(flavors), "count": pod_set.get("count", 1)}
        for pod_set in workload["spec"]["podSets"]
    ]
    status = {
        **(workload.get("status") or {}),
        "admission": {"clusterQueue": "simulated", "podSetAssignments": assignments},
        "admissionChecks": [dict(check) for check in checks],
    }
    changes = {"QuotaReserved": (True, "QuotaReserved"), "Admitted": (True, "Admitted")}
    if find_condition(workload, "Evicted"):
        changes["Evicted"] = (False, "QuotaReserved")
    return set_conditions(status, now, **changes)


def build_evicted_status(workload: Mapping[str, Any], reason: str, now: datetime) -> dict[str, Any]:
    """Return the status of a Workload that must return its quota. It keeps the quota until its pods are gone."""
    changes: dict[str, tuple[Any, ...]] = {"Evicted": (True, reason)}
    if reason == "Preempted":
        changes["Preempted"] = (True, "InClusterQueue")
    return set_conditions(workload.get("status") or {}, now, **changes)


def build_refused_status(workload: Mapping[str, Any], message: str, now: datetime) -> dict[str, Any]:
    """Return the status of a Workload for which there is no quota now."""
    return set_conditions(workload.get("status") or {}, now, QuotaReserved=(False, "Pending", message))


def build_requeued_status(workload: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the status of an evicted Workload whose pause is over."""
    assert find_condition(workload, "Requeued")["reason"] in BACKOFF
    return set_conditions(workload["status"], now, Requeued=(True, "BackoffFinished"))


def set_conditions(status: Mapping[str, Any], now: datetime, **changes: tuple[Any, ...]) -> dict[str, Any]:
    """Return a status with conditions set. Each change is (is true, reason[, message])."""
    conditions = {entry["type"]: entry for entry in status.get("conditions") or ()}
    for kind, (is_true, reason, *message) in changes.items():
        text, before = "True" if is_true else "False", conditions.get(kind, {})
        conditions[kind] = {
            "type": kind,
            "status": text,
            "reason": reason,
            "message": message[0] if message else f"{kind} because of {reason}",
            "lastTransitionTime": before["lastTransitionTime"]
            if before.get("status") == text
            else format_timestamp(now),
        }
    return {**status, "conditions": list(conditions.values())}
