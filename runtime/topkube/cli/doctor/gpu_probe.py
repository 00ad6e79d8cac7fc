"""The program with which `topkube doctor` asks the GPUs, separate because a broken driver can end or block the process
that uses it.

python -m topkube.cli.doctor.gpu_probe prints the answer as one line of JSON
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ELEMENTS, _KEPT = 100_003, 1_000
_DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine. `kernel` is empty if TopKube's kernels ran on it with the right results; otherwise it
    holds the reason."""

    name: str
    capability: str
    memory_bytes: int
    kernel: str


@dataclass(frozen=True)
class GpuAnswer:
    """What torch, the driver and MPI report. `nccl` is empty if torch has no NCCL; `driver` if the kernel does not show
    it."""

    torch_cuda: str
    driver: str
    nccl: str
    mpi_takes_device_pointers: bool
    gpus: tuple[Gpu, ...]

    @classmethod
    def read(cls, text: str) -> GpuAnswer:
        """Return the answer that `main` printed. Raises ValueError, KeyError or TypeError if it is not one."""
        fields = json.loads(text)
        return cls(**{**fields, "gpus": tuple(Gpu(**gpu) for gpu in fields["gpus"])})


def probe_gpus() -> GpuAnswer:
    """Ask torch, the driver and MPI, and run the kernels on every GPU that torch can use."""
    import torch

    from topkube.collectives.device.cuda_aware import mpi_takes_device_pointers

    cuda: Any = torch.cuda
    count = cuda.device_count() if cuda.is_available() else 0
    return GpuAnswer(
        torch_cuda=str(torch.version.cuda or ""),
        driver=_DRIVER.read_text().strip() if _DRIVER.exists() else "",
        nccl=".".join(map(str, cuda.nccl.version())) if count and torch.distributed.is_nccl_available() else "",
        mpi_takes_device_pointers=mpi_takes_device_pointers(),
        gpus=tuple(_probe_gpu(torch.device("cuda", index)) for index in range(count)),
    )


def _probe_gpu(device: torch.device) -> Gpu:
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    try:
        kernel = run_kernels(device)
    except Exception as error:  # a report: whatever is broken becomes its text
        kernel = f"{type(error).__name__}: {error}"
    return Gpu(properties.name, f"{properties.major}.{properties.minor}", properties.total_memory, kernel)


def run_kernels(device: torch.device) -> str:
    """Select and encode entries on `device`, and compare every bit with the CPU. Return "" if all are equal, otherwise
    what differs. Raises DeviceError if the kernels cannot be launched."""
    import torch

    from topkube import kernels

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_ELEMENTS, generator=generator)
    expected = kernels.topk(x, _KEPT)
    indices, values = kernels.topk(x.to(device), _KEPT)
    buffer = kernels.encode(indices, values, _ELEMENTS, wire="bf16")
    pairs = {
        "indices": (expected[0], indices),
        "values": (expected[1], values),
        "encoded bytes": (kernels.encode(*expected, _ELEMENTS, wire="bf16"), buffer),
    }
    different = [name for name, (right, computed) in pairs.items() if _read_bytes(right) != _read_bytes(computed)]
    return f"wrong results of topk on {device}: {', '.join(different)}" if different else ""


def _read_bytes(array: Any) -> bytes:
    import torch

    return bytes(torch.as_tensor(array).cpu().contiguous().view(torch.uint8).numpy().tobytes())


def main() -> None:
    """Print the answer."""
    print(json.dumps(dataclasses.asdict(probe_gpus())))


if __name__ == "__main__":
    main()
