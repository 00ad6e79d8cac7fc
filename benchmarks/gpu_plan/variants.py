"""Variants of the kernels, compiled and timed one after another on the same inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_plan import machine
from gpu_plan.device import Device
from gpu_plan.rows import Row, Rows
from topkube.kernels import PreviousThreshold
from topkube.kernels.cuda_library import CudaLibrary
from topkube.kernels.device import DeviceKernels

VARIANTS = {
    "default": (),
    "cluster": ("-DTOPKUBE_CUDA_CLUSTER=1",),
    "scalar loads": ("-DTOPKUBE_CUDA_VECTOR=0",),
    "one load ahead": ("-DTOPKUBE_CUDA_AHEAD=1",),
    "sixteen loads ahead": ("-DTOPKUBE_CUDA_AHEAD=16",),
    "no reuse": ("-DTOPKUBE_CUDA_REUSE=0",),
}
"""Name of a variant, and the options by which nvcc compiles it (csrc/cuda/selection/variants.hpp).

The dry mode compiles the second: only nvcc can compile the launch of a cluster."""
_ELEMENTS, _SMALL = 25_557_032, 819_200


def run(device: Device, rows: Rows, quick: bool, work: Path) -> None:
    """Compile and time every variant. The dry mode compiles one of them, if there is nvcc, and launches nothing."""
    for name in list(VARIANTS)[: 2 if quick or device.dry else None]:
        rows.measure(f"variant {name}", lambda name=name: _measure(device, name, work, rows.deadline + 60))
        device.free()


def _measure(device: Device, name: str, work: Path, end: float) -> Row:
    defines = VARIANTS[name]
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
    x, residual = device.make_normal(_ELEMENTS), device.make_normal(_ELEMENTS)
    total, narrow, small = torch.empty_like(x), x.to(torch.bfloat16), x[:_SMALL]
    previous, previous_of_small = PreviousThreshold(x.device), PreviousThreshold(x.device)

    def measure(launch: Callable[[], object]) -> float:
        return device.measure_milliseconds(lambda _: launch())

    k, half_of_all, k_of_small = _ELEMENTS // 100, _ELEMENTS // 2, _SMALL // 100
    return {
        "defines": defines,
        "build": loaded.build,
        "topk ms": measure(lambda: kernels.topk(x, k)),
        "topk bf16 ms": measure(lambda: kernels.topk(narrow, k)),
        "compress_ ms": measure(lambda: kernels.compress_(x, residual, k, total)),
        "mstopk ms": measure(lambda: kernels.mstopk(x, k, 30, 0)),
        "half ms": measure(lambda: kernels.topk(x, half_of_all)),
        "topk again ms": measure(lambda: kernels.topk(x, k, previous)),
        "small topk ms": measure(lambda: kernels.topk(small, k_of_small)),
        "small topk again ms": measure(lambda: kernels.topk(small, k_of_small, previous_of_small)),
    }
