"""What `reconcile.plan` decides, and the controller carries out: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from topkube_operator.status import Event, Urgency


@dataclass(frozen=True)
class Deletion:
    """An object to delete. The UID keeps another one of that name alive."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True)
class LogRequest:
    """A log tail that the next plan needs."""

    pod: str
    container: str


@dataclass(frozen=True)
class Plan:
    """What to do, in this order. An empty plan: all is as it should be."""

    status: Mapping[str, Any] = field(default_factory=dict)
    """Merge patch of the status; void the rest when it cannot be written."""
    urgency: Urgency = "now"
    delete: tuple[Deletion, ...] = ()
    apply: tuple[tuple[dict[str, Any], ...], ...] = ()
    """Manifests in stages: all of one are made before the next."""
    events: tuple[Event, ...] = ()
    logs: tuple[LogRequest, ...] = ()
    """When there are any, the plan holds nothing else."""
    requeue: float | None = None
    """Look again after so many seconds, where no event would wake us."""
    phase: str = ""
    restarted: str = ""
    """The reason of a restart that this plan begins."""
    started: float | None = None
    """Seconds from the start of the job to its first running rank, when that is new."""

    @property
    def idle(self) -> bool:
        return not (self.status or self.delete or self.apply or self.logs)
