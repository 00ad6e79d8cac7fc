"""Kubernetes Events on jobs. A thread of its own writes them. Repeated Events increase a count."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from topkube.job import API_VERSION, KIND
from topkube.timestamps import format_timestamp
from topkube_operator.model.status import Event
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError

_log = logging.getLogger(__name__)
_REMEMBERED = 4096
"""The most Events, and the most jobs, that the recorder remembers."""
_REPEATED_WITHIN = 600.0
"""An Event that occurs again within this time increases the count of the earlier Event."""
_BURST, _PER_SECOND = 25.0, 1 / 60
"""The token bucket of a job: the most Events at once, and the new Events per second."""
_LONGEST = 1024
"""The longest message that Kubernetes accepts."""


@dataclass
class _RecordedEvent:
    """An Event that was written, and the time of its last occurrence (monotonic)."""

    name: str
    count: int
    last_at: float


class EventRecorder:
    """Records Events. The caller never waits: Events are dropped if the queue is full or a job has too many Events."""

    def __init__(self, cluster: ApiClient, identity: str) -> None:
        self._cluster, self._identity = cluster, identity
        self._queue: queue.Queue[tuple[dict[str, Any], Event] | None] = queue.Queue(maxsize=10_000)
        self._recorded: OrderedDict[str, _RecordedEvent] = OrderedDict()
        """The Events that were written, by the digest of their text."""
        self._budgets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """The tokens of each job, and when they were counted (monotonic)."""
        self._thread = threading.Thread(target=self._write_events, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write the waiting Events, for at most three seconds."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        if self._thread.is_alive():
            self._thread.join(timeout=3)

    def record(self, metadata: dict[str, Any], events: Iterable[Event]) -> None:
        """Queue Events on the job with this `metadata`."""
        for event in events:
            try:
                self._queue.put_nowait((metadata, event))
            except queue.Full:
                return

    def _write_events(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write_event(*item)
            except ApiError as error:
                _log.warning("an Event could not be written: %s", error)
            except Exception:
                _log.exception("an Event could not be written")

    def _write_event(self, metadata: dict[str, Any], event: Event) -> None:
        """Write an Event on the job with this `metadata`, or increase the count of an equal Event."""
        now, time_text = time.monotonic(), format_timestamp(datetime.now(UTC))
        text = f"{metadata['uid']}/{event.type}/{event.reason}/{event.message}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        recorded = self._recorded.get(digest)
        if recorded is not None and now - recorded.last_at < _REPEATED_WITHIN:
            recorded.count, recorded.last_at = recorded.count + 1, now
            self._recorded.move_to_end(digest)
            try:
                patch = {"count": recorded.count, "lastTimestamp": time_text}
                self._cluster.patch("Event", metadata["namespace"], recorded.name, patch)
                return
            except ApiError as error:
                if error.status != 404:
                    raise
        if not self._take_token(metadata["uid"], now):
            return
        name = f"{metadata['name'][:200]}.{time.time_ns():x}"
        self._cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": metadata["namespace"]},
                "involvedObject": {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": metadata["name"],
                    "namespace": metadata["namespace"],
                    "uid": metadata["uid"],
                    "resourceVersion": metadata.get("resourceVersion", ""),
                },
                "type": event.type,
                "reason": event.reason,
                "message": event.message[:_LONGEST],
                "source": {"component": "topkube-operator"},
                "reportingComponent": "topkube.dev/operator",
                "reportingInstance": self._identity[:128],
                "firstTimestamp": time_text,
                "lastTimestamp": time_text,
                "count": 1,
            }
        )
        self._recorded[digest] = _RecordedEvent(name, 1, now)
        if len(self._recorded) > _REMEMBERED:
            self._recorded.popitem(last=False)

    def _take_token(self, uid: str, now: float) -> bool:
        """Return True if the job's token bucket allows another Event. An Event that is dropped takes no token:
        otherwise a job with frequent Events would never get another one."""
        tokens, at = self._budgets.get(uid, (_BURST, now))
        tokens = min(_BURST, tokens + (now - at) * _PER_SECOND)
        is_allowed = tokens >= 1
        self._budgets[uid] = (tokens - 1 if is_allowed else tokens, now)
        self._budgets.move_to_end(uid)
        if len(self._budgets) > _REMEMBERED:
            self._budgets.popitem(last=False)
        return is_allowed
