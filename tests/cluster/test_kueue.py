"""Jobs in Kueue's queues, with Kueue's kinds on the real API server and a simulated Kueue that follows its protocol."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_queue import QUEUE_LABEL, ClusterQueue, PodGroup, serve_kueue_kinds
from operating import Jobs, OperatorProcess, build_shell_job
from target import Namespace, Target, wait_for

from topkube_operator.watch.api_client import ApiClient

pytestmark = pytest.mark.alone
POOL, FLAVOR, URGENT = "topkube.dev/test-pool", "test-spot", "test-urgent"
TOLERATION = {"key": "example.com/spot", "operator": "Exists"}
UNTIL_ENDED = "until [ -e /tmp/end ]; do sleep 0.2; done; exit $(cat /tmp/end)"
BOTH = pytest.mark.parametrize("kueue", ["v1beta1", "v1beta2"], indirect=True)
NEWEST = pytest.mark.parametrize("kueue", ["v1beta2"], indirect=True)


@pytest.fixture(scope="module")
def kueue(resting_cluster: Target, request: pytest.FixtureRequest) -> Iterator[str]:
    """Kueue's kinds in one version, a flavor for two labelled nodes, and a priority class."""
    version, cluster = str(request.param), ApiClient(str(resting_cluster.kubeconfig))
    nodes = resting_cluster.list_nodes()[:2]
    with serve_kueue_kinds(cluster, version):
        group = f"/apis/kueue.x-k8s.io/{version}"
        flavor = {"nodeLabels": {POOL: "spot"}, "tolerations": [TOLERATION]}
        cluster.call(
            "POST", f"{group}/resourceflavors", _build_kueue_object(version, "ResourceFlavor", FLAVOR, spec=flavor)
        )
        urgent = _build_kueue_object(version, "WorkloadPriorityClass", URGENT, value=1000)
        cluster.call("POST", f"{group}/workloadpriorityclasses", urgent)
        for node in nodes:
            resting_cluster.label_node(node, POOL, "spot")
        yield version
        for node in nodes:
            resting_cluster.label_node(node, POOL, None)


def _build_kueue_object(version: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": f"kueue.x-k8s.io/{version}", "kind": kind, "metadata": {"name": name}, **fields}


@pytest.fixture
def queue(jobs: Jobs, kueue: str) -> ClusterQueue:
    """A queue with a quota of three pods: the pods of one job."""
    return ClusterQueue(jobs.cluster, jobs.namespace, kueue, room=3, flavor=FLAVOR)


def build_queued_job(name: str, **labels: str) -> dict[str, Any]:
    """Return a job of three pods that runs until the test ends its ranks."""
    waiting = build_shell_job(name, UNTIL_ENDED)
    waiting["metadata"]["labels"] = {QUEUE_LABEL: "team", **labels}
    return waiting


def end_ranks(resting: Target, jobs: Jobs, name: str, code: int = 0) -> None:
    """End all ranks of a job with an exit code."""
    namespace = Namespace(resting, jobs.namespace)
    for pod in namespace.list_pods("worker", name):
        namespace.execute(pod.metadata.name, "sh", "-c", f"echo {code} > /tmp/end")


def is_running(jobs: Jobs, name: str) -> bool:
    return bool(jobs.read_status(name).get("phase") == "Running")


def find_waiting_condition(jobs: Jobs, name: str, reason: str) -> dict[str, Any]:
    """Return the condition Suspended if the job has no pods for this reason; empty otherwise."""
    conditions = jobs.read_status(name).get("conditions") or ()
    suspended = next((entry for entry in conditions if entry["type"] == "Suspended"), {})
    pods = [pod for pod in jobs.list_pods().values() if pod["metadata"]["labels"]["topkube.dev/job-name"] == name]
    return suspended if (suspended.get("status"), suspended.get("reason")) == ("True", reason) and not pods else {}


@BOTH
def test_a_job_waits_for_its_admission_runs_where_kueue_puts_it_and_gives_the_quota_back(
    resting_cluster: Target, jobs: Jobs, kueue: str, kubeconfig: Path, queue: ClusterQueue
) -> None:
    with OperatorProcess(str(kubeconfig), jobs.namespace).keep_running():
        jobs.create(build_queued_job("first", **{"kueue.x-k8s.io/priority-class": URGENT}))
        wait_for(lambda: find_waiting_condition(jobs, "first", "Queued"), "the job to wait without pods")
        spec = wait_for(lambda: queue.find_workload("first"), "the Workload")["spec"]
        assert {entry["name"]: entry["count"] for entry in spec["podSets"]} == {"launcher": 1, "worker": 2}
        assert spec["priority"] == 1000
        for entry in spec["podSets"]:
            _check_pod_template(jobs, entry["template"])

        queue.room = 2
        queue.reconcile()
        wait_for(
            lambda: "insufficient" in find_waiting_condition(jobs, "first", "Queued").get("message", ""),
            "the reason that Kueue gives",
        )
        moved = {"metadata": {"labels": {QUEUE_LABEL: "other"}}}
        jobs.cluster.patch("TrainingJob", jobs.namespace, "first", moved)
        queue.act_until(lambda: queue.find_workload("first")["spec"]["queueName"] == "other", "the other queue")

        queue.room = 3
        queue.act_until(lambda: is_running(jobs, "first"), "the admitted job to run")
        pods = jobs.list_pods()
        assert len(pods) == 3
        for name, pod in pods.items():
            metadata, pod_spec = pod["metadata"], pod["spec"]
            assert pod_spec["nodeSelector"][POOL] == "spot", name
            assert TOLERATION in pod_spec["tolerations"], name
            assert metadata["labels"]["kueue.x-k8s.io/podset"] == metadata["labels"]["topkube.dev/role"]
            assert QUEUE_LABEL not in metadata["labels"], "Kueue would queue the pod again"
        queue.act_until(lambda: queue.read_condition("first", "PodsReady") == ("True", "Started"), "PodsReady")

        end_ranks(resting_cluster, jobs, "first")
        jobs.wait_phase("first", "Succeeded")
        queue.act_until(lambda: queue.read_condition("first", "Finished") == ("True", "Succeeded"), "Finished")
        assert not queue.holds_quota("first")


def _check_pod_template(jobs: Jobs, template: dict[str, Any]) -> None:
    """Let the API server check a pod set's template as a pod."""
    spec = {**copy.deepcopy(template["spec"]), "automountServiceAccountToken": False}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "dry"}, "spec": spec}
    path = f"/api/v1/namespaces/{jobs.namespace}/pods"
    jobs.cluster.call("POST", path, pod, query={"dryRun": "All"})


@NEWEST
def test_a_preempted_job_leaves_its_place_and_continues_later(
    resting_cluster: Target, jobs: Jobs, kubeconfig: Path, queue: ClusterQueue
) -> None:
    """The quota moves only when the pods of the preempted job are gone. Its preemption counts neither as a restart nor
    as a disruption."""
    with OperatorProcess(str(kubeconfig), jobs.namespace).keep_running():
        jobs.create(build_queued_job("low"))
        queue.act_until(lambda: is_running(jobs, "low"), "the first job to run")
        jobs.create(build_queued_job("high", **{"kueue.x-k8s.io/priority-class": URGENT}))
        queue.act_until(lambda: is_running(jobs, "high"), "the second job to run", 180)
        assert queue.evictions == ["low-workload"]
        queue.act_until(lambda: find_waiting_condition(jobs, "low", "Evicted"), "the status of the preempted job")
        assert queue.read_condition("low", "Requeued") == ("True", "Preempted")
        assert queue.read_condition("low", "PodsReady") == ("False", "WaitForStart")

        end_ranks(resting_cluster, jobs, "high", 3)
        assert jobs.wait_failure("high")["exitCode"] == 3
        queue.act_until(
            lambda: queue.read_condition("high", "Finished") == ("True", "Failed"), "the end of the failed job", 180
        )
        queue.act_until(lambda: is_running(jobs, "low"), "the preempted job to run again")
        status = jobs.read_status("low")
        assert (status["attempt"], status["restarts"], status["disruptions"]) == (2, 0, 0)
        end_ranks(resting_cluster, jobs, "low")
        jobs.wait_phase("low", "Succeeded")


@NEWEST
def test_suspension_gives_the_quota_to_another_job(
    resting_cluster: Target, jobs: Jobs, kubeconfig: Path, queue: ClusterQueue
) -> None:
    with OperatorProcess(str(kubeconfig), jobs.namespace).keep_running():
        jobs.create(build_queued_job("first"))
        queue.act_until(lambda: is_running(jobs, "first"), "the first job to run")
        jobs.create(build_queued_job("second"))
        queue.act_until(lambda: queue.read_condition("second", "QuotaReserved")[0] == "False", "the second job to wait")
        _suspend(jobs, "first", True)
        queue.act_until(lambda: is_running(jobs, "second"), "the second job to run", 180)
        assert queue.find_workload("first") == {}, "a suspended job does not wait in the queue"
        _suspend(jobs, "first", False)
        queue.act_until(lambda: find_waiting_condition(jobs, "first", "Queued"), "the first job to wait")
        end_ranks(resting_cluster, jobs, "second")
        queue.act_until(lambda: is_running(jobs, "first"), "the first job to run again", 180)
        assert jobs.read_status("first")["attempt"] == 2


@NEWEST
def test_after_other_evictions_kueue_decides_when_the_job_is_queued_again(
    jobs: Jobs, kubeconfig: Path, queue: ClusterQueue
) -> None:
    with OperatorProcess(str(kubeconfig), jobs.namespace).keep_running():
        jobs.create(build_queued_job("slow"))
        queue.act_until(lambda: is_running(jobs, "slow"), "the job to run")
        queue.evict("slow", "PodsReadyTimeout")
        queue.act_until(lambda: not queue.holds_quota("slow"), "the quota to be free", 180)
        assert queue.read_condition("slow", "Requeued") == ("False", "PodsReadyTimeout")
        queue.act_until(lambda: find_waiting_condition(jobs, "slow", "Evicted"), "the status to say why the job waits")
        queue.reconcile()
        assert not queue.holds_quota("slow"), "the pause is not over"
        queue.end_pause("slow")
        queue.act_until(lambda: is_running(jobs, "slow"), "the job to run after the pause")

        queue.set_active("slow", False)
        queue.act_until(lambda: find_waiting_condition(jobs, "slow", "Evicted"), "the deactivated job to stop", 180)
        queue.act_until(lambda: not queue.holds_quota("slow"), "the quota to be free")
        assert queue.read_condition("slow", "Requeued") == ("False", "Deactivated")
        queue.set_active("slow", True)
        queue.act_until(lambda: is_running(jobs, "slow"), "the job to run again")
        status = jobs.read_status("slow")
        assert (status["attempt"], status["restarts"], status["disruptions"]) == (3, 0, 0)


@NEWEST
def test_a_pod_group_replaces_its_pods_and_frees_its_quota_when_the_job_has_failed(
    jobs: Jobs, kubeconfig: Path, queue: ClusterQueue
) -> None:
    """Attempt 1 fails and its pods are replaced within the group, then attempt 2 fails. The group never has more pods
    than Kueue allows."""
    with OperatorProcess(str(kubeconfig), jobs.namespace).keep_running():
        grouped = build_shell_job("grouped", "exit 3", runPolicy={"backoffLimit": 1})
        grouped["metadata"]["labels"] = {QUEUE_LABEL: "team", "kueue.x-k8s.io/pod-group-name": "mine"}
        jobs.create(grouped)
        group = PodGroup(jobs.cluster, jobs.namespace, "mine")
        group.act_until(lambda: group.holds_quota, "the group to be complete")
        assert group.roles == {"launcher": 1, "worker": 2}
        group.act_until(lambda: jobs.read_status("grouped").get("phase") == "Failed", "both attempts to fail", 240)
        assert jobs.read_status("grouped")["restarts"] == 1
        group.act_until(lambda: not group.holds_quota, "the quota of the group to be free", 180)
        assert queue.find_workload("grouped") == {}, "the pods are queued, not the job"


def _suspend(jobs: Jobs, name: str, is_suspended: bool) -> None:
    change = {"spec": {"runPolicy": {"suspend": is_suspended}}}
    jobs.cluster.patch("TrainingJob", jobs.namespace, name, change)
