"""Failures that the kernel, the kubelet, the scheduler or a rank that hangs causes, and their cause in the status."""

from __future__ import annotations

from collections.abc import Iterator

import needs
import pytest
from jobs import build_endless_steps, build_job
from localkube.cluster import LocalCluster
from target import Namespace, wait_for

# Rank 1 allocates more memory than its container may have; the other rank waits for it.
GREEDY = """
import numpy as np, topkube
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
if topkube.rank() == 1:
    print("taking all there is", flush=True)
    taken = [np.ones(1 << 24, np.float32) for _ in range(64)]
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
"""
# Rank 1 does not call the second all-reduce, and does not end.
HANGS = """
import time, numpy as np, topkube
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
if topkube.rank() == 1:
    time.sleep(100_000)
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
"""


def test_a_rank_that_is_killed_for_memory_is_reported(namespace: Namespace) -> None:
    """The rank is killed, but its pod continues: only the cgroup's counter shows the cause."""
    greedy = build_job("greedy", ["python", "-c", GREEDY], workers=1, slots=2, runPolicy={"backoffLimit": 0})
    greedy["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"memory": "768Mi"}}
    failure = namespace.wait_phase(namespace.create(greedy), "Failed", seconds=120)["firstFailure"]
    assert failure["reason"] == "OOMKilled"
    assert failure["rank"] == 1
    assert failure["exitCode"] == 137
    assert failure["pod"] == namespace.build_pod_name("greedy", "worker-0-1")
    assert "taking all there is" in failure["logTail"]


def test_a_pod_that_its_kubelet_evicts_fails_the_job(namespace: Namespace) -> None:
    """The pod is evicted because of its own use of resources, so this is a failure and not a disruption."""
    fill = "head -c 40000000 /dev/zero >/scratch/full; exec sleep 100000"
    filled = build_job("full", ["sh", "-c", fill], workers=1, runPolicy={"backoffLimit": 0})
    spec = filled["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "scratch", "emptyDir": {"sizeLimit": "10Mi"}}]
    spec["containers"][0]["volumeMounts"] = [{"name": "scratch", "mountPath": "/scratch"}]
    status = namespace.wait_phase(namespace.create(filled), "Failed", seconds=180)
    assert status["firstFailure"]["reason"] == "Evicted"
    assert "scratch" in status["firstFailure"]["message"]
    assert status["disruptions"] == 0


def test_a_collective_that_hangs_names_the_rank_that_is_missing(namespace: Namespace) -> None:
    hung = build_job("hung", ["python", "-c", HANGS], slots=2, runPolicy={"backoffLimit": 0})
    hung["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "TOPKUBE_DEADLINE_SECONDS", "value": "20"}]
    failure = namespace.wait_phase(namespace.create(hung), "Failed", seconds=120)["firstFailure"]
    assert "rank 1 never arrived" in failure["message"] + failure.get("logTail", ""), failure


@pytest.fixture
def urgent_class(namespace: Namespace) -> Iterator[str]:
    """A priority class above all others."""
    kind = namespace.target.dynamic.resources.get(api_version="scheduling.k8s.io/v1", kind="PriorityClass")
    kind.create(body={"metadata": {"name": namespace.name}, "value": 1000})
    yield namespace.name
    kind.delete(name=namespace.name)


def test_preemption_is_not_a_failure(namespace: Namespace, urgent_class: str, breakable_cluster: LocalCluster) -> None:
    """A pod with a higher priority takes a worker's GPUs: the job continues on another node, or when the GPUs are
    free."""
    needs.require_gpus(namespace.target, 2)
    modest = build_job("modest", build_endless_steps(), runPolicy={"backoffLimit": 0})
    container = modest["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    name = namespace.create(modest)
    namespace.wait_phase(name, "Running")
    preempted = namespace.list_pods("worker")[1]
    node = namespace.target.core.read_node(preempted.spec.node_name)
    everything = {"limits": {"nvidia.com/gpu": node.status.allocatable["nvidia.com/gpu"]}}
    container = {**container, "command": ["sleep", "100000"], "resources": everything}
    same_node = {"kubernetes.io/hostname": preempted.spec.node_name}
    spec = {"containers": [container], "nodeSelector": same_node, "priorityClassName": urgent_class}
    spec["terminationGracePeriodSeconds"] = 0
    namespace.target.core.create_namespaced_pod(namespace.name, {"metadata": {"name": "urgent"}, "spec": spec})
    wait_for(lambda: namespace.read_status(name)["attempt"] == 2, "the next attempt", 60)
    namespace.target.core.delete_namespaced_pod("urgent", namespace.name)
    status = namespace.wait_phase(name, "Running")
    assert (status["restarts"], status["disruptions"]) == (0, 1)
    assert status["firstFailure"]["pod"] == preempted.metadata.name
    assert status["firstFailure"]["reason"] in ("Preempted", "Deleted")  # Deleted before Kubernetes 1.26
