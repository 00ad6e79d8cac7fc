"""What the operator reports: `status` of a TrainingJob. Every field may be absent, and what is empty should be: the API
server of Debian's Kubernetes 1.20 takes an empty string for null and refuses it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from topkube.job.part import Part

Phase = Literal["Pending", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed"]


class Condition(Part):
    """Kubernetes' metav1.Condition."""

    type: Literal["Created", "Scheduled", "Running", "Restarting", "Suspended", "Succeeded", "Failed"] = Field(
        description="what is true or not"
    )
    status: Literal["True", "False", "Unknown"] = Field(description="whether it is")
    reason: str = Field(default="", description="one CamelCase word for programs")
    message: str = Field(default="", description="a sentence for people")
    last_transition_time: str | None = Field(default=None, description="when `status` last changed")
    observed_generation: int | None = Field(default=None, description="generation of the spec that was looked at")


class ReplicaCount(Part):
    """Pods of one kind."""

    active: int = Field(default=0, ge=0, description="pods that exist and have not ended")
    ready: int = Field(default=0, ge=0, description="pods that have called the launcher")
    succeeded: int = Field(default=0, ge=0, description="pods that ended with 0")
    failed: int = Field(default=0, ge=0, description="pods that ended otherwise")


class ReplicaStatuses(Part):
    """Pods by kind."""

    launcher: ReplicaCount | None = Field(default=None, description="the launcher")
    workers: ReplicaCount | None = Field(default=None, description="the workers")


class Progress(Part):
    """How far the training is."""

    step: int | None = Field(default=None, ge=0, description="finished steps")
    total_steps: int | None = Field(default=None, ge=0, description="steps of the whole training")
    percent: int | None = Field(default=None, ge=0, le=100, description="share of the steps that is done")
    eta_seconds: int | None = Field(default=None, ge=0, description="expected seconds to the end")
    loss: str | None = Field(default=None, description="loss of the last step")
    samples_per_second: float | None = Field(default=None, ge=0, description="samples per second over all ranks")
    updated_at: str | None = Field(default=None, description="when this was read")


class CachedNode(Part):
    """The cache on one node."""

    name: str = Field(description="the node")
    cached_bytes: int = Field(default=0, ge=0, description="bytes it holds")


class CacheStatus(Part):
    """The node-local cache."""

    hit_ratio: str | None = Field(default=None, description="share of the samples read that the node had")
    remote_bytes: int | None = Field(default=None, ge=0, description="bytes that the job's pods read from the remote")
    nodes: list[CachedNode] = Field(default=[], max_length=256, description="by node; the key is `name`")


class FirstFailure(Part):
    """The rank that failed first in the last failed attempt, and why."""

    pod: str | None = Field(default=None, description="its pod")
    rank: int | None = Field(default=None, ge=0, description="its rank")
    reason: str | None = Field(default=None, description="one word, such as OOMKilled")
    exit_code: int | None = Field(
        default=None, description="exit code; 128 and the signal's number where a signal ended it"
    )
    message: str | None = Field(default=None, description="a sentence for people")
    log_tail: str | None = Field(default=None, max_length=4096, description="the last lines of its log, at most 4 KiB")


class Status(Part):
    """What is known about the job."""

    phase: Phase | None = Field(default=None, description="where the job is in its life")
    observed_generation: int | None = Field(default=None, description="generation of the spec that was looked at")
    accepted_spec: dict[str, JsonValue] | None = Field(
        default=None, description="the spec that the job follows: a change that is refused is in spec, and not in here"
    )
    workers_ready: str | None = Field(default=None, description="ready workers of all, such as 2/2")
    conditions: list[Condition] = Field(default=[], description="standard conditions; the key is `type`")
    replica_statuses: ReplicaStatuses | None = Field(default=None, description="pods by kind")
    progress: Progress | None = Field(default=None, description="how far the training is")
    cache: CacheStatus | None = Field(default=None, description="the node-local cache")
    attempt: int | None = Field(default=None, ge=0, description="number of the current attempt")
    restarts: int | None = Field(default=None, ge=0, description="restarts counted against backoffLimit")
    disruptions: int | None = Field(default=None, ge=0, description="restarts after preemption, drain or node loss")
    first_failure: FirstFailure | None = Field(
        default=None, description="the first failing rank of the last failed attempt"
    )
    start_time: str | None = Field(default=None, description="when the job first ran")
    completion_time: str | None = Field(default=None, description="when it ended")
