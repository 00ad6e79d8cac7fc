"""Operators in processes of the test's own: killed at every one of their writes, and beside a gang scheduler."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.client.exceptions import ApiException
from operating import Guillotine, Jobs, Operator, gone, job, until
from target import OPERATOR, OPERATOR_NAMESPACE, Target

from topkube.cli.cluster.api import Api
from topkube_operator.cluster import ApiError, Cluster


@pytest.fixture
def jobs(target: Target, admin: Api) -> Iterator[Jobs]:
    """A fresh namespace that no operator looks after; one that is installed stands by meanwhile."""
    cluster, name = Cluster(str(target.kubeconfig)), f"process-{secrets.token_hex(3)}"
    cluster.learn("ServiceAccount", "v1", "serviceaccounts")
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    until(lambda: not gone(cluster, "ServiceAccount", name, "default"), "the service account")
    try:
        installed = target.apps.read_namespaced_deployment(OPERATOR, OPERATOR_NAMESPACE).spec.replicas
    except ApiException:
        installed = 0
    if installed:
        target.scale_operator(0)
    yield Jobs(cluster, name)
    if installed:
        target.scale_operator(installed)
    cluster.call("DELETE", f"/api/v1/namespaces/{name}")


def test_killed_at_each_of_its_writes_the_operator_brings_the_job_to_its_end(
    jobs: Jobs, kubeconfig: Path, tmp_path: Path
) -> None:
    with Guillotine(jobs.cluster, tmp_path) as guillotine:
        operator = Operator(str(guillotine.kubeconfig), jobs.namespace, "--no-leader-election")
        guillotine.victim = operator
        made = job("hydra", workers=1)
        jobs.create(made)
        with operator.running():

            def over() -> bool:
                if not operator.alive():
                    operator.start()
                return jobs.status("hydra").get("phase") == "Succeeded" and not jobs.children("Secret")

            until(over, "the job to end", 240)
        assert len(guillotine.kills) > 20, guillotine.kills
    status = jobs.status("hydra")
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0), guillotine.kills
    assert sorted(jobs.pods()) == ["hydra-launcher-1", "hydra-worker-0-1"]


def test_a_gang_waits_for_its_scheduler(jobs: Jobs, kubeconfig: Path) -> None:
    cluster = jobs.cluster
    group = {
        "group": "scheduling.x-k8s.io",
        "names": {"kind": "PodGroup", "plural": "podgroups"},
        "scope": "Namespaced",
    }
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    group["versions"] = [{"name": "v1alpha1", "served": True, "storage": True, "schema": schema}]
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    metadata = {
        "name": "podgroups.scheduling.x-k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, experimental"},
    }
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata}
    cluster.call("POST", path, {**crd, "spec": group})
    try:
        until(lambda: _served(cluster), "PodGroups")
        cluster.learn("PodGroup", "scheduling.x-k8s.io/v1alpha1", "podgroups")
        with Operator(str(kubeconfig), jobs.namespace, "--gang-scheduler", "nobody").running():
            jobs.create(job("gang", runPolicy={"schedulingPolicy": {"minAvailable": 3}}))
            jobs.wait_phase("gang", "Pending")
            until(lambda: len(jobs.pods()) == 3, "the pods")
            assert jobs.children("PodGroup")["gang"]["spec"]["minMember"] == 3
            for name, pod in jobs.pods().items():
                assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "gang"
                assert pod["spec"]["schedulerName"] == "nobody"
                _bind(cluster, jobs.namespace, name, len(name) % 2 + 1)
            jobs.wait_phase("gang", "Succeeded")
    finally:
        cluster.call("DELETE", f"{path}/{metadata['name']}")


def _served(cluster: Cluster) -> bool:
    try:
        return cluster.knows("scheduling.x-k8s.io", "v1alpha1", "podgroups")
    except ApiError:
        return False


def _bind(cluster: Cluster, namespace: str, pod: str, number: int) -> None:
    nodes, _ = cluster.list("Node", None)
    target = {"apiVersion": "v1", "kind": "Node", "name": nodes[number % len(nodes)]["metadata"]["name"]}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    cluster.call("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/binding", body)
