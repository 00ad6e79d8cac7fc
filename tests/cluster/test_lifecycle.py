"""Suspending, resuming, deleting: at every phase of a job's life."""

from __future__ import annotations

import time

import pytest
from jobs import endless, fails, job, steps
from kubernetes.client.exceptions import ApiException
from target import KUBELET_SECONDS, Namespace, wait_for

GONE_SECONDS = 15.0
"""From deleting a job to nothing being left of it, on nodes that can be reached."""


def test_suspended_from_the_start_then_resumed(namespace: Namespace) -> None:
    quiet = job("quiet", steps(3), runPolicy={"suspend": True, "activeDeadlineSeconds": 60})
    quiet["spec"]["template"]["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
    name = namespace.create(quiet)
    namespace.wait_phase(name, "Suspended")
    assert namespace.pods() == []
    assert "startTime" not in namespace.status(name)
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": False}}})
    namespace.wait_phase(name, "Succeeded")
    for pod in namespace.pods("worker"):  # scheduling directives are kept
        assert any(one.key == "gpu" for one in pod.spec.tolerations)


def test_suspending_frees_everything_and_resuming_goes_on(namespace: Namespace) -> None:
    name = namespace.create(job("nap", endless(), workers=2))
    namespace.wait_phase(name, "Running")
    before = namespace.status(name)
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": True}}})
    namespace.wait_phase(name, "Suspended")
    wait_for(lambda: not any(child.startswith("pod/") for child in namespace.children()), "all pods to be gone", 60)
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": False}}})
    after = namespace.wait_phase(name, "Running")
    assert after["attempt"] == before["attempt"] + 1
    assert after["restarts"] == 0
    assert after["startTime"] > before["startTime"]  # activeDeadlineSeconds counts anew


@pytest.mark.alone
@pytest.mark.parametrize("phase", ["Pending", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed"])
def test_deleted_at_any_phase(namespace: Namespace, phase: str) -> None:
    """On nodes that can be reached everything is gone within 15 s: PID 1 passes SIGTERM on."""
    command = {"Succeeded": steps(1), "Failed": fails()}.get(phase, endless())
    policy = {"suspend": phase == "Suspended", "backoffLimit": 0 if phase == "Failed" else 1, "cleanPodPolicy": "None"}
    name = namespace.create(job("doomed", command, runPolicy=policy))
    if phase == "Starting":
        namespace.wait_phase(name, "Starting", "Running")
    elif phase == "Restarting":
        namespace.wait_phase(name, "Running")
        pod = namespace.pods("worker")[0].metadata.name
        namespace.target.core.delete_namespaced_pod(pod, namespace.name, grace_period_seconds=0)
        namespace.wait_phase(name, "Restarting")
    else:
        namespace.wait_phase(name, phase)
    began = time.monotonic()
    namespace.delete(name)
    wait_for(lambda: namespace.children() == set(), "everything to be gone", 60)
    assert time.monotonic() - began < GONE_SECONDS


@pytest.mark.alone
def test_created_while_no_operator_ran(namespace: Namespace) -> None:
    namespace.target.scale_operator(0)
    try:
        name = namespace.create(job("early", steps(2), workers=1))
    finally:
        namespace.target.scale_operator(2)
    namespace.wait_phase(name, "Succeeded")


@pytest.mark.alone
def test_deleted_while_no_operator_ran(namespace: Namespace) -> None:
    name = namespace.create(job("orphan", endless(), workers=1))
    namespace.wait_phase(name, "Running")
    namespace.target.scale_operator(0)
    try:
        namespace.delete(name)
        wait_for(lambda: namespace.children() == set(), "the garbage collector to take the children", KUBELET_SECONDS)
    finally:
        namespace.target.scale_operator(2)


def test_changes_of_the_spec(namespace: Namespace) -> None:
    """What is immutable is refused; what is not takes effect: policies at once, placement after a suspension."""
    name = namespace.create(job("change", endless(), workers=1))
    namespace.wait_phase(name, "Running")
    with pytest.raises(ApiException, match=r"spec\.workers: cannot be changed"):
        namespace.patch(name, {"spec": {"workers": 2}})
    template = namespace.job(name)["spec"]["template"]
    template["spec"]["tolerations"] = [{"key": "spot", "operator": "Exists"}]
    with pytest.raises(ApiException, match="only while the job is suspended"):
        namespace.patch(name, {"spec": {"template": template}})
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": True}}})
    namespace.wait_phase(name, "Suspended")
    namespace.patch(name, {"spec": {"template": template, "runPolicy": {"suspend": False}}})
    status = namespace.wait_phase(name, "Running")
    assert status["observedGeneration"] == namespace.job(name)["metadata"]["generation"]
    assert any(one.key == "spot" for one in namespace.pods("worker")[0].spec.tolerations)
    namespace.patch(name, {"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    namespace.wait_phase(name, "Failed")
    assert namespace.condition(name, "Failed")["reason"] == "DeadlineExceeded"
