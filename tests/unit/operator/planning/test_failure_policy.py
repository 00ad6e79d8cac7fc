"""`plan` follows spec.runPolicy.failurePolicy: rules, defaults, the limit of disruptions, and the pending timeout."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED

from topkube_operator.model.observed import Container

WORKER = "train-worker-1-1-uid-1"
Rule = dict[str, Any]


def _build_policy(*rules: Rule, **more: Any) -> dict[str, Any]:
    return {"failurePolicy": {"rules": list(rules), **more}}


def _build_rule(action: str, *reasons: str, **codes: Any) -> Rule:
    rule: Rule = {"action": action}
    return rule | ({"onReasons": list(reasons)} if reasons else {}) | ({"onExitCodes": codes} if codes else {})


RANK_ENDED = {**RANK_FAILED, "exitCode": 42}
KILLED_FOR_MEMORY = {**RANK_FAILED, "reason": "OOMKilled", "exitCode": 137}
DRAINED = {"pod": WORKER, "reason": "Terminated", "exitCode": 143, "message": "asked to end"}
SILENT = {"reason": "LaunchFailed", "exitCode": 7, "message": "no rank reports why"}
FAIL, RESTART, IGNORE = ("Failed", 0, 0), ("Restarting", 1, 0), ("Restarting", 0, 1)
"""The status after each action: (phase, restarts, disruptions)."""
CASES: dict[str, tuple[list[Rule], dict[str, Any], tuple[str, int, int]]] = {
    "no rule: a failure counts": ([], RANK_ENDED, RESTART),
    "no rule: a disruption does not": ([], DRAINED, IGNORE),
    "an exit code fails the job": ([_build_rule("Fail", values=[41, 42])], RANK_ENDED, FAIL),
    "another exit code does not": ([_build_rule("Fail", values=[41])], RANK_ENDED, RESTART),
    "NotIn": ([_build_rule("Fail", operator="NotIn", values=[41])], RANK_ENDED, FAIL),
    "an exit code is ignored": ([_build_rule("Ignore", values=[42])], RANK_ENDED, IGNORE),
    "the first rule that matches decides": (
        [_build_rule("Fail", values=[1]), _build_rule("Ignore", "Error"), _build_rule("Fail", values=[42])],
        RANK_ENDED,
        IGNORE,
    ),
    "ranks run in the worker's container": (
        [_build_rule("Fail", containerName="worker", values=[42])],
        RANK_ENDED,
        FAIL,
    ),
    "another container": ([_build_rule("Fail", containerName="launcher", values=[42])], RANK_ENDED, RESTART),
    "the launcher's container": ([_build_rule("Fail", containerName="launcher", values=[7])], SILENT, FAIL),
    "a reason fails the job": ([_build_rule("Fail", "OOMKilled")], KILLED_FOR_MEMORY, FAIL),
    "a reason and an exit code must both match": (
        [_build_rule("Fail", "OOMKilled", values=[1])],
        KILLED_FOR_MEMORY,
        RESTART,
    ),
    "a disruption can count": ([_build_rule("Restart", "Terminated")], DRAINED, RESTART),
    "a disruption can fail the job": ([_build_rule("Fail", "Terminated")], DRAINED, FAIL),
    "the exit code of a drained rank matches nothing": (
        [_build_rule("Fail", operator="NotIn", values=[1])],
        DRAINED,
        IGNORE,
    ),
}


@pytest.mark.parametrize(("rules", "failure", "expected"), CASES.values(), ids=CASES)
def test_the_first_matching_rule_decides(rules: list[Rule], failure: dict[str, Any], expected: Any) -> None:
    world = start_running_job(runPolicy=_build_policy(*rules))
    world.end_launcher(1, failure)
    world.reconcile()
    status = world.status
    assert (status["phase"], status["restarts"], status["disruptions"]) == expected
    assert status["firstFailure"]["reason"] == failure["reason"]
    if expected == FAIL:
        condition = world.find_condition("Failed")
        assert (condition["status"], condition["reason"]) == ("True", "FailurePolicy")
        assert "spec.runPolicy.failurePolicy.rules[" in condition["message"]
        assert world.events[-1] == "FailurePolicy"


def test_an_ignored_failure_does_not_use_up_restarts() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0, **_build_policy(_build_rule("Ignore", values=[42]))})
    for _ in range(4):
        world.end_launcher(1, {**RANK_ENDED, "pod": None})
        world.wait(400)
        world.start_ranks()
    assert (world.status["phase"], world.status["disruptions"]) == ("Running", 4)
    world.end_launcher(1, {**RANK_ENDED, "exitCode": 1})
    world.reconcile()
    assert world.find_condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_an_init_container_is_matched_by_its_name() -> None:
    rule = _build_rule("Fail", containerName="fetch", operator="NotIn", values=[0])
    world = SimulatedCluster(build_job(runPolicy=_build_policy(rule)))
    world.reconcile()
    world.schedule()
    ended = Container(started=world.now, exit_code=3, ended=world.now, ended_reason="Error")
    world.change(WORKER, phase="Failed", containers={"fetch": ended, "worker": Container()})
    world.wait(60)
    world.reconcile()
    assert (world.status["phase"], world.status["firstFailure"]["exitCode"]) == ("Failed", 3)


@pytest.mark.parametrize("reason", ["SyntaxError", "ImportError", "UsageError", "ScriptNotFound", "CommandNotFound"])
def test_a_mistake_in_the_script_is_not_tried_again(reason: str) -> None:
    failure = {**RANK_FAILED, "reason": reason}
    world = start_running_job()
    world.end_launcher(1, failure)
    world.reconcile()
    assert (world.status["phase"], world.status["attempt"]) == ("Failed", 1)
    assert "another attempt would end in the same way" in world.find_condition("Failed")["message"]
    world = start_running_job(runPolicy=_build_policy(_build_rule("Restart", reason)))
    world.end_launcher(1, failure)
    world.reconcile()
    assert (world.status["phase"], world.status["restarts"]) == ("Restarting", 1)


def test_after_the_first_step_the_same_error_is_tried_again() -> None:
    """The script worked once, so a folder or a node is the likely cause."""
    world = start_running_job()
    assert world.job is not None
    world.job["status"]["progress"] = {"step": 7}
    world.end_launcher(1, {**RANK_FAILED, "reason": "ImportError"})
    world.reconcile()
    assert (world.status["phase"], world.status["restarts"]) == ("Restarting", 1)


@pytest.mark.parametrize(("action", "expected"), [("Fail", FAIL), ("Restart", RESTART), ("Ignore", IGNORE)])
def test_an_image_that_cannot_be_pulled_follows_its_rule(action: str, expected: Any) -> None:
    world = SimulatedCluster(build_job(runPolicy=_build_policy(_build_rule(action, "ImagePullBackOff"))))
    world.reconcile()
    world.schedule()
    world.run()
    waiting = Container(waiting="ImagePullBackOff", waiting_message="Back-off", image="none:1")
    world.change(WORKER, phase="Pending", containers={"worker": waiting})
    world.reconcile()
    status = world.status
    assert (status["phase"], status["restarts"], status["disruptions"]) == expected
    failure = status["firstFailure"]
    assert (failure["reason"], failure["pod"]) == ("ImagePullBackOff", WORKER)
    assert failure["message"].count(WORKER) == 0, "failure.pod already names the pod"
    if expected != FAIL:
        assert world.pods[WORKER].deletion is not None
        assert "train-worker-1-2-uid-1" in world.pods
        assert "train-worker-0-2-uid-1" not in world.pods, "the worker that runs is kept"


def _disrupt(world: SimulatedCluster) -> None:
    world.end_launcher(1, {**DRAINED, "pod": None})
    world.reconcile()


def test_disruptions_are_limited_within_a_window() -> None:
    world = start_running_job(runPolicy=_build_policy(maxDisruptions=2, disruptionWindowSeconds=3600))
    for _ in range(2):
        _disrupt(world)
        world.wait(1000)
        world.start_ranks()
    assert len(world.status["recentDisruptions"]) == 2
    world.wait(2000)  # the first disruption is more than an hour ago
    world.start_ranks()
    _disrupt(world)
    world.wait(400)
    world.start_ranks()
    assert (world.status["phase"], world.status["disruptions"]) == ("Running", 3)
    _disrupt(world)
    condition = world.find_condition("Failed")
    assert (condition["status"], condition["reason"]) == ("True", "MaxDisruptionsExceeded")
    assert "3 disruptions in 3600 s are more than maxDisruptions (2)" in condition["message"]


def test_without_a_limit_the_times_of_disruptions_are_not_kept() -> None:
    world = start_running_job()
    _disrupt(world)
    assert "recentDisruptions" not in world.status
    world.edit_policy(failurePolicy={"maxDisruptions": 0})
    world.start_ranks()
    _disrupt(world)
    assert world.find_condition("Failed")["reason"] == "MaxDisruptionsExceeded", "a change takes effect at once"


# A partial gang.

TIMEOUT = 120
NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def _start_partial_gang(**policy: Any) -> SimulatedCluster:
    """Return a cluster in which worker 0 and the launcher run and worker 1 finds no node."""
    world = SimulatedCluster(build_job(runPolicy=_build_policy(pendingTimeoutSeconds=TIMEOUT, **policy)))
    world.reconcile()
    world.schedule()
    world.change(WORKER, node="", scheduled=None, scheduling_message=NO_ROOM)
    world.run()
    return world


def test_a_partial_gang_gives_its_nodes_back_and_tries_again_later() -> None:
    world = _start_partial_gang()
    assert world.reconcile().requeue == TIMEOUT
    world.wait(TIMEOUT - 1)
    assert world.reconcile().requeue == 1
    world.wait(1)
    assert world.reconcile().requeue == 60
    status = world.status
    assert (status["phase"], status["restarts"], status["disruptions"]) == ("Restarting", 0, 1)
    assert (status["firstFailure"]["reason"], status["firstFailure"]["pod"]) == ("PendingTimeout", WORKER)
    assert NO_ROOM in status["firstFailure"]["message"]
    assert all(pod.deletion is not None for pod in world.pods.values()), "every pod goes, also those that run"
    world.run()
    assert not world.pods
    world.wait(60)
    world.start_ranks()
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 2)
    assert sorted(world.pods) == ["train-launcher-2-uid-1", "train-worker-0-2-uid-1", "train-worker-1-2-uid-1"]


def test_a_new_operator_keeps_no_pod_of_a_gang_that_gave_its_nodes_back() -> None:
    """The operator was killed after it had written the status, before it deleted a pod."""
    world = _start_partial_gang()
    world.reconcile()
    world.wait(TIMEOUT)
    world.crash_after = 1
    world.reconcile()
    world.wait(60)
    world.run()
    world.start_ranks()
    assert world.status["attempt"] == 2
    assert sorted(name for name, pod in world.pods.items() if pod.deletion is None) == [
        "train-launcher-2-uid-1",
        "train-worker-0-2-uid-1",
        "train-worker-1-2-uid-1",
    ]


def test_the_pauses_of_a_gang_that_never_fits_grow() -> None:
    world, pauses = _start_partial_gang(), []
    for number in range(2, 7):
        world.reconcile()
        world.wait(TIMEOUT)
        pause = world.reconcile().requeue
        assert pause is not None
        pauses.append(pause)
        world.run()
        world.wait(pause)
        world.reconcile()
        world.schedule()
        world.change(f"train-worker-1-{number}-uid-1", node="", scheduled=None, scheduling_message=NO_ROOM)
        world.run()
    assert pauses == [60, 120, 240, 300, 300]


def test_pods_that_all_wait_occupy_nothing_and_continue_to_wait() -> None:
    world = SimulatedCluster(build_job(runPolicy=_build_policy(pendingTimeoutSeconds=TIMEOUT)))
    world.reconcile()
    for index in (0, 1):
        world.change(f"train-worker-{index}-1-uid-1", scheduling_message=NO_ROOM)
    world.wait(86400)
    world.reconcile()
    assert (world.status["attempt"], world.status["phase"]) == (1, "Pending")
    world.schedule()
    world.change(WORKER, node="", scheduled=None)
    assert world.reconcile().requeue == TIMEOUT, "the time begins when the first worker has a node"


def test_quota_that_admits_a_part_of_the_gang_counts_too() -> None:
    world = SimulatedCluster(build_job(runPolicy=_build_policy(pendingTimeoutSeconds=TIMEOUT)))
    world.foreign.add(("Pod", WORKER))  # stands for any pod that cannot be made
    world.reconcile()
    world.schedule()
    world.run()
    assert world.find_condition("Created")["status"] == "False"
    world.wait(TIMEOUT)
    world.reconcile()
    assert world.status["firstFailure"]["reason"] == "PendingTimeout"
    world.foreign.clear()
    world.run()
    world.wait(59)
    world.reconcile()
    assert not world.pods
    world.wait(1)
    world.start_ranks()
    assert world.status["phase"] == "Running"


def test_a_pending_timeout_can_fail_the_job() -> None:
    world = _start_partial_gang(rules=[_build_rule("Fail", "PendingTimeout")])
    world.wait(TIMEOUT)
    world.reconcile()
    assert (world.status["phase"], world.find_condition("Failed")["reason"]) == ("Failed", "FailurePolicy")


def test_a_resumed_job_has_its_whole_time() -> None:
    world = _start_partial_gang()
    world.reconcile()
    world.edit_policy(suspend=True)
    world.reconcile()
    world.run()
    world.wait(86400)
    world.edit_policy(suspend=False)
    world.reconcile()
    world.schedule()
    world.change("train-worker-1-2-uid-1", node="", scheduled=None, scheduling_message=NO_ROOM)
    world.run()
    assert world.reconcile().requeue == TIMEOUT
