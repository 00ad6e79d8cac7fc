"""`spec` of a TrainingJob: what the user asks for.

Field names follow the Kubeflow MPIJob if it has the same field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, ValidationInfo, WithJsonSchema, field_validator

from topkube.job.base.part import Part, Path, declare_rules, raise_problems
from topkube.job.base.quantity import parse_bytes
from topkube.job.fields.aggregation import Aggregation
from topkube.job.fields.checkpoint import Checkpoint
from topkube.job.fields.dataset import Dataset
from topkube.job.fields.launcher import Launcher
from topkube.job.fields.run_policy import RunPolicy
from topkube.job.fields.source import Setup, Source
from topkube.job.fields.topology import Topology
from topkube.job.template import WORKER_TEMPLATE, find_memory_limit, find_template_problems


class Spec(Part):
    """What runs, and on how many ranks."""

    model_config = ConfigDict(
        json_schema_extra=declare_rules(
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
    def _check_template(cls, template: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        raise_problems(find_template_problems(template, info.data.get("slots_per_worker")))
        return template

    @field_validator("dataset")
    @classmethod
    def _check_cache_fits_memory(cls, dataset: Dataset | None, info: ValidationInfo) -> Dataset | None:
        """Refuse a cache that needs more memory than the container may use: the kernel would kill the worker."""
        limit = find_memory_limit(info.data.get("template") or {})
        if dataset is None or limit is None:
            return dataset
        cache, sizes = dataset.cache, list[str]()
        if cache.medium == "Memory" and (cache.size_limit or cache.memory_limit):
            sizes.append(cache.size_limit or cache.memory_limit or "0")
        if cache.memory_limit:
            sizes.append(cache.memory_limit)
        if sum(map(parse_bytes, sizes)) > limit:
            field = "sizeLimit" if cache.medium == "Memory" and cache.size_limit else "memoryLimit"
            text = f"{' and '.join(sizes)} in memory are more than the worker's memory limit of {limit:,} bytes"
            advice = "they count against it: raise resources.limits.memory, or lower the cache's limits"
            path: Path = ("cache", field)
            raise_problems([(path, f"{text}; {advice}")])
        return dataset

    @field_validator("run_policy")
    @classmethod
    def _check_min_available(cls, policy: RunPolicy, info: ValidationInfo) -> RunPolicy:
        min_available, workers = policy.scheduling_policy.min_available, info.data.get("workers")
        launcher = info.data.get("launcher")
        if min_available is not None and workers is not None and launcher is not None:
            pods = workers + (0 if launcher.colocate else 1)
            if min_available > pods:
                path: Path = ("schedulingPolicy", "minAvailable")
                raise_problems([(path, f"{min_available} is more than the job's {pods} pods (workers and launcher)")])
        return policy
