"""The Workload by which Kueue admits a whole job: what it asks for, and where its admission places the pods. Pure.

A job with the label `kueue.x-k8s.io/queue-name` gets a Workload with one pod set for the launcher and one for the
workers, if the cluster serves Workloads. It stays queued by this Workload until it is suspended, also if its labels
change. A job that also has a pod group's label is queued pod by pod instead, as are jobs of a cluster without
Workloads: their pods have the labels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from topkube.job import TrainingJob
from topkube_operator.children import placement, pod_sets
from topkube_operator.children.templates import ensure_list, ensure_mapping
from topkube_operator.model import names
from topkube_operator.model.observed import Child, Observed, Policy

WORKLOAD, FLAVOR = "Workload", "ResourceFlavor"
WORKLOAD_PRIORITY, POD_PRIORITY = "WorkloadPriorityClass", "PriorityClass"
_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_UID_LABEL = "kueue.x-k8s.io/job-uid"
_POD_SET_LABEL = "kueue.x-k8s.io/podset"
_GROUPS = {WORKLOAD_PRIORITY: "kueue.x-k8s.io", POD_PRIORITY: "scheduling.k8s.io"}
_POD_FIELDS = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
    "runtimeClassName",
    "priorityClassName",
    "schedulerName",
    "overhead",
    "restartPolicy",
    "resources",
    "resourceClaims",
)
"""Fields of a pod that decide where it fits and what it needs."""
_CONTAINER_FIELDS = ("name", "image", "resources", "restartPolicy")


def name_workload(job: str) -> str:
    """Return the name of a job's Workload."""
    return names.name_child(job, "workload")


def find_workload(job: TrainingJob, observed: Observed) -> Child | None:
    """Return the job's Workload; None if there is none."""
    return observed.children.get((WORKLOAD, name_workload(job.name)))


def keep_queue(job: TrainingJob, observed: Observed) -> TrainingJob:
    """Return the job with the labels by which its Workload asks Kueue. A job with a Workload stays in the queue until
    it is suspended: otherwise a change of labels would take it out of Kueue's control while it holds quota."""
    workload = find_workload(job, observed)
    if workload is None:
        return job
    labels = {key: value for key, value in job.metadata.labels.items() if key != names.KUEUE_GROUP}
    labels[names.KUEUE_QUEUE] = labels.get(names.KUEUE_QUEUE) or workload.content["queueName"]
    return job.model_copy(update={"metadata": job.metadata.model_copy(update={"labels": labels})})


def find_priority_reference(job: TrainingJob) -> tuple[str, str] | None:
    """Return the kind and name of the class that gives the Workload its priority; None if there is none."""
    if name := job.metadata.labels.get(_PRIORITY_LABEL):
        return WORKLOAD_PRIORITY, name
    return (POD_PRIORITY, name) if (name := placement.find_priority_class(job)) else None


def build_workload(
    job: TrainingJob, uid: str, policy: Policy, objects: Mapping[tuple[str, str], Any]
) -> dict[str, Any]:
    """Return the Workload, without an owner. `objects` holds the class of `find_priority_reference`, by kind and name.
    Raises JobError if the templates make no valid pod."""
    spec: dict[str, Any] = {
        "queueName": job.metadata.labels[names.KUEUE_QUEUE],
        "podSets": [_build_pod_set(pod_set) for pod_set in pod_sets.build_pod_sets(job, uid, policy)],
    }
    if reference := find_priority_reference(job):
        value = (objects.get(reference) or {}).get("value")
        if isinstance(value, int):
            spec |= {"priority": value, **_build_priority_fields(reference, policy.workloads)}
    labels = {
        names.JOB_NAME: names.name_job_label(job.name),
        _UID_LABEL: uid,
        "app.kubernetes.io/managed-by": "topkube",
    }
    metadata = {
        "name": name_workload(job.name),
        "namespace": job.metadata.namespace,
        "labels": labels,
        "ownerReferences": [names.build_owner_reference(job.name, uid)],
    }
    return {"apiVersion": policy.workloads, "kind": WORKLOAD, "metadata": metadata, "spec": spec}


def _build_priority_fields(reference: tuple[str, str], version: str) -> dict[str, Any]:
    kind, name = reference
    group = _GROUPS[kind]
    if version.endswith("/v1beta1"):
        return {"priorityClassName": name, "priorityClassSource": f"{group}/{kind.lower()}"}
    return {"priorityClassRef": {"group": group, "kind": kind, "name": name}}


def _build_pod_set(pod_set: pod_sets.PodSet) -> dict[str, Any]:
    spec = pod_set.pod["spec"]
    reduced = {field: copy.deepcopy(spec[field]) for field in _POD_FIELDS if field in spec}
    for field in ("initContainers", "containers"):
        if entries := [entry for entry in spec.get(field) or () if isinstance(entry, dict)]:
            reduced[field] = [
                {name: copy.deepcopy(entry[name]) for name in _CONTAINER_FIELDS if name in entry} for entry in entries
            ]
    return {"name": pod_set.name, "count": pod_set.count, "template": {"spec": reduced}}


def find_condition(workload: Child, kind: str) -> Mapping[str, Any]:
    """Return a condition of a Workload; empty if it does not have the condition."""
    for entry in _list_mappings(_read_status(workload).get("conditions")):
        if entry.get("type") == kind:
            return entry
    return {}


def has_condition(workload: Child, kind: str) -> bool:
    """Return True if a condition of a Workload is true."""
    return find_condition(workload, kind).get("status") == "True"


def is_admitted(workload: Child | None) -> bool:
    """Return True if the pods of a Workload may exist."""
    if workload is None or workload.is_being_deleted:
        return False
    is_over = has_condition(workload, "Evicted") or has_condition(workload, "Finished")
    return has_condition(workload, "Admitted") and not is_over and bool(_read_status(workload).get("admission"))


def list_assigned_flavors(workload: Child) -> list[str]:
    """Return the names of all ResourceFlavors from which the Workload has quota."""
    assignments = _read_assignments(workload)
    return sorted({str(flavor) for entry in assignments for flavor in (entry.get("flavors") or {}).values()})


def apply_admission(pod: dict[str, Any], name: str, workload: Child, objects: Mapping[tuple[str, str], Any]) -> None:
    """Add to a pod of the pod set `name` what its admission requires: the labels and tolerations of the assigned
    flavors, and what admission checks ask for. `objects` holds the flavors."""
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"][_POD_SET_LABEL] = name
    for update in _find_updates(workload, name, objects):
        for field, target in (("labels", metadata), ("annotations", metadata), ("nodeSelector", spec)):
            values = update.get(field)
            if isinstance(values, Mapping) and values:
                ensure_mapping(target, field, "the pod").update(values)
        tolerations = ensure_list(spec, "tolerations", "the pod's spec")
        tolerations += [entry for entry in _list_mappings(update.get("tolerations")) if entry not in tolerations]


def _find_updates(workload: Child, name: str, objects: Mapping[tuple[str, str], Any]) -> Iterator[Mapping[str, Any]]:
    assignment = next((entry for entry in _read_assignments(workload) if entry.get("name") == name), {})
    for flavor in dict.fromkeys((assignment.get("flavors") or {}).values()):
        spec = (objects.get((FLAVOR, str(flavor))) or {}).get("spec") or {}
        yield {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")}
    for check in _list_mappings(_read_status(workload).get("admissionChecks")):
        yield from (entry for entry in _list_mappings(check.get("podSetUpdates")) if entry.get("name") == name)


def _read_assignments(workload: Child) -> list[Mapping[str, Any]]:
    admission = _read_status(workload).get("admission")
    return _list_mappings(admission.get("podSetAssignments")) if isinstance(admission, Mapping) else []


def _read_status(workload: Child) -> Mapping[str, Any]:
    status = workload.content.get("status")
    return status if isinstance(status, Mapping) else {}


def _list_mappings(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
