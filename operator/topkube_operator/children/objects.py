"""The children of a job that are not pods: credentials, Service, NetworkPolicy, PodGroup. Pure.

The NetworkPolicies allow these connections: workers reach each other on every port (MPI chooses its ports), workers and
the operator reach the launcher on one port, and scrapers reach the workers' metrics. All other connections are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from topkube.job import TrainingJob
from topkube.launch import contract
from topkube_operator.children import credentials, placement
from topkube_operator.model import names
from topkube_operator.model.observed import Gang, Policy

OPERATOR_LABELS = {"app.kubernetes.io/name": "topkube", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's own pods (manifests/ and the chart set them)."""
PROMETHEUS = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
"""The peer that may scrape workers if the admin names no other peers."""
NAMESPACE_NAME = "kubernetes.io/metadata.name"


def build_secret(job: TrainingJob, uid: str, workers: Iterable[tuple[int, int]], policy: Policy) -> dict[str, Any]:
    """Return the Secret with the credentials. `workers` holds (index, attempt for which the pod was made)."""
    data = credentials.derive_credentials(policy.seed, uid).build_secret_data(workers)
    return _build_child(job, uid, "v1", "Secret", names.name_secret(job.name)) | {"type": "Opaque", "data": data}


def build_service(job: TrainingJob, uid: str, attempt: int, address: str = "") -> dict[str, Any]:
    """Return the Service of the launcher of `attempt`. `address` is the cluster IP that living workers know."""
    spec: dict[str, Any] = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,  # the launcher becomes ready only after all workers have called it
        "selector": _build_launcher_labels(job, uid, attempt),
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
    return _build_child(job, uid, "v1", "Service", job.name) | {"spec": spec}


def build_network_policies(job: TrainingJob, uid: str, policy: Policy) -> list[dict[str, Any]]:
    """Return two policies, because workers and launcher open different ports. Neither has the job's own name, because
    another job may be named like a policy of this job."""
    job_labels = {names.JOB_NAME: names.name_job_label(job.name)}
    workers = {"matchLabels": {**job_labels, names.ROLE: names.WORKER}}
    launcher = {"matchLabels": {**job_labels, names.ROLE: names.LAUNCHER}}
    if job.spec.launcher.colocate:
        launcher = {"matchLabels": {**job_labels, names.WORKER_INDEX: "0"}}
    namespace = {"matchLabels": {NAMESPACE_NAME: policy.operator_namespace}} if policy.operator_namespace else {}
    operator = {"namespaceSelector": namespace, "podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}
    scrapers = [dict(peer) for peer in policy.metrics_from or (PROMETHEUS,)]
    peers = {"podSelector": workers}
    rules = [
        (
            names.name_child(job.name, names.WORKER),
            workers,
            [{"from": [peers]}, {"from": scrapers, "ports": _build_tcp_ports(contract.METRICS_PORT)}],
        ),
        (
            names.name_child(job.name, names.LAUNCHER),
            launcher,
            [{"from": [peers, operator], "ports": _build_tcp_ports(contract.LAUNCHER_PORT)}],
        ),
    ]
    return [
        _build_child(job, uid, "networking.k8s.io/v1", "NetworkPolicy", name)
        | {"spec": {"podSelector": selected, "policyTypes": ["Ingress"], "ingress": ingress}}
        for name, selected, ingress in rules
    ]


def _build_tcp_ports(port: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"}]


def build_pod_group(job: TrainingJob, uid: str, gang: Gang, resources: Mapping[str, str]) -> dict[str, Any]:
    """Return the PodGroup of the job. `resources` is what the members request together."""
    group = placement.build_pod_group(job, gang, resources)
    return _build_child(job, uid, group["apiVersion"], group["kind"], names.name_pod_group(job.name, uid)) | {
        "spec": group["spec"]
    }


def add_owner(manifest: dict[str, Any], job: TrainingJob, uid: str) -> dict[str, Any]:
    """Return the manifest of a pod with the job as its owner."""
    metadata = {**manifest["metadata"], "ownerReferences": [names.build_owner_reference(job.name, uid)]}
    return {**manifest, "metadata": metadata}


def _build_launcher_labels(job: TrainingJob, uid: str, attempt: int) -> dict[str, str]:
    role = {names.ROLE: names.LAUNCHER}
    if job.spec.launcher.colocate:
        role = {names.ROLE: names.WORKER, names.WORKER_INDEX: "0"}
    return {names.JOB_NAME: names.name_job_label(job.name), names.JOB_UID: uid, **role, names.ATTEMPT: str(attempt)}


def _build_child(job: TrainingJob, uid: str, version: str, kind: str, name: str) -> dict[str, Any]:
    labels: Mapping[str, str] = {
        names.JOB_NAME: names.name_job_label(job.name),
        "app.kubernetes.io/managed-by": "topkube",
    }
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": dict(labels),
            "ownerReferences": [names.build_owner_reference(job.name, uid)],
        },
    }
