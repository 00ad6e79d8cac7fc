"""What the operator sees of one job: its pods and other children, nodes, the launcher's word. Small enough to be kept.

The watch cache turns API objects into these as they arrive and forgets the rest; `reconcile.plan` reads nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from topkube_operator import names

Gang = Literal["volcano", "scheduler-plugins"]
_LEFT = timedelta(seconds=5)
"""A pod that is being deleted and in which nothing runs may be there for so long."""


def timestamp(text: str | None) -> datetime | None:
    """Kubernetes' RFC 3339 text as a time; None where it is none."""
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def written(time: datetime) -> str:
    """A time as Kubernetes writes it."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod, as its kubelet reports it."""

    waiting: str = ""
    """Why it has not started, such as ImagePullBackOff."""
    waiting_message: str = ""
    image: str = ""
    """What it waits for, where it waits."""
    started: datetime | None = None
    exit_code: int | None = None
    """None while it has not ended."""
    ended: datetime | None = None
    ended_reason: str = ""
    ended_message: str = ""
    """The termination message."""

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> Container:
        state = status.get("state") or {}
        over, running, waiting = state.get("terminated"), state.get("running"), state.get("waiting")
        if over:
            return cls(
                started=timestamp(over.get("startedAt")),
                exit_code=int(over.get("exitCode", 0)),
                ended=timestamp(over.get("finishedAt")),
                ended_reason=over.get("reason") or "",
                ended_message=over.get("message") or "",
            )
        if running:
            return cls(started=timestamp(running.get("startedAt")))
        waiting = waiting or {}
        reason, message = waiting.get("reason") or "", waiting.get("message") or ""
        return cls(waiting=reason, waiting_message=message, image=status.get("image") or "")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the job."""

    name: str
    uid: str
    role: str
    """launcher or worker."""
    index: int
    """The worker's; -1 for a launcher."""
    attempt: int
    """The attempt in which it was made."""
    created: datetime
    shape: str = ""
    launcher_address: str = ""
    workers: int = 0
    main: str = ""
    """The name of the container that we wrapped."""
    deletion: datetime | None = None
    """When it is to be gone, where it is being deleted."""
    deletion_grace: int = 0
    """Seconds from the request to delete it to that time."""
    node: str = ""
    address: str = ""
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    ready: bool = False
    unschedulable: str = ""
    """The scheduler's words."""
    unscheduled: str = "Unschedulable"
    """The same in one word: Unschedulable, or SchedulingGated where somebody holds the pod back."""
    disruption: str = ""
    """The reason of the DisruptionTarget condition."""
    disruption_message: str = ""
    containers: Mapping[str, Container] = field(default_factory=dict)

    @classmethod
    def from_object(cls, pod: Mapping[str, Any]) -> Pod:
        metadata, status, spec = pod["metadata"], pod.get("status") or {}, pod.get("spec") or {}
        labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
        conditions = {one.get("type"): one for one in status.get("conditions") or ()}
        scheduled = conditions.get("PodScheduled") or {}
        target = conditions.get("DisruptionTarget") or {}
        statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
        return cls(
            name=metadata["name"],
            uid=metadata.get("uid") or "",
            role=labels.get(names.ROLE) or "",
            index=_number(labels.get(names.WORKER_INDEX), -1),
            attempt=_number(labels.get(names.ATTEMPT), 0),
            created=timestamp(metadata.get("creationTimestamp")) or datetime.fromtimestamp(0, UTC),
            shape=notes.get(names.SHAPE) or "",
            launcher_address=notes.get(names.LAUNCHER_ADDRESS) or "",
            workers=_number(notes.get(names.WORKERS), 0),
            main=notes.get(names.DEFAULT_CONTAINER) or "",
            deletion=timestamp(metadata.get("deletionTimestamp")),
            deletion_grace=_number(metadata.get("deletionGracePeriodSeconds"), 0),
            node=spec.get("nodeName") or "",
            address=status.get("podIP") or "",
            phase=status.get("phase") or "Pending",
            reason=status.get("reason") or "",
            message=status.get("message") or "",
            ready=(conditions.get("Ready") or {}).get("status") == "True",
            unschedulable=scheduled.get("message") or scheduled.get("reason") or ""
            if scheduled.get("status") == "False"
            else "",
            unscheduled=scheduled.get("reason") or "Unschedulable",
            disruption=target.get("reason") or "" if target.get("status") == "True" else "",
            disruption_message=target.get("message") or "",
            containers={one["name"]: Container.from_status(one) for one in statuses},
        )

    @property
    def container(self) -> Container:
        """The wrapped container; one that says nothing where its kubelet has not spoken."""
        return self.containers.get(self.main) or Container()

    @property
    def failed_container(self) -> str:
        """Which container made the pod fail: the wrapped one, or another, such as an init container, that kept it from
        ever running. Empty where none has ended with an error."""
        if self.container.exit_code is not None:
            return self.main if self.container.exit_code else ""
        return next((name for name, one in self.containers.items() if one.exit_code), "")

    @property
    def launching(self) -> Container:
        """The launcher's container, in a pod of its own or beside worker 0."""
        return self.containers.get(names.LAUNCHER) or Container() if self.role == names.WORKER else self.container

    @property
    def over(self) -> bool:
        """Whether the wrapped container has ended; sidecars may still run."""
        return self.phase in ("Succeeded", "Failed") or self.container.exit_code is not None

    @property
    def succeeded(self) -> bool:
        code = self.container.exit_code
        return code == 0 if code is not None else self.phase == "Succeeded"

    @property
    def active(self) -> bool:
        """Whether it still holds resources."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def overdue(self) -> datetime | None:
        """From when on a pod that is being deleted is there for nothing: all its containers have ended, or none has
        begun and, with the job's Secret gone, none can. None where it is not being deleted, or something of it runs.
        """
        if self.deletion is None:
            return None
        known = self.containers.values()
        if not self.active:
            ends = [one.ended for one in known if one.ended is not None]
            return min(self.deletion, max(ends)) + _LEFT if ends else self.deletion + _LEFT
        begun = any(one.started is not None or one.exit_code is not None for one in known)
        if begun or self.phase != "Pending":
            return None
        return self.deletion - timedelta(seconds=self.deletion_grace) + _LEFT


@dataclass(frozen=True, slots=True)
class Child:
    """A Service, Secret, NetworkPolicy or PodGroup of the job."""

    kind: str
    name: str
    uid: str
    content: Mapping[str, Any]
    """What we compare: of a Secret only digests."""

    @classmethod
    def from_object(cls, kind: str, child: Mapping[str, Any]) -> Child:
        metadata = child["metadata"]
        return cls(kind, metadata["name"], metadata.get("uid") or "", comparable(kind, child))


def comparable(kind: str, child: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a child that has to be as we want it. Secrets are kept as digests: the cache holds no key."""
    if kind == "Secret":
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in (child.get("data") or {}).items()}
    return dict(child.get("spec") or {})


def satisfies(found: Any, wanted: Any) -> bool:
    """Whether `found` holds all of `wanted`; what the API server added does not count, elements of a list do."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(satisfies(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(satisfies(one, other) for one, other in zip(found, wanted, strict=True))
        )
    return bool(found == wanted)


@dataclass(frozen=True, slots=True)
class Report:
    """What the launcher of an attempt said last. `status` is LauncherStatus's data."""

    attempt: int
    state: str
    joined: int
    missing: tuple[int, ...]
    heard: datetime
    progress: Mapping[str, Any] | None = None
    first_failure: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a child could not be made."""

    reason: Literal["ForeignObject", "Terminating", "Refused"]
    """It belongs to somebody else; it is what an earlier job of this name left; the API server refused it."""
    message: str


@dataclass(frozen=True)
class Policy:
    """What the admin and the cluster decide for all jobs."""

    seed: bytes = b"\0" * 32
    """Credentials derive from it."""
    gang: Gang | None = None
    """Which PodGroup the cluster knows."""
    gang_scheduler: str = ""
    """Scheduler of gangs; empty: the gang's usual one."""
    operator_namespace: str = ""
    """Where the operator's pods are; empty: outside the cluster."""
    rendezvous_seconds: float = 600.0
    """How long a worker that runs may take to call its launcher."""
    stall_seconds: float = 1800.0
    """How long all ranks may go without finishing a step, after the first one."""
    startup_seconds: float = 3600.0
    """The same for the first step."""
    verdict_seconds: float = 10.0
    """How long a launcher may take to notice that a worker has died, before the attempt is ended without it."""
    lost_seconds: float = 20.0
    """How long a worker may be silent before its launcher ends the attempt."""
    backoff_seconds: float = 5.0
    """Wait before the second of several quick restarts; doubled each time, at most five minutes."""
    cache_free_percent: int = 15
    """Of a disk that a job's cache shares with others. The kubelet evicts pods when less than 10% are free."""


@dataclass(frozen=True)
class Observed:
    """Everything `plan` may look at, apart from the job itself."""

    pods: tuple[Pod, ...] = ()
    children: Mapping[tuple[str, str], Child] = field(default_factory=dict)
    """By kind and name; only what this job controls."""
    troubles: Mapping[tuple[str, str], Trouble] = field(default_factory=dict)
    """By kind and name: what could not be made at the last attempt."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes that are gone or that nobody has heard from."""
    report: Report | None = None
    gone: Mapping[str, datetime] = field(default_factory=dict)
    """When pods went that were seen to go, by name."""
    last: Mapping[str, Pod] = field(default_factory=dict)
    """Those pods, as they were seen last."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Log tails by pod name; empty text where there is no log."""
    policy: Policy = Policy()
    node_cache: bool = False
    """Whether the job's namespace has a node cache."""
    warm: Mapping[str, int] = field(default_factory=dict)
    """Nodes that hold some of the job's dataset, by hostname, with the percentage."""


def digest(value: Any) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _number(text: Any, otherwise: int) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        return otherwise
