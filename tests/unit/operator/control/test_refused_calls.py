"""Calls that the API server refuses, or that fail because of other clients: nothing is forgotten, and the job reports
what lasts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from replica import KEY, LAUNCHER_POD, Manifest, Replica, wait_until

from topkube.job import KIND
from topkube.timestamps import format_timestamp
from topkube_operator.control import controller as controller_module
from topkube_operator.watch.api_connection import ApiError


def _fail_first(call: Callable[..., Manifest], error: ApiError) -> Callable[..., Manifest]:
    """Return a call that fails once."""
    errors = iter([error])

    def call_or_fail(*arguments: Any, **options: Any) -> Manifest:
        if first := next(errors, None):
            raise first
        return call(*arguments, **options)

    return call_or_fail


def _suspend(replica: Replica) -> None:
    job = replica.server.get(KIND, *KEY)
    job["spec"]["runPolicy"] = {"suspend": True}
    job["metadata"]["generation"] = job["metadata"].get("generation", 1) + 1
    with replica.server.lock:
        stored = replica.server.store(job)
    replica.cache.put_job(stored)
    replica.queue.add(KEY)


def test_a_launcher_is_released_although_another_client_changed_it_at_the_same_time(replica: Replica) -> None:
    """The API server answers 409 to a patch after five conflicts with other writes. The pod counted as removed: its
    finalizer stayed for ever, and with it the pod and its namespace."""
    conflict = ApiError(
        409, "the object has been modified; please apply your changes to the latest version", "Conflict"
    )
    replica.server.remove_finalizer = _fail_first(replica.server.remove_finalizer, conflict)  # type: ignore[method-assign]
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    ended_state = {"terminated": {"exitCode": 0, "startedAt": format_timestamp(datetime.now(UTC)), "finishedAt": None}}
    pod = replica.server.get("Pod", "team", LAUNCHER_POD)
    pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "launcher", "state": ended_state}]}
    replica.cache.put("Pod", replica.server.store(pod))
    replica.queue.add(KEY)
    wait_until(lambda: not replica.server.get("Pod", "team", LAUNCHER_POD)["metadata"]["finalizers"])


def test_a_deletion_that_a_webhook_answers_with_a_conflict_is_tried_again(replica: Replica) -> None:
    deleted = list[str]()

    def delete(kind: str, namespace: str, name: str, uid: str, *, ended: bool = False) -> Manifest:
        deleted.append(name)
        return {}

    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    refusal = ApiError(409, 'admission webhook "guard.example" denied the request: locked', "Conflict")
    replica.server.delete = _fail_first(delete, refusal)  # type: ignore[method-assign]
    _suspend(replica)
    wait_until(lambda: replica.server.list_names("Pod") <= set(deleted))


def test_a_job_whose_pods_may_not_be_deleted_has_an_event(replica: Replica) -> None:
    def refuse(*_: object, **__: object) -> Manifest:
        raise ApiError(403, 'admission webhook "guard.example" denied the request: pods are locked', "Forbidden")

    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    replica.server.delete = refuse  # type: ignore[method-assign]
    _suspend(replica)
    wait_until(lambda: "CallRefused" in replica.recorded.reasons)
    (message,) = {message for _, reason, message in replica.recorded.events if reason == "CallRefused"}
    assert "pods are locked" in message


@pytest.mark.parametrize("status", [405, 410, 412, 451])
def test_whatever_status_a_webhook_refuses_pods_with_the_job_states_it(replica: Replica, status: int) -> None:
    def refuse(manifest: Manifest) -> None:
        if manifest["kind"] == "Pod":
            raise ApiError(status, 'admission webhook "guard.example" denied the request: no', "Denied")

    replica.server.before_create = refuse
    replica.create_job()
    wait_until(lambda: replica.find_condition("Created").get("reason") == "Refused")
    assert "denied the request: no" in replica.find_condition("Created")["message"]


def test_jobs_of_a_namespace_whose_pods_cannot_be_listed_wait(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan without its pods would take them for deleted."""
    monkeypatch.setattr(controller_module, "_UNSERVED_SECONDS", 0.05)
    unserved = {"team"}
    replica.controller._serves = lambda namespace: namespace not in unserved
    checks = list[float]()
    add_after = replica.queue.add_after

    def count_checks(key: tuple[str, str], seconds: float) -> None:
        checks.append(seconds)
        add_after(key, seconds)

    monkeypatch.setattr(replica.queue, "add_after", count_checks)
    replica.create_job()
    wait_until(lambda: len(checks) >= 3)
    assert replica.server.written == []
    unserved.clear()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))


def test_errors_that_passed_do_not_lengthen_the_pause_after_a_later_error(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After seven errors in the whole life of a job, each error delayed it by a minute."""
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod"))
    wait_until(replica.is_idle)
    pauses = list[float]()
    monkeypatch.setattr(replica.queue, "add_after", lambda key, seconds: pauses.append(seconds))
    observe = replica.controller._observe_job
    for number in range(8):
        failing = _fail_first(observe, ApiError(0, "the API server cannot be reached"))  # type: ignore[arg-type]
        monkeypatch.setattr(replica.controller, "_observe_job", failing)
        for _ in range(2):  # the first reconcile fails
            replica.queue.add(KEY)
            wait_until(replica.is_idle)
        assert len(pauses) == number + 1
    assert set(pauses) == {1.0}
