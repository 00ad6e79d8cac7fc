"""The dataset in a worker's pod: a volume for the cache, the files under mountPath, the Secret's credentials. Pure.

The volume is mounted twice: writable for TopKube's cache, and read-only at mountPath, which shows only the folder with
the dataset's own file names. Both mounts are one volume, so the files there are links and cost nothing.

The medium `Node` needs no right to host directories: the volume is the namespace's claim `topkube-node-cache`, which
the admin has bound to a directory of the node. A namespace without this claim has no node cache.
"""

from __future__ import annotations

from typing import Any

from topkube.job import TrainingJob
from topkube.job.base.quantity import parse_bytes
from topkube.job.cached_dataset import compute_dataset_id
from topkube.job.fields.dataset import Dataset
from topkube_operator.children.templates import ensure_list, escape_variables
from topkube_operator.model.observed import Policy

VOLUME = "topkube-dataset"
CLAIM = "topkube-node-cache"
"""The claim that a namespace with a node cache has."""
ROOT = "/var/cache/topkube"
"""The folder at which the volume is mounted for TopKube."""
_CONTAINER, _POD = "the container", "the pod template's spec"
_HEADROOM_PERCENT, _HEADROOM_BYTES = 5, 256 << 20
"""Space in the volume for indexes, records and temporary files. A pod that exceeds its volume is evicted."""
_SETTINGS = ("TOPKUBE_DATASET_", "TOPKUBE_CACHE_", "TOPKUBE_JOB_NAME")
"""The beginnings of the names of variables that describe the dataset."""


def uses_node_cache(job: TrainingJob) -> bool:
    """Return True if the job's dataset is in the node cache."""
    return job.spec.dataset is not None and job.spec.dataset.cache.medium == "Node"


def explain_node_cache_refusal(job: TrainingJob) -> str:
    """Return the message for a job whose namespace has no node cache."""
    namespace = job.metadata.namespace or "default"
    return (
        f"spec.dataset.cache.medium is Node, but namespace {namespace} has no node cache: there is no bound claim "
        f"{CLAIM}. An admin can enable the node cache (cache.node.namespaces of the chart, or manifests/node-cache); "
        "until then use Ephemeral or Memory"
    )


def build_cache_settings(job: TrainingJob, policy: Policy) -> dict[str, Any]:
    """Return the fields of Settings that workers and ranks get in addition to the job's own."""
    dataset = job.spec.dataset
    if dataset is None:
        return {}
    settings: dict[str, Any] = {
        "cache_directory": _choose_cache_directory(dataset),
        "dataset_view": f"{ROOT}/{_choose_view_path(dataset)}",
    }
    if dataset.cache.medium == "Node" or (dataset.cache.medium == "Ephemeral" and not dataset.cache.size_limit):
        settings["cache_free_percent"] = policy.cache_free_percent
    return settings


def _choose_cache_directory(dataset: Dataset) -> str:
    return ROOT if dataset.cache.medium == "Node" else f"{ROOT}/cache"


def _choose_view_path(dataset: Dataset) -> str:
    """Return the path of the view in the volume. In a node cache, it is inside the dataset's folder, so that both are
    removed together."""
    return f"datasets/{compute_dataset_id(dataset.uri)}/view" if dataset.cache.medium == "Node" else "view"


def count_shared_memory_bytes(job: TrainingJob) -> int:
    """Return the bytes of /dev/shm that the memory tier needs."""
    dataset = job.spec.dataset
    return parse_bytes(dataset.cache.memory_limit) if dataset is not None and dataset.cache.memory_limit else 0


def add_dataset(pod: dict[str, Any], container: dict[str, Any], job: TrainingJob, policy: Policy) -> None:
    """Add the dataset to a worker's pod. Mounts of the template at these paths are kept. Raises JobError."""
    dataset = job.spec.dataset
    if dataset is None:
        return
    mounts = ensure_list(container, "volumeMounts", _CONTAINER)
    mounted_paths = {str(mount.get("mountPath")).rstrip("/") for mount in mounts if isinstance(mount, dict)}
    if ROOT not in mounted_paths:
        ensure_list(pod, "volumes", _POD).append({"name": VOLUME, **_build_volume(dataset)})
        mounts.append({"name": VOLUME, "mountPath": ROOT})
        if dataset.mount_path not in mounted_paths:
            view = {
                "name": VOLUME,
                "mountPath": dataset.mount_path,
                "subPath": _choose_view_path(dataset),
                "readOnly": True,
            }
            mounts.append(view)
    entries = ensure_list(container, "env", _CONTAINER)
    set_variables = {entry.get("name") for entry in entries if isinstance(entry, dict)}
    entries += [
        {"name": name, "value": escape_variables(value)}
        for name, value in sorted(job.environment(**build_cache_settings(job, policy)).items())
        if name.startswith(_SETTINGS) and name not in set_variables
    ]
    if dataset.secret_name:
        sources = ensure_list(container, "envFrom", _CONTAINER)
        if not any(isinstance(source, dict) and _read_secret_name(source) == dataset.secret_name for source in sources):
            sources.append({"secretRef": {"name": dataset.secret_name}})


def _read_secret_name(source: dict[str, Any]) -> Any:
    reference = source.get("secretRef")
    return reference.get("name") if isinstance(reference, dict) else None


def _build_volume(dataset: Dataset) -> dict[str, Any]:
    cache = dataset.cache
    if cache.medium == "Node":
        return {"persistentVolumeClaim": {"claimName": CLAIM}}
    limit = cache.size_limit or (cache.memory_limit if cache.medium == "Memory" else None)
    volume: dict[str, Any] = {"medium": "Memory"} if cache.medium == "Memory" else {}
    if limit:
        size = parse_bytes(limit)
        volume["sizeLimit"] = str(size + size * _HEADROOM_PERCENT // 100 + _HEADROOM_BYTES)
    return {"emptyDir": volume}
