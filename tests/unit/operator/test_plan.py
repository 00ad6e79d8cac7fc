"""`plan` by example: what a user or an admin sees in each situation."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from simulated import NODES, Simulated, job

from topkube_operator.observed import Container, Policy, Trouble

RANK_FAILED = {"pod": "train-worker-1-1", "rank": 3, "reason": "Error", "exitCode": 3, "message": "rank 3 failed"}


def running(**spec: Any) -> Simulated:
    world = Simulated(job(**spec))
    world.to_running()
    assert world.status()["phase"] == "Running", world.status()
    return world


def test_a_job_walks_through_its_phases() -> None:
    world = Simulated(job())
    world.reconcile()
    assert sorted(world.pods) == ["train-launcher-1", "train-worker-0-1", "train-worker-1-1"]
    assert world.status()["phase"] == "Pending"
    world.schedule()
    world.reconcile()
    assert world.condition("Scheduled")["status"] == "True"
    world.run()
    world.say("Waiting", missing=(1,))
    world.reconcile()
    assert (world.status()["phase"], world.status()["workersReady"]) == ("Starting", "1/2")
    assert "train-worker-1-1" in world.condition("Running")["message"]
    world.say("Running")
    world.reconcile()
    assert (world.status()["phase"], world.status()["workersReady"]) == ("Running", "2/2")
    world.wait(60)
    world.end_launcher(0)
    world.reconcile()
    status = world.status()
    assert (status["phase"], status["completionTime"]) == ("Succeeded", "2026-01-01T00:01:00Z")
    assert status["replicaStatuses"]["launcher"]["succeeded"] == 1
    assert world.events == ["PodsCreated", "Running", "Succeeded"]


def test_no_phase_is_skipped_where_ranks_run_before_anybody_looks() -> None:
    world = Simulated(job())
    world.reconcile()
    world.schedule()
    world.run()
    world.say("Running")
    phases = [world.status()["phase"]]
    while not (plan := world.plan()).idle:
        world.carry_out(plan)
        phases.append(world.status()["phase"])
    assert list(dict.fromkeys(phases)) == ["Pending", "Starting", "Running"]


def test_the_attempt_is_in_the_status_before_anything_is_made() -> None:
    world = Simulated(job())
    plan = world.plan()
    assert plan.status["attempt"] == 1
    kinds = [[one["kind"] for one in stage] for stage in plan.apply]
    assert kinds == [["Secret", "Service", "NetworkPolicy", "NetworkPolicy"]]
    world.carry_out(plan)
    kinds = [[one["kind"] for one in stage] for stage in world.plan().apply]
    assert kinds == [["Pod", "Pod"], ["Pod"]]
    assert world.plan().apply[-1][0]["metadata"]["name"] == "train-launcher-1"


def test_killed_between_any_two_writes_the_operator_goes_on() -> None:
    def life(crash: int | None) -> Simulated:
        world = Simulated(job())
        world.crash_after = crash
        world.to_running()
        world.end_launcher(1, RANK_FAILED)
        world.to_running()
        world.end_launcher(0)
        for _ in range(2):
            world.reconcile()
            world.wait(20)
            world.run()
        return world

    whole = life(None)
    assert (whole.status()["attempt"], whole.status()["restarts"], whole.status()["phase"]) == (2, 1, "Succeeded")
    for crash in range(40):
        world = life(crash)
        assert not world.violations
        for field in ("phase", "attempt", "restarts", "disruptions", "firstFailure"):
            assert world.status()[field] == whole.status()[field], (crash, field)
        assert sorted(world.pods) == sorted(whole.pods), crash


def test_only_dead_pods_are_replaced() -> None:
    world = running(workers=3)
    before = {name: pod.uid for name, pod in world.pods.items()}
    world.end("train-worker-1-1", 137, ended_reason="Error")
    world.end_launcher(1, {"pod": "train-worker-1-1", "reason": "WorkerLost", "exitCode": 1, "message": "silent"})
    world.reconcile()
    world.run()
    names = ["train-launcher-2", "train-worker-0-1", "train-worker-1-2", "train-worker-2-1"]
    assert sorted(world.pods) == names
    assert {world.pods[name].uid for name in names[1::2]} == {before[name] for name in names[1::2]}
    failure = world.status()["firstFailure"]
    assert (failure["pod"], failure["reason"], failure["exitCode"]) == ("train-worker-1-1", "Error", 137)
    assert world.status()["restarts"] == 1


def test_the_service_leads_to_the_launcher_of_the_attempt_at_the_same_address() -> None:
    world = running()
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
    world = running()
    before = world.children["Secret", "train-credentials"].content
    del world.children["Secret", "train-credentials"]
    world.reconcile()
    assert world.children["Secret", "train-credentials"].content == before


def test_restarts_are_used_up() -> None:
    world = Simulated(job(runPolicy={"backoffLimit": 2}))
    for attempt in (1, 2, 3):
        world.wait(600)
        world.to_running()
        assert world.status()["attempt"] == attempt
        world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    status = world.status()
    assert (status["phase"], status["restarts"], status["attempt"]) == ("Failed", 2, 3)
    failed = world.condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert "rank 3 failed" in failed["message"]
    assert status["firstFailure"]["rank"] == 3


def test_quick_restarts_wait_longer_and_longer() -> None:
    world = Simulated(job(runPolicy={"backoffLimit": 5}))
    waits = []
    for _ in range(4):
        world.to_running()
        world.end_launcher(1, RANK_FAILED)
        began, attempt = world.now, world.status()["attempt"]
        while world.reconcile().requeue is not None and world.status()["attempt"] == attempt:
            world.wait(1)
        waits.append((world.now - began).total_seconds())
    assert waits == [0, 5, 10, 20]


VICTIM = "train-worker-1-1"
DISRUPTIONS = {
    "deleted": (lambda world: world.delete("Pod", VICTIM, world.pods[VICTIM].uid), "Deleted"),
    "preempted": (
        lambda world: world.change(VICTIM, disruption="PreemptionByScheduler", deletion=world.now),
        "Preempted",
    ),
    "evicted": (lambda world: world.change(VICTIM, phase="Failed", reason="Evicted", message="low on disk"), "Evicted"),
    "lost": (lambda world: world.lost.add(world.pods[VICTIM].node), "NodeLost"),
    "gone": (lambda world: world.remove(VICTIM), "Deleted"),
}


@pytest.mark.parametrize(("trouble", "reason"), DISRUPTIONS.values(), ids=DISRUPTIONS)
def test_disruptions_do_not_use_up_restarts(trouble: Any, reason: str) -> None:
    world = running(runPolicy={"backoffLimit": 0})
    world.change("train-worker-1-1", node="node-x")
    trouble(world)
    world.end_launcher(1, {"pod": "train-worker-1-1", "reason": "WorkerLost", "exitCode": 1, "message": "silent"})
    world.reconcile()
    status = world.status()
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (2, 0, 1), status
    assert status["firstFailure"]["reason"] == reason
    assert "train-worker-1-2" in world.pods


def test_an_eviction_for_what_the_pod_itself_used_is_a_failure() -> None:
    world = running()
    words = "Usage of EmptyDir volume exceeds the limit 1Gi"
    world.change("train-worker-0-1", phase="Failed", reason="Evicted", message=words)
    world.end_launcher(1, {"pod": "train-worker-0-1", "reason": "WorkerLost", "exitCode": 1})
    world.reconcile()
    assert (world.status()["restarts"], world.status()["disruptions"]) == (1, 0)


def test_a_worker_killed_for_memory_is_said_to_be() -> None:
    world = running()
    world.end("train-worker-0-1", 137, ended_reason="OOMKilled")
    world.end_launcher(1, {"pod": "train-worker-0-1", "reason": "WorkerLost", "exitCode": 1})
    world.reconcile()
    failure = world.status()["firstFailure"]
    assert (failure["reason"], failure["exitCode"]) == ("OOMKilled", 137)
    assert failure["logTail"] == "the log of train-worker-0-1"


def test_a_rank_killed_for_memory_in_a_living_pod_is_said_to_be_and_the_pod_stays() -> None:
    world = running()
    failure = {"pod": "train-worker-1-1", "rank": 2, "reason": "OOMKilled", "exitCode": 137, "logTail": "last words"}
    world.end_launcher(1, failure)
    world.reconcile()
    assert world.status()["firstFailure"] == {**failure, "message": "ended by signal 9 (exit code 137)"}
    assert "train-worker-1-1" in world.pods


def test_a_lost_worker_is_replaced_though_its_pod_looks_alive() -> None:
    world = running()
    world.end_launcher(1, {"pod": "train-worker-1-1", "reason": "WorkerLost", "exitCode": 1, "message": "silent"})
    assert world.reconcile().requeue == 5.0  # its kubelet may still say what happened
    world.wait(5)
    world.reconcile()
    assert (world.status()["disruptions"], world.status()["restarts"]) == (1, 0)
    assert world.pods["train-worker-1-1"].deletion is not None
    assert "train-worker-1-2" in world.pods
    world.lost.add(world.pods["train-worker-1-1"].node)  # it never goes, and is in nobody's way
    world.to_running()
    assert world.status()["phase"] == "Running"


def test_the_launcher_may_die_without_a_word() -> None:
    world = running()
    world.end("train-launcher-1", 137)
    world.reconcile()
    failure = world.status()["firstFailure"]
    assert (failure["pod"], failure["exitCode"], world.status()["attempt"]) == ("train-launcher-1", 137, 2)
    world.to_running()
    world.remove("train-launcher-2")
    world.reconcile()
    assert world.status()["disruptions"] == 1
    assert "train-launcher-3" in world.pods or world.condition("Restarting")["status"] == "True"


def test_a_launcher_has_a_while_to_notice_that_a_worker_died() -> None:
    world = running()
    world.end("train-worker-0-1", 1)
    plan = world.reconcile()
    assert world.status()["attempt"] == 1
    assert plan.requeue == 10.0
    world.wait(10)
    world.say("Running")
    world.reconcile()
    assert world.status()["attempt"] == 2
    assert world.status()["firstFailure"]["pod"] == "train-worker-0-1"


def test_a_worker_whose_node_is_said_to_be_lost_may_well_be_training() -> None:
    world = running()
    world.change("train-worker-0-1", node="node-x")
    world.lost.add("node-x")
    world.say("Running")
    world.reconcile()
    assert world.status()["attempt"] == 1
    world.wait(60)  # and now the launcher has not answered either
    world.reconcile()
    assert world.status()["attempt"] == 2


def test_workers_that_do_not_call_are_named() -> None:
    world = Simulated(job(), Policy(seed=b"s" * 32, rendezvous_seconds=60))
    world.reconcile()
    world.schedule()
    world.wait(86400)  # waiting in a queue is not waiting for a call
    world.run()
    world.say("Waiting", missing=(1,))
    assert world.reconcile().requeue == 60.0
    world.wait(60)
    world.say("Waiting", missing=(1,))
    world.reconcile()
    failure = world.status()["firstFailure"]
    assert (failure["reason"], failure["pod"]) == ("RendezvousTimeout", "train-worker-1-1")
    assert world.status()["attempt"] == 2
    assert "train-worker-1-2" in world.pods


def test_an_image_that_cannot_be_pulled_is_pending_with_the_reason_and_fails_at_the_deadline() -> None:
    world = Simulated(job(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile()
    world.schedule()
    for waiting, message in [("ErrImagePull", "no such host"), ("ImagePullBackOff", "Back-off"), ("ErrImagePull", "x")]:
        world.change("train-worker-0-1", containers={"worker": Container(waiting=waiting, waiting_message=message)})
        world.reconcile()
        assert world.status()["phase"] == "Pending"
        assert world.condition("Running")["reason"] == "ImagePullBackOff"
    assert world.events.count("ImagePullBackOff") == 1
    world.wait(100)
    world.reconcile()
    assert (world.status()["phase"], world.condition("Failed")["reason"]) == ("Failed", "DeadlineExceeded")
    failure = world.status()["firstFailure"]
    assert (failure["reason"], failure["pod"]) == ("ImagePullBackOff", "train-worker-0-1")


def test_the_schedulers_words_are_shown() -> None:
    world = Simulated(job(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile()
    world.change("train-worker-1-1", unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    world.reconcile()
    assert world.condition("Scheduled")["reason"] == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in world.condition("Scheduled")["message"]
    assert world.status()["phase"] == "Pending"
    world.wait(100)
    world.reconcile()
    assert world.status()["firstFailure"]["reason"] == "Unschedulable"


def test_suspended_at_creation_then_resumed_then_suspended_again() -> None:
    world = Simulated(job(runPolicy={"suspend": True, "activeDeadlineSeconds": 100}))
    world.reconcile()
    assert (world.status()["phase"], world.pods, world.children) == ("Suspended", {}, {})
    assert "startTime" not in world.status()
    world.wait(1000)
    world.policy_edit(suspend=False)
    world.edit(template={"spec": {**job()["spec"]["template"]["spec"], "nodeSelector": {"pool": "spot"}}})
    world.to_running()
    assert (world.status()["phase"], world.status()["attempt"]) == ("Running", 1)
    assert world.condition("Suspended")["status"] == "False"
    world.wait(90)
    world.policy_edit(suspend=True)
    world.reconcile()
    world.run()
    world.reconcile()
    assert (world.status()["phase"], world.pods, world.children) == ("Suspended", {}, {})
    world.policy_edit(suspend=False)
    world.to_running()
    world.wait(90)  # the deadline counts from the resumption
    world.reconcile()
    status = world.status()
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 2, 0)
    world.wait(10)
    world.reconcile()
    assert world.status()["phase"] == "Failed"
    assert world.events.count("Resumed") == 2


@pytest.mark.parametrize(("policy", "left"), [("Running", 3), ("All", 0), ("None", 4)])
def test_pods_after_the_end(policy: str, left: int) -> None:
    world = running(workers=3, runPolicy={"cleanPodPolicy": policy})
    world.end_launcher(0)
    world.end("train-worker-0-1", 0)
    world.end("train-worker-1-1", 0)
    world.reconcile()
    world.wait(10)  # worker 2 does not end by itself
    world.reconcile()
    world.run()
    world.reconcile()
    assert len(world.pods) == left
    assert bool(world.children) == (policy == "None")
    counts = world.status()["replicaStatuses"]
    assert (counts["launcher"]["succeeded"], counts["workers"]["succeeded"]) == (1, 2)


def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    world = running(runPolicy={"ttlSecondsAfterFinished": 100})
    world.end_launcher(0)
    world.reconcile()
    world.wait(99)
    world.reconcile()
    assert world.job is not None
    world.wait(1)
    world.reconcile()
    assert world.job is None


def test_somebody_elses_job_is_left_alone() -> None:
    world = Simulated(job(runPolicy={"managedBy": "kueue.x-k8s.io/multikueue"}))
    assert world.reconcile().idle
    assert (world.status(), world.pods) == ({}, {})


def test_a_foreign_object_with_our_name_is_reported_and_not_touched() -> None:
    world = Simulated(job())
    world.foreign.add(("Service", "train"))
    world.reconcile()
    world.reconcile()
    created = world.condition("Created")
    assert (created["status"], created["reason"]) == ("False", "ForeignObject")
    assert "Service train" in created["message"]
    assert not world.pods
    world.foreign.clear()
    world.to_running()
    assert world.status()["phase"] == "Running"
    assert world.events.count("ForeignObject") == 1


def test_what_the_api_server_refuses_is_shown() -> None:
    world = Simulated(job())
    world.reconcile()
    world.remove("train-launcher-1")
    assert world.job is not None
    world.job["status"]["conditions"] = []
    world.troubles = {("Pod", "train-launcher-1"): Trouble("Refused", "exceeded quota: gpus")}
    plan = world.plan()
    created = next(one for one in plan.status["conditions"] if one["type"] == "Created")
    assert (created["reason"], created["message"]) == ("Refused", "Pod train-launcher-1: exceeded quota: gpus")


@pytest.mark.parametrize(
    "nonsense",
    [{"workers": 0}, {"workers": "two"}, {"template": {}}, {"template": "x"}, {"aggregation": {"density": 2}}],
)
def test_an_invalid_spec_is_said_and_nothing_is_made_until_it_is_corrected(nonsense: dict[str, Any]) -> None:
    world = Simulated(job())
    good = dict(world.job["spec"]) if world.job else {}
    world.edit(**nonsense)
    assert world.reconcile().idle
    failed = world.condition("Failed")
    assert (world.status()["phase"], failed["reason"], world.pods) == ("Failed", "InvalidSpec", {})
    assert f"spec.{next(iter(nonsense))}" in failed["message"]
    assert world.events == ["InvalidSpec"]
    world.edit(**{name: good.get(name, {}) for name in nonsense})
    world.to_running()
    assert world.status()["phase"] == "Running"
    assert world.condition("Failed")["status"] == "False"


def test_a_running_job_edited_to_nonsense_keeps_its_pods_and_goes_on_when_corrected() -> None:
    world = running()
    pods = dict(world.pods)
    world.edit(workers=0)
    world.reconcile()
    assert (world.status()["phase"], world.pods) == ("Failed", pods)
    world.edit(workers=2)
    world.reconcile()
    assert (world.status()["phase"], world.status()["attempt"], world.pods) == ("Running", 1, pods)


@pytest.mark.parametrize("nonsense", [None, "x", [], {"attempt": "many", "conditions": "x", "phase": 3}])
def test_a_stored_status_of_nonsense_is_written_anew(nonsense: Any) -> None:
    world = running()
    assert world.job is not None
    world.job["status"] = nonsense
    plan = world.plan()
    assert plan.status["attempt"] == 1
    assert not [one for stage in plan.apply for one in stage if one["kind"] == "Pod"]


def test_a_changed_spec_takes_effect_with_the_next_attempt() -> None:
    world = running()
    template = {"spec": {"containers": [{"name": "worker", "image": "image:2", "command": ["python"]}]}}
    world.edit(template=template, workers=3)
    world.reconcile()
    assert sorted(world.pods) == ["train-launcher-1", "train-worker-0-1", "train-worker-1-1"]
    assert world.events[-1] == "SpecChanged"
    assert world.status()["workersReady"] == "2/2"
    world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    world.run()
    names = ["train-launcher-2", "train-worker-0-2", "train-worker-1-2", "train-worker-2-2"]
    assert sorted(world.pods) == names


def test_a_colocated_launcher_lives_in_worker_0() -> None:
    world = running(launcher={"colocate": True})
    assert sorted(world.pods) == ["train-worker-0-1", "train-worker-1-1"]
    selector = world.children["Service", "train"].content["selector"]
    assert selector["topkube.dev/worker-index"] == "0"
    world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    world.run()
    assert sorted(world.pods) == ["train-worker-0-2", "train-worker-1-1"]
    world.to_running()
    world.end_launcher(0)
    world.reconcile()
    assert world.status()["phase"] == "Succeeded"


def test_times_of_conditions_move_only_when_they_change() -> None:
    world = running()
    before = world.condition("Running")
    world.wait(100)
    world.edit(runPolicy={"backoffLimit": 7})
    world.reconcile()
    after = world.condition("Running")
    assert after["lastTransitionTime"] == before["lastTransitionTime"]
    assert (before["observedGeneration"], after["observedGeneration"]) == (1, 2)
    assert world.status()["observedGeneration"] == 2


def test_progress_is_not_urgent_and_transitions_are() -> None:
    world = running()
    world.say("Running")
    assert world.report is not None
    world.report = dataclasses.replace(world.report, progress={"step": 7, "totalSteps": 10})
    plan = world.plan()
    assert (dict(plan.status), plan.urgency) == ({"progress": {"step": 7, "totalSteps": 10}}, "progress")
    world.report = dataclasses.replace(world.report, progress=None, joined=1, missing=(0,))
    assert world.plan().urgency == "soon"
    world.end_launcher(0)
    assert world.plan().urgency == "now"


def test_a_log_tail_is_kept_within_bounds() -> None:
    world = running(runPolicy={"backoffLimit": 0})
    world.logs["train-launcher-1"] = "\n".join(f"{number} " + "ü" * 300 for number in range(50))
    world.end("train-launcher-1", 9)
    world.reconcile()
    tail = world.status()["firstFailure"]["logTail"]
    assert len(tail.encode()) <= 4096
    assert len(tail.splitlines()) <= 20
    assert tail.splitlines()[-1].startswith("49 ")


def test_everything_can_be_written_as_json() -> None:
    world = Simulated(job(workers=len(NODES)))
    while not (plan := world.plan()).idle:
        json.dumps([plan.status, plan.apply])
        world.carry_out(plan)
