"""A TrainingJob from its creation to its end: it succeeds, fails, waits or is refused, and its status shows this."""

from __future__ import annotations

import json

import needs
import pytest
from jobs import build_endless_steps, build_failing_ranks, build_job, build_steps
from target import Namespace, wait_for


def test_a_job_succeeds_and_reports_its_end(namespace: Namespace) -> None:
    name = namespace.create(build_job("success", build_steps(3, 1.0), workers=2, slots=2))
    status = namespace.wait_phase(name, "Succeeded")
    # cleanPodPolicy Running leaves what has ended, so that logs can be read
    logs = "".join(namespace.read_log(pod.metadata.name) for pod in namespace.list_pods("worker"))
    assert all(f"rank {rank} of 4 runs" in logs for rank in range(4)), logs
    assert status["restarts"] == status["disruptions"] == 0
    assert status["attempt"] == 1
    assert status["observedGeneration"] == 1
    assert status["completionTime"] >= status["startTime"]
    assert "firstFailure" not in status
    assert namespace.read_condition(name, "Succeeded")["status"] == "True"
    assert namespace.read_condition(name, "Running")["status"] == "False"
    wait_for(
        lambda: namespace.read_status(name)["replicaStatuses"]["workers"]["succeeded"] == 2,
        "the workers to be counted as succeeded",
        30,
    )
    assert namespace.read_status(name)["replicaStatuses"]["launcher"]["succeeded"] == 1
    for reason in ("PodsCreated", "Running", "Succeeded"):  # Events are written in the background
        wait_for(
            lambda reason=reason: any(event.startswith(f"{reason}:") for event in namespace.list_events()),
            f"the Event {reason}",
            30,
        )


def test_the_status_has_the_first_failure_with_its_log(namespace: Namespace) -> None:
    name = namespace.create(build_job("failure", build_failing_ranks(), workers=2, runPolicy={"backoffLimit": 0}))
    status = namespace.wait_phase(name, "Failed")
    failure = status["firstFailure"]
    assert failure["rank"] == 1
    assert failure["exitCode"] == 7
    assert failure["pod"] == namespace.build_pod_name("failure", "worker-1-1")
    assert "this is why" in failure["logTail"]
    assert len(failure["logTail"].encode()) <= 4096
    assert status["restarts"] == 0
    assert "exit" in namespace.read_condition(name, "Failed")["message"]


def test_backoff_limit_counts_restarts(namespace: Namespace) -> None:
    name = namespace.create(build_job("again", build_failing_ranks(), workers=2, runPolicy={"backoffLimit": 1}))
    status = namespace.wait_phase(name, "Failed", seconds=120)
    assert status["restarts"] == 1
    assert status["attempt"] == 2
    assert namespace.read_condition(name, "Failed")["reason"] == "BackoffLimitExceeded"


def test_a_command_that_does_not_exist_is_reported(namespace: Namespace) -> None:
    name = namespace.create(build_job("typo", ["pyhton", "train.py"], runPolicy={"backoffLimit": 0}))
    failure = namespace.wait_phase(name, "Failed")["firstFailure"]
    assert failure["exitCode"] == 127
    assert "pyhton" in failure["message"] + failure.get("logTail", "")


def test_an_image_that_cannot_be_pulled_is_reported(namespace: Namespace) -> None:
    invalid = build_job("pull", build_steps(), workers=1)
    invalid["spec"]["template"]["spec"]["containers"][0]["image"] = "localhost:1/none/such:1"
    name = namespace.create(invalid)

    def has_event() -> bool:
        running = namespace.read_condition(name, "Running")
        return running.get("reason") in ("ErrImagePull", "ImagePullBackOff") and "none/such" in running["message"]

    wait_for(has_event, "the image's trouble in the job's status", 60)
    assert namespace.read_phase(name) == "Pending"
    namespace.patch(name, {"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    status = namespace.wait_phase(name, "Failed")
    assert "none/such" in json.dumps(status["firstFailure"])
    assert namespace.read_condition(name, "Failed")["reason"] == "DeadlineExceeded"


def test_a_job_that_fits_on_no_node_waits_and_reports_why(namespace: Namespace) -> None:
    greedy = build_job("greedy", build_steps(), workers=1)
    greedy["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"memory": "1000Ti"}}
    name = namespace.create(greedy)
    scheduled = wait_for(
        lambda: (
            (condition := namespace.read_condition(name, "Scheduled"))
            and condition["reason"] == "Unschedulable"
            and condition
        ),
        "the scheduler's words",
        30,
    )
    assert scheduled["status"] == "False"
    assert "memory" in scheduled["message"]
    assert namespace.read_phase(name) == "Pending"


def test_two_workers_do_not_share_a_node(namespace: Namespace) -> None:
    """This is the default, spread: Node. The workers also request GPUs."""
    needs.require_gpus(namespace.target, 2)
    spread = build_job("spread", build_steps(3), workers=2)
    spread["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    name = namespace.create(spread)
    namespace.wait_phase(name, "Succeeded")
    nodes = [pod.spec.node_name for pod in namespace.list_pods("worker")]
    assert len(set(nodes)) == 2, nodes


def test_a_job_with_a_name_of_63_characters_runs(namespace: Namespace) -> None:
    long = "long-" + "x" * 58
    assert len(long) == 63
    namespace.create(build_job(long, build_steps(2)))
    namespace.wait_phase(long, "Succeeded")
    for pod in namespace.list_pods():
        assert len(pod.metadata.name) <= 63


def test_jobs_of_the_same_name_run_in_two_namespaces(namespace: Namespace, second_namespace: Namespace) -> None:
    for place in (namespace, second_namespace):
        place.create(build_job("twin", build_steps(3), workers=1, slots=2))
    for place in (namespace, second_namespace):
        status = place.wait_phase("twin", "Succeeded")
        assert status["restarts"] == 0


def test_a_job_of_another_manager_is_left_alone(namespace: Namespace) -> None:
    namespace.create(build_job("theirs", build_steps(1), runPolicy={"managedBy": "kueue.x-k8s.io/multikueue"}))
    namespace.create(build_job("ours", build_steps(1), workers=1))
    namespace.wait_phase("ours", "Succeeded")  # the operator was there all the time
    assert namespace.read_job("theirs").get("status") in (None, {})
    assert namespace.list_pods(job="theirs") == []


def test_a_foreign_object_with_a_name_of_ours_is_left_alone_and_reported(namespace: Namespace) -> None:
    """The foreign object does not change, and the job reports the conflict."""
    core = namespace.target.core
    foreign = {"metadata": {"name": "taken", "labels": {"mine": "yes"}}, "spec": {"ports": [{"port": 80}]}}
    before = core.create_namespaced_service(namespace.name, foreign)
    name = namespace.create(build_job("taken", build_steps(1), workers=1))
    created = wait_for(
        lambda: (
            (condition := namespace.read_condition(name, "Created"))
            and condition["reason"] == "ForeignObject"
            and condition
        ),
        "the job to name what is in its way",
        30,
    )
    assert "taken" in created["message"]
    after = core.read_namespaced_service("taken", namespace.name)
    assert after.metadata.uid == before.metadata.uid
    assert after.metadata.resource_version == before.metadata.resource_version
    core.delete_namespaced_service("taken", namespace.name, _preload_content=False)
    namespace.wait_phase(name, "Succeeded")


def test_bad_values_are_refused_with_path_and_reason(namespace: Namespace) -> None:
    for change, words in (
        ({"workers": 0}, "spec.workers"),
        ({"aggregation": {"algorithm": "magic"}}, "spec.aggregation.algorithm"),
        ({"aggregation": {"density": 2}}, "spec.aggregation.density"),
    ):
        with pytest.raises(Exception, match=words.replace(".", r"\.")):
            namespace.create(build_job("bad", build_steps(), **change))
    assert namespace.list_children() == set()


def test_pods_pass_the_restricted_level_and_run_as_any_user(namespace: Namespace) -> None:
    """The ranks train with an arbitrary UID, a read-only root file system, no capability and no privilege."""
    strict = build_job("strict", build_steps(2), workers=2)
    strict["spec"]["template"]["spec"]["containers"][0]["securityContext"] = {
        "runAsUser": 1234567,
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
    }
    name = namespace.create(strict)
    namespace.wait_phase(name, "Succeeded")
    for pod in namespace.list_pods():
        assert not pod.spec.host_network
        assert not pod.spec.host_pid
        for container in pod.spec.containers:
            security, above = container.security_context, pod.spec.security_context
            assert security.allow_privilege_escalation is False
            assert security.capabilities.drop == ["ALL"]
            assert security.run_as_non_root or above.run_as_non_root
            assert (security.seccomp_profile or above.seccomp_profile).type == "RuntimeDefault"
        for volume in pod.spec.volumes:
            kinds = (
                volume.empty_dir,
                volume.secret,
                volume.config_map,
                volume.projected,
                volume.persistent_volume_claim,
            )
            assert any(kinds), volume


def test_a_job_is_removed_after_its_time_to_live(namespace: Namespace) -> None:
    name = namespace.create(build_job("brief", build_steps(1), workers=1))
    namespace.wait_phase(name, "Succeeded")
    namespace.patch(name, {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 1}}})
    wait_for(lambda: namespace.list_children() == set(), "the job and all of its children to be gone", 30)


def test_a_job_fails_at_its_deadline(namespace: Namespace) -> None:
    name = namespace.create(build_job("late", build_endless_steps(), workers=1, runPolicy={"activeDeadlineSeconds": 8}))
    status = namespace.wait_phase(name, "Failed", seconds=60)
    assert namespace.read_condition(name, "Failed")["reason"] == "DeadlineExceeded"
    assert status["restarts"] == 0
    wait_for(lambda: all(pod.status.phase != "Running" for pod in namespace.list_pods()), "its pods to end", 20)
