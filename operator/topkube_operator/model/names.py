"""The names of a job's children, and the labels and annotations that mark the children as the job's own."""

from __future__ import annotations

from topkube.job import API_VERSION, KIND
from topkube.launch.contract import UID_LETTERS, name_child, name_worker_pod

MANAGER = "topkube.dev/operator"
"""Our value of spec.runPolicy.managedBy. Another controller manages the jobs that have another value."""
FIELD_MANAGER = "topkube-operator"

JOB_NAME = "topkube.dev/job-name"
JOB_UID = "topkube.dev/job-uid"
"""Label of pods. Selectors use it to leave out pods of an earlier job of the same name."""
ROLE = "topkube.dev/role"
WORKER_INDEX = "topkube.dev/worker-index"
ATTEMPT = "topkube.dev/attempt"
SHAPE = "topkube.dev/shape"
"""Annotation of pods: a hash of the part of the spec that the pod was made from."""
LAUNCHER_ADDRESS = "topkube.dev/launcher-address"
"""Annotation of worker pods: the address of the launcher's Service in the worker's environment."""
WORKERS = "topkube.dev/workers"
"""Annotation of the launcher's pod: the number of workers that the launcher expects."""
AVOIDED_NODES = "topkube.dev/avoided-nodes"
"""Annotation of pods: the nodes on which the scheduler may not place the pod, besides the template's own rules."""
NODE_CACHE = "topkube.dev/node-cache"
"""Label of the claims and volumes that give a namespace a node cache."""
ENDING = "topkube.dev/ending"
"""Finalizer of launcher pods: the finalizer keeps the pod until the job's status records how the attempt ended."""
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
KUEUE_RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
"""Annotation of pods in a Kueue pod group: "false" if no pod of the group will be replaced any more."""
CHECK_ADDRESS = "topkube.dev/check-address"
"""Annotation of jobs: "false" if callers of the launcher may have other addresses than their pods, because a service
mesh or the network rewrites addresses; "true" overrides an operator that does not check addresses."""
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

MARKERS = frozenset((JOB_NAME, JOB_UID, ROLE, WORKER_INDEX, ATTEMPT, SHAPE, LAUNCHER_ADDRESS, WORKERS, AVOIDED_NODES))
"""The labels and annotations by which the operator recognizes a pod. Only the operator sets them, never a template."""

LAUNCHER = "launcher"
WORKER = "worker"


def name_launcher_pod(job: str, job_uid: str, attempt: int) -> str:
    return name_child(job, LAUNCHER, attempt, job_uid[:UID_LETTERS])


def name_pod_group(job: str, job_uid: str) -> str:
    """Return the name of the group that the job's pods form for a gang scheduler or for Kueue."""
    return name_child(job, job_uid[:UID_LETTERS])


def name_secret(job: str) -> str:
    return name_child(job, "credentials")


def name_job_label(job: str) -> str:
    """Return the job's name as the value of a label."""
    return name_child(job)


def build_owner_reference(name: str, uid: str) -> dict[str, object]:
    """Return the owner reference that all children carry."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


__all__ = [
    "build_owner_reference",
    "name_child",
    "name_job_label",
    "name_launcher_pod",
    "name_pod_group",
    "name_secret",
    "name_worker_pod",
]
