"""Where pods go: one worker per node, gangs, and the labels and annotations that queues read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topkube.job import TrainingJob
from topkube_operator import names
from topkube_operator.observed import Gang
from topkube_operator.templates import list_in, mapping_in

# Queues and gang schedulers read labels and annotations of pods under these domains.
_QUEUE_DOMAINS = ("kueue.x-k8s.io", "scheduling.k8s.io", "scheduling.x-k8s.io", "volcano.sh", "scheduler.alpha")
_GROUP_KINDS: dict[Gang, tuple[str, str]] = {
    "volcano": ("scheduling.volcano.sh/v1beta1", "volcano"),
    "scheduler-plugins": ("scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler"),
}
HOSTNAME = "kubernetes.io/hostname"
_MOST_WARM_NODES = 64
_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
_KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-total-count"


def wants_gang(job: TrainingJob) -> bool:
    """Whether schedulingPolicy asks for a PodGroup."""
    policy = job.spec.run_policy.scheduling_policy
    return policy.queue is not None or policy.min_available is not None


def pods_of(job: TrainingJob) -> int:
    """Pods that one attempt needs."""
    return job.spec.workers + (0 if job.spec.launcher.colocate else 1)


def passed_through(job: TrainingJob) -> tuple[dict[str, str], dict[str, str]]:
    """The labels and annotations of the job that its pods carry too."""
    labels = _for_queues(job.metadata.labels)
    annotations = _for_queues(job.metadata.annotations)
    if _KUEUE_QUEUE in labels and _KUEUE_GROUP not in labels:
        labels[_KUEUE_GROUP] = names.job_label(job.name)
        annotations.setdefault(_KUEUE_TOTAL, str(pods_of(job)))
    return labels, annotations


def _for_queues(entries: dict[str, str]) -> dict[str, str]:
    def read_by_queues(key: str) -> bool:
        domain = key.partition("/")[0]
        return any(domain == known or domain.endswith("." + known) for known in _QUEUE_DOMAINS)

    return {key: value for key, value in entries.items() if read_by_queues(key)}


def spread_over_nodes(pod: dict[str, Any], job: TrainingJob) -> None:
    """Keeps two workers of the job off one node, on top of the affinity that the template asks for."""
    where = "spec.template.spec"
    apart = mapping_in(mapping_in(pod, "affinity", where), "podAntiAffinity", f"{where}.affinity")
    rules = list_in(apart, "requiredDuringSchedulingIgnoredDuringExecution", f"{where}.affinity.podAntiAffinity")
    rules.append(
        {
            "labelSelector": {"matchLabels": {names.JOB_NAME: names.job_label(job.name), names.ROLE: names.WORKER}},
            "topologyKey": HOSTNAME,
        }
    )


def prefer_warm_nodes(pod: dict[str, Any], warm: Mapping[str, int]) -> None:
    """Asks the scheduler for nodes that hold the dataset, the more of it the sooner; never insists. `warm`: percentages
    by the nodes' kubernetes.io/hostname."""
    best = sorted(warm.items(), key=lambda entry: (-entry[1], entry[0]))[:_MOST_WARM_NODES]
    by_weight: dict[int, list[str]] = {}
    for hostname, percent in best:
        if percent > 0:
            by_weight.setdefault(min(percent, 100), []).append(hostname)
    if not by_weight:
        return
    where = "spec.template.spec"
    near = mapping_in(mapping_in(pod, "affinity", where), "nodeAffinity", f"{where}.affinity")
    rules = list_in(near, "preferredDuringSchedulingIgnoredDuringExecution", f"{where}.affinity.nodeAffinity")
    rules += [
        {
            "weight": weight,
            "preference": {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": sorted(hostnames)}]},
        }
        for weight, hostnames in by_weight.items()
    ]


def join_gang(manifest: dict[str, Any], job: TrainingJob, gang: Gang | None, scheduler: str) -> None:
    """Puts a pod under the job's PodGroup, priority class and scheduler."""
    policy, pod = job.spec.run_policy.scheduling_policy, manifest["spec"]
    if policy.priority_class:
        pod.setdefault("priorityClassName", policy.priority_class)
    if gang is None or not wants_gang(job):
        return
    metadata = manifest["metadata"]
    pod.setdefault("schedulerName", scheduler or _GROUP_KINDS[gang][1])
    if gang == "volcano":
        metadata["annotations"]["scheduling.k8s.io/group-name"] = job.name
        if policy.queue:
            metadata["annotations"]["scheduling.volcano.sh/queue-name"] = policy.queue
    else:
        metadata["labels"]["scheduling.x-k8s.io/pod-group"] = names.job_label(job.name)


def pod_group(job: TrainingJob, gang: Gang) -> dict[str, Any]:
    """The PodGroup of the job, without metadata."""
    policy = job.spec.run_policy.scheduling_policy
    spec: dict[str, Any] = {"minMember": policy.min_available or pods_of(job)}
    if gang == "volcano":
        if policy.queue:
            spec["queue"] = policy.queue
        if policy.priority_class:
            spec["priorityClassName"] = policy.priority_class
    return {"apiVersion": _GROUP_KINDS[gang][0], "kind": "PodGroup", "spec": spec}
