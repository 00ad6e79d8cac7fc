"""The plan that `planning.planner.plan` returns and the plan executor carries out: plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from topkube_operator.model.observed import Pod
from topkube_operator.model.status import Event, Urgency


@dataclass(frozen=True)
class Deletion:
    """An object to delete. The UID protects another object of that name."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True)
class Release:
    """A launcher pod from which to remove our finalizer."""

    name: str
    uid: str


@dataclass(frozen=True)
class GroupEnd:
    """A pod to annotate, so that Kueue expects no more replacements in its pod group."""

    name: str
    uid: str


@dataclass(frozen=True)
class StatusPatch:
    """A merge patch of the status of a child, for the version of the child that it was made from."""

    kind: str
    name: str
    uid: str
    version: str
    status: Mapping[str, Any]


def find_releases(pods: Iterable[Pod]) -> tuple[Release, ...]:
    """Return the releases of those `pods` that have our finalizer."""
    return tuple(Release(pod.name, pod.uid) for pod in pods if pod.has_finalizer)


@dataclass(frozen=True)
class LogRequest:
    """A log tail that the planner needs before it can decide."""

    pod: str
    container: str


@dataclass(frozen=True)
class ObjectRequest:
    """An object of the whole cluster that the planner needs before it can decide."""

    kind: str
    name: str


@dataclass(frozen=True)
class Plan:
    """A plan: its steps are done in this order. An empty plan means that nothing is left to do."""

    status: Mapping[str, Any] = field(default_factory=dict)
    """Merge patch of the status. If it cannot be written, the rest of the plan is void."""
    urgency: Urgency = "now"
    delete: tuple[Deletion, ...] = ()
    apply: tuple[tuple[dict[str, Any], ...], ...] = ()
    """Manifests in stages: every manifest of a stage is applied before the next stage begins."""
    release: tuple[Release, ...] = ()
    end_groups: tuple[GroupEnd, ...] = ()
    """Carried out before `delete`."""
    events: tuple[Event, ...] = ()
    logs: tuple[LogRequest, ...] = ()
    """If there are log requests, the plan contains nothing else."""
    reads: tuple[ObjectRequest, ...] = ()
    """If there are requests for objects, the plan contains nothing else."""
    patches: tuple[StatusPatch, ...] = ()
    """Carried out after `delete`."""
    requeue: float | None = None
    """Seconds after which to plan again, if no event will cause it."""
    phase: str = ""
    restart_reason: str = ""
    """The reason of a restart that this plan begins."""
    start_seconds: float | None = None
    """Seconds from the start of the job to its first running rank. None if that is not new."""

    @property
    def is_empty(self) -> bool:
        writes = self.status or self.release or self.end_groups or self.delete or self.patches or self.apply
        return not (writes or self.logs or self.reads)
