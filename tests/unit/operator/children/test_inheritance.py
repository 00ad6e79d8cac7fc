"""The fields that a launcher takes from the workers' template, and pods on clusters that choose users and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from child_builders import POLICY, build_launcher, build_worker, parse_job, read_environment
from simulated_cluster import SimulatedCluster
from simulated_job import build_job

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.launch import contract
from topkube_operator.children import inheritance, pods
from topkube_operator.model import names
from topkube_operator.planning import admission

OWN_LABELS = {"team": "vision", "app": "train"}


def _build_template(**spec: Any) -> dict[str, Any]:
    return {"spec": {**build_job()["spec"]["template"]["spec"], **spec}}


def _build_template_with(**resources: Any) -> dict[str, Any]:
    template = _build_template()
    template["spec"]["containers"] = [{**template["spec"]["containers"][0], "resources": resources}]
    return template


def test_a_launcher_may_use_the_nodes_that_workers_may_use() -> None:
    node_and_pod_affinity = {"nodeAffinity": {"required": 1}, "podAffinity": {"preferred": 2}}
    inherited = {
        "nodeSelector": {"kubernetes.io/arch": "arm64", "pool": "gpu"},
        "runtimeClassName": "nvidia",
        "securityContext": {"runAsUser": 2000, "runAsNonRoot": True, "supplementalGroups": [7]},
    }
    job = parse_job(template=_build_template(**inherited, affinity={**node_and_pod_affinity, "podAntiAffinity": {}}))
    spec = build_launcher(job)[0]["spec"]
    assert {field: spec[field] for field in inherited} == inherited
    assert spec["affinity"] == node_and_pod_affinity, (
        "an anti-affinity would ask for one node more than there are workers"
    )
    assert "runAsUser" not in build_launcher(job)[1]["securityContext"], "the pod's security context has the user"


def test_fields_of_the_launchers_template_are_kept() -> None:
    workers = {"nodeSelector": {"pool": "gpu"}, "affinity": {"nodeAffinity": {"a": 1}}, "runtimeClassName": "nvidia"}
    own = {"nodeSelector": {}, "affinity": {}, "runtimeClassName": "runc", "securityContext": {"runAsUser": 7}}
    spec = build_launcher(parse_job(template=_build_template(**workers), launcher={"template": {"spec": own}}))[0][
        "spec"
    ]
    assert {field: spec[field] for field in own} == own


def test_a_launcher_has_the_workers_labels_except_those_that_keep_workers_apart() -> None:
    rule = {"labelSelector": {"matchLabels": {"app": "train"}}, "topologyKey": "kubernetes.io/hostname"}
    term = {"weight": 1, "podAffinityTerm": {"labelSelector": {"matchExpressions": [{"key": "rack"}]}}}
    template = _build_template()
    template["metadata"] = {"labels": {**OWN_LABELS, "rack": "r1", "zone": "a"}}
    template["spec"] |= {
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [rule],
                "preferredDuringSchedulingIgnoredDuringExecution": [term],
            }
        },
        "topologySpreadConstraints": [{"labelSelector": {"matchLabels": {"zone": "a"}}}],
    }
    own = {"metadata": {"labels": {"team": "platform"}}}
    labels = build_launcher(parse_job(template=template))[0]["metadata"]["labels"]
    assert (labels["team"], labels["topkube.dev/role"]) == ("vision", "launcher")
    assert not {"app", "rack", "zone"} & set(labels)
    labels = build_launcher(parse_job(template=template, launcher={"template": own}))[0]["metadata"]["labels"]
    assert labels["team"] == "platform"


def test_a_launcher_is_protected_from_autoscalers_and_in_the_mesh_as_workers_are() -> None:
    """If an autoscaler removes the node of a launcher, the attempt of all workers ends. A sidecar that only the
    launcher has hides the addresses of its callers."""
    shared = {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "linkerd.io/inject": "disabled",
        "traffic.sidecar.istio.io/excludeInboundPorts": "7077",
    }
    of_workers = {"k8s.v1.cni.cncf.io/networks": "rdma", "prometheus.io/scrape": "true", "notistio.io/a": "b"}
    template = {**_build_template(), "metadata": {"annotations": {**shared, **of_workers}}}
    annotations = build_launcher(parse_job(template=template))[0]["metadata"]["annotations"]
    assert {key: annotations.get(key) for key in shared} == shared
    assert not of_workers.keys() & annotations.keys()
    own = {"karpenter.sh/do-not-disrupt": "false"}
    job = parse_job(template=template, launcher={"template": {"metadata": {"annotations": own}}})
    assert build_launcher(job)[0]["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "false"


@pytest.mark.parametrize("is_in_pod", [True, False])
def test_a_null_user_leaves_the_user_and_the_group_to_the_cluster(is_in_pod: bool) -> None:
    """OpenShift's restricted-v2 needs this: it admits only the users of the namespace's range."""
    template = _build_template()
    part = template["spec"] if is_in_pod else template["spec"]["containers"][0]
    part["securityContext"] = {"runAsUser": None}
    job = parse_job(template=template, checkpoint={"claimName": "claim"})
    for pod, container in (build_worker(job), build_launcher(job)):
        contexts = [pod["spec"].get("securityContext") or {}, container["securityContext"]]
        for context in contexts:
            assert not {"runAsUser", "fsGroup"} & set(context)
        assert container["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_null_user_outlasts_a_change_that_is_refused() -> None:
    template = _build_template(securityContext={"runAsUser": None})
    world = SimulatedCluster(build_job(template=template))
    world.start_ranks()
    world.edit(template=template, workers=3)  # refused: the accepted spec, which holds no nulls, stays in force
    world.reconcile()
    assert world.find_condition("Failed")["reason"] == "ChangeRefused"
    shapes = {pod.shape for pod in world.pods.values() if pod.role == "worker"}
    world.edit_policy()  # another generation of the same spec
    assert shapes == {pods.hash_worker(TrainingJob.from_cluster(build_job(template=template)))}
    world.end("train-worker-1-1-uid-1", 3)
    world.end("train-launcher-1-uid-1", 1)
    world.reconcile()
    assert world.status["attempt"] == 2
    kept = [pod for pod in world.pods.values() if pod.name == "train-worker-0-1-uid-1" and pod.deletion is None]
    assert kept, "the worker still fits: its template has not changed"


def test_a_guaranteed_pod_stays_guaranteed_with_a_launcher_inside() -> None:
    exact = {"cpu": "4", "memory": "8Gi"}
    colocated = {"colocate": True}
    for template in (
        _build_template_with(limits=exact),
        _build_template_with(limits=exact, requests={"cpu": "4000m", "memory": "8192Mi"}),
    ):
        pod = pods.build_colocated_worker(
            parse_job(template=template, launcher=colocated), "uid-1", 1, [(0, 1), (1, 1)], POLICY
        )
        launcher = next(entry for entry in pod["spec"]["containers"] if entry["name"] == "launcher")
        assert launcher["resources"]["requests"] == launcher["resources"]["limits"]
        assert set(launcher["resources"]["limits"]) == {"cpu", "memory"}
    burstable = _build_template_with(limits=exact, requests={"cpu": "1"})
    pod = pods.build_colocated_worker(
        parse_job(template=burstable, launcher=colocated), "uid-1", 1, [(0, 1), (1, 1)], POLICY
    )
    launcher = next(entry for entry in pod["spec"]["containers"] if entry["name"] == "launcher")
    assert launcher["resources"]["requests"] == {"cpu": "50m", "memory": "96Mi"}


def test_a_quota_on_limits_admits_the_launcher_of_workers_that_it_admits() -> None:
    limits = build_launcher(parse_job(template=_build_template_with(limits={"memory": "8Gi", "nvidia.com/gpu": 2})))[1][
        "resources"
    ]
    assert set(limits["limits"]) == {"memory"}
    assert "limits" not in build_launcher(parse_job())[1]["resources"]


@pytest.mark.parametrize("colocate", [True, False])
def test_the_launchers_resources_can_be_set(colocate: bool) -> None:
    resources = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"cpu": "250m", "memory": "1Gi"}}
    job = parse_job(launcher={"colocate": colocate, "resources": resources})
    if colocate:
        pod = pods.build_colocated_worker(job, "uid-1", 1, [(0, 1), (1, 1)], POLICY)
        launcher = next(entry for entry in pod["spec"]["containers"] if entry["name"] == "launcher")
    else:
        _, launcher = build_launcher(job)
    assert launcher["resources"] == resources


@pytest.mark.parametrize(
    ("annotation", "of_operator", "checked"),
    [(None, True, True), (None, False, False), ("false", True, False), ("true", False, True), ("no", True, True)],
)
def test_a_job_behind_a_mesh_turns_off_the_check_of_addresses(
    annotation: str | None, of_operator: bool, checked: bool
) -> None:
    data = build_job()
    data["metadata"]["annotations"] = {names.CHECK_ADDRESS: annotation} if annotation else {}
    job = TrainingJob.from_cluster(data)
    pod = pods.build_launcher(job, "uid-1", 2, [(0, 1), (1, 2)], replace(POLICY, check_address=of_operator))
    (container,) = pod["spec"]["containers"]
    assert contract.LaunchPlan.read(read_environment(container)[contract.PLAN_VARIABLE]).check_address is checked
    warned = [text for text in admission.list_warnings(job) if names.CHECK_ADDRESS in text]
    assert bool(warned) == (annotation == "no")


def test_limits_below_requests_are_refused() -> None:
    with pytest.raises(JobError, match="512Mi is less than the request of 1Gi"):
        parse_job(launcher={"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "512Mi"}}})


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_a_launcher_inside_a_pod_with_resources_of_its_own_adds_none(kind: str) -> None:
    """The API server refuses a pod whose containers together request more than the pod: a worker that requests all
    of it left nothing for the launcher."""
    amounts = {"cpu": "4", "memory": "8Gi"}
    container = {"name": "worker", "image": "image:1", "command": ["python"], "resources": {kind: amounts}}
    template = {"spec": {"containers": [container], "resources": {kind: amounts}}}
    job = parse_job(template=template, launcher={"colocate": True})
    assert inheritance.choose_launcher_resources(job) == {}
    own = {"requests": {"cpu": "10m"}}
    job = parse_job(template=template, launcher={"colocate": True, "resources": own})
    assert inheritance.choose_launcher_resources(job) == own
    job = parse_job(template=template)
    assert inheritance.choose_launcher_resources(job)["requests"] == {"cpu": "50m", "memory": "96Mi"}
