"""The parts of a job's pods that queues and gang schedulers read: requests, roles, and the topology of workers."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from child_builders import POLICY, build_launcher, build_worker, parse_job, selects
from hypothesis import given
from hypothesis import strategies as st
from simulated_job import build_job

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube_operator.children import pod_sets, pods, workloads
from topkube_operator.model import names

RACK = "example.com/rack"


def _build_template(resources: dict[str, Any], **spec: Any) -> dict[str, Any]:
    container = {**build_job()["spec"]["template"]["spec"]["containers"][0], "resources": resources}
    return {"spec": {"containers": [container], **spec}}


def test_members_request_the_resources_of_their_containers() -> None:
    resources = {"requests": {"cpu": "1500m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 2, "memory": "2Gi"}}
    job = parse_job(workers=3, template=_build_template(resources))
    assert pod_sets.sum_member_requests(job, "uid-1", POLICY) == {
        "cpu": "4550m",
        "memory": str((3 << 30) + (96 << 20)),
        "nvidia.com/gpu": "6",
    }
    smaller_gang = parse_job(
        workers=3, template=_build_template(resources), runPolicy={"schedulingPolicy": {"minAvailable": 2}}
    )
    assert pod_sets.sum_member_requests(smaller_gang, "uid-1", POLICY)["cpu"] == "1550m", "the launcher and one worker"
    colocated = parse_job(workers=3, template=_build_template(resources), launcher={"colocate": True})
    assert [(pod_set.name, pod_set.count) for pod_set in pod_sets.build_pod_sets(colocated, "uid-1", POLICY)] == [
        ("launcher", 1),
        ("worker", 2),
    ]


def test_init_containers_count_if_they_need_more_and_native_sidecars_always() -> None:
    spec: dict[str, Any] = {
        "containers": [{"resources": {"requests": {"cpu": "1"}}}],
        "initContainers": [
            {"resources": {"requests": {"cpu": "3"}}},
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "500m", "memory": "1Ki"}}},
        ],
    }
    assert pod_sets.sum_pod_requests(spec) == {"cpu": Decimal(3), "memory": Decimal(1024)}
    spec["initContainers"].reverse()  # now the sidecar runs beside the other init container
    assert pod_sets.sum_pod_requests(spec) == {"cpu": Decimal("3.5"), "memory": Decimal(1024)}


def test_resources_of_the_whole_pod_count_in_place_of_those_of_its_containers() -> None:
    """Kubernetes 1.34 has such resources. Without them in its Workload, a job took nodes and no quota."""
    resources = {"requests": {"cpu": "8"}, "limits": {"cpu": "16", "memory": "1Ki"}}
    claims = [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}]
    template = _build_template({"requests": {"cpu": "1"}}, overhead={"cpu": "1"}, resourceClaims=claims)
    template["spec"]["resources"] = resources
    assert pod_sets.sum_pod_requests(template["spec"]) == {"cpu": Decimal(9), "memory": Decimal(1024)}
    data = build_job(template=template)
    data["metadata"]["labels"] = {names.KUEUE_QUEUE: "gpus"}
    policy = replace(POLICY, workloads="kueue.x-k8s.io/v1beta1")
    workload = workloads.build_workload(TrainingJob.from_cluster(data), "uid-1", policy, {})
    spec = workload["spec"]["podSets"][1]["template"]["spec"]
    assert (spec["resources"], spec["resourceClaims"]) == (resources, claims)


@given(
    st.recursive(
        st.none() | st.text(max_size=3) | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(max_size=3), x)
    )
)
def test_invalid_resources_request_nothing(value: Any) -> None:
    spec = {"containers": [{"resources": {"requests": value, "limits": value}}], "initContainers": [value]}
    assert all(isinstance(amount, Decimal) for amount in pod_sets.sum_pod_requests(spec).values())


def test_pods_of_a_kueue_group_have_the_role_of_the_pods_that_they_replace() -> None:
    data = build_job(dataset={"uri": "s3://b/x", "cache": {"medium": "Node"}})
    data["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    job, role = TrainingJob.from_cluster(data), "kueue.x-k8s.io/role-hash"
    first = pods.build_worker(job, "uid-1", 1, 1, "10.0.0.9", POLICY)
    second = pods.build_worker(job, "uid-1", 1, 2, "10.0.0.9", POLICY, {"node-a": 80})
    assert first["spec"]["affinity"] != second["spec"]["affinity"], "Kueue hashes this, unless the pod has a role"
    roles = [pod["metadata"]["annotations"][role] for pod in (first, second, build_launcher(job)[0])]
    assert roles == ["worker", "worker", "launcher"]
    assert role not in build_worker(parse_job())[0]["metadata"]["annotations"]


@pytest.mark.parametrize("mode", ["Preferred", "Required"])
def test_workers_are_placed_together(mode: str) -> None:
    job = parse_job(topology={"key": RACK, "mode": mode})
    pod, _ = build_worker(job)
    pod_affinity = pod["spec"]["affinity"]["podAffinity"]
    if mode == "Required":
        (term,) = pod_affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    else:
        (rule,) = pod_affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        term = rule["podAffinityTerm"]
    assert term["topologyKey"] == RACK
    assert selects(term["labelSelector"], pod["metadata"]["labels"])
    assert not selects(term["labelSelector"], build_launcher(job)[0]["metadata"]["labels"])
    assert "podAntiAffinity" in pod["spec"]["affinity"], "one worker per node, as without a topology"


def test_a_topology_is_checked_and_is_part_of_a_pods_shape() -> None:
    with pytest.raises(JobError, match="a label of nodes"):
        parse_job(topology={"key": "not a label"})
    assert pods.hash_worker(parse_job(topology={"key": RACK})) != pods.hash_worker(parse_job())
    assert "podAffinity" not in build_worker(parse_job())[0]["spec"]["affinity"]
