"""Suspend, resume and delete a job in every phase."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from jobs import build_endless_steps, build_failing_ranks, build_job, build_steps
from kubernetes.client.exceptions import ApiException
from target import KUBELET_SECONDS, PATIENCE, Namespace, wait_for

GONE_SECONDS = 15.0 * PATIENCE
"""Maximum time from the deletion of a job to the removal of all its objects, on reachable nodes."""


def test_a_job_that_is_created_suspended_runs_after_a_resume(namespace: Namespace) -> None:
    quiet = build_job("quiet", build_steps(3), runPolicy={"suspend": True, "activeDeadlineSeconds": 60 * PATIENCE})
    quiet["spec"]["template"]["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
    name = namespace.create(quiet)
    namespace.wait_phase(name, "Suspended")
    assert namespace.list_pods() == []
    assert "startTime" not in namespace.read_status(name)
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": False}}})
    namespace.wait_phase(name, "Succeeded")
    for pod in namespace.list_pods("worker"):  # scheduling directives are kept
        assert any(toleration.key == "gpu" for toleration in pod.spec.tolerations)


def test_suspending_frees_everything_and_resuming_continues(namespace: Namespace) -> None:
    name = namespace.create(build_job("nap", build_endless_steps(), workers=2))
    namespace.wait_phase(name, "Running")
    before = namespace.read_status(name)
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": True}}})
    namespace.wait_phase(name, "Suspended")
    wait_for(
        lambda: not any(child.startswith("pod/") for child in namespace.list_children()), "all pods to be gone", 60
    )
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": False}}})
    after = namespace.wait_phase(name, "Running")
    assert after["attempt"] == before["attempt"] + 1
    assert after["restarts"] == 0
    assert after["startTime"] > before["startTime"]  # activeDeadlineSeconds counts anew


@pytest.mark.alone
@pytest.mark.parametrize("phase", ["Pending", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed"])
def test_a_job_that_is_deleted_in_any_phase_leaves_nothing(namespace: Namespace, phase: str) -> None:
    """On reachable nodes everything is removed within 15 s, because PID 1 forwards SIGTERM."""
    command = {"Succeeded": build_steps(1), "Failed": build_failing_ranks()}.get(phase, build_endless_steps())
    policy = {"suspend": phase == "Suspended", "backoffLimit": 0 if phase == "Failed" else 1, "cleanPodPolicy": "None"}
    name = namespace.create(build_job("doomed", command, runPolicy=policy))
    if phase == "Starting":
        namespace.wait_phase(name, "Starting", "Running")
    elif phase == "Restarting":
        namespace.wait_phase(name, "Running")
        pod = namespace.list_pods("worker")[0].metadata.name
        namespace.target.core.delete_namespaced_pod(pod, namespace.name, grace_period_seconds=0)
        namespace.wait_phase(name, "Restarting")
    else:
        namespace.wait_phase(name, phase)
    began = time.monotonic()
    namespace.delete(name)
    wait_for(lambda: namespace.list_children() == set(), "everything to be gone", 60)
    assert time.monotonic() - began < GONE_SECONDS


def test_a_job_that_is_created_again_runs_while_pods_of_the_former_job_stay(namespace: Namespace) -> None:
    """The former job's ranks ignore SIGTERM, so its launcher listens until the grace period ends. A finalizer keeps a
    worker's pod even longer. The new job of the same name starts at once, and its workers call its own launcher."""
    core, kept = namespace.target.core, "topkube.test/kept"
    stubborn = build_job("again", ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    stubborn["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 120
    name = namespace.create(stubborn)
    namespace.wait_phase(name, "Running")
    former = {pod.metadata.name: pod for pod in namespace.list_pods()}
    worker = namespace.build_pod_name(name, "worker-0-1")
    core.patch_namespaced_pod(worker, namespace.name, {"metadata": {"finalizers": [kept]}})
    try:
        namespace.delete(name)
        wait_for(lambda: namespace.list_pods() == [], "the deletion of the former job's pods", KUBELET_SECONDS)
        wait_for(lambda: not namespace.exists(name), "the former job to be gone")
        namespace.create(build_job("again", build_steps(2)))
        status = namespace.wait_phase(name, "Succeeded")
        assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0)
        left = core.read_namespaced_pod(worker, namespace.name).metadata
        assert left.uid == former[worker].metadata.uid
        assert left.deletion_timestamp, "the former worker is still being deleted"
        assert not {pod.metadata.name for pod in namespace.list_pods()} & set(former)
    finally:
        core.patch_namespaced_pod(worker, namespace.name, {"metadata": {"finalizers": None}})
        for pod in former:
            with suppress(ApiException):
                core.delete_namespaced_pod(pod, namespace.name, grace_period_seconds=0)


@pytest.mark.alone
def test_a_job_that_is_created_while_no_operator_runs_starts_later(namespace: Namespace) -> None:
    namespace.target.scale_operator(0)
    try:
        name = namespace.create(build_job("early", build_steps(2), workers=1))
    finally:
        namespace.target.scale_operator(2)
    namespace.wait_phase(name, "Succeeded")


@pytest.mark.alone
def test_a_job_that_is_deleted_while_no_operator_runs_leaves_nothing(namespace: Namespace) -> None:
    """The launcher's pod ends as the other pods do, and is removed when an operator runs."""
    name = namespace.create(build_job("orphan", build_endless_steps(), workers=1))
    namespace.wait_phase(name, "Running")
    launcher = {f"pod/{pod.metadata.name}" for pod in namespace.list_pods("launcher")}
    namespace.target.scale_operator(0)
    try:
        namespace.delete(name)
        what = "the garbage collector to delete the children"
        wait_for(lambda: namespace.list_children() == launcher, what, KUBELET_SECONDS)
    finally:
        namespace.target.scale_operator(2)
    wait_for(lambda: namespace.list_children() == set(), "the operator to remove the launcher's pod", KUBELET_SECONDS)


@pytest.mark.alone
def test_a_job_that_completes_while_no_operator_runs_does_not_run_again(namespace: Namespace) -> None:
    """Its pods are gone when an operator runs again."""
    name = namespace.create(build_job("unseen", build_steps(200, 0.1), workers=1))
    namespace.wait_phase(name, "Running")
    namespace.target.scale_operator(0)
    try:
        ended = "the run to end"
        wait_for(lambda: namespace.list_pods("launcher")[0].status.phase == "Succeeded", ended, 120)
        namespace.target.core.delete_collection_namespaced_pod(namespace.name, grace_period_seconds=1)
        wait_for(lambda: namespace.list_pods("worker") == [], "the worker's pod to go", KUBELET_SECONDS)
    finally:
        namespace.target.scale_operator(2)
    assert namespace.wait_phase(name, "Succeeded")["attempt"] == 1
    wait_for(
        lambda: namespace.list_pods("launcher") == [], "the operator to remove the launcher's pod", KUBELET_SECONDS
    )


def test_changes_of_fixed_fields_are_refused_and_policies_take_effect(namespace: Namespace) -> None:
    """Changes of immutable fields are refused. Policies take effect at once, and placement after a suspension."""
    name = namespace.create(build_job("change", build_endless_steps(), workers=1))
    namespace.wait_phase(name, "Running")
    with pytest.raises(ApiException, match=r"spec\.workers: cannot be changed"):
        namespace.patch(name, {"spec": {"workers": 2}})
    template = namespace.read_job(name)["spec"]["template"]
    template["spec"]["tolerations"] = [{"key": "spot", "operator": "Exists"}]
    with pytest.raises(ApiException, match="only while the job is suspended"):
        namespace.patch(name, {"spec": {"template": template}})
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": True}}})
    namespace.wait_phase(name, "Suspended")
    namespace.patch(name, {"spec": {"template": template, "runPolicy": {"suspend": False}}})
    status = namespace.wait_phase(name, "Running")
    assert status["observedGeneration"] == namespace.read_job(name)["metadata"]["generation"]
    assert any(toleration.key == "spot" for toleration in namespace.list_pods("worker")[0].spec.tolerations)
    namespace.patch(name, {"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    namespace.wait_phase(name, "Failed")
    assert namespace.read_condition(name, "Failed")["reason"] == "DeadlineExceeded"
