"""The watch cache and the work queue: what late, repeated and lost messages do to them."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from simulated import job

from topkube.job.cached_dataset import object_name
from topkube_operator import names
from topkube_operator.observed import Observed, Pod, Policy
from topkube_operator.queue import WorkQueue
from topkube_operator.store import Store

KEY = ("team", "train")


def child(name: str, version: int, uid: str = "", owner: str = "uid-1", **more: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": uid or f"uid-of-{name}",
        "resourceVersion": str(version),
        "ownerReferences": [names.owner("train", owner)],
        "labels": {names.JOB_NAME: "train", names.ROLE: "worker", names.WORKER_INDEX: "0", names.ATTEMPT: "1"},
    }
    return {"metadata": metadata, **more}


def stored(version: int, uid: str = "uid-1", **more: Any) -> dict[str, Any]:
    metadata = {"name": "train", "namespace": "team", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "managedFields": ["long"]}, **more}


def node(name: str, ready: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def seen(store: Store, owner: str = "uid-1") -> Observed:
    return store.observe(owner, Policy(), None, {}, {})


def ended(name: str, second: int) -> dict[str, Any]:
    at = f"2026-01-01T00:00:{second:02}Z"
    return {"name": name, "state": {"terminated": {"exitCode": 1, "startedAt": at, "finishedAt": at}}}


def running(name: str) -> dict[str, Any]:
    return {"name": name, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


def test_an_older_message_changes_nothing() -> None:
    store = Store()
    assert store.put("Pod", child("a", 5, status={"phase": "Running"})) == KEY
    assert store.put("Pod", child("a", 4, status={"phase": "Pending"})) is None
    assert store.put("Pod", child("a", 5)) is None
    assert seen(store).pods[0].phase == "Running"
    assert store.put_job(stored(7))
    assert not store.put_job(stored(6))
    assert store.job(KEY) == {
        "metadata": {"name": "train", "namespace": "team", "uid": "uid-1", "resourceVersion": "7"}
    }


def test_only_ended_pods_that_are_being_deleted_are_left_behind() -> None:
    """Of a job that is there, of one that is gone, and of one before it. What runs is waited for."""
    store = Store()
    for name, phase in (("runs", "Running"), ("ended", "Failed"), ("done", "Succeeded")):
        thing = child(name, 5, status={"phase": phase})
        thing["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        store.put("Pod", thing)
    store.put("Pod", child("kept", 5, status={"phase": "Failed"}))

    def left() -> list[str]:
        return sorted(pod.name for pod in store.left_behind(KEY))

    store.put_job(stored(1))
    assert left() == ["done", "ended"]
    store.remove_job(KEY, "uid-1")
    assert left() == ["done", "ended"]
    store.put_job(stored(9, uid="uid-2"))  # the next job of this name
    assert left() == ["done", "ended"]
    for name in ("runs", "ended", "done", "kept"):
        store.remove("Pod", ("team", name), f"uid-of-{name}")
    assert left() == []


@pytest.mark.parametrize(
    ("status", "second"),
    [
        # It was asked to end at second 0, and has until second 30.
        ({"phase": "Failed", "containerStatuses": [ended("worker", 4), ended("sidecar", 7)]}, 12),
        ({"phase": "Succeeded", "containerStatuses": [ended("worker", 58)]}, 35),
        ({"phase": "Failed", "reason": "Evicted"}, 35),
        ({"phase": "Pending", "containerStatuses": [{"name": "worker", "state": {"waiting": {}}}]}, 5),
        ({"phase": "Pending"}, 5),
        ({"phase": "Pending", "initContainerStatuses": [running("prepare")]}, None),
        ({"phase": "Pending", "initContainerStatuses": [ended("prepare", 1)]}, None),
        ({"phase": "Running", "containerStatuses": [running("worker")]}, None),
        ({"phase": "Running", "containerStatuses": [ended("worker", 4), running("sidecar")]}, None),
        ({"phase": "Running"}, None),
        ({"phase": "Unknown"}, None),
    ],
)
def test_a_pod_is_overdue_when_nothing_of_it_runs_any_more(status: dict[str, Any], second: int | None) -> None:
    thing = child("a", 5, status=status)
    assert Pod.from_object(thing).overdue is None, "nobody deletes it"
    thing["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}
    overdue = Pod.from_object(thing).overdue
    assert overdue == (None if second is None else datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second))


def test_a_late_answer_does_not_raise_the_dead() -> None:
    store = Store()
    store.put("Pod", child("a", 5))
    assert store.remove("Pod", ("team", "a"), "uid-of-a") == KEY
    assert store.put("Pod", child("a", 6)) is None
    assert not seen(store).pods
    assert "a" in seen(store).gone
    assert store.put("Pod", child("a", 9, uid="another")) == KEY
    store.put_job(stored(7))
    store.remove_job(KEY, "uid-1")
    assert not store.put_job(stored(8))
    assert store.put_job(stored(9, uid="uid-2"))


def test_a_removal_of_an_earlier_object_of_that_name_does_not_remove_the_later_one() -> None:
    store = Store()
    store.put("Pod", child("a", 9, uid="later"))
    assert store.remove("Pod", ("team", "a"), "earlier") is None
    assert [pod.uid for pod in seen(store).pods] == ["later"]
    store.put_job(stored(9, uid="uid-2"))
    store.remove_job(KEY, "uid-1")
    assert store.job(KEY) is not None


def test_a_list_takes_away_what_a_broken_watch_did_not_tell() -> None:
    store = Store()
    for name in ("a", "b"):
        store.put("Pod", child(name, 5))
    other = child("c", 5)
    other["metadata"]["namespace"] = "elsewhere"
    store.put("Pod", other)
    assert store.replace("Pod", "team", [child("b", 5)]) == {KEY}
    assert {pod.name for pod in seen(store).pods} == {"b", "c"}
    assert store.replace("Pod", None, []) == {KEY, ("elsewhere", "train")}


def test_what_the_job_does_not_control_is_not_seen() -> None:
    store = Store()
    thing = child("a", 5)
    thing["metadata"]["ownerReferences"][0]["controller"] = False
    assert store.put("Pod", thing) is None
    store.put("Pod", child("b", 5, owner="uid-of-an-earlier-job"))
    assert not seen(store).pods
    assert store.child("Pod", ("team", "b"), "uid-1") is None


def test_secrets_are_kept_as_digests() -> None:
    store = Store()
    store.put("Secret", child("train-credentials", 5, data={"key": "c2VjcmV0"}))
    assert "c2VjcmV0" not in repr(seen(store).children)


def test_a_node_is_lost_when_nobody_hears_from_it_and_not_when_it_is_new() -> None:
    store = Store()
    store.put("Pod", child("a", 5, spec={"nodeName": "node-a"}))
    assert seen(store).lost_nodes == frozenset()
    assert store.put_node(node("node-a", "True")) == {KEY}
    assert store.put_node(node("node-a", "False")) == set()  # its kubelet speaks, if only of trouble
    assert seen(store).lost_nodes == frozenset()
    assert store.put_node(node("node-a", "Unknown")) == {KEY}
    assert seen(store).lost_nodes == {"node-a"}
    store.put_node(node("node-a", "True"))
    assert store.replace_nodes([node("node-b", "True")]) == {KEY}
    assert seen(store).lost_nodes == {"node-a"}


def test_a_key_is_worked_on_by_one_and_comes_again_when_there_was_news() -> None:
    queue = WorkQueue()
    queue.add(KEY)
    queue.add(KEY)
    assert queue.get() == KEY
    queue.add(KEY)
    queue.add(("team", "other"))
    assert queue.get() == ("team", "other")
    queue.done(("team", "other"))
    queue.done(KEY)
    assert queue.get() == KEY
    queue.done(KEY)
    assert queue.oldest() == 0
    threading.Timer(0.05, queue.close).start()
    assert queue.get() is None


def test_the_earliest_of_several_appointments_counts() -> None:
    queue = WorkQueue()
    begun = time.monotonic()
    queue.add_after(KEY, 100)
    queue.add_after(KEY, 0.05)
    queue.add_after(KEY, 50)
    assert queue.get() == KEY
    assert 0.04 < time.monotonic() - begun < 20
    queue.done(KEY)
    queue.add_after(("team", "late"), 100)
    queue.add(("team", "soon"))
    assert queue.get() == ("team", "soon")


# The node cache.


def _claim(namespace: str, phase: str = "Bound", **metadata: Any) -> dict[str, Any]:
    known = {"name": "topkube-node-cache", "namespace": namespace, "uid": f"claim-{namespace}", **metadata}
    return {"metadata": known, "status": {"phase": phase}}


def _cached(uri: str, nodes: dict[str, int]) -> dict[str, Any]:
    told = [{"name": name, "percent": percent} for name, percent in nodes.items()]
    metadata = {"name": object_name(uri), "namespace": "team"}
    return {"metadata": metadata, "spec": {"uri": uri}, "status": {"nodes": told}}


def _node(name: str, ready: str = "True") -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": f"host-of-{name}"}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def test_jobs_see_the_node_cache_of_their_namespace_and_the_nodes_that_are_warm_and_alive() -> None:
    store, uri = Store(), "s3://bucket/x"
    made = job(dataset={"uri": uri})
    made["metadata"]["resourceVersion"] = "1"
    store.put_job(made)

    def seen() -> tuple[bool, dict[str, int]]:
        observed = store.observe("uid-1", Policy(), None, {}, {}, made)
        return observed.node_cache, dict(observed.warm)

    store.replace_nodes([_node("a"), _node("b"), _node("dead", "Unknown")])
    store.put_cached(_cached(uri, {"a": 100, "b": 20, "dead": 100, "gone": 100}))
    assert seen() == (False, {})
    assert store.put_claim(_claim("team", "Pending")) == set()
    assert store.put_claim(_claim("elsewhere")) == set()
    assert store.put_claim(_claim("team")) == {("team", "train")}, "jobs that wait for it are looked at"
    assert store.put_claim(_claim("team")) == set()
    assert seen() == (True, {"host-of-a": 100, "host-of-b": 20})
    store.put_cached(_cached("s3://bucket/other", {"b": 100}))
    assert seen()[1] == {"host-of-a": 100, "host-of-b": 20}
    store.replace_cached(None, [])
    assert seen() == (True, {})
    assert store.put_claim(_claim("team", deletionTimestamp="2026-01-01T00:00:00Z")) == {("team", "train")}
    assert seen() == (False, {})
    store.put_claim(_claim("team"))
    assert store.replace_claims(None, []) == {("team", "train")}


def test_a_claim_of_another_name_is_no_node_cache() -> None:
    store = Store()
    store.put_claim(_claim("team", name="mine"))
    assert not store.observe("uid-1", Policy(), None, {}, {}, job()).node_cache
