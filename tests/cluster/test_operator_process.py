"""Operators that a test runs in processes: killed at each of their writes, with short deadlines, and beside a gang
scheduler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from localkube.cluster import LocalCluster
from operating import Jobs, KillingProxy, OperatorProcess, build_shell_job
from target import wait_for

from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError

pytestmark = pytest.mark.alone


def test_killed_at_each_of_its_writes_the_operator_brings_the_job_to_its_end(
    jobs: Jobs, kubeconfig: Path, tmp_path: Path
) -> None:
    """The operator gets SIGKILL before and after each write. The first attempt fails and the second succeeds. One
    restart is counted, and each pod is created once."""
    with KillingProxy(jobs.cluster, tmp_path) as proxy:
        operator = OperatorProcess(str(proxy.kubeconfig), jobs.namespace, "--no-leader-election")
        proxy.operator = operator
        created = build_shell_job("killed", '[ "$TOPKUBE_ATTEMPT" = 2 ]', workers=1, runPolicy={"backoffLimit": 1})
        jobs.create(created)
        seen: set[tuple[str, str]] = set()
        with operator.keep_running():

            def is_over() -> bool:
                if not operator.is_alive():
                    operator.start()
                seen.update((name, pod["metadata"]["uid"]) for name, pod in jobs.list_pods().items())
                phase = jobs.read_status("killed").get("phase")
                assert phase != "Failed", (jobs.read_status("killed"), proxy.kills)
                return phase == "Succeeded" and not jobs.list_children("Secret")

            wait_for(is_over, "the job to end", 280)
        assert len(proxy.kills) > 26, proxy.kills
    status = jobs.read_status("killed")
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (2, 1, 0), proxy.kills
    pod_names = [jobs.build_pod_name("killed", part) for part in ("launcher-1", "launcher-2", "worker-0-1")]
    assert sorted(name for name, _ in seen) == pod_names
    assert pod_names[1] in jobs.list_pods()


def test_ranks_that_make_no_step_end_the_attempt(jobs: Jobs, kubeconfig: Path) -> None:
    with OperatorProcess(str(kubeconfig), jobs.namespace, "--startup-seconds", "4").keep_running():
        jobs.create(build_shell_job("stalled", "sleep 100000", workers=1))
        failure = jobs.wait_failure("stalled")
    assert failure["reason"] == "Stalled"
    assert "4 s" in failure["message"]


def test_a_rendezvous_that_takes_too_long_names_who_is_missing(
    jobs: Jobs, kubeconfig: Path, breakable_cluster: LocalCluster
) -> None:
    """Worker and launcher run on two nodes with no link between them."""
    first, second = list(breakable_cluster.nodes)[:2]
    breakable_cluster.cut(first, second)
    try:
        with OperatorProcess(str(kubeconfig), jobs.namespace, "--rendezvous-seconds", "3").keep_running():
            apart = build_shell_job("apart", "true", workers=1)
            apart["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": second}
            launcher_spec = {"nodeSelector": {"kubernetes.io/hostname": first}}
            apart["spec"]["launcher"] = {"template": {"spec": launcher_spec}}
            jobs.create(apart)
            failure = jobs.wait_failure("apart")
    finally:
        breakable_cluster.mend(first, second)
    assert failure["reason"] == "RendezvousTimeout"
    assert failure["pod"] == jobs.build_pod_name("apart", "worker-0-1")
    assert failure["pod"] in failure["message"]


def test_a_job_of_thousands_of_levels_does_not_end_the_operator(jobs: Jobs, kubeconfig: Path) -> None:
    """The API server stores it. With Python's usual limit of 1,000 levels, the operator could list no job any more."""
    usual_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)  # the test reads the job too
    try:
        deep: Any = 1
        for _ in range(3_000):
            deep = [deep]
        job = build_shell_job("deep", workers=1)
        job["spec"]["template"]["spec"]["x"] = deep
        jobs.create(job)
        with OperatorProcess(str(kubeconfig), jobs.namespace).keep_running() as operator:
            status = jobs.wait_phase("deep", "Failed")
            assert (
                "nested too deeply"
                in next(entry for entry in status["conditions"] if entry["type"] == "Failed")["message"]
            )
            jobs.create(build_shell_job("shallow", workers=1))
            jobs.wait_phase("shallow", "Succeeded")
            assert operator.is_alive()
    finally:
        sys.setrecursionlimit(usual_limit)


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
        wait_for(lambda: _is_served(cluster), "PodGroups")
        cluster.register_kind("PodGroup", "scheduling.x-k8s.io/v1alpha1", "podgroups")
        with OperatorProcess(str(kubeconfig), jobs.namespace, "--gang-scheduler", "nobody").keep_running():
            uid = jobs.create(build_shell_job("gang", runPolicy={"schedulingPolicy": {"minAvailable": 3}}))["metadata"][
                "uid"
            ]
            group_name = f"gang-{uid[:5]}"
            jobs.wait_phase("gang", "Pending")
            wait_for(lambda: len(jobs.list_pods()) == 3, "the pods")
            assert jobs.list_children("PodGroup")[group_name]["spec"]["minMember"] == 3
            for name, pod in jobs.list_pods().items():
                assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == group_name
                assert pod["spec"]["schedulerName"] == "nobody"
                _bind(cluster, jobs.namespace, name, len(name) % 2 + 1)
            jobs.wait_phase("gang", "Succeeded")
    finally:
        cluster.call("DELETE", f"{path}/{metadata['name']}")


def _is_served(cluster: ApiClient) -> bool:
    try:
        return cluster.serves("scheduling.x-k8s.io", "v1alpha1", "podgroups")
    except ApiError:
        return False


def _bind(cluster: ApiClient, namespace: str, pod: str, number: int) -> None:
    nodes, _ = cluster.list("Node", None)
    target = {"apiVersion": "v1", "kind": "Node", "name": nodes[number % len(nodes)]["metadata"]["name"]}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    cluster.call("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/binding", body)
