"""`status` of a TrainingJob: what the operator reports. Every field may be absent. An empty text should be absent: the
API server of Debian's Kubernetes 1.20 takes it for null and refuses it.

Progress, CacheStatus and FirstFailure come from pods, which run code of users. Their fields declare how long a text and
how large a number may be, and `Reported` enforces these bounds. They are defined only here: the launcher's responses,
the termination messages and the CRD's schema follow them.
"""

from __future__ import annotations

import math
import re
import typing
from typing import Annotated, Any, Literal

import annotated_types
from pydantic import Field, JsonValue, field_validator, model_validator
from pydantic.fields import FieldInfo

from topkube.job.base.part import INT32, Part
from topkube.job.base.problems import strip_annotation
from topkube.job.fields.failure_policy import MOST_DISRUPTIONS

Phase = Literal["Pending", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed"]


LARGEST_COUNT = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""
MOST_NODES = 16
"""The largest number of entries in nodeFailures and avoidedNodes."""
MOST_LOST_WORKERS = 256
"""The largest number of entries in lostWorkers."""
MOST_WORKERS, MOST_RANKS = 10_000, 10_000 * 256
_WORD = r"^[A-Za-z][-A-Za-z0-9_.:/]*$"
"""Kubelets report reasons such as OutOfnvidia.com/gpu."""
_TAILS = ("log_tail",)
"""If one of these texts is too long, its end is kept; other texts keep their beginning."""


class Reported(Part):
    """A part of the status that a pod reports. Text is cut at the field's length. A number out of bounds, a malformed
    reason and a value of another type are left out. A list keeps its first entries."""

    @model_validator(mode="before")
    @classmethod
    def _bound_values(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        bounded = dict(data)
        for name, field in cls.model_fields.items():
            for key in {name, field.alias or name} & bounded.keys():
                bounded[key] = bound_value(bounded[key], field, keep_end=name in _TAILS)
        return {key: value for key, value in bounded.items() if value is not None}


def bound_value(value: Any, field: FieldInfo, *, keep_end: bool = False) -> Any:
    """Return the value within the bounds of the field: cut if necessary, or None if it is not allowed."""
    limits: dict[type, Any] = {type(limit): limit for limit in field.metadata}
    kind = strip_annotation(field.annotation)
    most = limits[annotated_types.MaxLen].max_length if annotated_types.MaxLen in limits else None
    if kind is str:
        if not isinstance(value, str):
            return None
        pattern = next((limit.pattern for limit in field.metadata if getattr(limit, "pattern", None)), None)
        if pattern is not None and not re.fullmatch(pattern, value):
            return None
        text = value.encode(errors="replace").decode()  # half a surrogate pair cannot be written
        return text if most is None else text[-most:] if keep_end else text[:most]
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            return None
        low, high = limits.get(annotated_types.Ge), limits.get(annotated_types.Le)
        number = isinstance(value, int) or math.isfinite(value)
        fits = number and (low is None or value >= low.ge) and (high is None or value <= high.le)
        return value if fits else None
    if typing.get_origin(kind) is list and isinstance(value, list):
        return value[:most]
    return value


class Condition(Part):
    """Kubernetes' metav1.Condition."""

    type: Literal[
        "Created", "Scheduled", "Running", "Restarting", "CheckpointFailed", "Suspended", "Succeeded", "Failed"
    ] = Field(description="name of the condition")
    status: Literal["True", "False", "Unknown"] = Field(
        description="True if the condition holds, False if not, or Unknown"
    )
    reason: str = Field(default="", description="one CamelCase word for programs")
    message: str = Field(default="", description="a sentence for people")
    last_transition_time: str | None = Field(default=None, description="time when `status` last changed")
    observed_generation: int | None = Field(
        default=None, description="generation of the spec that the operator has read"
    )


class ReplicaCount(Part):
    """Pods of one kind."""

    active: int = Field(default=0, ge=0, description="pods that exist and have not ended")
    ready: int = Field(default=0, ge=0, description="pods that have called the launcher")
    succeeded: int = Field(default=0, ge=0, description="pods that ended with exit code 0")
    failed: int = Field(default=0, ge=0, description="pods that failed")


class ReplicaStatuses(Part):
    """Pods by kind."""

    launcher: ReplicaCount | None = Field(default=None, description="the launcher")
    workers: ReplicaCount | None = Field(default=None, description="the workers")


class Progress(Reported):
    """The progress of the training."""

    step: int | None = Field(default=None, ge=0, le=LARGEST_COUNT, description="finished steps")
    total_steps: int | None = Field(default=None, ge=0, le=LARGEST_COUNT, description="steps of the whole training")
    percent: int | None = Field(default=None, ge=0, le=100, description="finished share of all steps, in percent")
    eta_seconds: int | None = Field(default=None, ge=0, le=LARGEST_COUNT, description="estimated seconds until the end")
    loss: str | None = Field(default=None, max_length=32, description="loss of the last step")
    samples_per_second: float | None = Field(
        default=None, ge=0, le=LARGEST_COUNT, description="samples per second over all ranks"
    )
    checkpoint_step: int | None = Field(
        default=None, ge=0, le=LARGEST_COUNT, description="step of the newest checkpoint; absent if there is none"
    )
    checkpoint_at: str | None = Field(
        default=None, max_length=40, description="time when the newest checkpoint was first reported"
    )
    failed_checkpoints: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST_COUNT,
        description="checkpoints that could not be written since the start of this attempt; absent if all could",
    )
    choice: str | None = Field(
        default=None, max_length=256, description="what `auto` or `dense` stands for, and why, by measurements"
    )
    updated_at: str | None = Field(default=None, max_length=40, description="time when the progress was read")


class CachedNode(Reported):
    """The cache on one node."""

    name: str = Field(max_length=253, description="the node")
    cached_bytes: int = Field(default=0, ge=0, le=LARGEST_COUNT, description="bytes in the cache of the node")


class CacheStatus(Reported):
    """The caches of the job's nodes."""

    hit_ratio: str | None = Field(
        default=None, max_length=32, description="share of the samples read that were in the cache"
    )
    remote_bytes: int | None = Field(
        default=None, ge=0, le=LARGEST_COUNT, description="bytes that the job's pods read from the remote"
    )
    nodes: list[CachedNode] = Field(default=[], max_length=256, description="one entry per node; the key is `name`")

    @field_validator("nodes", mode="after")
    @classmethod
    def _drop_repeated_nodes(cls, nodes: list[CachedNode]) -> list[CachedNode]:
        # `name` is the list's key: the API server refuses a status with a key that occurs twice.
        return list({node.name: node for node in nodes}.values())


class FirstFailure(Reported):
    """The rank that failed first in the last failed attempt, and the reason."""

    pod: str | None = Field(default=None, max_length=253, description="pod of the rank")
    node: str | None = Field(default=None, max_length=253, description="node of the pod, as the operator saw it")
    rank: int | None = Field(default=None, ge=0, le=MOST_RANKS - 1, description="number of the rank")
    reason: str | None = Field(
        default=None, max_length=64, pattern=_WORD, description="reason in one word, such as OOMKilled"
    )
    exit_code: int | None = Field(
        default=None,
        ge=-INT32,
        le=INT32,
        description="exit code of the rank; 128 plus the signal's number if a signal ended it",
    )
    message: str | None = Field(default=None, max_length=2048, description="a sentence for people")
    log_tail: str | None = Field(
        default=None, max_length=4096, description="last lines of the rank's log, at most 4 KiB"
    )


class NodeFailures(Part):
    """Failures of the job's attempts that began on one node and may be caused by the node."""

    name: str = Field(max_length=253, description="the node")
    count: int = Field(default=1, ge=1, description="number of attempts that failed first on this node")
    reason: str = Field(default="", max_length=64, description="reason of the last of these failures")
    last_failure_time: str | None = Field(
        default=None, max_length=40, description="time of the last of these failures; it is forgotten after an hour"
    )


class AvoidedNode(Part):
    """A node on which the pods of the current attempt are not placed."""

    name: str = Field(max_length=253, description="the node, by its label kubernetes.io/hostname")
    reason: str = Field(default="", max_length=64, description="a condition of the node, or the reason of a failure")
    message: str = Field(default="", max_length=512, description="a sentence for people")
    until: str | None = Field(default=None, max_length=40, description="time after which new pods may use the node")


class Status(Part):
    """The state of the job."""

    phase: Phase | None = Field(default=None, description="phase of the job")
    observed_generation: int | None = Field(
        default=None, description="generation of the spec that the operator has read"
    )
    accepted_spec: dict[str, JsonValue] | None = Field(
        default=None,
        description="the spec that the job follows; a refused change is in `spec` but not here. "
        "If the spec is larger than 128 KiB, digests replace the pod templates",
    )
    workers_ready: str | None = Field(
        default=None, description="ready workers of all, such as 2/2; of a succeeded job, the workers that succeeded"
    )
    conditions: list[Condition] = Field(default=[], description="standard conditions; the key is `type`")
    replica_statuses: ReplicaStatuses | None = Field(default=None, description="pods by kind")
    progress: Progress | None = Field(default=None, description="progress of the training")
    cache: CacheStatus | None = Field(default=None, description="caches of the job's nodes")
    attempt: int | None = Field(default=None, ge=0, description="number of the current attempt")
    restarts: int | None = Field(default=None, ge=0, description="restarts counted against backoffLimit")
    disruptions: int | None = Field(default=None, ge=0, description="restarts after preemption, drain or node loss")
    restarts_in_a_row: int | None = Field(
        default=None,
        ge=0,
        description="restarts and disruptions since the last attempt that ran for at least a minute; "
        "absent if no attempt did",
    )
    recent_disruptions: list[Annotated[str, Field(max_length=40)]] = Field(
        default=[],
        max_length=MOST_DISRUPTIONS + 1,
        description="times of the disruptions that count against maxDisruptions; absent without maxDisruptions",
    )
    first_failure: FirstFailure | None = Field(
        default=None, description="the rank that failed first in the last failed attempt"
    )
    lost_workers: list[Annotated[int, Field(ge=0, le=MOST_WORKERS - 1)]] = Field(
        default=[],
        max_length=MOST_LOST_WORKERS,
        description="indices of workers that looked alive when the last attempt failed, and are replaced all the same; "
        f"{MOST_LOST_WORKERS} entries stand for all workers",
    )
    node_failures: list[NodeFailures] = Field(
        default=[], max_length=MOST_NODES, description="nodes on which attempts failed first; the key is `name`"
    )
    avoided_nodes: list[AvoidedNode] = Field(
        default=[], max_length=MOST_NODES, description="nodes that new pods of the job avoid; the key is `name`"
    )
    start_time: str | None = Field(default=None, description="time when the job first ran")
    completion_time: str | None = Field(default=None, description="time when the job ended")
