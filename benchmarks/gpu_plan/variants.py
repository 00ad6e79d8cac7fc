"""Variants of the kernels, compiled and timed one after another on the same inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_plan import machine
from gpu_plan.device import Device
from gpu_plan.rows import Row, Rows
from topkube.kernels.cuda_library import CudaLibrary
from topkube.kernels.device import DeviceKernels

VARIANTS = {
    "default": (),
    "scalar loads": ("-DTOPKUBE_CUDA_VECTOR=0",),
    "one load ahead": ("-DTOPKUBE_CUDA_AHEAD=1",),
    "sixteen loads ahead": ("-DTOPKUBE_CUDA_AHEAD=16",),
    "segments": ("-DTOPKUBE_CUDA_SEGMENTS=1",),
}
"""Name of a variant, and the options by which nvcc compiles it (csrc/cuda/selection/variants.hpp)."""
_ELEMENTS = 25_557_032


def run(device: Device, rows: Rows, quick: bool, work: Path) -> None:
    """Compile and time every variant. The dry mode compiles one of them, if there is nvcc, and launches nothing."""
    for name, defines in list(VARIANTS.items())[: 2 if quick or device.dry else None]:
        rows.measure(f"variant {name}", lambda a=(name, defines): _measure(device, *a, work, rows.deadline + 60))
        device.free()


def _measure(device: Device, name: str, defines: tuple[str, ...], work: Path, end: float) -> Row:
    if machine.find_nvcc() is None:
        return {"defines": defines, "skipped": "there is no nvcc"}
    if device.dry and not defines:
        return {"defines": defines, "skipped": "the dry mode: the build has compiled it"}
    architecture = "90" if device.dry else "".join(map(str, torch.cuda.get_device_capability()))
    library = machine.build_variant(work / name.replace(" ", "-"), dict(os.environ), defines, architecture, end)
    loaded = CudaLibrary(library)
    if device.dry:
        return {"defines": defines, "build": loaded.build}
    kernels = DeviceKernels(loaded)
    x, residual = device.normal(_ELEMENTS), device.normal(_ELEMENTS)
    sum_ = torch.empty_like(x)
    narrow = x.to(torch.bfloat16)

    def milliseconds(launch: Callable[[], object]) -> float:
        return device.milliseconds(lambda _: launch())

    few, half = _ELEMENTS // 100, _ELEMENTS // 2
    return {
        "defines": defines,
        "build": loaded.build,
        "topk ms": milliseconds(lambda: kernels.topk(x, few)),
        "topk bf16 ms": milliseconds(lambda: kernels.topk(narrow, few)),
        "compress_ ms": milliseconds(lambda: kernels.compress_(x, residual, few, sum_)),
        "mstopk ms": milliseconds(lambda: kernels.mstopk(x, few, 30, 0)),
        "half ms": milliseconds(lambda: kernels.topk(x, half)),
    }
