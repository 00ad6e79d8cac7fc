"""`plan` by example: the cause of a failure, whether the cluster caused it, and how it is reported."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED

from topkube.job.status import MOST_LOST_WORKERS
from topkube_operator.model.observed import Container, Pod, Policy

WORKER = "train-worker-1-1-uid-1"
DISRUPTIONS = {
    "deleted": (lambda world: world.delete("Pod", WORKER, world.pods[WORKER].uid), "Deleted"),
    "preempted": (
        lambda world: world.change(WORKER, disruption="PreemptionByScheduler", deletion=world.now),
        "Preempted",
    ),
    "evicted": (lambda world: world.change(WORKER, phase="Failed", reason="Evicted", message="low on disk"), "Evicted"),
    "evicted, as newer kubelets report it": (
        lambda world: world.change(
            WORKER,
            phase="Failed",
            reason="Evicted",
            message="The node was low on resource: memory.",
            disruption="TerminationByKubelet",
        ),
        "Evicted",
    ),
    "drained": (
        lambda world: world.change(WORKER, disruption="EvictionByEvictionAPI", deletion=world.now),
        "Evicted",
    ),
    "its node is tainted": (
        lambda world: world.change(WORKER, disruption="DeletionByTaintManager", deletion=world.now),
        "Evicted",
    ),
    "its node was removed": (
        lambda world: world.change(WORKER, phase="Failed", disruption="DeletionByPodGC"),
        "NodeLost",
    ),
    "lost": (lambda world: world.lost.add(world.pods[WORKER].node), "NodeLost"),
    "gone": (lambda world: world.remove(WORKER), "Deleted"),
}


@pytest.mark.parametrize(("trouble", "reason"), DISRUPTIONS.values(), ids=DISRUPTIONS)
def test_disruptions_do_not_use_up_restarts(trouble: Any, reason: str) -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0})
    world.change("train-worker-1-1-uid-1", node="node-x")
    trouble(world)
    world.end_launcher(1, {"pod": "train-worker-1-1-uid-1", "reason": "WorkerLost", "exitCode": 1, "message": "silent"})
    world.reconcile()
    status = world.status
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (2, 0, 1), status
    assert status["firstFailure"]["reason"] == reason
    assert "train-worker-1-2-uid-1" in world.pods


def test_an_eviction_for_the_pods_own_usage_is_a_failure() -> None:
    world = start_running_job()
    words = "Usage of EmptyDir volume exceeds the limit 1Gi"
    world.change("train-worker-0-1-uid-1", phase="Failed", reason="Evicted", message=words)
    world.end_launcher(1, {"pod": "train-worker-0-1-uid-1", "reason": "WorkerLost", "exitCode": 1})
    world.reconcile()
    assert (world.status["restarts"], world.status["disruptions"]) == (1, 0)


def test_a_worker_killed_for_memory_is_reported_as_oom_killed() -> None:
    world = start_running_job()
    world.end("train-worker-0-1-uid-1", 137, ended_reason="OOMKilled")
    world.end_launcher(1, {"pod": "train-worker-0-1-uid-1", "reason": "WorkerLost", "exitCode": 1})
    world.reconcile()
    failure = world.status["firstFailure"]
    assert (failure["reason"], failure["exitCode"]) == ("OOMKilled", 137)
    assert failure["logTail"] == "the log of train-worker-0-1-uid-1"


def test_a_rank_killed_for_memory_in_a_living_pod_is_reported_and_the_pod_stays() -> None:
    world = start_running_job()
    failure = {
        "pod": "train-worker-1-1-uid-1",
        "rank": 2,
        "reason": "OOMKilled",
        "exitCode": 137,
        "logTail": "last words",
    }
    world.end_launcher(1, failure)
    world.reconcile()
    expected = {**failure, "node": "node-a", "message": "ended by signal 9 (exit code 137)"}
    assert world.status["firstFailure"] == expected
    assert "train-worker-1-1-uid-1" in world.pods


def test_a_clock_of_a_node_that_is_ahead_does_not_delay_the_next_attempt() -> None:
    """The next attempt began when the operator's clock had reached the time of the node: an hour later."""
    for lost in (True, False):
        world = start_running_job()
        now = world.now
        world.now = now + timedelta(hours=1)
        if lost:
            failure = {"pod": "train-worker-1-1-uid-1", "reason": "WorkerLost", "exitCode": 1, "message": "silent"}
            world.end_launcher(1, failure)
        else:  # the launcher hangs
            world.end("train-worker-1-1-uid-1", 1)
        world.now = now
        world.report = None
        world.reconcile()
        assert world.status["attempt"] == 2


def test_a_lost_worker_is_replaced_though_its_pod_looks_alive() -> None:
    world = start_running_job()
    world.change("train-worker-1-1-uid-1", node="node-x")
    world.end_launcher(1, {"pod": "train-worker-1-1-uid-1", "reason": "WorkerLost", "exitCode": 1, "message": "silent"})
    assert world.reconcile().requeue == 5.0  # its kubelet may still report what happened
    world.wait(5)
    world.reconcile()
    assert (world.status["disruptions"], world.status["restarts"]) == (1, 0)
    assert world.pods["train-worker-1-1-uid-1"].deletion is not None
    assert "train-worker-1-2-uid-1" in world.pods
    world.lost.add("node-x")  # the pod never goes away, and blocks nothing
    world.start_ranks()
    assert world.status["phase"] == "Running"


def test_a_launcher_that_dies_silently_is_replaced() -> None:
    world = start_running_job()
    world.end("train-launcher-1-uid-1", 137)
    world.reconcile()
    failure = world.status["firstFailure"]
    assert (failure["pod"], failure["exitCode"], world.status["attempt"]) == ("train-launcher-1-uid-1", 137, 2)
    world.start_ranks()
    world.remove("train-launcher-2-uid-1")
    world.reconcile()
    assert world.status["disruptions"] == 1
    assert "train-launcher-3-uid-1" in world.pods or world.find_condition("Restarting")["status"] == "True"


def test_a_launcher_has_a_while_to_notice_that_a_worker_died() -> None:
    world = start_running_job()
    world.end("train-worker-0-1-uid-1", 1)
    plan = world.reconcile()
    assert world.status["attempt"] == 1
    assert plan.requeue == 10.0
    world.wait(10)
    world.report_state("Running")
    world.reconcile()
    assert world.status["attempt"] == 2
    assert world.status["firstFailure"]["pod"] == "train-worker-0-1-uid-1"


def test_a_worker_on_a_node_that_is_reported_lost_may_still_train() -> None:
    world = start_running_job()
    world.change("train-worker-0-1-uid-1", node="node-x")
    world.lost.add("node-x")
    world.report_state("Running")
    world.reconcile()
    assert world.status["attempt"] == 1
    world.wait(60)  # and now the launcher has not answered either
    world.reconcile()
    assert world.status["attempt"] == 2


def test_workers_that_do_not_call_are_named() -> None:
    world = SimulatedCluster(build_job(), Policy(seed=b"s" * 32, rendezvous_seconds=60))
    world.reconcile()
    world.schedule()
    world.wait(86400)  # waiting in a queue is not waiting for a call
    world.run()
    world.report_state("Waiting", missing=(1,))
    assert world.reconcile().requeue == 30.0
    assert "Likely causes" not in world.find_condition("Running")["message"]
    world.wait(30)
    assert world.reconcile().requeue == 30.0
    message = world.find_condition("Running")["message"]
    for words in ("1 of 2 workers", "NetworkPolicy", "Next: kubectl logs train-worker-1-1-uid-1"):
        assert words in message
    world.wait(30)
    world.report_state("Waiting", missing=(1,))
    world.reconcile()
    failure = world.status["firstFailure"]
    assert (failure["reason"], failure["pod"]) == ("RendezvousTimeout", "train-worker-1-1-uid-1")
    assert world.status["attempt"] == 2
    assert "train-worker-1-2-uid-1" in world.pods


def _let_workers_be_missing(world: SimulatedCluster, count: int) -> None:
    world.reconcile()
    world.schedule()
    world.run()
    world.wait(700)
    world.report_state("Waiting", missing=tuple(range(1, 1 + count)))


def _block_workers(world: SimulatedCluster, count: int) -> None:
    world.reconcile()
    world.schedule()
    for index in range(1, 1 + count):
        containers = {"worker": Container(waiting="ImagePullBackOff", image="none:1")}
        world.change(f"train-worker-{index}-1-uid-1", containers=containers)


@pytest.mark.parametrize("writes", range(6))
@pytest.mark.parametrize("begin", [_let_workers_be_missing, _block_workers])
def test_a_new_operator_replaces_all_workers_that_the_killed_operator_gave_up(
    begin: Callable[[SimulatedCluster, int], None], writes: int
) -> None:
    rules = [{"action": "Restart", "onReasons": ["ImagePullBackOff"]}]
    world = SimulatedCluster(build_job(workers=4, runPolicy={"failurePolicy": {"rules": rules}}))
    begin(world, 2)
    world.crash_after = writes
    world.reconcile()
    world.report_state("Waiting")
    if world.status["attempt"] == 1:  # killed before it had written the status
        begin(world, 2)
    world.start_ranks()
    assert world.status["lostWorkers"] == [1, 2]
    assert sorted(name for name, pod in world.pods.items() if pod.deletion is None) == [
        "train-launcher-2-uid-1",
        "train-worker-0-1-uid-1",
        "train-worker-1-2-uid-1",
        "train-worker-2-2-uid-1",
        "train-worker-3-1-uid-1",
    ]


def test_the_lost_workers_of_an_attempt_are_bounded_and_forgotten_with_the_next_failure() -> None:
    world = SimulatedCluster(build_job(workers=300, slotsPerWorker=1))
    _let_workers_be_missing(world, 290)
    world.reconcile()
    assert len(world.status["lostWorkers"]) == MOST_LOST_WORKERS
    world.start_ranks()
    assert {pod.attempt for pod in world.pods.values() if pod.deletion is None} == {2}
    world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    assert (world.status["attempt"], "lostWorkers" in world.status) == (3, False)


def test_an_image_that_cannot_be_pulled_is_pending_with_the_reason_and_fails_at_the_deadline() -> None:
    world = SimulatedCluster(build_job(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile()
    world.schedule()
    for waiting, message in [("ErrImagePull", "no such host"), ("ImagePullBackOff", "Back-off"), ("ErrImagePull", "x")]:
        world.change(
            "train-worker-0-1-uid-1", containers={"worker": Container(waiting=waiting, waiting_message=message)}
        )
        world.reconcile()
        assert world.status["phase"] == "Pending"
        assert world.find_condition("Running")["reason"] == "ImagePullBackOff"
    assert world.events.count("ImagePullBackOff") == 1
    world.wait(100)
    world.reconcile()
    assert (world.status["phase"], world.find_condition("Failed")["reason"]) == ("Failed", "DeadlineExceeded")
    failure = world.status["firstFailure"]
    assert (failure["reason"], failure["pod"]) == ("ImagePullBackOff", "train-worker-0-1-uid-1")


def test_the_schedulers_message_is_shown() -> None:
    world = SimulatedCluster(build_job(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile()
    world.change("train-worker-1-1-uid-1", scheduling_message="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    world.reconcile()
    assert world.find_condition("Scheduled")["reason"] == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in world.find_condition("Scheduled")["message"]
    assert world.status["phase"] == "Pending"
    world.wait(100)
    world.reconcile()
    assert world.status["firstFailure"]["reason"] == "Unschedulable"


def test_a_scheduling_gate_is_not_reported_as_a_lack_of_room() -> None:
    """A newer Kubernetes: a controller holds the pod back, and the scheduler has not processed it."""
    world = SimulatedCluster(build_job(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile()
    words = "Scheduling is blocked due to non-empty scheduling gates"
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": words}
    seen = Pod.from_object({"metadata": {"name": "gated"}, "status": {"conditions": [gated]}})
    world.change(WORKER, scheduling_message=seen.scheduling_message, scheduling_reason=seen.scheduling_reason)
    world.reconcile()
    assert world.find_condition("Scheduled")["reason"] == world.find_condition("Running")["reason"] == "SchedulingGated"
    assert words in world.find_condition("Scheduled")["message"]
    world.wait(100)
    world.reconcile()
    assert world.status["firstFailure"]["reason"] == "SchedulingGated"


def test_a_log_tail_is_kept_within_bounds() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0})
    world.logs["train-launcher-1-uid-1"] = "\n".join(f"{number} " + "ü" * 300 for number in range(50))
    world.end("train-launcher-1-uid-1", 9)
    world.reconcile()
    tail = world.status["firstFailure"]["logTail"]
    assert len(tail.encode()) <= 4096
    assert len(tail.splitlines()) <= 20
    assert tail.splitlines()[-1].startswith("49 ")
