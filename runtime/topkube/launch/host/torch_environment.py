"""The variables by which torch.distributed finds its ranks, with the names that torchrun gives them. Scripts for DDP or
FSDP then run unchanged."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping
from pathlib import Path

from topkube.settings import Settings

MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
DEFAULT_PORT = 29500
"""The port of rank 0 in a pod, as with torchrun. A job's container may set another MASTER_PORT."""


_ACCELERATOR_DEVICES = (
    *("nvidia[0-9]*", "nvidiactl", "nvhost-ctrl", "dxg"),  # NVIDIA: servers, Jetson, Windows' Linux subsystem
    *("kfd", "accel[0-9]*", "accel/accel*"),  # AMD; Gaudi, TPU
    *("davinci[0-9]*", "neuron[0-9]*", "cambricon*", "mthreads*", "vfio/[0-9]*"),
)
"""Patterns of files in /dev that show an accelerator."""


def build_rank_variables(rank: int, settings: Settings) -> dict[str, str]:
    """Return the variables of `rank`: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK for its node, and
    TORCHELASTIC_RUN_ID, by which libraries recognize a launcher that sets all of them. Return nothing if the launcher's
    number of ranks is unknown, as with plain mpiexec."""
    try:
        counts = [int(count) for count in settings.ranks_per_node.split(",")]
    except ValueError:
        return {}
    ends = list(itertools.accumulate(counts))
    if sum(counts) != settings.expected_ranks or not 0 <= rank < ends[-1]:
        return {}
    node = next(number for number, end in enumerate(ends) if rank < end)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ends[-1]),
        "LOCAL_RANK": str(rank - (ends[node] - counts[node])),
        "LOCAL_WORLD_SIZE": str(counts[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(counts)),
        "TORCHELASTIC_RUN_ID": settings.job_uid or settings.job_name or "topkube",
    }


def list_accelerate_variables(inherited: Mapping[str, str], devices: Path = Path("/dev")) -> dict[str, str]:
    """Return ACCELERATE_USE_CPU=true for a machine or pod without an accelerator, unless `inherited` sets it.

    Hugging Face accelerate needs this variable there. Without it, each rank trains alone on all the data, without a
    message."""
    if "ACCELERATE_USE_CPU" in inherited or has_accelerator(devices):
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Return True if the directory `devices` contains the file of a GPU or of another accelerator. The graphics of an
    Intel processor do not count, because most laptops have them and torch rarely uses them."""
    return any(any(devices.glob(pattern)) for pattern in _ACCELERATOR_DEVICES)


def find_free_port() -> int:
    """Return a TCP port that no process of this machine listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
