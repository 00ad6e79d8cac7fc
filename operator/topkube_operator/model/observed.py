"""The observed state of one job: its pods and other children, nodes, and the launcher's last report.

The watch cache converts API objects into these classes when they arrive and keeps nothing else. `planning.planner.plan`
reads only these classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from topkube.job.base.part import INT32
from topkube.job.status import MOST_WORKERS
from topkube.launch.contract import TERMINATION_MESSAGE_BYTES
from topkube.timestamps import parse_timestamp
from topkube_operator.model import names
from topkube_operator.model.nodes import NodeFailure

Gang = Literal["volcano", "scheduler-plugins"]
_WORKLOAD_STATUS = ("admission", "admissionChecks", "conditions")
_REMOVAL_DELAY = timedelta(seconds=5)
"""How long a pod that is being deleted may remain after everything in it has ended."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod, as its kubelet reports the container."""

    waiting: str = ""
    """Why the container has not started, for example ImagePullBackOff."""
    waiting_message: str = ""
    image: str = ""
    """The image that a waiting container needs."""
    started: datetime | None = None
    exit_code: int | None = None
    """None until the container has ended."""
    ended: datetime | None = None
    ended_reason: str = ""
    ended_message: str = ""
    """The termination message."""

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> Container:
        state = status.get("state") or {}
        terminated, running, waiting = state.get("terminated"), state.get("running"), state.get("waiting")
        if terminated:
            return cls(
                started=parse_timestamp(terminated.get("startedAt")),
                exit_code=int(terminated.get("exitCode", 0)),
                ended=parse_timestamp(terminated.get("finishedAt")),
                ended_reason=terminated.get("reason") or "",
                ended_message=(terminated.get("message") or "")[:TERMINATION_MESSAGE_BYTES],
            )
        if running:
            return cls(started=parse_timestamp(running.get("startedAt")))
        waiting = waiting or {}
        reason, message = waiting.get("reason") or "", waiting.get("message") or ""
        return cls(waiting=reason, waiting_message=message, image=status.get("image") or "")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the job."""

    name: str
    uid: str
    role: str
    """`launcher` or `worker`."""
    index: int
    """The worker's index; -1 for a launcher."""
    attempt: int
    """The attempt for which the pod was made."""
    created: datetime
    shape: str = ""
    """A hash of the part of the spec that the pod was made from."""
    launcher_address: str = ""
    """The address of the launcher's Service in the worker's environment."""
    avoids_nodes: bool = False
    """True if the operator forbids nodes that the template allows."""
    workers: int = 0
    """The number of workers that a launcher expects; 0 for pods without a launcher."""
    main_container: str = ""
    """The name of the container that the operator has wrapped."""
    deletion: datetime | None = None
    """The end of the pod's grace period, if the pod is being deleted."""
    deletion_grace: int = 0
    """Seconds from the deletion request to `deletion`."""
    node: str = ""
    address: str = ""
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    ready: bool = False
    scheduling_message: str = ""
    """Why the scheduler has not placed the pod; empty if the scheduler has not refused the pod."""
    scheduling_reason: str = "Unschedulable"
    """The reason that belongs to the message: Unschedulable, or SchedulingGated if a gate holds the pod back."""
    scheduled: datetime | None = None
    """When the scheduler placed the pod."""
    disruption: str = ""
    """The reason of the DisruptionTarget condition."""
    disruption_message: str = ""
    finalizers: tuple[str, ...] = ()
    """Our finalizers and others'. They keep the pod after its deletion and its end."""
    pod_group: str = ""
    """The Kueue pod group of the pod; empty if the pod is in none."""
    is_retriable: bool = True
    """False if an annotation of the pod states that its group makes no more replacements."""
    containers: Mapping[str, Container] = field(default_factory=dict)
    """Containers and init containers, by name."""
    sidecars: frozenset[str] = frozenset()
    """The native sidecars, by name: init containers with restartPolicy Always. They never make the pod fail."""

    @classmethod
    def from_object(cls, pod: Mapping[str, Any]) -> Pod:
        metadata, status, spec = pod["metadata"], pod.get("status") or {}, pod.get("spec") or {}
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        conditions = {condition.get("type"): condition for condition in status.get("conditions") or ()}
        scheduled = conditions.get("PodScheduled") or {}
        target = conditions.get("DisruptionTarget") or {}
        refusal = scheduled.get("message") or scheduled.get("reason") or ""
        statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
        return cls(
            name=metadata["name"],
            uid=metadata.get("uid") or "",
            role=labels.get(names.ROLE) or "",
            index=_read_number(labels.get(names.WORKER_INDEX), -1, MOST_WORKERS - 1),
            attempt=_read_number(labels.get(names.ATTEMPT), 0, INT32),
            created=parse_timestamp(metadata.get("creationTimestamp")) or datetime.fromtimestamp(0, UTC),
            shape=annotations.get(names.SHAPE) or "",
            launcher_address=annotations.get(names.LAUNCHER_ADDRESS) or "",
            avoids_nodes=bool(annotations.get(names.AVOIDED_NODES)),
            workers=_read_number(annotations.get(names.WORKERS), 0, MOST_WORKERS),
            main_container=_choose_main_container(labels.get(names.ROLE), annotations),
            deletion=parse_timestamp(metadata.get("deletionTimestamp")),
            deletion_grace=_read_number(metadata.get("deletionGracePeriodSeconds"), 0, INT32),
            node=spec.get("nodeName") or "",
            address=status.get("podIP") or "",
            phase=status.get("phase") or "Pending",
            reason=status.get("reason") or "",
            message=status.get("message") or "",
            ready=(conditions.get("Ready") or {}).get("status") == "True",
            scheduling_message=refusal if scheduled.get("status") == "False" else "",
            scheduling_reason=scheduled.get("reason") or "Unschedulable",
            scheduled=parse_timestamp(scheduled.get("lastTransitionTime"))
            if scheduled.get("status") == "True"
            else None,
            disruption=target.get("reason") or "" if target.get("status") == "True" else "",
            disruption_message=target.get("message") or "",
            finalizers=tuple(metadata.get("finalizers") or ()),
            pod_group=labels.get(names.KUEUE_GROUP) or "",
            is_retriable=annotations.get(names.KUEUE_RETRIABLE) != "false",
            containers={entry["name"]: Container.from_status(entry) for entry in statuses},
            sidecars=frozenset(
                entry["name"] for entry in spec.get("initContainers") or () if entry.get("restartPolicy") == "Always"
            ),
        )

    @property
    def container(self) -> Container:
        """The wrapped container; an empty Container if its kubelet has not reported it."""
        return self.containers.get(self.main_container) or Container()

    @property
    def failed_container(self) -> str:
        """The name of the container that made the pod fail: the wrapped container, or another container (such as an
        init container) that prevented its start. Empty if no container has ended with an error."""
        if self.container.exit_code is not None:
            return self.main_container if self.container.exit_code else ""
        failed = (name for name, container in self.containers.items() if container.exit_code)
        return next((name for name in failed if name not in self.sidecars), "")

    @property
    def has_launcher(self) -> bool:
        """True if the pod contains the launcher of its attempt."""
        return self.role == names.LAUNCHER or (self.role == names.WORKER and self.workers > 0)

    def is_launcher_of(self, attempt: int) -> bool:
        """Return True if the pod contains the launcher of this attempt."""
        return self.attempt == attempt and self.has_launcher

    @property
    def launcher_container(self) -> Container:
        """The launcher's container, in its own pod or beside worker 0."""
        return self.containers.get(names.LAUNCHER) or Container()

    @property
    def has_finalizer(self) -> bool:
        """True if the pod has our finalizer."""
        return names.ENDING in self.finalizers

    @property
    def deletion_requested(self) -> datetime | None:
        """The time of the deletion request; None if nobody has deleted the pod."""
        return self.deletion - timedelta(seconds=self.deletion_grace) if self.deletion is not None else None

    @property
    def has_ended(self) -> bool:
        """True if the wrapped container has ended. Sidecars may still run."""
        return self.phase in ("Succeeded", "Failed") or self.container.exit_code is not None

    @property
    def has_succeeded(self) -> bool:
        """True if the wrapped container has ended with exit code 0."""
        code = self.container.exit_code
        return code == 0 if code is not None else self.phase == "Succeeded"

    @property
    def is_active(self) -> bool:
        """True if the pod still holds resources."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def removable_from(self) -> datetime | None:
        """The time from which a pod that is being deleted may be removed without its kubelet.

        Either all containers of the pod have ended, or no container has started and none can start, because the job's
        Secret is gone. None if the pod is not being deleted, if something in it runs, or if a finalizer keeps it
        (another deletion would change nothing).
        """
        if self.deletion is None or self.finalizers:
            return None
        containers = self.containers.values()
        if not self.is_active:
            ends = [container.ended for container in containers if container.ended is not None]
            return min(self.deletion, max(ends)) + _REMOVAL_DELAY if ends else self.deletion + _REMOVAL_DELAY
        has_started = any(entry.started is not None or entry.exit_code is not None for entry in containers)
        if has_started or self.phase != "Pending":
            return None
        assert self.deletion_requested is not None
        return self.deletion_requested + _REMOVAL_DELAY


@dataclass(frozen=True, slots=True)
class Child:
    """A Service, Secret, NetworkPolicy or PodGroup of the job."""

    kind: str
    name: str
    uid: str
    content: Mapping[str, Any]
    """The part that the operator compares. A Secret's data are stored as digests."""
    is_being_deleted: bool = False
    """True if only a finalizer, usually of another controller, keeps the object."""
    version: str = ""
    """The resource version, for changes of the status."""

    @classmethod
    def from_object(cls, kind: str, child: Mapping[str, Any]) -> Child:
        metadata = child["metadata"]
        is_being_deleted = bool(metadata.get("deletionTimestamp"))
        content, version = select_compared_content(kind, child), metadata.get("resourceVersion") or ""
        return cls(kind, metadata["name"], metadata.get("uid") or "", content, is_being_deleted, version)


def select_compared_content(kind: str, child: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a child that must match. A Secret's data become digests, so that the cache holds no key. A
    Workload's part is its queue, and the status that Kueue writes."""
    if kind == "Workload":
        status = child.get("status")
        kept = {name: status[name] for name in _WORKLOAD_STATUS if name in status} if isinstance(status, dict) else {}
        return {"queueName": (child.get("spec") or {}).get("queueName") or "", "status": kept}
    if kind == "Secret":
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in (child.get("data") or {}).items()}
    return dict(child.get("spec") or {})


def satisfies(actual: Any, required: Any) -> bool:
    """Return True if `actual` contains all of `required`. Additional fields and list entries in `actual` are
    ignored."""
    return find_difference(actual, required) is None


def find_difference(actual: Any, required: Any) -> str | None:
    """Return the path, such as `.ingress[0].ports`, of the first part of `required` that is missing in `actual`; None
    if `actual` contains all of it. Each entry of a required list needs its own entry in the actual list, in any
    order."""
    if isinstance(required, Mapping):
        if not isinstance(actual, Mapping):
            return ""
        for key, value in required.items():
            path = find_difference(actual.get(key), value)
            if path is not None:
                return f".{key}{path}"
        return None
    if isinstance(required, list):
        if not isinstance(actual, list):
            return ""
        unmatched = list(actual)
        for index, value in enumerate(required):
            match = next((position for position, entry in enumerate(unmatched) if satisfies(entry, value)), None)
            if match is None:
                return f"[{index}]"
            del unmatched[match]
        return None
    return None if actual == required else ""


@dataclass(frozen=True, slots=True)
class LauncherReport:
    """The last report of an attempt's launcher. The mappings are the data of a LauncherStatus."""

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

    reason: Literal["ForeignObject", "Terminating", "Refused", "Conflict", "Throttled", "ServerError", "Contested"]
    """ForeignObject: the object belongs to something else. Terminating: an earlier job of this name left the object,
    and the object is being deleted. Refused: the API server or an admission webhook refused the object. Conflict:
    another client changed the namespace's quota at the same time. Throttled: the API server answered 429. ServerError:
    the API server answered 5xx. Contested: something else keeps changing the object."""
    message: str
    wait: float = 0.0
    """Seconds that the server asks us to wait (Retry-After)."""


@dataclass(frozen=True)
class Policy:
    """The settings of the admin and of the cluster for all jobs."""

    seed: bytes = b"\0" * 32
    """The secret from which all credentials derive."""
    gang: Gang | None = None
    """The kind of PodGroup that the cluster serves."""
    workloads: str = ""
    """The API version of the Workloads (Kueue) that the cluster serves; empty if it serves none."""
    gang_scheduler: str = ""
    """The scheduler of gangs; empty means the gang's usual scheduler."""
    operator_namespace: str = ""
    """The namespace of the operator's pods; empty means outside the cluster."""
    rendezvous_seconds: float = 600.0
    """How long a running worker may take to call its launcher."""
    stall_seconds: float = 1800.0
    """How long all ranks may go without finishing a step, after the first step."""
    startup_seconds: float = 3600.0
    """The same for the first step."""
    verdict_seconds: float = 10.0
    """How long a launcher may take to notice a dead worker before the operator ends the attempt itself."""
    lost_seconds: float = 20.0
    """How long a worker may be silent before its launcher ends the attempt."""
    backoff_seconds: float = 5.0
    """Pause before the second of several quick restarts. The pause doubles each time, up to five minutes."""
    check_address: bool = True
    """True if launchers accept workers only from the address of the worker's pod. Jobs can override this."""
    cache_free_percent: int = 15
    """Share of a disk to leave free if a job's cache shares the disk. Kubelets evict pods below 10% free."""
    metrics_from: tuple[Mapping[str, Any], ...] = ()
    """Who may scrape workers, as peers of a NetworkPolicy; empty: pods with Prometheus's usual label."""


@dataclass(frozen=True)
class Observed:
    """Everything that the planner may read, apart from the job itself."""

    pods: tuple[Pod, ...] = ()
    children: Mapping[tuple[str, str], Child] = field(default_factory=dict)
    """The children that this job controls, by kind and name."""
    troubles: Mapping[tuple[str, str], Trouble] = field(default_factory=dict)
    """Children that could not be made at the last try, by kind and name."""
    paused: frozenset[tuple[str, str]] = frozenset()
    """Children to leave unchanged for now, by kind and name, because something else keeps changing them."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes that are gone, or that the control plane has lost contact with."""
    report: LauncherReport | None = None
    removed_at: Mapping[str, datetime] = field(default_factory=dict)
    """When pods were removed, by name."""
    last_seen: Mapping[str, Pod] = field(default_factory=dict)
    """The removed pods, as they were seen last, by name."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Log tails by pod name; an empty text if there is no log."""
    policy: Policy = Policy()
    objects: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Objects of the whole cluster that the planner has asked for, by kind and name; empty if one cannot be read."""
    node_cache: bool = False
    """True if the job's namespace has a node cache."""
    warm: Mapping[str, int] = field(default_factory=dict)
    """The percentage of the job's dataset that each node holds, by hostname."""
    nodes: int = 0
    """The number of nodes in contact that are not cordoned; 0 if the operator may not list nodes."""
    hostnames: Mapping[str, str] = field(default_factory=dict)
    """The label `kubernetes.io/hostname` of the nodes with pods, faults or failures, by node. A node is missing if the
    operator has not seen it, or if it was removed long ago."""
    node_faults: Mapping[str, str] = field(default_factory=dict)
    """The conditions that report a fault, by node."""
    node_failures: tuple[NodeFailure, ...] = ()
    """Failures of other jobs that began on a node."""


def hash_data(value: Any) -> str:
    """Return a short hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _choose_main_container(role: Any, annotations: Mapping[str, Any]) -> str:
    """Return the name of the wrapped container. A launcher's container has a fixed name, because the annotation of a
    launcher pod may name another container whose log people want to read."""
    return names.LAUNCHER if role == names.LAUNCHER else annotations.get(names.DEFAULT_CONTAINER) or ""


def _read_number(text: Any, default: int, largest: int) -> int:
    """Return a number that the API server stores as text or as a number. `default` if there is none, or if it is larger
    than `largest`: users who may create pods write any number into a label or an annotation."""
    try:
        number = int(text)
    except (TypeError, ValueError):
        return default
    return number if number <= largest else default
