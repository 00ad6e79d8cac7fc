"""What the children of a job are called, and the labels and annotations that say whose they are."""

from __future__ import annotations

from topkube.job import API_VERSION, KIND
from topkube.launch.contract import child_name, worker_name

MANAGER = "topkube.dev/operator"
"""Our spec.runPolicy.managedBy; jobs with another value are somebody else's."""
FIELD_MANAGER = "topkube-operator"

JOB_NAME = "topkube.dev/job-name"
ROLE = "topkube.dev/role"
WORKER_INDEX = "topkube.dev/worker-index"
ATTEMPT = "topkube.dev/attempt"
SHAPE = "topkube.dev/shape"
"""Annotation of pods: a hash of the part of the spec that they were made from."""
LAUNCHER_ADDRESS = "topkube.dev/launcher-address"
"""Annotation of worker pods: the Service's address that they were told."""
WORKERS = "topkube.dev/workers"
"""Annotation of the launcher's pod: how many workers it expects."""
NODE_CACHE = "topkube.dev/node-cache"
"""Label of the claims and volumes by which a namespace has a node cache."""
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

LAUNCHER = "launcher"
WORKER = "worker"


def launcher_name(job: str, attempt: int) -> str:
    return child_name(job, LAUNCHER, attempt)


def secret_name(job: str) -> str:
    return child_name(job, "credentials")


def job_label(job: str) -> str:
    """The job's name as a label's value."""
    return child_name(job)


def owner(name: str, uid: str) -> dict[str, object]:
    """The owner reference that all children carry."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


__all__ = ["child_name", "job_label", "launcher_name", "owner", "secret_name", "worker_name"]
