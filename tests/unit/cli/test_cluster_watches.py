"""Watches of a job and its pods: how often a server is asked that refuses watches, ends them at once, or streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from topkube.cli.cluster import watches
from topkube.cli.cluster.watches import GrowingPause, JobWatch, PodWatch
from topkube.errors import ClusterError

JOB = {"metadata": {"name": "j", "uid": "u", "resourceVersion": "5"}, "status": {"phase": "Running"}}
REFUSED = ClusterError("pods is forbidden", status=403)


class SimulatedServer:
    """A connection to a server with one job and `count` pods. `watch` returns the events of a watch, or raises. Time
    passes only in pauses."""

    namespace = "default"

    def __init__(self, watch: Callable[[Mapping[str, Any]], list[dict[str, Any]]], count: int = 1) -> None:
        self.watch, self.count = watch, count
        self.queries: list[dict[str, Any]] = []
        self.watched: list[Mapping[str, Any]] = []

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        self.queries.append(query)
        if path.endswith("/pods"):
            return {"metadata": {"resourceVersion": "10"}, "items": [build_pod(str(n)) for n in range(self.count)]}
        return JOB

    def read_lines(self, path: str, query: Mapping[str, Any], silent_seconds: float) -> Iterator[bytes]:
        self.watched.append(query)
        yield from (json.dumps(event).encode() for event in self.watch(query))


class Clock:
    """A clock that pauses move."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SimulatedEvent(threading.Event):
    """An event whose waits move a clock. It is set after `seconds`."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.now += timeout or 0.0
        if self.clock.now >= self.seconds:
            self.set()
        return self.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watches.time, "sleep", clock.sleep)
    monkeypatch.setattr(watches.time, "monotonic", lambda: clock.now)
    return clock


def build_pod(name: str, version: str = "1") -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": version}}


def refuse(query: Mapping[str, Any]) -> list[dict[str, Any]]:
    raise REFUSED


def end_at_once(query: Mapping[str, Any]) -> list[dict[str, Any]]:
    return []


def test_pauses_grow_while_requests_end_at_once_without_news() -> None:
    pause = GrowingPause()
    assert [pause.find_next(0.1, False) for _ in range(6)] == [0.5, 1, 2, 4, 5, 5]
    assert pause.find_next(0.1, True) == 0.5, "news shorten the pause"
    assert pause.find_next(0.1, False) == 1
    assert pause.find_next(30, False) == 0, "a request that lasted needs no pause"
    assert pause.find_next(0.1, False) == 0.5


@pytest.mark.parametrize("watch", [refuse, end_at_once])
def test_a_job_whose_watch_ends_at_once_is_read_after_growing_pauses(clock: Clock, watch: Any) -> None:
    server = SimulatedServer(watch)
    with pytest.raises(TimeoutError):
        list(JobWatch(server, "j", 60).read_states())  # type: ignore[arg-type]
    assert len(server.watched) == len(server.queries) == 15
    assert clock.now == 60


@pytest.mark.parametrize("watch", [refuse, end_at_once])
@pytest.mark.parametrize(("count", "lists"), [(1, 27), (4096, 2)])
def test_pods_are_listed_more_rarely_the_more_there_are(clock: Clock, watch: Any, count: int, lists: int) -> None:
    """The pods of a job of 4,096 ranks are read every 82 s, if they cannot be watched."""
    server = SimulatedServer(watch, count)
    changes = list(PodWatch(server, "j", None, stopped=SimulatedEvent(clock, 120)).read_changes())  # type: ignore[arg-type]
    assert [len(pods) for pods in changes] == [count] * lists
    assert all(query["resourceVersion"] == "0" for query in server.queries), "a cached answer is enough"


def test_pods_are_listed_once_and_then_watched(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(watches, "WATCH_SECONDS", 0)  # every watch has lasted long enough
    stopped = threading.Event()
    rounds: Iterator[list[dict[str, Any]]] = iter(
        [
            [{"type": "MODIFIED", "object": build_pod("a", "11")}],
            [{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}}],
            [{"type": "DELETED", "object": build_pod("a", "21")}],
            [{"type": "ERROR", "object": {"code": 410}}],
            [{"type": "ADDED", "object": build_pod("b", "31")}],
        ]
    )

    def watch(query: Mapping[str, Any]) -> list[dict[str, Any]]:
        events = next(rounds, None)
        if events is None:
            stopped.set()
        return events or []

    monkeypatch.setattr(stopped, "wait", clock.sleep)
    server = SimulatedServer(watch)
    watched = PodWatch(server, "j", None, [3, 7], stopped)  # type: ignore[arg-type]
    names = [[pod["metadata"]["name"] for pod in pods] for pods in watched.read_changes()]
    assert names == [["0"], ["a"], ["0"], ["b"]], "the list, a change, the list after the error, a change"
    assert len(server.queries) == 2
    assert [query["resourceVersion"] for query in server.watched] == ["10", "11", "20", "21", "10", "31"]
    selector = "topkube.dev/job-name=j,topkube.dev/worker-index in (3,7)"
    assert {query["labelSelector"] for query in [*server.watched, *server.queries]} == {selector}


def test_a_refused_list_is_an_error(clock: Clock) -> None:
    server = SimulatedServer(end_at_once)
    server.get = lambda path, **query: refuse(query)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ClusterError, match="forbidden"):
        list(PodWatch(server, "j", None, stopped=SimulatedEvent(clock, 1)).read_changes())  # type: ignore[arg-type]
