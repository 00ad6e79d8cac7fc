"""The watch cache with late, repeated and lost messages."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from simulated_job import build_job

from topkube.job.cached_dataset import name_cached_dataset
from topkube.timestamps import format_timestamp
from topkube_operator.model import names, nodes
from topkube_operator.model.observed import Observed, Pod, Policy
from topkube_operator.watch import known_nodes, removals
from topkube_operator.watch.owner import Owner
from topkube_operator.watch.watch_cache import WatchCache

KEY = ("team", "train")


def build_child(name: str, version: int, uid: str = "", owner: str = "uid-1", **more: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": uid or f"uid-of-{name}",
        "resourceVersion": str(version),
        "ownerReferences": [names.build_owner_reference("train", owner)],
        "labels": {names.JOB_NAME: "train", names.ROLE: "worker", names.WORKER_INDEX: "0", names.ATTEMPT: "1"},
    }
    return {"metadata": metadata, **more}


def build_stored_job(version: int, uid: str = "uid-1", **more: Any) -> dict[str, Any]:
    metadata = {"name": "train", "namespace": "team", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "managedFields": ["long"]}, **more}


def build_node(name: str, ready: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def observe(cache: WatchCache, owner: str = "uid-1") -> Observed:
    return cache.observe(Owner("team", "train", owner), Policy(), None, {}, {})


def build_ended_container(name: str, second: int) -> dict[str, Any]:
    at = f"2026-01-01T00:00:{second:02}Z"
    return {"name": name, "state": {"terminated": {"exitCode": 1, "startedAt": at, "finishedAt": at}}}


def build_running_container(name: str) -> dict[str, Any]:
    return {"name": name, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


def test_an_older_message_changes_nothing() -> None:
    cache = WatchCache()
    assert cache.put("Pod", build_child("a", 5, status={"phase": "Running"})) == KEY
    assert cache.put("Pod", build_child("a", 4, status={"phase": "Pending"})) is None
    assert cache.put("Pod", build_child("a", 5)) is None
    assert observe(cache).pods[0].phase == "Running"
    assert cache.put_job(build_stored_job(7))
    assert not cache.put_job(build_stored_job(6))
    assert cache.find_job(KEY) == {
        "metadata": {"name": "train", "namespace": "team", "uid": "uid-1", "resourceVersion": "7"}
    }


def test_numbers_that_no_operator_writes_are_not_read() -> None:
    """Users who may create pods write any number into the marks of a pod, and choose any grace period."""
    child = build_child("pod", 1)
    metadata = child["metadata"]
    metadata["labels"] |= {names.WORKER_INDEX: "9" * 60, names.ATTEMPT: "9" * 60}
    metadata |= {
        "annotations": {names.WORKERS: "100000000000"},
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 2**62,
    }
    pod = Pod.from_object(child)
    assert (pod.index, pod.attempt, pod.workers) == (-1, 0, 0)
    assert pod.removable_from is not None
    metadata["annotations"] = {names.WORKERS: "10000"}
    assert Pod.from_object(child).workers == 10_000


def test_only_ended_pods_that_are_being_deleted_are_left_behind() -> None:
    """Stuck pods of an existing job, of a removed job and of an earlier job are found. Running pods are not."""
    cache = WatchCache()
    for name, phase in (("runs", "Running"), ("ended", "Failed"), ("done", "Succeeded")):
        pod_object = build_child(name, 5, status={"phase": phase})
        pod_object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        cache.put("Pod", pod_object)
    cache.put("Pod", build_child("kept", 5, status={"phase": "Failed"}))

    def list_stuck_pods() -> list[str]:
        return sorted(pod.name for pod in cache.find_stuck_pods(KEY))

    cache.put_job(build_stored_job(1))
    assert list_stuck_pods() == ["done", "ended"]
    cache.remove_job(KEY, "uid-1")
    assert list_stuck_pods() == ["done", "ended"]
    cache.put_job(build_stored_job(9, uid="uid-2"))  # the next job of this name
    assert list_stuck_pods() == ["done", "ended"]
    for name in ("runs", "ended", "done", "kept"):
        cache.remove("Pod", ("team", name), f"uid-of-{name}")
    assert list_stuck_pods() == []


@pytest.mark.parametrize(
    ("status", "second"),
    [
        # Each pod was asked to end at second 0, and its grace period ends at second 30.
        (
            {
                "phase": "Failed",
                "containerStatuses": [build_ended_container("worker", 4), build_ended_container("sidecar", 7)],
            },
            12,
        ),
        ({"phase": "Succeeded", "containerStatuses": [build_ended_container("worker", 58)]}, 35),
        ({"phase": "Failed", "reason": "Evicted"}, 35),
        ({"phase": "Pending", "containerStatuses": [{"name": "worker", "state": {"waiting": {}}}]}, 5),
        ({"phase": "Pending"}, 5),
        ({"phase": "Pending", "initContainerStatuses": [build_running_container("prepare")]}, None),
        ({"phase": "Pending", "initContainerStatuses": [build_ended_container("prepare", 1)]}, None),
        ({"phase": "Running", "containerStatuses": [build_running_container("worker")]}, None),
        (
            {
                "phase": "Running",
                "containerStatuses": [build_ended_container("worker", 4), build_running_container("sidecar")],
            },
            None,
        ),
        ({"phase": "Running"}, None),
        ({"phase": "Unknown"}, None),
    ],
)
def test_a_pod_is_overdue_when_none_of_its_containers_runs_any_more(status: dict[str, Any], second: int | None) -> None:
    pod = build_child("a", 5, status=status)
    assert Pod.from_object(pod).removable_from is None, "nobody deletes it"
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}
    overdue = Pod.from_object(pod).removable_from
    assert overdue == (None if second is None else datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second))


def test_a_late_answer_does_not_bring_back_a_removed_object() -> None:
    cache = WatchCache()
    cache.put("Pod", build_child("a", 5))
    assert cache.remove("Pod", ("team", "a"), "uid-of-a") == KEY
    assert cache.put("Pod", build_child("a", 6)) is None
    assert not observe(cache).pods
    assert "a" in observe(cache).removed_at
    assert cache.put("Pod", build_child("a", 9, uid="another")) == KEY
    cache.put_job(build_stored_job(7))
    cache.remove_job(KEY, "uid-1")
    assert not cache.put_job(build_stored_job(8))
    assert cache.put_job(build_stored_job(9, uid="uid-2"))


def test_a_removal_of_an_earlier_object_of_that_name_does_not_remove_the_later_one() -> None:
    cache = WatchCache()
    cache.put("Pod", build_child("a", 9, uid="later"))
    assert cache.remove("Pod", ("team", "a"), "earlier") is None
    assert [pod.uid for pod in observe(cache).pods] == ["later"]
    cache.put_job(build_stored_job(9, uid="uid-2"))
    cache.remove_job(KEY, "uid-1")
    assert cache.find_job(KEY) is not None


def test_a_list_removes_objects_whose_deletion_a_broken_watch_missed() -> None:
    cache = WatchCache()
    for name in ("a", "b"):
        cache.put("Pod", build_child(name, 5))
    other = build_child("c", 5)
    other["metadata"]["namespace"] = "elsewhere"
    cache.put("Pod", other)
    assert cache.replace("Pod", "team", [build_child("b", 5)]) == {KEY}
    assert {pod.name for pod in observe(cache).pods} == {"b"}
    assert cache.replace("Pod", None, []) == {KEY, ("elsewhere", "train")}


def test_objects_that_the_job_does_not_control_are_ignored() -> None:
    cache = WatchCache()
    pod = build_child("a", 5)
    pod["metadata"]["ownerReferences"][0]["controller"] = False
    assert cache.put("Pod", pod) is None
    cache.put("Pod", build_child("b", 5, owner="uid-of-an-earlier-job"))
    assert not observe(cache).pods
    assert cache.find_child("Pod", ("team", "b"), Owner("team", "train", "uid-1")) is None


def test_secrets_are_kept_as_digests() -> None:
    cache = WatchCache()
    cache.put("Secret", build_child("train-credentials", 5, data={"key": "c2VjcmV0"}))
    assert "c2VjcmV0" not in repr(observe(cache).children)


def test_a_node_is_lost_when_its_kubelet_is_silent_and_not_when_it_is_new() -> None:
    cache = WatchCache()
    cache.put("Pod", build_child("a", 5, spec={"nodeName": "node-a"}))
    assert observe(cache).lost_nodes == frozenset()
    assert cache.put_node(build_node("node-a", "True")) == {KEY}
    assert cache.put_node(build_node("node-a", "False")) == set(), "the node is not ready, but its kubelet reports"
    assert observe(cache).lost_nodes == frozenset()
    assert cache.put_node(build_node("node-a", "Unknown")) == {KEY}
    assert observe(cache).lost_nodes == {"node-a"}
    cache.put_node(build_node("node-a", "True"))
    assert cache.replace_nodes([build_node("node-b", "True")]) == {KEY}
    assert observe(cache).lost_nodes == {"node-a"}


def test_the_jobs_on_a_node_are_found_without_a_look_at_all_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 500 nodes and 50,000 pods, such looks took half a minute, during which no job was reconciled."""
    cache = WatchCache()
    pod = build_child("worker-0", 2, spec={"nodeName": "node-a"})
    cache.put("Pod", pod)
    monkeypatch.setattr(cache._children, "list_pods", lambda: pytest.fail("all pods were read"))
    assert cache.replace_nodes([build_node("node-a", "True"), build_node("node-b", "True")]) == {KEY}
    assert cache.put_node(build_node("node-b", "Unknown")) == set()
    pod["spec"]["nodeName"], pod["metadata"]["resourceVersion"] = "node-b", "3"
    cache.put("Pod", pod)
    assert cache.put_node(build_node("node-a", "Unknown")) == set()
    assert cache.put_node(build_node("node-b", "True")) == {KEY}
    cache.remove("Pod", ("team", "worker-0"), "uid-of-worker-0")
    assert cache.remove_node("node-b") == set()
    assert not cache._children._on_node


def test_pods_with_our_finalizer_and_without_a_job_are_known() -> None:
    cache = WatchCache()
    pod = build_child("launcher", 2)
    pod["metadata"]["finalizers"] = [names.ENDING]
    cache.put("Pod", pod)
    assert cache.list_ownerless_pods() == []
    references = pod["metadata"].pop("ownerReferences")
    pod["metadata"]["resourceVersion"] = "3"
    cache.put("Pod", pod)
    assert cache.list_ownerless_pods() == [(("team", "launcher"), "uid-of-launcher")]
    cache.put("Pod", {"metadata": {**pod["metadata"], "ownerReferences": references, "resourceVersion": "4"}})
    assert cache.list_ownerless_pods() == []
    cache.put("Pod", pod)
    cache.remove("Pod", ("team", "launcher"), "uid-of-launcher")
    assert cache.list_ownerless_pods() == []
    cache.put("Pod", pod)
    assert cache.list_ownerless_pods() == [], "a late message"


def test_the_launchers_of_a_job_are_known() -> None:
    cache, owner = WatchCache(), Owner("team", "train", "uid-1")
    launcher, colocated = build_child("launcher-1", 2), build_child("worker-0-2", 3)
    launcher["metadata"]["labels"][names.ROLE] = "launcher"
    colocated["metadata"]["annotations"] = {names.WORKERS: "2"}
    for pod in (launcher, colocated, build_child("worker-1", 4)):
        cache.put("Pod", pod)
    assert {pod.name for pod in cache.find_launchers(owner)} == {"launcher-1", "worker-0-2"}
    cache.remove("Pod", ("team", "launcher-1"), "uid-of-launcher-1")
    cache.remove("Pod", ("team", "worker-0-2"), "uid-of-worker-0-2")
    assert cache.find_launchers(owner) == []


def test_nodes_with_faults_and_failures_of_other_jobs_are_seen() -> None:
    cache = WatchCache(["GpuXidError"])
    now = format_timestamp(datetime.now(UTC))
    faulty = build_node("node-a", "True")
    faulty["status"]["conditions"].append({"type": "GpuXidError", "status": "True"})
    faulty["metadata"]["labels"] = {"kubernetes.io/hostname": "host-a"}
    cache.put_node(faulty)
    cordoned = {**build_node("node-b", "True"), "spec": {"unschedulable": True}}
    cache.put_node(cordoned)
    cache.put_node(build_node("node-c", "Unknown"))
    failures = [
        {"name": "node-b", "count": 2, "reason": "Error", "lastFailureTime": now},
        {"name": "node-c", "count": 2, "reason": "Error", "lastFailureTime": "2020-01-01T00:00:00Z"},
        {"name": "node-a", "count": 2, "reason": "Error", "lastFailureTime": "2099-01-01T00:00:00Z"},
        {"name": "phantom", "count": 3, "reason": "Error", "lastFailureTime": now},
    ]
    cache.put_job(build_stored_job(1, status={"nodeFailures": failures}))
    other = build_stored_job(2, uid="uid-2", status={"nodeFailures": failures})
    other["metadata"]["name"] = "other"
    cache.put_job(other)
    observed = observe(cache)
    assert observed.node_faults == {"node-a": "GpuXidError"}
    assert observed.nodes == 1
    assert observed.hostnames == {"node-a": "host-a", "node-b": "node-b"}, "of nodes that exist"
    assert [(failure.node, failure.job, failure.count) for failure in observed.node_failures] == [
        ("node-b", "uid-2", 2),
        ("phantom", "uid-2", 3),
    ]
    cache.put_node(build_node("node-a", "True"))
    cache.remove_job(("team", "other"), "uid-2")
    observed = observe(cache)
    assert (observed.node_faults, observed.node_failures) == ({}, ())


def test_failures_that_count_no_longer_are_not_scanned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many jobs ended long ago, and every plan of every job asks for the failures of the others."""
    cache, now = WatchCache(), datetime.now(UTC)
    for number, age in enumerate((0, 30, 61, 9999)):
        time = format_timestamp(now - timedelta(minutes=age))
        failures = [{"name": "node-a", "count": 1, "reason": "Error", "lastFailureTime": time}]
        job = build_stored_job(1, uid=f"uid-of-{number}", status={"nodeFailures": failures})
        job["metadata"]["name"] = f"job-{number}"
        cache.put_job(job)
    kept = cache._jobs._node_failures
    assert list(kept) == ["uid-of-0", "uid-of-1"]
    monkeypatch.setattr(nodes, "REMEMBERED", timedelta(minutes=20))
    assert [failure.job for failure in observe(cache).node_failures] == ["uid-of-0"]
    assert list(kept) == ["uid-of-0"]


# The node cache.


def _build_claim(namespace: str, phase: str = "Bound", **metadata: Any) -> dict[str, Any]:
    claim_metadata = {"name": "topkube-node-cache", "namespace": namespace, "uid": f"claim-{namespace}", **metadata}
    return {"metadata": claim_metadata, "status": {"phase": phase}}


def _build_cached_dataset(uri: str, nodes: dict[str, int]) -> dict[str, Any]:
    nodes_status = [{"name": name, "percent": percent} for name, percent in nodes.items()]
    metadata = {"name": name_cached_dataset(uri), "namespace": "team"}
    return {"metadata": metadata, "spec": {"uri": uri}, "status": {"nodes": nodes_status}}


def _build_labelled_node(name: str, ready: str = "True") -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": f"host-of-{name}"}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def test_jobs_see_the_node_cache_of_their_namespace_and_the_nodes_that_are_warm_and_alive() -> None:
    cache, uri = WatchCache(), "s3://bucket/x"
    stored_job = build_job(dataset={"uri": uri})
    stored_job["metadata"]["resourceVersion"] = "1"
    cache.put_job(stored_job)

    def observe() -> tuple[bool, dict[str, int]]:
        observed = cache.observe(Owner("team", "train", "uid-1"), Policy(), None, {}, {}, stored_job)
        return observed.node_cache, dict(observed.warm)

    cache.replace_nodes([_build_labelled_node("a"), _build_labelled_node("b"), _build_labelled_node("dead", "Unknown")])
    cache.put_dataset(_build_cached_dataset(uri, {"a": 100, "b": 20, "dead": 100, "gone": 100}))
    assert observe() == (False, {})
    assert cache.put_claim(_build_claim("team", "Pending")) == set()
    assert cache.put_claim(_build_claim("elsewhere")) == set()
    assert cache.put_claim(_build_claim("team")) == {("team", "train")}, "jobs that wait for the claim are reconciled"
    assert cache.put_claim(_build_claim("team")) == set()
    assert observe() == (True, {"host-of-a": 100, "host-of-b": 20})
    cache.put_dataset(_build_cached_dataset("s3://bucket/other", {"b": 100}))
    assert observe()[1] == {"host-of-a": 100, "host-of-b": 20}
    cache.replace_datasets(None, [])
    assert observe() == (True, {})
    assert cache.put_claim(_build_claim("team", deletionTimestamp="2026-01-01T00:00:00Z")) == {("team", "train")}
    assert observe() == (False, {})
    cache.put_claim(_build_claim("team"))
    assert cache.replace_claims(None, []) == {("team", "train")}


def test_a_claim_of_another_name_is_not_a_node_cache() -> None:
    cache = WatchCache()
    cache.put_claim(_build_claim("team", name="mine"))
    assert not cache.observe(Owner("team", "train", "uid-1"), Policy(), None, {}, {}, build_job()).node_cache


# Nothing grows for ever.


def test_a_removal_costs_the_same_after_many_removals() -> None:
    def measure_seconds(count: int) -> float:
        cache = WatchCache()
        begun = time.process_time()
        for number in range(count):
            cache.remove("Pod", ("team", f"pod-{number}"), f"uid-{number}")
        return time.process_time() - begun

    few = measure_seconds(9_000)
    assert measure_seconds(27_000) < 20 * few + 0.5


def test_old_removals_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "_MOST_REMEMBERED", 10)
    monkeypatch.setattr(removals, "_REMEMBERED", timedelta(0))
    cache = WatchCache()
    for number in range(100):
        cache.put("Pod", build_child(f"pod-{number}", 5))
        cache.remove("Pod", ("team", f"pod-{number}"), f"uid-of-pod-{number}")
    assert len(cache._removals) == len(cache._removals._oldest_first) == 11
    assert len(observe(cache).removed_at) == 11
    assert "pod-99" in observe(cache).removed_at


def test_nodes_that_were_removed_are_forgotten_unless_a_pod_is_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster that grows and shrinks all day, each node has another name."""
    cache = WatchCache()
    cache.put("Pod", build_child("a", 5, spec={"nodeName": "node-0"}))
    for number in range(100):
        cache.put_node(build_node(f"node-{number}", "True"))
        cache.remove_node(f"node-{number}")
    monkeypatch.setattr(known_nodes, "_REMEMBERED", timedelta(0))
    cache.remove_node("node-99")
    assert set(cache._nodes.names) == set(cache._nodes.hostnames) == set(cache._nodes._labels) == {"node-0"}
    assert observe(cache).lost_nodes == {"node-0"}
    cache.put_node(build_node("node-0", "True"))
    assert observe(cache).lost_nodes == set()
