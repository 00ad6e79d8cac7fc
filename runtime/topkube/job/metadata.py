"""`metadata` of a TrainingJob: the metadata of the Kubernetes object."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, JsonValue

from topkube.job.base.part import JobName, Namespace, Part, limit_entries


class Metadata(Part):
    """The metadata of the Kubernetes object."""

    name: JobName = Field(description="name of the job; the names of its pods, logs and files contain it")
    namespace: Namespace | None = Field(default=None, description="namespace on the cluster")
    labels: Annotated[dict[str, str], BeforeValidator(limit_entries)] = Field(
        default={}, description="labels, which queues such as Kueue read"
    )
    annotations: Annotated[dict[str, str], BeforeValidator(limit_entries)] = Field(
        default={}, description="annotations, for people and other tools"
    )
    finalizers: list[str] = Field(default=[], description="set by Kubernetes")
    owner_references: list[JsonValue] = Field(default=[], description="set by Kubernetes")
    managed_fields: list[JsonValue] = Field(default=[], description="set by Kubernetes")
    uid: str | None = Field(default=None, description="set by Kubernetes")
    resource_version: str | None = Field(default=None, description="set by Kubernetes")
    generation: int | None = Field(default=None, description="set by Kubernetes")
    creation_timestamp: str | None = Field(default=None, description="set by Kubernetes")
    deletion_timestamp: str | None = Field(default=None, description="set by Kubernetes")
    deletion_grace_period_seconds: int | None = Field(default=None, description="set by Kubernetes")
