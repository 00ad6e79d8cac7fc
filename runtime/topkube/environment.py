"""The environment of this process, and what other programs say in it: launchers, MPI, torchrun, NCCL, glibc, kubectl.

TopKube's own variables are in settings.py. These two modules alone read `os.environ`: a ruff rule (`banned-api` in
pyproject.toml) refuses it elsewhere. Code that starts a child process passes on `copy_environment()`. To read another
variable, add a function here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def copy_environment() -> dict[str, str]:
    """Return a copy of this process's environment, to pass on to a child process."""
    return dict(os.environ)


def list_kubeconfig_paths() -> list[Path]:
    """Return the files that KUBECONFIG names, as kubectl reads it."""
    return [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]


@dataclass(frozen=True)
class ProcessLaunch:
    """The launcher of this process: the name of the MPI `launcher` and its number of `ranks` ("" and 0 if none),
    and the number of `processes` that torchrun or a similar launcher started (0 if there is none)."""

    launcher: str = ""
    ranks: int = 0
    processes: int = 0


_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Open MPI's own variable comes first: with Open MPI, PMI_RANK can only be inherited from another launcher, such as
Slurm."""
_LAUNCH_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPI_LOCAL", "MV2_COMM_WORLD_", "PALS_", "FLUX_TASK_")
_LAUNCH_VARIABLES = frozenset(
    {
        "OMPI_UNIVERSE_SIZE",  # with it, mpiexec of Open MPI 4 refuses to start
        "OMPI_FILE_LOCATION",
        "PRTE_LAUNCHED",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_GTIDS",
        "SLURM_TASK_PID",
    }
)
"""With `_LAUNCH_PREFIXES`: the variables in which MPI's launchers, Slurm, PALS and Flux write the place of a process
among those that they started, and how it reaches its launcher."""
_NO_LAUNCH_VARIABLES = ("PMIX_MCA_", "PMIX_PREFIX")
"""Settings of a person, although their names have one of `_LAUNCH_PREFIXES`."""


def drop_launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables by which a launcher names the place of a process that it started.

    A process in a Slurm allocation, or in a shell under mpiexec, has such variables. New ranks must not inherit them:
    MPI or a library would take each of them for the same rank of another world. Variables that describe the whole
    allocation, such as SLURM_JOB_ID, stay."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_NO_LAUNCH_VARIABLES) or not (name in _LAUNCH_VARIABLES or name.startswith(_LAUNCH_PREFIXES))
    }


def read_launched_rank(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the rank that an MPI launcher wrote into `environment` (default: that of this process); None if there is
    none."""
    environment = os.environ if environment is None else environment
    values = (environment.get(variable, "") for variable in _RANK_VARIABLES)
    return next((int(value) for value in values if value.isdigit()), None)


def read_process_launch(environment: Mapping[str, str] | None = None) -> ProcessLaunch:
    """Return what started this process, and how many processes it started.

    Launchers set variables of their own: PMI_SIZE (MPICH, Intel MPI, Slurm's PMI), OMPI_COMM_WORLD_SIZE (Open MPI),
    WORLD_SIZE and RANK (torchrun). They are used only to detect ranks that cannot reach each other."""
    environment = os.environ if environment is None else environment

    def read_number(variable: str) -> int:
        text = environment.get(variable, "")
        return int(text) if text.isdigit() else 0

    processes = read_number("WORLD_SIZE") if environment.get("RANK", "").isdigit() else 0
    for variable, launcher in [("OMPI_COMM_WORLD_SIZE", "Open MPI's mpiexec"), ("PMI_SIZE", "MPICH's mpiexec")]:
        if read_number(variable):
            return ProcessLaunch(launcher, read_number(variable), processes)
    return ProcessLaunch(processes=processes)


def read_torch_local_size(environment: Mapping[str, str] | None = None) -> int:
    """Return LOCAL_WORLD_SIZE, the ranks of this node, which torchrun and TopKube's launch layer set; 0 if it is not
    set."""
    text = (os.environ if environment is None else environment).get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else 0


@dataclass(frozen=True)
class TorchPlace:
    """The place of this process among those that a launcher started: its `rank` of `size`, the `local_size` ranks of
    its node, and the number of `nodes`."""

    rank: int
    size: int
    local_size: int
    nodes: int


def read_torch_place(environment: Mapping[str, str] | None = None) -> TorchPlace | None:
    """Return the place of this process by the variables that torchrun and TopKube's launch layer set (RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE); None if one of them is not set."""
    environment = os.environ if environment is None else environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    texts = [environment.get(name, "") for name in names]
    return TorchPlace(*map(int, texts)) if all(text.isdigit() for text in texts) else None


def choose_wandb_mode(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the mode of Weights & Biases: offline, or None if WANDB_MODE or WANDB_API_KEY is set, so that the library
    decides."""
    environment = os.environ if environment is None else environment
    return None if environment.get("WANDB_MODE") or environment.get("WANDB_API_KEY") else "offline"


def is_thread_count_set(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if OMP_NUM_THREADS or MKL_NUM_THREADS sets the number of threads of a rank, because a person or
    `topkube run` set it."""
    environment = os.environ if environment is None else environment
    return any(environment.get(variable) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def chooses_malloc(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if the environment decides how much free memory the heap keeps (MALLOC_TRIM_THRESHOLD_, or the
    tunables of glibc)."""
    environment = os.environ if environment is None else environment
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    return any(environment.get(name) for name in names) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")


def tune_messages() -> None:
    """Have MPICH's transport UCX copy 64 KiB instead of 8 KiB at a time to a TCP connection, unless the environment
    chooses another size. Has no effect after MPI has started, and none on other MPIs.

    Messages without a copy (a low UCX_RNDV_THRESH) need less processor time. But sender and receiver first agree on
    each of them, and these small messages wait behind the data in the other direction: a link of 100 Mbit/s then idles
    for a third of the time.
    """
    os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "64k")


def read_network_devices(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the devices in UCX_NET_DEVICES, to which MPICH limits its connections; none if it is not set."""
    environment = os.environ if environment is None else environment
    return [name for name in environment.get("UCX_NET_DEVICES", "").split(",") if name]


def read_visible_gpus(environment: Mapping[str, str] | None = None) -> str:
    """Return CUDA_VISIBLE_DEVICES, which limits and numbers the GPUs of this process; "" if it is not set."""
    environment = os.environ if environment is None else environment
    return environment.get("CUDA_VISIBLE_DEVICES", "")


def choose_gloo_device(name: str) -> None:
    """Have gloo listen on the network device called `name`, unless GLOO_SOCKET_IFNAME names another. Otherwise gloo
    listens at the address of the host name, which is a loopback address on many machines."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def does_nccl_order_launches(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if NCCL_LAUNCH_ORDER_IMPLICIT=1 makes NCCL run the collectives of all its groups in the order in
    which the process starts them."""
    environment = os.environ if environment is None else environment
    return environment.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
