"""The jobs that the webhook allows, refuses and warns about. The planner calls the same function."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from stored_jobs import JOB, change_field
from test_job_fuzz import jobs

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube_operator.planning.admission import explain_refusal, review, warn_of_claim


def send_review(job: Any, old: Any = None, operation: str = "CREATE") -> dict[str, Any]:
    request = {"uid": "7", "operation": operation, "object": job, "oldObject": old, "name": "tiny"}
    sent = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    answer = review(json.loads(json.dumps(sent)))
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert answer["response"]["uid"] == "7"
    json.dumps(answer)
    return dict(answer["response"])


def test_a_good_job_is_allowed() -> None:
    assert send_review(JOB) == {"uid": "7", "allowed": True, "warnings": []}


def test_all_mistakes_are_named_with_their_paths() -> None:
    invalid = change_field("aggregation", {"density": 2, "algorithm": "hitop"}, change_field("workers", 0))
    del invalid["spec"]["template"]["spec"]["containers"][0]["image"]
    response = send_review(invalid)
    assert not response["allowed"]
    assert response["status"]["code"] == 400
    message = response["status"]["message"]
    assert "has 4 mistakes" in message
    for part in (
        "spec.workers: 0 is not a whole number of at least 1",
        "spec.aggregation.density: 2 is not a number above 0 and at most 1",
        "did you mean hitopk?",
        "spec.template.spec.containers[0].image: is required",
    ):
        assert part in message


def test_the_reconciler_writes_the_same_message() -> None:
    invalid = change_field("workers", 0)
    with pytest.raises(JobError) as error:
        TrainingJob.parse(
            {key: invalid[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "tiny"}}
        )
    assert explain_refusal(invalid) == str(error.value) == send_review(invalid)["status"]["message"]
    assert explain_refusal(JOB) == ""


def test_names_that_are_too_long_are_refused() -> None:
    longest = {**JOB, "metadata": {"name": "a" * 63}}
    assert send_review(longest)["allowed"]
    message = send_review({**JOB, "metadata": {"name": "a" * 64}})["status"]["message"]
    assert "metadata.name" in message
    assert "at most 63 characters" in message


def test_a_status_of_another_version_is_not_a_mistake() -> None:
    assert send_review({**JOB, "status": {"phase": "Dreaming", "new": 1}})["allowed"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("runPolicy.suspend", True),
        ("runPolicy.backoffLimit", 9),
        ("runPolicy.activeDeadlineSeconds", 60),
        ("runPolicy.ttlSecondsAfterFinished", 60),
        ("runPolicy.cleanPodPolicy", "All"),
        ("slotsPerWorker", None),  # the default is what it was
    ],
)
def test_changes_that_take_effect_at_once_are_allowed(path: str, value: Any) -> None:
    assert send_review(change_field(path, value), JOB, "UPDATE")["allowed"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("workers", 3, "spec.workers: cannot be changed from 2 to 3: delete the job and create it again"),
        ("slotsPerWorker", 2, "spec.slotsPerWorker: cannot be changed from 1 to 2"),
        ("mpiImplementation", "OpenMPI", "spec.mpiImplementation: cannot be changed from 'MPICH' to 'OpenMPI'"),
        ("aggregation.density", 0.5, "spec.aggregation.density: cannot be changed"),
        ("launcher.colocate", True, "spec.launcher.colocate: cannot be changed"),
        ("launcher.template", {"spec": {"serviceAccountName": "x"}}, "spec.launcher.template.spec"),
        ("dataset", {"uri": "s3://b"}, "spec.dataset: cannot be changed"),
        ("checkpoint", None, "spec.checkpoint: cannot be changed"),
        ("checkpoint.claimName", "other", "spec.checkpoint.claimName: cannot be changed"),
        ("runPolicy.managedBy", "kueue.x-k8s.io/multikueue", "spec.runPolicy.managedBy: cannot be changed"),
        ("template.spec.containers.0.image", "i:2", "spec.template.spec.containers[0].image: cannot be changed"),
        ("template.spec.volumes", [{"name": "v"}], "spec.template.spec.volumes: cannot be changed"),
    ],
)
@pytest.mark.parametrize("suspended", [False, True])
def test_changes_that_would_make_another_run_are_refused(path: str, value: Any, words: str, suspended: bool) -> None:
    old = change_field("runPolicy.suspend", suspended)
    response = send_review(change_field(path, value, old), old, "UPDATE")
    assert not response["allowed"]
    assert words in response["status"]["message"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spread", "None"),
        ("runPolicy.schedulingPolicy.queue", "gold"),
        ("template.metadata.labels.queue", "gold"),
        ("template.metadata.annotations", {"a": "b"}),
        ("template.spec.nodeSelector", {"zone": "b"}),
        ("template.spec.nodeSelector", None),
        ("template.spec.tolerations", [{"operator": "Exists"}]),
        ("template.spec.affinity", {"nodeAffinity": {}}),
        ("launcher.template", {"spec": {"nodeSelector": {"zone": "b"}}}),
    ],
)
def test_where_pods_go_may_change_while_the_job_is_suspended(path: str, value: Any) -> None:
    """A queue sets the node selector and resumes in one update, and takes it back and suspends in another."""
    old = change_field("launcher.template", {"spec": {"priorityClassName": "p"}}) if "launcher" in path else JOB
    if "launcher" in path:
        value = {"spec": {"priorityClassName": "p", **value["spec"]}}
    suspended = change_field("runPolicy.suspend", True, old)
    resumed = change_field("runPolicy.suspend", False, change_field(path, value, old))
    assert send_review(resumed, suspended, "UPDATE")["allowed"]
    assert send_review(suspended, resumed, "UPDATE")["allowed"]
    response = send_review(change_field(path, value, old), old, "UPDATE")
    assert not response["allowed"]
    assert "can be changed only while the job is suspended" in response["status"]["message"]


def test_a_stored_job_that_is_no_longer_valid_can_be_deleted_and_repaired() -> None:
    nonsense = change_field("workers", "many")
    freed = copy.deepcopy(nonsense)
    freed["metadata"]["finalizers"] = []
    assert send_review(freed, nonsense, "UPDATE")["allowed"]
    assert send_review(None, nonsense, "DELETE")["allowed"]
    assert send_review(JOB, nonsense, "UPDATE")["allowed"]
    assert not send_review(change_field("workers", "more"), nonsense, "UPDATE")["allowed"]


MISSPELT_RULE = {"action": "Fail", "onReasons": ["OomKilled", "NodeLost", "OutOfnvidia.com/gpu", "MyOwnReason"]}
PROBABLE_MISTAKES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda spec: spec["template"]["spec"]["containers"][0].update(image="registry:5000/i"), "may name another image"),
    (lambda spec: spec["template"]["spec"]["containers"][0].update(image="i:latest"), "may name another image"),
    (lambda spec: spec["template"]["spec"].update(restartPolicy="Always"), "restartPolicy: Always has no effect"),
    (
        lambda spec: spec["template"]["spec"]["containers"][0].update(restartPolicy="OnFailure"),
        "restartPolicy of the worker's container has no effect",
    ),
    (lambda spec: spec["template"]["spec"].update(hostNetwork=True), "hostNetwork"),
    (lambda spec: spec.update(workers=1, aggregation={"algorithm": "hitopk"}), "hitopk with one worker"),
    (lambda spec: spec.update(aggregation={"algorithm": "hitopk", "density": 0.5}), "about as much traffic as dense"),
    (lambda spec: spec.update(runPolicy={"ttlSecondsAfterFinished": 0}), "deletes the job, its status and its logs"),
    (lambda spec: spec.update(dataset={"uri": "s3://b", "cache": {"medium": "Memory"}}), "memoryLimit"),
    (lambda spec: (spec.update(workers=8), spec.pop("checkpoint")), "every restart begins at step 0"),
    (lambda spec: spec.update(aggregation={"algorithm": "torus2d", "density": 0.1}), "has no effect: torus2d"),
    (lambda spec: spec.update(aggregation={"algorithm": "int8", "density": 0.5}), "has no effect: int8"),
    (
        lambda spec: spec.update(
            setup={"requirements": ["a==1", "b>=2", "c @ https://h/c.whl", "d; python_version=='3'"]}
        ),
        "spec.setup.requirements: b>=2, d; python_version=='3': pods may install different versions",
    ),
    (lambda spec: spec.update(aggregation={"density": 0.1}), "has no effect: auto has no density"),
    (lambda spec: spec.update(runPolicy={"schedulingPolicy": {"minAvailable": 2}}), "ranks start when all 3 pods run"),
    (lambda spec: spec["template"]["spec"].update(terminationGracePeriodSeconds=5), "5 s may be too short"),
    (lambda spec: spec.update(runPolicy={"failurePolicy": {"rules": [MISSPELT_RULE]}}), "did you mean OOMKilled?"),
]


@pytest.mark.parametrize(("change", "words"), PROBABLE_MISTAKES)
def test_probable_mistakes_cause_a_warning(change: Callable[[dict[str, Any]], Any], words: str) -> None:
    job = copy.deepcopy(JOB)
    change(job["spec"])
    response = send_review(job)
    assert response["allowed"]
    assert [words in warning for warning in response["warnings"]] == [True]


@pytest.mark.parametrize(
    ("workers", "spread", "claim", "words"),
    [
        (
            2,
            "Node",
            {"spec": {"accessModes": ["ReadWriteOnce"]}},
            "c is ReadWriteOnce, but the workers may be on 2 nodes",
        ),
        (3, "None", {"spec": {"accessModes": ["ReadWriteOncePod"]}}, "may be on several nodes"),
        (2, "Node", {"spec": {"accessModes": ["ReadWriteOnce", "ReadWriteMany"]}}, ""),
        (1, "Node", {"spec": {"accessModes": ["ReadWriteOnce"]}}, ""),
        (2, "Node", None, ""),
        (2, "Node", {"spec": None}, ""),
    ],
)
def test_a_checkpoint_that_only_one_node_can_mount_is_warned_of(
    workers: int, spread: str, claim: Any, words: str
) -> None:
    claims_read: list[tuple[str, str]] = []
    job = change_field("spread", spread, change_field("workers", workers))

    def read_claim(namespace: str, name: str) -> Any:
        claims_read.append((namespace, name))
        return claim

    warning = warn_of_claim(TrainingJob.from_cluster(job), read_claim)
    assert words in warning
    assert bool(warning) == bool(words)
    assert claims_read == ([("team", "c")] if workers > 1 else [])


def test_a_dry_run_gets_the_same_answer() -> None:
    for job in (JOB, change_field("workers", 0)):
        request = {"uid": "7", "operation": "CREATE", "object": job, "namespace": "team"}
        assert review({"request": {**request, "dryRun": True}}) == review({"request": request})


def test_a_pinned_image_is_not_warned_of() -> None:
    assert send_review(change_field("template.spec.containers.0.image", "r:5000/i@sha256:0"))["warnings"] == []


@pytest.mark.parametrize("levels", [300, 5000])
def test_deep_nesting_is_refused_with_a_short_message(levels: int) -> None:
    nested: Any = {}
    for _ in range(levels):
        nested = {"a": nested}
    assert "spec.template: is nested too deeply" in explain_refusal(change_field("template.spec.x", nested))
    assert len(explain_refusal(change_field("template.spec.x", nested))) < 300


@given(jobs)
@settings(max_examples=100)
def test_a_job_may_always_be_applied_again(data: dict[str, Any]) -> None:
    assert explain_refusal(data, data) == explain_refusal(data) == ""
    full = {**data, "spec": TrainingJob.parse(data).spec.model_dump(by_alias=True, exclude_none=True)}
    assert explain_refusal(data, full) == explain_refusal(full, data) == "", "written defaults are not a change"


def test_if_there_are_very_many_mistakes_the_first_are_named_and_the_rest_are_counted() -> None:
    """The answer to a caller must not be longer than its request."""
    message = send_review(change_field("template.spec.containers.0.args", [1] * 1000))["status"]["message"]
    assert "has 1000 mistakes" in message
    assert "args[49]" in message
    assert "args[50]" not in message
    assert "… and 950 more" in message
    longest = send_review(change_field("template.spec.containers.0.args", [{"w" * 100_000: 1}]))["status"]["message"]
    assert len(longest) < 2000
