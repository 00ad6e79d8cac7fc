"""The children of a job that are not pods: credentials, Service, NetworkPolicy, PodGroup. Pure.

The NetworkPolicy is the port matrix: workers reach each other on every port (MPI chooses its ports), workers reach the
launcher on one, the operator reaches the launcher on the same one, Prometheus reaches the workers' metrics. Nothing
else gets in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from topkube.job import TrainingJob
from topkube.launch import contract
from topkube_operator import credentials, names, placement
from topkube_operator.observed import Gang, Policy

OPERATOR_LABELS = {"app.kubernetes.io/name": "topkube", "app.kubernetes.io/component": "operator"}
"""The operator's own pods carry these (manifests/ and the chart set them)."""
PROMETHEUS_LABELS = {"app.kubernetes.io/name": "prometheus"}
NAMESPACE_NAME = "kubernetes.io/metadata.name"


def secret(job: TrainingJob, uid: str, workers: Iterable[tuple[int, int]], policy: Policy) -> dict[str, Any]:
    """`workers`: (index, attempt in which its pod was made)."""
    data = credentials.derive(policy.seed, uid).secret_data(workers)
    return _child(job, uid, "v1", "Secret", names.secret_name(job.name)) | {"type": "Opaque", "data": data}


def service(job: TrainingJob, uid: str, attempt: int, address: str = "") -> dict[str, Any]:
    """Leads to the launcher of `attempt` and no other. `address`: the cluster IP that living workers know."""
    spec: dict[str, Any] = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,  # workers call before the launcher is ready; it is ready when they have
        "selector": _launcher_of(job, attempt),
        "ports": [
            {
                "name": "launcher",
                "port": contract.LAUNCHER_PORT,
                "targetPort": contract.LAUNCHER_PORT,
                "protocol": "TCP",
            }
        ],
    }
    if address:
        spec["clusterIP"] = address
    return _child(job, uid, "v1", "Service", job.name) | {"spec": spec}


def network_policies(job: TrainingJob, uid: str, policy: Policy) -> list[dict[str, Any]]:
    """Two, because workers and launcher open different ports. Neither is called as the job: one job may be called as
    another's policy."""
    own = {names.JOB_NAME: names.job_label(job.name)}
    workers = {"matchLabels": {**own, names.ROLE: names.WORKER}}
    launcher = {"matchLabels": {**own, names.ROLE: names.LAUNCHER}}
    if job.spec.launcher.colocate:
        launcher = {"matchLabels": {**own, names.WORKER_INDEX: "0"}}
    namespace = {"matchLabels": {NAMESPACE_NAME: policy.operator_namespace}} if policy.operator_namespace else {}
    operator = {"namespaceSelector": namespace, "podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}
    prometheus = {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(PROMETHEUS_LABELS)}}
    peers = {"podSelector": workers}
    rules = [
        (
            names.child_name(job.name, names.WORKER),
            workers,
            [{"from": [peers]}, {"from": [prometheus], "ports": _tcp(contract.METRICS_PORT)}],
        ),
        (
            names.child_name(job.name, names.LAUNCHER),
            launcher,
            [{"from": [peers, operator], "ports": _tcp(contract.LAUNCHER_PORT)}],
        ),
    ]
    return [
        _child(job, uid, "networking.k8s.io/v1", "NetworkPolicy", name)
        | {"spec": {"podSelector": selected, "policyTypes": ["Ingress"], "ingress": ingress}}
        for name, selected, ingress in rules
    ]


def _tcp(port: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"}]


def pod_group(job: TrainingJob, uid: str, gang: Gang) -> dict[str, Any]:
    made = placement.pod_group(job, gang)
    return _child(job, uid, made["apiVersion"], made["kind"], job.name) | {"spec": made["spec"]}


def adopted(manifest: dict[str, Any], job: TrainingJob, uid: str) -> dict[str, Any]:
    """The manifest of a pod with the job as its owner."""
    metadata = {**manifest["metadata"], "ownerReferences": [names.owner(job.name, uid)]}
    return {**manifest, "metadata": metadata}


def _launcher_of(job: TrainingJob, attempt: int) -> dict[str, str]:
    role = {names.ROLE: names.LAUNCHER}
    if job.spec.launcher.colocate:
        role = {names.ROLE: names.WORKER, names.WORKER_INDEX: "0"}
    return {names.JOB_NAME: names.job_label(job.name), **role, names.ATTEMPT: str(attempt)}


def _child(job: TrainingJob, uid: str, version: str, kind: str, name: str) -> dict[str, Any]:
    labels: Mapping[str, str] = {names.JOB_NAME: names.job_label(job.name), "app.kubernetes.io/managed-by": "topkube"}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": dict(labels),
            "ownerReferences": [names.owner(job.name, uid)],
        },
    }
