"""The Events of jobs: how many each job may have."""

from __future__ import annotations

from typing import Any

import pytest

from topkube_operator.control import event_recorder
from topkube_operator.control.event_recorder import EventRecorder
from topkube_operator.model.status import Event


class _Events:
    """An API server that stores Events."""

    def __init__(self) -> None:
        self.messages = list[str]()

    def create(self, manifest: dict[str, Any]) -> None:
        self.messages.append(manifest["message"])


def test_a_job_with_too_many_events_still_gets_one_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that restarts every 20 s for hours shows why, also after the first Events have expired."""
    server, now = _Events(), 0.0
    monkeypatch.setattr(event_recorder.time, "monotonic", lambda: now)
    cluster: Any = server
    recorder = EventRecorder(cluster, "operator")
    metadata = {"name": "train", "namespace": "team", "uid": "uid-1"}
    for number in range(200):
        recorder._write_event(metadata, Event("Warning", "Restarting", f"attempt {number}"))
        now += 20.0
    burst = 25
    minutes = 200 * 20 // 60
    assert burst + minutes - 2 <= len(server.messages) <= burst + minutes
    assert int(server.messages[-1].split()[1]) >= 196
