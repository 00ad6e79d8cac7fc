"""What a person asks for: `metadata` and `spec` of a TrainingJob.

Field names follow the Kubeflow MPIJob wherever it has the same idea.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, ValidationInfo, WithJsonSchema, field_validator

from topkube.job.part import (
    INT32,
    AbsolutePath,
    Allowed,
    JobName,
    Namespace,
    ObjectName,
    Part,
    Path,
    Quantity,
    Uri,
    problems,
    rules,
)
from topkube.job.quantity import in_bytes
from topkube.job.template import WORKER_TEMPLATE, mapping_problems, memory_limit, template_problems


class Metadata(Part):
    """Kubernetes' own: the name, and what Kubernetes or people attach to the object."""

    name: JobName = Field(description="name of the job; its pods, logs and files carry it")
    namespace: Namespace | None = Field(default=None, description="namespace on the cluster")
    labels: dict[str, str] = Field(default={}, description="labels; queues such as Kueue read them")
    annotations: dict[str, str] = Field(default={}, description="annotations")
    finalizers: list[str] = Field(default=[], description="set by Kubernetes")
    owner_references: list[JsonValue] = Field(default=[], description="set by Kubernetes")
    managed_fields: list[JsonValue] = Field(default=[], description="set by Kubernetes")
    uid: str | None = Field(default=None, description="set by Kubernetes")
    resource_version: str | None = Field(default=None, description="set by Kubernetes")
    generation: int | None = Field(default=None, description="set by Kubernetes")
    creation_timestamp: str | None = Field(default=None, description="set by Kubernetes")
    deletion_timestamp: str | None = Field(default=None, description="set by Kubernetes")
    deletion_grace_period_seconds: int | None = Field(default=None, description="set by Kubernetes")


class Launcher(Part):
    """The pod that starts MPI across the workers."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.template) || !has(self.colocate) || !self.colocate",
                "template has no effect when colocate is true: remove one of the two",
            )
        )
    )

    colocate: bool = Field(default=False, description="run the launcher inside worker 0 instead of a pod of its own")
    template: dict[str, JsonValue] | None = Field(
        default=None,
        description="pod template of the launcher: tolerations, service account, resources; preserved as written",
    )

    @field_validator("template")
    @classmethod
    def _own_pod(cls, template: dict[str, JsonValue] | None, info: ValidationInfo) -> dict[str, JsonValue] | None:
        if template is not None and info.data.get("colocate"):
            raise ValueError("has no effect when colocate is true: remove one of the two")
        problems(mapping_problems(template or {}))
        return template


class Aggregation(Part):
    """How gradients are summed over ranks."""

    algorithm: Literal["auto", "dense", "flat", "hierarchical", "torus2d", "naive", "hitopk"] = Field(
        default="auto",
        description="the all-reduce: auto chooses by cost; dense chooses "
        "among the dense ones (flat, hierarchical, torus2d); "
        "naive and hitopk send only the largest entries",
    )
    density: float = Field(default=0.01, gt=0, le=1, description="share of each gradient that is sent between nodes")
    warmup_steps: int = Field(
        default=0, ge=0, le=INT32, description="steps over which the density falls from 1 to its target"
    )
    wire: Literal["fp32", "bf16", "fp16"] = Field(default="bf16", description="format of the values sent between nodes")
    selection: Literal["topk", "mstopk"] = Field(
        default="topk",
        description="how entries are chosen: topk exactly, mstopk by the approximate threshold of the MSTopK paper",
    )
    momentum_correction: bool = Field(
        default=False,
        description="momentum (SGD, Adam, AdamW) before the selection: closer to dense training at low densities",
    )


class Cache(Part):
    """The node-local cache of the dataset."""

    medium: Literal["Ephemeral", "Node", "Memory"] = Field(
        default="Ephemeral",
        description="Ephemeral: a disk volume that ends with the pod; Node: "
        "a directory of the node that outlives the job, where an admin has turned it on for the namespace; "
        "Memory: no disk at all, counted against the container's memory limit",
    )
    size_limit: Quantity | None = Field(default=None, description="most bytes on disk per node")
    memory_limit: Quantity | None = Field(default=None, description="most bytes in memory per node")
    prefetch: bool = Field(default=True, description="fill the cache from the start of the pods on")

    @field_validator("memory_limit")
    @classmethod
    def _tiers(cls, memory: str | None, info: ValidationInfo) -> str | None:
        disk = info.data.get("size_limit")
        if memory and disk and in_bytes(memory) > in_bytes(disk):
            raise ValueError(f"{memory} is more than sizeLimit ({disk}); memory holds part of what the disk holds")
        return memory


class Dataset(Part):
    """The training data and its cache."""

    uri: Uri = Field(description="where the data is: anything fsspec opens")
    mount_path: AbsolutePath = Field(
        default="/data",
        description="where ranks find it: CachedDataset reads it by this name, "
        "and plain scripts see its files there, read-only, as they arrive",
    )
    cache: Cache = Field(default=Cache(), description="the node-local cache")
    secret_name: ObjectName | None = Field(
        default=None,
        description="secret with the store's credentials: its keys are environment variables of the workers",
    )


class Checkpoint(Part):
    """Where the state of the training is saved, and how often."""

    claim_name: ObjectName = Field(
        description="persistent volume claim; ReadWriteMany when workers are "
        "on several nodes. A local run saves in its run directory"
    )
    path: Annotated[
        str,
        StringConstraints(max_length=1024, pattern=r"^[^/\x00]"),
        Allowed("a relative path inside the claim, without '..'"),
    ] = Field(
        default="checkpoints",
        description="directory inside the claim",
        json_schema_extra=rules(("!self.matches('(^|/)[.][.](/|$)')", "leaves the claim: '..' is not allowed")),
    )
    every_steps: int = Field(default=500, ge=1, le=INT32, description="steps between two checkpoints")
    keep: int = Field(default=3, ge=1, le=INT32, description="checkpoints kept")

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        if ".." in path.split("/"):
            raise ValueError(f"{path!r} leaves the claim: '..' is not allowed")
        return path


class SchedulingPolicy(Part):
    """Passed on to queues and gang schedulers."""

    queue: ObjectName | None = Field(default=None, description="queue that admits the job")
    priority_class: ObjectName | None = Field(default=None, description="priority class of the pods")
    min_available: int | None = Field(
        default=None, ge=1, le=10_001, description="pods that must fit at once; all of them by default"
    )


class RunPolicy(Part):
    """When the job starts, ends, and is tried again."""

    suspend: bool = Field(default=False, description="true frees everything the job holds until it is false again")
    backoff_limit: int = Field(
        default=3, ge=0, le=1000, description="restarts after failures; preemption, drain and node loss are not counted"
    )
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, le=INT32, description="seconds after which the run is ended"
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, le=INT32, description="seconds after which a finished job is deleted; never by default"
    )
    clean_pod_policy: Literal["Running", "All", "None"] = Field(
        default="Running", description="pods deleted when the job ends: those still running, all, or none"
    )
    managed_by: Annotated[
        str,
        StringConstraints(
            max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$"
        ),
        Allowed("a domain, '/' and a name, at most 63 characters"),
    ] = Field(
        default="topkube.dev/operator", description="who reconciles the job; another value keeps our operator away"
    )
    scheduling_policy: SchedulingPolicy = Field(
        default=SchedulingPolicy(), description="for queues and gang schedulers"
    )


class Spec(Part):
    """What is to run, and on how much."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.runPolicy.schedulingPolicy.minAvailable) || "
                "self.runPolicy.schedulingPolicy.minAvailable <= self.workers + (self.launcher.colocate ? 0 : 1)",
                "runPolicy.schedulingPolicy.minAvailable is more than the job's pods (workers and launcher)",
            )
        )
    )

    workers: int = Field(default=1, ge=1, le=10_000, description="pods")
    slots_per_worker: int = Field(
        default=1, ge=1, le=256, description="ranks per pod; also its GPUs when GPUs are asked for"
    )
    spread: Literal["Node", "None"] = Field(
        default="Node", description="Node: one worker per node; None: wherever they fit"
    )
    mpi_implementation: Literal["MPICH", "OpenMPI"] = Field(default="MPICH", description="the MPI in the image")
    template: Annotated[dict[str, JsonValue], WithJsonSchema(WORKER_TEMPLATE)] = Field(
        description="a whole pod template for the workers, preserved as written; "
        "the container called `worker` (or the only one) "
        "needs image and command"
    )
    launcher: Launcher = Field(default=Launcher(), description="the pod that starts MPI")
    aggregation: Aggregation = Field(default=Aggregation(), description="how gradients are summed")
    dataset: Dataset | None = Field(default=None, description="the training data and its node-local cache")
    checkpoint: Checkpoint | None = Field(default=None, description="where and how often the training state is saved")
    run_policy: RunPolicy = Field(default=RunPolicy(), description="when the job starts, ends, and is tried again")

    @field_validator("template")
    @classmethod
    def _template(cls, template: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        problems(template_problems(template, info.data.get("slots_per_worker")))
        return template

    @field_validator("dataset")
    @classmethod
    def _fits(cls, dataset: Dataset | None, info: ValidationInfo) -> Dataset | None:
        """What the cache holds in memory counts against the container's limit: more than that ends in an OOM kill."""
        limit = memory_limit(info.data.get("template") or {})
        if dataset is None or limit is None:
            return dataset
        cache, parts = dataset.cache, list[str]()
        if cache.medium == "Memory" and (cache.size_limit or cache.memory_limit):
            parts.append(cache.size_limit or cache.memory_limit or "0")
        if cache.memory_limit:
            parts.append(cache.memory_limit)
        if sum(map(in_bytes, parts)) > limit:
            field = "sizeLimit" if cache.medium == "Memory" and cache.size_limit else "memoryLimit"
            text = f"{' and '.join(parts)} in memory are more than the worker's memory limit of {limit:,} bytes"
            path: Path = ("cache", field)
            problems([(path, f"{text}, which they count against: raise resources.limits.memory, or cache less")])
        return dataset

    @field_validator("run_policy")
    @classmethod
    def _gang(cls, policy: RunPolicy, info: ValidationInfo) -> RunPolicy:
        wanted, workers = policy.scheduling_policy.min_available, info.data.get("workers")
        launcher = info.data.get("launcher")
        if wanted is not None and workers is not None and launcher is not None:
            pods = workers + (0 if launcher.colocate else 1)
            if wanted > pods:
                path: Path = ("schedulingPolicy", "minAvailable")
                problems([(path, f"{wanted} is more than the job's {pods} pods (workers and launcher)")])
        return policy
