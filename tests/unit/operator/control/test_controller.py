"""The controller with its threads and queue, on an API server in memory."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from replica import KEY, LAUNCHER_POD, Manifest, Replica, wait_until
from simulated_job import build_job

from topkube.job import KIND
from topkube.timestamps import format_timestamp
from topkube_operator.control.controller import Controller
from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.control.plan_executor import CALLS, ControlContext
from topkube_operator.model import names
from topkube_operator.model.observed import LauncherReport, Policy
from topkube_operator.planning import planner
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.work_queue import WorkQueue


def test_a_job_that_was_created_before_the_replica_could_write_needs_no_other_event(replica: Replica) -> None:
    replica.server.acting = False  # a replica writes nothing before it has listed everything
    replica.create_job()
    wait_until(replica.is_idle)
    assert replica.server.list_names("Pod") == set()
    replica.server.acting = True
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))


def test_a_plan_that_a_late_renewal_of_the_lease_interrupts_is_finished(replica: Replica) -> None:
    def lose_lease(manifest: Manifest) -> None:
        replica.server.acting = False

    replica.server.before_create = lose_lease
    replica.create_job()
    wait_until(lambda: not replica.server.acting and replica.is_idle())
    assert replica.server.get(KIND, *KEY)["status"]["attempt"] == 1, "the status was written"
    assert replica.server.list_names("Pod") == set()
    replica.server.before_create = lambda manifest: None
    replica.server.acting = True
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))


def test_an_error_of_the_planner_becomes_an_event(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("'int' object is not iterable")

    with monkeypatch.context() as patch:
        patch.setattr(planner, "plan", fail)
        replica.create_job()
        wait_until(lambda: replica.recorded.events)
    namespace, reason, message = replica.recorded.events[0]
    assert (namespace, reason) == ("team", "OperatorError")
    assert "an error in the operator (TypeError: 'int' object is not iterable)" in message
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))


def test_an_object_of_another_job_is_reported_as_foreign(replica: Replica) -> None:
    replica.create_job("other")
    wait_until(lambda: replica.server.list_names("Service") == {"other"})
    owner = replica.server.get("Service", "team", "other")["metadata"]["ownerReferences"]
    labels = {names.JOB_NAME: "other"}
    metadata = {"name": "train", "namespace": "team", "ownerReferences": owner, "labels": labels}
    replica.server.store({"kind": "Service", "metadata": metadata, "spec": {}})
    replica.create_job()
    wait_until(lambda: replica.find_condition("Created").get("reason") == "ForeignObject")
    assert "does not belong to this job" in replica.find_condition("Created")["message"]


def test_a_job_waits_for_the_objects_of_an_earlier_job_of_the_same_name_to_go(replica: Replica) -> None:
    replica.create_job("other")
    wait_until(lambda: replica.server.list_names("Service") == {"other"})
    owner = copy.deepcopy(replica.server.get("Service", "team", "other")["metadata"]["ownerReferences"])
    owner[0] |= {"name": "train", "uid": "of-a-job-that-is-gone"}
    metadata = {"name": "train", "namespace": "team", "ownerReferences": owner, "labels": {}}
    replica.server.store({"kind": "Service", "metadata": metadata, "spec": {}})
    replica.create_job()
    wait_until(lambda: replica.find_condition("Created").get("reason") == "Terminating")
    with replica.server.lock:
        del replica.server.objects["Service", "team", "train"]  # as the garbage collector does
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))


@pytest.mark.parametrize("phase", ["Pending", "Failed"])
def test_pods_of_a_deleted_job_are_removed_if_nothing_runs_in_them(replica: Replica, phase: str) -> None:
    """The garbage collector has asked the pods to end, and the job is gone."""
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod") and replica.is_idle())
    with replica.server.lock:
        pods = [item for (kind, *_), item in replica.server.objects.items() if kind == "Pod"]
    requested_at = datetime.now(UTC) - timedelta(seconds=4)
    times = {
        "deletionTimestamp": format_timestamp(requested_at + timedelta(seconds=30)),
        "deletionGracePeriodSeconds": 30,
    }
    ended_state = {
        "terminated": {
            "exitCode": 1,
            "startedAt": format_timestamp(requested_at),
            "finishedAt": format_timestamp(requested_at),
        }
    }
    for pod in pods:
        name = pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"]
        containers = [{"name": name, "state": ended_state if phase == "Failed" else {"waiting": {}}}]
        changed = {**pod, "status": {"phase": phase, "containerStatuses": containers}}
        changed["metadata"] = {**pod["metadata"], **times}
        replica.cache.put("Pod", replica.server.store(changed))
    with replica.server.lock:
        del replica.server.objects[KIND, *KEY]
    replica.cache.remove_job(KEY, "uid-of-train")
    replica.queue.add(KEY)
    wait_until(lambda: replica.server.list_names("Pod") == set())


def test_a_stored_job_gets_a_warning_if_only_one_node_can_mount_its_claim(replica: Replica) -> None:
    """The warning is an Event in the job's namespace about the job's own claim. The webhook, which anybody may call,
    does not report claims."""
    replica.create_job(checkpoint={"claimName": "claim"})
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod") and replica.is_idle())
    assert replica.server.claims_read == [("team", "claim")], "the claim is read once"
    (event,) = [event for event in replica.recorded.events if event[1] == "CheckpointClaim"]
    assert event[0] == "team"
    assert "claim is ReadWriteOnce" in event[2]


# Storms.


def test_a_policy_engine_that_changes_a_child_back_is_named_and_writes_become_rarer(replica: Replica) -> None:
    def remove_ingress(item: Manifest) -> bool:
        if (item["kind"], item["metadata"]["name"]) != ("NetworkPolicy", "train-worker"):
            return False
        item["spec"]["ingress"] = []
        return True

    replica.server.change_back = remove_ingress
    replica.create_job()
    wait_until(lambda: replica.find_condition("Created").get("reason") == "Contested")
    message = replica.find_condition("Created")["message"]
    for words in (
        "NetworkPolicy train-worker",
        "changes ingress[0]",
        "kyverno",
        "Next: exempt",
        "--show-managed-fields",
    ):
        assert words in message
    assert replica.find_condition("Created")["status"] == "True", "pods are created nevertheless"
    wait_until(replica.is_idle)
    assert "Contested" in replica.recorded.reasons
    assert replica.server.written.count(("NetworkPolicy", "train-worker")) <= 4


def test_an_overloaded_api_server_gets_the_time_that_it_asks_for_and_the_status_reports_it(replica: Replica) -> None:
    calls: list[str] = []

    def refuse(manifest: Manifest) -> None:
        calls.append(manifest["metadata"]["name"])
        raise ApiError(429, "too many requests, please try again later", "TooManyRequests", wait=60.0)

    replica.server.before_create = refuse
    replica.create_job()
    wait_until(lambda: replica.find_condition("Created").get("reason") == "Throttled")
    assert "too many requests" in replica.find_condition("Created")["message"]
    wait_until(replica.is_idle)
    assert "Throttled" in replica.recorded.reasons
    assert len(calls) <= 4, "the first stage of children, tried once"
    due, _ = min(replica.queue._later)
    assert due - time.monotonic() > 50


def test_a_quota_that_is_used_up_does_not_cost_a_call_for_each_worker(replica: Replica) -> None:
    refused = list[str]()

    def refuse(manifest: Manifest) -> None:
        if manifest["kind"] == "Pod":
            refused.append(manifest["metadata"]["name"])
            time.sleep(0.01)
            raise ApiError(403, 'pods "train-worker-0" is forbidden: exceeded quota: gpus', "Forbidden")

    replica.server.before_create = refuse
    replica.create_job(workers=500, spread="None")
    wait_until(lambda: replica.find_condition("Created").get("reason") == "Refused")
    assert "exceeded quota" in replica.find_condition("Created")["message"]
    assert len(refused) <= 2 * CALLS, "calls that had begun, of at most two tries"


def test_a_quota_that_another_client_writes_at_the_same_time_delays_one_pod(replica: Replica) -> None:
    has_conflict = iter([True])

    def refuse(manifest: Manifest) -> None:
        if manifest["kind"] == "Pod" and next(has_conflict, False):
            raise ApiError(409, 'Operation cannot be fulfilled on resourcequotas "gpus"', "Conflict")

    replica.server.before_create = refuse
    replica.create_job(workers=50, spread="None")
    wait_until(lambda: len(replica.server.list_names("Pod")) >= 49)
    wait_until(lambda: len(replica.server.list_names("Pod")) == 51)
    assert "Conflict" in replica.recorded.reasons


def test_progress_alone_makes_no_plan_before_the_status_may_be_written() -> None:
    queue = WorkQueue()
    unused: Any = None
    context = ControlContext(unused, WatchCache(), queue, unused, OperatorMetrics(list))
    controller = Controller(context, lambda _: Policy(), lambda: True)
    report = LauncherReport(1, "Running", 2, (), datetime.now(UTC), {"step": 1})

    def is_woken_by(new_report: LauncherReport) -> bool:
        controller.receive_report(KEY, "uid-1", new_report)
        is_woken = queue.count_waiting() > 0
        if is_woken:
            assert queue.get() == KEY
            queue.done(KEY)
        return is_woken

    assert is_woken_by(report)
    controller._find_memory(KEY, "uid-1").patched_at = time.monotonic()
    assert not is_woken_by(replace(report, progress={"step": 2}))
    assert queue.count_scheduled() == 1
    assert not is_woken_by(replace(report, progress={"step": 3}))
    assert queue.count_scheduled() == 1
    assert is_woken_by(replace(report, progress={"step": 4, "failedCheckpoints": 1}))
    assert is_woken_by(replace(report, state="Succeeded"))


def test_a_webhook_that_fails_is_shown(replica: Replica) -> None:
    broken = True

    def fail(manifest: Manifest) -> None:
        if manifest["kind"] == "Pod" and broken:
            raise ApiError(500, 'failed calling webhook "x.example": connection refused', "InternalError")

    replica.server.before_create = fail
    replica.create_job()
    wait_until(lambda: replica.find_condition("Created").get("reason") == "ServerError")
    assert 'failed calling webhook "x.example"' in replica.find_condition("Created")["message"]
    broken = False
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))


# Finalizers.


def test_the_finalizer_of_a_job_that_is_gone_is_removed_and_others_are_left(replica: Replica) -> None:
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    with replica.server.lock:
        pod = replica.server.objects["Pod", "team", LAUNCHER_POD]
        pod["metadata"]["finalizers"].append("other.example/keep")
        del replica.server.objects[KIND, *KEY]
    replica.cache.remove_job(KEY, "uid-of-train")
    replica.queue.add(KEY)
    wait_until(lambda: names.ENDING not in replica.server.get("Pod", "team", LAUNCHER_POD)["metadata"]["finalizers"])
    assert replica.server.get("Pod", "team", LAUNCHER_POD)["metadata"]["finalizers"] == ["other.example/keep"]


def test_pods_of_a_job_that_was_deleted_while_no_operator_ran_are_released_without_another_event(
    replica: Replica,
) -> None:
    """A new operator lists these pods before it leads. No later event names them."""
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    replica.server.acting = False
    with replica.server.lock:
        del replica.server.objects[KIND, *KEY]
    replica.cache.remove_job(KEY, "uid-of-train")
    replica.queue.add(KEY)
    wait_until(replica.is_idle)
    replica.server.acting = True
    wait_until(lambda: names.ENDING not in replica.server.get("Pod", "team", LAUNCHER_POD)["metadata"]["finalizers"])


def test_a_launcher_whose_owner_reference_somebody_removed_is_released(replica: Replica) -> None:
    """Its job was deleted with --cascade=orphan while no operator ran. The pod, and its namespace, stayed for ever."""
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    pod = replica.server.get("Pod", "team", LAUNCHER_POD)
    del pod["metadata"]["ownerReferences"]
    pod["metadata"]["finalizers"].append("example.com/other")
    replica.cache.remove_job(KEY, "uid-of-train")
    replica.cache.put("Pod", replica.server.store(pod))
    wait_until(
        lambda: replica.server.get("Pod", "team", LAUNCHER_POD)["metadata"]["finalizers"] == ["example.com/other"]
    )
    wait_until(lambda: not replica.cache.list_ownerless_pods())


def test_a_pod_whose_change_is_refused_does_not_hold_up_other_pods_without_a_job(replica: Replica) -> None:
    """A policy in one namespace denies changes of pods there."""
    release = replica.server.remove_finalizer

    def refuse_first(namespace: str, name: str, uid: str) -> Manifest:
        if name == "first":
            raise ApiError(403, "denied by policy.example", "Forbidden")
        return release(namespace, name, uid)

    replica.server.remove_finalizer = refuse_first  # type: ignore[method-assign]
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    launcher = replica.server.get("Pod", "team", LAUNCHER_POD)
    replica.server.acting = False
    for name in ("first", "second"):
        pod = copy.deepcopy(launcher)
        pod["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
        del pod["metadata"]["ownerReferences"]
        replica.cache.put("Pod", replica.server.store(pod))
    assert len(replica.cache.list_ownerless_pods()) == 2
    replica.server.acting = True
    wait_until(lambda: replica.cache.list_ownerless_pods() == [(("team", "first"), "uid-of-first")])


def test_without_the_right_to_patch_pods_a_job_continues(replica: Replica) -> None:
    """The operator is newer than its roles."""

    def refuse(*_: object) -> Manifest:
        raise ApiError(403, "pods is forbidden: cannot patch resource pods", "Forbidden")

    replica.server.remove_finalizer = refuse  # type: ignore[method-assign]
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    ended_state = {"terminated": {"exitCode": 1, "startedAt": format_timestamp(datetime.now(UTC)), "finishedAt": None}}
    pod = replica.server.get("Pod", "team", LAUNCHER_POD)
    pod["status"] = {"phase": "Failed", "containerStatuses": [{"name": "launcher", "state": ended_state}]}
    replica.cache.put("Pod", replica.server.store(pod))
    replica.queue.add(KEY)
    wait_until(lambda: "train-launcher-2-uid-o" in replica.server.list_names("Pod"))


def test_a_pod_that_was_listed_before_its_job_stays_held(replica: Replica) -> None:
    """An operator that has just begun lists pods and jobs in any order."""
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    replica.cache._jobs._jobs.clear()
    replica.queue.add(KEY)
    wait_until(replica.is_idle)
    assert replica.server.get("Pod", "team", LAUNCHER_POD)["metadata"]["finalizers"] == [names.ENDING]


def test_a_completion_is_stored_before_its_pod_is_released(replica: Replica) -> None:
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    ended_state = {"terminated": {"exitCode": 0, "startedAt": format_timestamp(datetime.now(UTC)), "finishedAt": None}}
    pod = replica.server.get("Pod", "team", LAUNCHER_POD)
    pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "launcher", "state": ended_state}]}
    replica.cache.put("Pod", replica.server.store(pod))
    replica.queue.add(KEY)
    wait_until(lambda: not replica.server.get("Pod", "team", LAUNCHER_POD)["metadata"]["finalizers"])
    assert replica.server.get(KIND, *KEY)["status"]["phase"] == "Succeeded"


def test_a_pod_of_an_earlier_job_of_the_same_name_does_not_delay_the_job(replica: Replica) -> None:
    """The old pod stays: its node is lost, or it has a finalizer of another controller."""
    old = {
        "name": "train-worker-0-1-uid-e",
        "namespace": "team",
        "labels": {names.JOB_NAME: "train", names.ROLE: names.WORKER, names.WORKER_INDEX: "0", names.ATTEMPT: "1"},
        "ownerReferences": [names.build_owner_reference("train", "uid-earlier")],
        "finalizers": ["example.com/keep"],
        "deletionTimestamp": format_timestamp(datetime.now(UTC)),
    }
    replica.cache.put("Pod", replica.server.store({"kind": "Pod", "metadata": old, "spec": {"nodeName": "node-x"}}))
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    assert {"train-worker-0-1-uid-o", "train-worker-1-1-uid-o"} <= replica.server.list_names("Pod")
    wait_until(replica.is_idle)
    assert replica.server.get("Pod", "team", "train-worker-0-1-uid-e")["metadata"]["finalizers"] == ["example.com/keep"]
    assert replica.server.get(KIND, *KEY)["status"]["attempt"] == 1


def test_a_job_waits_for_a_pod_of_an_earlier_job_that_has_the_name_of_its_own_pod(replica: Replica) -> None:
    """The names of pods end in some letters of the job's UID. Two UIDs may share these letters, and the old pod may
    still be there."""
    old = {
        "name": "train-worker-0-1-uid-o",
        "namespace": "team",
        "labels": {names.JOB_NAME: "train"},
        "ownerReferences": [names.build_owner_reference("train", "uid-of-the-earlier")],
        "deletionTimestamp": format_timestamp(datetime.now(UTC)),
    }
    replica.server.store({"kind": "Pod", "metadata": old, "spec": {"nodeName": "node-x"}})
    replica.create_job()
    wait_until(lambda: replica.find_condition("Created").get("reason") == "Terminating")
    assert LAUNCHER_POD not in replica.server.list_names("Pod")


def test_the_end_of_a_group_is_reported_to_kueue_once(replica: Replica) -> None:
    queued_job = build_job()
    queued_job["metadata"]["labels"] = {names.KUEUE_QUEUE: "team"}
    replica.cache.put_job(replica.server.store(queued_job))
    replica.queue.add(KEY)
    wait_until(lambda: "train-launcher-1-uid-1" in replica.server.list_names("Pod"))
    ended = {"terminated": {"exitCode": 0, "startedAt": format_timestamp(datetime.now(UTC)), "finishedAt": None}}
    pod = replica.server.get("Pod", "team", "train-launcher-1-uid-1")
    pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "launcher", "state": ended}]}
    replica.cache.put("Pod", replica.server.store(pod))
    replica.queue.add(KEY)

    def list_marked_pods() -> set[str]:
        metadata = [replica.server.get("Pod", "team", name)["metadata"] for name in replica.server.list_names("Pod")]
        return {pod["name"] for pod in metadata if pod["annotations"].get(names.KUEUE_RETRIABLE) == "false"}

    wait_until(lambda: list_marked_pods() == replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
