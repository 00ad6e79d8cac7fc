"""`metadata` and `spec` of a TrainingJob: what the user asks for.

Field names follow the Kubeflow MPIJob if it has the same field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from topkube.algorithms import (
    AUTO,
    CHOICES,
    DENSE_WIRE,
    DENSITY,
    MATRIX_RANK,
    MOMENTUM_CORRECTION,
    MOST_STAGES,
    OUTER_LEARNING_RATE,
    OUTER_MOMENTUM,
    OVERLAP,
    PERIOD,
    SELECTION,
    WARMUP_STEPS,
    WIRE,
    AlgorithmParameter,
    Stage,
    check_schedule,
    explain_dense_wire,
    explain_overlap,
    find_algorithm,
    reads_dense_wire,
)
from topkube.errors import ArgumentError
from topkube.job.algorithm_name import EXPLAINED, AlgorithmName, is_foreign
from topkube.job.base.part import (
    INT32,
    AbsolutePath,
    Allowed,
    JobName,
    Namespace,
    ObjectName,
    OneOf,
    Part,
    Path,
    Quantity,
    Uri,
    few_entries,
    raise_problems,
    rules,
)
from topkube.job.base.quantity import in_bytes, parse_quantity
from topkube.job.failure_policy import FailurePolicy
from topkube.job.source import Setup, Source
from topkube.job.template import WORKER_TEMPLATE, mapping_problems, memory_limit, template_problems

_LABEL_PREFIX = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_LABEL_KEY = rf"^({_LABEL_PREFIX}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"


class Metadata(Part):
    """The metadata of the Kubernetes object."""

    name: JobName = Field(description="name of the job; the names of its pods, logs and files contain it")
    namespace: Namespace | None = Field(default=None, description="namespace on the cluster")
    labels: Annotated[dict[str, str], BeforeValidator(few_entries)] = Field(
        default={}, description="labels, which queues such as Kueue read"
    )
    annotations: Annotated[dict[str, str], BeforeValidator(few_entries)] = Field(
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


class Resources(Part):
    """The resources of one container."""

    requests: Annotated[dict[str, Quantity], BeforeValidator(few_entries)] = Field(
        default={}, description="amounts that the scheduler reserves, by resource, such as {cpu: 50m, memory: 96Mi}"
    )
    limits: Annotated[dict[str, Quantity], BeforeValidator(few_entries)] = Field(
        default={},
        description="the most that the container may use, by resource; equal to requests in a Guaranteed pod",
    )

    @field_validator("limits")
    @classmethod
    def _enough(cls, limits: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        requests: dict[str, str] = info.data.get("requests") or {}
        known = {name: (parse_quantity(requests.get(name)), parse_quantity(limit)) for name, limit in limits.items()}
        raise_problems(
            [
                ((name,), f"{limits[name]} is less than the request of {requests[name]}")
                for name, (request, limit) in known.items()
                if request is not None and limit is not None and limit < request
            ]
        )
        return limits


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

    colocate: bool = Field(
        default=False, description="true: run the launcher inside worker 0; false: run it in a pod of its own"
    )
    template: dict[str, JsonValue] | None = Field(
        default=None,
        description="pod template of the launcher, kept as written: tolerations, service account, resources. "
        "Placement, labels and the pod's security context come from the workers' template unless they are set here",
    )
    resources: Resources | None = Field(
        default=None,
        description="resources of the launcher's container, also inside worker 0, unless its template has resources; "
        "by default small requests, and limits if the worker has limits",
    )

    @field_validator("template")
    @classmethod
    def _own_pod(cls, template: dict[str, JsonValue] | None, info: ValidationInfo) -> dict[str, JsonValue] | None:
        if template is not None and info.data.get("colocate"):
            raise ValueError("has no effect when colocate is true: remove one of the two")
        raise_problems(mapping_problems(template or {}))
        return template


def _parameter(parameter: AlgorithmParameter, is_optional: bool = False) -> Any:
    """Return the field of an algorithm's parameter: its default (None if it is optional), range and sentence."""
    return Field(
        default=None if is_optional else parameter.default,
        gt=parameter.above,
        ge=parameter.at_least,
        le=parameter.at_most,
        description=parameter.description,
    )


class ScheduleStage(Part):
    """A stage of the schedule: new values from a step on. Values that are not set stay as they were."""

    from_step: int = Field(ge=1, le=INT32, description="the number of updates after which the stage begins")
    algorithm: AlgorithmName | None = Field(default=None, description="the algorithm from this step on")
    density: float | None = _parameter(DENSITY, is_optional=True)
    period: int | None = _parameter(PERIOD, is_optional=True)


class Aggregation(Part):
    """How gradients are summed over ranks."""

    algorithm: AlgorithmName = Field(default=AUTO, description=EXPLAINED)
    density: float = _parameter(DENSITY)
    warmup_steps: int = _parameter(WARMUP_STEPS)
    wire: Annotated[str, OneOf(WIRE.choices)] = _parameter(WIRE)
    dense_wire: Annotated[str, OneOf(DENSE_WIRE.choices)] = _parameter(DENSE_WIRE)
    selection: Annotated[str, OneOf(SELECTION.choices)] = _parameter(SELECTION)
    momentum_correction: bool = _parameter(MOMENTUM_CORRECTION)
    period: int = _parameter(PERIOD)
    outer_learning_rate: float = _parameter(OUTER_LEARNING_RATE)
    outer_momentum: float = _parameter(OUTER_MOMENTUM)
    matrix_rank: int = _parameter(MATRIX_RANK)
    overlap: Annotated[str, OneOf(OVERLAP.choices)] = _parameter(OVERLAP)
    schedule: list[ScheduleStage] = Field(
        default=[],
        max_length=MOST_STAGES,
        description="changes during the run, in the order of their steps, such as sparse early and dense late",
    )

    @model_validator(mode="after")
    def _has_an_allowed_schedule(self) -> Aggregation:
        stages = [Stage(stage.from_step, stage.algorithm, stage.density, stage.period) for stage in self.schedule]
        try:
            check_schedule(self.algorithm, self.warmup_steps, self.momentum_correction, stages)
        except ArgumentError as error:
            raise ValueError(f"{error.what}; {error.next_step}") from None
        return self

    @model_validator(mode="after")
    def _has_an_allowed_period(self) -> Aggregation:
        if self.algorithm not in CHOICES and not is_foreign(self.algorithm):
            try:
                find_algorithm(self.algorithm).check_period(self.period)
            except ArgumentError as error:
                raise ValueError(f"{error.what}; {error.next_step}") from None
        return self

    @model_validator(mode="after")
    def _has_dense_settings_that_work(self) -> Aggregation:
        used = [self.algorithm, *(stage.algorithm for stage in self.schedule if stage.algorithm)]
        if self.dense_wire != DENSE_WIRE.default and not any(map(reads_dense_wire, used)):
            text = f"'{self.dense_wire}' has no effect: {explain_dense_wire(self.algorithm)}"
            raise_problems([(("denseWire",), text)])
        if self.overlap != OVERLAP.default and (reason := explain_overlap(used)):
            raise_problems([(("overlap",), f"'{self.overlap}' does not work: {reason}")])
        return self


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
    def _tiers(cls, memory: str | None, info: ValidationInfo) -> str | None:
        disk = info.data.get("size_limit")
        if memory and disk and in_bytes(memory) > in_bytes(disk):
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


class Checkpoint(Part):
    """Where and how often the training state is saved."""

    claim_name: ObjectName = Field(
        description="persistent volume claim for checkpoints; it must be ReadWriteMany if workers are on several "
        "nodes. A local run saves in its run directory"
    )
    path: Annotated[
        str,
        StringConstraints(max_length=1024, pattern=r"^[^/\x00]"),
        Allowed("a relative path inside the claim, without '..'"),
    ] = Field(
        default="checkpoints",
        description="directory in the claim",
        json_schema_extra=rules(("!self.matches('(^|/)[.][.](/|$)')", "leaves the claim: '..' is not allowed")),
    )
    every_steps: int = Field(default=500, ge=1, le=INT32, description="number of steps between two checkpoints")
    keep: int = Field(default=3, ge=1, le=INT32, description="number of checkpoints to keep")

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        if ".." in path.split("/"):
            raise ValueError(f"{path!r} leaves the claim: '..' is not allowed")
        return path


class Topology(Part):
    """How close to each other workers are placed."""

    key: Annotated[
        str,
        StringConstraints(max_length=317, pattern=_LABEL_KEY),
        Allowed("a label of nodes, such as topology.kubernetes.io/zone"),
    ] = Field(description="label of nodes that names their zone, rack or block")
    mode: Literal["Preferred", "Required"] = Field(
        default="Preferred",
        description="Preferred: the scheduler puts workers into one zone, rack or block if they fit; Required: workers "
        "that do not fit wait",
    )


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
        default=None,
        ge=0,
        le=INT32,
        description="seconds after which a finished job is deleted; by default it is kept",
    )
    clean_pod_policy: Literal["Running", "All", "None"] = Field(
        default="Running",
        description="which pods are deleted when the job ends: those that still run, all, or none",
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


class Spec(Part):
    """What runs, and on how many ranks."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.runPolicy.schedulingPolicy.minAvailable) || "
                "self.runPolicy.schedulingPolicy.minAvailable <= self.workers + (self.launcher.colocate ? 0 : 1)",
                "runPolicy.schedulingPolicy.minAvailable is more than the job's pods (workers and launcher)",
            )
        )
    )

    workers: int = Field(default=1, ge=1, le=10_000, description="number of worker pods")
    slots_per_worker: int = Field(
        default=1,
        ge=1,
        le=256,
        description="ranks per worker pod; also its number of GPUs if the template requests GPUs",
    )
    spread: Literal["Node", "None"] = Field(
        default="Node", description="Node: at most one worker per node; None: workers may share a node"
    )
    topology: Topology | None = Field(
        default=None, description="places workers close to each other; by default anywhere, as `spread` allows"
    )
    mpi_implementation: Literal["MPICH", "OpenMPI"] = Field(default="MPICH", description="the MPI library in the image")
    template: Annotated[dict[str, JsonValue], WithJsonSchema(WORKER_TEMPLATE)] = Field(
        description="pod template of the workers, kept as written; the container called `worker` (or the only "
        "container) needs image and command"
    )
    launcher: Launcher = Field(default=Launcher(), description="the pod that starts MPI")
    source: Source | None = Field(
        default=None, description="the code, if it is not in the image; each worker fetches it before it starts"
    )
    setup: Setup | None = Field(default=None, description="Python packages that the image lacks")
    aggregation: Aggregation = Field(default=Aggregation(), description="how gradients are summed")
    dataset: Dataset | None = Field(default=None, description="the training data and its cache on each node")
    checkpoint: Checkpoint | None = Field(default=None, description="where and how often the training state is saved")
    run_policy: RunPolicy = Field(default=RunPolicy(), description="when the job starts, ends and is restarted")

    @field_validator("template")
    @classmethod
    def _template(cls, template: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        raise_problems(template_problems(template, info.data.get("slots_per_worker")))
        return template

    @field_validator("dataset")
    @classmethod
    def _fits(cls, dataset: Dataset | None, info: ValidationInfo) -> Dataset | None:
        """Refuse a cache that needs more memory than the container's limit: it would end in an OOM kill."""
        limit = memory_limit(info.data.get("template") or {})
        if dataset is None or limit is None:
            return dataset
        cache, sizes = dataset.cache, list[str]()
        if cache.medium == "Memory" and (cache.size_limit or cache.memory_limit):
            sizes.append(cache.size_limit or cache.memory_limit or "0")
        if cache.memory_limit:
            sizes.append(cache.memory_limit)
        if sum(map(in_bytes, sizes)) > limit:
            field = "sizeLimit" if cache.medium == "Memory" and cache.size_limit else "memoryLimit"
            text = f"{' and '.join(sizes)} in memory are more than the worker's memory limit of {limit:,} bytes"
            advice = "they count against it: raise resources.limits.memory, or lower the cache's limits"
            path: Path = ("cache", field)
            raise_problems([(path, f"{text}; {advice}")])
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
                raise_problems([(path, f"{wanted} is more than the job's {pods} pods (workers and launcher)")])
        return policy
