"""The streams of the logs of a job: one for each container, in a thread of its own while the job is followed.

A pod that survives a restart is one stream. If a pod is replaced, its successor's stream follows. A stream that breaks
is requested again from its last time stamp, so that no line is lost or shown twice.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from topkube.cli.cluster.api import Api, build_path
from topkube.cli.cluster.jobs import find_main_container, list_pods, read_container_state, read_index
from topkube.cli.cluster.log_options import LogOptions
from topkube.errors import ClusterError

RETRY_SECONDS = 0.5
"""The pause before a stream that broke is requested again."""
SILENT_SECONDS = 3600.0
"""The time without a line after which a stream is requested again."""
MOST_STREAMS = 512
"""The most containers that are followed at the same time."""
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


@dataclass
class LogStreams:
    """The streams of all pods, with a thread for each."""

    api: Api
    options: LogOptions
    uid: str | None
    """The job's UID."""
    seen: dict[tuple[str, str], threading.Thread] = field(default_factory=dict)
    _lines: queue.Queue[tuple[LogSource, str, bytes] | Exception] = field(default_factory=lambda: queue.Queue(10_000))
    _full: bool = False

    def follow_new_containers(self) -> Iterator[str]:
        """Start to follow containers that have started. Yield notes for the person."""
        try:
            sources = list_sources(list_pods(self.api, self.options.job, self.uid), self.options)
        except ClusterError as error:
            if not error.passing:
                raise
            return
        for source in sources:
            if source.key in self.seen or source.is_waiting:
                continue
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
        return not any(thread.is_alive() for thread in self.seen.values()) and self._lines.empty()

    def _read(self, source: LogSource) -> None:
        try:
            for stamp, text in read_lines(self.api, source, self.options, follow=True):
                self._lines.put((source, stamp, text))
        except Exception as error:  # the thread that takes the lines must receive every error
            self._lines.put(error)


def read_lines(api: Api, source: LogSource, options: LogOptions, follow: bool) -> Iterator[tuple[str, bytes]]:
    """Yield (time stamp, line) of a container; nothing if its pod is gone or it has never run. With `follow`, continue
    until the container ends, over broken connections. Raises ClusterError if the log cannot be read."""
    path = build_path(api.namespace, "pods", source.pod["metadata"]["name"])
    query: dict[str, Any] = {
        "container": source.container,
        "timestamps": True,
        "follow": follow,
        "tailLines": options.tail,
    }
    last, shown = "", set[bytes]()  # the newest time stamp, and the lines that carry it
    while True:
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
                yield stamp, text
            is_complete = True
        except ClusterError as error:
            if error.status in (400, 404):
                return  # the container has never run, or the pod is gone
            if not follow or not error.passing:
                raise
        # If the stream broke, the container may have ended since then, with lines that are not read yet.
        if not follow or (is_complete and not _is_running(api, path, source)):
            return
        query = {**query, "tailLines": None, "sinceTime": last or None}
        time.sleep(RETRY_SECONDS)


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
