"""`plan` by example: invalid, changed, suspended and unmanaged specs, and names that are in use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED

from topkube_operator.model.observed import Trouble
from topkube_operator.planning import admission


def test_a_job_can_be_suspended_at_creation_resumed_and_suspended_again() -> None:
    world = SimulatedCluster(build_job(runPolicy={"suspend": True, "activeDeadlineSeconds": 100}))
    world.reconcile()
    assert (world.status["phase"], world.pods, world.children) == ("Suspended", {}, {})
    assert "startTime" not in world.status
    world.wait(1000)
    world.edit_policy(suspend=False)
    world.edit(template={"spec": {**build_job()["spec"]["template"]["spec"], "nodeSelector": {"pool": "spot"}}})
    world.start_ranks()
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 1)
    assert world.find_condition("Suspended")["status"] == "False"
    world.wait(90)
    world.edit_policy(suspend=True)
    world.reconcile()
    world.run()
    world.reconcile()
    assert (world.status["phase"], world.pods, world.children) == ("Suspended", {}, {})
    world.edit_policy(suspend=False)
    world.start_ranks()
    world.wait(90)  # the deadline counts from the resumption
    world.reconcile()
    status = world.status
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 2, 0)
    world.wait(10)
    world.reconcile()
    assert world.status["phase"] == "Failed"
    assert world.events.count("Resumed") == 2


def test_network_policies_stay_until_the_pods_of_a_suspended_job_have_ended() -> None:
    world = start_running_job()
    children_before = set(world.children)
    world.edit_policy(suspend=True)
    world.reconcile()
    assert all(pod.deletion is not None for pod in world.pods.values())
    assert set(world.children) == children_before, "the policies protect pods that still run"
    world.run()
    world.reconcile()
    assert (world.pods, world.children) == ({}, {})


def test_a_suspended_job_frees_everything_but_its_pod_on_a_lost_node() -> None:
    world = start_running_job()
    world.change("train-worker-1-1-uid-1", node="node-x")
    world.lost.add("node-x")
    world.edit_policy(suspend=True)
    world.reconcile()
    world.run()
    world.reconcile()
    assert (list(world.pods), world.children) == (["train-worker-1-1-uid-1"], {})


def test_a_job_that_another_controller_manages_is_left_alone() -> None:
    world = SimulatedCluster(build_job(runPolicy={"managedBy": "kueue.x-k8s.io/multikueue"}))
    assert world.reconcile().is_empty
    assert (world.status, world.pods) == ({}, {})


def test_a_foreign_object_with_our_name_is_reported_and_not_touched() -> None:
    world = SimulatedCluster(build_job())
    world.foreign.add(("Service", "train"))
    world.reconcile()
    world.reconcile()
    created = world.find_condition("Created")
    assert (created["status"], created["reason"]) == ("False", "ForeignObject")
    assert "Service train" in created["message"]
    assert not world.pods
    world.foreign.clear()
    world.start_ranks()
    assert world.status["phase"] == "Running"
    assert world.events.count("ForeignObject") == 1


def test_a_refusal_of_the_api_server_is_in_the_status() -> None:
    world = SimulatedCluster(build_job())
    world.reconcile()
    world.remove("train-launcher-1-uid-1")
    assert world.job is not None
    world.job["status"]["conditions"] = []
    world.troubles = {("Pod", "train-launcher-1-uid-1"): Trouble("Refused", "exceeded quota: gpus")}
    plan = world.plan()
    created = next(condition for condition in plan.status["conditions"] if condition["type"] == "Created")
    assert (created["reason"], created["message"]) == ("Refused", "Pod train-launcher-1-uid-1: exceeded quota: gpus")


@pytest.mark.parametrize(
    "invalid",
    [{"workers": 0}, {"workers": "two"}, {"template": {}}, {"template": "x"}, {"aggregation": {"density": 2}}],
)
def test_an_invalid_spec_is_reported_and_nothing_is_made_until_it_is_corrected(invalid: dict[str, Any]) -> None:
    world = SimulatedCluster(build_job())
    valid_spec = dict(world.job["spec"]) if world.job else {}
    world.edit(**invalid)
    assert world.reconcile().is_empty
    failed = world.find_condition("Failed")
    assert (world.status["phase"], failed["reason"], world.pods) == ("Failed", "InvalidSpec", {})
    assert f"spec.{next(iter(invalid))}" in failed["message"]
    assert world.events == ["InvalidSpec"]
    world.edit(**{name: valid_spec.get(name, {}) for name in invalid})
    world.start_ranks()
    assert world.status["phase"] == "Running"
    assert world.find_condition("Failed")["status"] == "False"


def test_a_running_job_with_an_invalid_edit_keeps_its_pods_and_continues_when_corrected() -> None:
    world = start_running_job()
    pods = dict(world.pods)
    world.edit(workers=0)
    world.reconcile()
    assert (world.status["phase"], world.pods) == ("Failed", pods)
    world.edit(workers=2)
    world.reconcile()
    assert (world.status["phase"], world.status["attempt"], world.pods) == ("Running", 1, pods)


@pytest.mark.parametrize("invalid", [None, "x", [], {"attempt": "many", "conditions": "x", "phase": 3}])
def test_an_invalid_stored_status_is_replaced(invalid: Any) -> None:
    world = start_running_job()
    assert world.job is not None
    world.job["status"] = invalid
    plan = world.plan()
    assert plan.status["attempt"] == 1
    assert not [manifest for stage in plan.apply for manifest in stage if manifest["kind"] == "Pod"]


def test_an_invalid_job_is_deleted_after_its_time_to_live() -> None:
    world = SimulatedCluster(build_job(workers=0, runPolicy={"ttlSecondsAfterFinished": 100}))
    assert world.reconcile().requeue == 100.0
    assert world.status["completionTime"] == "2026-01-01T00:00:00Z"
    world.wait(99)
    world.reconcile()
    assert world.job is not None
    world.wait(1)
    world.reconcile()
    assert world.job is None


@pytest.mark.parametrize("ttl", ["soon", -1, True, None, 2.5])
def test_an_invalid_time_to_live_deletes_nothing(ttl: Any) -> None:
    world = SimulatedCluster(build_job(workers=0, runPolicy={"ttlSecondsAfterFinished": ttl}))
    world.wait(10**6)
    assert world.reconcile().is_empty


def test_a_corrected_job_has_not_ended() -> None:
    world = SimulatedCluster(build_job(workers=0, runPolicy={"ttlSecondsAfterFinished": 100}))
    world.reconcile()
    world.wait(50)
    world.edit(workers=2)
    world.start_ranks()
    assert world.status["phase"] == "Running"
    assert "completionTime" not in world.status
    world.wait(1000)
    world.reconcile()
    assert world.job is not None


def test_a_job_whose_edited_spec_is_invalid_is_not_deleted_while_its_pods_run() -> None:
    world = start_running_job(runPolicy={"ttlSecondsAfterFinished": 10})
    world.edit(workers=0)
    world.wait(1000)
    world.reconcile()
    assert (world.status["phase"], len(world.pods)) == ("Failed", 3)
    for name in list(world.pods):
        world.end(name, 0)
    world.reconcile()
    world.wait(10)
    world.reconcile()
    assert world.job is None


def test_a_finished_job_with_an_invalid_edit_is_still_cleaned_up_and_deleted() -> None:
    world = start_running_job(runPolicy={"cleanPodPolicy": "All", "ttlSecondsAfterFinished": 100})
    world.end_launcher(0)
    world.reconcile(rounds=1)
    world.edit(workers=0)
    world.reconcile()
    world.run()
    world.reconcile()
    assert (world.status["phase"], world.pods, world.children) == ("Succeeded", {}, {})
    world.wait(100)
    world.reconcile()
    assert world.job is None


def test_a_change_that_admission_would_refuse_is_refused_with_the_same_message() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 5})
    assert world.job is not None
    before = dict(world.job)
    template = {"spec": {"containers": [{"name": "worker", "image": "image:2", "command": ["python"]}]}}
    world.edit(template=template, workers=3)
    words = admission.explain_refusal(world.job, before)
    assert "spec.workers: cannot be changed from 2 to 3" in words
    world.reconcile()
    failed = world.find_condition("Failed")
    assert (failed["status"], failed["reason"], failed["message"]) == ("False", "ChangeRefused", words)
    assert world.events.count("ChangeRefused") == 1
    assert (world.status["phase"], world.status["workersReady"]) == ("Running", "2/2")
    world.end_launcher(1, RANK_FAILED)
    world.start_ranks()
    assert sorted(world.pods) == ["train-launcher-2-uid-1", "train-worker-0-1-uid-1", "train-worker-1-1-uid-1"]
    assert world.status["acceptedSpec"]["workers"] == 2
    assert world.events.count("ChangeRefused") == 1
    world.edit(template=build_job()["spec"]["template"], workers=2)
    world.reconcile()
    assert world.find_condition("Failed")["reason"] == "Corrected"


def test_changes_of_policies_take_effect_although_another_change_is_refused() -> None:
    world = start_running_job()
    world.edit(workers=3)
    world.edit_policy(suspend=True, backoffLimit=0)
    world.reconcile()
    world.run()
    world.reconcile()
    assert (world.status["phase"], world.pods) == ("Suspended", {})
    world.edit_policy(suspend=False)
    world.start_ranks()
    assert (world.status["phase"], world.status["workersReady"]) == ("Running", "2/2")
    world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    assert world.status["phase"] == "Failed"
    assert world.find_condition("Failed")["reason"] == "BackoffLimitExceeded"
    world.edit(slotsPerWorker=9)
    world.reconcile()
    assert world.find_condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_placement_may_change_only_while_the_job_is_suspended() -> None:
    new_template = {"spec": {**build_job()["spec"]["template"]["spec"], "nodeSelector": {"pool": "spot"}}}
    world = start_running_job()
    world.edit(template=new_template)
    world.reconcile()
    assert "only while the job is suspended" in world.find_condition("Failed")["message"]
    world.edit_policy(suspend=True)
    world.reconcile()
    assert world.find_condition("Failed")["reason"] == "Corrected"
    world.edit_policy(suspend=False)
    world.run()
    world.start_ranks()
    assert world.status["acceptedSpec"]["template"] == new_template
    world.edit(template=build_job()["spec"]["template"])  # a removed field is removed from the stored copy too
    world.edit_policy(suspend=True)
    world.reconcile()
    assert "nodeSelector" not in world.status["acceptedSpec"]["template"]["spec"]


def test_null_and_absent_are_the_same_and_no_change() -> None:
    world = start_running_job()
    template = {"spec": {**build_job()["spec"]["template"]["spec"], "nodeSelector": None}, "metadata": None}
    world.edit(template=template, dataset=None)
    world.reconcile()
    assert world.find_condition("Failed") == {}


def test_a_new_first_failure_has_no_field_of_an_earlier_one() -> None:
    """The status is written as a merge patch, in which a field that is left out stays."""
    world = start_running_job()
    world.end_launcher(1, {**RANK_FAILED, "logTail": "old words"})
    world.start_ranks()
    assert world.status["firstFailure"]["rank"] == 3
    world.remove("train-worker-0-1-uid-1")
    world.wait(100)
    world.end_launcher(1, {"pod": "train-worker-0-1-uid-1", "reason": "WorkerLost", "message": "silent"})
    world.reconcile()
    failure = world.status["firstFailure"]
    assert failure["reason"] == "Deleted"
    assert not {"rank", "exitCode", "logTail"} & set(failure), failure


# Specs too large to be kept twice.

LARGEST_OBJECT = 3 << 19
"""The size of the largest object that etcd stores, in bytes: 1.5 MiB."""


def build_large_template(image: str = "image:1", **spec: Any) -> dict[str, Any]:
    container = {"name": "worker", "image": image, "command": ["python", "-c", "x" * 900_000]}
    return {"spec": {"containers": [container], **spec}}


def test_a_large_spec_does_not_block_its_first_status() -> None:
    world = start_running_job(template=build_large_template())
    assert len(json.dumps(world.job)) < LARGEST_OBJECT
    assert world.status["acceptedSpec"]["workers"] == 2
    assert len(json.dumps(world.status)) < 16 << 10


def test_mutable_fields_of_a_large_spec_may_change() -> None:
    world = start_running_job(template=build_large_template())
    world.edit_policy(backoffLimit=7)
    world.reconcile()
    assert world.find_condition("Failed") == {}
    world.edit_policy(suspend=True)
    world.reconcile()
    world.edit(template=build_large_template(nodeSelector={"pool": "spot"}))
    world.reconcile()
    assert world.find_condition("Failed") == {}
    world.edit_policy(suspend=False)
    world.run()
    world.start_ranks()
    assert (world.status["phase"], world.find_condition("Failed")) == ("Running", {})
    world.edit(workers=3)  # all fields except templates are stored, so a change of them is found
    world.reconcile()
    assert "spec.workers: cannot be changed from 2 to 3" in world.find_condition("Failed")["message"]
    assert (world.status["phase"], world.status["workersReady"]) == ("Running", "2/2")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (build_large_template("image:2"), "spec.template: cannot be changed"),
        (build_large_template(nodeSelector={"pool": "spot"}), "spec.template: where pods go can be changed only while"),
    ],
)
def test_after_a_refused_change_of_a_large_template_the_job_waits_until_it_is_reverted(
    template: dict[str, Any], words: str
) -> None:
    world = start_running_job(template=build_large_template())
    pods = dict(world.pods)
    world.edit(template=template)
    assert world.reconcile().is_empty
    failed = world.find_condition("Failed")
    assert (world.status["phase"], failed["reason"], world.pods) == ("Failed", "InvalidSpec", pods)
    assert words in failed["message"]
    assert "revert the change" in failed["message"]
    world.edit(template=build_large_template())
    world.start_ranks()
    assert (world.status["phase"], world.find_condition("Failed")["status"]) == ("Running", "False")
    world.end_launcher(0)
    world.reconcile()
    world.edit(template=template)
    world.reconcile()
    assert world.status["phase"] == "Succeeded"


def test_a_large_launcher_template_cannot_change_either() -> None:
    launcher = {"metadata": {"annotations": {"note": "n" * 200_000}}, "spec": {"serviceAccountName": "a"}}
    world = start_running_job(launcher={"template": launcher})
    assert len(json.dumps(world.status)) < 16 << 10
    world.edit(launcher={})
    world.reconcile()
    assert "spec.launcher.template: cannot be changed" in world.find_condition("Failed")["message"]
