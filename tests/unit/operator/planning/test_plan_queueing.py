"""`plan` beside a simulated Kueue that admits, evicts and frees whole jobs."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import kueue_crds
import pytest
from simulated_cluster import SimulatedCluster
from simulated_job import build_job
from simulated_kubelets import RANK_FAILED
from simulated_kueue import WORKLOAD, SimulatedKueue

from topkube_operator.model.observed import Policy, Trouble

POLICY = Policy(seed=b"s" * 32, workloads="kueue.x-k8s.io/v1beta1")
SPOT = {
    "nodeLabels": {"pool": "spot"},
    "nodeTaints": [{"key": "spot"}],
    "tolerations": [{"key": "spot", "operator": "Exists"}],
}
LABEL_CHANGES = pytest.mark.parametrize(
    "labels", [{}, {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/pod-group-name": "mine"}]
)


def create_queued_job(
    labels: dict[str, str] | None = None, policy: Policy = POLICY, **spec: Any
) -> tuple[SimulatedCluster, SimulatedKueue]:
    data = build_job(**spec)
    data["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team", **(labels or {})}
    world = SimulatedCluster(data, policy)
    kueue = SimulatedKueue(world, {"spot": SPOT})
    world.reconcile()
    return world, kueue


def start_admitted_job(**spec: Any) -> tuple[SimulatedCluster, SimulatedKueue]:
    world, kueue = create_queued_job(**spec)
    kueue.admit()
    world.start_ranks()
    assert world.status["phase"] == "Running"
    return world, kueue


def change_labels(world: SimulatedCluster, labels: dict[str, str]) -> None:
    """Replace the labels of the job, and reconcile."""
    assert world.job is not None
    world.job["metadata"]["labels"] = labels
    world.reconcile()


def test_a_job_with_a_queue_asks_for_admission_and_has_no_pods_until_then() -> None:
    world, kueue = create_queued_job(launcher={"resources": {"requests": {"cpu": "1"}}})
    assert (world.status["phase"], world.pods, list(world.children)) == ("Suspended", {}, [WORKLOAD])
    assert (world.find_condition("Suspended")["reason"], world.status.get("attempt")) == ("Queued", 0)
    sets = {pods["name"]: (pods["count"], pods["template"]["spec"]) for pods in kueue.spec["podSets"]}
    assert (kueue.spec["queueName"], {name: count for name, (count, _) in sets.items()}) == (
        "team",
        {"launcher": 1, "worker": 2},
    )
    assert sets["launcher"][1]["containers"][0]["resources"] == {"requests": {"cpu": "1"}}
    assert "podAntiAffinity" in sets["worker"][1]["affinity"]
    assert "env" not in sets["worker"][1]["containers"][0], "neither tokens nor plans"
    kueue.refuse("no quota for cpu")
    world.reconcile()
    assert "no quota for cpu" in world.find_condition("Suspended")["message"]
    assert not world.plan().status


def test_an_admitted_job_runs_on_the_assigned_nodes_and_reports_that_it_runs() -> None:
    world, kueue = create_queued_job()
    update = {"name": "worker", "labels": {"booking": "b-1"}, "nodeSelector": {"zone": "a"}}
    kueue.admit([{"name": "check", "state": "Ready", "podSetUpdates": [update]}])
    world.start_ranks()
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 1)
    assert (world.events.count("Admitted"), world.events.count("Resumed")) == (1, 0)
    worker, launcher = world.manifests["train-worker-1-1-uid-1"], world.manifests["train-launcher-1-uid-1"]
    assert worker["spec"]["nodeSelector"] == {"pool": "spot", "zone": "a"}
    assert launcher["spec"]["nodeSelector"] == {"pool": "spot"}
    for pod in (worker, launcher):
        assert pod["spec"]["tolerations"] == SPOT["tolerations"]
        assert "kueue.x-k8s.io/queue-name" not in pod["metadata"]["labels"], "Kueue would queue each pod again"
    assert worker["metadata"]["labels"]["booking"] == "b-1"
    assert (kueue.find_condition("PodsReady")["status"], kueue.find_condition("PodsReady")["reason"]) == (
        "True",
        "Started",
    )
    assert world.plan().is_empty


@pytest.mark.parametrize(("code", "reason"), [(0, "Succeeded"), (1, "Failed")])
def test_a_job_that_has_ended_gives_its_quota_back_when_no_pod_runs(code: int, reason: str) -> None:
    world, kueue = start_admitted_job(runPolicy={"backoffLimit": 0})
    world.end_launcher(code, RANK_FAILED if code else None)
    world.reconcile()
    assert world.status["phase"] == reason
    assert kueue.holds_quota(), "the workers still run"
    world.wait(30)
    world.reconcile()
    world.run()
    world.reconcile()
    assert (kueue.holds_quota(), kueue.find_condition("Finished")["reason"]) == (False, reason)
    assert list(world.children) == [WORKLOAD], "it shows how the job ended"


@pytest.mark.parametrize(
    ("reason", "requeued"), [("Preempted", "True"), ("PodsReadyTimeout", "False"), ("AdmissionCheck", "False")]
)
def test_an_eviction_removes_all_pods_then_gives_the_quota_back(reason: str, requeued: str) -> None:
    world, kueue = start_admitted_job()
    kueue.evict(reason)
    world.reconcile()
    assert kueue.holds_quota(), "until the ranks have saved their state"
    assert world.find_condition("Suspended")["reason"] == "Evicted"
    world.run()
    world.reconcile()
    assert (world.pods, list(world.children), kueue.holds_quota()) == ({}, [WORKLOAD], False)
    assert kueue.workload is not None
    assert "admission" not in kueue.workload.content["status"]
    for kind in ("Admitted", "PodsReady"):
        assert kueue.find_condition(kind)["status"] == "False"
    assert kueue.find_condition("Requeued")["status"] == requeued
    assert kueue.may_be_admitted() == (requeued == "True"), "Kueue decides how long the pause is"
    kueue.refuse("no quota for pods")
    world.reconcile()
    waits = world.find_condition("Suspended")
    assert waits["reason"] == "Evicted"
    assert waits["message"].endswith("not admitted the job again: no quota for pods")
    world.wait(60)
    if requeued == "False":
        kueue.end_pause()
    assert kueue.may_be_admitted()
    kueue.admit()
    world.start_ranks()
    status = world.status
    assert (status["phase"], status["attempt"], status["restarts"], status["disruptions"]) == ("Running", 2, 0, 0)
    assert not world.violations


def test_suspending_gives_the_quota_back_and_resuming_asks_again() -> None:
    world, kueue = start_admitted_job()
    world.edit_policy(suspend=True)
    world.reconcile()
    assert kueue.holds_quota()
    world.run()
    world.reconcile()
    assert (world.pods, world.children, kueue.holds_quota()) == ({}, {}, False)
    world.edit_policy(suspend=False)
    world.reconcile()
    assert (world.find_condition("Suspended")["reason"], world.pods) == ("Queued", {})
    kueue.admit()
    world.start_ranks()
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 2)


def test_a_restart_stays_admitted_and_reports_that_it_recovers() -> None:
    world, kueue = start_admitted_job()
    world.end_launcher(1, RANK_FAILED)
    world.end("train-worker-1-1-uid-1", 1)
    world.reconcile()
    assert (kueue.find_condition("PodsReady")["status"], kueue.find_condition("PodsReady")["reason"]) == (
        "False",
        "WaitForRecovery",
    )
    assert kueue.holds_quota()
    world.start_ranks()
    assert world.manifests["train-worker-1-2-uid-1"]["spec"]["nodeSelector"] == {"pool": "spot"}
    assert (kueue.find_condition("PodsReady")["status"], kueue.find_condition("PodsReady")["reason"]) == (
        "True",
        "Recovered",
    )


def test_a_deleted_workload_stops_the_job_which_asks_again() -> None:
    world, kueue = start_admitted_job()
    world.children.pop(WORKLOAD)
    world.reconcile()
    assert world.find_condition("Suspended")["reason"] == "Queued"
    assert all(pod.deletion is not None for pod in world.pods.values())
    assert kueue.workload is None, "not before the pods are gone"
    world.run()
    world.reconcile()
    assert (world.pods, list(world.children)) == ({}, [WORKLOAD])


@pytest.mark.parametrize(
    ("labels", "template", "reference"),
    [
        ({"kueue.x-k8s.io/priority-class": "urgent"}, {}, ("WorkloadPriorityClass", "urgent")),
        ({}, {"priorityClassName": "high"}, ("PriorityClass", "high")),
    ],
)
@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_the_priority_is_that_of_the_jobs_class(
    labels: dict[str, str], template: dict[str, str], reference: tuple[str, str], version: str
) -> None:
    data = build_job()
    data["spec"]["template"]["spec"] |= template
    data["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team", **labels}
    world = SimulatedCluster(data, Policy(seed=b"s" * 32, workloads=f"kueue.x-k8s.io/{version}"))
    world.objects[reference] = {"value": 1000}
    world.reconcile()
    spec = SimulatedKueue(world).spec
    assert spec["priority"] == 1000
    kind, name = reference
    group = "kueue.x-k8s.io" if kind.startswith("Workload") else "scheduling.k8s.io"
    if version == "v1beta1":
        assert (spec["priorityClassName"], spec["priorityClassSource"]) == (name, f"{group}/{kind.lower()}")
    else:
        assert spec["priorityClassRef"] == {"group": group, "kind": kind, "name": name}


def test_a_flavor_that_cannot_be_read_is_named_and_no_pod_is_made() -> None:
    world, kueue = create_queued_job()
    world.objects.clear()
    kueue.admit()
    plan = world.reconcile()
    assert world.find_condition("Created")["reason"] == "FlavorNotFound"
    assert (world.pods, plan.requeue) == ({}, 10.0)


def test_a_workload_that_cannot_be_made_is_named() -> None:
    world, _ = create_queued_job()
    world.children.clear()
    world.troubles[WORKLOAD] = Trouble("Refused", "no right")
    plan = world.plan()
    conditions = {entry["type"]: entry for entry in plan.status["conditions"]}
    assert conditions["Suspended"]["reason"] == "Refused"


def test_a_queued_job_may_change_its_queue() -> None:
    world, kueue = create_queued_job()
    assert world.job is not None
    world.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "other"
    world.reconcile()
    assert kueue.spec["queueName"] == "other"


@LABEL_CHANGES
def test_a_job_is_preempted_also_if_its_labels_leave_the_queue(labels: dict[str, str]) -> None:
    world, kueue = start_admitted_job()
    change_labels(world, labels)
    assert world.status["phase"] == "Running"
    kueue.evict()
    world.reconcile()
    world.run()
    world.reconcile()
    assert (world.pods, world.status["phase"], kueue.holds_quota()) == ({}, "Suspended", False)
    assert kueue.spec["queueName"] == "team"
    kueue.admit()
    world.start_ranks()
    worker = world.manifests["train-worker-0-2-uid-1"]
    assert worker["spec"]["nodeSelector"] == {"pool": "spot"}
    assert not worker["metadata"]["labels"].keys() & {"kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name"}
    assert not world.violations


@LABEL_CHANGES
def test_a_job_gives_its_quota_back_at_its_end_also_if_its_labels_leave_the_queue(labels: dict[str, str]) -> None:
    world, kueue = start_admitted_job()
    change_labels(world, labels)
    world.end_launcher(0)
    world.reconcile()
    world.wait(30)
    world.reconcile()
    world.run()
    world.reconcile()
    assert (world.status["phase"], kueue.holds_quota()) == ("Succeeded", False)


@LABEL_CHANGES
def test_a_job_that_was_not_admitted_leaves_its_queue_only_by_a_suspension(labels: dict[str, str]) -> None:
    world, _ = create_queued_job()
    change_labels(world, labels)
    assert (world.pods, list(world.children), world.status["phase"]) == ({}, [WORKLOAD], "Suspended")
    world.edit_policy(suspend=True)
    world.reconcile()
    assert not world.children
    world.edit_policy(suspend=False)
    world.start_ranks()
    assert (world.status["phase"], WORKLOAD in world.children) == ("Running", False)


def test_a_colocated_launcher_is_a_pod_set_of_its_own() -> None:
    world, kueue = create_queued_job(launcher={"colocate": True})
    assert [(pods["name"], pods["count"]) for pods in kueue.spec["podSets"]] == [("launcher", 1), ("worker", 1)]
    kueue.admit()
    world.reconcile()
    assert world.manifests["train-worker-0-1-uid-1"]["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "launcher"


@pytest.mark.parametrize("labels", [{}, {"kueue.x-k8s.io/pod-group-name": "mine"}])
def test_without_workloads_or_with_a_pod_group_the_pods_have_the_labels(labels: dict[str, str]) -> None:
    policy = POLICY if labels else Policy(seed=b"s" * 32)
    world, _ = create_queued_job(labels, policy)
    assert world.pods
    assert WORKLOAD not in world.children
    pod = world.manifests["train-worker-0-1-uid-1"]["metadata"]["labels"]
    assert pod["kueue.x-k8s.io/queue-name"] == "team"


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_all_that_is_written_to_a_workload_is_valid_in_kueues_schema(version: str) -> None:
    """From the first request to the end, with an eviction. A field that the schema does not have would be dropped."""
    data = build_job(launcher={"template": {"metadata": {"labels": {"a": "b"}}}}, topology={"key": "zone"})
    data["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    data["spec"]["template"]["spec"] |= {
        "priorityClassName": "high",
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "x", "operator": "Exists"}],
        "initContainers": [{"name": "first", "image": "i"}],
    }
    world = SimulatedCluster(data, Policy(seed=b"s" * 32, workloads=f"kueue.x-k8s.io/{version}"))
    world.objects["PriorityClass", "high"] = {"value": 7}
    kueue, schema = SimulatedKueue(world), _close_schema(kueue_crds.find_schema("Workload", version))
    check = {"name": "c", "state": "Ready", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"}

    def validate() -> None:
        world.reconcile()
        assert kueue.workload is not None
        stored = {**world.manifests[WORKLOAD[1]], "status": kueue.workload.content["status"]}
        jsonschema.validate(stored, schema)

    validate()
    kueue.refuse("no quota")
    validate()
    kueue.admit([{**check, "podSetUpdates": [{"name": "worker", "nodeSelector": {"zone": "a"}}]}])
    world.start_ranks()
    validate()
    kueue.evict("PodsReadyTimeout")
    world.reconcile()
    world.run()
    validate()
    kueue.end_pause()
    kueue.admit()
    world.start_ranks()
    world.end_launcher(0)
    world.reconcile()
    world.wait(30)
    world.reconcile()
    world.run()
    validate()
    assert kueue.find_condition("Finished")["reason"] == "Succeeded"


def _close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also refuses the fields that an API server would drop."""
    closed = copy.deepcopy(schema)

    def close(part: dict[str, Any], *, is_whole: bool = False) -> None:
        part.pop("default", None)
        is_open = is_whole or part.get("x-kubernetes-preserve-unknown-fields") or "properties" not in part
        if part.get("type") == "object" and not is_open:
            part["additionalProperties"] = False
        inner = [*part.get("properties", {}).values(), part.get("items"), part.get("additionalProperties")]
        for entry in inner:
            if isinstance(entry, dict):
                close(entry)

    close(closed, is_whole=True)
    closed["properties"]["metadata"] = {"type": "object"}
    return closed
