"""The placement of pods: spread over nodes, gangs, and the labels and annotations that queues read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topkube.job import TrainingJob
from topkube_operator.children.templates import ensure_list, ensure_mapping, select_domains
from topkube_operator.model import names
from topkube_operator.model.observed import Gang, Policy

# Queues and gang schedulers read labels and annotations of pods in these domains.
_QUEUE_DOMAINS = ("kueue.x-k8s.io", "scheduling.k8s.io", "scheduling.x-k8s.io", "volcano.sh")
_GANG_SCHEDULERS: dict[Gang, tuple[str, str]] = {
    "volcano": ("scheduling.volcano.sh/v1beta1", "volcano"),
    "scheduler-plugins": ("scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler"),
}
"""The API version of the PodGroups of each gang scheduler, and the scheduler's name."""
HOSTNAME = "kubernetes.io/hostname"
_MOST_WARM_NODES = 64
"""The most nodes that a pod prefers, so that pods stay small in a large cluster."""
_KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-total-count"
_KUEUE_ROLE = "kueue.x-k8s.io/role-hash"


def find_priority_class(job: TrainingJob) -> str:
    """Return the priority class of the workers' pods; empty if they have none."""
    spec: Any = job.spec.template.get("spec") or {}
    template_class = spec.get("priorityClassName")
    if isinstance(template_class, str) and template_class:
        return template_class
    return job.spec.run_policy.scheduling_policy.priority_class or ""


def asks_for_gang(job: TrainingJob) -> bool:
    """Return True if schedulingPolicy asks for a PodGroup."""
    policy = job.spec.run_policy.scheduling_policy
    return policy.queue is not None or policy.min_available is not None


def count_pods(job: TrainingJob) -> int:
    """Return the number of pods of one attempt."""
    return job.spec.workers + (0 if job.spec.launcher.colocate else 1)


def is_admitted_as_a_whole(job: TrainingJob, policy: Policy) -> bool:
    """Return True if a Workload asks Kueue for the admission of the job."""
    labels = job.metadata.labels
    return bool(policy.workloads) and bool(labels.get(names.KUEUE_QUEUE)) and names.KUEUE_GROUP not in labels


def select_queue_metadata(job: TrainingJob, uid: str, policy: Policy) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and annotations of the job that its pods have too, because queues read them. Pods of a job that
    Kueue admits as a whole have no label of Kueue: it would queue each pod again."""
    labels = select_domains(job.metadata.labels, _QUEUE_DOMAINS)
    annotations = select_domains(job.metadata.annotations, _QUEUE_DOMAINS)
    if is_admitted_as_a_whole(job, policy):
        labels = {key: value for key, value in labels.items() if not key.startswith("kueue.x-k8s.io/")}
    if names.KUEUE_QUEUE in labels:
        labels.setdefault(names.KUEUE_GROUP, names.name_pod_group(job.name, uid))
    if names.KUEUE_GROUP in labels:
        annotations.setdefault(_KUEUE_TOTAL, str(count_pods(job)))  # Kueue refuses pods of a group without it
    return labels, annotations


def join_kueue_group(manifest: dict[str, Any], role: str) -> None:
    """Give a pod of a Kueue pod group its role. Kueue would derive the role from the pod's placement, and a replacement
    that prefers other nodes than its predecessor would not be accepted in its place."""
    metadata = manifest["metadata"]
    if names.KUEUE_GROUP in metadata["labels"]:
        metadata["annotations"].setdefault(_KUEUE_ROLE, role)


def spread_over_nodes(pod: dict[str, Any], job: TrainingJob, uid: str) -> None:
    """Require different nodes for the workers of the job, in addition to the template's own affinity."""
    path = "spec.template.spec"
    anti_affinity = ensure_mapping(ensure_mapping(pod, "affinity", path), "podAntiAffinity", f"{path}.affinity")
    rules = ensure_list(
        anti_affinity, "requiredDuringSchedulingIgnoredDuringExecution", f"{path}.affinity.podAntiAffinity"
    )
    rules.append({"labelSelector": {"matchLabels": _build_worker_labels(job, uid)}, "topologyKey": HOSTNAME})


def place_together(pod: dict[str, Any], job: TrainingJob, uid: str) -> None:
    """Ask for one zone, rack or block for all workers of the job, in addition to the template's own affinity."""
    topology = job.spec.topology
    if topology is None:
        return
    path = "spec.template.spec"
    affinity = ensure_mapping(ensure_mapping(pod, "affinity", path), "podAffinity", f"{path}.affinity")
    term: dict[str, Any] = {
        "labelSelector": {"matchLabels": _build_worker_labels(job, uid)},
        "topologyKey": topology.key,
    }
    if topology.mode == "Required":
        ensure_list(affinity, "requiredDuringSchedulingIgnoredDuringExecution", f"{path}.affinity.podAffinity").append(
            term
        )
        return
    rules = ensure_list(affinity, "preferredDuringSchedulingIgnoredDuringExecution", f"{path}.affinity.podAffinity")
    rules.append({"weight": 100, "podAffinityTerm": term})


def _build_worker_labels(job: TrainingJob, uid: str) -> dict[str, str]:
    """Return the labels of this job's workers. Workers of an earlier job of the same name neither repel nor attract."""
    return {names.JOB_NAME: names.name_job_label(job.name), names.JOB_UID: uid, names.ROLE: names.WORKER}


def prefer_warm_nodes(pod: dict[str, Any], warm: Mapping[str, int]) -> None:
    """Ask the scheduler to prefer nodes that hold the dataset, in proportion to their share. `warm` holds percentages
    by the nodes' kubernetes.io/hostname."""
    warmest = sorted(warm.items(), key=lambda entry: (-entry[1], entry[0]))[:_MOST_WARM_NODES]
    by_weight: dict[int, list[str]] = {}
    for hostname, percent in warmest:
        if percent > 0:
            by_weight.setdefault(min(percent, 100), []).append(hostname)
    if not by_weight:
        return
    path = "spec.template.spec"
    affinity = ensure_mapping(ensure_mapping(pod, "affinity", path), "nodeAffinity", f"{path}.affinity")
    rules = ensure_list(affinity, "preferredDuringSchedulingIgnoredDuringExecution", f"{path}.affinity.nodeAffinity")
    rules += [
        {
            "weight": weight,
            "preference": {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": sorted(hostnames)}]},
        }
        for weight, hostnames in by_weight.items()
    ]


def join_gang(manifest: dict[str, Any], job: TrainingJob, uid: str, gang: Gang | None, scheduler: str) -> None:
    """Add a pod to the job's PodGroup, and set its priority class and scheduler."""
    policy, pod = job.spec.run_policy.scheduling_policy, manifest["spec"]
    if policy.priority_class:
        pod.setdefault("priorityClassName", policy.priority_class)
    if gang is None or not asks_for_gang(job):
        return
    metadata = manifest["metadata"]
    pod.setdefault("schedulerName", scheduler or _GANG_SCHEDULERS[gang][1])
    if gang == "volcano":
        metadata["annotations"]["scheduling.k8s.io/group-name"] = names.name_pod_group(job.name, uid)
        if policy.queue:
            metadata["annotations"]["scheduling.volcano.sh/queue-name"] = policy.queue
    else:
        metadata["labels"]["scheduling.x-k8s.io/pod-group"] = names.name_pod_group(job.name, uid)


def count_members(job: TrainingJob) -> int:
    """Return the number of pods that must fit at the same time."""
    return job.spec.run_policy.scheduling_policy.min_available or count_pods(job)


def build_pod_group(job: TrainingJob, gang: Gang, resources: Mapping[str, str]) -> dict[str, Any]:
    """Return the PodGroup of the job, without metadata. `resources` is what its members request together."""
    policy = job.spec.run_policy.scheduling_policy
    spec: dict[str, Any] = {"minMember": count_members(job)}
    if resources:
        spec["minResources"] = dict(resources)
    if gang == "volcano":
        if policy.queue:
            spec["queue"] = policy.queue
        if priority := find_priority_class(job):
            spec["priorityClassName"] = priority
    return {"apiVersion": _GANG_SCHEDULERS[gang][0], "kind": "PodGroup", "spec": spec}
