"""The pods of a job: their placement, their templates, and which pods are kept when the job ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import needs
import pytest
from jobs import build_failing_ranks, build_job, build_ranks_that_fail_once, build_steps
from localkube.cluster import LocalCluster
from target import Namespace, wait_for

# Each rank checks what the template requests, and calls an all-reduce.
CHECK_TEMPLATE = """
import os, numpy as np, topkube
assert open("/shared/word").read().strip() == "from init", "the file of the init container"
assert open("/config/colour").read() == "blue", "the volume"
assert os.environ["COLOUR"] == "blue", "the environment"
shared = os.statvfs("/dev/shm")
assert shared.f_blocks * shared.f_frsize >= 256 << 20, "room in /dev/shm"
for folder in ("/tmp", os.environ["HOME"]):
    open(folder + "/writable", "w").close()
topkube.init()
topkube.allreduce_(np.ones(1 << 20, np.float32), algorithm="hierarchical")
print(f"rank {topkube.rank()} has all that the template requests", flush=True)
"""


@pytest.fixture
def node_label(namespace: Namespace) -> Iterator[str]:
    """A label that only this test uses. It is removed from all nodes afterwards."""
    label = f"topkube.test/{namespace.name}"
    yield label
    for node in namespace.target.list_nodes():
        namespace.target.label_node(node, label, None)


def require_two_nodes(namespace: Namespace) -> list[str]:
    needs.require_nodes(namespace.target, 2, "one for each worker")
    return namespace.target.list_nodes()[:2]


def test_the_launcher_waits_for_every_worker(namespace: Namespace, node_label: str) -> None:
    """If only one worker finds a node, the job reports this and waits. It runs when there is room for both."""
    first, second = require_two_nodes(namespace)
    waits = build_job("waits", build_steps(2))
    waits["spec"]["template"]["spec"]["nodeSelector"] = {node_label: "yes"}
    namespace.target.label_node(first, node_label, "yes")
    name = namespace.create(waits)
    wait_for(lambda: namespace.read_status(name).get("workersReady") == "1/2", "one worker to have called", 60)
    wait_for(
        lambda: namespace.read_condition(name, "Scheduled").get("reason") == "Unschedulable", "what it waits for", 30
    )
    assert namespace.read_condition(name, "Scheduled")["status"] == "False"
    assert namespace.read_phase(name) == "Pending"
    namespace.target.label_node(second, node_label, "yes")
    assert namespace.wait_phase(name, "Succeeded")["attempt"] == 1
    assert {pod.spec.node_name for pod in namespace.list_pods("worker")} == {first, second}


def test_spread_none_puts_workers_on_one_node(namespace: Namespace) -> None:
    """For the ranks, two pods on one node are two nodes, because pods share no memory."""
    packed = build_job("packed", build_steps(2), slots=2, spread="None")
    node = namespace.target.list_nodes()[0]
    packed["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    name = namespace.create(packed)
    namespace.wait_phase(name, "Succeeded")
    assert [pod.spec.node_name for pod in namespace.list_pods("worker")] == [node, node]


def test_a_colocated_launcher_is_replaced_together_with_worker_0(namespace: Namespace) -> None:
    """With launcher.colocate there are as many pods as workers. The next attempt replaces the pod of worker 0, which
    contains the launcher, and no other pod."""
    name = namespace.create(build_job("inside", build_ranks_that_fail_once(), launcher={"colocate": True}))
    head, other = (namespace.build_pod_name(name, part) for part in ("worker-0-2", "worker-1-1"))
    uid = wait_for(lambda: namespace.read_uids("worker").get(other), "worker 1", 60)
    status = namespace.wait_phase(name, "Succeeded")
    assert (status["attempt"], status["restarts"]) == (2, 1)
    pods = {pod.metadata.name: pod for pod in namespace.list_pods()}
    assert sorted(pods) == [head, other]
    assert pods[other].metadata.uid == uid
    containers = [container.name for container in pods[head].spec.containers]
    assert containers == ["worker", "launcher"]


def test_a_guaranteed_pod_stays_guaranteed_with_a_launcher_inside(namespace: Namespace) -> None:
    exact = build_job("exact", build_steps(2), launcher={"colocate": True})
    exact["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "200m", "memory": "512Mi"}}
    name = namespace.create(exact)
    wait_for(lambda: len(namespace.list_pods()) == 2, "the pods")
    assert {pod.metadata.name: pod.status.qos_class for pod in namespace.list_pods()} == {
        namespace.build_pod_name(name, "worker-0-1"): "Guaranteed",
        namespace.build_pod_name(name, "worker-1-1"): "Guaranteed",
    }
    namespace.wait_phase(name, "Succeeded")


@pytest.mark.parametrize("has_defaults", [False, True])
def test_a_job_runs_in_a_namespace_with_a_quota_on_limits(namespace: Namespace, has_defaults: bool) -> None:
    """The quota admits only pods of which every container has limits: from the job, or from a LimitRange."""
    core = namespace.target.core
    hard = {"requests.cpu": "4", "requests.memory": "8Gi", "limits.cpu": "8", "limits.memory": "8Gi"}
    core.create_namespaced_resource_quota(namespace.name, {"metadata": {"name": "limits"}, "spec": {"hard": hard}})
    limited = build_job("limited", build_steps(2))
    if has_defaults:
        default = {"default": {"cpu": "500m", "memory": "1Gi"}, "defaultRequest": {"cpu": "100m", "memory": "256Mi"}}
        limits = [{"type": "Container", **default}]
        core.create_namespaced_limit_range(namespace.name, {"metadata": {"name": "l"}, "spec": {"limits": limits}})
    else:
        amounts = {"limits": {"cpu": "500m", "memory": "1Gi"}, "requests": {"cpu": "100m", "memory": "256Mi"}}
        limited["spec"]["template"]["spec"]["containers"][0]["resources"] = amounts
    wait_for(lambda: core.read_namespaced_resource_quota("limits", namespace.name).status.hard, "the quota to count")
    name = namespace.create(limited)
    namespace.wait_phase(name, "Succeeded")


def test_ranks_are_in_the_order_of_racks(namespace: Namespace, node_label: str) -> None:
    """Two workers in each of two racks: consecutive ranks share a rack, whatever the scheduler's order was."""
    for node, rack in zip(require_two_nodes(namespace), ("a", "b"), strict=True):
        namespace.target.label_node(node, node_label, rack)
    racks = {
        node.metadata.name: node.metadata.labels.get(node_label) for node in namespace.target.core.list_node().items
    }
    ordered = build_job("ordered", build_steps(2), workers=4, spread="None", topology={"key": node_label})
    workers = {"topkube.dev/role": "worker"}
    spread = {"maxSkew": 1, "topologyKey": node_label, "whenUnsatisfiable": "DoNotSchedule"}
    pod = ordered["spec"]["template"]["spec"]
    pod["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": workers}}]
    pod["affinity"] = {"nodeAffinity": _require_label(node_label)}
    name = namespace.create(ordered)
    namespace.wait_phase(name, "Succeeded")
    rack_of_rank: dict[int, str | None] = {}
    for worker in namespace.list_pods("worker"):
        for rank in re.findall(r"rank (\d+) of 4 runs", namespace.read_log(worker.metadata.name)):
            rack_of_rank[int(rank)] = racks[worker.spec.node_name]
    order = [rack_of_rank[rank] for rank in range(4)]
    assert order in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def _require_label(label: str) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": label, "operator": "Exists"}]}]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def test_templates_are_passed_through_whole(namespace: Namespace, breakable_cluster: LocalCluster) -> None:
    """The template has an init container, a sidecar, volumes, environment, affinity, tolerations and a runtime class.
    The launcher has another template. The sidecar never ends by itself, and the job still ends."""
    core, target = namespace.target.core, namespace.target
    core.create_namespaced_config_map(namespace.name, {"metadata": {"name": "paint"}, "data": {"colour": "blue"}})
    runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "runc"}
    target.dynamic.resources.get(api_version="node.k8s.io/v1", kind="RuntimeClass").create(
        body={**runtime_class, "metadata": {"name": namespace.name}}
    )
    whole = build_job("whole", ["python", "-c", CHECK_TEMPLATE], slots=2)
    whole["spec"]["launcher"] = {
        "template": {
            "metadata": {"labels": {"team": "vision"}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": target.list_nodes()[0]},
                "containers": [{"name": "launcher", "resources": {"limits": {"memory": "300Mi"}}}],
            },
        }
    }
    spec = whole["spec"]["template"]["spec"]
    image = spec["containers"][0]["image"]
    shared = {"name": "shared", "mountPath": "/shared"}
    words = ["sh", "-c", "echo from init >/shared/word"]
    spec["initContainers"] = [{"name": "first", "image": image, "command": words, "volumeMounts": [shared]}]
    spec["containers"][0]["volumeMounts"] = [shared, {"name": "paint", "mountPath": "/config"}]
    spec["containers"][0]["env"] = [
        {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "paint", "key": "colour"}}}
    ]
    spec["containers"].append({"name": "sidecar", "image": image, "command": ["sleep", "100000"]})
    spec["volumes"] = [{"name": "shared", "emptyDir": {}}, {"name": "paint", "configMap": {"name": "paint"}}]
    spec["tolerations"] = [{"key": "spot", "operator": "Exists"}]
    spec["runtimeClassName"] = namespace.name
    hosts = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "Exists"}]}]
    spec["affinity"] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": hosts}}
    }
    name = namespace.create(whole)
    try:
        wait_for(lambda: len(namespace.list_pods()) == 3, "the pods", 30)
        workers, (launcher,) = namespace.list_pods("worker"), namespace.list_pods("launcher")
        namespace.wait_phase(name, "Succeeded")
    finally:
        target.dynamic.resources.get(api_version="node.k8s.io/v1", kind="RuntimeClass").delete(name=namespace.name)
    for pod in workers:
        assert [item.name for item in pod.spec.containers] == ["worker", "sidecar"]
        assert pod.spec.runtime_class_name == namespace.name
        assert any(item.key == "spot" for item in pod.spec.tolerations)
        assert pod.spec.affinity.node_affinity is not None
        assert pod.spec.affinity.pod_anti_affinity is not None  # spread: Node is added to it
    assert launcher.metadata.labels["team"] == "vision"
    assert launcher.spec.containers[0].resources.limits == {"memory": "300Mi"}
    wait_for(lambda: namespace.list_pods("worker") == [], "the pods with running sidecars to be cleaned up", 60)


def test_the_clean_pod_policy_decides_which_pods_stay(namespace: Namespace) -> None:
    """When a job fails, All deletes all of its pods, Running deletes the pods that still run, and None deletes no pod.
    The status keeps the log of the failure in all cases."""
    policies = ("All", "Running", "None")
    for policy in policies:
        rules = {"backoffLimit": 0, "cleanPodPolicy": policy}
        namespace.create(build_job(policy.lower(), build_failing_ranks(), spread="None", runPolicy=rules))
    for policy in policies:
        failure = namespace.wait_phase(policy.lower(), "Failed")["firstFailure"]
        assert "this is why" in failure["logTail"]
    wait_for(lambda: namespace.list_pods(job="all") == [], "all pods to go", 60)
    wait_for(lambda: len(namespace.list_pods(job="running")) == 1, "the running pods to go", 60)
    assert [pod.status.phase for pod in namespace.list_pods(job="running")] == ["Failed"]
    assert namespace.list_pods("launcher", job="running")
    assert [pod.status.phase for pod in namespace.list_pods("worker", job="none")] == ["Running", "Running"]
    namespace.patch("none", {"spec": {"runPolicy": {"cleanPodPolicy": "All"}}})
    wait_for(lambda: namespace.list_pods(job="none") == [], "a changed policy to take effect", 60)
