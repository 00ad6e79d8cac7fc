"""Read fields of a stored TrainingJob, which may be invalid. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topkube_operator.model import names


def read_run_policy(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `spec.runPolicy` of a job; empty if the job has none, or something else in its place."""
    return _read_mapping(_read_mapping(job.get("spec")).get("runPolicy"))


def read_dataset_uri(job: Mapping[str, Any]) -> str:
    """Return `spec.dataset.uri` of a job; empty if the job has none, or something else in its place."""
    uri = _read_mapping(_read_mapping(job.get("spec")).get("dataset")).get("uri")
    return uri if isinstance(uri, str) else ""


def is_managed(job: Mapping[str, Any]) -> bool:
    """Return True if this operator reconciles the job: `spec.runPolicy.managedBy` names no other controller."""
    manager = read_run_policy(job).get("managedBy")
    return not isinstance(manager, str) or manager == names.MANAGER


def asks_for_pod_group(job: Mapping[str, Any]) -> bool:
    """Return True if `spec.runPolicy.schedulingPolicy` asks for a PodGroup."""
    policy = _read_mapping(read_run_policy(job).get("schedulingPolicy"))
    return any(policy.get(name) is not None for name in ("queue", "minAvailable"))


def read_topology_key(job: Mapping[str, Any]) -> str:
    """Return `spec.topology.key` of a job; empty if the job has none, or something else in its place."""
    key = _read_mapping(_read_mapping(job.get("spec")).get("topology")).get("key")
    return key if isinstance(key, str) else ""


def asks_for_workload(job: Mapping[str, Any]) -> bool:
    """Return True if the job's labels ask Kueue to admit the job as a whole."""
    labels = _read_mapping(_read_mapping(job.get("metadata")).get("labels"))
    return bool(labels.get(names.KUEUE_QUEUE)) and names.KUEUE_GROUP not in labels


def _read_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
