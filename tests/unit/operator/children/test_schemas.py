"""Everything that the operator sends to the API server, and manifests/, checked by the schemas of Kubernetes: the
oldest supported version, the newest, and one in between. No field is unknown, and none has the wrong type."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from simulated_cluster import SimulatedCluster
from simulated_job import build_job

from topkube_operator.model.observed import Observed, Policy

MANIFESTS = Path(__file__).parents[4] / "manifests"
NEWEST = ".".join(kubernetes_validate.latest_version().split(".")[:2])
VERSIONS = ("1.25", "1.32", NEWEST)
CONTAINER = {
    "name": "worker",
    "image": "image:1",
    "command": ["python", "train.py"],
    "resources": {"limits": {"nvidia.com/gpu": 2}},
}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "template": {"spec": {"containers": [CONTAINER], "tolerations": [{"operator": "Exists"}]}},
        "checkpoint": {"claimName": "claim"},
        "dataset": {"uri": "s3://bucket/data", "secretName": "keys", "cache": {"sizeLimit": "1Gi"}},
        "launcher": {"template": {"spec": {"nodeSelector": {"pool": "cpu"}}}},
        "runPolicy": {"schedulingPolicy": {"queue": "team", "priorityClass": "high", "minAvailable": 2}},
    },
    "code": {
        "source": {"configMap": {"name": "code", "archive": "code.tar.gz"}},
        "setup": {"requirements": ["einops==0.8.0"]},
        "template": {"spec": {"containers": [CONTAINER]}},
    },
    "code of git": {"source": {"git": {"url": "https://h/r", "commit": "0" * 40, "secretName": "keys"}}},
    "node cache": {"dataset": {"uri": "s3://bucket/data", "cache": {"medium": "Node"}}},
    "in memory": {"dataset": {"uri": "s3://bucket/data", "cache": {"medium": "Memory", "memoryLimit": "1Gi"}}},
    "colocated": {"launcher": {"colocate": True}, "spread": "None", "mpiImplementation": "OpenMPI"},
}


class RecordingCluster(SimulatedCluster):
    """Records everything that was sent."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sent: list[dict[str, Any]] = []

    def observe(self) -> Observed:
        return dataclasses.replace(super().observe(), node_cache=True)

    def apply(self, manifest: dict[str, Any]) -> None:
        self.sent.append(manifest)
        super().apply(manifest)


@pytest.mark.parametrize("spec", SPECS)
def test_children_of_a_job_are_valid_in_every_supported_kubernetes(spec: str) -> None:
    world = RecordingCluster(build_job(**SPECS[spec]), Policy(seed=b"s" * 32, gang="volcano"))
    world.start_ranks()
    world.end_launcher(1, {"reason": "Error", "message": "again"})
    world.start_ranks()
    kinds = {manifest["kind"] for manifest in world.sent}
    assert {"Secret", "Service", "NetworkPolicy", "Pod"} <= kinds
    for manifest in world.sent:
        if manifest["kind"] == "PodGroup":  # a kind of Volcano, without a schema of Kubernetes
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("path", sorted(MANIFESTS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(MANIFESTS)))
def test_manifests_are_valid_in_every_supported_kubernetes(path: Path) -> None:
    for manifest in yaml.safe_load_all(path.read_text()):
        if not manifest["apiVersion"].startswith("topkube.dev/"):
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)
