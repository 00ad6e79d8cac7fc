"""The objects that belong to a job. Forged and foreign objects have no effect on cache, plans and deletions."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from replica import LAUNCHER_POD, Replica, wait_until
from simulated_api_server import START
from simulated_cluster import start_running_job
from simulated_job import build_job

from topkube.job import API_VERSION, KIND
from topkube_operator.model import names
from topkube_operator.model.observed import Observed, Policy
from topkube_operator.planning import planner
from topkube_operator.watch.owner import Owner, find_owner
from topkube_operator.watch.watch_cache import WatchCache

OWNER = Owner("team", "train", "uid-1")
NAMES = st.sampled_from(["team", "train", "uid-1", "TrainingJob", "", "other", "Job"])
KINDS = ("Pod", "Service", "Secret", "NetworkPolicy", "PodGroup")


def build_ended_pod(role: str = "launcher", attempt: int = 1) -> dict[str, Any]:
    """Return a pod with the job's labels and owner reference whose containers ended with exit code 0."""
    name = f"train-{role}-{attempt}"
    ended = {"exitCode": 0, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:09Z"}
    labels = {names.JOB_NAME: "train", names.ROLE: role, names.ATTEMPT: str(attempt), names.WORKER_INDEX: "0"}
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-of-{name}",
        "resourceVersion": "7",
        "labels": labels,
        "annotations": {names.DEFAULT_CONTAINER: role, names.WORKERS: "2"},
        "ownerReferences": [names.build_owner_reference("train", "uid-1")],
    }
    statuses = [{"name": role, "state": {"terminated": ended}}]
    return {"kind": "Pod", "metadata": metadata, "status": {"phase": "Succeeded", "containerStatuses": statuses}}


FORGERIES: dict[str, st.SearchStrategy[Any]] = {
    "namespace": NAMES.filter(lambda text: text not in ("team", "")),
    "apiVersion": st.sampled_from(
        ["v1", "topkube.dev", "batch/v1", "evil.dev/v1alpha1", "topkube.dev.evil/v1", "", None]
    ),
    "kind": NAMES.filter(lambda text: text != KIND),
    "name": NAMES.filter(lambda text: text != "train"),
    "uid": NAMES.filter(lambda text: text != "uid-1"),
    "controller": st.sampled_from([False, None, "true", 1]),
}


@st.composite
def forged_objects(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an object that looks like a child of the job, except for one or more parts of its ownership."""
    item = build_ended_pod(draw(st.sampled_from(["launcher", "worker"])), draw(st.integers(1, 3)))
    parts = draw(st.lists(st.sampled_from(sorted(FORGERIES)), min_size=1, unique=True))
    for part in parts:
        value = draw(FORGERIES[part])
        place = item["metadata"] if part == "namespace" else item["metadata"]["ownerReferences"][0]
        place[part] = value
    return item


def observe(store: WatchCache) -> Observed:
    return store.observe(OWNER, Policy(seed=b"s" * 32), None, {}, {})


@given(st.lists(st.tuples(st.sampled_from(KINDS), forged_objects()), max_size=4))
def test_forged_objects_are_neither_stored_nor_planned_with(forged: list[tuple[str, dict[str, Any]]]) -> None:
    stored, empty = WatchCache(), WatchCache()
    for kind, item in forged:
        key = stored.put(kind, item)
        assert key != OWNER.key or find_owner(item) != OWNER
        name = (item["metadata"]["namespace"], item["metadata"]["name"])
        assert stored.find_child(kind, name, OWNER) is None
    assert observe(stored) == observe(empty)
    running_job = start_running_job().job
    for job in (build_job(), running_job):
        assert job is not None
        now = START + timedelta(seconds=60)
        assert planner.plan(job, observe(stored), now) == planner.plan(job, observe(empty), now)
    for kind, item in forged:
        stored.remove(kind, (item["metadata"]["namespace"], item["metadata"]["name"]), item["metadata"]["uid"])
    assert not observe(stored).removed_at
    assert not observe(stored).last_seen


@given(forged_objects(), st.sampled_from(KINDS))
def test_a_forged_object_neither_replaces_nor_removes_a_real_child(forged: dict[str, Any], kind: str) -> None:
    store = WatchCache()
    genuine = build_ended_pod()
    store.put(kind, genuine)
    before = observe(store)
    forged["metadata"].update(uid="uid-of-the-forgery", resourceVersion="99")
    same_place = forged["metadata"]["namespace"] == "team" and forged["metadata"]["name"] == "train-launcher-1"
    store.put(kind, forged)
    if not same_place:  # two objects never share kind, namespace and name
        assert observe(store) == before
        store.remove(kind, (forged["metadata"]["namespace"], forged["metadata"]["name"]), "uid-of-the-forgery")
        assert observe(store) == before


def test_pods_of_a_deleted_job_of_another_namespace_are_not_left_behind() -> None:
    store = WatchCache()
    item = build_ended_pod()
    item["metadata"].update(namespace="evil", deletionTimestamp="2026-01-01T00:00:00Z")
    store.put("Pod", item)
    assert store.find_stuck_pods(OWNER.key) == []


def test_an_object_is_no_longer_a_child_after_its_owner_was_removed() -> None:
    store = WatchCache()
    item = build_ended_pod()
    assert store.put("Pod", item) == OWNER.key
    item["metadata"].update(ownerReferences=[], resourceVersion="8")
    assert store.put("Pod", item) == OWNER.key, "the job must be reconciled again"
    assert observe(store).pods == ()


def test_an_owner_of_any_version_of_our_group_counts() -> None:
    item = build_ended_pod()
    assert find_owner(item) == OWNER
    item["metadata"]["ownerReferences"][0]["apiVersion"] = "topkube.dev/v1"
    assert find_owner(item) == OWNER
    assert API_VERSION.startswith("topkube.dev/")


def test_a_pod_of_another_namespace_neither_ends_the_job_nor_is_deleted(replica: Replica) -> None:
    """The forged pod has the job's labels, the UID of the job and exit code 0."""
    replica.create_job()
    wait_until(lambda: LAUNCHER_POD in replica.server.list_names("Pod") and replica.is_idle())
    forged = build_ended_pod()
    forged["metadata"].update(name="a-launcher-1", namespace="evil", uid="uid-of-evil")
    forged["metadata"]["ownerReferences"] = [names.build_owner_reference("train", "uid-of-train")]
    replica.server.store(copy.deepcopy(forged))
    replica.cache.put("Pod", forged)
    replica.controller.reconcile(("team", "train"))
    assert replica.find_condition("Succeeded") == {}
    assert ("Pod", "evil", "a-launcher-1") in replica.server.objects


def test_an_object_of_our_name_with_a_forged_owner_is_not_adopted(replica: Replica) -> None:
    forged = {"kind": "Service", "metadata": {"name": "train", "namespace": "team"}, "spec": {"clusterIP": "10.0.0.1"}}
    reference = {**names.build_owner_reference("train", "uid-of-train"), "apiVersion": "evil.dev/v1"}
    forged["metadata"]["ownerReferences"] = [reference]  # type: ignore[index]
    replica.server.store(forged)
    replica.create_job()
    wait_until(lambda: replica.find_condition("Created").get("reason") == "ForeignObject")
    assert LAUNCHER_POD not in replica.server.list_names("Pod")
