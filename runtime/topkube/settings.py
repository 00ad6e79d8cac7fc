"""Every environment variable that TopKube reads, in one class.

`topkube run` (and, on a cluster, the operator) sets them from the TrainingJob; a person may set them by hand for a
script that is started with plain `mpiexec`. Code takes a `Settings`; nothing else reads `os.environ`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topkube.errors import SettingsError


def _setting(variable: str, default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"variable": variable, "help": help, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """The environment, read once. A field's `metadata` carries the variable's name, its help text and its choices."""

    # kernels
    simd: str = _setting(
        "TOPKUBE_SIMD", "auto", "instruction set of the CPU kernels", ("auto", "avx512", "avx2", "portable")
    )
    threads: int = _setting("TOPKUBE_THREADS", 1, "threads of one kernel call, 1 or more")
    # world
    ranks_per_node: str = _setting(
        "TOPKUBE_RANKS_PER_NODE",
        "",
        "declares the nodes: ranks of each node in rank order, '2,2' or '3,1'; empty: found from shared memory",
    )
    expected_ranks: int = _setting(
        "TOPKUBE_EXPECTED_RANKS", 0, "ranks that were started; 0: not checked. Tells two MPIs apart"
    )
    deadline_seconds: float = _setting("TOPKUBE_DEADLINE_SECONDS", 300.0, "longest wait inside one collective, seconds")
    node_exchange: str = _setting(
        "TOPKUBE_NODE_EXCHANGE",
        "auto",
        "training inside a node: auto is shared memory for CPU tensors and NCCL for CUDA tensors; torch: gloo for CPU"
        " tensors, through the path of CUDA tensors",
        ("auto", "torch"),
    )
    # aggregation: the job's spec.aggregation
    algorithm: str = _setting("TOPKUBE_ALGORITHM", "auto", "aggregation: auto, dense, or an algorithm's name")
    density: float = _setting("TOPKUBE_DENSITY", 0.01, "share of a gradient that is sent, in (0, 1]")
    warmup_steps: int = _setting("TOPKUBE_WARMUP_STEPS", 0, "steps over which the density falls from 1 to its target")
    wire: str = _setting("TOPKUBE_WIRE", "bf16", "values on the wire in training", ("fp32", "bf16", "fp16"))
    selection: str = _setting("TOPKUBE_SELECTION", "topk", "how entries are chosen", ("topk", "mstopk"))
    # the dataset and its cache: the job's spec.dataset
    dataset_uri: str = _setting("TOPKUBE_DATASET_URI", "", "where the dataset is: anything fsspec opens")
    dataset_mount: str = _setting(
        "TOPKUBE_DATASET_MOUNT", "", "path that stands for the dataset: CachedDataset(path) reads TOPKUBE_DATASET_URI"
    )
    dataset_view: str = _setting(
        "TOPKUBE_DATASET_VIEW",
        "",
        "where a worker's pod shows the dataset's files; the mount is a read-only look at it",
    )
    cache_directory: str = _setting(
        "TOPKUBE_CACHE_DIRECTORY", "~/.cache/topkube/data", "the cache's directory on a disk of the node"
    )
    cache_size_limit: int = _setting(
        "TOPKUBE_CACHE_SIZE_LIMIT", 0, "most bytes on disk per node; 0: what the disk holds"
    )
    cache_free_percent: int = _setting(
        "TOPKUBE_CACHE_FREE_PERCENT", 0, "share of the disk that stays free; 0: 5%, at most 1 GiB"
    )
    cache_memory_limit: int = _setting(
        "TOPKUBE_CACHE_MEMORY_LIMIT", 0, "most bytes of samples in memory per node; 0: the memory tier is off"
    )
    cache_memory_directory: str = _setting(
        "TOPKUBE_CACHE_MEMORY_DIRECTORY", "/dev/shm", "where the memory tier lies: a directory in memory"
    )
    cache_prefetch: int = _setting(
        "TOPKUBE_CACHE_PREFETCH", 1, "1: fill the cache ahead of the training loop; 0: do not"
    )
    momentum_correction: bool = _setting(
        "TOPKUBE_MOMENTUM_CORRECTION", False, "momentum before selection, on every shard, not after the exchange"
    )
    # the run
    job_name: str = _setting("TOPKUBE_JOB_NAME", "", "name of the TrainingJob, for messages and files")
    job_uid: str = _setting(
        "TOPKUBE_JOB_UID", "", "uid of the TrainingJob: tells its attempts from those of another job of the same name"
    )
    run_directory: str = _setting(
        "TOPKUBE_RUN_DIRECTORY", "", "where ranks leave progress and failure reports; empty: nowhere"
    )
    checkpoint_directory: str = _setting("TOPKUBE_CHECKPOINT_DIRECTORY", "", "where checkpoints are kept; empty: none")
    checkpoint_every: int = _setting("TOPKUBE_CHECKPOINT_EVERY", 500, "steps between two checkpoints")
    checkpoint_keep: int = _setting("TOPKUBE_CHECKPOINT_KEEP", 3, "checkpoints kept")
    attempt: int = _setting("TOPKUBE_ATTEMPT", 1, "number of this attempt at the job, from 1")
    # inside pods
    launch_plan: str = _setting("TOPKUBE_LAUNCH", "", "what `topkube launch` is to do (JSON), written by the operator")
    worker_plan: str = _setting("TOPKUBE_WORKER", "", "who this `topkube worker` is (JSON), written by the operator")
    pod_ip: str = _setting("TOPKUBE_POD_IP", "", "address of this pod")
    node_name: str = _setting("TOPKUBE_NODE_NAME", "", "node of this pod")
    credentials_directory: str = _setting(
        "TOPKUBE_CREDENTIALS", "/etc/topkube/credentials", "certificate, keys and tokens of launcher and worker"
    )
    termination_log: str = _setting(
        "TOPKUBE_TERMINATION_LOG", "/dev/termination-log", "where launcher and worker leave their last words"
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Settings from `environment` (default: the process's). Raises SettingsError naming the variable."""
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):
            variable, raw = entry.metadata["variable"], environment.get(entry.metadata["variable"])
            if raw is None or raw == "":
                continue
            values[entry.name] = _parse(variable, raw, type(entry.default))
            choices = entry.metadata["choices"]
            if choices and values[entry.name] not in choices:
                raise SettingsError(
                    f"{variable}={raw!r} is not one of {', '.join(choices)}",
                    next_step=f"unset {variable} or correct it",
                )
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        def positive(name: str, least: float) -> None:
            if not getattr(self, name) >= least:
                variable = type(self).__dataclass_fields__[name].metadata["variable"]
                raise SettingsError(
                    f"{variable}={getattr(self, name)} is below {least}", next_step=f"unset {variable} or correct it"
                )

        for name, least in [
            ("threads", 1),
            ("expected_ranks", 0),
            ("warmup_steps", 0),
            ("cache_size_limit", 0),
            ("cache_free_percent", 0),
            ("cache_memory_limit", 0),
            ("cache_prefetch", 0),
            ("checkpoint_every", 1),
            ("checkpoint_keep", 1),
            ("attempt", 1),
        ]:
            positive(name, least)
        if not self.deadline_seconds > 0:
            raise SettingsError(
                f"TOPKUBE_DEADLINE_SECONDS={self.deadline_seconds} is not above 0",
                next_step="give seconds, for example 300",
            )
        if not 0 < self.density <= 1:
            raise SettingsError(
                f"TOPKUBE_DENSITY={self.density} is outside (0, 1]",
                next_step="give the share of entries to send, for example 0.01",
            )

    def to_environment(self) -> dict[str, str]:
        """The variables that differ from their defaults; `from_environment` gives the same settings back."""
        return {
            entry.metadata["variable"]: str(getattr(self, entry.name))
            for entry in dataclasses.fields(self)
            if getattr(self, entry.name) != entry.default
        }

    @property
    def run_path(self) -> Path | None:
        """The run's directory, None where the ranks report to nobody."""
        return Path(self.run_directory) if self.run_directory else None


def launched_ranks(environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Which MPI's launcher started this process and how many ranks it started: ("", 0) where none did.

    Launchers say it in variables of their own: PMI_SIZE (MPICH, Intel MPI, Slurm's PMI), OMPI_COMM_WORLD_SIZE (Open
    MPI). They are read to tell a launcher of one MPI from a library of another, and for nothing else."""
    environment = os.environ if environment is None else environment
    for variable, launcher in [("OMPI_COMM_WORLD_SIZE", "Open MPI's mpiexec"), ("PMI_SIZE", "MPICH's mpiexec")]:
        if environment.get(variable, "").isdigit():
            return launcher, int(environment[variable])
    return "", 0


_SWITCH = {"true": True, "1": True, "false": False, "0": False}


def _parse(variable: str, raw: str, kind: type) -> Any:
    try:
        return _SWITCH[raw.lower()] if kind is bool else kind(raw)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
        raise SettingsError(
            f"{variable}={raw!r} is not {wanted}", next_step=f"unset {variable} or correct it"
        ) from None
