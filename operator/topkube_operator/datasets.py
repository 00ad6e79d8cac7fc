"""The dataset in a worker's pod: a volume for the cache, the files under mountPath, the Secret's credentials. Pure.

The volume is mounted twice: writable where TopKube keeps the cache, and read-only at mountPath, where only the folder
with the dataset's own file names is seen. Both are one volume, so that files there are links and cost nothing.

`Node` needs no right to host directories: the volume is the namespace's claim `topkube-node-cache`, which the admin
bound to a directory of the node. A namespace without that claim has no node cache.
"""

from __future__ import annotations

from typing import Any

from topkube.job import TrainingJob
from topkube.job.cached_dataset import dataset_id
from topkube.job.quantity import in_bytes
from topkube.job.spec import Dataset
from topkube_operator.observed import Policy
from topkube_operator.templates import list_in

VOLUME = "topkube-dataset"
CLAIM = "topkube-node-cache"
"""The claim of a namespace with a node cache."""
ROOT = "/var/cache/topkube"
"""Where the volume is mounted for TopKube."""
_CONTAINER, _POD = "the container", "the pod template's spec"
_HEADROOM_PERCENT, _HEADROOM_BYTES = 5, 256 << 20
"""Of the volume, beside the shards: indexes, records, temporary names. A pod that writes more is evicted."""
_SETTINGS = ("TOPKUBE_DATASET_", "TOPKUBE_CACHE_", "TOPKUBE_JOB_NAME")


def uses_node_cache(job: TrainingJob) -> bool:
    return job.spec.dataset is not None and job.spec.dataset.cache.medium == "Node"


def refusal(job: TrainingJob) -> str:
    """What is said where the namespace has no node cache."""
    namespace = job.metadata.namespace or "default"
    return (
        f"spec.dataset.cache.medium is Node, and namespace {namespace} has no node cache: there is no bound claim "
        f"{CLAIM}. An admin turns it on (cache.node.namespaces of the chart, or manifests/node-cache); until then use "
        "Ephemeral or Memory"
    )


def changes(job: TrainingJob, policy: Policy) -> dict[str, Any]:
    """Fields of Settings for workers and ranks, on top of the job's own."""
    dataset = job.spec.dataset
    if dataset is None:
        return {}
    changes: dict[str, Any] = {"cache_directory": _cache(dataset), "dataset_view": f"{ROOT}/{_view(dataset)}"}
    if dataset.cache.medium == "Node" or (dataset.cache.medium == "Ephemeral" and not dataset.cache.size_limit):
        changes["cache_free_percent"] = policy.cache_free_percent
    return changes


def _cache(dataset: Dataset) -> str:
    return ROOT if dataset.cache.medium == "Node" else f"{ROOT}/cache"


def _view(dataset: Dataset) -> str:
    """Below the volume's root. On the node it lies in the dataset's folder, and goes with it."""
    return f"datasets/{dataset_id(dataset.uri)}/view" if dataset.cache.medium == "Node" else "view"


def shared_memory_bytes(job: TrainingJob) -> int:
    """What the memory tier needs of /dev/shm."""
    dataset = job.spec.dataset
    return in_bytes(dataset.cache.memory_limit) if dataset is not None and dataset.cache.memory_limit else 0


def give(pod: dict[str, Any], container: dict[str, Any], job: TrainingJob, policy: Policy) -> None:
    """Adds the dataset to a worker's pod. What the template mounts at these places itself is kept. Raises JobError."""
    dataset = job.spec.dataset
    if dataset is None:
        return
    mounts = list_in(container, "volumeMounts", _CONTAINER)
    taken = {str(mount.get("mountPath")).rstrip("/") for mount in mounts if isinstance(mount, dict)}
    if ROOT not in taken:
        list_in(pod, "volumes", _POD).append({"name": VOLUME, **_volume(dataset)})
        mounts.append({"name": VOLUME, "mountPath": ROOT})
        if dataset.mount_path not in taken:
            shown = {"name": VOLUME, "mountPath": dataset.mount_path, "subPath": _view(dataset), "readOnly": True}
            mounts.append(shown)
    entries = list_in(container, "env", _CONTAINER)
    named = {entry.get("name") for entry in entries if isinstance(entry, dict)}
    entries += [
        {"name": name, "value": value.replace("$", "$$")}
        for name, value in sorted(job.environment(**changes(job, policy)).items())
        if name.startswith(_SETTINGS) and name not in named
    ]
    if dataset.secret_name:
        sources = list_in(container, "envFrom", _CONTAINER)
        if not any(isinstance(one, dict) and _secret(one) == dataset.secret_name for one in sources):
            sources.append({"secretRef": {"name": dataset.secret_name}})


def _secret(source: dict[str, Any]) -> Any:
    reference = source.get("secretRef")
    return reference.get("name") if isinstance(reference, dict) else None


def _volume(dataset: Dataset) -> dict[str, Any]:
    cache = dataset.cache
    if cache.medium == "Node":
        return {"persistentVolumeClaim": {"claimName": CLAIM}}
    limit = cache.size_limit or (cache.memory_limit if cache.medium == "Memory" else None)
    volume: dict[str, Any] = {"medium": "Memory"} if cache.medium == "Memory" else {}
    if limit:
        size = in_bytes(limit)
        volume["sizeLimit"] = str(size + size * _HEADROOM_PERCENT // 100 + _HEADROOM_BYTES)
    return {"emptyDir": volume}
