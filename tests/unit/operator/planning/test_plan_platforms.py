"""`plan` beside other controllers: Kueue's pod groups, foreign finalizers; pods that an older operator made."""

from __future__ import annotations

import dataclasses

import pytest
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED

from topkube_operator.model.observed import Child


def _start_in_group() -> SimulatedCluster:
    data = build_job(runPolicy={"backoffLimit": 1})
    data["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    world = SimulatedCluster(data)
    world.start_ranks()
    assert {pod.pod_group for pod in world.pods.values()} == {"train-uid-1"}
    return world


@pytest.mark.parametrize("code", [0, 1])
def test_the_end_of_a_kueue_group_is_reported(code: int) -> None:
    world = _start_in_group()
    if code:
        world.edit_policy(backoffLimit=0)
    world.end_launcher(code, RANK_FAILED if code else None)
    world.reconcile()
    assert world.status["phase"] == ("Failed" if code else "Succeeded")
    assert not [pod.name for pod in world.pods.values() if pod.is_retriable]


def test_pods_without_a_kueue_group_are_not_annotated() -> None:
    world = start_running_job()
    world.end_launcher(0)
    assert not world.plan().end_groups
    world.reconcile()
    assert all(pod.is_retriable for pod in world.pods.values())


def test_a_replacement_in_a_kueue_group_waits_until_the_replaced_pod_has_ended() -> None:
    world = _start_in_group()
    world.end_launcher(1, RANK_FAILED)
    world.end("train-worker-1-1-uid-1", 1)
    world.change("train-launcher-1-uid-1", phase="Running")  # its sidecar runs on, so Kueue counts the pod
    world.reconcile()
    assert world.status["attempt"] == 2
    assert not [pod.name for pod in world.pods.values() if pod.attempt == 2]
    assert "train-launcher-1-uid-1" in world.find_condition("Created")["message"]
    world.run()
    world.reconcile()
    assert {pod.name for pod in world.pods.values() if pod.attempt == 2} == {
        "train-launcher-2-uid-1",
        "train-worker-1-2-uid-1",
    }
    assert world.pods["train-worker-0-1-uid-1"].deletion is None


def test_an_object_with_a_foreign_finalizer_is_deleted_once() -> None:
    world = start_running_job()
    key = ("Service", "train")
    world.children[key] = dataclasses.replace(world.children[key], is_being_deleted=True)
    world.edit_policy(suspend=True)
    world.reconcile()
    world.run()
    for _ in range(3):
        plan = world.plan()
        assert key not in {(deletion.kind, deletion.name) for deletion in plan.delete}
        world.reconcile()
    assert list(world.children) == [key]
    kept = {"metadata": {"name": "a", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert Child.from_object("Service", kept).is_being_deleted


def test_a_pod_that_a_foreign_finalizer_keeps_is_deleted_once() -> None:
    world = start_running_job(runPolicy={"cleanPodPolicy": "All"})
    world.change("train-worker-1-1-uid-1", finalizers=("example.com/keep",))
    world.end_launcher(0)
    world.reconcile()
    world.run()
    world.reconcile()
    assert list(world.pods) == ["train-worker-1-1-uid-1"]
    assert not world.plan().delete
    assert world.pods["train-worker-1-1-uid-1"].removable_from is None


def test_pods_that_an_older_operator_named_differently_are_replaced_by_the_next_attempt() -> None:
    world = start_running_job()
    old = world.pods.pop("train-worker-1-1-uid-1")
    world.pods["train-worker-1-1"] = dataclasses.replace(old, name="train-worker-1-1")
    world.reconcile()
    assert "train-worker-1-1" in world.pods, "the attempt that runs keeps its pods"
    world.end_launcher(1, {**RANK_FAILED, "pod": "train-worker-0-1-uid-1"})
    world.start_ranks()
    assert set(world.pods) == {"train-worker-0-1-uid-1", "train-worker-1-2-uid-1", "train-launcher-2-uid-1"}
