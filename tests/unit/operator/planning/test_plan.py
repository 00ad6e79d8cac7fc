"""`plan` by example: the life of a job from its creation to its deletion."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta

import pytest
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import NODES, RANK_FAILED


def test_a_job_walks_through_its_phases() -> None:
    world = SimulatedCluster(build_job())
    world.reconcile()
    assert sorted(world.pods) == ["train-launcher-1-uid-1", "train-worker-0-1-uid-1", "train-worker-1-1-uid-1"]
    assert world.status["phase"] == "Pending"
    world.schedule()
    world.reconcile()
    assert world.find_condition("Scheduled")["status"] == "True"
    world.run()
    world.report_state("Waiting", missing=(1,))
    world.reconcile()
    assert (world.status["phase"], world.status["workersReady"]) == ("Starting", "1/2")
    assert "train-worker-1-1-uid-1" in world.find_condition("Running")["message"]
    world.report_state("Running")
    world.reconcile()
    assert (world.status["phase"], world.status["workersReady"]) == ("Running", "2/2")
    world.wait(60)
    world.end_launcher(0)
    world.reconcile()
    status = world.status
    assert (status["phase"], status["completionTime"]) == ("Succeeded", "2026-01-01T00:01:00Z")
    assert status["workersReady"] == "2/2", "a job that has succeeded does not look as if its workers were missing"
    assert status["replicaStatuses"]["launcher"]["succeeded"] == 1
    assert world.events == ["PodsCreated", "Running", "Succeeded"]


def test_no_phase_is_skipped_if_ranks_run_before_the_first_reconcile() -> None:
    world = SimulatedCluster(build_job())
    world.reconcile()
    world.schedule()
    world.run()
    world.report_state("Running")
    phases = [world.status["phase"]]
    while not (plan := world.plan()).is_empty:
        world.carry_out(plan)
        phases.append(world.status["phase"])
    assert list(dict.fromkeys(phases)) == ["Pending", "Starting", "Running"]


@pytest.mark.parametrize("state", ["Failed", "Starting"])
def test_a_job_whose_ranks_have_ended_does_not_seem_to_start_again(state: str) -> None:
    """The launcher may report the end of the ranks before the kubelet reports that of the pod."""
    world = start_running_job()
    world.report_state(state)
    world.reconcile()
    assert world.status["phase"] == "Running"
    world.end("train-worker-1-1-uid-1", 137)
    world.end_launcher(1)
    world.reconcile()
    assert (world.status["phase"], world.status["attempt"]) == ("Restarting", 2)


def test_the_attempt_is_in_the_status_before_anything_is_made() -> None:
    world = SimulatedCluster(build_job())
    plan = world.plan()
    assert plan.status["attempt"] == 1
    kinds = [[manifest["kind"] for manifest in stage] for stage in plan.apply]
    assert kinds == [["Secret", "Service", "NetworkPolicy", "NetworkPolicy"]]
    world.carry_out(plan)
    kinds = [[manifest["kind"] for manifest in stage] for stage in world.plan().apply]
    assert kinds == [["Pod", "Pod"], ["Pod"]]
    assert world.plan().apply[-1][0]["metadata"]["name"] == "train-launcher-1-uid-1"


def test_an_operator_that_is_killed_between_any_two_writes_continues() -> None:
    def run_life(crash: int | None) -> SimulatedCluster:
        world = SimulatedCluster(build_job())
        world.crash_after = crash
        world.start_ranks()
        world.end_launcher(1, RANK_FAILED)
        world.start_ranks()
        world.end_launcher(0)
        for _ in range(2):
            world.reconcile()
            world.wait(20)
            world.run()
        return world

    undisturbed = run_life(None)
    expected = undisturbed.status
    assert (expected["attempt"], expected["restarts"], expected["phase"]) == (2, 1, "Succeeded")
    for crash in range(40):
        world = run_life(crash)
        assert not world.violations
        for field in ("phase", "attempt", "restarts", "disruptions", "firstFailure"):
            assert world.status[field] == expected[field], (crash, field)
        assert sorted(world.pods) == sorted(undisturbed.pods), crash


def test_only_dead_pods_are_replaced() -> None:
    world = start_running_job(workers=3)
    before = {name: pod.uid for name, pod in world.pods.items()}
    world.end("train-worker-1-1-uid-1", 137, ended_reason="Error")
    world.end_launcher(1, {"pod": "train-worker-1-1-uid-1", "reason": "WorkerLost", "exitCode": 1, "message": "silent"})
    world.reconcile()
    world.run()
    names = ["train-launcher-2-uid-1", "train-worker-0-1-uid-1", "train-worker-1-2-uid-1", "train-worker-2-1-uid-1"]
    assert sorted(world.pods) == names
    for name in ("train-worker-0-1-uid-1", "train-worker-2-1-uid-1"):
        assert world.pods[name].uid == before[name]
    failure = world.status["firstFailure"]
    assert (failure["pod"], failure["reason"], failure["exitCode"]) == ("train-worker-1-1-uid-1", "Error", 137)
    assert world.status["restarts"] == 1


def test_the_service_leads_to_the_launcher_of_the_attempt_at_the_same_address() -> None:
    world = start_running_job()
    address = world.children["Service", "train"].content["clusterIP"]
    world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    service = world.children["Service", "train"].content
    assert service["clusterIP"] == address
    assert service["selector"]["topkube.dev/attempt"] == "2"
    del world.children["Service", "train"]
    world.reconcile()
    assert world.children["Service", "train"].content["clusterIP"] == address


def test_a_secret_that_was_deleted_comes_back_with_the_same_bytes() -> None:
    world = start_running_job()
    before = world.children["Secret", "train-credentials"].content
    del world.children["Secret", "train-credentials"]
    world.reconcile()
    assert world.children["Secret", "train-credentials"].content == before


def test_after_the_last_restart_a_failure_fails_the_job() -> None:
    world = SimulatedCluster(build_job(runPolicy={"backoffLimit": 2}))
    for attempt in (1, 2, 3):
        world.wait(600)
        world.start_ranks()
        assert world.status["attempt"] == attempt
        world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    status = world.status
    assert (status["phase"], status["restarts"], status["attempt"]) == ("Failed", 2, 3)
    failed = world.find_condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert "rank 3 failed" in failed["message"]
    assert status["firstFailure"]["rank"] == 3


def count_seconds_until_launcher(world: SimulatedCluster, attempt: int, pause: float | None = None) -> float:
    """Reconcile until the launcher of `attempt` has been made. Between two reconciles, wait for `pause`, by default the
    seconds that the plan asks for. Return the seconds."""
    began = world.now
    while f"train-launcher-{attempt}-uid-1" not in world.pods:
        plan = world.reconcile()
        if f"train-launcher-{attempt}-uid-1" not in world.pods:
            assert plan.requeue is not None
            world.wait(pause or plan.requeue)
    return (world.now - began).total_seconds()


@pytest.mark.parametrize("pause", [1, None])
def test_quick_restarts_wait_longer_each_time_however_often_the_operator_reconciles(pause: float | None) -> None:
    """`pause`: the seconds between two reconciles. If it is None, the operator reconciles when the plan asks for it."""
    world = SimulatedCluster(build_job(runPolicy={"backoffLimit": 9}))
    waits = []
    for number in range(2, 10):
        world.start_ranks()
        world.end_launcher(1, RANK_FAILED)
        waits.append(count_seconds_until_launcher(world, number, pause))
    assert waits == [0, 5, 10, 20, 40, 80, 160, 300]


def test_pods_that_kubelets_refuse_are_made_anew_after_the_same_pauses() -> None:
    """Such a pod never had a container, so its status has no time of the failure."""
    world = SimulatedCluster(build_job())
    waits = []
    for number in range(1, 4):
        world.reconcile()
        world.schedule()
        world.change(
            f"train-worker-0-{number}-uid-1", phase="Failed", reason="UnexpectedAdmissionError", message="no GPU"
        )
        waits.append(count_seconds_until_launcher(world, number + 1))
    assert waits == [0, 5, 10]
    assert world.status["disruptions"] == 3


@pytest.mark.parametrize(("policy", "remaining_pods"), [("Running", 3), ("All", 0), ("None", 4)])
def test_the_clean_pod_policy_decides_which_pods_stay(policy: str, remaining_pods: int) -> None:
    world = start_running_job(workers=3, runPolicy={"cleanPodPolicy": policy})
    world.end_launcher(0)
    world.end("train-worker-0-1-uid-1", 0)
    world.end("train-worker-1-1-uid-1", 0)
    world.reconcile()
    world.wait(10)  # worker 2 does not end by itself
    world.reconcile()
    world.run()
    world.reconcile()
    assert len(world.pods) == remaining_pods
    assert bool(world.children) == (policy == "None")
    counts = world.status["replicaStatuses"]
    assert (counts["launcher"]["succeeded"], counts["workers"]["succeeded"]) == (1, 2)


@pytest.mark.parametrize("colocate", [False, True])
def test_a_deadline_ends_the_run_even_if_pods_are_kept(colocate: bool) -> None:
    policy = {"cleanPodPolicy": "None", "activeDeadlineSeconds": 100}
    world = start_running_job(runPolicy=policy, launcher={"colocate": colocate})
    launcher = world.launcher
    assert launcher is not None
    world.wait(100)
    world.reconcile()
    assert world.status["phase"] == "Failed"
    world.run()
    world.reconcile()
    assert launcher.name not in world.pods, "otherwise it would continue to train"
    assert "train-worker-1-1-uid-1" in world.pods


def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    world = start_running_job(runPolicy={"ttlSecondsAfterFinished": 100})
    world.end_launcher(0)
    world.reconcile()
    world.wait(99)
    world.reconcile()
    assert world.job is not None
    world.wait(1)
    world.reconcile()
    assert world.job is None


@pytest.mark.parametrize("name", ["completionTime", "startTime"])
def test_a_forged_time_in_the_own_status_keeps_no_plan_from_being_made(name: str) -> None:
    world = start_running_job(runPolicy={"ttlSecondsAfterFinished": 100, "activeDeadlineSeconds": 100})
    if name == "completionTime":
        world.end_launcher(0)
        world.reconcile()
    world.status[name] = "9999-12-31T23:59:59Z"
    world.wait(1)
    world.reconcile()
    assert world.status["phase"] == ("Succeeded" if name == "completionTime" else "Running")


@pytest.mark.parametrize("skew", [-7200.0, 0.0, 7200.0])
def test_the_time_to_live_follows_the_operators_clock_and_not_a_nodes(skew: float) -> None:
    """The clock of the launcher's node is wrong by `skew` seconds."""
    world = start_running_job(runPolicy={"ttlSecondsAfterFinished": 100})
    world.wait(10)
    world.end_launcher(0)
    pod = world.launcher
    assert pod is not None
    ended = dataclasses.replace(pod.launcher_container, ended=world.now + timedelta(seconds=skew))
    world.change(pod.name, containers={**pod.containers, "launcher": ended})
    world.reconcile()
    assert world.status["completionTime"] == "2026-01-01T00:00:10Z"
    world.wait(99)
    world.reconcile()
    assert world.job is not None, "its status and logs are still wanted"
    world.wait(1)
    world.reconcile()
    assert world.job is None


def test_a_colocated_launcher_lives_in_worker_0() -> None:
    world = start_running_job(launcher={"colocate": True})
    assert sorted(world.pods) == ["train-worker-0-1-uid-1", "train-worker-1-1-uid-1"]
    selector = world.children["Service", "train"].content["selector"]
    assert selector["topkube.dev/worker-index"] == "0"
    world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    world.run()
    assert sorted(world.pods) == ["train-worker-0-2-uid-1", "train-worker-1-1-uid-1"]
    world.start_ranks()
    world.end_launcher(0)
    world.reconcile()
    assert world.status["phase"] == "Succeeded"


def test_times_of_conditions_move_only_when_they_change() -> None:
    world = start_running_job()
    before = world.find_condition("Running")
    world.wait(100)
    world.edit(runPolicy={"backoffLimit": 7})
    world.reconcile()
    after = world.find_condition("Running")
    assert after["lastTransitionTime"] == before["lastTransitionTime"]
    assert (before["observedGeneration"], after["observedGeneration"]) == (1, 2)
    assert world.status["observedGeneration"] == 2


def test_progress_is_not_urgent_and_transitions_are() -> None:
    world = start_running_job()
    world.report_state("Running")
    assert world.report is not None
    world.report = dataclasses.replace(world.report, progress={"step": 7, "totalSteps": 10})
    plan = world.plan()
    assert (dict(plan.status), plan.urgency) == ({"progress": {"step": 7, "totalSteps": 10}}, "progress")
    world.report = dataclasses.replace(world.report, progress=None, joined=1, missing=(0,))
    assert world.plan().urgency == "soon"
    world.end_launcher(0)
    assert world.plan().urgency == "now"


def test_plans_can_be_written_as_json() -> None:
    world = SimulatedCluster(build_job(workers=len(NODES)))
    while not (plan := world.plan()).is_empty:
        json.dumps([plan.status, plan.apply])
        world.carry_out(plan)


# The node cache.


def test_a_job_waits_with_a_reason_until_its_namespace_has_a_node_cache() -> None:
    dataset = {"uri": "s3://bucket/imagenet", "cache": {"medium": "Node"}}
    world = SimulatedCluster(build_job(dataset=dataset))
    world.reconcile()
    condition = world.find_condition("Created")
    assert (condition["status"], condition["reason"]) == ("False", "NodeCacheNotAllowed")
    assert "namespace team has no node cache" in condition["message"]
    assert "until then use Ephemeral or Memory" in condition["message"]
    assert world.status["phase"] == "Pending"
    assert world.pods == {}
    assert world.events.count("NodeCacheNotAllowed") == 1
    world.node_cache = True
    world.start_ranks()
    assert world.status["phase"] == "Running"


def test_a_checkpoint_that_cannot_be_written_is_a_condition_and_an_event_until_the_next_is_written() -> None:
    world = start_running_job()

    def report(**progress: int) -> dict[str, str]:
        assert world.report is not None
        world.report = dataclasses.replace(world.report, progress={"step": 9, **progress})
        world.reconcile()
        return {key: world.find_condition("CheckpointFailed").get(key, "") for key in ("status", "reason")}

    assert report(checkpointStep=4) == {"status": "", "reason": ""}, "a job without a failure has no such condition"
    failed = {"status": "True", "reason": "CheckpointFailed"}
    assert report(checkpointStep=4, failedCheckpoints=1) == failed
    message = "1 checkpoint of attempt 1 could not be written; the newest checkpoint is of step 4"
    assert world.find_condition("CheckpointFailed")["message"].startswith(message)
    assert report(checkpointStep=4, failedCheckpoints=1) == failed
    assert world.events.count("CheckpointFailed") == 1
    assert report(checkpointStep=8, failedCheckpoints=1) == {"status": "False", "reason": "CheckpointWritten"}
