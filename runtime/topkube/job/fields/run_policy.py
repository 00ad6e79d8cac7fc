"""`spec.runPolicy`: when the job starts, ends and is restarted, and how it is queued."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from topkube.job.base.part import INT32, Allowed, ObjectName, Part
from topkube.job.fields.failure_policy import FailurePolicy


class SchedulingPolicy(Part):
    """Settings for queues and gang schedulers."""

    queue: ObjectName | None = Field(default=None, description="queue that admits the job")
    priority_class: ObjectName | None = Field(default=None, description="priority class of the pods")
    min_available: int | None = Field(
        default=None, ge=1, le=10_001, description="number of pods that must fit at the same time; all pods by default"
    )


class RunPolicy(Part):
    """When the job starts, ends and is restarted."""

    suspend: bool = Field(
        default=False, description="true: delete the job's pods and free their resources until it is false again"
    )
    backoff_limit: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="number of restarts after failures; preemption, drain and node loss do not count",
    )
    failure_policy: FailurePolicy = Field(
        default=FailurePolicy(), description="which failures end the job, and which restart it"
    )
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, le=INT32, description="seconds after which the run ends"
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, le=INT32, description="seconds after which a finished job is deleted; by default it is kept"
    )
    clean_pod_policy: Literal["Running", "All", "None"] = Field(
        default="Running", description="which pods are deleted when the job ends: those that still run, all, or none"
    )
    managed_by: Annotated[
        str,
        StringConstraints(
            max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$"
        ),
        Allowed("a domain, '/' and a name, at most 63 characters"),
    ] = Field(
        default="topkube.dev/operator",
        description="the controller of the job; with another value, the TopKube operator ignores the job",
    )
    scheduling_policy: SchedulingPolicy = Field(
        default=SchedulingPolicy(), description="settings for queues and gang schedulers"
    )
