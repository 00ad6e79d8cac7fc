"""`spec.dataset`: the training data and its cache on each node."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from topkube.job.base.part import AbsolutePath, ObjectName, Part, Quantity, Uri
from topkube.job.base.quantity import parse_bytes


class Cache(Part):
    """The cache of the dataset on each node."""

    medium: Literal["Ephemeral", "Node", "Memory"] = Field(
        default="Ephemeral",
        description="Ephemeral: a disk volume that is deleted with the pod; Node: a directory of the node that "
        "outlives the job, if an admin has enabled it for the namespace; "
        "Memory: no disk, counted against the container's memory limit",
    )
    size_limit: Quantity | None = Field(default=None, description="largest size on the disk of a node")
    memory_limit: Quantity | None = Field(default=None, description="largest size in the memory of a node")
    prefetch: bool = Field(default=True, description="fill the cache in the background as soon as the pods start")

    @field_validator("memory_limit")
    @classmethod
    def _check_memory_limit(cls, memory: str | None, info: ValidationInfo) -> str | None:
        disk = info.data.get("size_limit")
        if memory and disk and parse_bytes(memory) > parse_bytes(disk):
            raise ValueError(f"{memory} is more than sizeLimit ({disk}); memory holds part of what the disk holds")
        return memory


class Dataset(Part):
    """The training data and its cache."""

    uri: Uri = Field(description="address of the data: any URI that fsspec opens")
    mount_path: AbsolutePath = Field(
        default="/data",
        description="directory of the data in the pods: CachedDataset opens the dataset by this path, "
        "and plain scripts find its files there, read-only, as they arrive",
    )
    cache: Cache = Field(default=Cache(), description="the cache on each node")
    secret_name: ObjectName | None = Field(
        default=None,
        description="secret with the credentials of the store; its keys become environment variables of the workers",
    )
