"""`plan` by example: how a job ends. No completion is lost, and the first cause decides."""

from __future__ import annotations

from typing import Any

import pytest
from child_builders import build_launcher, build_worker, parse_job
from simulated_cluster import SimulatedCluster, start_running_job
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED

from topkube_operator.model import names
from topkube_operator.model.observed import Container, Observed, Pod
from topkube_operator.planning.causes.pod_failures import find_pod_failure

LAUNCHER = "train-launcher-1-uid-1"


# Completion is durable.


@pytest.mark.parametrize("colocate", [False, True])
def test_a_completion_is_not_lost_if_pods_are_deleted_while_no_operator_runs(colocate: bool) -> None:
    """The launcher ends and all pods are deleted, by a scaled down pool or by hand, while no operator runs."""
    world = start_running_job(launcher={"colocate": colocate})
    world.wait(500)
    world.end_launcher(0)
    for name in list(world.pods):
        world.delete("Pod", name, world.pods[name].uid)
    world.run()
    world.removed_at, world.last_seen, world.report = {}, {}, None
    world.reconcile()
    assert (world.status["phase"], world.status["attempt"]) == ("Succeeded", 1)
    world.reconcile()
    assert not [name for name, pod in world.pods.items() if pod.finalizers], (
        "the status has the result, so no pod is held"
    )


def test_a_pod_with_the_finalizer_is_removed_once_the_end_of_the_attempt_is_stored() -> None:
    world = start_running_job(runPolicy={"cleanPodPolicy": "None"})
    assert world.pods[LAUNCHER].has_finalizer
    world.end_launcher(1, RANK_FAILED)
    plan = world.plan()
    while not plan.release:
        assert world.pods[LAUNCHER].has_finalizer
        world.logs |= {request.pod: "" for request in plan.logs}
        world.carry_out(plan)
        plan = world.plan()
    assert plan.status["attempt"] == 2, "the status goes first, in the same plan"
    world.start_ranks()
    assert not [pod.name for pod in world.pods.values() if pod.has_finalizer and pod.attempt == 1]


@pytest.mark.parametrize("lost", [False, True])
def test_a_suspended_job_holds_a_launcher_until_its_end_is_known_or_cannot_be_known(lost: bool) -> None:
    world = start_running_job()
    world.edit_policy(suspend=True)
    world.reconcile()
    assert world.pods[LAUNCHER].has_finalizer
    if lost:
        world.lost.add(world.pods[LAUNCHER].node)
    else:
        world.run()
    world.reconcile()
    assert not [name for name, pod in world.pods.items() if pod.has_finalizer]


def test_a_deleted_job_is_not_held_by_its_launcher() -> None:
    world = start_running_job()
    assert world.job is not None
    world.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert [release.name for release in world.plan().release] == [LAUNCHER]


def test_a_success_stays_a_success_if_the_job_is_suspended_before_the_operator_sees_it() -> None:
    world = start_running_job()
    world.end_launcher(0)
    world.edit_policy(suspend=True)
    world.reconcile()
    assert world.status["phase"] == "Succeeded"
    world.edit_policy(suspend=False)
    world.reconcile()
    assert (world.status["phase"], world.status["attempt"]) == ("Succeeded", 1)


def test_a_launcher_that_ends_well_while_the_job_is_being_suspended_has_succeeded() -> None:
    world = start_running_job()
    world.edit_policy(suspend=True)
    world.reconcile()
    assert world.status["phase"] == "Suspended"
    world.end_launcher(0)
    world.reconcile()
    assert world.status["phase"] == "Succeeded"
    assert world.find_condition("Suspended")["status"] == "False"


@pytest.mark.parametrize("spec", [{"workers": "many"}, {"template": "x"}])
def test_a_success_under_an_invalid_spec_is_stored(spec: dict[str, Any]) -> None:
    world = start_running_job(runPolicy={"ttlSecondsAfterFinished": 600})
    world.edit(**spec)
    world.reconcile()
    assert (world.status["phase"], world.find_condition("Failed")["reason"]) == ("Failed", "InvalidSpec")
    world.end_launcher(0)
    world.delete("Pod", LAUNCHER, world.pods[LAUNCHER].uid)
    world.run()
    world.reconcile()
    assert (world.status["phase"], world.find_condition("Failed")["status"]) == ("Succeeded", "False")
    assert world.status["workersReady"] == "2/2"
    assert not [name for name, pod in world.pods.items() if pod.has_finalizer]
    world.wait(599)
    world.reconcile()
    assert world.job is not None
    assert world.status["phase"] == "Succeeded"
    world.wait(1)
    world.reconcile()
    assert world.job is None


@pytest.mark.parametrize("status_lost", [False, True])
def test_an_invalid_spec_holds_no_launcher_that_is_deleted_and_has_ended(status_lost: bool) -> None:
    """A drain waits until the pod is gone. `status_lost`: no accepted spec is known."""
    world = start_running_job()
    world.edit(workers="many")
    world.reconcile()
    if status_lost and world.job is not None:
        world.job["status"] = {}
    world.delete("Pod", LAUNCHER, world.pods[LAUNCHER].uid)
    assert world.reconcile().requeue == 35, "the launcher may report its end within its grace period"
    assert world.pods[LAUNCHER].has_finalizer
    world.run()
    world.reconcile()
    assert LAUNCHER not in world.pods
    world.edit(workers=2)
    world.start_ranks()
    assert world.status["phase"] == "Running"


def test_a_failure_under_an_invalid_spec_is_found_when_the_spec_is_valid_again() -> None:
    world = start_running_job()
    world.edit(workers="many")
    world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    assert world.pods[LAUNCHER].has_finalizer, "nobody deletes the pod"
    world.edit(workers=2)
    world.reconcile()
    assert (world.status["firstFailure"]["rank"], world.status["restarts"]) == (3, 1)


# Sidecars.


def test_the_launchers_container_decides_whatever_the_default_container_is() -> None:
    sidecar = {"name": "log", "image": "log:1"}
    template = {"metadata": {"annotations": {names.DEFAULT_CONTAINER: "log"}}, "spec": {"containers": [sidecar]}}
    manifest, _ = build_launcher(parse_job(launcher={"template": template}))
    manifest["metadata"] |= {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    assert manifest["metadata"]["annotations"][names.DEFAULT_CONTAINER] == "log", (
        "the user chooses the log that kubectl shows"
    )
    statuses = [_build_status("log", 0), _build_status("launcher", 3)]
    assert Pod.from_object({**manifest, "status": {"containerStatuses": statuses}}).launcher_container.exit_code == 3
    world = start_running_job(launcher={"template": template})
    world.change(LAUNCHER, containers={**world.pods[LAUNCHER].containers, "log": Container(exit_code=0)})
    world.reconcile()
    assert world.status["phase"] == "Running"
    world.end_launcher(1, RANK_FAILED)
    world.reconcile()
    assert (world.status["restarts"], world.status["phase"]) == (1, "Restarting")


def _build_status(name: str, code: int) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, "startedAt": None, "finishedAt": None}}}


@pytest.mark.parametrize("code", [None, 1])
def test_a_sidecar_that_runs_on_or_fails_neither_decides_nor_keeps_a_job_from_ending(code: int | None) -> None:
    world = start_running_job()
    sidecar = Container(started=world.now, exit_code=code)
    world.change(LAUNCHER, containers={**world.pods[LAUNCHER].containers, "mesh": sidecar})
    world.reconcile()
    assert world.status["phase"] == "Running"
    world.end_launcher(0)
    world.reconcile()
    assert world.status["phase"] == "Succeeded"


@pytest.mark.parametrize("state", ["running", "terminated"])
def test_a_native_sidecar_neither_decides_nor_keeps_a_job_from_ending(state: str) -> None:
    """An init container with restartPolicy Always, which its kubelet ends after all others."""
    manifest, _ = build_launcher(parse_job())
    manifest["metadata"] |= {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    proxy = {"running": {"startedAt": None}} if state == "running" else {"terminated": {"exitCode": 137}}
    statuses = {
        "phase": "Running" if state == "running" else "Failed",
        "initContainerStatuses": [{"name": "istio-proxy", "state": proxy}],
        "containerStatuses": [_build_status("launcher", 0)],
    }
    pod = Pod.from_object({**manifest, "status": statuses})
    assert (pod.has_ended, pod.has_succeeded, pod.failed_container) == (True, True, "")
    world = start_running_job()
    world.change(LAUNCHER, containers=pod.containers, phase=pod.phase)
    world.reconcile()
    assert world.status["phase"] == "Succeeded"


def test_a_native_sidecar_is_not_named_for_the_failure_of_an_init_container() -> None:
    """When an init container fails, the kubelet kills the sidecars that have started before it."""
    spec = {
        "initContainers": [{"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}],
        "containers": [{"name": "worker", "image": "train:1", "command": ["python", "train.py"]}],
    }
    manifest, _ = build_worker(parse_job(template={"spec": spec}, source={"configMap": {"name": "code"}}))
    manifest["metadata"] |= {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    statuses = {
        "phase": "Failed",
        "initContainerStatuses": [_build_status("proxy", 137), _build_status("topkube-source", 3)],
        "containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }
    pod = Pod.from_object({**manifest, "status": statuses})
    assert pod.failed_container == "topkube-source"
    failure = find_pod_failure(pod, Observed())
    assert (failure.exit_code, failure.message) == (3, "container topkube-source: ended with exit code 3")


# Logs that can be read afterwards.


@pytest.mark.parametrize("code", [0, 1])
def test_pods_that_are_about_to_end_are_not_deleted_so_their_logs_stay(code: int) -> None:
    """The containers have ended, but the kubelets report the end of the pods a second later."""
    world = start_running_job(runPolicy={"backoffLimit": 0})
    world.end_launcher(code, RANK_FAILED if code else None)
    world.end("train-worker-0-1-uid-1", code)
    for name in (LAUNCHER, "train-worker-0-1-uid-1"):
        world.change(name, phase="Running")
    plan = world.reconcile()
    assert plan.requeue == 10.0
    assert not [name for name, pod in world.pods.items() if pod.deletion is not None]
    world.wait(1)
    for name in (LAUNCHER, "train-worker-0-1-uid-1"):
        world.change(name, phase="Failed" if code else "Succeeded")
    world.wait(9)
    world.reconcile()
    world.run()
    assert sorted(world.pods) == [LAUNCHER, "train-worker-0-1-uid-1"], "worker 1 ran on, and was asked to end"


def test_pods_with_a_sidecar_that_runs_on_are_removed_after_a_while() -> None:
    world = start_running_job()
    world.end_launcher(0)
    for name in list(world.pods):
        world.end(name, 0)
        world.change(name, phase="Running")
    world.reconcile()
    world.wait(29)
    world.reconcile()
    assert not [name for name, pod in world.pods.items() if pod.deletion is not None]
    world.wait(1)
    world.reconcile()
    world.run()
    assert world.pods == {}


def test_a_launcher_that_ended_stays_for_its_log_if_no_pod_is_to_be_removed() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0, "cleanPodPolicy": "None"})
    world.end_launcher(1, RANK_FAILED)
    world.change(LAUNCHER, phase="Running")
    world.reconcile()
    assert world.status["phase"] == "Failed"
    assert world.pods[LAUNCHER].deletion is None


# The first cause decides.


@pytest.mark.parametrize("deleted_pod", ["train-worker-0-1-uid-1", "train-worker-1-1-uid-1"])
@pytest.mark.parametrize("first", ["failure", "deletion"])
@pytest.mark.parametrize("how", ["delete", "remove"])
def test_a_failure_stays_a_failure_if_another_worker_is_deleted(deleted_pod: str, first: str, how: str) -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0})

    def delete() -> None:
        world.delete("Pod", deleted_pod, world.pods[deleted_pod].uid) if how == "delete" else world.remove(deleted_pod)

    if first == "deletion":
        delete()
    world.end_launcher(1, RANK_FAILED)
    if first == "failure":
        world.wait(1)
        delete()
    world.reconcile()
    assert (world.status["phase"], world.status["attempt"]) == ("Failed", 1)
    assert world.status["firstFailure"]["rank"] == 3


def test_an_eviction_of_another_worker_does_not_hide_a_failure() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0})
    world.end_launcher(1, RANK_FAILED)
    world.change("train-worker-0-1-uid-1", phase="Failed", reason="Evicted", message="the node is low on memory")
    world.reconcile()
    assert (world.status["phase"], world.status["firstFailure"]["rank"]) == ("Failed", 3)


def test_a_rank_killed_with_its_deleted_pod_was_disrupted() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0})
    world.delete("Pod", "train-worker-1-1-uid-1", world.pods["train-worker-1-1-uid-1"].uid)
    world.wait(1)
    world.end_launcher(1, {**RANK_FAILED, "exitCode": 137})
    world.reconcile()
    assert (world.status["disruptions"], world.status["attempt"]) == (1, 2)


def test_a_launcher_that_ended_silently_failed_by_itself_if_a_worker_was_deleted_later() -> None:
    world = start_running_job(runPolicy={"backoffLimit": 0})
    world.end(LAUNCHER, 137)
    world.wait(10)
    world.delete("Pod", "train-worker-1-1-uid-1", world.pods["train-worker-1-1-uid-1"].uid)
    world.reconcile()
    assert (world.status["phase"], world.status["firstFailure"]["pod"]) == ("Failed", LAUNCHER)


def test_a_worker_that_vanished_unseen_is_not_the_cause_if_another_failed() -> None:
    """The operator is new, and the launcher has not noticed anything yet."""
    world = start_running_job(runPolicy={"backoffLimit": 0})
    world.end("train-worker-1-1-uid-1", 7)
    world.remove("train-worker-0-1-uid-1")
    world.removed_at, world.last_seen, world.report = {}, {}, None
    world.wait(60)
    world.reconcile()
    assert (world.status["phase"], world.status["firstFailure"]["exitCode"]) == ("Failed", 7)


def test_a_job_whose_worker_is_deleted_at_every_attempt_ends_by_backoff_limit() -> None:
    world = SimulatedCluster(build_job(runPolicy={"backoffLimit": 0}))
    for _ in range(31):
        world.start_ranks()
        world.end_launcher(1, RANK_FAILED)
        if "train-worker-0-1-uid-1" in world.pods:
            world.remove("train-worker-0-1-uid-1")
        world.reconcile()
        world.wait(400)
    assert (world.status["phase"], world.status["attempt"]) == ("Failed", 1)


# Suspended, changed and resumed at once.


def test_a_suspension_change_and_resumption_between_two_reconciles_are_followed() -> None:
    world = start_running_job()
    new_template = {"spec": {**build_job()["spec"]["template"]["spec"], "nodeSelector": {"pool": "spot"}}}
    world.edit_policy(suspend=True)
    world.edit(template=new_template)
    world.edit_policy(suspend=False)
    world.reconcile()
    assert world.find_condition("Failed") == {}
    assert world.status["acceptedSpec"]["template"] == new_template
    world.run()
    world.start_ranks()
    assert (world.status["phase"], world.status["attempt"], world.status["restarts"]) == ("Running", 2, 0)
    assert {pod.attempt for pod in world.pods.values()} == {2}, "pods of the spec before are gone"


def test_a_change_of_a_fixed_field_is_refused_after_any_number_of_changes() -> None:
    world = start_running_job()
    world.edit_policy(suspend=True)
    world.edit(workers=3)
    world.edit_policy(suspend=False)
    world.reconcile()
    assert world.find_condition("Failed")["reason"] == "ChangeRefused"
    assert (world.status["phase"], world.status["workersReady"]) == ("Running", "2/2")
