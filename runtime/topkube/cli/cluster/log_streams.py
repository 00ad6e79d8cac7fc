"""The streams of the logs of a job: one for each container, in a thread of its own while the job is followed.

A pod that survives a restart is one stream. If a pod is replaced, its successor's stream follows. A stream that breaks
is requested again from its last time stamp, so that no line is lost or shown twice.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from topkube.cli.cluster.api import Api, build_path
from topkube.cli.cluster.jobs import find_main_container, list_pods, read_container_state, read_index, sort_pods
from topkube.cli.cluster.log_options import LogOptions
from topkube.cli.cluster.watches import GrowingPause, PodWatch
from topkube.errors import ClusterError

SILENT_SECONDS = 3600.0
"""The time without a line after which a stream is requested again."""
MOST_STREAMS = 512
"""The most containers that are followed at the same time."""
_PUT_SECONDS = 1.0
_LAUNCHER = "launcher"
"""The name of the launcher's container, in a pod of its own or beside worker 0."""
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) ?")


@dataclass(frozen=True)
class LogSource:
    """A container of a pod whose log is shown."""

    pod: dict[str, Any]
    container: str

    @property
    def key(self) -> tuple[str, str]:
        return self.pod["metadata"]["uid"], self.container

    @property
    def index(self) -> int:
        """The worker's index; -1 for a launcher, which may be a container of worker 0."""
        return -1 if self.container == _LAUNCHER else read_index(self.pod)

    @property
    def is_waiting(self) -> bool:
        return read_container_state(self.pod, self.container)[0] == "waiting"


def list_sources(pods: list[dict[str, Any]], options: LogOptions) -> list[LogSource]:
    sources = []
    for pod in pods:
        launchers = [container["name"] for container in pod["spec"]["containers"] if container.get("name") == _LAUNCHER]
        sources += [LogSource(pod, name) for name in dict.fromkeys([find_main_container(pod), *launchers])]
    return [source for source in sources if options.workers is None or source.index in options.workers]


class LogStreams:
    """The streams of all pods, with a thread for each, and a thread that watches the pods. `uid` is the job's."""

    def __init__(self, api: Api, options: LogOptions, uid: str | None) -> None:
        self.seen: dict[tuple[str, str], threading.Thread] = {}
        self._api, self._options, self._uid = api, options, uid
        self._stopped = threading.Event()
        self._lines: queue.Queue[tuple[LogSource, str, bytes] | Exception] = queue.Queue(10_000)
        self._changes: queue.SimpleQueue[list[dict[str, Any]] | Exception] = queue.SimpleQueue()
        self._pods: dict[str, dict[str, Any]] = {}  # the pods, by UID, with containers that are not followed yet
        self._full = False
        threading.Thread(target=self._watch_pods, daemon=True).start()

    def stop(self) -> None:
        """End the threads: at the next line or event, or when they would ask again."""
        self._stopped.set()

    def follow_new_containers(self) -> Iterator[str]:
        """Start to follow containers that have started. Yield notes for the person. Raises ClusterError if the server
        refuses to list the pods."""
        while not self._changes.empty():
            change = self._changes.get()
            if isinstance(change, Exception):
                raise change
            self._add_pods(change)
        for source in self._list_startable():
            if (
                len(self.seen) >= MOST_STREAMS
                and sum(thread.is_alive() for thread in self.seen.values()) >= MOST_STREAMS
            ):
                if not self._full:
                    yield f"only the first {MOST_STREAMS} containers are followed; choose others: --worker INDEX"
                self._full = True
                return
            self.seen[source.key] = threading.Thread(target=self._read, args=(source,), daemon=True)
            self.seen[source.key].start()
        self._pods = {uid: pod for uid, pod in self._pods.items() if self._list_unseen(pod)}

    def list_all_pods(self) -> bool:
        """Add the pods that exist now: the watch may be behind. Return False if the server does not answer now."""
        try:
            self._add_pods(list_pods(self._api, self._options.job, self._uid, self._options.workers))
        except ClusterError as error:
            if not error.passing:
                raise
            return False
        return True

    def take_lines(self, seconds: float) -> Iterator[tuple[LogSource, str, bytes]]:
        """Yield lines as they arrive, for at most `seconds`. Raises ClusterError if the server refuses a log."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                seconds_left = deadline - time.monotonic()
                entry = self._lines.get(timeout=seconds_left) if seconds_left > 0 else self._lines.get_nowait()
            except queue.Empty:
                return
            if isinstance(entry, Exception):
                raise entry
            yield entry

    def has_ended(self) -> bool:
        """Return True if all streams have ended and all their lines were taken."""
        is_alive = any(thread.is_alive() for thread in self.seen.values())
        return not is_alive and self._lines.empty() and not self._list_startable()

    def _add_pods(self, pods: list[dict[str, Any]]) -> None:
        self._pods |= {pod["metadata"]["uid"]: pod for pod in pods}

    def _list_unseen(self, pod: dict[str, Any]) -> list[LogSource]:
        return [source for source in list_sources([pod], self._options) if source.key not in self.seen]

    def _list_startable(self) -> list[LogSource]:
        """Return the containers that have started and are not followed yet."""
        pods = sort_pods(self._pods.values())
        return [source for pod in pods for source in self._list_unseen(pod) if not source.is_waiting]

    def _watch_pods(self) -> None:
        watch = PodWatch(self._api, self._options.job, self._uid, self._options.workers, self._stopped)
        try:
            for pods in watch.read_changes():
                self._changes.put(pods)
        except Exception as error:  # the thread that shows the logs must receive every error
            self._changes.put(error)

    def _read(self, source: LogSource) -> None:
        try:
            for stamp, text in read_lines(self._api, source, self._options, self._stopped):
                if not self._put((source, stamp, text)):
                    return
        except Exception as error:  # the thread that takes the lines must receive every error
            self._put(error)

    def _put(self, entry: tuple[LogSource, str, bytes] | Exception) -> bool:
        """Hand an entry to the thread that takes the lines. Return False if nobody takes them any more."""
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._lines.put(entry, timeout=_PUT_SECONDS)
                return True
        return False


def read_lines(
    api: Api, source: LogSource, options: LogOptions, stopped: threading.Event | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield (time stamp, line) of a container; nothing if its pod is gone or it has never run. With `stopped`, continue
    until the container ends or `stopped` is set, over broken connections. Raises ClusterError if the log cannot be
    read."""
    follow = stopped is not None
    path = build_path(api.namespace, "pods", source.pod["metadata"]["name"])
    query: dict[str, Any] = {
        "container": source.container,
        "timestamps": True,
        "follow": follow,
        "tailLines": options.tail,
    }
    last, shown = "", set[bytes]()  # the newest time stamp, and the lines that carry it
    pause = GrowingPause()
    while True:
        began, has_news = time.monotonic(), False
        resumed_at, is_complete = _normalize_stamp(last), False
        try:
            for line in api.read_lines(f"{path}/log", query, silent_seconds=SILENT_SECONDS if follow else None):
                match = _STAMP.match(line)
                stamp, text = (match[1].decode(), line[match.end() :]) if match else (last, line)
                if _normalize_stamp(stamp) < resumed_at or (
                    stamp == last and line in shown and _normalize_stamp(stamp) == resumed_at
                ):
                    continue  # shown before the stream broke
                if stamp != last:
                    last, shown = stamp, set()
                shown.add(line)
                has_news = True
                yield stamp, text
            is_complete = True
        except ClusterError as error:
            if error.status in (400, 404):
                return  # the container has never run, or the pod is gone
            if not follow or not error.passing:
                raise
        # If the stream broke, the container may have ended since then, with lines that are not read yet.
        if stopped is None or (is_complete and not _is_running(api, path, source)):
            return
        query = {**query, "tailLines": None, "sinceTime": last or None}
        if stopped.wait(pause.find_next(time.monotonic() - began, has_news)):
            return


def _normalize_stamp(stamp: str) -> str:
    """Return a time stamp in a form that sorts: 12:00:01.5Z -> 12:00:01.500000000."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return f"{seconds}.{fraction:<09}"


def _is_running(api: Api, path: str, source: LogSource) -> bool:
    try:
        pod = api.get(path)
    except ClusterError as error:
        if error.passing:
            return True
        if error.status == 404:
            return False
        raise
    same = pod["metadata"].get("uid") == source.pod["metadata"]["uid"]
    return same and read_container_state(pod, source.container)[0] == "running"
