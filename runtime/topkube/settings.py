"""Every environment variable of TopKube, in one class.

`topkube run` (and, on a cluster, the operator) sets them from the TrainingJob; a person may set them by hand for a
script that is started with plain `mpiexec`. Code takes a `Settings`. Variables of other programs are in environment.py;
no other module reads `os.environ`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topkube.errors import SettingsError

MOST_CONNECTIONS = 16
"""The most connections between two ranks."""


def _setting(variable: str, default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"variable": variable, "help": help, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """The variables of this process, parsed and checked. A field's `metadata` holds the variable's name, its help text
    and its choices."""

    # kernels
    simd: str = _setting(
        "TOPKUBE_SIMD", "auto", "instruction set of the CPU kernels", ("auto", "avx512", "avx2", "portable")
    )
    threads: int = _setting("TOPKUBE_THREADS", 1, "threads of one kernel call, 1 or more")
    # world
    ranks_per_node: str = _setting(
        "TOPKUBE_RANKS_PER_NODE",
        "",
        "ranks of each node in rank order, for example '2,2' or '3,1'; empty: ranks that share memory are a node",
    )
    expected_ranks: int = _setting(
        "TOPKUBE_EXPECTED_RANKS",
        0,
        "number of ranks that were started; 0: not checked. A difference shows that two MPIs are installed",
    )
    deadline_seconds: float = _setting("TOPKUBE_DEADLINE_SECONDS", 300.0, "longest wait inside a collective, seconds")
    links: str = _setting(
        "TOPKUBE_LINKS",
        "auto",
        "messages between nodes: tcp has TCP connections of its own, which take less processor time than those of MPI;"
        " mpi uses MPI; auto uses tcp, but mpi if there is RDMA or if nodes are on one machine",
        ("auto", "tcp", "mpi"),
    )
    connections: int = _setting(
        "TOPKUBE_CONNECTIONS",
        0,
        "TCP connections of TopKube between two ranks of different nodes, up to 16; each beyond the first has a"
        " thread. 0: one for every four threads that a rank may run, up to 4",
    )
    node_exchange: str = _setting(
        "TOPKUBE_NODE_EXCHANGE",
        "auto",
        "exchange within a node: auto uses shared memory for CPU tensors and NCCL for CUDA tensors; torch uses gloo for"
        " CPU tensors, through the code for CUDA tensors",
        ("auto", "torch"),
    )
    finite_check: str = _setting(
        "TOPKUBE_FINITE_CHECK",
        "auto",
        "what decides if a step is finite: host waits for the GPU at the end of each backward; auto leaves the decision"
        " to the GPU if it can; device does so for CPU tensors through gloo too",
        ("auto", "host", "device"),
    )
    device_graphs: bool = _setting(
        "TOPKUBE_DEVICE_GRAPHS",
        False,
        "on GPUs, launch the selection, encoding and decoding of a bucket as CUDA graphs",
    )
    # aggregation: the job's spec.aggregation
    algorithm: str = _setting(
        "TOPKUBE_ALGORITHM",
        "auto",
        "aggregation: auto, which lets the ranks choose; dense, which sends the whole gradient; or an algorithm's name",
    )
    density: float = _setting("TOPKUBE_DENSITY", 0.01, "share of a gradient that is sent, in (0, 1]")
    warmup_steps: int = _setting("TOPKUBE_WARMUP_STEPS", 0, "steps over which the density falls from 1 to its target")
    wire: str = _setting("TOPKUBE_WIRE", "bf16", "type of the values on the wire in training", ("fp32", "bf16", "fp16"))
    dense_wire: str = _setting(
        "TOPKUBE_DENSE_WIRE", "fp32", "type of dense gradients between nodes in training", ("fp32", "bf16", "fp16")
    )
    overlap: str = _setting(
        "TOPKUBE_OVERLAP",
        "backward",
        "what exchanges of gradients between nodes overlap with: backward, or dear: also with the next forward",
        ("backward", "dear"),
    )
    node_weights: str = _setting(
        "TOPKUBE_NODE_WEIGHTS",
        "equal",
        "own: auto may take onebit, with which every node has weights of its own between exchanges",
        ("equal", "own"),
    )
    selection: str = _setting("TOPKUBE_SELECTION", "topk", "how entries of a gradient are selected", ("topk", "mstopk"))
    check_weights: str = _setting(
        "TOPKUBE_CHECK_WEIGHTS",
        "error",
        "what happens if a comparison shows that ranks hold different weights",
        ("error", "warn", "off"),
    )
    check_weights_every: int = _setting(
        "TOPKUBE_CHECK_WEIGHTS_EVERY",
        100,
        "steps between two comparisons of the weights of all ranks; the first step is compared too",
    )
    momentum_correction: bool = _setting(
        "TOPKUBE_MOMENTUM_CORRECTION",
        False,
        "apply momentum to every shard before selection, instead of after the exchange",
    )
    period: int = _setting(
        "TOPKUBE_PERIOD",
        1,
        "steps from one exchange of the weights to the next (onebit, topk1bit, localsgd, diloco, sparseloco)",
    )
    outer_learning_rate: float = _setting(
        "TOPKUBE_OUTER_LEARNING_RATE", 0.7, "factor on the mean change of all nodes (diloco)"
    )
    delay: int = _setting(
        "TOPKUBE_DELAY",
        0,
        "1: with error feedback in the weights, an exchange overlaps with the next step, which does not see its result",
    )
    outer_momentum: float = _setting(
        "TOPKUBE_OUTER_MOMENTUM", 0.9, "Nesterov momentum of the mean change of all nodes (diloco)"
    )
    matrix_rank: int = _setting("TOPKUBE_MATRIX_RANK", 4, "rank of the approximation of each matrix (powersgd, acpsgd)")
    schedule: str = _setting(
        "TOPKUBE_SCHEDULE",
        "",
        'what changes at which step, as JSON: `[{"fromStep": 2000, "algorithm": "dense"}]`; also `density`, `period`',
    )
    # the dataset and its cache: the job's spec.dataset
    dataset_uri: str = _setting("TOPKUBE_DATASET_URI", "", "URI of the dataset: any URI that fsspec opens")
    dataset_mount: str = _setting(
        "TOPKUBE_DATASET_MOUNT",
        "",
        "path under which scripts open the dataset: CachedDataset(path) reads TOPKUBE_DATASET_URI",
    )
    dataset_view: str = _setting(
        "TOPKUBE_DATASET_VIEW",
        "",
        "directory in which a worker's pod shows the dataset's files; they are mounted read-only",
    )
    cache_directory: str = _setting(
        "TOPKUBE_CACHE_DIRECTORY", "~/.cache/topkube/data", "the cache's directory on a disk of the node"
    )
    cache_sharing: str = _setting(
        "TOPKUBE_CACHE_SHARING",
        "auto",
        "who may use the cache's directory. private: only its user; group: its user and its group; auto: only its user,"
        " unless the directory already admits others",
        ("auto", "private", "group"),
    )
    cache_size_limit: int = _setting(
        "TOPKUBE_CACHE_SIZE_LIMIT", 0, "maximum bytes on disk per node; 0: the size of the disk"
    )
    cache_free_percent: int = _setting(
        "TOPKUBE_CACHE_FREE_PERCENT", 0, "percentage of the disk that stays free; 0: 5%, at most 1 GiB"
    )
    cache_memory_limit: int = _setting(
        "TOPKUBE_CACHE_MEMORY_LIMIT", 0, "maximum bytes of samples in memory per node; 0: the memory tier is off"
    )
    cache_memory_directory: str = _setting(
        "TOPKUBE_CACHE_MEMORY_DIRECTORY", "/dev/shm", "directory of the memory tier, on a file system in memory"
    )
    cache_prefetch: int = _setting(
        "TOPKUBE_CACHE_PREFETCH", 1, "1: fill the cache ahead of the training loop; 0: do not"
    )
    # the run
    job_name: str = _setting("TOPKUBE_JOB_NAME", "", "name of the TrainingJob, for messages and files")
    job_uid: str = _setting(
        "TOPKUBE_JOB_UID",
        "",
        "uid of the TrainingJob: distinguishes its attempts from those of another job of the same name",
    )
    run_directory: str = _setting(
        "TOPKUBE_RUN_DIRECTORY",
        "",
        "directory for the ranks' progress, metrics and failure reports; empty: none are written",
    )
    checkpoint_directory: str = _setting(
        "TOPKUBE_CHECKPOINT_DIRECTORY", "", "directory of the checkpoints; empty: no checkpoints"
    )
    checkpoint_every: int = _setting("TOPKUBE_CHECKPOINT_EVERY", 500, "steps between two checkpoints")
    checkpoint_keep: int = _setting("TOPKUBE_CHECKPOINT_KEEP", 3, "number of checkpoints that are kept")
    trace_directory: str = _setting(
        "TOPKUBE_TRACE_DIRECTORY", "", "directory in which every rank writes a trace of some steps; empty: no trace"
    )
    trace_steps: int = _setting("TOPKUBE_TRACE_STEPS", 10, "number of steps in a trace")
    log: str = _setting("TOPKUBE_LOG", "", "loggers of rank 0, with commas: tensorboard, mlflow, wandb")
    log_directory: str = _setting(
        "TOPKUBE_LOG_DIRECTORY",
        "",
        "directory of the loggers; empty: the directory `logs` beside the checkpoints, or in the run's directory",
    )
    attempt: int = _setting("TOPKUBE_ATTEMPT", 1, "number of this attempt of the job, from 1")
    # inside pods
    launch_plan: str = _setting(
        "TOPKUBE_LAUNCH", "", "the plan that `topkube launch` carries out (JSON), written by the operator"
    )
    worker_plan: str = _setting(
        "TOPKUBE_WORKER", "", "the plan of this `topkube worker` (JSON), written by the operator"
    )
    source_plan: str = _setting(
        "TOPKUBE_SOURCE", "", "the plan of `topkube fetch-source` (JSON), written by the operator"
    )
    source_directory: str = _setting(
        "TOPKUBE_SOURCE_DIRECTORY", "", "folder of the job's source (spec.source): first on the ranks' PYTHONPATH"
    )
    packages_directory: str = _setting(
        "TOPKUBE_PACKAGES_DIRECTORY",
        "",
        "folder of the job's packages (spec.setup): on the ranks' PYTHONPATH after the source, its bin on their PATH",
    )
    pod_ip: str = _setting("TOPKUBE_POD_IP", "", "address of this pod")
    node_name: str = _setting("TOPKUBE_NODE_NAME", "", "node of this pod")
    credentials_directory: str = _setting(
        "TOPKUBE_CREDENTIALS",
        "/etc/topkube/credentials",
        "directory of the certificates, keys and tokens of launcher and worker",
    )
    termination_log: str = _setting(
        "TOPKUBE_TERMINATION_LOG",
        "/dev/termination-log",
        "file in which launcher and worker write their termination message",
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Return the settings in `environment` (default: that of this process). Raises SettingsError, which names the
        variable."""
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
        def check_least(name: str, least: float) -> None:
            if not getattr(self, name) >= least:
                variable = type(self).__dataclass_fields__[name].metadata["variable"]
                raise SettingsError(
                    f"{variable}={getattr(self, name)} is below {least}", next_step=f"unset {variable} or correct it"
                )

        for name, least in [
            ("threads", 1),
            ("expected_ranks", 0),
            ("connections", 0),
            ("warmup_steps", 0),
            ("period", 1),
            ("matrix_rank", 1),
            ("cache_size_limit", 0),
            ("cache_free_percent", 0),
            ("cache_memory_limit", 0),
            ("cache_prefetch", 0),
            ("check_weights_every", 1),
            ("checkpoint_every", 1),
            ("checkpoint_keep", 1),
            ("attempt", 1),
            ("trace_steps", 1),
        ]:
            check_least(name, least)
        if self.connections > MOST_CONNECTIONS:
            raise SettingsError(
                f"TOPKUBE_CONNECTIONS={self.connections} is above {MOST_CONNECTIONS}",
                next_step="unset it: a few connections fill a link",
            )
        if not self.deadline_seconds > 0:
            raise SettingsError(
                f"TOPKUBE_DEADLINE_SECONDS={self.deadline_seconds} is not above 0",
                next_step="set it to a number of seconds, for example 300",
            )
        if not 0 < self.density <= 1:
            raise SettingsError(
                f"TOPKUBE_DENSITY={self.density} is outside (0, 1]",
                next_step="set it to the share of entries to send, for example 0.01",
            )

    def to_environment(self) -> dict[str, str]:
        """Return the variables that differ from their defaults; `from_environment` turns them into the same
        settings."""
        return {
            entry.metadata["variable"]: str(getattr(self, entry.name))
            for entry in dataclasses.fields(self)
            if getattr(self, entry.name) != entry.default
        }

    @property
    def run_path(self) -> Path | None:
        """The run's directory; None if the ranks write no reports."""
        return Path(self.run_directory) if self.run_directory else None


def list_set_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of `Settings` that are set, as text."""
    environment = os.environ if environment is None else environment
    names = (entry.metadata["variable"] for entry in dataclasses.fields(Settings))
    return {name: environment[name] for name in names if name in environment}


_SWITCH = {"true": True, "1": True, "false": False, "0": False}


def _parse(variable: str, raw: str, kind: type) -> Any:
    try:
        return _SWITCH[raw.lower()] if kind is bool else kind(raw)
    except (ValueError, KeyError):
        expected_kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
        raise SettingsError(
            f"{variable}={raw!r} is not {expected_kind}", next_step=f"unset {variable} or correct it"
        ) from None
