"""Watches of a job and of its pods, over broken connections, refused watches and proxies that do not stream."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from topkube.cli.cluster.api import Api, build_path
from topkube.cli.cluster.jobs import build_job_path, build_pod_selector, find_job, select_own_pods
from topkube.errors import ClusterError

WATCH_SECONDS = 60
"""A watch is renewed after this time at the latest."""
PODS_PER_SECOND = 50
"""The most pods that repeated lists read per second: those of 4,096 ranks have tens of megabytes."""


class GrowingPause:
    """The pause before a request is repeated that should have lasted. It grows while the requests end at once without
    news."""

    FIRST_SECONDS, LONGEST_SECONDS = 0.5, 5.0
    SHORT_SECONDS = 1.0
    """No pause follows a request that lasted longer."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def find_next(self, lasted: float, has_news: bool) -> float:
        """Return the seconds to wait after a request that lasted `lasted` seconds."""
        if lasted > self.SHORT_SECONDS:
            self._seconds = 0.0
        elif has_news:
            self._seconds = self.FIRST_SECONDS
        else:
            self._seconds = min(max(2 * self._seconds, self.FIRST_SECONDS), self.LONGEST_SECONDS)
        return self._seconds


@dataclass
class JobWatch:
    """The stored states of one job."""

    api: Api
    name: str
    seconds: float | None = None
    """The time to follow the job; None: until it ends."""
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds if self.seconds is not None else float("inf")

    def read_states(self) -> Iterator[dict[str, Any] | None]:
        """Yield the job at once and after every change, and None when it has been deleted. Raises ClusterError if the
        job does not exist at first, and TimeoutError at the deadline."""
        job = find_job(self.api, self.name)
        uid = job["metadata"].get("uid")
        pause = GrowingPause()
        while True:
            yield job
            began, version = time.monotonic(), job["metadata"].get("resourceVersion")
            for event in self._read_events(version):
                changed = event.get("object") or {}
                if event.get("type") == "ERROR":  # the version is too old: read the job again
                    break
                if changed.get("metadata", {}).get("uid") != uid or event.get("type") == "DELETED":
                    yield None
                    return
                job = changed
                yield job
            has_news = job["metadata"].get("resourceVersion") != version
            seconds = pause.find_next(time.monotonic() - began, has_news)
            time.sleep(max(0.0, min(seconds, self._deadline - time.monotonic())))
            if time.monotonic() >= self._deadline:
                raise TimeoutError
            try:
                job = self.api.get(build_job_path(self.api, self.name))
            except ClusterError as error:
                if error.passing:
                    continue
                if error.status == 404:
                    yield None
                    return
                raise
            if job["metadata"].get("uid") != uid:
                yield None
                return

    def _read_events(self, version: str | None) -> Iterator[dict[str, Any]]:
        seconds = int(max(1, min(WATCH_SECONDS, self._deadline - time.monotonic())))
        query = {"fieldSelector": f"metadata.name={self.name}"}
        return _read_events(self.api, build_job_path(self.api), query, version, seconds)


@dataclass
class PodWatch:
    """The pods of one job. They are listed once and then watched: a list of all pods of a large job, repeated for each
    person who follows it, would load the API server.

    If watches are refused or end early, the pods are listed again after a time that grows with their number.
    """

    api: Api
    name: str
    uid: str | None
    """The job's UID."""
    workers: list[int] | None = None
    """The workers to watch; None: all, and the launcher."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Ends the watch when the next event arrives, or when the watch would be renewed."""

    def read_changes(self) -> Iterator[list[dict[str, Any]]]:
        """Yield all pods, and then those that are new or have changed. Raises ClusterError if the server refuses the
        list."""
        path, query = build_path(self.api.namespace, "pods"), build_pod_selector(self.name, self.workers)
        pause, version, count = GrowingPause(), None, 0
        while not self.stopped.is_set():
            began, has_news = time.monotonic(), False
            try:
                if version is None:
                    # The watch begins at the version of the list, so that the list may be slightly old.
                    listed = self.api.get(path, **query, resourceVersion="0")
                    pods = listed.get("items") or []
                    version, count = (listed.get("metadata") or {}).get("resourceVersion"), len(pods)
                    yield select_own_pods(pods, self.uid)
                for event in _read_events(self.api, path, {**query, "allowWatchBookmarks": True}, version):
                    if self.stopped.is_set():
                        return
                    if event.get("type") not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
                        version = None  # an error: the version is too old
                        break
                    version = event["object"]["metadata"].get("resourceVersion")
                    if event["type"] in ("ADDED", "MODIFIED"):
                        has_news = True
                        yield select_own_pods([event["object"]], self.uid)
            except ClusterError as error:
                if not error.passing:
                    raise
            lasted = time.monotonic() - began
            seconds = pause.find_next(lasted, has_news)
            if not has_news and lasted < WATCH_SECONDS / 2:
                version = None
            if version is None:
                seconds = max(seconds, find_list_pause(count))
            self.stopped.wait(seconds)


def find_list_pause(count: int) -> float:
    """Return the seconds between two lists of `count` pods."""
    return max(GrowingPause.FIRST_SECONDS, count / PODS_PER_SECOND)


def _read_events(
    api: Api, path: str, query: Mapping[str, Any], version: str | None, seconds: int = WATCH_SECONDS
) -> Iterator[dict[str, Any]]:
    """Yield the events of a watch since `version`. A watch that is refused or breaks ends without an error: the caller
    reads the object again."""
    query = {**query, "watch": True, "resourceVersion": version, "timeoutSeconds": seconds}
    try:
        for line in api.read_lines(path, query, silent_seconds=seconds + 10):
            yield json.loads(line)
    except (ClusterError, ValueError):
        return
