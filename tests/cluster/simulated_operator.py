"""Functions with which a test acts in place of the operator: they create pods that print given lines, and write the
job's status. So commands that show pods and statuses can be tested with exact values."""

from __future__ import annotations

from typing import Any

from topkube.cli.cluster.api import Api, build_path
from topkube.cli.cluster.jobs import build_job_path

IMAGE = "topkube/runtime:0.1.0"


def build_minimal_job(name: str, **spec: Any) -> dict[str, Any]:
    """Return a job that the operator does not manage, unless `spec` sets another manager."""
    container = {"name": "worker", "image": IMAGE, "command": ["python", "train.py"]}
    return {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "workers": 2,
            "template": {"spec": {"containers": [container], "terminationGracePeriodSeconds": 1}},
            "runPolicy": {"managedBy": "example.com/test"},
            **spec,
        },
    }


def create_job(api: Api, job: dict[str, Any]) -> dict[str, Any]:
    return api.request("POST", build_job_path(api), body=job).data


def set_status(api: Api, name: str, **status: Any) -> None:
    path = build_job_path(api, name) + "/status"
    api.request("PATCH", path, body={"status": status}, content="application/merge-patch+json")


def run_pod(api: Api, job: dict[str, Any], index: int, attempt: int, script: str) -> str:
    """Create a worker's pod whose main container runs a shell script, beside a sidecar that runs longer. Return the
    pod's name."""
    metadata = job["metadata"]
    name = f"{metadata['name']}-worker-{index}-{attempt}"
    owner = {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {
                "topkube.dev/job-name": metadata["name"],
                "topkube.dev/role": "worker",
                "topkube.dev/worker-index": str(index),
                "topkube.dev/attempt": str(attempt),
            },
            "annotations": {"kubectl.kubernetes.io/default-container": "main"},
            "ownerReferences": [owner],
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {"name": "side", "image": IMAGE, "command": ["sh", "-c", "echo not ours; sleep 600"]},
                {"name": "main", "image": IMAGE, "command": ["sh", "-c", script]},
            ],
        },
    }
    api.request("POST", build_path(api.namespace, "pods"), body=pod)
    return name


def apply(api: Api, path: str, manifest: dict[str, Any]) -> None:
    """Apply an object of the collection at `path`, on the server."""
    metadata = manifest["metadata"]
    query = {"fieldManager": "test", "force": True}
    api.request("PATCH", f"{path}/{metadata['name']}", query, manifest, "application/apply-patch+yaml")
