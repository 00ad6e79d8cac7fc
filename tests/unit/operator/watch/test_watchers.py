"""Watchers on a small simulated API server: no hot loop, and a restore of the cluster from a backup is detected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from replica import wait_until
from simulated_job import build_job

from topkube.job import KIND
from topkube_operator.model import names
from topkube_operator.model.observed import Policy
from topkube_operator.watch import watchers as watchers_module
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.owner import Owner
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.watchers import Watchers
from topkube_operator.watch.work_queue import Key

Manifest = dict[str, Any]


class WatchedApiServer:
    """An API server in memory: it lists its objects, and `answer_watch` answers watches."""

    def __init__(self, answer_watch: Callable[[str], Iterator[Manifest]]) -> None:
        self.version, self.items, self.answer_watch = 1000, list[Manifest](), answer_watch
        self.lists = list[tuple[float, str]]()
        self.watches = list[tuple[str, str]]()

    def list(self, kind: str, namespace: str | None, selector: str = "", **_: Any) -> tuple[list[Manifest], str]:
        self.lists.append((time.monotonic(), kind))
        return [item for item in self.items if item["kind"] == kind], str(self.version)

    def list_pages(self, kind: str, namespace: str | None, selector: str = "") -> Iterator[tuple[list[Manifest], str]]:
        """Yield each object as a page."""
        objects, version = self.list(kind, namespace)
        yield from [([item], version) for item in objects] or [([], version)]

    def watch(self, kind: str, namespace: str | None, selector: str, version: str) -> Iterator[Manifest]:
        self.watches.append((kind, version))
        yield from self.answer_watch(kind)

    def get(self, kind: str, namespace: str, name: str) -> Manifest:
        return next(item for item in self.items if (item["kind"], item["metadata"]["name"]) == (kind, name))


def _build_watchers(api: WatchedApiServer, cache: WatchCache, kinds: tuple[str, ...] = ("Pod",)) -> Watchers:
    cluster: Any = api
    return Watchers(cluster, cache, [], kinds, wake=lambda keys: None)


def _start_thread(watchers: Watchers) -> threading.Thread:
    thread = threading.Thread(target=watchers._follow_kind, args=("Pod", None), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("ends", ["410", "without an event"])
def test_a_watch_that_ends_at_once_is_begun_again_after_growing_pauses(ends: str) -> None:
    def answer_watch(kind: str) -> Iterator[Manifest]:
        if ends == "410":
            raise ApiError(410, "too old resource version")
        yield from ()

    api = WatchedApiServer(answer_watch)
    watchers = _build_watchers(api, WatchCache())
    began = time.monotonic()
    thread = _start_thread(watchers)
    wait_until(lambda: len(api.watches) >= 3)
    shortest_pauses = 0.2 * 0.8 + 0.4 * 0.8  # the second pause is twice the first; chance shortens each by up to 20%
    assert time.monotonic() - began >= shortest_pauses
    watchers.stop()
    thread.join(120)
    assert not thread.is_alive()


def test_a_watcher_waits_for_as_long_as_the_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_watch(kind: str) -> Iterator[Manifest]:
        raise ApiError(429, "too many requests", wait=40.0)
        yield  # makes this function a generator

    watchers = _build_watchers(WatchedApiServer(answer_watch), WatchCache())
    waits = list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        watchers._stopped.set()
        return True

    monkeypatch.setattr(watchers, "_stopped", _Stopped(wait))
    watchers._follow_kind("Pod", None)
    assert 30 < waits[0] < 70


class _Stopped:
    """An event that records for how long a thread waits for it."""

    def __init__(self, wait: Callable[[float], bool]) -> None:
        self.wait, self._set = wait, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True


def _build_pod(version: int, phase: str, name: str = "a") -> Manifest:
    reference = {
        "kind": KIND,
        "apiVersion": "topkube.dev/v1alpha1",
        "name": "train",
        "uid": "uid-1",
        "controller": True,
    }
    metadata = {"name": name, "namespace": "team", "uid": f"uid-of-{name}", "resourceVersion": str(version)}
    labels = {names.ROLE: "worker", names.WORKER_INDEX: "0", names.ATTEMPT: "1"}
    return {
        "kind": "Pod",
        "metadata": {**metadata, "ownerReferences": [reference], "labels": labels},
        "status": {"phase": phase},
    }


def _build_job(version: int, workers: int) -> Manifest:
    new_job = build_job(workers=workers)
    new_job["metadata"]["resourceVersion"] = str(version)
    return new_job


def test_after_a_restore_from_a_backup_the_cache_holds_the_restored_objects() -> None:
    """Resource versions go back: the known objects look newer than the objects in the cluster, and watches are
    silent."""
    watch_is_silent = threading.Event()

    def answer_watch(kind: str) -> Iterator[Manifest]:
        watch_is_silent.wait(120)
        yield from ()

    api, cache = WatchedApiServer(answer_watch), WatchCache()
    api.items = [_build_pod(990, "Running"), _build_job(991, 3)]
    watchers = _build_watchers(api, cache)
    cache.put_job(_build_job(991, 3))
    for kind, namespace in watchers._tasks:
        watchers._list_kind(kind, namespace)
    watchers.audit()
    assert [pod.phase for pod in cache.observe(Owner("team", "train", "uid-1"), Policy(), None, {}, {}).pods] == [
        "Running"
    ]
    cache.remove("Pod", ("team", "b"), "uid-of-b")  # removed after the backup, so the restored cluster has it again
    returned_pod = _build_pod(480, "Pending", "b")
    api.version, api.items = 500, [_build_pod(470, "Pending"), returned_pod, _build_job(471, 2)]
    changed_keys: set[Key] = watchers.audit()
    assert ("team", "train") in changed_keys
    assert [pod.phase for pod in cache.observe(Owner("team", "train", "uid-1"), Policy(), None, {}, {}).pods] == [
        "Pending",
        "Pending",
    ]
    known = cache.find_job(("team", "train"))
    assert known is not None
    assert (known["spec"]["workers"], known["metadata"]["resourceVersion"]) == (2, "471")
    lists_before = len(api.lists)
    watchers.audit()
    assert len(api.lists) == lists_before + 1, "one list per audit after the restore"


def test_a_watch_from_before_the_restore_begins_anew_from_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers_module, "_SHORT_WATCH", 0.0)
    watch_may_end = threading.Semaphore(0)

    def answer_watch(kind: str) -> Iterator[Manifest]:
        watch_may_end.acquire()
        yield from ()

    api, cache = WatchedApiServer(answer_watch), WatchCache()
    watchers = _build_watchers(api, cache)
    thread = _start_thread(watchers)
    wait_until(lambda: api.watches == [("Pod", "1000")])
    watchers._check_version(KIND, None, "1000")
    api.version = 500
    watchers._check_version(KIND, None, "500")
    watch_may_end.release()
    wait_until(lambda: len(api.watches) == 2)
    assert api.watches[1] == ("Pod", "500")
    watchers.stop()
    watch_may_end.release()
    thread.join(120)
    assert not thread.is_alive()


def test_a_job_whose_change_no_watch_reported_is_read_again() -> None:
    api, cache = WatchedApiServer(lambda kind: iter(())), WatchCache()
    api.items = [_build_job(991, 3)]
    watchers = _build_watchers(api, cache)
    watchers.audit()
    api.items = [_build_job(995, 3)]
    assert watchers.audit() == {("team", "train")}
    assert watchers.audit() == set()


def test_an_answer_that_is_not_json_does_not_end_the_comparison_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in front of the API server answered once with a page of its own. From then on, nobody noticed deletions
    that a watch had missed."""
    monkeypatch.setattr(watchers_module, "_AUDIT_SECONDS", 0.0)
    api, cache = WatchedApiServer(lambda kind: iter(())), WatchCache()
    api.items = [_build_job(991, 3)]
    list_jobs, answers = api.list, iter([ValueError("Expecting value: line 1 column 1 (char 0)")])

    def list_once_not_json(kind: str, namespace: str | None, **options: Any) -> tuple[list[Manifest], str]:
        if error := next(answers, None):
            raise error
        return list_jobs(kind, namespace, **options)

    api.list = list_once_not_json  # type: ignore[method-assign]
    watchers = _build_watchers(api, cache)
    thread = threading.Thread(target=watchers._audit_forever, daemon=True)
    thread.start()
    wait_until(lambda: cache.find_job(("team", "train")) or not thread.is_alive())
    watchers.stop()
    assert cache.find_job(("team", "train")) is not None


def test_a_list_is_stored_page_by_page() -> None:
    """All pods of a large cluster at once need more memory than an operator has."""
    api, cache = WatchedApiServer(lambda kind: iter(())), WatchCache()
    pages = [[_build_pod(990, "Running", "a")], [_build_pod(991, "Running", "b")]]
    watchers = _build_watchers(api, cache)
    watchers._tasks = [("Pod", None)]
    stored_before_page = list[int]()

    def list_pages(*_: Any) -> Iterator[tuple[list[Manifest], str]]:
        for page in pages:
            stored_before_page.append(len(cache.find_pods(Owner("team", "train", "uid-1"))))
            assert not watchers.is_synced()
            yield page, "1000"

    api.list_pages = list_pages  # type: ignore[method-assign]
    assert watchers._list_kind("Pod", None) == "1000"
    assert stored_before_page == [0, 1]
    assert watchers.is_synced()


def test_a_watcher_lives_while_a_long_list_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of a large cluster takes minutes. The kubelet must not restart the operator meanwhile."""
    now = 1000.0
    monkeypatch.setattr(watchers_module.time, "monotonic", lambda: now)
    api = WatchedApiServer(lambda kind: iter(()))
    watchers = _build_watchers(api, WatchCache())
    watchers._tasks = [("Pod", None)]
    assert watchers.is_alive(), "it has just started"
    now += watchers_module._PATIENCE_SECONDS + 1
    assert not watchers.is_alive(), "the API server has not answered"

    def list_pages(*_: Any) -> Iterator[tuple[list[Manifest], str]]:
        nonlocal now
        for name in "abc":
            yield [_build_pod(990, "Running", name)], "1000"
            now += watchers_module._PATIENCE_SECONDS - 1
            assert watchers.is_alive()

    api.list_pages = list_pages  # type: ignore[method-assign]
    watchers._list_kind("Pod", None)


def test_a_pod_that_is_made_while_pods_are_listed_stays_known() -> None:
    """The list does not contain the pod. It seemed to be removed: the attempt ended, and the pod was never deleted,
    because later messages about it were ignored."""
    api, cache = WatchedApiServer(lambda kind: iter(())), WatchCache()
    watchers = _build_watchers(api, cache)
    listed_pods = [_build_pod(990, "Running", "a")]
    cache.put("Pod", _build_pod(990, "Running", "gone"))

    def list_pages(*_: Any) -> Iterator[tuple[list[Manifest], str]]:
        cache.put("Pod", _build_pod(1001, "Pending", "new"))  # the answer to a write of the operator
        yield listed_pods, "1000"

    api.list_pages = list_pages  # type: ignore[method-assign]
    watchers._list_kind("Pod", None)
    observed = cache.observe(Owner("team", "train", "uid-1"), Policy(), None, {}, {})
    assert {pod.name for pod in observed.pods} == {"a", "new"}
    assert set(observed.removed_at) == {"gone"}
    cache.put("Pod", _build_pod(1002, "Running", "new"))
    observed = cache.observe(Owner("team", "train", "uid-1"), Policy(), None, {}, {})
    assert {pod.name: pod.phase for pod in observed.pods} == {"a": "Running", "new": "Running"}


def test_a_namespace_that_was_deleted_does_not_stop_the_work_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the namespace, the operator's rights in it are gone. It never listed everything again after its next start,
    and worked on no job at all."""
    monkeypatch.setattr(watchers_module, "_REFUSED_PAUSE", 0.01)
    api, cache = WatchedApiServer(lambda kind: iter(())), WatchCache()
    api.items, forbidden = [_build_job(991, 3)], {"deleted"}
    list_all, list_all_pages, watch_all = api.list, api.list_pages, api.watch

    def check_rights(kind: str, namespace: str | None) -> None:
        if namespace in forbidden:
            raise ApiError(403, f"{kind} is forbidden in {namespace}", "Forbidden")

    def list_objects(kind: str, namespace: str | None, **options: Any) -> tuple[list[Manifest], str]:
        check_rights(kind, namespace)
        return list_all(kind, namespace, **options)

    def list_pages(kind: str, namespace: str | None, selector: str) -> Iterator[tuple[list[Manifest], str]]:
        check_rights(kind, namespace)
        yield from list_all_pages(kind, namespace, selector)

    def watch(kind: str, namespace: str | None, selector: str, version: str) -> Iterator[Manifest]:
        check_rights(kind, namespace)
        yield from watch_all(kind, namespace, selector, version)

    monkeypatch.setattr(api, "watch", watch)
    monkeypatch.setattr(api, "list", list_objects)
    monkeypatch.setattr(api, "list_pages", list_pages)
    cluster: Any = api
    watchers = Watchers(cluster, cache, ["deleted", "team"], ("Pod",), wake=lambda keys: None)
    watchers.start()
    wait_until(watchers.is_synced)
    assert watchers.is_alive()
    assert watchers.serves("team")
    assert not watchers.serves("deleted"), "its pods are unknown"
    assert watchers.audit() == {("team", "train")}
    watchers.add("PodGroup")  # a gang scheduler is installed now
    assert watchers.is_synced()
    forbidden.clear()
    wait_until(lambda: watchers.serves("deleted"))
    forbidden.update(("deleted", "team"))
    wait_until(lambda: not watchers.is_synced())
    watchers.stop()
