"""What the operator makes of jobs on a real cluster: every field of runPolicy, every child, every phase."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from operating import Guillotine, Jobs, Operator, data_of, gone, job, until

from topkube_operator.cluster import ApiError, Cluster

LONG = "echo started; exec sleep 600"


@pytest.fixture(scope="module")
def cluster(kubeconfig: Path) -> Cluster:
    return Cluster(str(kubeconfig))


def _namespace(cluster: Cluster) -> Iterator[str]:
    name = f"reconciler-{secrets.token_hex(3)}"
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    until(lambda: not gone(cluster, "ServiceAccount", name, "default"), "the service account")
    yield name
    cluster.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    cluster.learn("ServiceAccount", "v1", "serviceaccounts")
    yield from _namespace(cluster)


@pytest.fixture
def jobs(cluster: Cluster, namespace: str) -> Jobs:
    return Jobs(cluster, namespace)


@pytest.fixture
def operator(kubeconfig: Path, namespace: str) -> Iterator[Operator]:
    with Operator(str(kubeconfig), namespace).running() as operator:
        yield operator


def test_a_job_succeeds_and_leaves_nothing_but_its_ended_pods(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("fine"))
    status = jobs.wait_phase("fine", "Succeeded")
    assert status["startTime"] <= status["completionTime"]
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0)
    until(lambda: jobs.status("fine")["replicaStatuses"]["workers"]["succeeded"] == 2, "both workers to have ended")
    until(lambda: not jobs.children("Secret") and not jobs.children("Service"), "the credentials and Service to go")
    assert sorted(jobs.pods()) == ["fine-launcher-1", "fine-worker-0-1", "fine-worker-1-1"]
    until(lambda: {"PodsCreated", "Succeeded"} <= set(jobs.events("fine")), "the Events")


def test_a_failing_rank_is_named_with_its_code_and_its_last_words(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("bad", "echo the last words; exit 3", slots=2))
    status = jobs.wait_phase("bad", "Failed")
    failure = status["firstFailure"]
    assert failure["exitCode"] == 3, failure
    assert failure["pod"].startswith("bad-worker-")
    assert "rank" in failure
    assert "the last words" in failure["logTail"]
    assert jobs.condition("bad", "Failed")["reason"] == "BackoffLimitExceeded"


def test_a_command_that_does_not_exist_is_said_to_be(jobs: Jobs, operator: Operator) -> None:
    made = job("typo")
    made["spec"]["template"]["spec"]["containers"][0] |= {"command": ["pyhton"], "args": ["train.py"]}
    jobs.create(made)
    assert "pyhton" in jobs.wait_phase("typo", "Failed")["firstFailure"]["message"]


def test_an_image_that_cannot_be_pulled_is_pending_and_fails_at_the_deadline(jobs: Jobs, operator: Operator) -> None:
    made = job("nowhere", runPolicy={"activeDeadlineSeconds": 8})
    made["spec"]["template"]["spec"]["containers"][0] |= {"image": "localhost/nowhere:1", "imagePullPolicy": "Never"}
    jobs.create(made)
    until(lambda: jobs.condition("nowhere", "Running").get("reason") == "ImagePullBackOff", "the reason")
    assert jobs.status("nowhere")["phase"] == "Pending"
    status = jobs.wait_phase("nowhere", "Failed")
    assert status["firstFailure"]["reason"] == "ImagePullBackOff"
    assert jobs.condition("nowhere", "Failed")["reason"] == "DeadlineExceeded"
    until(lambda: not any(pod["status"]["phase"] == "Running" for pod in jobs.pods().values()), "the pods to end")


def test_what_does_not_fit_is_pending_with_the_schedulers_words(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("wide", workers=64))
    until(lambda: jobs.condition("wide", "Scheduled").get("reason") == "Unschedulable", "the scheduler's words")
    assert "nodes are available" in jobs.condition("wide", "Scheduled")["message"]
    assert jobs.status("wide")["phase"] == "Pending"
    assert len(jobs.pods()) == 65


def test_suspended_from_the_start_then_resumed_then_suspended(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("later", LONG, runPolicy={"suspend": True}))
    jobs.wait_phase("later", "Suspended")
    assert jobs.empty()
    jobs.edit("later", template={"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}, runPolicy={"suspend": False})
    jobs.wait_phase("later", "Running")
    assert all(pod["spec"]["nodeSelector"] for name, pod in jobs.pods().items() if "worker" in name)
    jobs.edit("later", runPolicy={"suspend": True})
    jobs.wait_phase("later", "Suspended")
    until(jobs.empty, "everything to be freed", 20)
    assert jobs.condition("later", "Suspended")["status"] == "True"
    assert "startTime" not in jobs.status("later")


def test_a_job_that_somebody_else_manages_is_left_alone(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("theirs", runPolicy={"managedBy": "example.com/other"}))
    jobs.create(job("ours"))
    jobs.wait_phase("ours", "Succeeded")
    assert jobs.status("theirs") == {}
    assert not any(name.startswith("theirs") for name in jobs.pods())


def test_a_foreign_service_with_our_name_is_reported_and_kept(jobs: Jobs, operator: Operator) -> None:
    spec = {"ports": [{"port": 80}], "selector": {"app": "web"}}
    metadata = {"name": "taken", "namespace": jobs.namespace}
    theirs = jobs.cluster.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    jobs.create(job("taken"))
    until(lambda: jobs.condition("taken", "Created").get("reason") == "ForeignObject", "the report")
    assert not jobs.pods()
    found = jobs.cluster.get("Service", jobs.namespace, "taken")
    assert found["metadata"]["resourceVersion"] == theirs["metadata"]["resourceVersion"]
    jobs.delete_child("Service", "taken")
    jobs.wait_phase("taken", "Succeeded")


def test_a_deleted_service_and_secret_come_back_the_same(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("whole", LONG))
    jobs.wait_phase("whole", "Running")
    secret, service = jobs.children("Secret")["whole-credentials"], jobs.children("Service")["whole"]
    jobs.delete_child("Secret", "whole-credentials")
    jobs.delete_child("Service", "whole")
    again = until(lambda: jobs.children("Secret").get("whole-credentials"), "the Secret")
    assert data_of(again) == data_of(secret)
    assert again["metadata"]["uid"] != secret["metadata"]["uid"]
    again = until(lambda: jobs.children("Service").get("whole"), "the Service")
    assert again["spec"]["clusterIP"] == service["spec"]["clusterIP"]
    assert jobs.status("whole")["attempt"] == 1


def test_a_worker_deleted_by_hand_is_a_disruption_and_the_others_live_on(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("robbed", LONG))
    jobs.wait_phase("robbed", "Running")
    kept = jobs.pods()["robbed-worker-0-1"]["metadata"]["uid"]
    jobs.delete_child("Pod", "robbed-worker-1-1")
    status = jobs.wait_attempt("robbed", 2)
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert jobs.pods()["robbed-worker-0-1"]["metadata"]["uid"] == kept
    assert "robbed-worker-1-2" in jobs.pods()


def test_a_launcher_deleted_by_hand_is_replaced_and_all_workers_live_on(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("headless", LONG))
    jobs.wait_phase("headless", "Running")
    before = {name: pod["metadata"]["uid"] for name, pod in jobs.pods().items() if "worker" in name}
    jobs.delete_child("Pod", "headless-launcher-1")
    jobs.wait_attempt("headless", 2)
    assert {name: pod["metadata"]["uid"] for name, pod in jobs.pods().items() if "worker" in name} == before


@pytest.mark.parametrize("phase", ["Pending", "Starting", "Running", "Succeeded"])
def test_a_deleted_job_leaves_nothing_behind(jobs: Jobs, operator: Operator, phase: str) -> None:
    jobs.create(job("shortlived", "true" if phase == "Succeeded" else LONG))
    until(lambda: jobs.status("shortlived").get("phase") in (phase, "Running"), phase)
    jobs.delete("shortlived")
    until(jobs.empty, "everything to be gone", 15)


def test_a_job_made_while_no_operator_runs_is_taken_up(jobs: Jobs, kubeconfig: Path) -> None:
    jobs.create(job("early"))
    with Operator(str(kubeconfig), jobs.namespace).running():
        jobs.wait_phase("early", "Succeeded")


def test_nonsense_is_said_in_the_words_of_admission_and_can_be_corrected(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("odd", LONG))
    jobs.wait_phase("odd", "Running")
    jobs.edit("odd", runPolicy={"schedulingPolicy": {"minAvailable": 99}})
    until(lambda: jobs.condition("odd", "Failed").get("status") == "True", "the refusal")
    assert "spec.runPolicy.schedulingPolicy.minAvailable" in jobs.condition("odd", "Failed")["message"]
    jobs.edit("odd", runPolicy={"schedulingPolicy": None})
    status = jobs.wait_phase_again("odd", "Running")
    assert status["attempt"] == 1


def test_a_name_of_63_characters(jobs: Jobs, operator: Operator) -> None:
    name = "n" * 63
    jobs.create(job(name))
    jobs.wait_phase(name, "Succeeded")


def test_a_finished_job_is_deleted_after_its_time_to_live(jobs: Jobs, operator: Operator) -> None:
    jobs.create(job("brief", runPolicy={"ttlSecondsAfterFinished": 0}))
    until(lambda: gone(jobs.cluster, "TrainingJob", jobs.namespace, "brief"), "the job to be deleted")
    until(jobs.empty, "its pods to go", 15)


def test_the_next_replica_takes_over(jobs: Jobs, kubeconfig: Path) -> None:
    first, second = (Operator(str(kubeconfig), jobs.namespace) for _ in range(2))
    with first.running():
        until(lambda: "leads" in first.log.read_text(), "the first to lead")
        with second.running():
            until(lambda: second.alive(), "the second")
            jobs.create(job("one"))
            jobs.wait_phase("one", "Succeeded")
            first.kill()
            jobs.create(job("two"))
            until(lambda: jobs.status("two").get("phase"), "the second to act", 20)
            first.start()
            second.terminate()
            jobs.create(job("three"))
            until(lambda: jobs.status("three").get("phase"), "the first to act again", 8)


def test_killed_at_each_of_its_writes_the_operator_brings_the_job_to_its_end(
    jobs: Jobs, kubeconfig: Path, tmp_path: Path
) -> None:
    with Guillotine(jobs.cluster, tmp_path) as guillotine:
        operator = Operator(str(guillotine.kubeconfig), jobs.namespace, "--no-leader-election")
        guillotine.victim = operator
        made = job("hydra", workers=1)
        jobs.create(made)
        with operator.running():

            def over() -> bool:
                if not operator.alive():
                    operator.start()
                return jobs.status("hydra").get("phase") == "Succeeded" and not jobs.children("Secret")

            until(over, "the job to end", 240)
        assert len(guillotine.kills) > 20, guillotine.kills
    status = jobs.status("hydra")
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0), guillotine.kills
    assert sorted(jobs.pods()) == ["hydra-launcher-1", "hydra-worker-0-1"]


def test_two_jobs_of_one_name_in_two_namespaces(cluster: Cluster, jobs: Jobs, kubeconfig: Path) -> None:
    for other in _namespace(cluster):
        jobs_there = Jobs(cluster, other)
        with Operator(str(kubeconfig), jobs.namespace, "--namespace", other).running():
            for place in (jobs, jobs_there):
                place.create(job("twin"))
            for place in (jobs, jobs_there):
                place.wait_phase("twin", "Succeeded")


def test_a_gang_waits_for_its_scheduler(cluster: Cluster, jobs: Jobs, kubeconfig: Path) -> None:
    group = {
        "group": "scheduling.x-k8s.io",
        "names": {"kind": "PodGroup", "plural": "podgroups"},
        "scope": "Namespaced",
    }
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    group["versions"] = [{"name": "v1alpha1", "served": True, "storage": True, "schema": schema}]
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    metadata = {
        "name": "podgroups.scheduling.x-k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, experimental"},
    }
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata}
    cluster.call("POST", path, {**crd, "spec": group})
    try:
        until(lambda: _served(cluster), "PodGroups")
        cluster.learn("PodGroup", "scheduling.x-k8s.io/v1alpha1", "podgroups")
        with Operator(str(kubeconfig), jobs.namespace, "--gang-scheduler", "nobody").running():
            jobs.create(job("gang", runPolicy={"schedulingPolicy": {"minAvailable": 3}}))
            jobs.wait_phase("gang", "Pending")
            until(lambda: len(jobs.pods()) == 3, "the pods")
            assert jobs.children("PodGroup")["gang"]["spec"]["minMember"] == 3
            for name, pod in jobs.pods().items():
                assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "gang"
                assert pod["spec"]["schedulerName"] == "nobody"
                _bind(cluster, jobs.namespace, name, len(name) % 2 + 1)
            jobs.wait_phase("gang", "Succeeded")
    finally:
        cluster.call("DELETE", f"{path}/{metadata['name']}")


def _served(cluster: Cluster) -> bool:
    try:
        return cluster.knows("scheduling.x-k8s.io", "v1alpha1", "podgroups")
    except ApiError:
        return False


def _bind(cluster: Cluster, namespace: str, pod: str, number: int) -> None:
    nodes, _ = cluster.list("Node", None)
    target = {"apiVersion": "v1", "kind": "Node", "name": nodes[number % len(nodes)]["metadata"]["name"]}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    cluster.call("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/binding", body)
