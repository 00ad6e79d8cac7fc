"""The lines of `topkube doctor` about GPUs: driver, compute capability, a kernel that runs, NCCL, and the way to the
network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from topkube.cli.doctor.check import Check, report_ok
from topkube.cli.doctor.gpu_probe import GpuAnswer
from topkube.telemetry.bar import format_bytes

_PROBE_SECONDS = 120
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
OLDEST_CAPABILITY = (8, 0)
"""The oldest devices that the kernels are compiled for."""


def check_gpus() -> Iterator[Check]:
    """Ask the GPUs of this machine in a process of its own, and report them."""
    if shutil.which("nvidia-smi") is None and not any(path.exists() for path in _DRIVER_FILES):
        yield report_ok("cuda", "no NVIDIA driver here; training runs on the processor")
        return
    command = [sys.executable, "-P", "-m", "topkube.cli.doctor.gpu_probe"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Check(
            "cuda",
            "fail",
            f"no GPU answered within {_PROBE_SECONDS} s: a GPU or the driver hangs",
            "read the kernel log for Xid errors (dmesg), then restart the node",
        )
        return
    try:
        answer = GpuAnswer.read(ended.stdout.strip().rpartition("\n")[2])
    except (ValueError, KeyError, TypeError):
        last = next(iter(reversed(ended.stderr.strip().splitlines())), f"exit code {ended.returncode}")
        yield Check("cuda", "fail", f"the GPUs cannot be asked: {last}", " ".join(command))
        return
    yield from describe_gpus(answer)


def describe_gpus(answer: GpuAnswer) -> Iterator[Check]:
    """Yield the lines about the GPUs of `answer`."""
    driver = f"driver {answer.driver or 'of unknown version'}"
    if not answer.gpus:
        cause = f"is built for CUDA {answer.torch_cuda}" if answer.torch_cuda else "is built for the CPU alone"
        step = (
            "request nvidia.com/gpu in the pod, and check that the driver is as new as torch's CUDA"
            if answer.torch_cuda
            else "install a build of torch for CUDA"
        )
        yield Check("cuda", "warn", f"{driver}, but torch, which {cause}, finds no GPU", step)
        return
    yield report_ok("cuda", f"{len(answer.gpus)} GPU(s), {driver}, torch for CUDA {answer.torch_cuda}")
    for number, gpu in enumerate(answer.gpus):
        name = f"gpu {number}"
        facts = f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {gpu.capability}"
        if " MIG " in gpu.name:
            yield Check(name, "fail", f"{facts}: a part of a GPU (MIG)", "request whole GPUs (nvidia.com/gpu)")
        elif tuple(map(int, gpu.capability.split("."))) < OLDEST_CAPABILITY:
            oldest = ".".join(map(str, OLDEST_CAPABILITY))
            yield Check(name, "fail", f"{facts}; the kernels need {oldest}", "use an A100 or a newer GPU")
        elif gpu.kernel:
            step = "install a build with CUDA kernels (TOPKUBE_CUDA=on), for a driver as new as its nvcc"
            yield Check(name, "fail", f"{facts}; the kernels do not work: {gpu.kernel}", step)
        else:
            yield report_ok(name, f"{facts}; the kernels return the same bits as on the processor")
    if answer.nccl:
        yield report_ok("nccl", answer.nccl)
    else:
        step = "install a build of torch with NCCL, or run one rank per node"
        yield Check("nccl", "warn", "torch has no NCCL, which ranks of one node need", step)
    yield report_ok(
        "cuda to network",
        "directly: this MPI takes device pointers"
        if answer.mpi_takes_device_pointers
        else "through pinned host memory: this MPI takes no device pointers",
    )
