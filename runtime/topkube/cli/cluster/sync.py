"""Code of this machine in a job: the ConfigMap with the packed folder, owned by the job."""

from __future__ import annotations

import base64
from typing import Any

from topkube.cli.cluster.api import APPLY, FIELD_MANAGER, Api, build_path, ignore_missing
from topkube.cli.cluster.jobs import JOB_LABEL
from topkube.errors import ClusterError, JobError
from topkube.job import API_VERSION, KIND, TrainingJob
from topkube.launch.contract import name_child
from topkube.source.packing import ARCHIVE_KEY, PackedSource


def add_code(job: TrainingJob, packed: PackedSource | None, requirements: tuple[str, ...] = ()) -> TrainingJob:
    """Return the job with the packed code as its source, and `requirements` as its packages. Raises JobError if the job
    has another source or other packages."""
    if packed is None and not requirements:
        return job
    data = job.to_dict()
    spec = data["spec"]
    if packed is not None:
        if spec.get("source") is not None:
            raise JobError(
                "the job names its own spec.source, and --sync sends another one",
                next_step="remove spec.source from the file, or leave --sync out",
            )
        spec["source"] = {
            "configMap": {
                "name": name_config_map(job.name, packed),
                "archive": ARCHIVE_KEY,
                "sha256": packed.sha256,
            }
        }
    if requirements:
        if spec.get("setup") is not None:
            raise JobError(
                "the job names its own spec.setup, and --requirements adds another one",
                next_step="put all requirements into spec.setup, or remove it from the file",
            )
        spec["setup"] = {"requirements": list(requirements)}
    return TrainingJob.parse(data)


def name_config_map(job: str, packed: PackedSource) -> str:
    """Return the name of the ConfigMap: other code has another name, because a ConfigMap may not change under a job."""
    return name_child(job, "source", packed.sha256[:10])


def build_config_map(job: TrainingJob, packed: PackedSource, namespace: str | None, uid: str = "") -> dict[str, Any]:
    """Return the ConfigMap. With the job's `uid`, it belongs to the job and is deleted with it."""
    metadata: dict[str, Any] = {
        "name": name_config_map(job.name, packed),
        "labels": {JOB_LABEL: name_child(job.name), "app.kubernetes.io/managed-by": "topkube"},
    }
    if namespace:
        metadata["namespace"] = namespace
    if uid:
        metadata["ownerReferences"] = [{"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": uid}]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "binaryData": {ARCHIVE_KEY: base64.b64encode(packed.data).decode("ascii")},
    }


def apply_config_map(api: Api, manifest: dict[str, Any], dry_run: bool = False) -> None:
    """Create the ConfigMap, or write it again. Server-side apply also creates a ConfigMap that the garbage collector
    has removed in between, with an earlier job of this name."""
    query = {"fieldManager": FIELD_MANAGER, "force": True, "dryRun": "All" if dry_run else None}
    api.request("PATCH", build_path(api.namespace, "configmaps", manifest["metadata"]["name"]), query, manifest, APPLY)


def has_config_map(api: Api, manifest: dict[str, Any]) -> bool:
    """Return True if the ConfigMap exists."""
    try:
        api.get(build_path(api.namespace, "configmaps", manifest["metadata"]["name"]))
    except ClusterError as error:
        if error.status != 404:
            raise
        return False
    return True


def delete_config_map(api: Api, manifest: dict[str, Any]) -> None:
    """Delete the ConfigMap of a job that was refused."""
    with ignore_missing():
        api.request("DELETE", build_path(api.namespace, "configmaps", manifest["metadata"]["name"]))
