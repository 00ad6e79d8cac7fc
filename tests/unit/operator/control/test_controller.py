"""The controller with its threads and queue, on an API server in memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from house import KEY, House, Thing, wait_until
from simulated import job

from topkube.job import KIND
from topkube.timestamps import format_timestamp
from topkube_operator.model import names
from topkube_operator.watch.api_client import ApiError


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.controller.stop()


def test_a_job_that_came_before_this_replica_could_write_is_taken_up_without_another_event(house: House) -> None:
    house.server.acting = False  # it has not listed everything yet
    house.create_job()
    wait_until(house.is_idle)
    assert house.server.names("Pod") == set()
    house.server.acting = True
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))


def test_what_a_late_renewal_of_the_lease_interrupted_is_finished(house: House) -> None:
    def lapse(manifest: Thing) -> None:
        house.server.acting = False

    house.server.before_create = lapse
    house.create_job()
    wait_until(lambda: not house.server.acting and house.is_idle())
    assert house.server.get(KIND, *KEY)["status"]["attempt"] == 1, "the status was written"
    assert house.server.names("Pod") == set()
    house.server.before_create = lambda manifest: None
    house.server.acting = True
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))


def test_an_object_of_another_job_is_reported_as_foreign(house: House) -> None:
    house.create_job("other")
    wait_until(lambda: house.server.names("Service") == {"other"})
    owner = house.server.get("Service", "team", "other")["metadata"]["ownerReferences"]
    labels = {names.JOB_NAME: "other"}
    metadata = {"name": "train", "namespace": "team", "ownerReferences": owner, "labels": labels}
    house.server.keep({"kind": "Service", "metadata": metadata, "spec": {}})
    house.create_job()
    wait_until(lambda: house.condition("Created").get("reason") == "ForeignObject")
    assert "does not belong to this job" in house.condition("Created")["message"]


def test_what_an_earlier_job_of_the_name_left_is_waited_for(house: House) -> None:
    house.create_job("other")
    wait_until(lambda: house.server.names("Service") == {"other"})
    owner = copy.deepcopy(house.server.get("Service", "team", "other")["metadata"]["ownerReferences"])
    owner[0] |= {"name": "train", "uid": "of-a-job-that-is-gone"}
    metadata = {"name": "train", "namespace": "team", "ownerReferences": owner, "labels": {}}
    house.server.keep({"kind": "Service", "metadata": metadata, "spec": {}})
    house.create_job()
    wait_until(lambda: house.condition("Created").get("reason") == "Terminating")
    with house.server.lock:
        del house.server.objects["Service", "team", "train"]  # the garbage collector was there
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))


@pytest.mark.parametrize("phase", ["Pending", "Failed"])
def test_a_kubelet_that_holds_what_does_not_run_keeps_no_deleted_job(house: House, phase: str) -> None:
    """The garbage collector has asked the pods to end, and the job is gone."""
    house.create_job()
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod") and house.is_idle())
    with house.server.lock:
        pods = [item for (kind, *_), item in house.server.objects.items() if kind == "Pod"]
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
        house.store.put("Pod", house.server.keep(changed))
    with house.server.lock:
        del house.server.objects[KIND, *KEY]
    house.store.remove_job(KEY, "uid-of-train")
    house.queue.add(KEY)
    wait_until(lambda: house.server.names("Pod") == set())


def test_of_a_claim_that_only_one_node_can_mount_the_stored_job_is_warned(house: House) -> None:
    """Not by the webhook, which anybody may ask: by an Event in the job's own namespace, for the job's own claim."""
    house.create_job(checkpoint={"claimName": "claim"})
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod") and house.is_idle())
    assert house.server.claims_read == [("team", "claim")], "once"
    (event,) = [event for event in house.notes.events if event[1] == "CheckpointClaim"]
    assert event[0] == "team"
    assert "claim is ReadWriteOnce" in event[2]


# Storms.


def test_a_policy_engine_that_changes_a_child_back_is_named_and_written_to_less_and_less_often(house: House) -> None:
    def strip(item: Thing) -> bool:
        if (item["kind"], item["metadata"]["name"]) != ("NetworkPolicy", "train-worker"):
            return False
        item["spec"]["ingress"] = []
        return True

    house.server.changed_back = strip
    house.create_job()
    wait_until(lambda: house.condition("Created").get("reason") == "Contested")
    message = house.condition("Created")["message"]
    for words in (
        "NetworkPolicy train-worker",
        "changes ingress[0]",
        "kyverno",
        "Next: exempt",
        "--show-managed-fields",
    ):
        assert words in message
    assert house.condition("Created")["status"] == "True", "pods are made all the same"
    wait_until(house.is_idle)
    assert "Contested" in house.notes.reasons
    assert house.server.written.count(("NetworkPolicy", "train-worker")) <= 4


def test_an_overloaded_api_server_gets_the_time_that_it_asks_for_and_the_status_reports_it(house: House) -> None:
    def refuse(manifest: Thing) -> None:
        calls.append(manifest["metadata"]["name"])
        raise ApiError(429, "too many requests, please try again later", "TooManyRequests", wait=60.0)

    calls: list[str] = []
    house.server.before_create = refuse
    house.create_job()
    wait_until(lambda: house.condition("Created").get("reason") == "Throttled")
    assert "too many requests" in house.condition("Created")["message"]
    wait_until(house.is_idle)
    assert "Throttled" in house.notes.reasons
    assert len(calls) <= 4, "one stage, once"
    due, _ = min(house.queue._later)
    assert due - time.monotonic() > 50


def test_a_webhook_that_fails_is_shown(house: House) -> None:
    def fail(manifest: Thing) -> None:
        if manifest["kind"] == "Pod" and broken:
            raise ApiError(500, 'failed calling webhook "x.example": connection refused', "InternalError")

    broken = True
    house.server.before_create = fail
    house.create_job()
    wait_until(lambda: house.condition("Created").get("reason") == "ServerError")
    assert 'failed calling webhook "x.example"' in house.condition("Created")["message"]
    broken = False
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))


# Finalizers.


def test_the_finalizer_of_a_job_that_is_gone_is_removed_and_others_are_left(house: House) -> None:
    house.create_job()
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))
    with house.server.lock:
        pod = house.server.objects["Pod", "team", "train-launcher-1"]
        pod["metadata"]["finalizers"].append("other.example/keep")
        del house.server.objects[KIND, *KEY]
    house.store.remove_job(KEY, "uid-of-train")
    house.queue.add(KEY)
    wait_until(
        lambda: names.ENDING not in house.server.get("Pod", "team", "train-launcher-1")["metadata"]["finalizers"]
    )
    assert house.server.get("Pod", "team", "train-launcher-1")["metadata"]["finalizers"] == ["other.example/keep"]


def test_pods_of_a_job_that_went_while_no_operator_ran_are_released_without_another_event(house: House) -> None:
    """A new operator lists these pods before it leads. No later event names them."""
    house.create_job()
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))
    wait_until(house.is_idle)
    house.server.acting = False
    with house.server.lock:
        del house.server.objects[KIND, *KEY]
    house.store.remove_job(KEY, "uid-of-train")
    house.queue.add(KEY)
    wait_until(house.is_idle)
    house.server.acting = True
    wait_until(
        lambda: names.ENDING not in house.server.get("Pod", "team", "train-launcher-1")["metadata"]["finalizers"]
    )


def test_without_the_right_to_patch_pods_a_job_continues(house: House) -> None:
    """The operator is newer than its roles."""

    def refuse(*_: object) -> Thing:
        raise ApiError(403, "pods is forbidden: cannot patch resource pods", "Forbidden")

    house.server.release = refuse  # type: ignore[method-assign]
    house.create_job()
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))
    wait_until(house.is_idle)
    ended_state = {"terminated": {"exitCode": 1, "startedAt": format_timestamp(datetime.now(UTC)), "finishedAt": None}}
    pod = house.server.get("Pod", "team", "train-launcher-1")
    pod["status"] = {"phase": "Failed", "containerStatuses": [{"name": "launcher", "state": ended_state}]}
    house.store.put("Pod", house.server.keep(pod))
    house.queue.add(KEY)
    wait_until(lambda: "train-launcher-2" in house.server.names("Pod"))


def test_a_pod_that_was_listed_before_its_job_stays_held(house: House) -> None:
    """An operator that has just begun lists pods and jobs in any order."""
    house.create_job()
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))
    wait_until(house.is_idle)
    house.store._jobs.clear()
    house.queue.add(KEY)
    wait_until(house.is_idle)
    assert house.server.get("Pod", "team", "train-launcher-1")["metadata"]["finalizers"] == [names.ENDING]


def test_a_completion_is_stored_before_its_pod_is_let_go(house: House) -> None:
    house.create_job()
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))
    wait_until(house.is_idle)
    ended_state = {"terminated": {"exitCode": 0, "startedAt": format_timestamp(datetime.now(UTC)), "finishedAt": None}}
    pod = house.server.get("Pod", "team", "train-launcher-1")
    pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "launcher", "state": ended_state}]}
    house.store.put("Pod", house.server.keep(pod))
    house.queue.add(KEY)
    wait_until(lambda: not house.server.get("Pod", "team", "train-launcher-1")["metadata"]["finalizers"])
    assert house.server.get(KIND, *KEY)["status"]["phase"] == "Succeeded"


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_pod_of_an_earlier_job_blocks_its_name_until_its_node_is_lost(house: House, is_lost: bool) -> None:
    old = {
        "name": "train-worker-0-1",
        "namespace": "team",
        "labels": {names.JOB_NAME: "train"},
        "ownerReferences": [names.build_owner_reference("train", "uid-of-the-earlier")],
        "deletionTimestamp": format_timestamp(datetime.now(UTC)),
    }
    house.server.keep({"kind": "Pod", "metadata": old, "spec": {"nodeName": "node-x"}})
    ready = {"type": "Ready", "status": "Unknown" if is_lost else "True"}
    house.store.put_node({"metadata": {"name": "node-x"}, "status": {"conditions": [ready]}})
    house.create_job()
    if is_lost:
        wait_until(lambda: "train-launcher-2" in house.server.names("Pod"))
        assert {"train-worker-0-2", "train-worker-1-1"} <= house.server.names("Pod")
    else:
        wait_until(lambda: house.condition("Created").get("reason") == "Terminating")
        assert "train-launcher-1" not in house.server.names("Pod")


def test_the_end_of_a_group_is_reported_to_kueue_once(house: House) -> None:
    grouped = job()
    grouped["metadata"]["labels"] = {names.KUEUE_QUEUE: "team"}
    house.store.put_job(house.server.keep(grouped))
    house.queue.add(KEY)
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))
    over = {"terminated": {"exitCode": 0, "startedAt": format_timestamp(datetime.now(UTC)), "finishedAt": None}}
    pod = house.server.get("Pod", "team", "train-launcher-1")
    pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "launcher", "state": over}]}
    house.store.put("Pod", house.server.keep(pod))
    house.queue.add(KEY)

    def told() -> set[str]:
        metadata = [house.server.get("Pod", "team", name)["metadata"] for name in house.server.names("Pod")]
        return {pod["name"] for pod in metadata if pod["annotations"].get(names.KUEUE_RETRIABLE) == "false"}

    wait_until(lambda: told() == house.server.names("Pod"))
    wait_until(house.is_idle)
