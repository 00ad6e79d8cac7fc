"""The TrainingJob as a whole: read strictly from a file, leniently from a cluster; the settings of its ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Literal

from pydantic import Field, ValidationError

from topkube.errors import JobError
from topkube.job.base.part import Part
from topkube.job.base.problems import list_problems, show_value
from topkube.job.base.quantity import parse_bytes
from topkube.job.base.reading import Document, check_extent, format_yaml, read_document
from topkube.job.metadata import Metadata
from topkube.job.spec import Spec
from topkube.job.status import Status
from topkube.job.template import find_worker_container
from topkube.settings import Settings

GROUP = "topkube.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"


class TrainingJob(Part):
    """A training, as its YAML describes it."""

    api_version: Literal["topkube.dev/v1alpha1"] = Field(description=f"always {API_VERSION}")
    kind: Literal["TrainingJob"] = Field(description=f"always {KIND}")
    metadata: Metadata = Field(description="the name of the job, and labels")
    spec: Spec = Field(description="what runs, and on how many ranks")
    status: Status | None = Field(default=None, description="written by the operator")

    @classmethod
    def from_yaml(cls, source: str | bytes | FilePath) -> TrainingJob:
        """Return the job of a YAML text or file. A `Path`, or one line that ends in .yaml, .yml or .json, is a file's
        path.

        Raises JobError with all mistakes; unknown fields are mistakes.
        """
        text, name = _read_text(source)
        return cls._validate(read_document(text, name), name)

    @classmethod
    def parse(cls, data: Any) -> TrainingJob:
        """Return the job of plain data (as YAML or JSON is read), as strictly as `from_yaml`."""
        return cls._validate(Document(data), "the job")

    @classmethod
    def from_cluster(cls, data: Mapping[str, Any], name: str = "the stored job") -> TrainingJob:
        """Return the job that a cluster stores. Fields that this version does not know are kept and written back,
        because a rollback must not break stored objects. Raises JobError, whose message begins with `name`."""
        check_extent(data.get("spec"), name, ("spec",))
        try:
            return cls.model_validate(data, extra="allow", by_name=False)
        except ValidationError as error:
            raise _build_mistakes_error(name, list_problems(error, cls, {})) from None

    @classmethod
    def _validate(cls, document: Document, name: str) -> TrainingJob:
        data = document.data
        if not isinstance(data, dict):
            raise JobError(
                f"{name} holds {show_value(data)}, not a {KIND}",
                next_step="start with apiVersion, kind, metadata, spec",
            )
        kind, version = data.get("kind"), data.get("apiVersion")
        if isinstance(kind, str) and kind.lower() != KIND.lower() and GROUP not in str(version):
            raise JobError(
                f"{name} is of kind {show_value(kind)} ({show_value(version)}), not a {KIND}",
                cause="another kind of Kubernetes object",
                next_step=f"give a file with apiVersion: {API_VERSION} and kind: {KIND}",
            )
        mistakes = document.mistakes
        check_extent(data, name)
        try:
            job = cls.model_validate(data, extra="forbid", by_name=False)
        except ValidationError as error:
            mistakes = mistakes + list_problems(error, cls, document.lines)
        if mistakes:
            raise _build_mistakes_error(name, mistakes)
        return job

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def ranks(self) -> int:
        """The number of ranks of the job."""
        return self.spec.workers * self.spec.slots_per_worker

    @property
    def container(self) -> dict[str, Any]:
        """The container of the workers, as written."""
        container: dict[str, Any] = find_worker_container(self.spec.template)
        return container

    @property
    def command(self) -> list[str]:
        """The command line of each rank: command and args."""
        return [*self.container["command"], *(self.container.get("args") or [])]

    @property
    def plain_environment(self) -> dict[str, str]:
        """The environment variables of the container that have a value (not valueFrom)."""
        entries = self.container.get("env") or []
        return {entry["name"]: entry.get("value") or "" for entry in entries if "valueFrom" not in entry}

    def scaled(self, workers: int | None = None, slots_per_worker: int | None = None) -> TrainingJob:
        """Return the job with other workers or slots, validated again. A GPU limit follows the slots."""
        data = self.to_dict()
        if workers is not None:
            data["spec"]["workers"] = workers
        if slots_per_worker is not None:
            data["spec"]["slotsPerWorker"] = slots_per_worker
            limits = (find_worker_container(data["spec"]["template"]).get("resources") or {}).get("limits") or {}
            if "nvidia.com/gpu" in limits:
                limits["nvidia.com/gpu"] = slots_per_worker
        return self.parse(data)

    def settings(self, **changes: Any) -> Settings:
        """Return the settings of the ranks; `changes` are further fields of Settings."""
        aggregation, checkpoint, dataset = self.spec.aggregation, self.spec.checkpoint, self.spec.dataset
        cache = dataset.cache if dataset else None
        settings = Settings(
            expected_ranks=self.ranks,
            algorithm=aggregation.algorithm,
            density=aggregation.density,
            warmup_steps=aggregation.warmup_steps,
            wire=aggregation.wire,
            dense_wire=aggregation.dense_wire,
            selection=aggregation.selection,
            momentum_correction=aggregation.momentum_correction,
            period=aggregation.period,
            outer_learning_rate=aggregation.outer_learning_rate,
            outer_momentum=aggregation.outer_momentum,
            delay=aggregation.delay,
            node_weights=aggregation.node_weights,
            matrix_rank=aggregation.matrix_rank,
            overlap=aggregation.overlap,
            schedule=json.dumps([stage.model_dump(by_alias=True, exclude_none=True) for stage in aggregation.schedule])
            if aggregation.schedule
            else "",
            dataset_uri=dataset.uri if dataset else "",
            dataset_mount=dataset.mount_path if dataset else "",
            cache_size_limit=parse_bytes(cache.size_limit) if cache and cache.size_limit else 0,
            cache_memory_limit=parse_bytes(cache.memory_limit) if cache and cache.memory_limit else 0,
            cache_prefetch=int(cache.prefetch) if cache else Settings.cache_prefetch,
            job_name=self.name,
            checkpoint_every=checkpoint.every_steps if checkpoint else Settings.checkpoint_every,
            checkpoint_keep=checkpoint.keep if checkpoint else Settings.checkpoint_keep,
        )
        return dataclasses.replace(settings, **changes)

    def environment(self, **changes: Any) -> dict[str, str]:
        """Return `settings` as environment variables."""
        return self.settings(**changes).to_environment()

    def to_dict(self) -> dict[str, Any]:
        """Return the job as plain data with YAML's names: what was written, without defaults."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    def to_yaml(self) -> str:
        return format_yaml(self.to_dict())


def _read_text(source: str | bytes | FilePath) -> tuple[str | bytes, str]:
    if isinstance(source, bytes):
        return source, "the job"
    if isinstance(source, str):
        if "\n" in source or not source.endswith((".yaml", ".yml", ".json")):
            return source, "the job"
        source = FilePath(source)
    try:
        return source.read_bytes(), str(source)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JobError(
            f"{str(source)!r} cannot be read: {reason}", next_step="pass the path of a TrainingJob's YAML file"
        ) from None


def _build_mistakes_error(name: str, problems: list[str]) -> JobError:
    count = "a mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    return JobError(
        f"{name} has {count}", problems, next_step="correct the values; docs/trainingjob.md explains every field"
    )
